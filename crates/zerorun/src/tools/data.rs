//! `zerorun data`: shows how fine-tuning reads data files.

use super::dataset_flags::{DatasetFlags, FileProgress};
use super::resolve_model::{HELP, ResolvedModel};
use crate::error::{FinetuneError, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, colours, print, refused};
use candle_zero::files::{InputKind, InputOutputPaths, OutputKind};
use candle_zero::models::DecoderConfig;
use candle_zero_finetune::hub::FileSelection;
use candle_zero_finetune::{
    BaseModel, DataOptions, Dataset, Source, Template, Tokenizer, TrainingTask, default_cache, show,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show how fine-tuning reads data files.
#[derive(Debug, Parser)]
#[command(name = "data", bin_name = "zerorun data", disable_help_subcommand = true)]
struct DataArguments {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    Show(ShowDataArguments),
}

/// Print the detected format of data files, the lines that cannot be used, and the first samples. The training
/// targets are green on a terminal, and in brackets otherwise.
///
/// Files are tokenized into the cache that `zerorun finetune` reads, unless they are already there.
///
/// Exit code: 0 if everything is shown, 1 if the output could not be written, 2 if the model's folder or a file cannot
/// be used, or the command line is wrong.
#[derive(Debug, Args)]
struct ShowDataArguments {
    #[arg(value_name = "MODEL_DIR", help = HELP)]
    model: PathBuf,

    /// Data files (.jsonl, .json, .csv, .tsv, .txt, ...), each optionally followed by a colon and a weight
    #[arg(value_name = "FILE", required = true)]
    files: Vec<String>,

    /// Number of samples to show per file
    #[arg(long, value_name = "N", default_value_t = 3)]
    count: usize,

    /// Task: assistant answers, preferences between answers, or text labels
    #[arg(long, value_enum, default_value_t)]
    task: ShowTaskArg,

    #[command(flatten)]
    samples: DatasetFlags,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum ShowTaskArg {
    #[default]
    Generate,
    Prefer,
    Classify,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <DataArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let DataCommand::Show(show) = DataArguments::try_parse_from(words).map_err(CommandLineError)?.command;
    Ok(match show.text() {
        Ok(text) if print(text.trim_end()) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => refused(&error, EXIT_SETUP),
    })
}

impl ShowDataArguments {
    /// Describes each file and its first samples.
    fn text(&self) -> Result<String> {
        // Neither config.json nor weights are required. If config.json exists, it gives the context length.
        let model = ResolvedModel::find(&self.model, FileSelection::WithoutWeights)?.path;
        let base = BaseModel::open(&model).ok();
        let (folder, tokenizer) = match &base {
            Some(base) => (base.folder(), base.tokenizer_path()),
            None => (model.as_path(), model.as_path()),
        };
        let from = tokenizer;
        let tokenizer = Tokenizer::open(from)?;
        let template = match Template::open(from, &tokenizer) {
            Err(error) if matches!(error.downcast_ref(), Some(FinetuneError::NoTemplate { .. })) => None,
            found => Some(found?),
        };
        let config_ctx = || DecoderConfig::read(folder.join("config.json")).map_or(usize::MAX, |config| config.ctx);
        let max_ctx = || base.as_ref().map_or_else(config_ctx, |base| base.config().ctx);
        let default_ctx = || max_ctx().min(DataOptions::DEFAULT_CTX);
        let task = match self.task {
            ShowTaskArg::Generate => TrainingTask::Generate,
            ShowTaskArg::Prefer => TrainingTask::Prefer,
            ShowTaskArg::Classify => TrainingTask::Classify,
        };
        let options = DataOptions {
            overlong: self.samples.overlong(),
            strict: self.samples.strict,
            labels: self.samples.labels.clone(),
            columns: self.samples.columns.clone().unwrap_or_default(),
            ..DataOptions::new(task, self.samples.ctx().unwrap_or_else(default_ctx))
        };
        let cache = self.samples.cache.clone().map_or_else(default_cache, Ok)?;
        let sources = self.files.iter().map(|file| Source::parse(file)).collect::<Result<Vec<_>>>()?;
        let outputs = InputOutputPaths::default().reads("MODEL_DIR", &model, InputKind::Model).writes(
            "--cache",
            &cache,
            OutputKind::Shared,
        );
        sources.iter().fold(outputs, |outputs, source| outputs.reads("FILE", &source.path, InputKind::File)).check()?;
        let mut progress = FileProgress::default();
        let mut report_progress = |at| progress.report(at);
        let dataset = Dataset::prepare(&sources, &tokenizer, template.as_ref(), &options, &cache, &mut report_progress);
        progress.finish();
        let dataset = dataset?;
        let mut text = String::new();
        for (path, report) in dataset.reports() {
            _ = writeln!(text, "{}: {report}", path.display());
            report.notes().iter().for_each(|note| _ = writeln!(text, "  {note}"));
            if report.skips_many() {
                _ = writeln!(
                    text,
                    "  more than a tenth of the records are skipped: zerorun finetune accepts the file only with \
                     --allow_skipped"
                );
            }
        }
        if !dataset.labels().is_empty() {
            _ = writeln!(text, "labels: {}", dataset.labels().join(", "));
        }
        text.push('\n');
        text.push_str(&show(&dataset, &tokenizer, self.count, colours())?);
        Ok(text)
    }
}
