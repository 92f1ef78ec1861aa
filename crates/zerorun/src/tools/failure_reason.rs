//! The reason for the failure of a run, from the log that another process has written.

use std::path::Path;

/// Returns the reason why a run failed, from its log: the first line that the launcher repeats from the first failed
/// rank (for a panic, its message and location), else the program's last line about an error, else its last line, else
/// the launcher's last line.
pub(super) fn failure_reason(log: &Path) -> String {
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    reason_in(&text)
}

fn reason_in(text: &str) -> String {
    const MAX_SHOWN_CHARS: usize = 300;
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let repeated: Vec<&str> = lines().filter_map(|line| line.strip_prefix("zerorun:   | ")).collect();
    // The message of a panic is on the line after its location.
    let repeated = match repeated.as_slice() {
        [location, message, ..] if location.contains("panicked at ") => format!("{message} ({location})"),
        [first, ..] => (*first).to_string(),
        [] => String::new(),
    };
    let is_error = |line: &&str| ["error", "panicked"].iter().any(|word| line.to_lowercase().contains(word));
    let program_lines = || lines().filter(|line| !line.starts_with("zerorun:"));
    let reason = (!repeated.is_empty()).then_some(repeated.as_str());
    let reason = reason
        .or_else(|| program_lines().rfind(is_error))
        .or_else(|| program_lines().next_back())
        .or_else(|| lines().next_back());
    reason.unwrap_or("it printed nothing").chars().take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_what_the_first_rank_to_fail_says() {
        let two = "[rank 1] error: rank 0 stopped (no data)\nzerorun: rank 0 failed first: it ended with exit code 1 after 1 s\n\
                   zerorun:   | error: no data\nzerorun:   rank 1: exit code 1, not stopped by zerorun\n";
        assert_eq!(reason_in(two), "error: no data");
        let panic = "zerorun: rank 0 failed: it ended with exit code 101 after 1 s\n\
                     zerorun:   | thread 'main' (7) panicked at src/x.rs:1:2:\nzerorun:   | index out of bounds\n";
        assert_eq!(reason_in(panic), "index out of bounds (thread 'main' (7) panicked at src/x.rs:1:2:)");
        let silent = "step 1\nlast line\nzerorun: rank 1: exit code 1, not stopped by zerorun\n";
        assert_eq!(reason_in(silent), "last line");
        assert_eq!(reason_in("starting\nerror: no memory is left\ngoodbye\n"), "error: no memory is left");
        assert_eq!(reason_in(" \n"), "it printed nothing");
    }
}
