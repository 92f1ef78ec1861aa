//! `zerorun verify`: trains the same small GPT at every stage, with and without offload, and in pipelines, and compares
//! bits.
//!
//! Each row of the printed table is a separate job, run as `zerorun` runs any job: ranks are processes that share
//! memory. They are started from this executable (`train`) and leave their logs in a folder; `compare` finds the first
//! difference between two rows.

mod compare;
mod compared_jobs;
mod gradients;
mod train;

use super::own_job_launcher::{OwnJobLauncher, OwnJobStop};
use crate::error::{Error, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::files::ScratchFolder;
use candle_zero::util::counted;
use clap::Parser;
use compare::{FirstDifference, RankResults};
use compared_jobs::{ComparedJob, VerifyDtype};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Train a small GPT at stages 0, 1, 2 and 3, and at stage 3 with offload to host memory and to files, in f32, bf16 and
/// fp16, with accumulation and clipping. Compares the bits of every loss and every parameter after every step with
/// those of stage 0. With 2 to 7 ranks, also trains the model in pipelines of all ranks, and compares these runs with a
/// run on one rank that accumulates the gradients of the same samples.
///
/// With a SCRIPT, runs its first step (or a few steps if the first is not decisive), compares every trained parameter's
/// gradient with the change in the loss when that parameter is moved slightly up and down, and prints a table. The
/// script then ends.
///
/// Exit code: 0 if all bits are the same or, with a SCRIPT, no gradient is wrong; 1 if something differs, the gradients
/// could not be checked, a rank failed, or standard output could not be written; 2 if the command line is wrong or the
/// folder does not exist; 128 + n if signal n ended the comparison.
#[derive(Debug, Parser)]
#[command(name = "verify", bin_name = "zerorun verify")]
struct VerifyArguments {
    /// Script whose gradients are checked, run by zerorun
    #[arg(value_name = "SCRIPT")]
    script: Option<PathBuf>,

    /// Arguments of the script
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true, requires = "script")]
    args: Vec<OsString>,

    /// Number of ranks of each job
    #[arg(short = 'n', long = "num_ranks", alias = "num-ranks", value_name = "N", default_value = "2",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,

    /// Number of optimizer steps of each job
    #[arg(long, value_name = "N", default_value = "6", value_parser = clap::value_parser!(u32).range(1..=1000))]
    steps: u32,

    /// Folder for offloaded state [default: the system's temporary folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,

    /// Start as a rank of the compared job in this folder
    #[arg(long = "rank_of", value_name = "FOLDER", hide = true)]
    rank_of: Option<PathBuf>,
}

/// The prefix of the folder for jobs and logs. The leftovers of a killed run are removed by the next run with the same
/// parent folder.
const PREFIX: &str = "candle-zero-verify-";

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <VerifyArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    Ok(VerifyArguments::try_parse_from(words).map_err(CommandLineError)?.run())
}

impl VerifyArguments {
    fn run(&self) -> ExitCode {
        if let Some(folder) = &self.rank_of {
            return match train::run(folder, self.steps) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => refused(&error, 1),
            };
        }
        if let Some(script) = &self.script {
            return gradients::run(script, &self.args, self.ranks, self.json)
                .unwrap_or_else(|error| refused(&error, EXIT_SETUP));
        }
        match self.compare_all() {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(stop) => stop.report(),
        }
    }

    /// Reports all rows one by one. Returns true if all are as expected and could be reported.
    fn compare_all(&self) -> Result<bool, OwnJobStop> {
        let parent = self.dir.clone().unwrap_or_else(std::env::temp_dir);
        let wrong = |source| Error::Io { action: "create a folder in", path: parent.clone(), source };
        let folder = ScratchFolder::new(&parent, PREFIX).map_err(wrong)?;
        let mut own_ranks = OwnJobLauncher::new()?;
        let (mut printed, mut list) = (true, Vec::new());
        let mut first_difference = None;
        let rows = compared_jobs::job_rows(self.ranks.into(), train::layers()?);
        if !self.json {
            printed &= print(compared_jobs::HEAD);
        }
        for (number, precision) in VerifyDtype::ALL.into_iter().enumerate() {
            let mut reference = Vec::new();
            for (of_precision, row) in rows.iter().copied().enumerate() {
                let number = number * rows.len() + of_precision;
                let logs = self.train(row, precision, &folder.path().join(number.to_string()), &mut own_ranks)?;
                if row.is_reference() {
                    reference = logs.clone();
                }
                let difference = match (row, &reference[..]) {
                    (ComparedJob::Pipeline(_), [one, ..]) => compare::first_difference_of_pipeline(one, &logs),
                    _ => compare::first_difference(&reference, &logs),
                };
                if self.json {
                    list.push(compared_jobs::row_json(row, precision, &logs, difference.as_ref()));
                } else {
                    printed &= print(compared_jobs::format_row(row, precision, &logs, difference.as_ref()));
                }
                if let (Some(difference), None) = (difference, &first_difference) {
                    first_difference = Some((row, precision, difference));
                }
            }
        }
        let pipelines = rows.iter().any(|row| row.schedule().is_some());
        let text = match self.json {
            true => self.object(list).to_string(),
            false => self.verdict(pipelines, first_difference.as_ref()),
        };
        printed &= print(text);
        Ok(printed && first_difference.is_none())
    }

    /// Runs the job of one row.
    fn train(
        &self,
        row: ComparedJob,
        precision: VerifyDtype,
        folder: &Path,
        own_ranks: &mut OwnJobLauncher,
    ) -> Result<Vec<RankResults>, OwnJobStop> {
        let wrong = |source| Error::Io { action: "write", path: folder.to_owned(), source };
        std::fs::create_dir(folder).map_err(wrong)?;
        let config = compared_jobs::row_config(row, precision, self.ranks.into(), folder).to_string();
        std::fs::write(folder.join(train::CONFIG), config).map_err(wrong)?;
        let (steps, ranks) = (self.steps.to_string(), row.ranks(self.ranks.into()));
        let mut args: Vec<OsString> = ["verify", "--steps", &steps, "--rank_of"].map(Into::into).into();
        args.push(folder.into());
        own_ranks.run(args, ranks, None)?;
        Ok((0..ranks).map(|rank| RankResults::read(&train::file(folder, rank))).collect::<Result<_>>()?)
    }

    fn object(&self, rows: Vec<Value>) -> Value {
        let ok = rows.iter().all(|row| row["difference"].is_null());
        json!({"ok": ok, "num_ranks": self.ranks, "steps": self.steps, "rows": rows})
    }

    fn verdict(&self, pipelines: bool, first: Option<&(ComparedJob, VerifyDtype, FirstDifference)>) -> String {
        let Self { ranks, steps, .. } = self;
        match first {
            None => format!(
                "All bits are the same: in each precision, every loss and every parameter of {} on {} equals that of \
                 stage 0{}.",
                counted(*steps, "step"),
                counted(*ranks, "rank"),
                if pipelines { ", or, in a pipeline, that of one rank" } else { "" }
            ),
            Some((row, precision, difference)) => {
                format!(
                    "Not all bits are the same: in {}, {} first differs from {} at {difference}.",
                    precision.name(),
                    row.name(),
                    row.reference()
                )
            }
        }
    }
}
