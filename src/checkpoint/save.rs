//! Saves checkpoints: all ranks write their shards at the same time; then rank 0, or the first rank of each host if
//! each has its own folder, turns the files into a checkpoint.
//!
//! ```text
//!   in the foreground   begin | write share | agree, prepare, agree, publish
//!   in the background   begin | write share ............ | agree, prepare, agree, publish
//!                             | forward, backward (state does not change) | step
//! ```
//!
//! A background save takes no snapshot of master weights and optimizer states: they change only in a step, and the next
//! step that changes them waits until the files are written. Only the buffers are copied at the beginning.

use super::buffers;
use super::folder;
use super::lineage::{LastCheckpoint, LockedFolders, try_to_write};
use super::manifest::{
    EXPERT_VERSION, FACTORED_VERSION, FORMAT, FileEntry, Manifest, PIPELINE_VERSION, Parameter, VERSION, automatic_tag,
    file_name,
};
use super::rank_agreement::{remote_failure, same_on_all_ranks};
use super::rank_file::RankFileWriter;
use super::rank_file_layout::RankFileLayout;
use super::ranks_by_folder::RanksByFolder;
use super::store::UploadRequest;
use super::training_progress::TrainingProgress;
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree, byte_strings, gather_u64, text_of_rank_0, texts};
use crate::config::{Config, TagValidation};
use crate::error::{CheckpointError, CommError, Result};
use crate::notice::{emit, warn};
use crate::optim::GroupedOptimizer;
use crate::param::ParamId;
use crate::timeline;
use crate::util::host_name;
use crate::zero::rank_core::RankCore;
use crate::zero::share::state_access;
use crate::zero::share::state_access::{OptimStateNames, ParamStateKind, WEIGHTS};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The options of a save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// Whether `latest` names the checkpoint afterwards (DeepSpeed's `save_latest`). Default true.
    pub save_latest: bool,
    /// Whether to write the checkpoint while training continues. Default false.
    pub in_background: bool,
    /// Whether to leave out frozen parameters, such as those of the base model under an adapter (DeepSpeed's
    /// `exclude_frozen_parameters`). Loading leaves them unchanged. Default false.
    pub exclude_frozen_parameters: bool,
    /// The number of checkpoints saved without a tag to keep in the folder: first the newest of this run, including the
    /// checkpoints that it resumed from, and then those of other runs. All others are removed, except checkpoints that
    /// the user named and the one that `latest` names. By default, all are kept.
    pub keep: Option<usize>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { save_latest: true, in_background: false, exclude_frozen_parameters: false, keep: None }
    }
}

/// The state to save, the folder and the options.
pub(crate) struct SaveRequest {
    pub dir: PathBuf,
    /// The current state, without files.
    pub manifest: Manifest,
    pub options: SaveOptions,
    pub validation: TagValidation,
    /// Whether rank 0 reports the speed.
    pub shows_statistics: bool,
    /// Whether each host has its own folder.
    pub on_each_host: bool,
    /// The object store that receives a copy.
    pub upload_to: Option<String>,
    /// This rank's island, if each island of the job saves its own checkpoint.
    pub island: Option<IslandOfJob>,
}

/// One of the islands that save at the same time.
pub(crate) struct IslandOfJob {
    pub number: usize,
    /// All ranks of the job.
    pub job: Arc<dyn Communicator>,
}

impl IslandOfJob {
    /// Collective among the ranks of all islands: if any rank has an error, returns an error on all of them.
    pub fn agree<T>(
        own: Result<T, JointOperationFailure>,
        island: Option<&Self>,
        dir: &Path,
    ) -> Result<T, JointOperationFailure> {
        let Some(Self { job, .. }) = island else { return own };
        let own = match own {
            Err(JointOperationFailure::InStep(error)) => Err(error),
            Err(out_of_step) => return Err(out_of_step),
            Ok(own) => Ok(own),
        };
        agree(&**job, own, remote_failure(dir))
    }
}

/// A save in progress.
pub(crate) struct SaveJob {
    core: Arc<RankCore>,
    request: SaveRequest,
    writing: WriteJob,
    /// The ranks that write into each folder.
    hosts: RanksByFolder,
    /// The lock on the folder, on the rank that created it.
    lock: Option<File>,
}

enum WriteJob {
    Done(Result<WrittenFile>),
    Thread(JoinHandle<Result<WrittenFile>>),
}

