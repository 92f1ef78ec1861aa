//! Reads checkpoints that DeepSpeed wrote at ZeRO stages 1, 2 and 3.
//!
//! These checkpoints are Python pickles in zip archives: an optimizer file for each rank, and a model file. A pickle is
//! a program; this module reads it as data, never runs it, and needs no Python. Only the requested parts are read from
//! the archives, by their position, so that a checkpoint can be larger than memory.
//!
//! ```no_run
//! use candle_zero::checkpoint::deepspeed::{DeepSpeedCheckpoint, DeepSpeedStateKind};
//! # fn main() -> candle_zero::Result<()> {
//! let checkpoint = DeepSpeedCheckpoint::open("checkpoints", None)?;
//! for (index, parameter) in checkpoint.parameters().iter().enumerate() {
//!     let master: Vec<f32> = checkpoint.read(DeepSpeedStateKind::Master, index)?;
//!     println!("{} {:?} {}", parameter.name, parameter.shape, master[0]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! ```text
//! tag_files   tag, names of files        torch_archive   zip entries
//! model_file  parameters, counters       pickle, pickle_value, stored_tensor   opcodes as data
//! optim_file  masters, states, scaler    partition       which rank holds which elements
//! mod.rs      the complete checkpoint
//! ```

mod model_file;
mod optim_file;
mod partition;
mod pickle;
mod pickle_value;
mod stored_tensor;
mod tag_files;
#[cfg(test)]
mod tests;
mod torch_archive;

pub use model_file::{DeepSpeedBuffer, DeepSpeedParameter};
pub use optim_file::DynamicScaler;

use crate::error::{Error, Result};
use crate::layout::shard_len;
use crate::util::{counted, is_or_are};
use model_file::ModelFile;
use optim_file::{OptimFile, OptimFileGroup};
use serde_json::{Map, Value as Json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use stored_tensor::StoredTensor;
use tag_files::{TagFiles, file_error};
use torch_archive::{TorchArchive, damaged_error};

/// The kinds of values that a checkpoint contains for each parameter, in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeepSpeedStateKind {
    /// The master weights.
    Master,
    /// Adam's running mean of gradients.
    ExpAvg,
    /// Adam's running mean of squared gradients.
    ExpAvgSq,
}

impl DeepSpeedStateKind {
    /// Returns DeepSpeed's name for the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
        }
    }
}

/// A checkpoint that DeepSpeed wrote.
#[derive(Debug)]
pub struct DeepSpeedCheckpoint {
    folder: PathBuf,
    model: ModelFile,
    parameters: Vec<DeepSpeedParameter>,
    buffers: Vec<DeepSpeedBuffer>,
    /// The position of each parameter.
    locations: Vec<ParameterLocation>,
    ranks: Vec<OptimFile>,
}

/// The position of a parameter: at stages 1 and 2 in the flat space of its group, at stage 3 in that of each rank.
#[derive(Debug)]
struct ParameterLocation {
    group: usize,
    start: usize,
}

impl DeepSpeedCheckpoint {
    /// Opens the folder that was passed to `save_checkpoint`, or the folder of a tag in it. Without `tag`, the file
    /// `latest` in the former folder names the tag.
    ///
    /// Everything except the elements themselves is checked: the files of all ranks exist, are complete, and have
    /// matching shapes.
    pub fn open(dir: impl AsRef<Path>, tag: Option<&str>) -> Result<Self> {
        let files = TagFiles::list(tag_files::find(dir.as_ref(), tag)?)?;
        let first = OptimFile::open(files.optim(0)?)?;
        let model_path = files.model(first.stage)?;
        let model = ModelFile::open(&model_path)?;
        let world_size = first.world_size;
        if model.world_size != world_size {
            let problem = format!("dp_world_size is {}, but {world_size} in the optimizer files", model.world_size);
            return Err(damaged_error(&model_path, &problem));
        }
        files.check_world_size(world_size)?;
        let mut ranks = vec![first];
        for rank in 1..world_size {
            let file = OptimFile::open(files.optim(rank)?)?;
            file.check_same_checkpoint(&ranks[0])?;
            ranks.push(file);
        }
        let locations =
            locations(&model.groups, ranks[0].stage, world_size).map_err(|p| damaged_error(&model_path, &p))?;
        let parameters = model.groups.iter().flatten().cloned().collect();
        let buffers = model.buffers.iter().map(|(buffer, _)| buffer.clone()).collect();
        let checkpoint = Self { folder: files.folder().to_owned(), model, parameters, buffers, locations, ranks };
        checkpoint.check_lengths()?;
        Ok(checkpoint)
    }

