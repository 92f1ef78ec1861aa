//! Restarts the job after a rank has failed, and decides how often, how soon and with how many ranks.

use super::comm_backend::CommBackend;
use super::console::eprint;
use super::failure_report::RankExitStatus;
use super::local_job_spec::{LocalJobSpec, MultiHostContext};
use super::ranks::{self, RunEnd, RunFailure};
use super::signals::{self, LauncherEvent};
use candle_zero::Result;
use candle_zero::util::counted;
use rustix::process::Signal;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The pause before a restart. Each further early failure in a row doubles it.
const INITIAL_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// A run that fails within this time has failed early: the cause may persist.
pub(super) const EARLY_FAILURE: Duration = Duration::from_secs(60);
/// A run that fails within this time has not really started: this host may no longer support this many ranks.
const FAILED_START: Duration = Duration::from_secs(10);

/// The exit code of a successful job whose output could not be passed on.
const EXIT_OUTPUT_LOST: u8 = 1;

/// The rules by which a job is restarted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RestartPolicy {
    /// The maximum number of restarts in total.
    pub(crate) max_restarts: u32,
    /// The minimum number of ranks to continue with.
    pub(crate) min_ranks: usize,
}

/// A run that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FailedRun {
    ranks: usize,
    /// The time from its start to its first failure.
    after: Duration,
}

/// The next start of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NextStart {
    /// The number of the restart, 1 for the first.
    restart: u32,
    ranks: usize,
    pause: Duration,
}

impl RestartPolicy {
    /// Returns the restart after a job's failed runs, oldest first, or `None` if no restart is left.
    ///
    /// If the last two runs had the same number of ranks and each failed within 10 s, the restart has one rank fewer,
    /// down to `min_ranks`. Removed ranks do not come back.
    fn next(&self, failed: &[FailedRun]) -> Option<NextStart> {
        let restart = u32::try_from(failed.len()).ok().filter(|restart| *restart <= self.max_restarts)?;
        let ranks = match failed {
            [.., a, b] if a.ranks == b.ranks && a.after < FAILED_START && b.after < FAILED_START => {
                b.ranks.saturating_sub(1).max(self.min_ranks)
            }
            [.., last] => last.ranks,
            [] => return None,
        };
        Some(NextStart { restart, ranks, pause: pause(failed) })
    }
}

/// Returns the pause after the last of these runs.
fn pause(failed: &[FailedRun]) -> Duration {
    let early_failures = failed.iter().rev().take_while(|run| run.after < EARLY_FAILURE).count();
    pause_after(early_failures)
}

/// Returns the pause after this number of consecutive early failures.
pub(super) fn pause_after(early_failures: usize) -> Duration {
    let doublings = u32::try_from(early_failures.saturating_sub(1)).unwrap_or(u32::MAX);
    INITIAL_BACKOFF.saturating_mul(2u32.saturating_pow(doublings)).min(MAX_BACKOFF)
}

/// Runs the job, whose ranks communicate over `backend`, restarts it according to the policy, and returns the
/// launcher's exit code. Must be called on the main thread.
pub(crate) fn run(backend: CommBackend, mut job: LocalJobSpec, policy: &RestartPolicy) -> Result<u8> {
    let (_, events) = signals::listen()?;
    let mut failed = Vec::new();
    loop {
        job.multi_host =
            (backend == CommBackend::Mpi).then(|| MultiHostContext::mpi_on_one_host(job.world, job.restart));
        let failure = match ranks::run(&job, &events)? {
            RunEnd::Well => return Ok(0),
            RunEnd::OutputLost => return Ok(EXIT_OUTPUT_LOST),
            RunEnd::EndedByOtherHost => unreachable!("the ranks are on this host"),
            RunEnd::Interrupted(signal) => return Ok(stopped_by(signal)),
            RunEnd::Failed(failure) => failure,
        };
        failed.push(FailedRun { ranks: job.world, after: failure.after });
        let next = policy.next(&failed).filter(|_| failure.end_signal.is_none());
        let Some(next) = next else { return Ok(give_up(&failure, policy)) };
        eprint(&announcement(&failure, &next, job.world, policy));
        if let Some(signal) = wait_out(next.pause, &events) {
            return Ok(stopped_by(signal));
        }
        (job.restart, job.world) = (next.restart, next.ranks);
    }
}

/// Returns the line about a failure that is followed by a restart.
fn announcement(failure: &RunFailure, next: &NextStart, ranks_before: usize, policy: &RestartPolicy) -> String {
    let NextStart { restart, ranks, pause } = next;
    let reason = if *ranks < ranks_before {
        format!(" (two starts with {ranks_before} ranks failed within {} s)", FAILED_START.as_secs())
    } else {
        String::new()
    };
    format!(
        "{}; restart {restart} of {} with {}{reason} in {:.1} s",
        failure.headline,
        policy.max_restarts,
        counted(*ranks, "rank"),
        pause.as_secs_f64()
    )
}

/// Prints the cause of the last failure and, if the policy allows restarts, why the job is not restarted. Returns the
/// launcher's exit code.
fn give_up(failure: &RunFailure, policy: &RestartPolicy) -> u8 {
    eprint(&failure.report);
    match (failure.end_signal, policy.max_restarts) {
        (_, 0) => {}
        (Some(signal), _) => eprint(&format!("zerorun: not restarted because of {}", signals::name(signal.as_raw()))),
        (None, all) => eprint(&format!("zerorun: no restarts are left: --max_restarts {all} is exhausted")),
    }
    failure.code
}

fn stopped_by(signal: Signal) -> u8 {
    let number = signal.as_raw();
    eprint(&format!("zerorun: stopped by {}", signals::name(number)));
    RankExitStatus::Signal(number).exit_code()
}

