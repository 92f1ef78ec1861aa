//! The records of runs as JSON, and requests to running programs.

use super::columns::MetricsColumns;
use super::http::{HttpRefusal, HttpRequest};
use super::state::DashboardState;
use crate::error::{Error, RunError};
use candle_zero::runs::{RecordedRun, RecordedState, RunRequest, RunTail};
use candle_zero::util::lock;
use serde_json::{Value, json};
use std::path::{Component, Path};
use std::time::{Duration, Instant};

/// The number of rows of metrics if the page requests none, and the limits on a requested number.
const DEFAULT_ROWS: usize = 2000;
const MIN_ROWS: usize = 50;
const MAX_ROWS: usize = 10_000;
/// The maximum number of the newest events, samples, events of the launcher, and lines of the log.
const MAX_EVENTS: usize = 1000;
const MAX_SAMPLES: usize = 200;
const MAX_LAUNCH: usize = 5000;
const MAX_LOG: usize = 2000;
/// A list of runs is reused for at least this time, and for at least this many times the time that reading it took.
const LIST_AGE: Duration = Duration::from_secs(1);
const LIST_AGE_FACTOR: u32 = 10;

/// Returns the list of runs.
pub(super) fn runs(state: &DashboardState) -> Result<Value, HttpRefusal> {
    let mut list = lock(&state.list);
    let folder = state.folder.runs();
    if let Some((until, known)) = &*list
        && Instant::now() < *until
        && known["folder"] == json!(folder.path())
    {
        return Ok(known.clone());
    }
    let begun = Instant::now();
    let runs = match folder.runs() {
        Ok(runs) => runs,
        // The first run will create it.
        Err(Error::Run(RunError::NoFolder { .. })) => vec![],
        Err(error) => return Err(failed(&error)),
    };
    let of_run = |listed: &candle_zero::runs::ListedRun| match &listed.run {
        Ok(run) => run.to_json(),
        Err(error) => json!({"id": listed.id, "state": "damaged", "damaged": error.to_string()}),
    };
    let answer = json!({"folder": folder.path(), "runs": runs.iter().map(of_run).collect::<Vec<_>>()});
    *list = Some((Instant::now() + LIST_AGE.max(begun.elapsed() * LIST_AGE_FACTOR), answer.clone()));
    Ok(answer)
}

/// Returns everything about a run except its metrics.
pub(super) fn run(request: &HttpRequest, state: &DashboardState) -> Result<Value, HttpRefusal> {
    let run = named(request, state)?;
    let mut tail = RunTail::without_metrics(run.folder()).map_err(|error| failed(&error))?;
    let news = tail.look().map_err(|error| failed(&error))?;
    let mut info = json!(run.info());
    if let Some(info) = info.as_object_mut() {
        // Both are in `config`, by their dotted names.
        info.remove("settings");
        info.remove("configuration");
    }
    let setting = |(name, value): (String, Value)| json!([name, value]);
    Ok(json!({
        "run": run.to_json(),
        "info": info,
        "config": run.settings().into_iter().map(setting).collect::<Vec<_>>(),
        "ranks": run.ranks().map_err(|error| failed(&error))?,
        "events": newest(&news.events, MAX_EVENTS),
        "samples": newest(&news.samples, MAX_SAMPLES),
        "launch": newest(&news.launch, MAX_LAUNCH),
        "log": newest(&news.log, MAX_LOG),
        "positions": tail.positions(),
    }))
}

/// Returns the metrics of a run, with at most the requested number of rows.
pub(super) fn metrics(request: &HttpRequest, state: &DashboardState) -> Result<Value, HttpRefusal> {
    let most = match request.value("rows").map(str::parse::<usize>) {
        None => DEFAULT_ROWS,
        Some(Ok(rows)) => rows.clamp(MIN_ROWS, MAX_ROWS),
        Some(Err(_)) => return Err(HttpRefusal::new(400, "rows is not a whole number")),
    };
    let run = named(request, state)?;
    let metrics = run.metrics().map_err(|error| failed(&error))?;
    Ok(json!({
        "id": run.id(),
        "rows": MetricsColumns::of(&metrics.rows, most).to_json(),
        "position": metrics.bytes,
        "problem": metrics.problem,
    }))
}

/// Passes a request on to a running program.
pub(super) fn request(request: &HttpRequest, state: &DashboardState) -> Result<Value, HttpRefusal> {
    let what = request.value("what").unwrap_or_default();
    let Some(asked) = RunRequest::ALL.into_iter().find(|request| request.name() == what) else {
        return Err(HttpRefusal::new(400, "what must be save or stop"));
    };
    let run = named(request, state)?;
    if run.state() != RecordedState::Running {
        let text = format!("run {} is not running; its state is {}", run.id(), run.state().name());
        return Err(HttpRefusal::new(409, text));
    }
    let ranks = run.ranks().map_err(|error| failed(&error))?.unwrap_or_default();
    if !ranks["answers"].as_array().is_some_and(|answers| answers.iter().any(|answer| answer == what)) {
        let text = match asked {
            RunRequest::Stop => "the program has not yet checked for requests to stop (Engine::stop_requested)",
            _ => {
                "the program has not yet checked for requests to save (Engine::save_requested), or saves no checkpoints"
            }
        };
        return Err(HttpRefusal::new(409, text));
    }
    run.request(asked).map_err(|error| failed(&error))?;
    Ok(json!({"asked": what, "id": run.id()}))
}

/// Opens the run that a request names.
fn named(request: &HttpRequest, state: &DashboardState) -> Result<RecordedRun, HttpRefusal> {
    opened(request.value("id").unwrap_or_default(), state)
}

/// Opens a run by the name of its folder.
pub(super) fn opened(id: &str, state: &DashboardState) -> Result<RecordedRun, HttpRefusal> {
    let unknown = || HttpRefusal::new(404, format!("there is no run {id}"));
    // A path could lead out of the folder of runs.
    let mut parts = Path::new(id).components();
    let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) else { return Err(unknown()) };
    let folder = state.folder.runs().path().join(name);
    if name != id || !folder.is_dir() {
        return Err(unknown());
    }
    RecordedRun::open(folder).map_err(|error| failed(&error))
}

fn newest<T: serde::Serialize>(all: &[T], most: usize) -> Value {
    json!(all[all.len().saturating_sub(most)..])
}

fn failed(error: &Error) -> HttpRefusal {
    HttpRefusal::new(500, error.to_string())
}
