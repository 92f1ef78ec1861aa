//! The records of runs as JSON, and requests to running programs.

use super::http::{HttpRefusal, HttpRequest};
use super::metrics_columns::MetricsColumns;
use super::server_state::SharedServerState;
use crate::error::{Error, RunError};
use candle_zero::runs::{ListedRun, RecordedRun, RecordedState, RunRequest, RunTail, RunsFolder};
use candle_zero::util::lock;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The number of rows of metrics if the page does not specify a number, and the limits on a requested number.
const DEFAULT_ROWS: usize = 2000;
const MIN_ROWS: usize = 50;
const MAX_ROWS: usize = 10_000;
/// The maximum numbers of events, samples, events of the launcher, and lines of the log. Only the newest are returned.
const MAX_EVENTS: usize = 1000;
const MAX_SAMPLES: usize = 200;
const MAX_LAUNCH: usize = 5000;
const MAX_LOG: usize = 2000;
/// A list of runs is reused for `LIST_AGE`, or for `LIST_AGE_FACTOR` times as long as it took to read, whichever is
/// longer.
const LIST_AGE: Duration = Duration::from_secs(1);
const LIST_AGE_FACTOR: u32 = 10;

/// Returns the list of runs, including those of sweeps, and the names of the sweeps.
pub(super) fn runs(state: &SharedServerState) -> Result<Value, HttpRefusal> {
    let mut list = lock(&state.list);
    let folder = state.folder.runs();
    if let Some((until, cached)) = &list.answer
        && Instant::now() < *until
        && cached["folder"] == json!(folder.path())
    {
        return Ok(cached.clone());
    }
    let start = Instant::now();
    let mut runs = runs_in(&folder, "", &mut list.running).map_err(|error| failed(&error))?;
    let (sweeps, mut problems) = (state.sweep_locations(), Vec::new());
    for location in &sweeps {
        let Some(sweep_runs) = location.runs.clone() else { continue };
        match runs_in(&RunsFolder::find(Some(sweep_runs)), &location.prefix, &mut list.running) {
            Ok(of_sweep) => runs.extend(of_sweep),
            // The other runs are still shown.
            Err(error) => problems.push(error.to_string()),
        }
    }
    let names: Vec<&String> = sweeps.iter().map(|location| &location.name).collect();
    let answer = json!({"folder": folder.path(), "runs": runs, "sweeps": names, "problems": problems});
    list.answer = Some((Instant::now() + LIST_AGE.max(start.elapsed() * LIST_AGE_FACTOR), answer.clone()));
    Ok(answer)
}

/// Returns the runs in a folder, with `prefix` before their ids. `running` is that of
/// [`RunsListCache`](super::server_state::RunsListCache). A folder that does not exist yet has no runs: the first run
/// creates it.
fn runs_in(
    folder: &RunsFolder,
    prefix: &str,
    running: &mut BTreeMap<PathBuf, RecordedRun>,
) -> Result<Vec<Value>, Error> {
    let runs = match folder.refreshed_runs(running) {
        Err(Error::Run(RunError::NoFolder { .. })) => Vec::new(),
        runs => runs?,
    };
    let entry = |listed: &ListedRun| {
        let id = format!("{prefix}{}", listed.id);
        match &listed.run {
            Ok(run) => list_entry(run, &id),
            Err(error) => json!({"id": id, "state": "damaged", "damaged": error.to_string()}),
        }
    };
    Ok(runs.iter().map(entry).collect())
}

/// Returns the entry of a run in the list, with the id by which the page requests it.
pub(super) fn list_entry(run: &RecordedRun, id: &str) -> Value {
    let mut entry = run.to_json();
    entry["id"] = id.into();
    entry
}

/// Returns the newest loads of the experts of a run, or why they cannot be read; null if the run has recorded none.
pub(super) fn expert_loads(run: &RecordedRun) -> Value {
    match run.expert_loads() {
        Ok(loads) => json!(loads),
        Err(error) => json!({"problem": error.to_string()}),
    }
}

/// Returns a sweep, or only its version if the page already has that version.
pub(super) fn sweep(request: &HttpRequest, state: &SharedServerState) -> Result<Value, HttpRefusal> {
    let name = request.value("name").unwrap_or_default();
    let location = state.sweep_locations().into_iter().find(|location| location.name == name);
    let (Some(location), Some(reader)) = (location, &state.sweeps) else {
        return Err(HttpRefusal::new(404, format!("there is no sweep {name}")));
    };
    let mut sweep = reader.read(&location).map_err(|error| failed(&error))?;
    let mut hasher = DefaultHasher::new();
    sweep.to_string().hash(&mut hasher);
    let version = format!("{:016x}", hasher.finish());
    if request.value("known") == Some(version.as_str()) {
        return Ok(json!({"version": version, "unchanged": true}));
    }
    sweep["prefix"] = location.prefix.into();
    sweep["version"] = version.into();
    Ok(sweep)
}

