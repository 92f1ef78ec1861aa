//! Flags that say how samples are made, of all commands that read data.

use crate::error::Result;
use crate::finetune::{DataOptions, DataProgress, Overlong, Task, default_cache};
use crate::tools::progress::ByteProgress;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, value_parser};
use std::path::PathBuf;

/// How samples are made.
#[derive(Debug, Clone, Args)]
pub(in crate::tools) struct DataFlags {
    /// What is learned: to generate what the assistant says, to prefer one answer to another, to classify a text
    #[arg(long, value_name = "TASK", default_value = "generate",
          value_parser = PossibleValuesParser::new(["generate", "prefer", "classify"]).map(|name| task(&name)))]
    pub task: Task,

    /// The most tokens of a sample, and of a packed row
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = value_parser!(u32).range(2..))]
    pub ctx: u32,

    /// What becomes of samples that are longer than --ctx: cut at the end, or left out
    #[arg(long, value_name = "WHAT", default_value = "truncate",
          value_parser = PossibleValuesParser::new(["truncate", "drop"]).map(|name| overlong(&name)))]
    pub overlong: Overlong,

    /// Stop at a record that cannot be used, rather than count and skip it
    #[arg(long)]
    pub strict: bool,

    /// The labels of --task classify in the order of their numbers; by default all of the files, sorted
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub labels: Vec<String>,

    /// Folder of tokenized samples [default: candle-zero/samples in the user's cache]
    #[arg(long = "cache", value_name = "DIR")]
    pub cache: Option<PathBuf>,
}

fn task(name: &str) -> Task {
    match name {
        "classify" => Task::Classify,
        "prefer" => Task::Prefer,
        _ => Task::Generate,
    }
}

fn overlong(name: &str) -> Overlong {
    match name {
        "drop" => Overlong::Drop,
        _ => Overlong::Truncate,
    }
}

impl DataFlags {
    /// How samples are made.
    pub(in crate::tools) fn options(&self) -> DataOptions {
        DataOptions {
            overlong: self.overlong,
            strict: self.strict,
            labels: self.labels.clone(),
            ..DataOptions::new(self.task, self.ctx as usize)
        }
    }

    /// The folder of tokenized samples.
    ///
    /// # Errors
    /// Those of [`default_cache`].
    pub(in crate::tools) fn cache(&self) -> Result<PathBuf> {
        self.cache.clone().map_or_else(default_cache, Ok)
    }
}

/// Progress over data files, in MiB of each.
#[derive(Default)]
pub(in crate::tools) struct FileProgress {
    file: usize,
    bytes: ByteProgress,
}

impl FileProgress {
    /// Shows how far a file is.
    pub(in crate::tools) fn tell(&mut self, at: DataProgress) {
        if at.file != self.file {
            self.finish();
            self.file = at.file;
        }
        self.bytes.tell(at.bytes, at.of);
    }

    /// Frees the line below.
    pub(in crate::tools) fn finish(&mut self) {
        std::mem::take(&mut self.bytes).finish();
    }
}
