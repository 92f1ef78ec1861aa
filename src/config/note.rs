//! What is said about a configuration that is taken.

/// One thing that has to be said about a configuration, once, by path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Path of the key, such as `zero_optimization.contiguous_gradients`.
    pub path: String,
    /// What is to be known.
    pub message: String,
}
