//! Loads checkpoints: each rank reads the byte ranges of its own shards, whichever ranks saved them. If each host has
//! its own folder, ranges that a host lacks are first fetched from other hosts.

use super::buffers::{self, SavedBuffer};
use super::fetch_from_hosts::{FetchedFiles, fetch};
use super::folder;
use super::lineage::LastCheckpoint;
use super::locate::{LocatedCheckpoint, locate};
use super::manifest::{MANIFEST, Manifest};
use super::rank_agreement::{remote_failure, same_on_all_ranks};
use super::rank_file::RankFileReader;
use super::rank_file_layout::RankFileOffsets;
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree};
use crate::error::{CheckpointError, Error, Result};
use crate::notice::emit;
use crate::optim::GroupedOptimizer;
use crate::precision::Flat;
use crate::util::{counted, list, lock};
use crate::zero::rank_core::RankCore;
use crate::zero::share::state_access::{ParamStateKind, WEIGHTS};
use candle_core::DType;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use twox_hash::XxHash3_64;

/// The parts of a checkpoint to load. Names and defaults are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// Whether to load the optimizer states and the loss scale. Default true.
    pub load_optimizer_states: bool,
    /// Whether to load the counter of the learning-rate schedule. Default true.
    pub load_lr_scheduler_states: bool,
    /// Whether to load only parameters and buffers: no optimizer states, no counters. Default false.
    pub load_module_only: bool,
    /// Whether the checkpoint must contain exactly the model's parameters and buffers. If false, those that it lacks
    /// stay unchanged, and additional ones are ignored. Default true.
    pub load_module_strict: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            load_optimizer_states: true,
            load_lr_scheduler_states: true,
            load_module_only: false,
            load_module_strict: true,
        }
    }
}

/// The result of loading a checkpoint.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadedCheckpoint {
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// The client state that was saved.
    pub client_state: Value,
    /// The number of samples that all ranks together have trained on: the position at which the data resumes.
    pub global_samples: u64,
}

/// An opened checkpoint, whose manifest and file headers have been checked.
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    offsets: RankFileOffsets,
    /// Rank files by the ranks that wrote them: all of them, or only those that are needed.
    files: BTreeMap<usize, Mutex<RankFileReader>>,
    buffers: Vec<SavedBuffer>,
    /// Keeps the folder of fetched files.
    _fetched: Option<FetchedFiles>,
}

impl Checkpoint {
    /// Opens checkpoint `tag` in folder `dir`, or the one that `latest` names. Returns `None` if `tag` is `None` and
    /// there is no checkpoint.
    ///
    /// # Errors
    /// Fails with a [`CheckpointError::Unusable`] that names the file or folder if checkpoint `tag` does not exist, if
    /// a file is missing, damaged or not readable, or if `tag` is `None` and the folder has checkpoints but no
    /// `latest`.
    pub fn open(dir: impl AsRef<Path>, tag: Option<&str>) -> Result<Option<Self>> {
        let dir = dir.as_ref();
        let tag = match tag {
            Some(tag) => tag.to_owned(),
            None => match folder::latest(dir)? {
                Some(tag) => tag,
                None => return folder::check_no_checkpoints(dir).map(|()| None),
            },
        };
        let path = folder::find_tag_folder(dir, &tag)?;
        let manifest = Manifest::read(&path.join(MANIFEST))?;
        let files = (0..manifest.world_size).map(|rank| open_file(&path, &manifest, rank)).collect::<Result<_>>()?;
        let buffers = manifest.buffers.as_ref().map_or(Ok(Vec::new()), |entry| buffers::read(&path, entry))?;
        Ok(Some(Self {
            path,
            offsets: RankFileOffsets::new(manifest.layout()),
            manifest,
            files,
            buffers,
            _fetched: None,
        }))
    }

