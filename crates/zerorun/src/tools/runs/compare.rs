//! `zerorun runs compare`: shows how runs differ.

use super::folder_flag::{FolderFlag, RunsOutput};
use super::listing::{partly_damaged, steps};
use super::table::{at_step, cell, duration, number, setting, table};
use crate::error::{Result, ToolError};
use candle_zero::runs::{RecordedRun, RunMetrics};
use clap::Args;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Args)]
pub(super) struct CompareFlags {
    #[command(flatten)]
    folder: FolderFlag,

    /// The runs: their names, or prefixes of their names
    #[arg(value_name = "RUN", required = true, num_args = 2..)]
    run: Vec<String>,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// The rows of a table: a name, and the value of each run.
type Rows = Vec<(String, Vec<Option<String>>)>;

impl CompareFlags {
    pub(super) fn output(&self) -> Result<RunsOutput> {
        let folder = self.folder.find();
        let runs: Vec<RecordedRun> = self.run.iter().map(|name| folder.open(name)).collect::<Result<_>>()?;
        let mut ids = BTreeSet::new();
        if let Some(duplicate) = runs.iter().find(|run| !ids.insert(run.id())) {
            return Err(ToolError::SameRun { id: duplicate.id() }.into());
        }
        let metrics: Vec<RunMetrics> = runs.iter().map(RecordedRun::metrics).collect::<Result<_>>()?;
        let problems = runs.iter().filter_map(partly_damaged).map(|error| error.to_string()).collect();
        let (differences, last) = (differences(&runs), last_values(&metrics));
        let text = if self.json {
            let to_map = |rows: &Rows| {
                rows.iter().map(|(name, values)| (name.clone(), json!(values))).collect::<serde_json::Map<_, _>>()
            };
            let all = json!({
                "runs": runs.iter().map(RecordedRun::to_json).collect::<Vec<_>>(),
                "differences": to_map(&differences),
                "last": to_map(&last),
            });
            serde_json::to_string_pretty(&all)
                .unwrap_or_else(|error| unreachable!("text and numbers are JSON: {error}"))
        } else {
            let mut text = side_by_side("", &runs, &overview(&runs));
            text += "\n";
            text += &match differences.is_empty() {
                true => "the settings and the commands are the same\n".to_owned(),
                false => side_by_side("DIFFERENT SETTINGS", &runs, &differences),
            };
            if !last.is_empty() {
                text += "\n";
                text += &side_by_side("LAST VALUES", &runs, &last);
            }
            text
        };
        Ok(RunsOutput { text, problems })
    }
}

fn side_by_side(heading: &str, runs: &[RecordedRun], rows: &Rows) -> String {
    let mut cells = vec![std::iter::once(heading.to_owned()).chain(runs.iter().map(|run| cell(&run.id()))).collect()];
    for (name, values) in rows {
        let values = values.iter().map(|value| value.as_ref().map_or("-".into(), |value| cell(value)));
        cells.push(std::iter::once(cell(name)).chain(values).collect::<Vec<_>>());
    }
    table(&cells, |_| false)
}

/// Returns the rows about the progress of the runs.
fn overview(runs: &[RecordedRun]) -> Rows {
    let row = |name: &str, value: &dyn Fn(&RecordedRun) -> String| {
        (name.to_owned(), runs.iter().map(|run| Some(value(run))).collect())
    };
    vec![
        row("state", &|run| run.state().name().into()),
        row("duration", &|run| duration(run.seconds())),
        row("steps", &steps),
        row("loss", &|run| at_step(run.summary().loss)),
        row("best loss", &|run| at_step(run.summary().best_loss)),
        row("validation", &|run| at_step(run.summary().validation)),
        row("best validation", &|run| at_step(run.summary().best_validation)),
    ]
}

/// Returns the settings that are not the same in all runs.
fn differences(runs: &[RecordedRun]) -> Rows {
    let values_of_run = |run: &RecordedRun| {
        let info = run.info();
        let without_section = |name: String| match name.split_once('.') {
            Some((_, rest)) => rest.to_owned(),
            None => name,
        };
        let mut all: BTreeMap<String, Value> =
            run.settings().into_iter().map(|(name, value)| (without_section(name), value)).collect();
        all.insert("(command)".into(), different_words(runs, &info.command).into());
        all.insert("(host)".into(), info.machine.host.clone().into());
        all.insert("(simd)".into(), info.machine.simd.clone().into());
        all.insert("(ranks)".into(), info.world_size.into());
        all.insert("(version)".into(), info.versions.candle_zero.clone().into());
        all.extend(info.git.iter().map(|git| ("(commit)".into(), git.commit.clone().into())));
        all
    };
    rows(&runs.iter().map(values_of_run).collect::<Vec<_>>(), setting, true)
}

/// Returns the words of a command line that the command lines of some runs lack.
fn different_words(runs: &[RecordedRun], command: &[String]) -> String {
    let is_in_all_commands = |word: &String| runs.iter().all(|run| run.info().command.contains(word));
    let mut words = Vec::new();
    for (at, word) in command.iter().enumerate() {
        // A value is shown with its flag.
        let value_differs = word.starts_with('-')
            && command.get(at + 1).is_some_and(|next| !next.starts_with('-') && !is_in_all_commands(next));
        if !is_in_all_commands(word) || value_differs {
            words.push(word.as_str());
        }
    }
    words.join(" ")
}

/// Returns the last value of each metric.
fn last_values(metrics: &[RunMetrics]) -> Rows {
    let last = |metrics: &RunMetrics| {
        let values = metrics.rows.iter().flat_map(|row| row.values.iter().map(|(name, value)| (name.clone(), *value)));
        values.collect::<BTreeMap<String, f64>>()
    };
    rows(&metrics.iter().map(last).collect::<Vec<_>>(), |value| number(*value), false)
}

/// Returns a row for each name or, if requested, only for names whose values differ.
fn rows<T: PartialEq>(runs: &[BTreeMap<String, T>], to_text: impl Fn(&T) -> String, only_different: bool) -> Rows {
    let names: BTreeSet<&String> = runs.iter().flat_map(BTreeMap::keys).collect();
    let differs = |name: &&String| !only_different || runs.iter().any(|run| run.get(*name) != runs[0].get(*name));
    let row = |name: &String| (name.clone(), runs.iter().map(|run| run.get(name).map(&to_text)).collect());
    names.into_iter().filter(differs).map(row).collect()
}
