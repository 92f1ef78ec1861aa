//! Errors of models and layers.

use std::path::PathBuf;

/// Errors of models and layers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A model configuration that cannot be built.
    #[error("model configuration: {key} is {found}, but must be {allowed}")]
    Config {
        /// The field.
        key: &'static str,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A value of a Hugging Face model's `config.json` that no model here computes with.
    #[error("{}: {key} is {found}, but must be {allowed}", file.display())]
    HuggingFace {
        /// The file.
        file: PathBuf,
        /// The key, with those around it.
        key: String,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A `config.json` of a model that is not known.
    #[error("{}: model_type is {found}, which is not known here; known are {known}", file.display())]
    UnknownModelType {
        /// The file.
        file: PathBuf,
        /// The type.
        found: String,
        /// The known ones.
        known: String,
    },
    /// A `config.json` that is no JSON object.
    #[error("{} is not the description of a model: {why}", file.display())]
    NoJson {
        /// The file.
        file: PathBuf,
        /// The problem.
        why: String,
    },
    /// A preset name that nobody defined.
    #[error(
        "there is no model preset \"{found}\"{}; the presets are {known}",
        suggestion.as_ref().map(|s| format!(" (did you mean \"{s}\"?)")).unwrap_or_default()
    )]
    UnknownPreset {
        /// The name asked for.
        found: String,
        /// The nearest known name, when one is near.
        suggestion: Option<String>,
        /// All names.
        known: String,
    },
    /// More tokens than the model has positions.
    #[error(
        "{length} tokens are longer than the model's context of {context}; cut the input or build the model with ctx \
         >= {length}"
    )]
    SequenceTooLong {
        /// Tokens given.
        length: usize,
        /// The model's context.
        context: usize,
    },
    /// A token id that the embedding's table does not have.
    #[error(
        "token id {id} at position {position} (counted over the flattened ids) is outside the embedding's table of \
         {rows} rows; ids must be below {rows}: the tokenizer and the model's vocabulary must agree"
    )]
    TokenOutOfRange {
        /// The id found.
        id: u32,
        /// Where, in the flattened ids.
        position: usize,
        /// Rows of the table.
        rows: usize,
    },
    /// A target that is no class of the logits.
    #[error(
        "target {target} at position {position} (counted over the flattened targets) is no class of logits with \
         {classes} classes; targets must be below {classes}"
    )]
    TargetOutOfRange {
        /// The target found.
        target: i64,
        /// Where, in the flattened targets.
        position: usize,
        /// Classes of the logits.
        classes: usize,
    },
}
