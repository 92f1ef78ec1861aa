//! The flags for turning data files into samples, shared by all commands that read data files, and the display of the
//! progress through the files.

use super::byte_progress::ByteProgress;
use candle_zero_finetune::{ColumnMapping, FileReadProgress, Truncation};
use clap::{Args, ValueEnum, value_parser};
use std::path::PathBuf;

/// The flags for turning data files into samples.
#[derive(Debug, Args)]
pub(super) struct DatasetFlags {
    /// Context length: tokens per row, and the maximum length of a sample [default: 1024, or the model's context if
    /// shorter]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(2..))]
    ctx: Option<u32>,

    /// Handling of samples longer than --ctx
    #[arg(long, value_enum, default_value_t)]
    overlong: OverlongFlag,

    /// Stop at the first record that cannot be used, instead of skipping and counting it
    #[arg(long)]
    pub(super) strict: bool,

    /// Meaning of columns: messages, prompt, completion, instruction, input, output, text, label, chosen, rejected,
    /// system, tools, history, context or weight; ignore=COLUMN leaves that column out
    #[arg(long, value_name = "NAME=COLUMN,...")]
    pub(super) columns: Option<ColumnMapping>,

    /// Labels for --task classify, in the order of their ids [default: all labels in the files, sorted]
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

impl DatasetFlags {
    /// Returns how to handle samples that are longer than a row.
    pub(super) fn overlong(&self) -> Truncation {
        match self.overlong {
            OverlongFlag::Truncate => Truncation::Truncate,
            OverlongFlag::Drop => Truncation::Drop,
        }
    }

    /// Returns the number of tokens of a row, if given.
    pub(super) fn ctx(&self) -> Option<usize> {
        self.ctx.map(|ctx| ctx as usize)
    }
}

/// The progress through the data files, in MiB for each file.
#[derive(Default)]
pub(super) struct FileProgress {
    file: usize,
    bytes: ByteProgress,
}

impl FileProgress {
    /// Shows the progress of a file.
    pub(super) fn report(&mut self, at: FileReadProgress) {
        if at.file != self.file {
            self.finish();
            self.file = at.file;
        }
        self.bytes.report(at.bytes, at.total_bytes);
    }

    /// Ends the progress line.
    pub(super) fn finish(&mut self) {
        std::mem::take(&mut self.bytes).finish();
    }
}
