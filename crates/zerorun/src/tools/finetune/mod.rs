//! `zerorun finetune`: fine-tunes a model on data files.
//!
//! The initial process checks everything once and tokenizes the data. The ranks that it starts do the training
//! (`rank`), on this host or on several. They are started from the same executable with the same arguments and
//! `--as_rank=MODEL`.

mod flags;
mod foreign_flags;
mod rank;

use crate::error::{LaunchError, Result};
use crate::host_flags::{HOSTS, HostFlags, without_host_flags};
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use crate::launch::hosts::world_info::WorldInfo;
use crate::launch::local_job_spec::LocalJobSpec;
use crate::launch::nodes::NodeOptions;
use crate::launch::run_record_flags::RunRecordFlags;
use crate::launch::{self, LaunchMode, RunOptions};
use crate::launcher_variables::{LauncherVariables, of_process};
use crate::tools::dataset_flags::FileProgress;
use crate::tools::resolve_model::ResolvedModel;
use candle_zero::files::OutputKind;
use candle_zero::runs::{RunSpec, RunsFolder};
use candle_zero::util::counted;
use candle_zero_finetune::hub::FileSelection;
use candle_zero_finetune::{ClassifierBase, Options, PreparedRun};
use clap::parser::ValueSource;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, error::ErrorKind};
use flags::FinetuneFlags;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  zerorun finetune SmolLM2-135M-Instruct --data chats.jsonl --out adapter
  zerorun finetune Llama-3.2-1B -n 2 --data a.jsonl:2 b.jsonl --val 5% --epochs 3 --out adapter --save checkpoints --save_every 100
  zerorun finetune Qwen3-0.6B --full --dtype bf16 --data texts.txt --out model
  zerorun finetune Llama-2-7b-chat-hf -n 2 --qlora --data chats.jsonl --out adapter
  zerorun finetune Llama-3.2-1B-Instruct --dpo beta=0.1 --data preferences.jsonl --out adapter
  zerorun finetune bert-base-uncased --task classify --data reviews.csv --val 5% --epochs 3 --out model
  zerorun finetune Qwen3-0.6B --task classify --lora r=16 --data reviews.csv --out adapter";

/// The time that a step and the writes after it may take once a signal has asked the run to end. A second signal ends
/// the ranks immediately.
const GRACE: Duration = Duration::from_secs(600);
const ON_SIGNAL: &str = "zerorun: the current step will be finished and saved first; a second signal (Ctrl-C) stops \
                         the run immediately, and the training since the last checkpoint is lost";

/// Fine-tune a model in Hugging Face format, or a GGUF file, on conversations, prompts with completions, or text.
///
/// Data files are JSON lines, JSON, CSV, TSV, Parquet or plain text. Records are messages, prompt and completion,
/// instruction and output, ShareGPT conversations, or text; `zerorun data show` prints how they are read. The model is
/// trained on the assistant's messages, including the end of each turn.
///
/// The result is an adapter in PEFT format or, with --full, a model folder.
///
/// With --task classify, an encoder (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA, ModernBERT) or a language model
/// learns to predict the labels of texts (columns text and label). All weights are trained, and the result is a model
/// folder; with --lora or --qlora, the result is an adapter that includes the classifier.
#[derive(Debug, Parser)]
#[command(name = "finetune", bin_name = "zerorun finetune", after_help = EXAMPLES)]
struct FinetuneArguments {
    /// Number of ranks (processes) on each host. With --hostfile, overrides the slots in that file
    #[arg(short = 'n', long = "num_ranks", visible_alias = "num_gpus", alias = "num-ranks", value_name = "N",
          default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,

    /// Maximum number of job restarts after a rank failure; with --save and --resume, training resumes
    #[arg(long = "max_restarts", alias = "max-restarts", value_name = "K", default_value = "0")]
    max_restarts: u32,

    #[command(flatten)]
    hosts: HostFlags,

