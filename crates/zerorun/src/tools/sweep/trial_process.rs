//! The processes of trials that this sweep has started, on this host and on others.

use super::remote_trial::RemoteTrial;
use super::trial_results::{ProcessOutcome, TrialResultReader};
use crate::error::{Error, LaunchError, Result};
use candle_zero::sweep::SweepJob;
use rustix::process::{Pid, Signal, kill_process};
use std::process::Child;

/// A process that trains a part of a trial.
#[derive(Debug)]
pub(super) enum TrialProcess {
    /// The launcher, on this host.
    Here(Child),
    /// The remote shell, which starts the launcher on another host.
    There(RemoteTrial),
}

/// The outcome of starting a job.
#[derive(Debug)]
pub(super) enum TrialStartOutcome {
    Started(TrialProcess),
    /// Another process is still training the trial.
    Busy,
    /// The host cannot be reached, for this reason.
    Unreachable(String),
}

impl TrialProcess {
    /// Returns how the process ended, or `None` if it is still running.
    pub(super) fn end(&mut self, results: &TrialResultReader, job: &SweepJob) -> Result<Option<ProcessOutcome>> {
        match self {
            Self::Here(child) => {
                let status = child
                    .try_wait()
                    .map_err(|source| Error::from(LaunchError::Setup { what: "waiting for a trial", source }))?;
                status.map(|status| results.end(job, status).map(ProcessOutcome::Job)).transpose()
            }
            Self::There(remote) => remote.end(),
        }
    }

    /// Returns whether the process has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        let (Self::Here(child) | Self::There(RemoteTrial { child, .. })) = self;
        !matches!(child.try_wait(), Ok(None))
    }

    /// Passes a signal to the launcher.
    pub(super) fn signal(&mut self, signal: Signal) {
        match self {
            // A launcher that has ended needs no signal.
            Self::Here(child) => _ = kill_process(Pid::from_child(child), signal),
            Self::There(remote) => remote.signal(signal),
        }
    }
}