    // ---- metadata ------------------------------------------------------------------------------

    /// Returns the folder of the tag.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the ZeRO stage, 1 to 3.
    pub fn stage(&self) -> u8 {
        self.ranks[0].stage
    }

    /// Returns the number of ranks of the run that wrote the checkpoint.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the parameters, in DeepSpeed's order.
    pub fn parameters(&self) -> &[DeepSpeedParameter] {
        &self.parameters
    }

    /// Returns the buffers in the model's `state_dict` (`buffer_names`), with the first rank's values.
    pub fn buffers(&self) -> &[DeepSpeedBuffer] {
        &self.buffers
    }

    /// Returns the reasons why some buffers cannot be read, with their names: for example, complex numbers or
    /// non-contiguous views.
    pub fn unread_buffers(&self) -> &[String] {
        &self.model.unread_buffers
    }

    /// Returns the other names of parameters that a model uses twice, as pairs such as (`lm_head.weight`,
    /// `wte.weight`). The second name of each pair is in [`parameters`](Self::parameters).
    pub fn aliases(&self) -> &[(String, String)] {
        &self.model.aliases
    }

    /// Returns the index of the parameter with that name or alias.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        let alias = self.model.aliases.iter().find(|(alias, _)| alias == name);
        let name = alias.map_or(name, |(_, target)| target);
        self.parameters.iter().position(|parameter| parameter.name == name)
    }

    /// Returns the names that DeepSpeed gives to each parameter's optimizer states; there are none before the first
    /// step.
    pub fn optimizer_states(&self) -> Vec<&str> {
        let names = self.ranks[0].groups.first().map(|group| group.states.keys().map(String::as_str).collect());
        names.unwrap_or_default()
    }

    /// Returns whether `state` can be read.
    pub fn has(&self, state: DeepSpeedStateKind) -> bool {
        state == DeepSpeedStateKind::Master || self.optimizer_states().contains(&state.name())
    }

    /// Returns DeepSpeed's version.
    pub fn ds_version(&self) -> Option<&str> {
        self.model.ds_version.as_deref()
    }

    /// Returns the configuration of the run that wrote the checkpoint.
    pub fn ds_config(&self) -> &Json {
        &self.model.ds_config
    }

    /// Returns the client state that the script passed to `save_checkpoint`. Values that JSON cannot express are null.
    pub fn client_state(&self) -> &Map<String, Json> {
        &self.model.client_state
    }

    // ---- counters ------------------------------------------------------------------------------

    /// Returns the number of optimizer steps, including skipped ones.
    pub fn global_steps(&self) -> u64 {
        self.model.global_steps
    }

    /// Returns the number of samples that all ranks together have trained on.
    pub fn global_samples(&self) -> u64 {
        self.model.global_samples
    }

    /// Returns the number of steps that were skipped because of overflow.
    pub fn skipped_steps(&self) -> u64 {
        self.model.skipped_steps
    }

    /// Returns the counter of the learning-rate scheduler, if there was one. The counter is -1 before the first step.
    pub fn last_batch_iteration(&self) -> Option<i64> {
        self.model.last_batch_iteration
    }

    /// Returns Adam's own step counter, which skipped steps do not advance; `None` before the first step.
    pub fn optimizer_step(&self) -> Option<u64> {
        self.ranks[0].step
    }

    /// Returns the optimizer's parameter groups (`lr` of the next step, `betas`, `eps`, ...), as a list of objects;
    /// null if they were not saved (`elastic_checkpoint`).
    pub fn param_groups(&self) -> &Json {
        &self.ranks[0].param_groups
    }

    /// Returns the current loss scale, which is 1 if the loss was not scaled.
    pub fn loss_scale(&self) -> f64 {
        self.ranks[0].loss_scale.unwrap_or(1.0)
    }

    /// Returns the state of the loss scaler, if it is dynamic.
    pub fn dynamic_scaler(&self) -> Option<&DynamicScaler> {
        self.ranks[0].scaler.as_ref()
    }

    // ---- elements ------------------------------------------------------------------------------

    /// Reads one parameter's `state`, merged over all ranks, without padding.
    pub fn read(&self, state: DeepSpeedStateKind, parameter: usize) -> Result<Vec<f32>> {
        let elements = self.parameters.get(parameter).map_or(0, DeepSpeedParameter::elements);
        self.read_range(state, parameter, 0..elements)
    }

    /// Reads the elements `range` of one parameter's `state`, as needed by a rank that owns a shard of it.
    pub fn read_range(&self, state: DeepSpeedStateKind, parameter: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let (Some(metadata), Some(location)) = (self.parameters.get(parameter), self.locations.get(parameter)) else {
            let count = self.parameters.len();
            let be = is_or_are(count);
            let problem = format!("parameter {parameter} was requested, but there {be} only {count}");
            return Err(file_error(&self.folder, problem));
        };
        if range.start > range.end || range.end > metadata.elements() {
            let (Range { start, end }, DeepSpeedParameter { name, .. }) = (range, metadata);
            let problem =
                format!("elements {start} to {end} of {name} were requested, but it has only {}", metadata.elements());
            return Err(file_error(&self.folder, problem));
        }
        if !self.has(state) {
            return Err(missing_state_error(&self.ranks[0], state, 0));
        }
        let mut values = vec![0.0; range.len()];
        if self.stage() < 3 {
            let parts = self.group_parts(state, location.group)?;
            copy(&parts, location.start + range.start..location.start + range.end, &mut values)?;
            return Ok(values);
        }
        let mut rest = values.as_mut_slice();
        for (rank, piece) in partition::ranks_of(metadata.elements(), self.world_size(), range) {
            let (out, remaining) = rest.split_at_mut(piece.len());
            let parts = self.rank_parts(state, rank)?;
            copy(&parts, location.start + piece.start..location.start + piece.end, out)?;
            rest = remaining;
        }
        Ok(values)
    }

    /// Reads buffer `index` of [`buffers`](Self::buffers): its elements in row-major order, little-endian.
    pub fn read_buffer(&self, index: usize) -> Result<Vec<u8>> {
        let archive = &self.model.archive;
        let Some((_, tensor)) = self.model.buffers.get(index) else {
            let count = self.buffers.len();
            let be = is_or_are(count);
            let problem = format!("buffer {index} was requested, but there {be} only {count}");
            return Err(file_error(archive.path(), problem));
        };
        Ok(tensor.kind.to_library_format(archive.read_bytes(tensor)?))
    }

    /// Reads every byte of the optimizer files, and of the model file if it has buffers, and compares the bytes with
    /// the checksums in the files. [`read`](Self::read) does not compare checksums.
    pub fn verify(&self) -> Result<()> {
        if !self.buffers.is_empty() {
            self.model.archive.verify()?;
        }
        self.ranks.iter().try_for_each(|rank| rank.archive.verify())
    }

    /// Returns the ranks' parts of the flat space of a group (stages 1 and 2).
    fn group_parts(&self, state: DeepSpeedStateKind, group: usize) -> Result<Vec<FlatTensor<'_>>> {
        self.ranks.iter().map(|rank| FlatTensor::of(rank, state, group)).collect()
    }

    /// Returns a rank's sub-groups (stage 3).
    fn rank_parts(&self, state: DeepSpeedStateKind, rank: usize) -> Result<Vec<FlatTensor<'_>>> {
        let rank = &self.ranks[rank];
        (0..rank.groups.len()).map(|group| FlatTensor::of(rank, state, group)).collect()
    }

    // ---- checks --------------------------------------------------------------------------------

    /// Returns an error unless the flat tensors have the lengths that follow from the parameters' shapes.
    fn check_lengths(&self) -> Result<()> {
        let states = [DeepSpeedStateKind::Master, DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq];
        for state in states.into_iter().filter(|state| self.has(*state)) {
            if self.stage() < 3 { self.check_groups(state)? } else { self.check_ranks(state)? }
        }
        Ok(())
    }

    fn check_groups(&self, state: DeepSpeedStateKind) -> Result<()> {
        let (shapes, groups) = (self.model.groups.len(), self.ranks[0].groups.len());
        if shapes != groups {
            let groups = counted(groups, "parameter group");
            let problem = format!("it has {groups}, but the model file has {shapes}");
            return Err(damaged_error(self.ranks[0].archive.path(), &problem));
        }
        for (group, parameters) in self.model.groups.iter().enumerate() {
            let needed: usize = parameters.iter().map(DeepSpeedParameter::elements).sum();
            let found = total(&self.group_parts(state, group)?);
            // The flat space is padded so that each rank's part has an even number of elements; some states are saved
            // without the padding.
            let padded = needed.checked_next_multiple_of(2 * self.world_size());
            if !(Some(needed) <= found && found <= padded) {
                let problem = lengths_differ(state, &format!("group {group} of all ranks"), found, needed);
                return Err(damaged_error(&self.folder, &problem));
            }
        }
        Ok(())
    }

    fn check_ranks(&self, state: DeepSpeedStateKind) -> Result<()> {
        let world_size = self.world_size();
        let needed: usize = self.parameters.iter().map(|p| shard_len(p.elements(), world_size)).sum();
        for rank in 0..world_size {
            let found = total(&self.rank_parts(state, rank)?);
            if found != Some(needed) {
                let problem = lengths_differ(state, "all sub-groups", found, needed);
                return Err(damaged_error(self.ranks[rank].archive.path(), &problem));
            }
        }
        Ok(())
    }
}

