//! The final report of a failed run: which rank failed first, how, and how the others ended.

use super::signals;
use candle_zero::comm::RankFault;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// The way in which a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RankExitStatus {
    Code(u8),
    Signal(i32),
}

impl RankExitStatus {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            // An exit code has 8 bits.
            (Some(code), _) => Self::Code((code & 0xff) as u8),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }

    pub(super) fn is_failure(self) -> bool {
        self != Self::Code(0)
    }

    /// Returns the launcher's exit code for a rank with this status, as in shells.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(number) => 128 + (number & 0x7f) as u8,
        }
    }
}

impl std::fmt::Display for RankExitStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(number) => write!(f, "was killed by {}", signals::name(*number)),
        }
    }
}

/// The launcher's request to a rank before the rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopRequest {
    /// No request.
    Nothing,
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// The end of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndedRank {
    pub(super) rank: usize,
    pub(super) ended: RankExitStatus,
    pub(super) request: StopRequest,
    /// Whether the rank ended before another rank or host had failed, and before a signal asked the job to end.
    pub(super) before_failure: bool,
}

/// The rank whose failure ended the run.
#[derive(Debug, Clone, Copy)]
pub(super) struct CulpritRank {
    pub(super) end: EndedRank,
    pub(super) fault: RankFault,
}

impl CulpritRank {
    /// Describes the rank's end as a clause about "it".
    fn describe_end(&self) -> String {
        let EndedRank { ended, request, .. } = self.end;
        let end = match request {
            StopRequest::Nothing => ended.to_string(),
            StopRequest::Terminate => "was stopped by zerorun with SIGTERM".to_string(),
            StopRequest::Kill => "was killed by zerorun with SIGKILL".to_string(),
        };
        let by_itself = request == StopRequest::Nothing && ended.is_failure();
        match self.fault {
            // The exit code is more informative than the fact that the rank left.
            RankFault::Left if by_itself => format!("it {end}"),
            RankFault::Left => format!("it left the job while other ranks needed it, and {end}"),
            RankFault::Silent => format!("it was unresponsive for too long, and {end}"),
            RankFault::Late => format!("other ranks waited for it longer than --timeout, and it {end}"),
            RankFault::GaveUp if !by_itself => format!("it gave up after an error, and {end}"),
            RankFault::Died | RankFault::GaveUp => format!("it {end}"),
        }
    }
}

/// Returns one line about which of `ranks` ranks failed, how and when.
pub(super) fn headline(first: &CulpritRank, after: Duration, ranks: usize) -> String {
    let which = if ranks > 1 { "failed first" } else { "failed" };
    let after = after.as_secs_f64();
    format!("zerorun: rank {} {which}: {} after {after:.1} s", first.end.rank, first.describe_end())
}

/// Returns the message about a run that `first` ended, beginning with the headline. `error_lines` is the rank's own
/// error output. `ended_ranks` contains all ranks.
pub(super) fn of_failure(
    first: &CulpritRank,
    after: Duration,
    error_lines: &[String],
    ended_ranks: &[EndedRank],
) -> String {
    let mut text = headline(first, after, ended_ranks.len());
    let first = first.end;
    if first.ended == RankExitStatus::Signal(9) && first.request == StopRequest::Nothing {
        text.push_str(
            "\nzerorun:   zerorun did not send this signal: perhaps the system ran out of memory (see `dmesg`)",
        );
    }
    error_lines.iter().for_each(|line| text.push_str(&format!("\nzerorun:   | {line}")));
    // Ranks that ended in the same way share a line: with 64 ranks, no one would read 63 lines.
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for end in ended_ranks.iter().filter(|end| end.rank != first.rank) {
        let outcome = match (end.request, end.ended) {
            (_, RankExitStatus::Code(0)) if end.before_failure => "had already finished".to_string(),
            (StopRequest::Nothing, RankExitStatus::Code(code)) => format!("exit code {code}, not stopped by zerorun"),
            (StopRequest::Nothing, RankExitStatus::Signal(number)) => {
                format!("killed by {}, which zerorun did not send", signals::name(number))
            }
            (StopRequest::Terminate, _) => "stopped by zerorun with SIGTERM".to_string(),
            (StopRequest::Kill, _) => "killed by zerorun with SIGKILL (SIGTERM did not help)".to_string(),
        };
        match groups.iter_mut().find(|(other, _)| *other == outcome) {
            Some((_, ranks)) => ranks.push(end.rank),
            None => groups.push((outcome, vec![end.rank])),
        }
    }
    for (outcome, ranks) in groups {
        text.push_str(&format!("\nzerorun:   {} {outcome}", ranks_in_words(&ranks)));
    }
    text
}

