//! Other hosts and the trials on them. To this host, each of these trials is a remote shell.
//!
//! A remote shell runs `remote_request_handler` on the other host, which starts the launcher of the trial, passes on
//! the signals that arrive through its standard input, and asks the launcher to end when its standard input ends.

use super::error::SweepToolError;
use super::host_request::{HostAnswer, HostRequest, ON_HOST, last_line};
use super::trial_results::{JobOutcome, ProcessOutcome};
use crate::error::{Error, LaunchError, Result};
use crate::launch::remote_shell::{RemoteShellOptions, as_text, not_reached};
use crate::launch::signals::{die_with_parent, name, write_signal};
use candle_zero::files;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// The maximum number of bytes of a remote shell's output that are read.
const MAX_OUTPUT_BYTES: u64 = 16 << 20;

/// The launcher of trials and other commands on other hosts.
#[derive(Debug, Default)]
pub(super) struct RemoteTrialLauncher {
    pub(super) shell: RemoteShellOptions,
    /// The executable of `zerorun`, at the same path on all hosts.
    pub(super) launcher: PathBuf,
    /// The working directory, at the same path on all hosts.
    pub(super) directory: PathBuf,
    /// The variables that other hosts get.
    pub(super) exports: Vec<(String, String)>,
}

impl RemoteTrialLauncher {
    /// Returns whether trials may run on other hosts.
    pub(super) fn are_used(&self) -> bool {
        !self.launcher.as_os_str().is_empty()
    }

    /// Returns the command that sends a request to a host.
    pub(super) fn command(&self, host: &str, request: &HostRequest) -> Result<Command> {
        let request = serde_json::to_string(request).map_err(|why| SweepToolError::Host {
            host: host.to_owned(),
            problem: format!("the request cannot be encoded: {why}"),
        })?;
        let words = [as_text(self.launcher.as_os_str())?, "sweep".into(), ON_HOST.into(), request];
        as_text(self.directory.as_os_str())?;
        Ok(self.shell.command(host, &words, &self.exports, &self.directory))
    }

    /// Starts a trial on a host. `output` is the file for the output of the remote shell. The inner error is the
    /// reason why the host cannot be reached.
    pub(super) fn start(
        &self,
        host: &str,
        request: &HostRequest,
        output: &Path,
    ) -> Result<std::result::Result<RemoteTrial, String>> {
        let io = |action| move |source| Error::Io { action, path: output.to_owned(), source };
        let out = File::create(output).map_err(io("create"))?;
        let err = out.try_clone().map_err(io("open"))?;
        let mut command = self.command(host, request)?;
        command.stdin(Stdio::piped()).stdout(out).stderr(err);
        // Ctrl-C reaches only the sweep, which passes it on.
        command.process_group(0);
        die_with_parent(&mut command, Signal::TERM);
        Ok(match command.spawn() {
            Ok(child) => {
                let remote = RemoteTrial { host: host.to_owned(), child, output: output.to_owned(), is_killed: false };
                Ok(remote)
            }
            Err(source) => Err(not_reached(host, &command, &source).to_string()),
        })
    }
}

/// A trial on another host.
#[derive(Debug)]
pub(super) struct RemoteTrial {
    host: String,
    /// The remote shell.
    pub(super) child: Child,
    /// The output of the remote shell.
    output: PathBuf,
    /// Whether SIGKILL has been requested before.
    is_killed: bool,
}

impl RemoteTrial {
    /// Returns how the trial has ended, or `None` if the remote shell is still running.
    pub(super) fn end(&mut self) -> Result<Option<ProcessOutcome>> {
        let status = self
            .child
            .try_wait()
            .map_err(|source| Error::from(LaunchError::Setup { what: "waiting for a remote shell", source }))?;
        let Some(status) = status else { return Ok(None) };
        let bytes = files::read(&self.output, MAX_OUTPUT_BYTES).unwrap_or_default();
        let output = String::from_utf8_lossy(&bytes);
        let failed = |problem: String| SweepToolError::Host { host: self.host.clone(), problem };
        Ok(Some(match HostAnswer::in_output(&output) {
            Some(HostAnswer::Busy) => ProcessOutcome::Busy,
            Some(HostAnswer::Value(text)) => match text.parse() {
                Ok(value) => ProcessOutcome::Job(JobOutcome::Result(Ok(value))),
                Err(_) => {
                    return Err(failed(format!(
                        "it answered with the value `{text}`; use the same version of zerorun on all hosts"
                    ))
                    .into());
                }
            },
            Some(HostAnswer::TrialFailed(why)) => ProcessOutcome::Job(JobOutcome::Result(Err(why))),
            Some(HostAnswer::Killed(signal)) => ProcessOutcome::Job(JobOutcome::Killed(signal)),
            Some(HostAnswer::NoMetric(names)) => ProcessOutcome::Job(JobOutcome::NoMetric(names)),
            Some(HostAnswer::Failed(why)) => return Err(failed(why).into()),
            // If a signal has killed the remote shell, it came from the sweep or the user, and the host itself may
            // still be available.
            None | Some(HostAnswer::Checked(_)) => match status.signal() {
                Some(signal) => ProcessOutcome::Job(JobOutcome::Killed(name(signal))),
                None => ProcessOutcome::HostLost(no_answer_message(status, &output)),
            },
        }))
    }

    /// Passes a signal to the launcher. On a second SIGKILL, or if SIGKILL cannot be passed on, the remote shell is
    /// killed, because the host may not answer.
    pub(super) fn signal(&mut self, signal: Signal) {
        let sent = self.child.stdin.as_mut().map(|stdin| write_signal(stdin, signal));
        if signal == Signal::KILL && (self.is_killed || !matches!(sent, Some(Ok(())))) {
            // A remote shell that has ended needs no signal.
            _ = kill_process(Pid::from_child(&self.child), signal);
        }
        self.is_killed |= signal == Signal::KILL;
    }
}

/// Returns a description of how a remote shell that printed no answer has ended.
pub(super) fn no_answer_message(status: ExitStatus, output: &str) -> String {
    let code = status.code().map_or_else(|| status.to_string(), |code| format!("exit code {code}"));
    format!("the remote shell ended with {code}: {}", last_line(output))
}
