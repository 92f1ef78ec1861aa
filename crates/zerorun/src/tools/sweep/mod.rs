//! `zerorun sweep`: searches for the best settings of a training run.
//!
//! ```text
//!   sweep file + flags -> definition (parameter_syntax) -> SweepSettings, CommandTemplate (trial_command)
//!
//!   runner: Sweep::ask -> trial_process: start, end -> Sweep::tell      the journal records each of these
//!   report: the table of trials        best: the best configuration as files
//!   shown: sweeps as the dashboard shows them
//! ```
//!
//! `candle_zero::sweep` makes the decisions; the files in this folder read settings, start processes and
//! keep their results.

mod best;
mod definition;
pub(crate) mod error;
mod folder;
mod journal;
mod parameter_syntax;
mod report;
mod runner;
mod shown;
mod sweep_flags;
mod trial_command;
mod trial_process;
mod trials_at_a_time;

use crate::error::{Error, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use crate::launch::{self, script};
use candle_zero::files::FolderLock;
use candle_zero::sweep::Sweep;
use clap::{Args, Parser, Subcommand};
use definition::SweepDefinition;
use folder::{StoredSweep, SweepFolder};
use journal::Journal;
use report::{as_json, summary, trials_table};
use runner::SweepRunner;
pub(super) use shown::ShownSweeps;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use sweep_flags::SweepFlags;
use trial_command::CommandTemplate;
use trial_process::{THREADS, TrialStarter};
use trials_at_a_time::{cores, trials_at_a_time};

const EXAMPLES: &str = "\
Examples:
  zerorun sweep sweep.toml
  zerorun sweep --steps 200 --metric val_loss --trials 32 --searcher tpe --scheduler asha --min_steps 10 \\
      --param --lr=log_uniform:1e-5,1e-3 --param --batch=choice:4,8,16 --out lr-sweep \\
      -- finetune Qwen3-0.6B --data chats.jsonl --val 5% --eval_every 10
  zerorun sweep show lr-sweep
  zerorun sweep resume lr-sweep --parallel 4

A sweep file:
  command = [\"finetune\", \"Qwen3-0.6B\", \"--data\", \"chats.jsonl\", \"--val\", \"5%\", \"--eval_every\", \"10\"]
  metric = \"val_loss\"
  steps = 200
  trials = 32
  searcher = \"tpe\"
  scheduler = \"asha\"
  asha = { min_steps = 10, eta = 4 }

  [parameters]
  \"--lr\" = { log_uniform = [1e-5, 1e-3] }
  \"--batch\" = [4, 8, 16]
  \"gradient_clipping\" = { uniform = [0.3, 2.0] }";

/// Search for the best settings of a training run. Trains many trials with different settings, and trains the promising
/// ones further. FILE is a sweep file in TOML; flags take precedence over it.
///
/// The command is `finetune` or a script with its arguments. A script must accept --ds_config FILE, --steps N, --save
/// DIR and --resume, as examples/train_gpt.rs does. The parameters are flags of the command, and keys of the
/// configuration, given by their paths.
///
/// The same command, or `zerorun sweep resume`, continues a sweep that was stopped or killed. docs/tools/sweep.md
/// describes the searchers and schedulers.
///
/// Exit code: 0 if the best configuration is written; 1 if too many trials have failed, none has a result, or the metric
/// is missing; 2 if the sweep or the command line is wrong; 128 + n if signal n has ended the sweep.
#[derive(Debug, Parser)]
#[command(name = "sweep", bin_name = "zerorun sweep", after_help = EXAMPLES, args_conflicts_with_subcommands = true,
          override_usage = "zerorun sweep [OPTIONS] [FILE] [-- COMMAND...]\n       zerorun sweep show DIR\n       \
                            zerorun sweep resume DIR [OPTIONS]")]
struct SweepArguments {
    #[command(subcommand)]
    command: Option<SweepCommand>,

    #[command(flatten)]
    flags: SweepFlags,
}

#[derive(Debug, Subcommand)]
enum SweepCommand {
    /// Show the trials of a sweep, the best first
    Show(SweepShowFlags),
    /// Continue a sweep
    Resume(SweepResumeFlags),
}

