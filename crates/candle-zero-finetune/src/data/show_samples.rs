//! Formats samples for people to read.

use super::dataset::Dataset;
use crate::chat::tokenizer::Tokenizer;
use crate::error::Result;
use crate::error::unit;
use candle_zero::util::counted;
use std::fmt::Write as _;

/// The marks before and after text that is to be predicted: brackets, or green.
const MARKS: [[&str; 2]; 2] = [["⟦", "⟧"], ["\u{1b}[32;1m", "\u{1b}[0m"]];

/// Returns the first `count` samples of each file as text. Text that is to be predicted is green if `colour` is set,
/// otherwise in brackets.
///
/// # Errors
/// [`FinetuneError::Decode`](crate::error::FinetuneError::Decode).
pub fn show(dataset: &Dataset, tokenizer: &Tokenizer, count: usize, colour: bool) -> Result<String> {
    let mut text = String::new();
    let [open, close] = MARKS[usize::from(colour)];
    for i in dataset.first(count) {
        let sample = dataset.sample(i);
        let (path, line) = (dataset.path(i), sample.line);
        let label = dataset.labels().get(sample.label as usize);
        let label = label.map(|label| format!(", label {}", printable(label))).unwrap_or_default();
        let (tokens, targets) = (counted(sample.len(), "token"), counted(sample.target_count(), "target"));
        _ = writeln!(text, "{}, {} {line}: {tokens}, {targets}{label}", path.display(), unit(path));
        let (mut stream, mut in_target) = (tokenizer.stream(false), false);
        for (j, id) in sample.ids().enumerate() {
            let piece = stream.push(id)?;
            // The token stream holds back incomplete characters. Such text is shown in the style of its last token.
            if !piece.is_empty() && sample.is_target(j) != in_target {
                text.push_str(if in_target { close } else { open });
                in_target = !in_target;
            }
            text.push_str(&printable(&piece));
        }
        text.push_str(&printable(&stream.finish()?));
        text.push_str(if in_target { close } else { "" });
        text.push_str("\n\n");
    }
    Ok(text)
}

/// Returns a text that is harmless to a terminal: control characters become visible symbols, except for tabs and line
/// feeds.
fn printable(text: &str) -> String {
    let visible = |c: char| match c {
        '\n' | '\t' => c,
        '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)).unwrap_or(c),
        '\u{7f}'..='\u{9f}' => '\u{2421}',
        c => c,
    };
    text.chars().map(visible).collect()
}
