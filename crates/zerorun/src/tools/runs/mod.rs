//! `zerorun runs`: lists, shows, compares, exports and removes the records of runs.

mod compare;
mod export;
mod filter;
mod folder_flag;
mod listing;
mod remove;
mod show;
pub(super) mod table;

use crate::error::Result;
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use clap::{Parser, Subcommand};
use folder_flag::RunsOutput;
use listing::ListFlags;
use std::ffi::OsString;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  zerorun runs                                      list all runs
  zerorun runs --state running --since 2d           those that are running and began in the last two days
  zerorun runs --filter optimizer.params.lr=0.001 --sort best_val
  zerorun runs show SmolLM2                         the run whose name begins with this
  zerorun runs compare nano-20260131-10 nano-20260131-11
  zerorun runs export nano-20260131-10 --csv > metrics.csv
  zerorun runs rm nano-20260131-10 --yes";

/// List the records of training runs, or show, compare, export or remove some of them.
///
/// A record is a folder, named after the run and the time (UTC) at which the run began, in the folder of runs. RUN is
/// the name of such a folder, or a prefix that matches only one run. docs/runs.md describes how runs are recorded.
///
/// Exit code: 0 on success; 1 if a record is damaged (the others are still shown) or was not removed, or if
/// standard output could not be written; 2 if a run or the folder does not exist, or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "runs", bin_name = "zerorun runs", after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
struct RunsArguments {
    #[command(subcommand)]
    command: Option<RunsCommand>,

    #[command(flatten)]
    list: ListFlags,
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// List runs: name, state, start, duration, steps, last and best loss and validation loss
    List(ListFlags),
    /// Show everything about a run except its metrics by step
    Show(show::ShowFlags),
    /// Show how the settings and commands of runs differ, and the metrics of the runs side by side
    Compare(compare::CompareFlags),
    /// Print the metrics of a run
    Export(export::ExportFlags),
    /// Remove the records of runs
    Rm(remove::RemoveFlags),
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <RunsArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = RunsArguments::try_parse_from(words).map_err(CommandLineError)?;
    let output = match arguments.command {
        None => arguments.list.output(),
        Some(RunsCommand::List(list)) => list.output(),
        Some(RunsCommand::Show(show)) => show.output(),
        Some(RunsCommand::Compare(compare)) => compare.output(),
        Some(RunsCommand::Export(export)) => export.output(),
        Some(RunsCommand::Rm(remove)) => return Ok(remove.run()),
    };
    Ok(match output {
        Ok(RunsOutput { text, problems }) => {
            let is_written = text.is_empty() || print(text.trim_end_matches('\n'));
            problems.iter().for_each(|problem| eprint(&format!("zerorun: {problem}")));
            if is_written && problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => refused(&error, EXIT_SETUP),
    })
}
