//! The files of one rank: the kinds of state that are in files, and the settings for a sweep through them.

use super::disk_access::DiskAccess;
use super::file_arena::FileArena;
use super::file_io::FileIo;
use super::offload_folder::{OffloadFolder, SpaceDemand};
use super::offload_report::OffloadReport;
use super::spill_file::{SpillFile, SpilledTensor};
use super::window_pipeline::WindowSettings;
use crate::comm::Communicator;
use crate::comm::agree::gather_u64;
use crate::config::{Config, OffloadOptimizer, OffloadParam, OffloadTo};
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedger};
use crate::optim::SubGroupKey;
use crate::precision::Flat;
use crate::util::lock;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The offloaded state of one rank. It exists only if something is offloaded to `nvme`.
pub(crate) struct OffloadStore {
    pub io: Arc<FileIo>,
    /// The folder of parameter shards.
    params: Option<Arc<OffloadFolder>>,
    /// The folder of master weights, gradients and optimizer states.
    optimizer: Option<Arc<OffloadFolder>>,
    settings: Option<OffloadOptimizer>,
    files: Mutex<BTreeMap<StateFileKey, Arc<FileArena>>>,
    /// The inputs of recomputing units; empty without `cpu_checkpointing`.
    spill: Arc<SpillFile>,
    folders: Vec<Arc<OffloadFolder>>,
    /// The access that the user chose, instead of the fastest.
    access: Option<DiskAccess>,
    ledger: MemoryLedger,
}

/// The key of a file: the kind of state that it contains. If the states of several classes of parameters grow at the
/// same time, each class has its own file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StateFileKey {
    pub kind: MemoryKind,
    /// The name in messages; for optimizer states, the name of the state.
    pub name: &'static str,
    pub class: Option<SubGroupKey>,
}

impl OffloadStore {
    /// Opens the folders that `config` names. Returns `None` if it does not name any.
    pub fn open(
        config: &Config,
        is_first_rank: bool,
        access: Option<DiskAccess>,
        ledger: &MemoryLedger,
    ) -> Result<Option<Arc<Self>>> {
        let mut folders: Vec<Arc<OffloadFolder>> = Vec::new();
        let mut folder = |path: &Path| -> Result<Arc<OffloadFolder>> {
            // A folder that is given by two paths is locked only once.
            let is_same = |opened: &&Arc<OffloadFolder>| {
                std::fs::canonicalize(opened.path()).ok() == std::fs::canonicalize(path).ok()
            };
            if let Some(opened) = folders.iter().find(is_same) {
                return Ok(opened.clone());
            }
            folders.push(OffloadFolder::open(path, is_first_rank)?);
            Ok(folders[folders.len() - 1].clone())
        };
        let zero = &config.zero;
        let params = match &zero.offload_param {
            Some(OffloadParam { device: OffloadTo::Nvme { path }, .. }) => Some(folder(path)?),
            _ => None,
        };
        let (optimizer, settings) = match &zero.offload_optimizer {
            Some(settings @ OffloadOptimizer { device: OffloadTo::Nvme { path }, .. }) => {
                (Some(folder(path)?), Some(settings.clone()))
            }
            _ => (None, None),
        };
        let Some(first) = folders.first() else { return Ok(None) };
        let activations = FileArena::create(first, MemoryKind::Activations, "activations", ledger)?;
        // Nothing is in the page cache yet, and the data that is written first is read much later.
        let io = Arc::new(FileIo::start(&config.aio, access.unwrap_or(DiskAccess::Direct))?);
        let spill = Arc::new(SpillFile::new(io.clone(), activations));
        let (files, ledger) = (Mutex::default(), ledger.clone());
        Ok(Some(Arc::new(Self { io, params, optimizer, settings, files, spill, folders, access, ledger })))
    }

    /// Returns the file with this key, which is created at the first request.
    pub fn file(&self, key: StateFileKey) -> Result<Arc<FileArena>> {
        let StateFileKey { kind, name, .. } = key;
        let folder = if kind == MemoryKind::Parameters { &self.params } else { &self.optimizer };
        let folder = folder.as_ref().expect("a state in a file has a folder");
        let mut files = lock(&self.files);
        if let Some(file) = files.get(&key) {
            return Ok(file.clone());
        }
        let file = FileArena::create(folder, kind, name, &self.ledger)?;
        files.insert(key, file.clone());
        Ok(file)
    }

    /// Makes states use new files from now on. Each of the current files is deleted when its last extent is dropped.
    pub fn start_new_files(&self) {
        lock(&self.files).clear();
    }

    /// Chooses the file access for the rest of the run, based on the total size of the files of the `ranks_here` ranks
    /// on this host. Call this method after all states have received their storage.
    pub fn choose_access(&self, ranks_here: usize) -> DiskAccess {
        let bytes = self.folders.iter().map(|f| f.reserved()).sum::<u64>().saturating_mul(ranks_here as u64);
        // A file that does not allow direct access is mapped. If no file allows direct access, mapping is chosen
        // instead.
        let direct_is_possible = lock(&self.files).values().any(|file| file.allows_direct());
        let access = match self.access.unwrap_or_else(|| DiskAccess::fastest(bytes, direct_is_possible)) {
            DiskAccess::Direct if !direct_is_possible => DiskAccess::Mapped,
            access => access,
        };
        self.io.set_access(access);
        access
    }

    /// Returns the settings for a sweep through the files.
    pub fn windows(&self) -> WindowSettings {
        WindowSettings::new(self.settings.as_ref(), self.io.access())
    }

    /// Checks that all files of all ranks have received the space that they requested. This is a collective operation,
    /// for use after all requests.
    ///
    /// # Errors
    /// [`OffloadError::Space`](crate::error::OffloadError::Space), or
    /// [`OffloadError::Memory`](crate::error::OffloadError::Memory) for tmpfs, on all ranks that have a folder on the
    /// disk that is too small, with the bytes that all of them need there; a failed collective.
    pub fn check_space(&self, comm: &dyn Communicator) -> Result<()> {
        let numbers = |d: SpaceDemand| [d.device, d.free, d.requested, d.granted, u64::from(d.is_full), d.memory];
        let local: Vec<u64> = self.folders.iter().flat_map(|f| numbers(f.demand())).collect();
        let demand = |n: &[u64; 6]| {
            let is_full = n[4] != 0;
            SpaceDemand { device: n[0], free: n[1], requested: n[2], granted: n[3], is_full, memory: n[5] }
        };
        let all = gather_u64(comm, &local)?;
        let all: Vec<SpaceDemand> = all.iter().flat_map(|rank| rank.as_chunks().0.iter().map(demand)).collect();
        let Some(full) = all.iter().find(|d| d.is_full) else { return Ok(()) };
        // Folders on one disk share its space.
        let on_full_disk = || all.iter().filter(|d| d.device == full.device);
        let [requested, granted] = [on_full_disk().map(|d| d.requested).sum(), on_full_disk().map(|d| d.granted).sum()];
        let mut folders = self.folders.iter().filter(|f| f.demand().device == full.device);
        // A rank that has no folder on that disk receives the error from the other ranks.
        let folder = folders.clone().find(|f| f.demand().is_full).or(folders.next());
        folder.map_or(Ok(()), |folder| Err(folder.too_small(SpaceDemand { requested, granted, ..*full })))
    }

    /// Begins to write `values` of a recomputing unit to a file. Their memory is freed when they have been written.
    pub fn spill(&self, values: Flat) -> Result<SpilledTensor> {
        self.spill.write(values)
    }

    pub fn report(&self) -> OffloadReport {
        self.io.report()
    }
}