/// A rank's file, and the time that writing it took.
type WrittenFile = (FileEntry, Duration);

/// Returns the manifest of the current state of this rank's parameters, without files. Without a tag, the checkpoint is
/// named `global_stepN`.
pub(crate) fn manifest(
    core: &RankCore,
    trainer: &GroupedOptimizer,
    config: &Config,
    progress: TrainingProgress,
    tag: Option<&str>,
    client_state: Value,
    options: &SaveOptions,
) -> Manifest {
    let all = core.all_state_names(trainer);
    let states = std::iter::once(WEIGHTS).chain(all.iter().copied());
    let parameters = core.params().iter().map(|p| {
        let own: Vec<&str> = core.state_names(p, trainer).iter().collect();
        let is_left_out = options.exclude_frozen_parameters && !p.is_trained();
        let states = std::iter::once(WEIGHTS).chain(own.iter().copied()).filter(|_| !is_left_out);
        let states = (is_left_out || own.len() < all.len()).then(|| states.map(str::to_owned).collect());
        let updates_before = p.updates_before.load(Ordering::Relaxed);
        let factored = core.factored_names(p, trainer);
        let lens = factored.iter().zip(core.factored_lens(p)).filter(|_| !is_left_out);
        let state_lens = lens.map(|(name, len)| ((*name).to_owned(), len as u64)).collect();
        let block = p.cut().block;
        let block = if block > 1 { block as u64 } else { 0 };
        let pipeline_rank = core.pipeline().map_or(0, |position| position.comm.rank());
        let (name, shape) = (p.name.clone(), p.shape.dims().to_vec());
        let expert = p.expert.map(|expert| [expert.position, expert.size]);
        Parameter { name, shape, states, block, updates_before, state_lens, pipeline_rank, expert }
    });
    let parameters: Vec<Parameter> = parameters.collect();
    let pipeline_ranks = core.pipeline().map_or(1, |position| position.comm.size());
    Manifest {
        format: FORMAT.into(),
        version: match pipeline_ranks {
            _ if parameters.iter().any(|p| p.expert.is_some()) => EXPERT_VERSION,
            _ if parameters.iter().any(|p| !p.state_lens.is_empty()) => FACTORED_VERSION,
            1 => VERSION,
            _ => PIPELINE_VERSION,
        },
        tag: tag.map_or_else(|| automatic_tag(progress.global_steps), str::to_owned),
        is_named: tag.is_some(),
        previous: None,
        world_size: core.job().size(),
        pipeline_ranks,
        islands: None,
        stage: config.zero.stage as u8,
        dtype: format!("{:?}", core.dtype()).to_lowercase(),
        global_steps: progress.global_steps,
        skipped_steps: progress.skipped_steps,
        global_samples: progress.global_samples,
        scaler: progress.scaler,
        optimizer_steps: progress.optimizer_steps,
        last_batch_iteration: progress.last_batch_iteration,
        set_lr: trainer.set_rates(),
        rounding_seed: core.rounding_seed(),
        optimizer: trainer.name().map(str::to_owned),
        states: states.map(str::to_owned).collect(),
        parameters,
        files: vec![],
        buffers: None,
        config: config.to_deepspeed_json(),
        client_state,
    }
}

impl SaveJob {
    /// Begins a checkpoint: this rank's share is written, or a thread starts writing it. Collective.
    ///
    /// # Errors
    /// Fails on all ranks if a buffer, the tag or the folder cannot be used, and if a collective fails.
    pub fn begin(
        core: Arc<RankCore>,
        trainer: &GroupedOptimizer,
        mut request: SaveRequest,
        locked: &mut LockedFolders,
    ) -> Result<Self, JointOperationFailure> {
        request.manifest.parameters = of_all_stages(&core, request.manifest.parameters)?;
        let buffers = snapshot_of_buffers(&core, &request.dir)?;
        request.manifest.buffers = buffers.as_deref().map(buffers::entry);
        let (hosts, lock);
        let begun = begin(core.job(), &request, locked);
        (request.manifest.tag, hosts, lock) = IslandOfJob::agree(begun, request.island.as_ref(), &request.dir)?;
        // Another thread may read GPU memory on another stream, so all work on the GPU must be complete.
        core.synchronize()?;
        let share = ShareToSave::new(core.clone(), &request, buffers, trainer);
        let writing = match request.options.in_background {
            false => WriteJob::Done(share.write()),
            true => match std::thread::Builder::new().name("checkpoint".into()).spawn({
                let (share, timeline_context) = (share.clone(), timeline::carry());
                move || {
                    let _here = timeline_context.enter(timeline::TimelineLane::Checkpoint);
                    share.write()
                }
            }) {
                Ok(thread) => WriteJob::Thread(thread),
                // If no thread can be started, the share is written immediately.
                Err(_) => WriteJob::Done(share.write()),
            },
        };
        Ok(Self { core, request, writing, hosts, lock })
    }

