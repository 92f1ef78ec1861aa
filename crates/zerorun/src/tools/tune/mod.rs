//! `zerorun tune`: runs a script briefly with different settings, and writes the fastest configuration.
//!
//! ```text
//!   stages x offload x micro batches    short runs, except those that the estimate or a smaller batch rules out
//!   the fastest of these                its buckets and overlaps, one key after another
//!   results.jsonl                       finished runs; a second search resumes from them
//! ```

mod results_file;
mod search_space;
mod settings;
mod trial;
mod trial_outcome;

use super::bench::size;
use super::model_size_flags::ModelSizeFlags;
use crate::error::{Error, OptimError, OutputError, Result, ToolError};
use crate::launch;
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use crate::launch::script_target;
use crate::tools::script_arguments::take;
use crate::tools::trial_subprocess::write_atomically;
use candle_zero::config::{Config, RunValues};
use candle_zero::estimate::{Estimate, Shapes};
use candle_zero::files::{InputKind, InputOutputPaths, OutputDigests, OutputKind, OutputLocks, folder_of};
use candle_zero::offload::available_memory;
use candle_zero::util::{counted, format_bytes};
use clap::Parser;
use results_file::{TrialRow, TuneResultsFile};
use search_space::{SearchSpace, TuneCandidate};
use settings::TuneSettings;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use trial::TrialRunner;
use trial_outcome::{RepeatedTrials, TrialOutcome};

/// Find the fastest configuration of a training script on this machine. Runs the script for a few steps with different
/// stages, micro batches and offload, then with different bucket sizes, overlap_comm and reduce_scatter, and writes the
/// fastest configuration within the memory limit.
///
/// The script must accept --ds_config FILE, --steps N and --metrics FILE, as examples/train_gpt.rs does. Finished runs
/// are kept: the same command resumes an interrupted search. These keys of the autotuning section have an effect: fast,
/// results_dir, exps_dir, start_profile_step, end_profile_step, metric, arg_mappings, tuner_early_stopping (if given),
/// tuner_num_trials, min_train_batch_size, max_train_batch_size, min_train_micro_batch_size_per_gpu,
/// max_train_micro_batch_size_per_gpu, num_tuning_micro_batch_sizes.
///
/// Exit code: 0 if the fastest configuration is written, 1 if no run succeeded or a file or standard output cannot be
/// written, 2 if the configuration, the script or the command line is wrong.
#[derive(Debug, Parser)]
#[command(
    name = "tune",
    bin_name = "zerorun tune",
    override_usage = "zerorun tune [OPTIONS] SCRIPT --ds_config FILE [ARGS]..."
)]
struct TuneArguments {
    /// Number of ranks of each run
    #[arg(short = 'n', long = "num_ranks", alias = "num-ranks", value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,

    /// Memory that a rank may use, such as 512MiB or 4GiB; a number without a unit is in bytes [default: the rank's
    /// share of the memory available now]
    #[arg(long = "memory_limit", alias = "memory-limit", value_name = "SIZE", value_parser = size)]
    memory_limit: Option<u64>,

    /// Optimizer steps of each run; measurement begins at autotuning.start_profile_step (3) [default:
    /// autotuning.end_profile_step, 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=100_000))]
    steps: Option<u64>,

