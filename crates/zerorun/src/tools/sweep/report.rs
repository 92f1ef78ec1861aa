//! Prints a sweep: its progress on standard error, and its trials as a table.

use super::trial_command::is_flag;
use crate::launch::console::eprint;
use crate::tools::runs::table::{cell, loss, setting, table};
use candle_zero::sweep::{Sweep, SweepGoal, SweepJob, SweepTrial, TrialParameters, TrialState};
use candle_zero::util::counted;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// The time between two updates of the live table.
const REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// The maximum number of rows and columns of the live table, so that it fits into any terminal.
const MAX_LIVE_ROWS: usize = 12;
const MAX_LIVE_COLUMNS: usize = 79;

/// The display of a sweep's progress: a line for each event and, if standard error is a terminal, a table that is
/// redrawn repeatedly.
#[derive(Debug)]
pub(super) struct SweepDisplay {
    metric: String,
    is_terminal: bool,
    /// The number of lines of the table that are on the terminal now.
    drawn_lines: usize,
    last_refresh: Option<Instant>,
}

impl SweepDisplay {
    pub(super) fn new(metric: &str) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        Self { metric: metric.to_owned(), is_terminal, drawn_lines: 0, last_refresh: None }
    }

    /// Prints a line about an event.
    pub(super) fn line(&mut self, text: &str) {
        self.clear();
        eprint(&format!("zerorun: {text}"));
    }

    /// Prints that a job is starting.
    pub(super) fn print_start(&mut self, trial: &SweepTrial, job: &SweepJob, steps: u64) {
        let branch = match trial.branch.filter(|_| trial.results.is_empty()) {
            Some(branch) => format!(", a branch of trial {}", branch.trial),
            None => String::new(),
        };
        let until = if job.to == steps { "to the end".to_owned() } else { format!("to step {}", job.to) };
        let parameters = match trial.results.is_empty() {
            true => format!(": {}", format_parameters(&trial.parameters)),
            false => String::new(),
        };
        self.line(&format!("trial {} from step {} {until}{branch}{parameters}", trial.number, job.from));
    }

    /// Prints the result of a trial, which the sweep has just received.
    pub(super) fn print_result(&mut self, sweep: &Sweep, trial: &SweepTrial) {
        let (number, metric) = (trial.number, &self.metric);
        let text = match (&trial.state, trial.results.last()) {
            (TrialState::Failed(why), _) => format!("trial {number} failed: {why}"),
            (state, Some((step, value))) => {
                let best =
                    if sweep.best().is_some_and(|best| best.number == number) { ", the best so far" } else { "" };
                let prefix = match state {
                    TrialState::Complete => "complete, ",
                    TrialState::Stopped => "ended early, ",
                    _ => "",
                };
                format!("trial {number}: {prefix}step {step}, {metric} {}{best}", loss(*value))
            }
            (_, None) => return,
        };
        self.line(&text);
    }

    /// Draws the table if it is due. `hosts` has the hosts of trials, and `reached` returns the step of a running
    /// trial.
    pub(super) fn refresh(
        &mut self,
        sweep: &Sweep,
        hosts: &BTreeMap<usize, String>,
        reached: impl Fn(usize) -> Option<u64>,
    ) {
        if !self.is_terminal || self.last_refresh.is_some_and(|at| at.elapsed() < REFRESH_INTERVAL) {
            return;
        }
        let mut lines = vec![summary(sweep, &self.metric)];
        for trial in sweep.trials() {
            let TrialState::Running { to } = trial.state else { continue };
            let step = reached(trial.number).unwrap_or_else(|| trial.reached()).clamp(trial.reached(), to);
            let host_suffix = hosts.get(&trial.number).map_or(String::new(), |host| format!(" on {host}"));
            let parameters = format_parameters(&trial.parameters);
            lines.push(format!("  trial {:4}  step {step} of {to}{host_suffix}  {parameters}", trial.number));
        }
        lines.truncate(MAX_LIVE_ROWS);
        self.clear();
        let text: String =
            lines.iter().map(|line| line.chars().take(MAX_LIVE_COLUMNS).chain(['\n']).collect::<String>()).collect();
        // If the terminal is gone, no table is needed.
        _ = std::io::stderr().lock().write_all(text.as_bytes());
        (self.drawn_lines, self.last_refresh) = (lines.len(), Some(Instant::now()));
    }

    /// Removes the table from the terminal.
    pub(super) fn clear(&mut self) {
        if self.drawn_lines > 0 {
            _ = write!(std::io::stderr().lock(), "\x1b[{}A\x1b[J", self.drawn_lines);
            (self.drawn_lines, self.last_refresh) = (0, None);
        }
    }
}

/// Returns a one-line summary of the sweep.
pub(super) fn summary(sweep: &Sweep, metric: &str) -> String {
    let trials = sweep.trials();
    let count = |is: fn(&TrialState) -> bool| trials.iter().filter(|trial| is(&trial.state)).count();
    let running = count(|state| matches!(state, TrialState::Running { .. }));
    let complete = count(|state| *state == TrialState::Complete);
    let failed = match sweep.failures() {
        0 => String::new(),
        failed => format!(", {failed} failed"),
    };
    let best = match sweep.best() {
        Some(best) => {
            format!("; best: trial {}, {metric} {}", best.number, best.value().map_or("-".into(), loss))
        }
        None => String::new(),
    };
    format!(
        "{} of {}, {running} running, {complete} complete{failed}, {}{best}",
        trials.len().min(sweep.trial_count()),
        counted(sweep.trial_count(), "trial"),
        counted(sweep.steps_done(), "step"),
    )
}