    /// Port where the hosts connect [default: 29500]
    #[arg(long = "master_port", alias = "master-port", value_name = "PORT",
          value_parser = clap::value_parser!(u16).range(1..), help_heading = HOSTS)]
    master_port: Option<u16>,

    #[command(flatten)]
    run: RunRecordFlags,

    #[command(flatten)]
    flags: FinetuneFlags,

    /// Start as a rank, with the model at this path
    #[arg(long = "as_rank", value_name = "MODEL", hide = true)]
    as_rank: Option<PathBuf>,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <FinetuneArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let refused =
        |text: String| Err(CommandLineError(FinetuneArguments::command().error(ErrorKind::ArgumentConflict, text)));
    let matches = FinetuneArguments::command()
        .try_get_matches_from(&words)
        .and_then(|matches| Ok((FinetuneArguments::from_arg_matches(&matches)?, matches)));
    let (mut arguments, matches) = matches.map_err(|error| CommandLineError(foreign_flags::explain(error)))?;
    let zerorun_only =
        [("--max_restarts", arguments.max_restarts > 0), ("--dashboard", arguments.run.dashboard.is_some())];
    let zerorun_only = [zerorun_only, arguments.flags.island.given()].concat();
    let hosts = &arguments.hosts;
    let conflict = hosts.launcher_conflict(&zerorun_only).or_else(|| hosts.min_nodes_conflict(arguments.max_restarts));
    let conflict = conflict.or_else(|| arguments.run.conflict());
    let conflict = conflict.or_else(|| arguments.flags.restarts_conflict(arguments.max_restarts));
    if let Some(text) = arguments.flags.check().err().or(conflict) {
        return refused(text);
    }
    let has_ranks_flag = matches.value_source("ranks") != Some(ValueSource::DefaultValue);
    let ranks_per_host = has_ranks_flag.then_some(usize::from(arguments.ranks));
    let job_hosts = match arguments.as_rank {
        // This host's launcher has already read the flags.
        Some(_) => LaunchMode::OneHost,
        None => {
            match arguments.hosts.job_hosts(ranks_per_host, &mut arguments.master_port, &LauncherVariables(&of_process))
            {
                Ok(job_hosts) => job_hosts,
                Err(error) => return refused(error.to_string()),
            }
        }
    };
    Ok(arguments.run(words, &job_hosts))
}

impl FinetuneArguments {
    fn run(&self, words: Vec<OsString>, job_hosts: &LaunchMode) -> ExitCode {
        if let Some(path) = &self.as_rank {
            return match self.flags.options(ResolvedModel::already_resolved(&self.flags.model, path)) {
                Ok(options) => {
                    let run = RunSpec::by_default(&self.flags.run_name()).command(typed_words(&words));
                    rank::run(Options { run: Some(run), ..options }, &self.flags)
                }
                Err(error) => refused(&error, EXIT_SETUP),
            };
        }
        match self.launch(words, job_hosts) {
            Ok(code) => ExitCode::from(code),
            Err(error) => refused(&error, EXIT_SETUP),
        }
    }

    /// Checks everything, downloads the model if needed, and starts the ranks. Returns their exit code.
    fn launch(&self, words: Vec<OsString>, job_hosts: &LaunchMode) -> Result<u8> {
        let is_one_host = matches!(job_hosts, LaunchMode::OneHost);
        if let Some(processes) = mpi_processes(|name| std::env::var(name).ok()).filter(|_| is_one_host) {
            return Err(LaunchError::ToolInRanks { tool: "finetune", processes }.into());
        }
        let world = job_hosts.world()?;
        let ranks_per_host = usize::from(self.ranks);
        let (ranks, per_host) = match (job_hosts, &world) {
            (LaunchMode::PerHostLaunchers(node), _) => (node.nodes * ranks_per_host, ranks_per_host),
            (_, Some(world)) => {
                let slots: Vec<usize> = world.hosts().iter().map(|host| host.slots.len()).collect();
                (slots.iter().sum(), slots.iter().copied().max().unwrap_or(1))
            }
            (_, None) => (ranks_per_host, ranks_per_host),
        };
        let model = ResolvedModel::find(&self.flags.model, FileSelection::All)?;
        let path = model.path.clone();
        let options = self.flags.options(model)?;
        // The first host's ranks write the result.
        let writes = !matches!(job_hosts, LaunchMode::PerHostLaunchers(NodeOptions { node: 1.., .. }));
        let claim = || {
            options.claim(|outputs| {
                let outputs = match &self.flags.metrics {
                    Some(path) => outputs.writes("--metrics", path, OutputKind::Lines),
                    None => outputs,
                };
                match &self.run.folder {
                    Some(folder) if !RunsFolder::is_off(folder) => outputs.writes("--runs", folder, OutputKind::Shared),
                    _ => outputs,
                }
            })
        };
        let _claims = writes.then(claim).transpose()?;
        prepare(options, (ranks, per_host), writes)?;
        self.start(words, &path, job_hosts, world)
    }