    /// Stages to try
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,1,2,3",
          value_parser = clap::value_parser!(u8).range(0..=3))]
    stages: Vec<u8>,

    /// Micro batches to try [default: those in the autotuning section; without them, the
    /// configuration's micro batch and two and four times its size]
    #[arg(long = "micro_batches", alias = "micro-batches", value_name = "LIST", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..))]
    micro_batches: Vec<u32>,

    /// Also try offload to files in this folder
    #[arg(long = "nvme_path", alias = "nvme-path", value_name = "DIR")]
    nvme_path: Option<PathBuf>,

    /// Try only stages, offload and micro batches, not bucket sizes, overlap_comm or reduce_scatter
    #[arg(long)]
    fast: bool,

    /// Number of times that the fastest configuration and those close to it are run again before one is chosen: a
    /// single run is unreliable on a busy machine
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u32).range(..=100))]
    repeats: u32,

    /// Time limit of a run, in seconds
    #[arg(long = "run_limit", alias = "run-limit", value_name = "SECONDS", default_value = "600",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    run_limit: u64,

    /// Folder for the results [default: autotuning.results_dir, else autotuning_results]
    #[arg(long = "results_dir", alias = "results-dir", value_name = "DIR")]
    results_dir: Option<PathBuf>,

    /// File for the fastest configuration [default: best.json in the results folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Cargo features for the build, as for `cargo build --features`
    #[arg(long, value_name = "FEATURES")]
    features: Option<String>,

    /// Rust file or executable, followed by its arguments
    #[arg(value_names = ["SCRIPT", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <TuneArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> std::result::Result<ExitCode, CommandLineError> {
    let arguments = TuneArguments::try_parse_from(words).map_err(CommandLineError)?;
    Ok(match TuneSearch::new(arguments) {
        Ok(search) => search.run().unwrap_or_else(|error| refused(&error, 1)),
        Err(error) => refused(&error, EXIT_SETUP),
    })
}

/// A search in progress.
struct TuneSearch {
    settings: TuneSettings,
    space: SearchSpace,
    trial: TrialRunner,
    record: TuneResultsFile,
    /// The script's model, if it is one of candle-zero's.
    shapes: Option<Shapes>,
    ranks: usize,
    memory_limit: u64,
    out: PathBuf,
    /// The digests of the files that earlier searches have written to `out`.
    output_digests: OutputDigests,
    /// Locks that keep other jobs from writing to `out` and to the results.
    _claims: OutputLocks,
    /// The number of further runs of the configurations close to the fastest.
    repeats: u32,
    rows: Vec<TrialRow>,
}

/// The key of the `--out` file in the record of the files that searches have written.
const BEST_FILE_KEY: &str = "best";
/// The maximum fraction by which the first run of a candidate may be slower than the fastest one if the candidate is to
/// be repeated. The two fastest candidates are repeated in any case.
const REPEAT_MARGIN: f64 = 0.15;
/// The maximum number of candidates that are repeated.
const MAX_REPEATED: usize = 4;

