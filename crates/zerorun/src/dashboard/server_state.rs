//! The state that the threads of a server share.

use super::access::AccessRules;
use super::sweeps::{SweepLocation, SweepReader};
use candle_zero::runs::{RecordedRun, RunsFolder};
use candle_zero::util::lock;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The folder of runs that is served. It changes if a job records its runs in a different folder than expected.
#[derive(Debug, Clone)]
pub(crate) struct ServedFolder(Arc<Mutex<PathBuf>>);

impl ServedFolder {
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self(Arc::new(Mutex::new(folder.into())))
    }

    /// Serves another folder from now on.
    pub(crate) fn change(&self, folder: &Path) {
        let mut served = lock(&self.0);
        if *served != folder {
            folder.clone_into(&mut served);
        }
    }

    /// Returns the folder.
    pub(crate) fn runs(&self) -> RunsFolder {
        RunsFolder::find(Some(lock(&self.0).clone()))
    }
}

/// The last list of runs, which many pages request repeatedly.
#[derive(Debug, Default)]
pub(super) struct RunsListCache {
    /// The list, and the time until which it is reused.
    pub(super) answer: Option<(Instant, Value)>,
    /// The runs of the list that were running, by folder.
    pub(super) running: BTreeMap<PathBuf, RecordedRun>,
}

/// The state that the threads of a server share.
#[derive(Debug)]
pub(super) struct SharedServerState {
    pub(super) folder: ServedFolder,
    pub(super) rules: AccessRules,
    /// The reader of sweeps, unless the page is that of a job.
    pub(super) sweeps: Option<Box<dyn SweepReader>>,
    pub(super) list: Mutex<RunsListCache>,
    pub(super) connections: AtomicUsize,
    pub(super) live: AtomicUsize,
    pub(super) stop: AtomicBool,
}

impl SharedServerState {
    /// Returns the sweeps in the served folder.
    pub(super) fn sweep_locations(&self) -> Vec<SweepLocation> {
        self.sweeps.as_ref().map_or_else(Vec::new, |reader| reader.locations())
    }

    /// Returns the folder of the run with this id, if it exists: a folder in the served folder, or in the folder of
    /// the runs of a sweep.
    pub(super) fn run_folder(&self, id: &str) -> Option<PathBuf> {
        let in_folder = |folder: &Path, name: &str| {
            let path = folder.join(name);
            (is_name(name) && path.is_dir()).then_some(path)
        };
        in_folder(self.folder.runs().path(), id).or_else(|| {
            self.sweep_locations()
                .iter()
                .find_map(|location| in_folder(location.runs.as_deref()?, id.strip_prefix(location.prefix.as_str())?))
        })
    }

    /// Returns whether the server is ending.
    pub(super) fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Returns whether a text is a single name and not a path, which could lead out of the served folder.
fn is_name(text: &str) -> bool {
    let mut parts = Path::new(text).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == text)
}
