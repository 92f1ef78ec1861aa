//! Errors of models and layers.

use crate::util::counted;
use std::path::PathBuf;

/// Errors of models and layers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A model cannot be built from its configuration.
    #[error("model configuration: {key} is {found}, but must be {allowed}")]
    Config {
        /// The name of the field.
        key: &'static str,
        /// The value of the field.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A value in a Hugging Face model's `config.json` is not supported.
    #[error("{}: {key} is {found}, but must be {allowed}", file.display())]
    HuggingFace {
        /// The file.
        file: PathBuf,
        /// The key, with the keys that enclose it.
        key: String,
        /// The value of the key.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A `config.json` describes an unknown model.
    #[error("{}: model_type is {found}, which is not supported; the supported types are {known}", file.display())]
    UnknownModelType {
        /// The file.
        file: PathBuf,
        /// The model type.
        found: String,
        /// The known model types.
        known: String,
    },
    /// A `config.json` is not a JSON object.
    #[error("{} is not a model description: {why}", file.display())]
    NoJson {
        /// The file.
        file: PathBuf,
        /// The problem.
        why: String,
    },
    /// There is no preset with this name.
    #[error(
        "there is no model preset \"{found}\"{}; the presets are {known}",
        suggestion.as_ref().map(|s| format!(" (did you mean \"{s}\"?)")).unwrap_or_default()
    )]
    UnknownPreset {
        /// The requested name.
        found: String,
        /// The nearest known name, if one is close.
        suggestion: Option<String>,
        /// All known names.
        known: String,
    },
    /// The input has more tokens than the model has positions.
    #[error(
        "{length} tokens exceed the model's context of {context}; shorten the input, or build the model \
         with ctx >= {length}"
    )]
    SequenceTooLong {
        /// The number of tokens in the input.
        length: usize,
        /// The model's context length.
        context: usize,
    },
    /// The embedding table does not contain a token id.
    #[error(
        "token id {id} at position {position} (counted over the flattened ids) is outside the embedding's table of \
         {}; ids must be below {rows}: the tokenizer and the model's vocabulary must agree",
        counted(*rows, "row")
    )]
    TokenOutOfRange {
        /// The id found.
        id: u32,
        /// The index of the id in the flattened ids.
        position: usize,
        /// The number of rows in the table.
        rows: usize,
    },
    /// A target is not a class of the logits.
    #[error(
        "target {target} at position {position} (counted over the flattened targets) is outside the logits' \
         {}; targets must be below {classes}",
        if *classes == 1 { "1 class".into() } else { format!("{classes} classes") }
    )]
    TargetOutOfRange {
        /// The target found.
        target: i64,
        /// The index of the target in the flattened targets.
        position: usize,
        /// The number of classes of the logits.
        classes: usize,
    },
}
