//! The flags for the record of a run, which the launcher and `zerorun finetune` share.

use candle_zero::runs::{JOB, RUN, RUNS_DIR, RunSpec, new_job};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The name and the place of the record of a run.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct RunFlags {
    /// Keep a record of the run under this name, for `zerorun runs` [also: $CANDLE_ZERO_RUN]
    #[arg(long = "run", value_name = "NAME", value_parser = name)]
    pub(crate) name: Option<String>,

    /// Folder of runs, or off to keep no record [default: $CANDLE_ZERO_RUNS_DIR, else runs]
    #[arg(long = "runs", value_name = "DIR|off")]
    pub(crate) folder: Option<PathBuf>,
}

/// Parses the name of a run.
fn name(text: &str) -> Result<String, String> {
    RunSpec::check_name(text).map(|()| text.to_owned()).map_err(str::to_owned)
}

impl RunFlags {
    /// Returns the variables that pass the flags to the ranks.
    pub(super) fn given(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let name = self.name.as_ref().map(|name| (RUN, name.into()));
        let folder = self.folder.as_ref().map(|folder| (RUNS_DIR, folder.into()));
        name.into_iter().chain(folder)
    }

    /// Returns the variables that pass the flags and the id of the job to the ranks.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        self.given().chain([(JOB, job().into())])
    }

    /// Returns the flags as words of a command line.
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