    /// Opens the `needed` rank files and the buffers of a checkpoint on rank `rank`, from the folder of this rank's
    /// host or from the fetched files.
    fn open_located(
        located: LocatedCheckpoint,
        fetched: Option<FetchedFiles>,
        needed: impl Iterator<Item = usize>,
        rank: usize,
    ) -> Result<Self> {
        let LocatedCheckpoint { path, manifest, hosts, hosts_of_files } = located;
        let folder = |file: usize| match &fetched {
            Some(fetched) if !hosts_of_files[file].contains(&hosts.first(rank)) => fetched.path(),
            _ => &path,
        };
        let files = needed.map(|rank| open_file(folder(rank), &manifest, rank)).collect::<Result<_>>()?;
        let buffers = |entry| buffers::read(folder(manifest.files.len()), entry);
        let buffers = manifest.buffers.as_ref().map_or(Ok(Vec::new()), buffers)?;
        Ok(Self { path, offsets: RankFileOffsets::new(manifest.layout()), manifest, files, buffers, _fetched: fetched })
    }

    /// Returns this checkpoint as the predecessor of the next save.
    pub(crate) fn as_last(&self) -> Option<LastCheckpoint> {
        // The tag comes from the path, because the folder may have been renamed.
        let tag = self.path.file_name()?.to_str()?;
        LastCheckpoint::new(self.path.parent()?, tag, &self.manifest)
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the checkpoint's buffers, by name.
    pub(super) fn buffers(&self) -> &[SavedBuffer] {
        &self.buffers
    }

    /// Returns the checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns elements `range` of parameter `param` in state `state`, in f32. `param` and `state` are
    /// indices in the manifest.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Unusable`] if the bytes cannot be read or do not match their checksum.
    ///
    /// # Panics
    /// Panics if the manifest has no such state, parameter or element.
    pub fn read(&self, state: usize, param: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let Manifest { parameters, states, .. } = &self.manifest;
        let has = |state: &String| range.end <= parameters[param].numel() && parameters[param].has(state);
        assert!(states.get(state).is_some_and(has), "the checkpoint has no such state, parameter or element");
        let mut bytes = Vec::with_capacity(range.len() * 4);
        for piece in self.offsets.pieces(state, param, range) {
            lock(&self.files[&piece.rank]).read(piece.bytes, |part| bytes.extend_from_slice(part))?;
        }
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    /// Reads every byte of the rank files, and compares each block with its checksum. `on_progress` is called with the
    /// number of bytes read so far.
    ///
    /// # Errors
    /// Fails with a [`CheckpointError::Unusable`] that names the first damaged file and the position in it.
    pub fn verify(&self, mut on_progress: impl FnMut(u64)) -> Result<()> {
        let mut done = 0;
        for file in self.files.values() {
            let mut file = lock(file);
            for block in 0..file.blocks() {
                done += file.check(block)?.len() as u64;
                on_progress(done);
            }
        }
        Ok(())
    }

    /// Returns the result of loading this checkpoint.
    pub(crate) fn into_loaded(self) -> LoadedCheckpoint {
        let Manifest { client_state, global_samples, .. } = self.manifest;
        LoadedCheckpoint { path: self.path, client_state, global_samples }
    }

    /// Reads `blocks` of rank files, and compares them with their checksums.
    fn check(&self, blocks: &BTreeMap<usize, BTreeSet<usize>>) -> Result<()> {
        for (rank, blocks) in blocks {
            let mut file = lock(&self.files[rank]);
            blocks.iter().try_for_each(|block| file.check(*block).map(drop))?;
        }
        Ok(())
    }
}

fn open_file(folder: &Path, manifest: &Manifest, rank: usize) -> Result<(usize, Mutex<RankFileReader>)> {
    Ok((rank, Mutex::new(RankFileReader::open(folder, manifest, rank)?)))
}

/// Returns the blocks of rank files that contain `elements`.
fn blocks(offsets: &RankFileOffsets, elements: &[NeededElements]) -> BTreeMap<usize, BTreeSet<usize>> {
    let mut blocks: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for NeededElements { state, saved, range, .. } in elements {
        for piece in offsets.pieces(*state, *saved, range.clone()) {
            blocks.entry(piece.rank).or_default().extend(RankFileReader::blocks_of(&piece.bytes));
        }
    }
    blocks
}

/// The elements of a saved parameter that this rank needs.
#[derive(Debug, Clone)]
struct NeededElements {
    /// The index of the state in the manifest.
    state: usize,
    saved: usize,
    /// The engine's kind of state.
    kind: ParamStateKind,
    param: usize,
    range: Range<usize>,
}

/// Returns the manifest of checkpoint `tag` in folder `dir`, or of the one that `latest` names; `None` if it cannot be
/// read: loading the checkpoint then reports why.
pub(crate) fn peek(dir: &Path, tag: Option<&str>) -> Option<Manifest> {
    let tag = tag.map_or_else(|| folder::latest(dir).ok().flatten(), |tag| Some(tag.to_owned()))?;
    Manifest::read(&folder::find_tag_folder(dir, &tag).ok()?.join(MANIFEST)).ok()
}

/// Loads checkpoint `tag` in folder `dir`, or the one that `latest` names, into `core`, this rank's state. Everything
/// that is needed is checked before anything changes. If each host has its own folder (`on_each_host`), the newest
/// checkpoint that is complete across all of them is loaded. Collective.
///
/// # Errors
/// Fails on all ranks if the checkpoint is damaged or belongs to another model or optimizer, and if a collective fails.
pub(crate) fn load(
    core: &RankCore,
    trainer: &GroupedOptimizer,
    dir: &Path,
    tag: Option<&str>,
    options: &LoadOptions,
    on_each_host: bool,
) -> Result<Option<Checkpoint>, JointOperationFailure> {
    let comm = core.job();
    let find_needed = |path: &Path, manifest: &Manifest| needed_elements(core, trainer, path, manifest, options);
    let opened = match on_each_host {
        true => open_on_hosts(comm, dir, tag, find_needed)?,
        false => open(comm, dir, tag, find_needed)?,
    };
    let Some((checkpoint, elements)) = opened else {
        if comm.rank() == 0 {
            emit(&format!("there is no checkpoint in {}: nothing is loaded", dir.display()));
        }
        return Ok(None);
    };
    let (model_buffers, strict) = (core.buffers().list(), options.load_module_strict);
    let checked = checkpoint.check(&blocks(&checkpoint.offsets, &elements));
    let elsewhere = core.pipeline().map(|position| &position.all_buffers);
    let buffers = checked
        .and_then(|()| buffers::new_values(model_buffers, elsewhere, &checkpoint.buffers, strict, &checkpoint.path));
    let buffers = agree(comm, buffers, remote_failure(&checkpoint.path))?;
    set_all(core, &checkpoint, &elements)?;
    buffers.iter().try_for_each(|(number, bytes)| core.buffers().list()[*number].set(bytes))?;
    if options.load_optimizer_states && !options.load_module_only {
        set_counts(core, &checkpoint.manifest);
        resume_rounding(core, &checkpoint);
    }
    Ok(Some(checkpoint))
}

/// Opens a checkpoint in a folder that all ranks share, and returns the parts of it that this rank needs. Collective.
fn open(
    comm: &dyn Communicator,
    dir: &Path,
    tag: Option<&str>,
    find_needed: impl FnOnce(&Path, &Manifest) -> Result<Vec<NeededElements>>,
) -> Result<Option<(Checkpoint, Vec<NeededElements>)>, JointOperationFailure> {
    let opened = agree(comm, Checkpoint::open(dir, tag), remote_failure(dir))?;
    let found = opened.as_ref().map_or_else(String::new, |c| {
        let checksum = XxHash3_64::oneshot(c.manifest.to_text().as_bytes());
        format!("{} with a manifest of checksum {checksum:016x}", c.path.display())
    });
    same_on_all_ranks(comm, "checkpoints", &found, dir)?;
    let Some(checkpoint) = opened else { return Ok(None) };
    let elements = agree(comm, find_needed(&checkpoint.path, &checkpoint.manifest), remote_failure(&checkpoint.path))?;
    Ok(Some((checkpoint, elements)))
}

/// Does the same as [`open`] for a separate folder on each host. Parts that this rank needs and its host lacks are
/// fetched. Collective.
fn open_on_hosts(
    comm: &dyn Communicator,
    dir: &Path,
    tag: Option<&str>,
    find_needed: impl FnOnce(&Path, &Manifest) -> Result<Vec<NeededElements>>,
) -> Result<Option<(Checkpoint, Vec<NeededElements>)>, JointOperationFailure> {
    let Some(located) = locate(comm, dir, tag)? else { return Ok(None) };
    let path = located.path.clone();
    let elements = agree(comm, find_needed(&path, &located.manifest), remote_failure(&path))?;
    let needed = blocks(&RankFileOffsets::new(located.manifest.layout()), &elements);
    let fetched = fetch(comm, dir, &located, &needed)?;
    let checkpoint = Checkpoint::open_located(located, fetched, needed.into_keys(), comm.rank());
    let checkpoint = agree(comm, checkpoint, remote_failure(&path))?;
    Ok(Some((checkpoint, elements)))
}

/// Returns the parts of a checkpoint that this rank needs, if the checkpoint belongs to this model.
fn needed_elements(
    core: &RankCore,
    trainer: &GroupedOptimizer,
    path: &Path,
    manifest: &Manifest,
    options: &LoadOptions,
) -> Result<Vec<NeededElements>> {
    let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: path.join(MANIFEST), problem });
    let saved: BTreeMap<&str, usize> =
        manifest.parameters.iter().enumerate().map(|(i, p)| (p.name.as_str(), i)).collect();
    let model_names: BTreeSet<&str> = match core.pipeline() {
        // The other stages of the pipeline need the other parameters.
        Some(position) => position.all_names.iter().map(String::as_str).collect(),
        None => core.params().iter().map(|p| p.name.as_str()).collect(),
    };
    if options.load_module_strict {
        let missing: Vec<&str> = model_names.iter().copied().filter(|name| !saved.contains_key(name)).collect();
        let extra: Vec<&str> = saved.keys().copied().filter(|name| !model_names.contains(name)).collect();
        for (names, subject) in [(missing, "it lacks"), (extra, "the model lacks")] {
            if !names.is_empty() {
                return Err(wrong(format!(
                    "{subject} {}; build the model that was saved, or load with load_module_strict false",
                    list(&names)
                )));
            }
        }
    }
    let mut states = vec![WEIGHTS];
    if options.load_optimizer_states && !options.load_module_only {
        states.extend(core.all_state_names(trainer));
        let (saved, groups) = (manifest.set_lr.as_ref().map(Vec::len), trainer.lr().len());
        if let Some(saved) = saved.filter(|saved| *saved != groups) {
            return Err(wrong(format!(
                "it has learning rates set with set_lr for {}, but this engine has {groups}; train with the parameter \
                 groups that were saved, or load with load_optimizer_states false",
                counted(saved, "parameter group")
            )));
        }
    }
    let mut elements = Vec::new();
    for name in states {
        for (param, parameter) in core.params().iter().enumerate() {
            let Some(kind) = ParamStateKind::named(name, core.state_names(parameter, trainer)) else { continue };
            let Some(&saved) = saved.get(parameter.name.as_str()) else { continue };
            let found = &manifest.parameters[saved];
            if found.shape != parameter.shape.dims() {
                let (name, found, shape) = (&parameter.name, &found.shape, parameter.shape.dims());
                return Err(wrong(format!(
                    "{name} has shape {found:?} in the checkpoint but {shape:?} in the model; build the model that was \
                     saved"
                )));
            }
            let saved_states = found.states.as_deref();
            let was_frozen = kind != ParamStateKind::Weights && saved_states.is_some_and(|saved| saved == [WEIGHTS]);
            match saved_states {
                Some([]) if !parameter.is_trained() => continue,
                Some([]) => return Err(wrong(trained_since(&parameter.name, "was not saved"))),
                Some(_) if was_frozen => return Err(wrong(trained_since(&parameter.name, "was frozen"))),
                _ => {}
            }
            let state = manifest.states.iter().position(|s| s == name && found.has(s));
            if state.is_none() && matches!(kind, ParamStateKind::Outer(_)) {
                // The engine then starts its local steps from the beginning.
                continue;
            }
            let state = state.ok_or_else(|| {
                let suffix = if found.states.is_some() { format!(" of {}", parameter.name) } else { String::new() };
                wrong(format!(
                    "it has the states {}{suffix}, but this optimizer needs {name}; train with the optimizer that was \
                     saved ({}) and its parameter groups, or load with load_optimizer_states false",
                    list(found.states.as_ref().unwrap_or(&manifest.states)),
                    manifest.optimizer.as_deref().unwrap_or("none")
                ))
            })?;
            let len =
                found.state_lens.get(name).map_or(found.numel(), |len| usize::try_from(*len).unwrap_or(usize::MAX));
            let own_len = match kind {
                ParamStateKind::Factored(_) => core.held_range(kind, param).len(),
                _ => parameter.numel,
            };
            if len != own_len {
                return Err(wrong(format!(
                    "it has {} of {name} of {}, but this optimizer needs {own_len}; train with the optimizer \
                     that was saved ({}), or load with load_optimizer_states false",
                    counted(len, "element"),
                    parameter.name,
                    manifest.optimizer.as_deref().unwrap_or("none")
                )));
            }
            // If this rank keeps all elements of a parameter, it reads them from the files, not from other ranks.
            let reads_all = kind == ParamStateKind::Weights && core.keeps_all_elements(param);
            let range = if reads_all { 0..parameter.numel } else { core.held_range(kind, param) };
            elements.push(NeededElements { state, saved, kind, param, range });
        }
    }
    Ok(elements)
}