/// Waits until the pause is over. A signal that asks the launcher to end interrupts the wait and is returned.
fn wait_out(pause: Duration, events: &Receiver<LauncherEvent>) -> Option<Signal> {
    let until = Instant::now() + pause;
    loop {
        let remaining = until.saturating_duration_since(Instant::now());
        match events.recv_timeout(remaining) {
            Ok(LauncherEvent::End(signal)) => return Some(signal),
            Ok(LauncherEvent::Suspend) => signals::suspend_self(),
            // No rank is running to which such an event could apply.
            Ok(LauncherEvent::Child | LauncherEvent::Pass(_) | LauncherEvent::PeerMessage) => {}
            Err(RecvTimeoutError::Timeout) => return None,
            // This cannot happen (see `RankProcesses::supervise`); if it did, sleeping until the end of the pause would
            // be right.
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(remaining);
                return None;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn policy(max_restarts: u32, min_ranks: usize) -> RestartPolicy {
        RestartPolicy { max_restarts, min_ranks }
    }

    fn failed(runs: &[(usize, u64)]) -> Vec<FailedRun> {
        runs.iter().map(|&(ranks, seconds)| FailedRun { ranks, after: Duration::from_secs(seconds) }).collect()
    }

    fn ranks_after(runs: &[(usize, u64)]) -> usize {
        policy(100, 2).next(&failed(runs)).unwrap().ranks
    }

    #[test]
    fn a_job_is_restarted_as_often_as_the_rule_allows() {
        for (max_restarts, failures, expected) in
            [(0, 1, None), (1, 1, Some(1)), (1, 2, None), (3, 2, Some(2)), (3, 3, Some(3)), (3, 4, None)]
        {
            let next = policy(max_restarts, 4).next(&failed(&vec![(4, 1); failures]));
            assert_eq!(next.map(|next| next.restart), expected, "{max_restarts} {failures}");
        }
    }

    #[test]
    fn two_starts_in_a_row_that_fail_at_once_take_one_rank_away() {
        assert_eq!(ranks_after(&[(4, 1)]), 4);
        assert_eq!(ranks_after(&[(4, 1), (4, 9)]), 3);
        assert_eq!(ranks_after(&[(4, 1), (4, 10)]), 4);
        assert_eq!(ranks_after(&[(4, 10), (4, 1)]), 4);
        assert_eq!(ranks_after(&[(4, 1), (4, 100), (4, 1)]), 4, "not in a row");
        assert_eq!(ranks_after(&[(4, 1), (4, 1), (3, 1)]), 3, "the smaller number is tried twice too");
        assert_eq!(ranks_after(&[(4, 1), (4, 1), (3, 1), (3, 1)]), 2);
        assert_eq!(ranks_after(&[(4, 1), (4, 1), (3, 1000)]), 3, "ranks do not come back");
        assert_eq!(ranks_after(&[(2, 1), (2, 1)]), 2, "never fewer than the minimum");
    }

    #[test]
    fn the_pause_doubles_up_to_30_s_while_runs_die_soon() {
        let pauses = |runs: &[(usize, u64)]| -> Vec<u128> {
            let runs = failed(runs);
            (1..=runs.len()).map(|n| pause(&runs[..n]).as_millis()).collect()
        };
        assert_eq!(pauses(&[(1, 0), (1, 59), (1, 0), (1, 60), (1, 0), (1, 0)]), [200, 400, 800, 200, 200, 400]);
        assert_eq!(pause(&failed(&[(1, 0); 8])), Duration::from_millis(25_600));
        for early_failures in [9, 40, 1000] {
            assert_eq!(pause(&failed(&vec![(1, 0); early_failures])), MAX_BACKOFF);
        }
    }

    #[test]
    fn a_restart_is_told_in_one_line() {
        let failure = RunFailure {
            after: Duration::from_secs(3),
            headline: "zerorun: rank 1 failed first: it ended with exit code 3 after 3.0 s".to_string(),
            report: String::new(),
            rank: 1,
            blames: None,
            code: 3,
            end_signal: None,
        };
        let line = |runs: &[(usize, u64)]| {
            let runs = failed(runs);
            announcement(&failure, &policy(5, 1).next(&runs).unwrap(), runs[runs.len() - 1].ranks, &policy(5, 1))
        };
        insta::assert_snapshot!(line(&[(4, 3)]), @"zerorun: rank 1 failed first: it ended with exit code 3 after 3.0 s; restart 1 of 5 with 4 ranks in 0.2 s");
        insta::assert_snapshot!(line(&[(2, 3), (2, 3)]), @"zerorun: rank 1 failed first: it ended with exit code 3 after 3.0 s; restart 2 of 5 with 1 rank (two starts with 2 ranks failed within 10 s) in 0.4 s");
    }

    #[test]
    fn a_pause_ends_with_a_signal_that_ends_the_job_and_with_no_other_event() {
        let (sender, events) = std::sync::mpsc::channel();
        for event in [LauncherEvent::Child, LauncherEvent::Pass(Signal::USR1)] {
            sender.send(event).unwrap();
        }
        let start = Instant::now();
        assert_eq!(wait_out(Duration::from_millis(50), &events), None);
        assert!(start.elapsed() >= Duration::from_millis(50));
        sender.send(LauncherEvent::Child).unwrap();
        sender.send(LauncherEvent::End(Signal::TERM)).unwrap();
        assert_eq!(wait_out(MAX_BACKOFF, &events), Some(Signal::TERM));
        assert!(start.elapsed() < MAX_BACKOFF);
    }
}
