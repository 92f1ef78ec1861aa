//! Errors in the settings of layers.

/// Errors in the settings of low-rank adapters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A key is unknown.
    #[error(
        "LoRA settings \"{settings}\": there is no key {found}{}; the keys are r, alpha, dropout, targets and \
         target_parameters, each with a value, and the switches rslora and dora",
        suggestion.as_ref().map(|s| format!(" (did you mean {s}?)")).unwrap_or_default()
    )]
    UnknownKey {
        /// All settings as given.
        settings: String,
        /// The key found.
        found: String,
        /// The nearest known key, if one is close.
        suggestion: Option<String>,
    },
    /// A key is given twice.
    #[error("LoRA settings \"{settings}\": {key} is given twice; give it once")]
    RepeatedKey {
        /// All settings as given.
        settings: String,
        /// The key.
        key: String,
    },
    /// A value is not allowed.
    #[error("LoRA settings: {key} is {found}, but must be {allowed}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value of the key.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A target does not match any projection.
    #[error(
        "LoRA target {target} is not the end of a projection's name; the projections that can have an adapter are \
         {known}; all-linear means all of them (norms, embeddings, routers, experts and the output projection get none)"
    )]
    NoSuchTarget {
        /// The requested target.
        target: String,
        /// The last components of the names of the model's projections.
        known: String,
    },
    /// A target does not match any parameter of experts.
    #[error("LoRA target parameter {target} is not the end of the name of a parameter of experts; {known}")]
    NoSuchParameter {
        /// The requested target.
        target: String,
        /// The parameters of experts that the model has, as the end of the message.
        known: String,
    },
}