impl TuneSearch {
    fn new(arguments: TuneArguments) -> Result<Self> {
        let mut command = arguments.command.into_iter();
        let script = command.next().map(PathBuf::from).unwrap_or_default();
        let mut args: Vec<OsString> = command.collect();
        let ranks = usize::from(arguments.ranks);
        let (shapes, hidden_size) = model_of(&args).unzip();
        let file = trial::take_config(&mut args)?;
        let original = candle_zero::config::read_value(&file.1)?;
        let settings = TuneSettings::read(&original, arguments.steps, arguments.fast)?;
        // The values that the script uses for "auto".
        let run = RunValues { total_num_steps: Some(settings.steps), hidden_size, ..RunValues::default() };
        // Without a valid configuration, there is nothing to vary.
        let config = Config::load_for(file.1.clone(), ranks, &run)?;
        config.optimizer.as_ref().ok_or(OptimError::NoOptimizer)?;
        settings.check_mappings(&original, &config.to_deepspeed_json())?;
        let target = script_target::find(&script)?;
        let results = arguments.results_dir.unwrap_or_else(|| settings.results_dir.clone());
        let out = arguments.out.unwrap_or_else(|| results.join("best.json"));
        let outputs = InputOutputPaths::default().reads("--ds_config", &file.1, InputKind::File).reads(
            "SCRIPT",
            &script,
            InputKind::File,
        );
        let outputs = outputs.writes("--results_dir", &results, OutputKind::Shared);
        outputs.check()?;
        let record = TuneResultsFile::open(&results)?;
        if !folder_of(&out).is_dir() {
            let folder = folder_of(&out).display();
            let problem = format!("{folder}, the folder of --out, does not exist; create it, or give another file");
            return Err(ToolError::Tune { problem }.into());
        }
        let claims = outputs.writes("--out", &out, OutputKind::File).claim()?;
        let output_digests = OutputDigests::of_run(&results);
        if out.metadata().is_ok_and(|found| found.len() > 0) && !output_digests.is_own(BEST_FILE_KEY, &out) {
            let problem = "a file that tune did not write already exists there, so it is not replaced".into();
            return Err(OutputError::Refused { path: out, problem }.into());
        }
        let program = launch::build(target, &script, arguments.features.as_deref())?;
        let (stages, micro_batches) = (arguments.stages, arguments.micro_batches);
        let space = SearchSpace::new(&original, (&config, run), &settings, stages, micro_batches, arguments.nvme_path)?;
        let trial = TrialRunner {
            program,
            args,
            insert_index: file.0,
            ranks,
            folder: settings.exps_dir.clone().unwrap_or_else(|| results.join("experiments")),
            first_measured: settings.first_measured,
            steps: settings.steps,
            mappings: settings.mappings.clone(),
            limit: Duration::from_secs(arguments.run_limit),
        };
        let memory_limit = arguments.memory_limit.unwrap_or_else(|| available_memory() / ranks as u64);
        let (repeats, rows) = (arguments.repeats, Vec::new());
        Ok(Self {
            settings,
            space,
            trial,
            record,
            shapes,
            ranks,
            memory_limit,
            out,
            output_digests,
            _claims: claims,
            repeats,
            rows,
        })
    }

