//! The sweeps in the served folder: where the runs of their trials are, and the interface of their reader.
//!
//! `tools::sweep` reads the files of a sweep. That module is on a higher floor (docs/architecture.md), so it
//! implements [`SweepReader`].

use candle_zero::Error;
use serde_json::Value;
use std::path::PathBuf;

/// A sweep in the served folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SweepLocation {
    /// The name by which the page requests it.
    pub(crate) name: String,
    /// The folder of the sweep.
    pub(crate) folder: PathBuf,
    /// The folder of its runs, unless that is the served folder.
    pub(crate) runs: Option<PathBuf>,
    /// The beginning of the ids of its runs, which distinguishes the runs of several sweeps.
    pub(crate) prefix: String,
}

/// A reader of the sweeps in the served folder.
pub(crate) trait SweepReader: std::fmt::Debug + Send + Sync {
    /// Returns the sweeps that are currently in the folder.
    fn locations(&self) -> Vec<SweepLocation>;

    /// Returns a sweep as the page shows it.
    ///
    /// # Errors
    /// Fails if a file cannot be read or the definition is damaged. Damage to the journal is not an error; the returned
    /// sweep reports it.
    fn read(&self, location: &SweepLocation) -> Result<Value, Error>;
}
