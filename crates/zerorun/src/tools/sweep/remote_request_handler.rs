//! The other end of a remote shell: answers the requests of a sweep on another host.

use super::folder::SweepFolder;
use super::host_check;
use super::host_request::{HostAnswer, HostRequest, TrainRequest};
use super::trial_launch::launch;
use super::trial_results::{JobOutcome, TrialResultReader};
use crate::error::{Error, LaunchError, Result};
use crate::launch::console::{EXIT_SETUP, print, refused};
use crate::launch::signals::{LauncherEvent, listen, read_signals};
use candle_zero::sweep::SweepJob;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::Duration;

/// The interval at which the launcher is checked, in case an event is lost.
const TICK: Duration = Duration::from_millis(500);

/// Answers a request, in the text form that `host_request` describes. Must be called on the main thread.
pub(super) fn run(request: &str) -> ExitCode {
    let request = match serde_json::from_str(request) {
        Ok(request) => request,
        Err(why) => {
            let problem = format!("the request does not come from this version of zerorun: {why}");
            let host = candle_zero::util::host_name();
            return refused(&super::error::SweepToolError::Host { host, problem }.into(), EXIT_SETUP);
        }
    };
    let answer = match &request {
        HostRequest::Check { probe, program } => {
            HostAnswer::Checked(host_check::describe(Path::new(probe), program.as_deref().map(Path::new)))
        }
        HostRequest::Train(request) => train(request).unwrap_or_else(|error| HostAnswer::Failed(error.to_string())),
    };
    if print(answer.to_line()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Trains a part of a trial.
fn train(request: &TrainRequest) -> Result<HostAnswer> {
    let folder = SweepFolder::at(Path::new(&request.folder))?;
    let results = TrialResultReader { folder, metric: request.metric.clone(), steps: request.steps };
    let job = SweepJob { trial: request.trial, from: request.from, to: request.to };
    let launcher =
        std::env::current_exe().map_err(|source| LaunchError::Setup { what: "finding the launcher itself", source })?;
    let (sender, events) = listen()?;
    let mut command = Command::new(launcher);
    command.args(&request.words);
    let started = launch(command, &results, &job, request.threads, request.devices.as_deref())?;
    let Some(mut child) = started else { return Ok(HostAnswer::Busy) };
    std::thread::Builder::new()
        .name("standard input".into())
        .spawn(move || receive_signals(&sender))
        .map_err(|source| LaunchError::Setup { what: "listening to standard input", source })?;
    let status = loop {
        let signal = match events.recv_timeout(TICK) {
            Ok(LauncherEvent::End(signal) | LauncherEvent::Pass(signal)) => Some(signal),
            Ok(LauncherEvent::Suspend) => Some(Signal::TSTP),
            Ok(LauncherEvent::Child | LauncherEvent::PeerMessage) | Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(TICK);
                None
            }
        };
        let exit_status = child
            .try_wait()
            .map_err(|source| Error::from(LaunchError::Setup { what: "waiting for a trial", source }))?;
        match (exit_status, signal) {
            (Some(status), _) => break status,
            // A launcher that has ended needs no signal.
            (None, Some(signal)) => _ = kill_process(Pid::from_child(&child), signal),
            (None, None) => {}
        }
    };
    Ok(match results.end(&job, status)? {
        JobOutcome::Result(Ok(value)) => HostAnswer::Value(value.to_string()),
        JobOutcome::Result(Err(why)) => HostAnswer::TrialFailed(why),
        JobOutcome::Killed(signal) => HostAnswer::Killed(signal),
        JobOutcome::NoMetric(names) => HostAnswer::NoMetric(names),
    })
}

/// Receives signals from standard input. The end of standard input acts as SIGTERM.
fn receive_signals(events: &Sender<LauncherEvent>) {
    // The receiver exists until this process ends.
    read_signals(std::io::stdin().lock(), |signal| _ = events.send(LauncherEvent::Pass(signal)));
    _ = events.send(LauncherEvent::End(Signal::TERM));
}
