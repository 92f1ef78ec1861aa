//! `zerorun sweep`: searches for the best settings of a training run.
//!
//! ```text
//!   sweep file + flags -> definition (parameter_syntax) -> SweepSettings, CommandTemplate (trial_command)
//!
//!   runner: Sweep::ask -> trial_starter, trial_process: start, end -> Sweep::tell    the journal records each of these
//!     on this host:   trial_launch: zerorun SCRIPT or zerorun finetune -> trial_results
//!     on other hosts: remote_trial: ssh -> remote_request_handler: trial_launch -> trial_results
//!                     messages: host_request
//!   trial_hosts: the hosts of a hostfile, and slots on them         host_check: the checks of the other hosts
//!   report: the table of trials        best_trial_files: the best configuration as files
//!   dashboard_view: sweeps as the dashboard shows them
//! ```
//!
//! `candle_zero::sweep` makes the decisions; the files in this folder read settings, start processes and
//! keep their results.

mod best_trial_files;
mod dashboard_view;
mod definition;
pub(crate) mod error;
mod folder;
mod host_check;
mod host_request;
mod journal;
mod parameter_syntax;
mod remote_request_handler;
mod remote_trial;
mod report;
mod runner;
mod sweep_flags;
mod trial_command;
mod trial_hosts;
mod trial_launch;
mod trial_process;
mod trial_results;
mod trial_starter;
mod trials_at_a_time;

