//! Errors of fine-tuning: of a model's folder, its tokenizer and template, of data.

use std::path::PathBuf;

/// Errors of fine-tuning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinetuneError {
    /// A file of an adapter that cannot be used.
    #[error("{} is not an adapter that can be used: {reason}", path.display())]
    AdapterFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what is allowed.
        reason: String,
    },
    /// An adapter for another model.
    #[error(
        "the adapter {}{} is not one for this model: {tensor}: {problem}; take the model that it was trained on",
        path.display(),
        base.as_ref().map_or(String::new(), |base| format!(" (trained on {base})"))
    )]
    AdapterDoesNotFit {
        /// The adapter's folder.
        path: PathBuf,
        /// The model that it was trained on, where it says so.
        base: Option<String>,
        /// The tensor.
        tensor: String,
        /// What does not fit.
        problem: String,
    },
    /// A place to which nothing can be written.
    #[error("cannot write to {}: {problem}; give another folder", path.display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}
