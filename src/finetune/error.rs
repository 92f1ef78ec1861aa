//! Errors of fine-tuning: of a model's folder, its tokenizer and template, of data.

use std::path::PathBuf;

/// Errors of fine-tuning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinetuneError {
    /// A path under which there is no model.
    #[error(
        "{} is no model: {reason}; give a folder with config.json and safetensors files, as Hugging Face has them, or a \
         GGUF file",
        path.display()
    )]
    NoModel {
        /// The path.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A tensor of another shape than the description says.
    #[error(
        "tensor {name} in {} has shape {found:?}, and {} describes one of {expected:?}; take both files from one model",
        file.display(), description.display()
    )]
    NotAsDescribed {
        /// The tensor, as the model calls it.
        name: String,
        /// The file of weights.
        file: PathBuf,
        /// Its shape there.
        found: Vec<usize>,
        /// The file of the description.
        description: PathBuf,
        /// The shape by the description.
        expected: Vec<usize>,
    },
    /// More tokens than rows of the embedding.
    #[error(
        "the tokenizer has ids up to {last}, and the model's embedding has {rows} rows: {beyond} ids have none; take the \
         tokenizer that belongs to the model"
    )]
    TokensBeyondEmbedding {
        /// The largest id.
        last: usize,
        /// Rows of the embedding.
        rows: usize,
        /// Ids without a row.
        beyond: usize,
    },
    /// A GGUF file that cannot be read.
    #[error("{} is not a GGUF file that can be read: {reason}", path.display())]
    BadGguf {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A value of a GGUF file's metadata that no model here computes with.
    #[error("{}: {key} is {found}, but must be {allowed}", path.display())]
    GgufValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A tensor of a GGUF file in a format that is not read.
    #[error("tensor {name} in {} is of type {found}; read are {allowed}", path.display())]
    GgufDtype {
        /// The file.
        path: PathBuf,
        /// The tensor, as the file calls it.
        name: String,
        /// Its type.
        found: String,
        /// Those that are read.
        allowed: &'static str,
    },
}
