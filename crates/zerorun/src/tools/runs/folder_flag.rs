//! The parts that the commands of `zerorun runs` share: the flag for the folder, and their output.

use candle_zero::runs::RunsFolder;
use clap::Args;
use std::path::PathBuf;

/// The folder of runs.
#[derive(Debug, Args)]
pub(super) struct FolderFlag {
    /// Folder of runs [default: $CANDLE_ZERO_RUNS_DIR, else runs]
    #[arg(long, value_name = "DIR")]
    runs: Option<PathBuf>,
}

impl FolderFlag {
    pub(super) fn find(&self) -> RunsFolder {
        RunsFolder::find(self.runs.clone())
    }
}

/// The output of a command.
pub(super) struct RunsOutput {
    pub(super) text: String,
    /// The messages about what could not be read.
    pub(super) problems: Vec<String>,
}
