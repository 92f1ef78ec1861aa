//! Jobs whose ranks run this executable, for tools that train models themselves.

use crate::error::{Error, LaunchError};
use crate::launch::console::{EXIT_SETUP, eprint, refused};
use crate::launch::failure_report::RankExitStatus;
use crate::launch::hosts::core_list::CoreList;
use crate::launch::local_job_spec::{IslandOptions, LocalJobSpec};
use crate::launch::ranks::{self, RunEnd};
use crate::launch::run_record_flags::RunRecordFlags;
use crate::launch::signals::{self, LauncherEvent};
use rustix::process::Signal;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::Receiver;

/// The reason why a job did not succeed.
pub(super) enum OwnJobStop {
    /// An error that the user must fix.
    SetUp(Error),
    /// A rank failed; the text is the report about it.
    Failed(String),
    /// A signal asked the job to end.
    Interrupted(Signal),
}

impl From<Error> for OwnJobStop {
    fn from(error: Error) -> Self {
        Self::SetUp(error)
    }
}

impl OwnJobStop {
    /// Reports the reason, and returns the exit code of the tool.
    pub(super) fn report(self) -> ExitCode {
        match self {
            Self::SetUp(error) => refused(&error, EXIT_SETUP),
            Self::Failed(report) => {
                eprint(&report);
                ExitCode::FAILURE
            }
            Self::Interrupted(signal) => {
                eprint(&format!("zerorun: stopped by {}", signals::name(signal.as_raw())));
                ExitCode::from(RankExitStatus::Signal(signal.as_raw()).exit_code())
            }
        }
    }
}

/// The launcher of this tool's jobs, which run one after another.
pub(super) struct OwnJobLauncher {
    program: PathBuf,
    events: Receiver<LauncherEvent>,
    started: u32,
}

impl OwnJobLauncher {
    /// Prepares to start jobs.
    ///
    /// # Errors
    /// Fails if this executable cannot be found, or signals cannot be handled.
    pub(super) fn new() -> Result<Self, Error> {
        let (_, events) = signals::listen()?;
        let program = std::env::current_exe()
            .map_err(|source| LaunchError::Setup { what: "finding the program itself", source })?;
        Ok(Self { program, events, started: 0 })
    }

    /// Runs a job of `ranks` ranks with these arguments. With `cores`, each rank is bound to its part of the cores.
    pub(super) fn run(&mut self, args: Vec<OsString>, ranks: usize, cores: Option<CoreList>) -> Result<(), OwnJobStop> {
        // Each further job counts as a restart of the first, so that the launcher does not repeat its warning about the
        // number of ranks.
        let restart = self.started;
        self.started = self.started.saturating_add(1);
        let job = LocalJobSpec {
            program: self.program.clone(),
            args,
            world: ranks,
            timeout: None,
            grace: ranks::DEFAULT_GRACE,
            on_signal: None,
            script: None,
            master_port: None,
            prometheus: None,
            run: RunRecordFlags { folder: Some("off".into()), ..RunRecordFlags::default() },
            island: IslandOptions::default(),
            restart,
            timeline: None,
            multi_host: None,
            cores,
            devices: None,
        };
        match ranks::run(&job, &self.events)? {
            RunEnd::Well | RunEnd::OutputLost => Ok(()),
            RunEnd::EndedByOtherHost => unreachable!("the ranks are on this host"),
            RunEnd::Interrupted(signal) => Err(OwnJobStop::Interrupted(signal)),
            RunEnd::Failed(failure) => Err(OwnJobStop::Failed(failure.report)),
        }
    }
}
