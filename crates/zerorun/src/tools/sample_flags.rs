//! Flags that say how samples are made of data files, of all commands that read them, and the progress of it.

use super::byte_progress::ByteProgress;
use candle_zero_finetune::{Columns, DataProgress, Truncation};
use clap::{Args, ValueEnum, value_parser};
use std::path::PathBuf;

/// How samples are made.
#[derive(Debug, Args)]
pub(super) struct SampleFlags {
    /// Tokens of a row, and the most of a sample [default: 1024, or the model's context where that is shorter]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(2..))]
    ctx: Option<u32>,

    /// What becomes of samples that are longer than a row
    #[arg(long, value_enum, default_value_t)]
    overlong: OverlongFlag,

    /// Stop at a record that cannot be used, rather than count it
    #[arg(long)]
    pub(super) strict: bool,

    /// What columns are read as: messages, prompt, completion, instruction, input, output, text, label, chosen, rejected,
    /// system, tools, history, context or weight; ignore=COLUMN leaves one out
    #[arg(long, value_name = "NAME=COLUMN,...")]
    pub(super) columns: Option<Columns>,

    /// The labels of --task classify in the order of their numbers [default: all of the files, sorted]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(super) labels: Vec<String>,

    /// Folder for tokenized data [default: candle-zero/samples in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub(super) cache: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum OverlongFlag {
    #[default]
    Truncate,
    Drop,
}

impl SampleFlags {
    /// What becomes of samples that are longer than a row.
    pub(super) fn overlong(&self) -> Truncation {
        match self.overlong {
            OverlongFlag::Truncate => Truncation::Truncate,
            OverlongFlag::Drop => Truncation::Drop,
        }
    }

    /// Tokens of a row, where they are said.
    pub(super) fn ctx(&self) -> Option<usize> {
        self.ctx.map(|ctx| ctx as usize)
    }
}

/// Progress over data files, in MiB of each.
#[derive(Default)]
pub(super) struct FileProgress {
    file: usize,
    bytes: ByteProgress,
}

impl FileProgress {
    /// Shows how far a file is.
    pub(super) fn tell(&mut self, at: DataProgress) {
        if at.file != self.file {
            self.finish();
            self.file = at.file;
        }
        self.bytes.tell(at.bytes, at.of);
    }

    /// Frees the line below.
    pub(super) fn finish(&mut self) {
        std::mem::take(&mut self.bytes).finish();
    }
}