#[derive(Debug, Args)]
struct SweepShowFlags {
    /// Folder of the sweep
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct SweepResumeFlags {
    /// Folder of the sweep
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// Number of trials at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    parallel: Option<u16>,

    /// Maximum number of failed trials; the sweep ends if more fail
    #[arg(long = "max_failures", alias = "max-failures", value_name = "N")]
    max_failures: Option<u16>,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <SweepArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> std::result::Result<ExitCode, CommandLineError> {
    let typed = SweepArguments::try_parse_from(words).map_err(CommandLineError)?;
    let ready = match &typed.command {
        Some(SweepCommand::Show(flags)) => return Ok(flags.show().unwrap_or_else(|error| refused(&error, EXIT_SETUP))),
        Some(SweepCommand::Resume(flags)) => flags.ready(),
        None => begin(&typed.flags),
    };
    Ok(match ready {
        Ok(ready) => ready.runner.run().unwrap_or_else(|error| refused(&error, 1)),
        Err(error) => refused(&error, EXIT_SETUP),
    })
}

/// A sweep that is ready to run.
struct ReadySweep {
    runner: SweepRunner,
    /// Keeps other processes out of the folder.
    _lock: FolderLock,
}

/// Prepares the sweep that the sweep file and the flags define, whether it is new or continues.
fn begin(flags: &SweepFlags) -> Result<ReadySweep> {
    let (origin, table) = flags.definition()?;
    let definition = SweepDefinition::new(&origin, &table)?;
    let directory = std::env::current_dir().map_err(|source| Error::Io { action: "find", path: ".".into(), source })?;
    let mut template = CommandTemplate::new(&definition, &directory, None)?;
    template.check(&definition)?;
    let folder = SweepFolder::at(&flags.folder())?;
    folder.has_sweep()?;
    // If the script does not compile, no folder is created.
    build(&mut template, &definition)?;
    let lock = folder.lock()?;
    let configuration = template.configuration().cloned().unwrap_or_default();
    folder.store(&StoredSweep { definition: table, directory: directory.clone(), configuration })?;
    ready(definition, template, folder, directory, lock)
}

impl SweepResumeFlags {
    /// Prepares the sweep in the folder to continue.
    fn ready(&self) -> Result<ReadySweep> {
        let folder = SweepFolder::at(&self.folder)?;
        let StoredSweep { definition: mut table, directory, configuration } = folder.read()?;
        let free = [("parallel", self.parallel), ("max_failures", self.max_failures)];
        for (key, value) in free.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            table.insert(key.into(), value.into());
        }
        let definition = SweepDefinition::new(&folder.path().display().to_string(), &table)?;
        let mut template = CommandTemplate::new(&definition, &directory, Some(&configuration))?;
        build(&mut template, &definition)?;
        let lock = folder.lock()?;
        ready(definition, template, folder, directory, lock)
    }
}

impl SweepShowFlags {
    fn show(&self) -> Result<ExitCode> {
        let folder = SweepFolder::at(&self.folder)?;
        let stored = folder.read()?;
        let definition = SweepDefinition::new(&folder.path().display().to_string(), &stored.definition)?;
        let sweep = Journal::replay(&folder.journal(), Sweep::new(definition.settings.clone())?)?.sweep;
        let metric = &definition.metric;
        let text = match self.json {
            true => format!("{:#}", as_json(&sweep, metric)),
            false => format!("{}\n{}", trials_table(&sweep, metric), summary(&sweep, metric)),
        };
        Ok(if print(text) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Builds the script, once for all trials.
fn build(template: &mut CommandTemplate, definition: &SweepDefinition) -> Result<()> {
    let Some((typed, _)) = template.script() else { return Ok(()) };
    let target = script::find(typed)?;
    let built = launch::build(target, typed, definition.features.as_deref())?;
    template.set_program(built);
    Ok(())
}

/// Reads the journal and chooses how many trials run at a time.
fn ready(
    definition: SweepDefinition,
    template: CommandTemplate,
    folder: SweepFolder,
    directory: PathBuf,
    lock: FolderLock,
) -> Result<ReadySweep> {
    let (journal, state) = Journal::open(&folder.journal(), Sweep::new(definition.settings.clone())?)?;
    // A sweep that continues makes the same decisions only with the same number of trials at a time.
    let parallel = definition.parallel.or(state.parallel).unwrap_or_else(|| trials_at_a_time(&definition, &template));
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let threads = match (definition.threads, THREADS.iter().any(is_set)) {
        (Some(threads), _) => Some(threads),
        (None, true) => None,
        (None, false) => Some((cores() / (parallel * definition.ranks)).max(1)),
    };
    let launcher = std::env::current_exe()
        .map_err(|source| crate::error::LaunchError::Setup { what: "finding the launcher itself", source })?;
    let (metric, steps) = (definition.metric.clone(), definition.settings.steps);
    let starter = TrialStarter { launcher, template, folder, directory, threads, metric, steps };
    Ok(ReadySweep { runner: SweepRunner::new(definition, starter, (journal, state), parallel), _lock: lock })
}