/// Returns everything about a run except its metrics.
pub(super) fn run(request: &HttpRequest, state: &SharedServerState) -> Result<Value, HttpRefusal> {
    let (id, run) = requested_run(request, state)?;
    let mut tail = RunTail::without_metrics(run.folder()).map_err(|error| failed(&error))?;
    let news = tail.read_new().map_err(|error| failed(&error))?;
    let mut info = json!(run.info());
    if let Some(info) = info.as_object_mut() {
        // The settings and the configuration are contained in `config`, under dotted names.
        info.remove("settings");
        info.remove("configuration");
    }
    let pair = |(name, value): (String, Value)| json!([name, value]);
    Ok(json!({
        "run": list_entry(&run, id),
        "info": info,
        "config": run.settings().into_iter().map(pair).collect::<Vec<_>>(),
        "ranks": run.ranks().map_err(|error| failed(&error))?,
        "experts": expert_loads(&run),
        "events": newest(&news.events, MAX_EVENTS),
        "samples": newest(&news.samples, MAX_SAMPLES),
        "launch": newest(&news.launch, MAX_LAUNCH),
        "log": newest(&news.log, MAX_LOG),
        "positions": tail.positions(),
    }))
}

/// Returns the metrics of a run, with at most the requested number of rows, which is kept between [`MIN_ROWS`] and
/// [`MAX_ROWS`].
pub(super) fn metrics(request: &HttpRequest, state: &SharedServerState) -> Result<Value, HttpRefusal> {
    let max_rows = match request.value("rows").map(str::parse::<usize>) {
        None => DEFAULT_ROWS,
        Some(Ok(rows)) => rows.clamp(MIN_ROWS, MAX_ROWS),
        Some(Err(_)) => return Err(HttpRefusal::new(400, "`rows` is not a whole number")),
    };
    let (id, run) = requested_run(request, state)?;
    let metrics = run.metrics().map_err(|error| failed(&error))?;
    Ok(json!({
        "id": id,
        "rows": MetricsColumns::of(&metrics.rows, max_rows).to_json(),
        "position": metrics.bytes,
        "problem": metrics.problem,
    }))
}

/// Passes a request on to a running program.
pub(super) fn request(request: &HttpRequest, state: &SharedServerState) -> Result<Value, HttpRefusal> {
    let what = request.value("what").unwrap_or_default();
    let Some(action) = RunRequest::ALL.into_iter().find(|request| request.name() == what) else {
        return Err(HttpRefusal::new(400, "`what` must be `save` or `stop`"));
    };
    let (id, run) = requested_run(request, state)?;
    if run.state() != RecordedState::Running {
        let text = format!("run {id} is not running; its state is {}", run.state().name());
        return Err(HttpRefusal::new(409, text));
    }
    let ranks = run.ranks().map_err(|error| failed(&error))?.unwrap_or_default();
    if !ranks["answers"].as_array().is_some_and(|answers| answers.iter().any(|answer| answer == what)) {
        let text = match action {
            RunRequest::Stop => "the program has not yet checked for requests to stop (Engine::stop_requested)",
            _ => {
                "the program has not yet checked for requests to save (Engine::save_requested), or saves no checkpoints"
            }
        };
        return Err(HttpRefusal::new(409, text));
    }
    run.request(action).map_err(|error| failed(&error))?;
    Ok(json!({"asked": what, "id": id}))
}

/// Returns the id that a request names, and opens the run with this id.
fn requested_run<'a>(
    request: &'a HttpRequest,
    state: &SharedServerState,
) -> Result<(&'a str, RecordedRun), HttpRefusal> {
    let id = request.value("id").unwrap_or_default();
    Ok((id, open_run(id, state)?))
}

/// Opens the run with this id: the name of the run's folder or, if the run belongs to a sweep in a subfolder of the
/// served folder, the name of the sweep, a slash and the name of the run's folder.
pub(super) fn open_run(id: &str, state: &SharedServerState) -> Result<RecordedRun, HttpRefusal> {
    let unknown = || HttpRefusal::new(404, format!("there is no run {id}"));
    let folder = state.run_folder(id).ok_or_else(unknown)?;
    RecordedRun::open(folder).map_err(|error| failed(&error))
}

fn newest<T: serde::Serialize>(all: &[T], max: usize) -> Value {
    json!(all[all.len().saturating_sub(max)..])
}

fn failed(error: &Error) -> HttpRefusal {
    HttpRefusal::new(500, error.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_experts_are_passed_on_and_damage_to_them_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("run.json"), "{\"format\": 1, \"name\": \"x\"}").unwrap();
        let run = RecordedRun::open(dir.path()).unwrap();
        assert!(expert_loads(&run).is_null());
        let recorded = json!({"step": 4, "time": 2.5, "session": 1, "blocks": [{"block": 1, "choices": [3, 0, 5]}]});
        std::fs::write(dir.path().join("experts.json"), recorded.to_string()).unwrap();
        assert_eq!(expert_loads(&run), recorded);
        std::fs::write(dir.path().join("experts.json"), "{\"step\": \"<b>\"}").unwrap();
        let problem = expert_loads(&run)["problem"].as_str().unwrap().to_owned();
        assert!(problem.contains("experts.json is damaged: "), "{problem}");
    }
}
