//! `zerorun runs export`: prints the metrics of a run.

use super::folder_flag::{FolderFlag, RunsOutput};
use crate::error::{Result, RunError};
use candle_zero::Error;
use candle_zero::runs::RunMetrics;
use clap::Args;
use std::fmt::Write as _;

#[derive(Debug, Args)]
#[group(id = "format", required = true, multiple = false, args = ["csv", "jsonl"])]
pub(super) struct ExportFlags {
    #[command(flatten)]
    folder: FolderFlag,

    /// The run: its name, or a prefix of its name
    #[arg(value_name = "RUN")]
    run: String,

    /// Print CSV with a column for each value; a field is empty if the step does not have the value
    #[arg(long)]
    csv: bool,

    /// Print a line of JSON for each step; numbers that are not finite are written as text
    #[arg(long)]
    jsonl: bool,
}

impl ExportFlags {
    pub(super) fn output(&self) -> Result<RunsOutput> {
        let run = self.folder.find().open(&self.run)?;
        let metrics = run.metrics()?;
        let damaged = |problem: &String| {
            let problem = format!("{problem}; the rest is exported");
            Error::from(RunError::Damaged { path: run.folder().to_owned(), problem }).to_string()
        };
        let problems = metrics.problem.iter().map(damaged).collect();
        Ok(RunsOutput { text: if self.csv { csv(&metrics) } else { metrics.to_json_lines() }, problems })
    }
}

fn csv(metrics: &RunMetrics) -> String {
    let names = metrics.names();
    let mut text = String::from("step,time");
    for name in &names {
        _ = write!(text, ",{}", field(name));
    }
    text.push('\n');
    for row in &metrics.rows {
        _ = write!(text, "{},{}", row.step, row.time);
        for name in &names {
            text.push(',');
            if let Some(value) = row.values.get(*name) {
                _ = write!(text, "{value}");
            }
        }
        text.push('\n');
    }
    text
}

/// Returns a text as a field of CSV (RFC 4180).
fn field(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}