    /// Starts the ranks and returns their exit code.
    fn start(
        &self,
        words: Vec<OsString>,
        model: &Path,
        job_hosts: &LaunchMode,
        world: Option<WorldInfo>,
    ) -> Result<u8> {
        let mut as_rank = OsString::from("--as_rank=");
        as_rank.push(model);
        let mut words = without_host_flags(words, &FinetuneArguments::command(), "ranks");
        // The flag is inserted directly after the name of the tool, because at the end it could follow a `--`.
        words.insert(1, as_rank);
        let program = std::env::current_exe()
            .map_err(|source| LaunchError::Setup { what: "finding the launcher itself", source })?;
        let job = LocalJobSpec {
            program,
            args: words,
            world: usize::from(self.ranks),
            timeout: None,
            grace: GRACE,
            on_signal: Some(ON_SIGNAL),
            script: None,
            master_port: self.master_port,
            prometheus: None,
            run: self.run.clone(),
            island: self.flags.island.options(),
            restart: 0,
            timeline: None,
            multi_host: None,
            cores: None,
            devices: None,
        };
        launch::run_on(
            job,
            job_hosts,
            world.as_ref(),
            &RunOptions { max_restarts: self.max_restarts, ..RunOptions::default() },
        )
    }
}

/// Returns the words of a rank's command line that the user has typed.
fn typed_words(words: &[OsString]) -> Vec<String> {
    let words = words.iter().map(|word| word.to_string_lossy().into_owned());
    std::iter::once("zerorun".to_owned()).chain(words.filter(|word| !word.starts_with("--as_rank="))).collect()
}

/// Returns the number of processes of this command that an MPI launcher has started, if more than one.
fn mpi_processes(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    // In a Slurm batch script, the task count of the complete job is also set, but only that of the job step counts.
    let names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];
    names.iter().find_map(|name| variable(name)?.trim().parse().ok().filter(|processes| *processes > 1))
}

/// Checks everything that can be checked before a rank is started, tokenizes the data, and, on the first host, reports
/// the findings. `ranks` contains the total number of ranks and the maximum number of ranks on a host.
fn prepare(options: Options, ranks: (usize, usize), reports: bool) -> Result<()> {
    let mut progress = FileProgress::default();
    let prepared = PreparedRun::new(options, &mut |at| progress.report(at));
    progress.finish();
    let prepared = prepared?;
    prepared.check_for(ranks.0, ranks.1)?;
    if !reports {
        return Ok(());
    }
    for note in prepared.classifier().map(ClassifierBase::notes).unwrap_or_default() {
        eprint(note);
    }
    let data = [("training", Some(prepared.training())), ("validation", prepared.validation())];
    for (kind, data) in data.into_iter().filter_map(|(kind, data)| Some((kind, data?))) {
        print(format!("{kind} data: {}", counted(data.len(), "sample")));
        for (path, report) in data.reports() {
            print(format!("  {}: {report}", path.display()));
            report.notes().iter().for_each(|note| eprint(&format!("  {}: {note}", path.display())));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn several_of_it_that_a_launcher_of_mpi_has_started_are_refused() {
        let processes =
            |name: &'static str, value: &'static str| mpi_processes(|asked| (asked == name).then(|| value.to_string()));
        assert_eq!(processes("OMPI_COMM_WORLD_SIZE", "4"), Some(4));
        for (name, value) in [("PMI_SIZE", "1"), ("SLURM_NTASKS", "8"), ("PMI_SIZE", "x")] {
            assert_eq!(processes(name, value), None, "{name}={value}");
        }
        let error = LaunchError::ToolInRanks { tool: "finetune", processes: processes("PMI_SIZE", "2").unwrap() };
        insta::assert_snapshot!(error, @"mpirun or srun has started 2 processes of `zerorun finetune`, each of which would be a separate job; start the command once, without mpirun or srun: `zerorun finetune -n 2 ...` starts that many ranks on this host");
    }
}
