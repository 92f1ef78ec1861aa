//! `zerorun runs list`: prints a table of runs.

use super::filter::{self, RunFilter};
use super::folder_flag::{FolderFlag, RunsOutput};
use super::table::{at_step, cell, duration, table};
use crate::error::{Result, RunError};
use candle_zero::Error;
use candle_zero::runs::{ListedRun, RecordedRun, RecordedState, ValueAtStep, utc};
use clap::{Args, ValueEnum};
use serde_json::json;
use std::cmp::Ordering;

#[derive(Debug, Args)]
pub(super) struct ListFlags {
    #[command(flatten)]
    folder: FolderFlag,

    /// Only runs in which KEY has this value; repeatable. KEY is name, id, state, host, commit, branch, world_size or
    /// version, or a key of the configuration or the settings (or the end of such a key). In VALUE, * matches anything
    #[arg(long, value_name = "KEY=VALUE", value_parser = filter::filter)]
    filter: Vec<RunFilter>,

    /// Only runs in this state: running, finished, stopped, failed or killed; repeatable
    #[arg(long, value_name = "STATE", value_parser = filter::state)]
    state: Vec<RecordedState>,

    /// Only runs that began at or after this time: an age such as 90m, 12h, 7d or 2w, or a date in UTC
    #[arg(long, value_name = "TIME", value_parser = filter::since)]
    since: Option<f64>,

    /// Order of the runs
    #[arg(long, value_enum, default_value_t)]
    sort: SortKey,

    /// Reverse the order
    #[arg(long)]
    reverse: bool,

    /// Print a JSON array instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum SortKey {
    /// Oldest first
    #[default]
    Start,
    Name,
    State,
    /// Shortest first
    Duration,
    /// Fewest first
    Steps,
    /// Lowest first, runs without a loss last
    Loss,
    BestLoss,
    Val,
    BestVal,
}

impl ListFlags {
    pub(super) fn output(&self) -> Result<RunsOutput> {
        let folder = self.folder.find();
        let (mut runs, mut damaged) = (Vec::new(), Vec::new());
        for ListedRun { id, run, .. } in folder.runs()? {
            match run {
                Ok(run) => runs.push(run),
                Err(error) => damaged.push((id, error)),
            }
        }
        let all = runs.len();
        runs.retain(|run| self.state.is_empty() || self.state.contains(&run.state()));
        runs.retain(|run| self.since.is_none_or(|since| run.info().created >= since));
        filter::keep(&mut runs, &self.filter)?;
        runs.sort_by(|a, b| {
            let by_key = self.sort.compare(a, b);
            if self.reverse { by_key.reverse() } else { by_key }
        });
        let mut problems: Vec<String> = damaged.iter().map(|(_, error)| error.to_string()).collect();
        problems.extend(runs.iter().filter_map(partly_damaged).map(|error| error.to_string()));
        let text = match (self.json, runs.is_empty()) {
            (true, _) => {
                let damaged = damaged.iter().map(|(id, error)| json!({"id": id, "damaged": error.to_string()}));
                serde_json::to_string_pretty(&runs.iter().map(RecordedRun::to_json).chain(damaged).collect::<Vec<_>>())
                    .unwrap_or_else(|error| unreachable!("text and numbers are JSON: {error}"))
            }
            (false, true) if all > 0 => format!("no run in {} matches (out of {all})", folder.path().display()),
            (false, true) if damaged.is_empty() => format!("there are no runs in {}", folder.path().display()),
            (false, true) => String::new(),
            (false, false) => runs_table(&runs),
        };
        Ok(RunsOutput { text, problems })
    }
}

/// Returns an error about the run if its record has a damaged line.
pub(super) fn partly_damaged(run: &RecordedRun) -> Option<Error> {
    let problem = run.summary().problem.clone()?;
    Some(RunError::Damaged { path: run.folder().to_owned(), problem: format!("{problem}; the rest is shown") }.into())
}

impl SortKey {
    fn compare(self, a: &RecordedRun, b: &RecordedRun) -> Ordering {
        // NaN, and no value at all, are worse than any number.
        let ascending = |a: Option<ValueAtStep>, b: Option<ValueAtStep>| {
            let value = |value: Option<ValueAtStep>| value.map_or(f64::NAN, |value| value.value);
            let (a, b) = (value(a), value(b));
            a.is_nan().cmp(&b.is_nan()).then(a.total_cmp(&b))
        };
        let (x, y) = (a.summary(), b.summary());
        let by_start = || a.info().created.total_cmp(&b.info().created).then_with(|| a.id().cmp(&b.id()));
        match self {
            Self::Start => Ordering::Equal,
            Self::Name => a.id().cmp(&b.id()),
            Self::State => a.state().cmp(&b.state()),
            Self::Duration => a.seconds().total_cmp(&b.seconds()),
            Self::Steps => x.steps.cmp(&y.steps),
            Self::Loss => ascending(x.loss, y.loss),
            Self::BestLoss => ascending(x.best_loss, y.best_loss),
            Self::Val => ascending(x.validation, y.validation),
            Self::BestVal => ascending(x.best_validation, y.best_validation),
        }
        .then_with(by_start)
    }
}

/// Returns the table of runs.
fn runs_table(runs: &[RecordedRun]) -> String {
    let headings = ["NAME", "STATE", "START (UTC)", "DURATION", "STEPS", "LOSS", "BEST", "VAL", "BEST VAL"];
    let row = |run: &RecordedRun| {
        let summary = run.summary();
        vec![
            cell(&run.id()),
            run.state().name().into(),
            utc(run.info().created),
            duration(run.seconds()),
            steps(run),
            at_step(summary.loss),
            at_step(summary.best_loss),
            at_step(summary.validation),
            at_step(summary.best_validation),
        ]
    };
    let mut rows = vec![headings.map(String::from).to_vec()];
    rows.extend(runs.iter().map(row));
    table(&rows, |column| column >= 3)
}

/// Returns the number of steps, and that of the complete run if it is known.
pub(super) fn steps(run: &RecordedRun) -> String {
    let steps = run.summary().steps;
    run.info().total_steps.map_or_else(|| steps.to_string(), |total| format!("{steps}/{total}"))
}
