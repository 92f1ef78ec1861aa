//! `run.json`: the facts that are known when a run begins.

use super::{FORMAT, GitRevision, INFO, MAX_FILE_BYTES, RunMachine, json_line_reader};
use crate::error::{Error, Result, RunError};
use crate::files;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The description of a run, written once, when the run begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunInfo {
    /// The version of the format.
    pub format: u64,
    /// The name that the program or the user has given. The folder's name is this name, followed by the time at which
    /// the job began.
    pub name: String,
    /// The id of the job. It stays the same when the job restarts.
    #[serde(default)]
    pub job: String,
    /// The time at which the run began, in seconds since 1970.
    #[serde(default)]
    pub created: f64,
    /// The command line, without secrets.
    #[serde(default)]
    pub command: Vec<String>,
    /// The working directory.
    #[serde(default)]
    pub directory: String,
    /// The machine of rank 0.
    #[serde(default)]
    pub machine: RunMachine,
    /// The versions of the software.
    #[serde(default)]
    pub versions: RunVersions,
    /// The git revision of the working directory, if it is in a repository.
    #[serde(default)]
    pub git: Option<GitRevision>,
    /// The number of ranks.
    #[serde(default)]
    pub world_size: usize,
    /// The number of steps of the complete run, if it is known in advance.
    #[serde(default)]
    pub total_steps: Option<u64>,
    /// The settings of the program that are not part of the configuration.
    #[serde(default)]
    pub settings: Value,
    /// The resolved configuration.
    #[serde(default)]
    pub configuration: Value,
}

/// The versions of the software that trains.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RunVersions {
    /// The version of this library.
    pub candle_zero: String,
    /// Whether the program was built with debug assertions, as unoptimized builds usually are.
    pub debug: bool,
    /// The cargo features of this library.
    pub features: Vec<String>,
}

impl RunVersions {
    /// Returns the versions of this program.
    pub(super) fn current() -> Self {
        let features = [("cli", cfg!(feature = "cli")), ("cuda", cfg!(feature = "cuda")), ("s3", cfg!(feature = "s3"))];
        Self {
            candle_zero: env!("CARGO_PKG_VERSION").to_owned(),
            debug: cfg!(debug_assertions),
            features: features.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| name.to_owned()).collect(),
        }
    }
}

impl RunInfo {
    /// Reads the description in a folder.
    ///
    /// # Errors
    /// The file cannot be read; [`RunError::Damaged`]; [`RunError::Newer`].
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(INFO);
        let damaged = |problem: String| Error::from(RunError::Damaged { path: path.clone(), problem });
        let bytes = match json_line_reader::read(&path, MAX_FILE_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(damaged("it is missing".into())),
            Err(error) if error.kind() == std::io::ErrorKind::FileTooLarge => return Err(damaged(error.to_string())),
            read => read.map_err(|source| Error::Io { action: "read", path: path.clone(), source })?,
        };
        let tree: Value =
            serde_json::from_slice(&bytes).map_err(|error| damaged(format!("it is not JSON ({error})")))?;
        match tree["format"].as_u64() {
            None => return Err(damaged("its `format` is missing or is not a number".into())),
            Some(found) if found > FORMAT => {
                return Err(RunError::Newer { path: path.clone(), found, newest: FORMAT }.into());
            }
            Some(_) => {}
        }
        serde_json::from_value(tree).map_err(|error| damaged(error.to_string()))
    }

    /// Writes the description into a folder that has none. The file appears only when it is complete.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(INFO);
        let text = serde_json::to_vec_pretty(self).expect("text and numbers are JSON");
        match files::write_atomically(&path, files::UNFINISHED, &text) {
            Ok(_) => Ok(()),
            Err(source) => Err(Error::Io { action: "write", path, source }),
        }
    }
}
