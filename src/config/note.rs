//! Notes about an accepted configuration.

/// A note about a configuration. It is printed once, with the key's path.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigNote {
    /// The path of the key, such as `zero_optimization.contiguous_gradients`.
    pub path: String,
    /// The text of the note.
    pub message: String,
}

/// Formats text from a file for a message: escapes control characters, and shows at most 60 characters.
pub(crate) fn printable(text: &str) -> String {
    const MAX_SHOWN_CHARS: usize = 60;
    let mut safe: String = text
        .chars()
        .take(MAX_SHOWN_CHARS)
        .flat_map(|c| {
            let escape = c.is_control();
            c.escape_debug().filter(move |_| escape).chain((!escape).then_some(c))
        })
        .collect();
    if text.chars().nth(MAX_SHOWN_CHARS).is_some() {
        safe.push_str("...");
    }
    safe
}
