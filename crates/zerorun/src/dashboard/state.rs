//! The state that the threads of a server share.

use super::access::AccessRules;
use candle_zero::runs::RunsFolder;
use candle_zero::util::lock;
use serde_json::Value;
use std::path::{Path, PathBuf};
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

/// The state of a server.
#[derive(Debug)]
pub(super) struct DashboardState {
    pub(super) folder: ServedFolder,
    pub(super) rules: AccessRules,
    /// The last list of runs, and the time until which it is reused, because many pages request it repeatedly.
    pub(super) list: Mutex<Option<(Instant, Value)>>,
    pub(super) connections: AtomicUsize,
    pub(super) live: AtomicUsize,
    pub(super) stop: AtomicBool,
}

impl DashboardState {
    /// Returns whether the server is ending.
    pub(super) fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
