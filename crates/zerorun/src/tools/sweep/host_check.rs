//! Checks, before the first trial, that the other hosts can be reached and have the folder of the sweep, and determines
//! how many cores and how much memory they have.
//!
//! A file with random contents is written into the folder and locked. Every host must read the same contents, because
//! a trial may continue on another host from its checkpoint, and must see the lock, because no two hosts may train the
//! same trial.

use super::error::SweepToolError;
use super::folder::SweepFolder;
use super::host_request::{HostAnswer, HostCheckResult, HostRequest};
use super::remote_trial::{RemoteTrialLauncher, no_answer_message};
use super::trials_at_a_time::cores;
use crate::error::{Error, LaunchError, Result};
use crate::launch::remote_shell::{as_text, not_reached};
use candle_zero::files;
use candle_zero::offload::available_memory;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// The version that all hosts must have.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The number of random bytes in the probe.
const PROBE_BYTES: usize = 16;
const MAX_PROBE_BYTES: u64 = 4096;

/// Describes this host.
pub(super) fn describe(probe: &Path, program: Option<&Path>) -> HostCheckResult {
    HostCheckResult {
        version: VERSION.into(),
        contents: files::read_text(probe, MAX_PROBE_BYTES).map_err(|why| why.to_string()),
        lock: sees_lock(probe),
        has_program: program.is_none_or(Path::is_file),
        cores: cores(),
        memory: available_memory(),
    }
}

/// Returns whether the sweep's lock on a file is visible, and otherwise the reason.
fn sees_lock(probe: &Path) -> std::result::Result<(), String> {
    // NFS grants an exclusive lock only to a file that is open for writing.
    let file = OpenOptions::new().read(true).write(true).open(probe).map_err(|why| why.to_string())?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(()),
        Ok(()) => Err("it could lock a file that this host has locked".into()),
        Err(errno) => Err(std::io::Error::from(errno).to_string()),
    }
}

/// A file in the folder of the sweep, which is removed when this value is dropped.
struct ProbeFile {
    path: PathBuf,
    contents: String,
    /// Holds the lock.
    _file: File,
}

impl ProbeFile {
    fn new(folder: &SweepFolder) -> Result<Self> {
        let mut random = [0; PROBE_BYTES];
        let result = getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()));
        result.map_err(|source| LaunchError::Setup { what: "generating random numbers", source })?;
        let contents: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = folder.path().join(format!(".hosts-{contents}"));
        let io = |action, source| Error::Io { action, path: path.clone(), source };
        let open = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let mut file = open.map_err(|source| io("create", source))?;
        let handle = file.try_clone().map_err(|source| io("open", source))?;
        let probe = Self { path: path.clone(), contents, _file: handle };
        let written = file.write_all(probe.contents.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|source| io("write", source))?;
        // If the file system has no locks, no other host sees this lock, and the checks of the other hosts report that.
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(errno) if !files::lacks_locks(errno) => Err(io("lock", errno.into())),
            _ => Ok(probe),
        }
    }
}

impl Drop for ProbeFile {
    fn drop(&mut self) {
        // A file that is left has no effect.
        _ = std::fs::remove_file(&self.path);
    }
}

/// Checks other hosts, all at the same time, and returns their descriptions in the same order. `program` is the program
/// of the trials, unless it is `zerorun` itself.
pub(super) fn check(
    hosts: &[&str],
    remote: &RemoteTrialLauncher,
    folder: &SweepFolder,
    program: Option<&Path>,
) -> Result<Vec<HostCheckResult>> {
    if hosts.is_empty() {
        return Ok(Vec::new());
    }
    let probe = ProbeFile::new(folder)?;
    let request = HostRequest::Check {
        probe: as_text(probe.path.as_os_str())?,
        program: program.map(|program| as_text(program.as_os_str())).transpose()?,
    };
    let start = |host: &&str| -> Result<Child> {
        let mut command = remote.command(host, &request)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.spawn().map_err(|source| not_reached(host, &command, &source))?)
    };
    let started: Vec<Result<Child>> = hosts.iter().map(start).collect();
    // The answers of all hosts are awaited before an error is returned.
    let answers: Vec<Result<HostCheckResult>> =
        hosts.iter().zip(started).map(|(host, child)| wait_for_answer(host, child?)).collect();
    let checks = answers.into_iter().collect::<Result<Vec<HostCheckResult>>>()?;
    for (host, check) in hosts.iter().zip(&checks) {
        if let Some(problem) = problem(check, &probe, folder, program) {
            return Err(SweepToolError::Host { host: (*host).to_owned(), problem }.into());
        }
    }
    Ok(checks)
}

/// Waits for the answer of a host.
fn wait_for_answer(host: &str, child: Child) -> Result<HostCheckResult> {
    let output =
        child.wait_with_output().map_err(|source| LaunchError::Setup { what: "waiting for a remote shell", source })?;
    match HostAnswer::in_output(&String::from_utf8_lossy(&output.stdout)) {
        Some(HostAnswer::Checked(check)) => Ok(check),
        _ => {
            let problem = format!(
                "{}; the host must be reachable by ssh without a password, and have zerorun and the working directory at \
                 the same paths as on this host; otherwise, remove it from the hostfile",
                no_answer_message(output.status, &String::from_utf8_lossy(&output.stderr))
            );
            Err(SweepToolError::Host { host: host.to_owned(), problem }.into())
        }
    }
}

/// Returns why trials cannot run on a host, if they cannot.
fn problem(check: &HostCheckResult, probe: &ProbeFile, folder: &SweepFolder, program: Option<&Path>) -> Option<String> {
    let path = folder.path().display();
    if check.version != VERSION {
        return Some(format!(
            "it has zerorun {}, and this host has {VERSION}; install the same version on all hosts",
            check.version
        ));
    }
    let remedy = "give --out a folder on a file system that all hosts share at the same path";
    match &check.contents {
        Err(why) => return Some(format!("it does not have this host's files in {path} ({why}); {remedy}")),
        Ok(other) if *other != probe.contents => {
            return Some(format!("a file in {path} has different contents there than on this host; {remedy}"));
        }
        Ok(_) => {}
    }
    if let Err(why) = &check.lock {
        return Some(format!(
            "it does not see the locks of this host in {path} ({why}), so two hosts could train the same trial; mount \
             the file system with locks that all hosts see (NFS without nolock or local_lock, Lustre with flock), or \
             {remedy}"
        ));
    }
    let program = program.filter(|_| !check.has_program)?;
    Some(format!(
        "there is no program {} there; the program must be at the same path on all hosts, for example on the file \
         system that they share",
        program.display()
    ))
}