use crate::error::{Error, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use crate::launch::exported_variables::exports;
use crate::launch::hosts::HostSlots;
use crate::launch::remote_shell::{RemoteShellOptions, as_text, is_here};
use crate::launch::{self, script_target};
use candle_zero::files::FolderLock;
use candle_zero::offload::available_memory;
use candle_zero::sweep::Sweep;
use clap::{Args, Parser, Subcommand};
pub(super) use dashboard_view::DashboardSweepReader;
use definition::SweepDefinition;
use folder::{StoredSweep, SweepFolder};
use host_request::{HostCheckResult, ON_HOST};
use journal::Journal;
use remote_trial::RemoteTrialLauncher;
use report::{as_json, summary, trials_table};
use runner::SweepRunner;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use sweep_flags::SweepFlags;
use trial_command::CommandTemplate;
use trial_hosts::{HostCapacity, TrialHosts, read_hostfile};
use trial_launch::THREADS;
use trial_results::TrialResultReader;
use trial_starter::TrialStarter;
use trials_at_a_time::{cores, memory_of_trial, trials_at_a_time};

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

/// Search for the best settings of a training run. Runs many trials with different settings, and trains the promising
/// ones further. FILE is a sweep file in TOML; flags take precedence over it.
///
/// The command is `finetune` or a script with its arguments. A script must accept --ds_config FILE, --steps N, --save
/// DIR and --resume, as examples/train_gpt.rs does. The parameters are flags of the command, and keys of the
/// configuration, given by their paths.
///
/// The same command, or `zerorun sweep resume`, continues a sweep that was stopped or killed. docs/tools/sweep.md
/// describes the searchers and schedulers.
///
/// Exit code: 0 if the best configuration is written; 1 if too many trials have failed, none has a result, the metric
/// is missing, all hosts are lost, or a file or standard output could not be written; 2 if the sweep or the command
/// line is wrong; 128 + n if signal n has ended the sweep.
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

    /// Run the trials on the hosts listed in this file, over ssh [default: the hostfile of the sweep, if it has one]
    #[arg(short = 'H', long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <SweepArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> std::result::Result<ExitCode, CommandLineError> {
    if let [_, word, request] = words.as_slice()
        && word == ON_HOST
    {
        return Ok(remote_request_handler::run(&request.to_string_lossy()));
    }
    let arguments = SweepArguments::try_parse_from(words).map_err(CommandLineError)?;
    let ready = match &arguments.command {
        Some(SweepCommand::Show(flags)) => return Ok(flags.show().unwrap_or_else(|error| refused(&error, EXIT_SETUP))),
        Some(SweepCommand::Resume(flags)) => flags.ready(),
        None => begin(&arguments.flags),
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
    read_hostfile(&definition, &directory)?;
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
    /// Prepares to continue the sweep in the folder.
    fn ready(&self) -> Result<ReadySweep> {
        let folder = SweepFolder::at(&self.folder)?;
        let StoredSweep { definition: mut table, directory, configuration } = folder.read()?;
        let overrides = [("parallel", self.parallel), ("max_failures", self.max_failures)];
        for (key, value) in overrides.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            table.insert(key.into(), value.into());
        }
        if let Some(file) = &self.hostfile {
            // The paths of the definition are relative to the directory of the sweep.
            let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            table.insert("hostfile".into(), as_text(path.as_os_str())?.into());
            // The filters were for the hosts of the other file.
            ["include", "exclude"].iter().for_each(|key| _ = table.remove(*key));
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
        let replayed = Journal::replay(&folder.journal(), Sweep::new(definition.settings.clone())?)?;
        let (sweep, hosts) = (&replayed.sweep, &replayed.hosts);
        let metric = &definition.metric;
        let text = match self.json {
            true => format!("{:#}", as_json(sweep, hosts, metric)),
            false => format!("{}\n{}", trials_table(sweep, hosts, metric), summary(sweep, metric)),
        };
        Ok(if print(text) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Builds the script, once for all trials.
fn build(template: &mut CommandTemplate, definition: &SweepDefinition) -> Result<()> {
    let Some((script, _)) = template.script() else { return Ok(()) };
    let target = script_target::find(script)?;
    let program = launch::build(target, script, definition.features.as_deref())?;
    template.set_program(program);
    Ok(())
}

/// Checks the hosts, reads the journal, and chooses how many trials run at a time.
fn ready(
    definition: SweepDefinition,
    template: CommandTemplate,
    folder: SweepFolder,
    directory: PathBuf,
    lock: FolderLock,
) -> Result<ReadySweep> {
    let launcher = std::env::current_exe()
        .map_err(|source| crate::error::LaunchError::Setup { what: "finding the launcher itself", source })?;
    let slots = read_hostfile(&definition, &directory)?;
    let remote = match &slots {
        Some(_) => RemoteTrialLauncher {
            shell: RemoteShellOptions { port: definition.hosts.ssh_port, detects_lost_hosts: true },
            launcher: launcher.clone(),
            directory: directory.clone(),
            exports: exports_of_trials()?,
        },
        None => RemoteTrialLauncher::default(),
    };
    let host_capacities = slots.as_deref().map(|slots| capacities(slots, &remote, &folder, &template)).transpose()?;
    let (journal, state) = Journal::open(&folder.journal(), Sweep::new(definition.settings.clone())?)?;
    // A sweep that continues makes the same decisions only with the same number of trials at a time.
    let parallel = definition.parallel.or(state.parallel);
    let (parallel, hosts) = match slots.zip(host_capacities) {
        None => {
            let parallel = parallel.unwrap_or_else(|| trials_at_a_time(&definition, &template));
            (parallel, TrialHosts::only_here(parallel, cores()))
        }
        Some((slots, host_capacities)) => {
            let memory = memory_of_trial(&definition, &template);
            let (hosts, left_out) = TrialHosts::from_hostfile(&definition, &slots, &host_capacities, memory)?;
            left_out.iter().for_each(|text| eprint(&format!("zerorun: {text}")));
            (parallel.unwrap_or_else(|| hosts.max_trials()), hosts)
        }
    };
    let threads = match (definition.threads, are_threads_set()) {
        (Some(threads), _) => Some(threads),
        (None, true) => None,
        (None, false) => Some(hosts.threads(parallel, definition.ranks)),
    };
    let results = TrialResultReader { folder, metric: definition.metric.clone(), steps: definition.settings.steps };
    let starter = TrialStarter { launcher, template, results, directory, threads, hosts: remote };
    Ok(ReadySweep { runner: SweepRunner::new(definition, starter, (journal, state), (parallel, hosts)), _lock: lock })
}

/// Returns whether the user's variables set the number of threads of a rank.
fn are_threads_set() -> bool {
    THREADS.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// Returns the variables that trials on other hosts get.
fn exports_of_trials() -> Result<Vec<(String, String)>> {
    let mut all = exports()?;
    for name in THREADS {
        if let Ok(value) = std::env::var(name)
            && !all.iter().any(|(known, _)| known == name)
        {
            all.push((name.into(), value));
        }
    }
    Ok(all)
}

/// Returns the capacity of each host of a hostfile. Other hosts are asked for theirs.
fn capacities(
    slots: &[HostSlots],
    remote: &RemoteTrialLauncher,
    folder: &SweepFolder,
    template: &CommandTemplate,
) -> Result<Vec<HostCapacity>> {
    let here: Vec<bool> = slots.iter().map(|host| is_here(&host.name)).collect();
    let others = slots.iter().zip(&here).filter(|(_, is_here)| !**is_here).map(|(host, _)| host.name.as_str());
    let program = template.script().map(|(path, _)| path);
    let mut checks = host_check::check(&others.collect::<Vec<_>>(), remote, folder, program)?.into_iter();
    let this_host = || HostCapacity { is_here: true, cores: cores(), memory: available_memory() };
    let other_host = |check: HostCheckResult| HostCapacity { is_here: false, cores: check.cores, memory: check.memory };
    let capacities = here.into_iter().map(|is_here| match is_here {
        true => this_host(),
        false => other_host(checks.next().expect("each other host has answered")),
    });
    Ok(capacities.collect())
}