    fn run(mut self) -> Result<ExitCode> {
        self.settings.unused_key_notes.iter().for_each(|note| eprint(&format!("zerorun: autotuning.{note}")));
        eprint(&format!(
            "zerorun: each run has {} on {}, with at most {} of memory per rank",
            counted(self.trial.steps, "step"),
            counted(self.ranks, "rank"),
            format_bytes(self.memory_limit)
        ));
        let continues = self.search_batches()?;
        if continues && !self.settings.fast {
            self.search_keys()?;
        }
        self.repeat_the_fastest()?;
        self.sort();
        if !print(results_file::table(&self.rows)) {
            return Ok(ExitCode::FAILURE);
        }
        let Some(best) = self.best() else {
            eprint("zerorun: no run succeeded within the limit; nothing was written");
            return Ok(ExitCode::FAILURE);
        };
        let config = self.space.config(&best);
        let text = format!("{config:#}\n");
        let name = self.out.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let recorded = self.output_digests.begin_file(BEST_FILE_KEY, &name, text.as_bytes());
        recorded.map_err(|source| Error::Io { action: "write to", path: self.out.clone(), source })?;
        write_atomically(&self.out, &text)?;
        let mut text = format!("\nfastest: {best}");
        let config = self.space.load(&config)?;
        if let Some(original) = self.space.original_batch(&config) {
            let batch = config.batch.train_batch_size;
            text += &format!("\ntrain batch {batch}, originally {original}: the learning rate may need to change");
        }
        if let Some(others) = self.within_noise() {
            text += &format!("\nalso within the noise of these runs: {others}");
        }
        let printed = print(format!("{text}\nwritten to {}", self.out.display()));
        Ok(if printed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Sorts the rows, the best one first.
    fn sort(&mut self) {
        self.rows.sort_by(|a, b| self.settings.metric.order(&a.outcome, &b.outcome));
    }

    /// Runs the candidates close to the fastest again, in turn, so that a temporary disturbance of the machine affects
    /// them equally.
    fn repeat_the_fastest(&mut self) -> Result<()> {
        self.sort();
        let metric = self.settings.metric;
        let Some(fastest) = self.rows.first().and_then(|row| metric.speed(&row.outcome)) else { return Ok(()) };
        let is_close =
            |row: &TrialRow| metric.speed(&row.outcome).is_some_and(|speed| speed >= fastest * (1.0 - REPEAT_MARGIN));
        let successful = self.rows.iter().take_while(|row| metric.speed(&row.outcome).is_some()).count();
        if successful < 2 {
            return Ok(());
        }
        // A candidate far ahead may have been lucky, or all others may have been disturbed, so at least the next one is
        // repeated too.
        let close = self.rows.iter().take_while(|row| is_close(row)).take(MAX_REPEATED).count().max(2);
        let mut runs: Vec<Vec<TrialOutcome>> = self.rows[..close].iter().map(|row| vec![row.outcome.clone()]).collect();
        for round in 1..=self.repeats {
            for (row, runs) in runs.iter_mut().enumerate() {
                let candidate = self.rows[row].candidate.clone();
                let config = self.space.config(&candidate);
                let resolved = self.space.load(&config)?;
                let id = format!("{}-{round}", self.trial.id(&config));
                let outcome = match self.record.find(&id) {
                    Some(outcome) => outcome,
                    None => {
                        let outcome = self.trial.run(&id, &config, &resolved)?;
                        self.record.add(&id, &candidate, &outcome)?;
                        outcome
                    }
                };
                let outcome = outcome.apply_memory_limit(self.memory_limit);
                eprint(&format!("zerorun: repeated run of {candidate}: {outcome}"));
                runs.push(outcome);
            }
        }
        for (row, runs) in self.rows.iter_mut().zip(runs).filter(|(_, runs)| runs.len() > 1) {
            if let Some(runs) = RepeatedTrials::of(&runs) {
                row.outcome = runs.median.clone();
                row.runs = Some(runs);
            }
        }
        Ok(())
    }

    /// Returns the candidates that are slower than the fastest by no more than the spread of repeated runs of either.
    fn within_noise(&self) -> Option<String> {
        let (best, others) = self.rows.split_first()?;
        let speed_of = |row: &TrialRow| self.settings.metric.speed(&row.outcome);
        let speed = speed_of(best)?;
        let best_spread = best.runs.as_ref()?.spread;
        let is_close = |row: &&TrialRow| {
            let spread = row.runs.as_ref().map(|runs| runs.spread.max(best_spread));
            let behind = speed_of(row).map(|other| (speed - other) / speed);
            spread.zip(behind).is_some_and(|(spread, behind)| behind <= spread)
        };
        let names: Vec<String> = others.iter().filter(is_close).map(|row| row.candidate.to_string()).collect();
        (!names.is_empty()).then(|| names.join("; "))
    }

    /// Searches stages, offload and micro batches. Returns false if the search ends early.
    fn search_batches(&mut self) -> Result<bool> {
        let mut without_gain = 0;
        for group in self.space.candidate_groups() {
            for candidate in group {
                let previous_best = self.best();
                let outcome = self.try_out(&candidate)?;
                // Before the first successful run, there is nothing to improve on.
                if outcome.has_run() && previous_best.is_some() {
                    without_gain = if self.best() == previous_best { without_gain + 1 } else { 0 };
                }
                if self.settings.early_stopping.is_some_and(|most| without_gain >= most) {
                    eprint(&format!("zerorun: the search ends here; experiments without a gain: {without_gain}"));
                    return Ok(false);
                }
                if outcome.is_too_large() {
                    break;
                }
            }
        }
        Ok(true)
    }

    /// Searches further keys of the fastest candidate so far, one after another.
    fn search_keys(&mut self) -> Result<()> {
        for key in 0.. {
            let Some(best) = self.best() else { return Ok(()) };
            let Some(candidates) = self.space.variations(&best, key) else { return Ok(()) };
            for candidate in candidates {
                self.try_out(&candidate)?;
            }
        }
        Ok(())
    }

    /// Returns the outcome of a candidate, which is run unless its outcome is known or a rule excludes it.
    fn try_out(&mut self, candidate: &TuneCandidate) -> Result<TrialOutcome> {
        if let Some(row) = self.rows.iter().find(|row| row.candidate == *candidate) {
            return Ok(row.outcome.clone());
        }
        let config = self.space.config(candidate);
        let resolved = self.space.load(&config);
        let excess_bytes = resolved.as_ref().ok().and_then(|resolved| self.excess_bytes(resolved));
        let outcome = match (&resolved, excess_bytes) {
            (Err(error), _) => {
                let reason = error.to_string().lines().collect::<Vec<_>>().join(" ");
                TrialOutcome::NotRun { reason }
            }
            (Ok(_), Some(needed_bytes)) => TrialOutcome::TooLarge { needed_bytes },
            (Ok(resolved), None) => {
                let id = self.trial.id(&config);
                match self.record.find(&id) {
                    Some(outcome) => outcome,
                    None if self.rows.iter().filter(|r| r.outcome.has_run()).count() >= self.settings.trials => {
                        TrialOutcome::NotRun { reason: "autotuning.tuner_num_trials is exhausted".into() }
                    }
                    None => {
                        let outcome = self.trial.run(&id, &config, resolved)?;
                        self.record.add(&id, candidate, &outcome)?;
                        outcome
                    }
                }
            }
        };
        let outcome = outcome.apply_memory_limit(self.memory_limit);
        eprint(&format!("zerorun: {candidate}: {outcome}"));
        let batch = |config: &Config| self.space.original_batch(config).map(|_| config.batch.train_batch_size);
        let other_batch = resolved.as_ref().ok().and_then(batch);
        self.rows.push(TrialRow { candidate: candidate.clone(), outcome: outcome.clone(), other_batch, runs: None });
        Ok(outcome)
    }

    /// Returns the size in bytes of the model's state if this size exceeds the limit.
    fn excess_bytes(&self, config: &Config) -> Option<u64> {
        let estimate = Estimate::new(self.shapes.as_ref()?, config).ok()?;
        // The peaks of two kinds of state need not coincide, but what is held between steps is part of each peak.
        let state = estimate.memory.rows.iter().filter(|row| row.formula.is_some()).map(|row| row.bytes);
        let held: usize = state.clone().map(|bytes| bytes.held).sum();
        let more = state.map(|bytes| bytes.peak - bytes.held).max().unwrap_or(0);
        Some((held + more) as u64).filter(|bytes| *bytes > self.memory_limit)
    }

    fn best(&self) -> Option<TuneCandidate> {
        let successful = self.rows.iter().filter(|row| row.outcome.is_success());
        let best = successful.min_by(|a, b| self.settings.metric.order(&a.outcome, &b.outcome))?;
        Some(best.candidate.clone())
    }
}

/// Returns the shapes and the width of the model that the script's arguments name, if it is one of candle-zero's.
pub(super) fn model_of(args: &[OsString]) -> Option<(Shapes, u64)> {
    #[derive(Parser)]
    struct ScriptModelFlags {
        #[arg(long)]
        model: String,
        #[command(flatten)]
        sizes: ModelSizeFlags,
    }
    const NAMES: [&str; 8] =
        ["--model", "--n_layer", "--n_head", "--n_kv_head", "--n_embd", "--n_inner", "--ctx", "--vocab"];
    let mut remaining = args.to_vec();
    let mut words = vec![OsString::from("model")];
    for name in NAMES {
        if let Some((_, value)) = take(&mut remaining, &[name]) {
            words.extend([name.into(), value]);
        }
    }
    let model = ScriptModelFlags::try_parse_from(words).ok()?;
    Some((model.sizes.preset(&model.model).ok()?.shapes().ok()?, model.sizes.width(Some(&model.model))?))
}