fn set_all(core: &RankCore, checkpoint: &Checkpoint, elements: &[NeededElements]) -> Result<()> {
    debug_assert_eq!(checkpoint.manifest.states[0], WEIGHTS);
    // Parameters that were gathered by a forward pass without a backward pass will be outdated.
    core.release_all()?;
    for NeededElements { state, saved, kind, param, range } in elements {
        let dtype = if *kind == ParamStateKind::Weights { core.loaded_weight_dtype() } else { DType::F32 };
        let values = |part| checkpoint.read(*state, *saved, part).map(|values| Flat::from_f32(values, dtype));
        if *kind == ParamStateKind::Weights && core.keeps_all_elements(*param) {
            core.write_all_elements(*param, values)?;
            core.write_state(*kind, *param, core.owned_range(*param), values)?;
        } else {
            core.write_state(*kind, *param, range.clone(), values)?;
        }
    }
    core.refresh()
}

/// Returns the problem with a parameter that was not trained when it was saved.
fn trained_since(name: &str, state: &str) -> String {
    format!(
        "{name} {state} in the checkpoint but is trained here; freeze it (EngineBuilder::trainable, set_trainable), \
         load, and then unfreeze it"
    )
}

/// Continues stochastic rounding with the seed of the saved run.
fn resume_rounding(core: &RankCore, checkpoint: &Checkpoint) {
    let Some(seed) = checkpoint.manifest.rounding_seed else { return };
    core.set_rounding_seed(seed);
    if core.rounding_seed().is_none() && core.job().rank() == 0 {
        emit(&format!(
            "checkpoint {}: its states were rounded stochastically and are rounded to nearest from now on; to continue \
             as before, call EngineBuilder::stochastic_rounding(true)",
            checkpoint.manifest.tag
        ));
    }
}

/// Restores, for each trained parameter, the number of weight updates before its own first one.
pub(crate) fn set_counts(core: &RankCore, manifest: &Manifest) {
    let saved: BTreeMap<&str, u64> = manifest.parameters.iter().map(|p| (p.name.as_str(), p.updates_before)).collect();
    for param in core.params().iter().filter(|param| param.is_trained()) {
        let updates_before = saved.get(param.name.as_str()).copied().unwrap_or_default();
        param.updates_before.store(updates_before, Ordering::Relaxed);
    }
}