/// A flat tensor in the file of a rank.
struct FlatTensor<'a> {
    archive: &'a TorchArchive,
    tensor: &'a StoredTensor,
}

impl<'a> FlatTensor<'a> {
    fn of(rank: &'a OptimFile, state: DeepSpeedStateKind, group: usize) -> Result<Self> {
        let OptimFileGroup { master, states } = &rank.groups[group];
        let archive = &rank.archive;
        match state {
            DeepSpeedStateKind::Master => Ok(Self { archive, tensor: master }),
            _ => match states.get(state.name()) {
                Some(tensor) => Ok(Self { archive, tensor }),
                None => Err(missing_state_error(rank, state, group)),
            },
        }
    }
}

/// Returns the error for a state that a group does not have.
fn missing_state_error(rank: &OptimFile, state: DeepSpeedStateKind, group: usize) -> Error {
    let names: Vec<_> = rank.groups.get(group).into_iter().flat_map(|group| group.states.keys()).collect();
    let found = if names.is_empty() { "none".into() } else { crate::util::list(&names) };
    let name = state.name();
    let problem = format!(
        "it has no {name} for group {group} (its states: {found}); Adam's moments can be read from checkpoints that \
         were saved after a step"
    );
    file_error(rank.archive.path(), problem)
}

/// Returns the number of elements of all parts.
fn total(parts: &[FlatTensor<'_>]) -> Option<usize> {
    parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.tensor.length))
}

