//! Tables and values as text.

use candle_zero::runs::ValueAtStep;
use serde_json::Value;
use std::fmt::Write as _;

/// The maximum number of characters of a value in a table.
const MAX_CELL: usize = 60;

/// Returns rows, the first of which contains the headings, as aligned columns. Columns for which `is_number` holds are
/// aligned to the right.
pub(in crate::tools) fn table(rows: &[Vec<String>], is_number: impl Fn(usize) -> bool) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let gap = if column > 0 { "  " } else { "" };
            let width = widths[column];
            _ = match is_number(column) {
                true => write!(line, "{gap}{cell:>width$}"),
                false => write!(line, "{gap}{cell:<width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Returns a text without characters that control a terminal: records may contain anything.
pub(in crate::tools) fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() && letter != '\n' { '\u{fffd}' } else { letter }).collect()
}

/// Returns a text on one line, shortened if it is long.
pub(in crate::tools) fn cell(text: &str) -> String {
    let line = plain(text).replace('\n', " ");
    match line.chars().count() > MAX_CELL {
        true => line.chars().take(MAX_CELL - 3).chain("...".chars()).collect(),
        false => line,
    }
}

/// Returns a number in a form that is easy to read.
pub(in crate::tools) fn number(value: f64) -> String {
    match value {
        _ if !value.is_finite() => value.to_string(),
        _ if value == value.trunc() && value.abs() < 1e9 => format!("{value}"),
        _ if value != 0.0 && (value.abs() < 1e-3 || value.abs() >= 1e7) => format!("{value:.3e}"),
        _ => format!("{value:.4}"),
    }
}

/// Returns the value of a summary, or a dash.
pub(in crate::tools) fn at_step(value: Option<ValueAtStep>) -> String {
    value.map_or("-".into(), |value| loss(value.value))
}

/// Returns a loss, with four decimals unless it is very large or not finite.
pub(in crate::tools) fn loss(value: f64) -> String {
    if value.is_finite() && value.abs() < 1e6 { format!("{value:.4}") } else { number(value) }
}

/// Returns a duration such as `2h 05m`.
pub(in crate::tools) fn duration(seconds: f64) -> String {
    let total = seconds.max(0.0).round() as u64;
    let (days, hours, minutes) = (total / 86_400, total / 3600 % 24, total / 60 % 60);
    match () {
        () if days > 0 => format!("{days}d {hours:02}h"),
        () if hours > 0 => format!("{hours}h {minutes:02}m"),
        () if minutes > 0 => format!("{minutes}m {:02}s", total % 60),
        () => format!("{total}s"),
    }
}

/// Returns a setting's value: text without quotes, everything else as JSON.
pub(in crate::tools) fn setting(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_durations_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (3.0, "3"),
            (0.25, "0.2500"),
            (1e-5, "1.000e-5"),
            (123_456.75, "123456.7500"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(number(value), text);
        }
        for (seconds, text) in [(0.4, "0s"), (59.6, "1m 00s"), (3660.0, "1h 01m"), (90_000.0, "1d 01h"), (-5.0, "0s")] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn cells_are_plain_and_short() {
        assert_eq!(cell("a\u{1b}[31mb\nc"), "a\u{fffd}[31mb c");
        assert_eq!(cell(&"x".repeat(61)).chars().count(), 60);
    }
}