/// Returns the trials as a table, the best first. `hosts` has the hosts of trials.
pub(super) fn trials_table(sweep: &Sweep, hosts: &BTreeMap<usize, String>, metric: &str) -> String {
    let names = sweep.settings().space.parameters().iter().map(|(name, _)| cell(short(name)));
    let heading = ["TRIAL", "STATE", "STEP", metric].map(str::to_owned).into_iter().chain(names);
    let mut rows: Vec<Vec<String>> = vec![heading.collect()];
    for trial in ranked(sweep) {
        let state = match (&trial.state, trial.branch) {
            (TrialState::Replaced { by }, _) => format!("replaced by {by}"),
            (state, branch) => {
                let host_suffix = host_of(trial, hosts).map_or(String::new(), |host| format!(" on {host}"));
                let branch_suffix = branch.map_or(String::new(), |branch| format!(", branch of {}", branch.trial));
                format!("{}{host_suffix}{branch_suffix}", state.name())
            }
        };
        let value = trial.value().map_or("-".into(), loss);
        let first_cells = [trial.number.to_string(), state, trial.reached().to_string(), value];
        let parameters = trial.parameters.iter().map(|(_, value)| cell(&setting(value)));
        rows.push(first_cells.into_iter().chain(parameters).collect());
    }
    let mut text = table(&rows, |column| column != 1);
    for trial in sweep.trials() {
        if let TrialState::Failed(why) = &trial.state {
            text += &format!("trial {} failed: {why}\n", trial.number);
        }
    }
    text
}

/// Returns the host on which a trial is running, if there is a hostfile.
fn host_of<'a>(trial: &SweepTrial, hosts: &'a BTreeMap<usize, String>) -> Option<&'a String> {
    hosts.get(&trial.number).filter(|_| matches!(trial.state, TrialState::Running { .. }))
}

/// Returns the trials, the best first: sorted by the step reached, then by value. Failed trials are last.
fn ranked(sweep: &Sweep) -> Vec<&SweepTrial> {
    let mut trials: Vec<&SweepTrial> = sweep.trials().iter().collect();
    let score = |trial: &SweepTrial| match (trial.value(), sweep.settings().goal) {
        (Some(value), _) if value.is_nan() => f64::INFINITY,
        (Some(value), SweepGoal::Minimize) => value,
        (Some(value), SweepGoal::Maximize) => -value,
        (None, _) => f64::INFINITY,
    };
    let has_failed = |trial: &SweepTrial| matches!(trial.state, TrialState::Failed(_));
    trials.sort_by(|a, b| {
        let by_step = b.results.last().map(|last| last.0).cmp(&a.results.last().map(|last| last.0));
        has_failed(a)
            .cmp(&has_failed(b))
            .then(by_step)
            .then(score(a).total_cmp(&score(b)))
            .then(a.number.cmp(&b.number))
    });
    trials
}

/// Returns the sweep as JSON, for programs. `hosts` has the hosts of trials.
pub(super) fn as_json(sweep: &Sweep, hosts: &BTreeMap<usize, String>, metric: &str) -> Value {
    let number = |value: f64| if value.is_finite() { json!(value) } else { json!(value.to_string()) };
    let trial = |trial: &SweepTrial| {
        json!({
            "trial": trial.number,
            "state": trial.state.name(),
            "host": host_of(trial, hosts),
            "error": match &trial.state { TrialState::Failed(why) => json!(why), _ => Value::Null },
            "parameters": object(&trial.parameters),
            "branch": trial.branch.map(|branch| json!({"trial": branch.trial, "step": branch.step})),
            "results": trial.results.iter().map(|(step, value)| json!({"step": step, "value": number(*value)})).collect::<Vec<_>>(),
        })
    };
    json!({
        "metric": metric,
        "steps_done": sweep.steps_done(),
        "failures": sweep.failures(),
        "best": sweep.best().map(|best| best.number),
        "trials": sweep.trials().iter().map(trial).collect::<Vec<_>>(),
    })
}

/// Returns parameters as an object.
pub(super) fn object(parameters: &TrialParameters) -> Value {
    Value::Object(parameters.iter().cloned().collect())
}

/// Returns parameters as text.
pub(super) fn format_parameters(parameters: &TrialParameters) -> String {
    let format_parameter = |(name, value): &(String, Value)| match is_flag(name) {
        true => format!("{name} {}", setting(value)),
        false => format!("{} {}", short(name), setting(value)),
    };
    parameters.iter().map(format_parameter).collect::<Vec<_>>().join(", ")
}

/// Returns the last key of a path, or a flag unchanged.
fn short(name: &str) -> &str {
    if is_flag(name) { name } else { name.rsplit('.').next().unwrap_or(name) }
}
