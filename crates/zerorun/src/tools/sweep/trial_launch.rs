//! The launchers of trials.
//!
//! A trial's launcher has the file `running` in the trial's folder as its standard input, and the file is locked for as
//! long as any process of the trial is running. If the process that started the launcher is killed, the kernel
//! sends SIGTERM to the launcher, and the trial saves a checkpoint and ends. The next start of the sweep waits until
//! these files are unlocked.

use super::trial_results::TrialResultReader;
use crate::error::{Error, LaunchError, Result};
use crate::launch::hosts::world_info::DEVICES;
use crate::tools::trial_subprocess::configure_trial;
use candle_zero::files::lacks_locks;
use candle_zero::stop_signal::STOP_AT;
use candle_zero::sweep::SweepJob;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The environment variables that set the number of threads of a rank.
pub(super) const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// Starts the launcher of a job on this host. `devices` are the slots that the job uses, if there is a hostfile.
/// Returns `None` if another process is still training this trial.
pub(super) fn launch(
    mut command: Command,
    results: &TrialResultReader,
    job: &SweepJob,
    threads: Option<usize>,
    devices: Option<&str>,
) -> Result<Option<Child>> {
    let Some(lock) = lock(&results.folder.trial(job.trial).join("running"))? else { return Ok(None) };
    configure_trial(&mut command, &results.log(job))?;
    if job.to < results.steps {
        command.env(STOP_AT, job.to.to_string());
    }
    if let Some(threads) = threads {
        command.envs(THREADS.map(|name| (name, threads.to_string())));
    }
    if let Some(devices) = devices {
        command.env(DEVICES, devices);
    }
    command.stdin(Stdio::from(lock));
    // Ctrl-C reaches only the sweep, which passes it on.
    command.process_group(0);
    let child = command.spawn();
    child.map(Some).map_err(|source| LaunchError::Setup { what: "starting a trial", source }.into())
}

/// Opens and locks a file. Returns `None` if another process holds the lock.
fn lock(path: &Path) -> Result<Option<File>> {
    let io = |source| Error::Io { action: "lock", path: path.to_owned(), source };
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        // If the file system has no locks, it is unknown whether another process is training the trial.
        Err(errno) if !lacks_locks(errno) => Err(io(errno.into())),
        _ => Ok(Some(file)),
    }
}
