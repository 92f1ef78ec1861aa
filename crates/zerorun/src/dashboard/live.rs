//! Live updates: sends additions to the records of runs as server-sent events.
//!
//! However fast a run is, there are at most ten events a second: rows that arrive between two events are sent
//! together, and many rows are reduced to a few (`metrics_columns`).

use super::api::{expert_loads, list_entry, open_run};
use super::http::{ContentKind, HttpRefusal, HttpRequest, encode, json_bytes, parse_query, write_head};
use super::metrics_columns::MetricsColumns;
use super::server_state::SharedServerState;
use candle_zero::runs::{MetricsLine, MetricsRow, NewRunLines, RecordedRun, RunTail};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The time between two events.
const INTERVAL: Duration = Duration::from_millis(100);
/// The time after which the states of the runs and the reports of their ranks are read again.
const STATE_INTERVAL: Duration = Duration::from_secs(1);
/// The time without news after which a comment shows that the connection still exists.
const QUIET: Duration = Duration::from_secs(15);
/// The maximum number of runs that a page can watch.
const MAX_RUNS: usize = 12;
/// The maximum number of rows of a run in one event.
const MAX_ROWS: usize = 100;

/// A run that a page watches.
pub(super) struct WatchedRun {
    id: String,
    run: RecordedRun,
    tail: RunTail,
    /// The state, the ranks and the loads of experts that were last sent.
    state: Value,
    ranks: Value,
    experts: Value,
}

/// Returns the runs that a request names, as `run=ID@POSITIONS`. After an interruption, the browser sends the id of the
/// last event, which has newer positions.
pub(super) fn tails(request: &HttpRequest, state: &SharedServerState) -> Result<Vec<WatchedRun>, HttpRefusal> {
    let last_event = request.header("last-event-id").and_then(parse_query);
    let query = last_event.as_ref().filter(|query| !query.is_empty()).unwrap_or(&request.query);
    let runs: Vec<&String> = query.iter().filter(|(name, _)| name == "run").map(|(_, value)| value).collect();
    if runs.len() > MAX_RUNS {
        return Err(HttpRefusal::new(400, format!("a page watches at most {MAX_RUNS} runs")));
    }
    let watch = |text: &&String| {
        let malformed = || HttpRefusal::new(400, "give a run as ID@POSITIONS, with five positions separated by dots");
        let (id, positions) = text.rsplit_once('@').ok_or_else(malformed)?;
        let positions: Option<Vec<u64>> = positions.split('.').map(|number| number.parse().ok()).collect();
        let positions: [u64; 5] = positions.and_then(|all| all.try_into().ok()).ok_or_else(malformed)?;
        let run = open_run(id, state)?;
        let tail = RunTail::new(run.folder(), positions);
        Ok(WatchedRun { id: id.to_owned(), run, tail, state: Value::Null, ranks: Value::Null, experts: Value::Null })
    };
    runs.iter().map(watch).collect()
}

