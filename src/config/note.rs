//! Notes about an accepted configuration.

/// A note about a configuration, printed once, with the key's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Path of the key, such as `zero_optimization.contiguous_gradients`.
    pub path: String,
    /// The text of the note.
    pub message: String,
}
