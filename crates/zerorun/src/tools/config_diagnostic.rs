//! Renders the problems of a configuration: the line of each problem, with the position underlined.

use crate::launch::console::colours;
use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use candle_zero::config::TextPosition;
use std::fmt::Write;
use std::ops::Range;

/// The number of problems shown with their lines. Further ones are only listed: a file of 4 MiB may have a problem
/// every few bytes.
const MAX_DETAILED_PROBLEMS: usize = 100;

/// One problem, from any kind of error.
pub(super) struct ConfigDiagnostic {
    /// The path of the key; `$` stands for the complete file.
    pub(super) path: String,
    /// The name of the broken rule.
    pub(super) rule: &'static str,
    pub(super) position: Option<TextPosition>,
    /// The first position of a duplicate key.
    pub(super) first: Option<TextPosition>,
    pub(super) message: String,
}

impl ConfigDiagnostic {
    /// Creates a problem at one position, or at none.
    pub(super) fn new(path: String, rule: &'static str, position: Option<TextPosition>, message: String) -> Self {
        Self { path, rule, position, first: None, message }
    }
}

/// Renders each problem, in colour if standard output is a terminal and `NO_COLOR` is not set or is empty.
pub(super) fn render_all(file: &str, text: &str, diagnostics: &[ConfigDiagnostic]) -> String {
    let renderer = if colours() { Renderer::styled() } else { Renderer::plain() };
    let lines = LineIndex::of(text);
    let mut all = String::new();
    for diagnostic in diagnostics.iter().take(MAX_DETAILED_PROBLEMS) {
        // Writing to a String cannot fail.
        let _ = writeln!(all, "{}\n", render(&renderer, file, &lines, diagnostic));
    }
    for ConfigDiagnostic { path, position, message, .. } in diagnostics.iter().skip(MAX_DETAILED_PROBLEMS) {
        let position = position.map(|position| format!("{position}: ")).unwrap_or_default();
        let _ = writeln!(all, "{position}`{path}`: {message}");
    }
    all
}

fn render(renderer: &Renderer, file: &str, lines: &LineIndex<'_>, diagnostic: &ConfigDiagnostic) -> String {
    let title = match diagnostic.path.as_str() {
        "$" => diagnostic.message.clone(),
        path => format!("`{path}`: {}", diagnostic.message),
    };
    let title = Level::ERROR.primary_title(title);
    let Some(position) = diagnostic.position else {
        return renderer.render(&[annotate_snippets::Group::with_title(title)]);
    };
    let from = diagnostic.first.map_or(position.line, |first| first.line.min(position.line));
    // Only these lines are passed on: otherwise each rendering would scan the complete text.
    let (start, source) = lines.between(from, position.line);
    let span = |position: TextPosition| {
        let at = lines.token(position);
        at.start - start..at.end - start
    };
    let mut snippet = Snippet::source(source).line_start(from).path(file);
    if let Some(first) = diagnostic.first {
        snippet = snippet.annotation(AnnotationKind::Context.span(span(first)).label("first here"));
    }
    renderer.render(&[title.element(snippet.annotation(AnnotationKind::Primary.span(span(position))))])
}

/// A text and the start of each of its lines, numbered as in [`TextPosition`].
struct LineIndex<'a> {
    text: &'a str,
    /// The byte at which each line begins.
    starts: Vec<usize>,
}

impl<'a> LineIndex<'a> {
    fn of(text: &'a str) -> Self {
        // Positions do not count a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { text, starts }
    }

    /// Returns the start of a line, or the end of the text if the line does not exist.
    fn start(&self, line: usize) -> usize {
        self.starts.get(line - 1).copied().unwrap_or(self.text.len())
    }

    /// Returns the start and the text of a range of lines, both ends included.
    fn between(&self, first: usize, last: usize) -> (usize, &'a str) {
        let start = self.start(first);
        (start, self.text[start..self.start(last + 1)].trim_end_matches(['\r', '\n']))
    }

    /// Returns the byte range of the word, number, string or symbol at a position; empty at the end of a line.
    fn token(&self, position: TextPosition) -> Range<usize> {
        let (line_start, line) = self.between(position.line, position.line);
        let at = line.char_indices().nth(position.column - 1).map_or(line.len(), |(at, _)| at);
        let rest = &line[at..];
        let length = match rest.chars().next() {
            None => 0,
            Some('"') => quoted_length(rest),
            Some(c) if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            Some(c) => c.len_utf8(),
        };
        line_start + at..line_start + at + length
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '+' | '.')
}

/// Returns the length of the quoted string at the start of `text`, or of all of `text` if the string does not end.
fn quoted_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str, line: usize, column: usize) -> &str {
        let lines = LineIndex::of(text);
        let range = lines.token(TextPosition { line, column });
        &lines.text[range]
    }

    #[test]
    fn the_whole_token_at_a_place_is_marked() {
        let text = "\u{feff}{\r\n  \"k\\\"ey\": -1.5e3, \"ä\": \"ö ü\",\r\n  \"list\": [true]\n  \"open";
        for (line, column, expected) in [
            (1, 1, "{"),
            (1, 2, ""),
            (2, 3, "\"k\\\"ey\""),
            (2, 12, "-1.5e3"),
            (2, 20, "\"ä\""),
            (2, 25, "\"ö ü\""),
            (3, 11, "["),
            (3, 12, "true"),
            (4, 3, "\"open"),
            (4, 8, ""),
            (5, 1, ""),
            (99, 99, ""),
        ] {
            assert_eq!(token(text, line, column), expected, "line {line}, column {column}");
        }
    }

    #[test]
    fn beyond_the_most_there_is_a_line_each() {
        let position = Some(TextPosition { line: 1, column: 2 });
        let diagnostic = |n: usize| {
            let message = "is unknown".to_string();
            ConfigDiagnostic::new(format!("k{n}"), "unknown key", position, message)
        };
        let all =
            render_all("f.json", "{\"a\": 1}", &(0..MAX_DETAILED_PROBLEMS + 2).map(diagnostic).collect::<Vec<_>>());
        assert_eq!(all.matches(" ^^^").count(), MAX_DETAILED_PROBLEMS, "{all}");
        assert!(all.ends_with("line 1, column 2: `k100`: is unknown\nline 1, column 2: `k101`: is unknown\n"), "{all}");
    }
}
