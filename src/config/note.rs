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

/// Formats text from a file for a message: without control characters, and no longer than a line.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut safe: String = text
        .chars()
        .take(LONGEST)
        .flat_map(|c| {
            let escape = c.is_control();
            c.escape_debug().filter(move |_| escape).chain((!escape).then_some(c))
        })
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        safe.push_str("...");
    }
    safe
}