    /// Returns the folder of the checkpoint.
    pub fn path(&self) -> PathBuf {
        self.request.dir.join(&self.request.manifest.tag)
    }

    /// Waits for the files and turns them into a checkpoint. Returns the checkpoint, and the upload to start, if any.
    /// Collective.
    ///
    /// # Errors
    /// Fails on all ranks if a rank could not write a file, and if a collective fails.
    pub fn end(self) -> Result<(Option<LastCheckpoint>, Option<UploadRequest>), JointOperationFailure> {
        let Self { core, request, writing, hosts, lock: _lock } = self;
        let SaveRequest { dir, manifest, options, shows_statistics, upload_to, island, .. } = request;
        let island = island.as_ref();
        let _span =
            timeline::span(timeline::EventCategory::Checkpoint, "end save").with_subject(|| manifest.tag.clone());
        let (comm, is_first) = (core.job(), core.job().rank() == 0);
        let discard_save = |failure: &JointOperationFailure| {
            if let (true, JointOperationFailure::InStep(_)) = (hosts.makes_folder(), failure) {
                folder::discard_save(&dir, &manifest.tag);
            }
        };
        let written = match writing {
            WriteJob::Done(result) => result,
            WriteJob::Thread(thread) => thread.join().unwrap_or_else(|_| {
                let problem = "the thread that wrote it panicked; its panic message gives the reason".into();
                Err(CheckpointError::Unusable { path: dir.clone(), problem }.into())
            }),
        };
        let own = agree(comm, written, remote_failure(&dir));
        let own = IslandOfJob::agree(own, island, &dir).inspect_err(discard_save)?;
        let (files, seconds) = gather_entries(&core, own, &hosts)?;
        let manifest = Manifest { files, ..manifest.clone() };
        // All folders get the manifest of rank 0.
        let text = match hosts.are_several() {
            true => text_of_rank_0(comm, &manifest.to_text())?,
            false if is_first => manifest.to_text(),
            false => String::new(),
        };
        let prepare = || folder::prepare(&dir, &manifest.tag, &text, options.save_latest);
        let prepared = hosts.makes_folder().then(prepare).transpose();
        let prepared = agree(comm, prepared, remote_failure(&dir));
        let prepared = IslandOfJob::agree(prepared, island, &dir).inspect_err(discard_save)?;
        let publish = || prepared.map_or(Ok(()), |prepared| publish(prepared, &dir, &manifest.tag, &options));
        // Whatever `latest` names on island 0 exists on all islands.
        let published = match island {
            None => publish(),
            Some(IslandOfJob { number: 0, .. }) => {
                IslandOfJob::agree(Ok(()), island, &dir).inspect_err(discard_save)?;
                publish()
            }
            Some(_) => {
                let published = publish();
                let published = agree(comm, published, remote_failure(&dir));
                IslandOfJob::agree(published, island, &dir)?;
                Ok(())
            }
        };
        if let (true, true, Ok(())) = (is_first, shows_statistics, &published) {
            let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
            let rate = bytes as f64 / seconds.max(1e-9) / 1e6;
            emit(&format!("checkpoint {}: {bytes} bytes written in {seconds:.3} s, {rate:.0} MB/s", manifest.tag));
        }
        let published = agree(comm, published, remote_failure(&dir));
        IslandOfJob::agree(published, island, &dir)?;
        let (folder, rank, piece) = (dir.join(&manifest.tag), comm.rank(), core.file_index());
        let upload = upload_to.map(|url| UploadRequest { url, folder, rank, piece, is_latest: options.save_latest });
        Ok((LastCheckpoint::new(&dir, &manifest.tag, &manifest), upload))
    }
}

