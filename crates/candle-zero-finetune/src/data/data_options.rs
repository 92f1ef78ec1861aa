//! How samples are made of records.

use super::columns::Columns;

/// What is learned from data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Task {
    /// To say what the assistant says, to complete, or to go on with a text.
    #[default]
    Generate,
    /// To tell a text's label.
    Classify,
    /// To prefer one answer to another. Samples come in pairs, the chosen one first.
    Prefer,
}

/// How samples longer than the context are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Truncation {
    /// It is cut at the context; raw text is cut into pieces of that length, none lost.
    #[default]
    Truncate,
    /// It is left out.
    Drop,
}

/// How samples are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// What is learned.
    pub task: Task,
    /// The most tokens of a sample.
    pub ctx: usize,
    /// What becomes of longer ones.
    pub overlong: Truncation,
    /// Whether a record that cannot be used is an error, rather than counted.
    pub strict: bool,
    /// The names of the labels, in the order of their numbers; empty: all labels of the files, sorted.
    pub labels: Vec<String>,
    /// What the columns are read as, where they have names of their own.
    pub columns: Columns,
}

impl DataOptions {
    /// Tokens of a sample at most, where nothing else is said and the model's context has as many.
    pub const USUAL_CTX: usize = 1024;

    /// Samples of at most `ctx` tokens for `task`.
    pub fn new(task: Task, ctx: usize) -> Self {
        Self { task, ctx, overlong: Truncation::Truncate, strict: false, labels: vec![], columns: Columns::default() }
    }
}