fn lengths_differ(state: DeepSpeedStateKind, of: &str, found: Option<usize>, needed: usize) -> String {
    let found = found.map_or("too many elements".into(), |n| counted(n, "element"));
    format!("{} of {of} has {found}, but param_shapes needs {needed}", state.name())
}

/// Reads elements `range` of the concatenated `parts`.
fn copy(parts: &[FlatTensor<'_>], range: Range<usize>, mut out: &mut [f32]) -> Result<()> {
    let lengths: Vec<_> = parts.iter().map(|part| part.tensor.length).collect();
    for partition::TensorRange { tensor, range } in partition::cut(&lengths, range) {
        let FlatTensor { archive, tensor } = &parts[tensor];
        let (head, tail) = out.split_at_mut(range.len());
        archive.read(tensor, range, head)?;
        out = tail;
    }
    assert!(out.is_empty(), "the lengths of flat tensors were checked when the checkpoint was opened");
    Ok(())
}

/// Returns the start of each parameter. Checks for overflow, so that later arithmetic need not check for it.
fn locations(
    groups: &[Vec<DeepSpeedParameter>],
    stage: u8,
    world_size: usize,
) -> Result<Vec<ParameterLocation>, String> {
    let mut locations = vec![];
    let mut start: usize = 0;
    for (group, parameters) in groups.iter().enumerate() {
        if stage < 3 {
            start = 0;
        }
        for parameter in parameters {
            locations.push(ParameterLocation { group, start });
            let length = match stage {
                3 => shard_len(parameter.elements(), world_size),
                _ => parameter.elements(),
            };
            let end = start.checked_add(length);
            start = end.ok_or_else(|| format!("the shapes up to {} have too many elements", parameter.name))?;
        }
    }
    Ok(locations)
}