/// Checks that all ranks can save into `dir`, which is created and locked for this job, as for a save. Leftovers of
/// dead jobs in it are removed. Collective.
///
/// # Errors
/// Fails on all ranks if a save into `dir` would fail, and if a collective fails.
pub(crate) fn check_dir(
    comm: &dyn Communicator,
    dir: &Path,
    on_each_host: bool,
    locked: &mut LockedFolders,
) -> Result<(), JointOperationFailure> {
    let hosts = RanksByFolder::of(comm, dir, on_each_host)?;
    let ready = match hosts.makes_folder() {
        true => locked.lock(dir).and_then(|()| folder::remove_leftovers(dir)),
        false => Ok(()),
    };
    agree(comm, ready, remote_failure(dir))?;
    agree(comm, try_to_write(dir), remote_failure(dir))
}

/// The part of a checkpoint that a rank writes.
#[derive(Clone)]
struct ShareToSave {
    core: Arc<RankCore>,
    folder: PathBuf,
    layout: RankFileLayout,
    states: Vec<String>,
    /// The names of all parameters.
    names: Vec<String>,
    /// This rank's parameters, by their indices in `names`, with their ids and optimizer states.
    own: BTreeMap<usize, (ParamId, OptimStateNames)>,
    /// The content of the buffer file, on rank 0.
    buffers: Option<Arc<[u8]>>,
}

impl ShareToSave {
    fn new(
        core: Arc<RankCore>,
        SaveRequest { dir, manifest, .. }: &SaveRequest,
        buffers: Option<Vec<u8>>,
        trainer: &GroupedOptimizer,
    ) -> Self {
        let names: Vec<String> = manifest.parameters.iter().map(|p| p.name.clone()).collect();
        let copied = core.pipeline().and_then(|position| position.copied);
        let own = core.params().iter().enumerate().filter(|(param, _)| copied != Some(*param));
        let numbers: BTreeMap<&str, usize> = names.iter().enumerate().map(|(i, name)| (name.as_str(), i)).collect();
        let own = own.map(|(param, p)| (numbers[p.name.as_str()], (param, core.state_names(p, trainer)))).collect();
        let folder = folder::unfinished_path(dir, &manifest.tag);
        let buffers = buffers.map(Arc::from);
        Self { core, folder, layout: manifest.layout(), states: manifest.states.clone(), names, own, buffers }
    }

    fn write(&self) -> Result<WrittenFile> {
        let _span = timeline::span(timeline::EventCategory::Checkpoint, "write share");
        let start = Instant::now();
        let write_error = |source| folder::write_error(&self.folder, &source);
        let rank = self.core.file_index();
        if let Some(bytes) = &self.buffers {
            buffers::write(&self.folder, bytes)?;
        }
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let mut file =
            RankFileWriter::create(&self.folder, &self.layout, &names, &self.states, rank).map_err(write_error)?;
        for (state, name) in self.states.iter().enumerate() {
            for (number, (param, states)) in &self.own {
                let (param, Some(kind)) = (*param, ParamStateKind::named(name, *states)) else { continue };
                let file_range = self.layout.shard(state, *number, rank);
                let held_range = self.core.held_range(kind, param);
                // States are read in pieces of this rank's share that begin at offsets at which file access can begin.
                for part in state_access::pieces(&held_range) {
                    let (start, end) = (part.start.max(file_range.start), part.end.min(file_range.end));
                    if start < end {
                        let saved = start - part.start..end - part.start;
                        file.make_room(saved.len()).map_err(write_error)?;
                        self.core.read_state(kind, param, part, |values| file.append(values.slice(saved)))?;
                    }
                }
            }
        }
        Ok((file.finish().map_err(write_error)?, start.elapsed()))
    }
}

/// Collective in a pipeline: returns the parameters of all its ranks, in the order of the complete model.
fn of_all_stages(core: &RankCore, own: Vec<Parameter>) -> Result<Vec<Parameter>> {
    let Some(position) = core.pipeline() else { return Ok(own) };
    let own: Vec<(usize, Parameter)> = position
        .in_model
        .iter()
        .copied()
        .zip(own)
        .enumerate()
        .filter(|(param, _)| position.copied != Some(*param))
        .map(|(_, numbered)| numbered)
        .collect();
    let text = serde_json::to_string(&own).unwrap_or_else(|e| unreachable!("strings and numbers are valid JSON: {e}"));
    let mut all = BTreeMap::new();
    for text in texts(&*position.comm, &text)? {
        let of_rank: Vec<(usize, Parameter)> = serde_json::from_str(&text)
            .map_err(|e| CommError::other(format!("a rank of the pipeline sent a damaged list of parameters: {e}")))?;
        all.extend(of_rank);
    }
    Ok(all.into_values().collect())
}

