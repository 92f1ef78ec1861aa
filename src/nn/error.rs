//! Errors of layers' settings.

/// Errors of the settings of low-rank adapters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A key that no setting has.
    #[error(
        "LoRA settings \"{settings}\": there is no key {found}{}; the keys are r, alpha, dropout and targets, each \
         with a value, and rslora and dora",
        suggestion.as_ref().map(|s| format!(" (did you mean {s}?)")).unwrap_or_default()
    )]
    UnknownKey {
        /// All settings as given.
        settings: String,
        /// The key found.
        found: String,
        /// The nearest key, when one is near.
        suggestion: Option<String>,
    },
    /// A key given twice.
    #[error("LoRA settings \"{settings}\": {key} is given twice; give it once")]
    Twice {
        /// All settings as given.
        settings: String,
        /// The key.
        key: String,
    },
    /// A value that cannot be used.
    #[error("LoRA settings: {key} is {found}, but must be {allowed}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A target that no projection has.
    #[error(
        "LoRA target {target} is not the end of a projection's name; the projections that can have an adapter are {known}, \
         and all-linear means all of them (norms, embeddings and the output projection get none)"
    )]
    NoSuchTarget {
        /// The target asked for.
        target: String,
        /// The last parts of the names of the model's projections.
        known: String,
    },
}
