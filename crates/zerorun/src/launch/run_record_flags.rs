//! The flags for the record of a run, which the launcher and `zerorun finetune` share.

use crate::dashboard::ServedFolder;
use candle_zero::runs::{JOB, RECORD, RUN, RUNS_DIR, RunSpec, RunsFolder, new_job};
use clap::Args;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::OnceLock;

/// The name of a run, the folder of its record, and the dashboard of its job.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct RunRecordFlags {
    /// Keep a record of the run under this name, for `zerorun runs` [also: $CANDLE_ZERO_RUN]
    #[arg(long = "run", value_name = "NAME", value_parser = name)]
    pub(crate) name: Option<String>,

    /// Folder of runs, or off to keep no record [default: $CANDLE_ZERO_RUNS_DIR, else runs]
    #[arg(long = "runs", value_name = "DIR|off")]
    pub(crate) folder: Option<PathBuf>,

    /// Serve a page about this job and earlier runs at a port on 127.0.0.1 or on another address; 0 picks a free port
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = dashboard_address)]
    pub(crate) dashboard: Option<SocketAddr>,

    /// The folder that the dashboard of this job serves.
    #[arg(skip)]
    pub(crate) served: Option<ServedFolder>,
}

/// Parses the address of a dashboard.
fn dashboard_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.parse::<u16>().map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    port.or_else(|_| text.parse::<SocketAddr>()).map_err(|_| {
        "give a port from 0 to 65535, or a numeric address and a port, for example 8321 or 0.0.0.0:8321".to_owned()
    })
}

/// Parses the name of a run.
fn name(text: &str) -> Result<String, String> {
    RunSpec::check_name(text).map(|()| text.to_owned()).map_err(str::to_owned)
}

impl RunRecordFlags {
    /// Returns the variables that pass the flags to the ranks.
    pub(super) fn given(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let name = self.name.as_ref().map(|name| (RUN, name.into()));
        let folder = self.folder.as_ref().map(|folder| (RUNS_DIR, folder.into()));
        name.into_iter().chain(folder)
    }

    /// Returns the variables that pass the flags and the id of the job to the ranks.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let record = self.dashboard.map(|_| (RECORD, "1".into()));
        self.given().chain(record).chain([(JOB, job().into())])
    }

    /// Returns the message about a conflict between the flags, if there is one.
    pub(crate) fn conflict(&self) -> Option<String> {
        (self.is_off() && self.dashboard.is_some()).then(|| {
            format!(
                "--dashboard shows the record of the run, but --runs or {RUNS_DIR} is off; give a folder in --runs, or leave \
                 --dashboard out"
            )
        })
    }

    /// Returns whether the flags or the environment switch recording off.
    pub(super) fn is_off(&self) -> bool {
        let of_variable = || std::env::var_os(RUNS_DIR).map(PathBuf::from);
        self.folder.clone().or_else(of_variable).is_some_and(|folder| RunsFolder::is_off(&folder))
    }

    /// Returns the flags as words of a command line for the launchers of other hosts, which serve no page.
    pub(super) fn to_args(&self) -> impl Iterator<Item = OsString> {
        let name = self.name.as_ref().map(|name| ["--run".into(), name.into()]);
        let folder = self.folder.as_ref().map(|folder| ["--runs".into(), folder.into()]);
        name.into_iter().chain(folder).flatten()
    }
}

/// Returns the id of this launcher's job, which stays the same when the job restarts.
fn job() -> &'static str {
    static JOB_ID: OnceLock<String> = OnceLock::new();
    JOB_ID.get_or_init(new_job)
}