/// Collective for a model with buffers: returns the content of their file on rank 0, and `None` on the other ranks.
fn snapshot_of_buffers(core: &RankCore, dir: &Path) -> Result<Option<Vec<u8>>, JointOperationFailure> {
    let (list, first) = (core.buffers().list(), core.job().rank() == 0);
    let Some(position) = core.pipeline() else {
        if list.is_empty() {
            return Ok(None);
        }
        let own = if first { buffers::snapshot(list, dir) } else { Ok(None) };
        return agree(core.job(), own, remote_failure(dir));
    };
    if position.all_buffers.is_empty() {
        return Ok(None);
    }
    let own = agree(core.job(), buffers::snapshot(list, dir), remote_failure(dir))?;
    let of_stages = byte_strings(&*position.comm, own.unwrap_or_default())?;
    let all = if first { buffers::merge_files(&of_stages, dir) } else { Ok(None) };
    agree(core.job(), all, remote_failure(dir))
}

/// Begins a checkpoint. Returns the tag that all ranks use, the ranks of each folder, and the lock on the folder on the
/// rank that created it.
fn begin(
    comm: &dyn Communicator,
    request: &SaveRequest,
    locked: &mut LockedFolders,
) -> Result<(String, RanksByFolder, Option<File>), JointOperationFailure> {
    let SaveRequest { dir, manifest: Manifest { tag, .. }, validation, .. } = request;
    agree(comm, folder::check_tag(dir, tag), remote_failure(dir))?;
    let hosts = RanksByFolder::of(comm, dir, request.on_each_host)?;
    let tag = match same_on_all_ranks(comm, "tags", tag, dir) {
        Ok(()) => tag.clone(),
        // A checkpoint must have a single tag.
        Err(JointOperationFailure::InStep(_)) if *validation != TagValidation::Fail => {
            let common = text_of_rank_0(comm, tag)?;
            if comm.rank() == 0 && *validation == TagValidation::Warn {
                warn(&format!("warning: ranks save under different tags; all use rank 0's tag, {common}"));
            }
            common
        }
        Err(failure) => return Err(failure),
    };
    let begun = match hosts.makes_folder() {
        true => locked.lock(dir).and_then(|()| folder::begin(dir, &tag)).map(Some),
        false => Ok(None),
    };
    let lock = agree(comm, begun, remote_failure(dir))?;
    Ok((tag, hosts, lock))
}

fn publish(prepared: folder::PreparedCheckpoint, dir: &Path, tag: &str, options: &SaveOptions) -> Result<()> {
    prepared.publish().inspect_err(|_| folder::discard_save(dir, tag))?;
    if let Some(keep) = options.keep {
        keep_newest(dir, keep, tag);
    }
    Ok(())
}

/// Removes all but the `keep` newest checkpoints in `dir` that were saved without a tag. Checkpoint `tag`, which
/// exists, and the one that `latest` names are kept in any case.
#[doc(hidden)]
pub fn keep_newest(dir: &Path, keep: usize, tag: &str) {
    if let Err(error) = folder::keep_newest(dir, keep.max(1), tag) {
        // The checkpoint is saved nevertheless.
        warn(&format!("warning: {error}; the old checkpoints remain, and checkpoint {tag} is saved"));
    }
}

/// Returns the files of all ranks, and the seconds that the slowest rank took.
fn gather_entries(core: &RankCore, (own, time): WrittenFile, hosts: &RanksByFolder) -> Result<(Vec<FileEntry>, f64)> {
    let sum = u64::from_str_radix(&own.header_checksum, 16)
        .unwrap_or_else(|e| unreachable!("the checksum is hexadecimal: {e}"));
    let all = gather_u64(core.job(), &[own.bytes, own.header_bytes, sum, time.as_secs_f64().to_bits()])?;
    let seconds = all.iter().map(|rank| f64::from_bits(rank[3])).fold(0.0, f64::max);
    let comm = core.job();
    let names = if hosts.are_several() { core.by_file(texts(comm, &host_name())?) } else { Vec::new() };
    let entry = |(piece, n): (usize, Vec<u64>)| FileEntry {
        name: file_name(piece, comm.size()),
        bytes: n[0],
        header_bytes: n[1],
        header_checksum: format!("{:016x}", n[2]),
        host: names.get(piece).cloned(),
    };
    Ok((core.by_file(all).into_iter().enumerate().map(entry).collect(), seconds))
}
