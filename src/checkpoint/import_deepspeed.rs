//! Converts a DeepSpeed checkpoint to this library's format: weights, Adam's moments, buffers, counters.

use super::buffers::{self, SavedBuffer};
use super::deepspeed::{DeepSpeedCheckpoint, DeepSpeedStateKind};
use super::folder;
use super::manifest::{FORMAT, Manifest, Parameter, VERSION};
use super::rank_file::RankFileWriter;
use crate::error::{CheckpointError, Result};
use crate::notice::warn;
use crate::precision::{FlatRef, ScalerState};
use crate::zero::share::state_access::{WEIGHTS, pieces};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Writes the content of a DeepSpeed checkpoint as checkpoint `tag` in the folder `dir`, and points `latest` to it.
/// `on_progress` is called with the number of bytes written so far and the total number of bytes. Returns the folder of
/// the checkpoint.
///
/// Buffers that cannot be read are left out, with a message. The checkpoint consists of the file of one rank; any
/// number of ranks can load it. A run that loads it resumes where DeepSpeed stopped.
///
/// # Errors
/// Fails with [`CheckpointError::Unusable`] if `tag` is invalid, `dir` already has a checkpoint of that name or a
/// `latest` that belongs to another program, or a file cannot be written; fails with [`CheckpointError::DeepSpeed`] or
/// [`Error::Io`](crate::Error::Io) if `from` cannot be read. In all these cases, `dir` has no new checkpoint.
pub fn import(
    from: &DeepSpeedCheckpoint,
    dir: impl AsRef<Path>,
    tag: &str,
    mut on_progress: impl FnMut(u64, u64),
) -> Result<PathBuf> {
    let dir = dir.as_ref();
    let path = new_checkpoint_path(dir, tag)?;
    let states = [DeepSpeedStateKind::Master, DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq]
        .into_iter()
        .filter(|state| from.has(*state));
    let states: Vec<DeepSpeedStateKind> = states.collect();
    let mut manifest = manifest(from, tag, &states);
    let buffers = buffers(from, dir)?;
    manifest.buffers = buffers.as_deref().map(buffers::entry);
    let _lock = folder::begin(dir, tag)?;
    let saving = folder::unfinished_path(dir, tag);
    let write_result = buffers.map_or(Ok(()), |bytes| buffers::write(&saving, &bytes));
    let write_result = write_result.and_then(|()| write(from, &saving, &manifest, &states, &mut on_progress));
    let result = write_result.and_then(|file| {
        manifest.files = vec![file];
        folder::prepare(dir, &manifest.tag, &manifest.to_text(), true)?.publish()?;
        Ok(path)
    });
    result.inspect_err(|_| folder::discard_save(dir, tag))
}

/// Returns the folder that [`import`] writes for checkpoint `tag` in `dir`.
///
/// # Errors
/// Fails with [`CheckpointError::Unusable`] if `tag` is invalid, or if the folder already exists.
#[doc(hidden)]
pub fn new_checkpoint_path(dir: &Path, tag: &str) -> Result<PathBuf> {
    folder::check_tag(dir, tag)?;
    let path = dir.join(tag);
    if path.exists() {
        let problem = "a checkpoint of that name already exists; give another folder, or another name with --as".into();
        return Err(CheckpointError::Unusable { path, problem }.into());
    }
    Ok(path)
}

/// Returns the file of the checkpoint's buffers; `None` if it has none.
fn buffers(from: &DeepSpeedCheckpoint, dir: &Path) -> Result<Option<Vec<u8>>> {
    for problem in from.unread_buffers() {
        warn(&format!("warning: a buffer is skipped: {problem}"));
    }
    let saved = from.buffers().iter().enumerate().map(|(index, buffer)| {
        let bytes = from.read_buffer(index)?;
        Ok(SavedBuffer { name: buffer.name.clone(), shape: buffer.shape.clone(), dtype: buffer.dtype, bytes })
    });
    buffers::to_file_bytes(&saved.collect::<Result<Vec<_>>>()?, dir)
}

fn write(
    from: &DeepSpeedCheckpoint,
    folder: &Path,
    manifest: &Manifest,
    states: &[DeepSpeedStateKind],
    on_progress: &mut impl FnMut(u64, u64),
) -> Result<super::FileEntry> {
    let io = |source| folder::write_error(folder, &source);
    let layout = manifest.layout();
    let (mut done, total) = (0, layout.bytes(0));
    let names: Vec<&str> = manifest.parameters.iter().map(|p| p.name.as_str()).collect();
    let mut file = RankFileWriter::create(folder, &layout, &names, &manifest.states, 0).map_err(io)?;
    for state in states {
        for (param, numel) in layout.cuts.iter().map(|cut| cut.numel).enumerate() {
            for piece in pieces(&(0..numel)) {
                let values = from.read_range(*state, param, piece)?;
                file.make_room(values.len()).map_err(io)?;
                file.append(FlatRef::F32(&values));
                done += values.len() as u64 * 4;
                on_progress(done, total);
            }
        }
    }
    file.finish().map_err(io)
}

/// Returns the checkpoint's manifest, without files.
fn manifest(from: &DeepSpeedCheckpoint, tag: &str, states: &[DeepSpeedStateKind]) -> Manifest {
    let config = from.ds_config();
    let is_on = |section: &str| config[section]["enabled"] == Value::Bool(true);
    let dtype = match () {
        () if is_on("bf16") => "bf16",
        () if is_on("fp16") => "f16",
        () => "f32",
    };
    let name = |state: &DeepSpeedStateKind| if *state == DeepSpeedStateKind::Master { WEIGHTS } else { state.name() };
    let parameters = from.parameters().iter().map(|p| Parameter {
        name: p.name.clone(),
        shape: p.shape.clone(),
        states: None,
        block: 0,
        updates_before: 0,
        state_lens: std::collections::BTreeMap::new(),
        pipeline_rank: 0,
        expert: None,
    });
    let updates = from.global_steps().saturating_sub(from.skipped_steps());
    Manifest {
        format: FORMAT.into(),
        version: VERSION,
        tag: tag.into(),
        is_named: true,
        previous: None,
        world_size: 1,
        pipeline_ranks: 1,
        islands: None,
        stage: from.stage(),
        dtype: dtype.into(),
        global_steps: from.global_steps(),
        skipped_steps: from.skipped_steps(),
        global_samples: from.global_samples(),
        scaler: from.dynamic_scaler().map(|scaler| ScalerState {
            scale: scaler.cur_scale,
            patience_left: u32::try_from(scaler.cur_hysteresis).unwrap_or(1),
            steps: u64::try_from(scaler.cur_iter).unwrap_or(0),
            // DeepSpeed counts from -1.
            clean: u64::try_from(scaler.cur_iter.saturating_sub(scaler.last_overflow_iter).saturating_sub(1))
                .unwrap_or(0),
        }),
        optimizer_steps: from.optimizer_step().unwrap_or(updates),
        last_batch_iteration: from.last_batch_iteration().unwrap_or(updates as i64 - 1),
        set_lr: None,
        rounding_seed: None,
        optimizer: config["optimizer"]["type"].as_str().map(str::to_owned),
        states: states.iter().map(|state| name(state).to_owned()).collect(),
        parameters: parameters.collect(),
        files: vec![],
        buffers: None,
        config: config.clone(),
        client_state: Value::Object(from.client_state().clone()),
    }
}
