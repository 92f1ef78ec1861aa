//! Options for turning records into samples.

use super::column_mapping::ColumnMapping;

/// The task for which a model is trained on the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TrainingTask {
    /// To generate the assistant's messages, a completion, or the continuation of a text.
    #[default]
    Generate,
    /// To predict a text's label.
    Classify,
    /// To prefer one answer to another. Samples come in pairs, with the chosen one first.
    Prefer,
}

/// The handling of samples that are longer than the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Truncation {
    /// Longer samples are cut at the context length. Raw text is cut into pieces of that length, and only a last piece
    /// of a single token is left out.
    #[default]
    Truncate,
    /// Longer samples are left out.
    Drop,
}

/// Options for building samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// The task for which the model is trained.
    pub task: TrainingTask,
    /// The maximum number of tokens of a sample.
    pub ctx: usize,
    /// The handling of longer samples.
    pub overlong: Truncation,
    /// Whether a record that cannot be used causes an error instead of being skipped and counted.
    pub strict: bool,
    /// The names of the labels, in the order of their indices. If empty, all labels of the files are used, sorted.
    pub labels: Vec<String>,
    /// The roles of columns whose names differ from the known ones.
    pub columns: ColumnMapping,
}

impl DataOptions {
    /// The default maximum number of tokens of a sample, if the model's context is long enough.
    pub const DEFAULT_CTX: usize = 1024;

    /// Returns options for samples of at most `ctx` tokens for `task`.
    pub fn new(task: TrainingTask, ctx: usize) -> Self {
        Self {
            task,
            ctx,
            overlong: Truncation::Truncate,
            strict: false,
            labels: vec![],
            columns: ColumnMapping::default(),
        }
    }
}