/// Formats ascending numbers as `rank 3:` or `ranks 0, 2-5:`.
fn ranks_in_words(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let words: Vec<String> =
        runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    format!("{} {}:", if ranks.len() == 1 { "rank" } else { "ranks" }, words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, ended: RankExitStatus, request: StopRequest) -> EndedRank {
        EndedRank { rank, ended, request, before_failure: false }
    }

    #[test]
    fn the_first_failure_leads_and_equal_fates_share_a_line() {
        let first = end(1, RankExitStatus::Code(3), StopRequest::Nothing);
        let mut ended_ranks = vec![
            end(0, RankExitStatus::Code(101), StopRequest::Nothing),
            first,
            end(2, RankExitStatus::Signal(15), StopRequest::Terminate),
            end(3, RankExitStatus::Signal(15), StopRequest::Terminate),
            end(4, RankExitStatus::Signal(9), StopRequest::Kill),
            end(5, RankExitStatus::Signal(15), StopRequest::Terminate),
            EndedRank { before_failure: true, ..end(6, RankExitStatus::Code(0), StopRequest::Nothing) },
        ];
        let error_lines = ["Error: no more".to_string(), "    disk".to_string()];
        let culprit = CulpritRank { end: first, fault: RankFault::GaveUp };
        insta::assert_snapshot!(of_failure(&culprit, Duration::from_millis(12_340), &error_lines, &ended_ranks), @r#"
        zerorun: rank 1 failed first: it ended with exit code 3 after 12.3 s
        zerorun:   | Error: no more
        zerorun:   |     disk
        zerorun:   rank 0: exit code 101, not stopped by zerorun
        zerorun:   ranks 2-3, 5: stopped by zerorun with SIGTERM
        zerorun:   rank 4: killed by zerorun with SIGKILL (SIGTERM did not help)
        zerorun:   rank 6: had already finished
        "#);
        ended_ranks.truncate(1);
        ended_ranks[0] = end(0, RankExitStatus::Signal(9), StopRequest::Nothing);
        let culprit = CulpritRank { end: ended_ranks[0], fault: RankFault::Died };
        insta::assert_snapshot!(of_failure(&culprit, Duration::from_millis(40), &[], &ended_ranks), @r#"
        zerorun: rank 0 failed: it was killed by SIGKILL (9) after 0.0 s
        zerorun:   zerorun did not send this signal: perhaps the system ran out of memory (see `dmesg`)
        "#);
    }

    #[test]
    fn a_culprit_that_did_not_end_by_itself_is_told_what_it_did() {
        let after = Duration::from_secs(4);
        let message = |fault, ended, request| {
            let end = end(2, ended, request);
            of_failure(&CulpritRank { end, fault }, after, &[], &[end])
        };
        insta::assert_snapshot!(message(RankFault::Left, RankExitStatus::Code(0), StopRequest::Nothing), @"zerorun: rank 2 failed: it left the job while other ranks needed it, and ended with exit code 0 after 4.0 s");
        insta::assert_snapshot!(message(RankFault::Silent, RankExitStatus::Signal(9), StopRequest::Kill), @"zerorun: rank 2 failed: it was unresponsive for too long, and was killed by zerorun with SIGKILL after 4.0 s");
        insta::assert_snapshot!(message(RankFault::Late, RankExitStatus::Signal(15), StopRequest::Terminate), @"zerorun: rank 2 failed: other ranks waited for it longer than --timeout, and it was stopped by zerorun with SIGTERM after 4.0 s");
        insta::assert_snapshot!(message(RankFault::GaveUp, RankExitStatus::Code(0), StopRequest::Nothing), @"zerorun: rank 2 failed: it gave up after an error, and ended with exit code 0 after 4.0 s");
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(RankExitStatus::of(ExitStatus::from_raw(3 << 8)), RankExitStatus::Code(3));
        assert_eq!(RankExitStatus::of(ExitStatus::from_raw(9)).exit_code(), 137);
        assert_eq!(RankExitStatus::of(ExitStatus::from_raw(11 | 0x80)).exit_code(), 139, "with a core dump");
        assert!(!RankExitStatus::Code(0).is_failure());
    }
}
