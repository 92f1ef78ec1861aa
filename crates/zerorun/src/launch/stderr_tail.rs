//! The last lines of a rank's stderr. They are repeated at the very end of the output, after the messages of all other
//! ranks, to explain the rank's failure.

use candle_zero::error::begins_backtrace;
use std::collections::VecDeque;

/// The number of lines kept: enough to find the beginning of a message before its backtrace.
const KEPT_LINES: usize = 200;
/// The maximum number of bytes kept per line.
const MAX_LINE_BYTES: usize = 1000;
/// The maximum number of lines of a message that are repeated.
const SHOWN_MESSAGE_LINES: usize = 12;
/// The number of lines that are repeated if no message can be distinguished from other output.
const SHOWN_FALLBACK_LINES: usize = 3;

/// The end of one rank's stderr.
#[derive(Debug, Default)]
pub(super) struct StderrTail(VecDeque<String>);

impl StderrTail {
    pub(super) fn push(&mut self, line: &[u8]) {
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        if self.0.len() == KEPT_LINES {
            self.0.pop_front();
        }
        self.0.push_back(String::from_utf8_lossy(&line[..line.len().min(MAX_LINE_BYTES)]).trim_end().to_string());
    }

    /// Returns the last error or panic message. If there is none, returns `reason`, which the rank gave to the other
    /// ranks. If there is no reason either, returns the last few lines, other than progress, of a rank that
    /// `ended_by_itself`. A rank that was stopped had no time to print a reason, and its earlier output does not
    /// contain one.
    pub(super) fn failure_lines(&self, reason: Option<&str>, ended_by_itself: bool) -> Vec<String> {
        if let Some(begin) = self.0.iter().rposition(|line| begins_message(line)) {
            let message = self.0.range(begin..).take_while(|line| !ends_message(line));
            return message.take(SHOWN_MESSAGE_LINES).cloned().collect();
        }
        if let Some(reason) = reason {
            return reason.lines().take(SHOWN_MESSAGE_LINES).map(str::to_string).collect();
        }
        let lines: Vec<&String> = self.0.iter().filter(|line| ended_by_itself && !is_progress(line)).collect();
        lines[lines.len().saturating_sub(SHOWN_FALLBACK_LINES)..].iter().map(|line| (*line).clone()).collect()
    }
}

/// Returns whether a line begins an error message of `fn main() -> Result`, a command-line program or a panic.
fn begins_message(line: &str) -> bool {
    line.starts_with("Error: ") || line.starts_with("error: ") || line.contains("panicked at ")
}

/// Returns whether a line is `step 3/100 ...`, as [`candle_zero::monitor::Progress`] writes it.
fn is_progress(line: &str) -> bool {
    let number = line.strip_prefix("step ").and_then(|rest| rest.split_once('/')).map(|(number, _)| number);
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// Returns whether a line begins a backtrace or the hint about how to get one.
fn ends_message(line: &str) -> bool {
    line.eq_ignore_ascii_case("stack backtrace:")
        || line.starts_with("note: run with `RUST_BACKTRACE=")
        || begins_backtrace(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str, reason: Option<&str>) -> String {
        let mut tail = StderrTail::default();
        text.lines().for_each(|line| tail.push(line.as_bytes()));
        tail.failure_lines(reason, true).join("\n")
    }

    #[test]
    fn progress_is_no_reason_and_what_a_rank_said_before_it_was_ended_neither() {
        assert_eq!(words("a\nstep 1/9 loss 3\nb\nstep 2/9 loss 2\n", None), "a\nb");
        let mut tail = StderrTail::default();
        ["all is well", "still well"].iter().for_each(|line| tail.push(line.as_bytes()));
        assert_eq!(tail.failure_lines(None, false), Vec::<String>::new());
        assert_eq!(tail.failure_lines(Some("why"), false), ["why"]);
        tail.push(b"Error: no more");
        assert_eq!(tail.failure_lines(None, false), ["Error: no more"]);
    }

    #[test]
    fn the_last_message_is_found_without_its_backtrace() {
        let error =
            "step 1\nerror: a\nlog\nError: cannot read x\n\nCaused by:\n    no such file\n\nStack backtrace:\n   0: f";
        assert_eq!(words(error, Some("reason")), "Error: cannot read x\nCaused by:\n    no such file");
        let candle = "error: shapes differ\n   0: candle_core::error\n             at error.rs:1:2\n   1: main\n";
        assert_eq!(words(candle, None), "error: shapes differ");
        let panic = "thread 'main' (7) panicked at src/x.rs:1:2:\nindex out of bounds\nnote: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n";
        assert_eq!(words(panic, None), "thread 'main' (7) panicked at src/x.rs:1:2:\nindex out of bounds");
    }

    #[test]
    fn without_a_message_the_reason_counts_and_without_a_reason_the_last_lines() {
        assert_eq!(words("a\nb\nc\nd\n", Some("why\nnot")), "why\nnot");
        assert_eq!(words("a\nb\n  \nc\nd\n", None), "b\nc\nd");
        assert_eq!(words("", None), "");
    }

    #[test]
    fn little_is_kept_however_much_is_written() {
        let mut tail = StderrTail::default();
        (0..10 * KEPT_LINES).for_each(|_| tail.push(&[b'x'; 10 * MAX_LINE_BYTES]));
        assert_eq!(tail.0.iter().map(String::len).sum::<usize>(), KEPT_LINES * MAX_LINE_BYTES);
    }
}
