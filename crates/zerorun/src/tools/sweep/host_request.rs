//! The requests of a sweep to `zerorun` on other hosts, and the answers.
//!
//! ```text
//!   sweep: ssh HOST 'cd DIRECTORY && zerorun sweep on-host REQUEST'  ->  standard output: PREFIX ANSWER
//! ```

use serde::{Deserialize, Serialize};

/// The word that is followed by a request.
pub(super) const ON_HOST: &str = "on-host";
/// The beginning of the line with the answer. A host's shell may print other lines.
const PREFIX: &str = "zerorun on-host: ";

/// A request to `zerorun` on another host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum HostRequest {
    /// Describe the host, and report whether it has the files of the host that runs the sweep.
    Check {
        /// A file with random contents, which the sweep has locked.
        probe: String,
        /// The program of the trials, unless it is `zerorun` itself.
        program: Option<String>,
    },
    /// Train a part of a trial; the end of standard input stops the training early.
    Train(TrainRequest),
}

/// A part of a trial.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TrainRequest {
    /// The folder of the sweep.
    pub(super) folder: String,
    pub(super) trial: usize,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) metric: String,
    /// The number of steps of a complete trial.
    pub(super) steps: u64,
    /// The number of threads of a rank, unless variables set it.
    pub(super) threads: Option<usize>,
    /// The slots that the trial uses.
    pub(super) devices: Option<String>,
    /// The words after `zerorun`.
    pub(super) words: Vec<String>,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum HostAnswer {
    Checked(HostCheckResult),
    /// Another process is still training the trial.
    Busy,
    /// The part has ended with this value of the metric, as text, because JSON has no numbers that are not finite.
    Value(String),
    /// The trial has failed for this reason.
    TrialFailed(String),
    /// The trial was killed by this signal.
    Killed(String),
    /// The trial recorded no value of the metric in this part. The strings are the names of all values that the trial
    /// has recorded.
    NoMetric(Vec<String>),
    /// The request failed for this reason.
    Failed(String),
}

/// The result of the check of a host: the host as it describes itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct HostCheckResult {
    /// The version of `zerorun`.
    pub(super) version: String,
    /// The contents of the probe, or why it cannot be read.
    pub(super) contents: Result<String, String>,
    /// Whether the sweep's lock on the probe is visible, or the reason why it is not.
    pub(super) lock: Result<(), String>,
    /// Whether the program of the trials exists.
    pub(super) has_program: bool,
    pub(super) cores: usize,
    /// The number of bytes of memory that can be allocated, or 0 if it is unknown.
    pub(super) memory: u64,
}

impl HostAnswer {
    /// Returns the line that a host prints, after a line break.
    pub(super) fn to_line(&self) -> String {
        // An enum of text and numbers always has a JSON form. The host's shell may have printed text without a line
        // break.
        format!("\n{PREFIX}{}", serde_json::to_string(self).unwrap_or_default())
    }

    /// Finds the answer in a host's output.
    pub(super) fn in_output(output: &str) -> Option<Self> {
        let mut lines = output.lines().rev().filter_map(|line| line.strip_prefix(PREFIX));
        lines.find_map(|line| serde_json::from_str(line).ok())
    }
}

/// Returns the last line that a host's shell has printed, for messages.
pub(super) fn last_line(output: &str) -> String {
    const MAX_SHOWN_CHARS: usize = 300;
    let mut lines = output.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(PREFIX));
    let last = lines.next_back().unwrap_or("it printed nothing");
    last.chars().filter(|c| !c.is_control()).take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_found_among_the_lines_of_a_host() {
        let answer = HostAnswer::Value(f64::NAN.to_string());
        let output = format!("Welcome!\n{}\n{PREFIX}{{\nbye\n", answer.to_line());
        assert_eq!(HostAnswer::in_output(&output), Some(answer));
        assert_eq!(HostAnswer::in_output("Welcome!\n"), None);
        assert_eq!((last_line(&output).as_str(), last_line("\n").as_str()), ("bye", "it printed nothing"));
    }
}
