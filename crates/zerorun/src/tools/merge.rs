//! `zerorun merge`: writes a model with an adapter merged in, as a Hugging Face folder or as GGUF.

use super::byte_progress::ByteProgress;
use super::resolve_model::{HELP, ResolvedModel};
use crate::error::{OutputError, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use candle_zero::checkpoint::ConsolidatedDtype;
use candle_zero::files::{InputKind, InputOutputPaths, OutputKind};
use candle_zero::util::counted;
use candle_zero_finetune::hub::FileSelection;
use candle_zero_finetune::{Adapter, BaseModel, GgufFormat, MergedModel};
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, ValueEnum};
use std::cell::RefCell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Merge an adapter into a model, tensor by tensor, and write the result for transformers or llama.cpp.
///
/// Exit code: 0 if everything is written, 1 if standard output could not be written, 2 if the model, the adapter or the
/// command line is wrong, or a file cannot be written. With code 2, OUT stays unchanged.
#[derive(Debug, Parser)]
#[command(name = "merge", bin_name = "zerorun merge")]
struct MergeArguments {
    #[arg(help = HELP)]
    model: PathBuf,

    /// Adapter: folder with adapter_config.json and adapter_model.safetensors. Without one, the model is only converted
    adapter: Option<PathBuf>,

    /// Output folder, which must be absent or empty; for GGUF, output file, which must be absent
    #[arg(long, value_name = "OUT")]
    out: PathBuf,

    /// Output format [default: gguf-f16 if OUT ends in .gguf, else hf]
    #[arg(long, value_enum)]
    format: Option<MergeFormat>,

    /// Precision of a Hugging Face folder [default: that of the model]
    #[arg(long, value_enum)]
    dtype: Option<MergeDtype>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MergeFormat {
    /// Folder with config.json, safetensors files and tokenizer files
    Hf,
    /// GGUF file in f16
    GgufF16,
    /// GGUF file with matrices in blocks of 32 8-bit numbers
    #[value(name = "gguf-q8_0", alias = "gguf-q8-0")]
    GgufQ80,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum MergeDtype {
    F32,
    Bf16,
    F16,
}

impl From<MergeDtype> for ConsolidatedDtype {
    fn from(dtype: MergeDtype) -> Self {
        match dtype {
            MergeDtype::F32 => Self::F32,
            MergeDtype::Bf16 => Self::Bf16,
            MergeDtype::F16 => Self::F16,
        }
    }
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <MergeArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = MergeArguments::try_parse_from(words).map_err(CommandLineError)?;
    if arguments.dtype.is_some() && arguments.format() != MergeFormat::Hf {
        let problem = "--dtype is the precision of a Hugging Face folder; for a GGUF file, use --format";
        return Err(CommandLineError(MergeArguments::command().error(ErrorKind::ArgumentConflict, problem)));
    }
    Ok(arguments.run().unwrap_or_else(|error| refused(&error, EXIT_SETUP)))
}

impl MergeArguments {
    fn format(&self) -> MergeFormat {
        let is_gguf = || self.out.extension().is_some_and(|extension| extension == "gguf");
        self.format.unwrap_or_else(|| if is_gguf() { MergeFormat::GgufF16 } else { MergeFormat::Hf })
    }

    fn run(self) -> Result<ExitCode> {
        let format = self.format();
        // A folder is checked when it is written.
        if format != MergeFormat::Hf && self.out.symlink_metadata().is_ok() {
            let problem = "a file or folder of that name already exists".to_owned();
            return Err(OutputError::Refused { path: self.out, problem }.into());
        }
        let model = ResolvedModel::find(&self.model, FileSelection::All)?.path;
        let kind = if format == MergeFormat::Hf { OutputKind::Folder } else { OutputKind::File };
        let outputs =
            InputOutputPaths::default().reads("MODEL", &model, InputKind::Model).writes("--out", &self.out, kind);
        let outputs = match &self.adapter {
            Some(adapter) => outputs.reads("ADAPTER", adapter, InputKind::Model),
            None => outputs,
        };
        let _claims = outputs.claim()?;
        let base = BaseModel::open(model)?;
        let adapter = self.adapter.as_ref().map(Adapter::read).transpose()?;
        let progress = RefCell::new(ByteProgress::default());
        let report_progress = |done, total| progress.borrow_mut().report(done, total);
        let merged = MergedModel::new(&base, adapter.as_ref())?.reporting(&report_progress);
        match format {
            MergeFormat::Hf => merged.write_hugging_face(&self.out, self.dtype.map(Into::into))?,
            MergeFormat::GgufF16 => merged.write_gguf(&self.out, GgufFormat::F16)?,
            MergeFormat::GgufQ80 => merged.write_gguf(&self.out, GgufFormat::Q8_0)?,
        }
        let (tensors, changed) = merged.counts();
        drop(merged);
        progress.into_inner().finish();
        let note = adapter.map_or(String::new(), |_| format!(", {changed} of them with the adapter"));
        let is_printed = print(format_args!("{}: {}{note}", self.out.display(), counted(tensors, "tensor")));
        Ok(if is_printed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