/// Sends events until the client leaves or the server ends.
pub(super) fn stream(
    client: &mut TcpStream,
    mut runs: Vec<WatchedRun>,
    state: &SharedServerState,
) -> std::io::Result<()> {
    write_head(client, 200, ContentKind::EventStream, None)?;
    client.write_all(b"retry: 1000\n\n")?;
    let (mut last_sent, mut last_state_read) = (Instant::now(), None::<Instant>);
    while !state.is_ending() {
        let reads_state = last_state_read.is_none_or(|at| at.elapsed() >= STATE_INTERVAL);
        if reads_state {
            last_state_read = Some(Instant::now());
        }
        let news: Vec<Value> = runs.iter_mut().filter_map(|run| run.news(reads_state)).collect();
        if !news.is_empty() {
            let data = json_bytes(&json!({"runs": news}));
            let id: Vec<String> = runs.iter().map(WatchedRun::query_part).collect();
            client.write_all(format!("id: {}\ndata: ", id.join("&")).as_bytes())?;
            client.write_all(&data)?;
            client.write_all(b"\n\n")?;
            last_sent = Instant::now();
        } else if last_sent.elapsed() >= QUIET {
            client.write_all(b": quiet\n\n")?;
            last_sent = Instant::now();
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

impl WatchedRun {
    /// Returns the run's id and the positions up to which its files have been read, as a part of a query.
    fn query_part(&self) -> String {
        let positions = self.tail.positions().map(|position| position.to_string()).join(".");
        format!("run={}", encode(&format!("{}@{positions}", self.id)))
    }

    /// Returns the run's news, if there are any. If `reads_state` is true, also reads the state, the ranks and the
    /// loads of experts.
    fn news(&mut self, reads_state: bool) -> Option<Value> {
        // A file that cannot be read now may be readable later; a removed run is noticed below.
        let news = self.tail.read_new().unwrap_or_default();
        let mut message = json!({"id": self.id});
        let mut is_new = !news.is_empty();
        if is_new {
            add(&mut message, news);
        }
        if reads_state {
            let (state, ranks, experts) = match self.run.refresh() {
                Ok(()) => {
                    let run = &self.run;
                    let mut state = list_entry(run, &self.id);
                    // The duration always changes, and the page can compute it.
                    if run.state() == candle_zero::runs::RecordedState::Running {
                        state["seconds"] = Value::Null;
                    }
                    (state, run.ranks().unwrap_or_default().unwrap_or_default(), expert_loads(run))
                }
                Err(error) => {
                    let state = json!({"id": self.id, "state": "damaged", "damaged": error.to_string()});
                    (state, Value::Null, Value::Null)
                }
            };
            let parts = [
                ("run", &mut self.state, state),
                ("ranks", &mut self.ranks, ranks),
                ("experts", &mut self.experts, experts),
            ];
            for (name, last_sent, current) in parts {
                if *last_sent != current {
                    message[name] = current.clone();
                    *last_sent = current;
                    is_new = true;
                }
            }
        }
        is_new.then_some(message)
    }
}

/// Adds news to the message about a run.
fn add(message: &mut Value, news: NewRunLines) {
    if news.has_gap {
        message["reload"] = true.into();
    } else if !news.metrics.is_empty() {
        let (after, rows) = rows(news.metrics);
        message["after"] = json!(after);
        message["rows"] = MetricsColumns::of(&rows, MAX_ROWS).to_json();
    }
    let lists = [
        ("events", json!(news.events)),
        ("samples", json!(news.samples)),
        ("launch", json!(news.launch)),
        ("log", json!(news.log)),
    ];
    for (name, list) in lists {
        if list.as_array().is_some_and(|list| !list.is_empty()) {
            message[name] = list;
        }
    }
}

/// Returns the new rows and, because the run may have repeated steps, the step after which the page must drop the rows
/// that it already has. The step is `None` if the lines only add values to steps.
fn rows(lines: Vec<MetricsLine>) -> (Option<u64>, Vec<MetricsRow>) {
    let (mut after, mut rows) = (None::<u64>, BTreeMap::<u64, MetricsRow>::new());
    for line in lines {
        let (from, row) = match line {
            MetricsLine::Session { from_step, .. } => (Some(from_step), None),
            MetricsLine::Values(row) if row.values.contains_key("loss") => (row.step.checked_sub(1), Some(row)),
            MetricsLine::Values(row) => (None, Some(row)),
            _ => continue,
        };
        if let Some(from) = from {
            rows.split_off(&from.saturating_add(1));
            after = Some(after.map_or(from, |after| after.min(from)));
        }
        if let Some(row) = row {
            match rows.entry(row.step) {
                Entry::Vacant(place) => _ = place.insert(row),
                Entry::Occupied(known) => {
                    let known = known.into_mut();
                    known.time = known.time.max(row.time);
                    known.values.extend(row.values);
                }
            }
        }
    }
    (after, rows.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(step: u64, name: &str) -> MetricsLine {
        let mut row = MetricsRow::default();
        row.step = step;
        row.values.insert(name.into(), step as f64);
        MetricsLine::Values(row)
    }

    #[test]
    fn repeated_steps_replace_those_that_the_page_has() {
        let (after, rows) = rows(vec![
            values(5, "loss"),
            values(6, "loss"),
            values(6, "val_loss"),
            values(7, "loss"),
            values(6, "loss"),
        ]);
        assert_eq!(after, Some(4));
        assert_eq!(rows.iter().map(|row| (row.step, row.values.len())).collect::<Vec<_>>(), [(5, 1), (6, 1)]);
        let (after, rows) = super::rows(vec![values(6, "val_loss")]);
        assert_eq!((after, rows.len()), (None, 1));
    }
}
