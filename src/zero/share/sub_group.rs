//! This rank's share of the model, sub-group by sub-group, as the optimizer works through it.
//!
//! A sub-group is a run of parameters of one class whose shares are stored one after the other, in one buffer or one
//! file extent per kind of state. Each class has separate sub-groups because its states differ: Muon's matrices and
//! AdamW's vectors have different states, and frozen parameters have only weights. The optimizer step goes from
//! sub-group to sub-group.
//!
//! | | stage 0 | stages 1, 2 | stage 3 |
//! |---|---|---|---|
//! | owned | the whole parameter | its shard | its shard |
//! | `weights` | - (in the tensors) | - (in the tensors) | shards in the class's format |
//! | `master` | 16-bit or averaged weights only | 16-bit or averaged weights only | 16-bit or averaged weights only |
//! | `grads`, `moments` | whole | shards | shards |
//!
//! If nothing is offloaded to files, all states are in memory. With the device `nvme`, `offload_param` moves `weights`
//! to files, and `offload_optimizer` moves the others. Each parameter's gradient has its own buffer: for a large
//! gradient, the buffer in which it was reduced.

use super::optim_state::OptimState;
use super::share_storage::{FileExtentOf, ShareStorage};
use super::state_storage::StateStorage;
use crate::error::Result;
use crate::memory::{MemoryKind, TrackedBuffer};
use crate::offload::{StateFiles, StateStream};
use crate::optim::SubGroupKey;
use crate::param::ParamId;
use crate::precision::{ElementBuffer, WeightPacking, sum_of_squares};
use candle_core::DType;
use std::ops::Range;

/// The position of the owned part of one parameter in its sub-group.
#[derive(Debug, Clone)]
pub(crate) struct SubGroupPosition {
    pub param: ParamId,
    /// The elements of the whole parameter that this rank owns.
    pub owned: Range<usize>,
    /// The piece of the owned elements, counted from the first, for which this rank is responsible: all of them if
    /// optimizer states are sharded and no other rank has the same shard.
    pub piece: Range<usize>,
    /// The offset of the first owned element in the sub-group. Packed weights are counted in words.
    pub offset: usize,
    /// The number of elements, or words, of a rank's share of the parameter, including the padding of the last ranks.
    pub len: usize,
}

impl SubGroupPosition {
    /// Returns the owned elements in the sub-group, without padding.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.owned.len()
    }

    /// Returns the share in the sub-group, with its padding.
    pub fn padded(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Returns the position in the sub-group of elements `range` of the whole parameter, which this rank owns.
    pub fn place(&self, range: &Range<usize>) -> Range<usize> {
        self.offset + range.start - self.owned.start..self.offset + range.end - self.owned.start
    }
}

/// This rank's gradient of one parameter.
pub(crate) enum GradientShare<R: ShareStorage> {
    /// No gradient has arrived since the last step.
    Absent,
    /// The gradient is in memory.
    Memory(TrackedBuffer<R::Buffer>),
    /// The gradient is in the sub-group's gradient file, or being written there.
    File {
        /// The write in progress, until it has been waited for.
        writing: Option<<R::Files as StateFiles>::Writing>,
        /// The sum of the squares of this rank's piece.
        squares: f64,
    },
}

/// One sub-group of this rank's share.
pub(crate) struct SubGroup<R: ShareStorage> {
    pub class: SubGroupKey,
    pub slots: Vec<SubGroupPosition>,
    /// The number of elements of each kind of state, including padding.
    pub len: usize,
    pub weights: Option<StateStorage<R>>,
    pub master: Option<StateStorage<R>>,
    /// The gradients, one per slot.
    pub grads: Vec<GradientShare<R>>,
    /// The file extent of gradients, if they are not in memory.
    pub grad_file: Option<FileExtentOf<R>>,
    pub moments: Vec<OptimState<R>>,
    /// The factored states of each slot's parameter, one after the other, if the optimizer has any. They are complete
    /// on every rank, and never in files.
    pub factored: Vec<TrackedBuffer<R::Buffer>>,
    /// The states of the outer optimizer, if ranks take local steps. An optimizer step does not touch them.
    pub outer: Vec<StateStorage<R>>,
}

/// The states that a sweep through a share loads into memory, and whether it changes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SweepMode {
    /// All states are loaded, and none changes.
    Read,
    /// All states are loaded; weights and optimizer states are updated with the gradients.
    Update,
    /// Optimizer states are loaded and updated with the gradients. Weights stay where they are.
    Moments,
    /// Weights are loaded, and changed by something other than the gradients.
    Weights,
    /// Weights and optimizer states are loaded, and the weights that the model computes with are written anew.
    Publish,
}

impl SweepMode {
    pub fn has_weights(self) -> bool {
        self != Self::Moments
    }

    pub fn has_moments(self) -> bool {
        self != Self::Weights
    }

    pub fn has_gradients(self) -> bool {
        !matches!(self, Self::Weights | Self::Publish)
    }

    /// Returns whether the sweep changes anything.
    pub fn changes(self) -> bool {
        self != Self::Read
    }

    /// Returns whether the sweep changes master weights or optimizer states.
    pub fn changes_states(self) -> bool {
        !matches!(self, Self::Read | Self::Publish)
    }
}

impl<R: ShareStorage> SubGroup<R> {
    /// Returns the packing of the weights and their storage, if they are packed.
    pub fn packed(&self) -> Option<(WeightPacking, &StateStorage<R>)> {
        self.class.weights.packing().zip(self.weights.as_ref())
    }

    /// Takes a gradient out, so that it can be added to and put back. Returns `None` if none has arrived.
    pub fn take_grads(&mut self, slot: usize, rank: &R) -> Result<Option<TrackedBuffer<R::Buffer>>> {
        match (std::mem::replace(&mut self.grads[slot], GradientShare::Absent), &self.grad_file, rank.files()) {
            (GradientShare::Memory(grads), ..) => Ok(Some(grads)),
            (GradientShare::File { writing, .. }, Some(extent), Some(files)) => {
                writing.map_or(Ok(()), |writing| files.wait_written(writing))?;
                let room = self.zeroed_grads(slot, rank, R::Files::dtype(extent))?;
                let pieces = vec![(extent.clone(), self.slots[slot].padded(), 0)];
                room.try_map(|room| files.wait_filled(files.fill(room, pieces))).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Stores a gradient that is complete for this micro step: in memory, or in the file, by a write that begins now.
    pub fn put_grads(&mut self, slot: usize, grads: TrackedBuffer<R::Buffer>, rank: &R) {
        self.grads[slot] = match (&self.grad_file, rank.files()) {
            (Some(extent), Some(files)) => {
                // The squares are summed now, while the gradient is in memory. Only the last micro step's sum is used.
                let piece = self.slots[slot].piece.clone();
                let squares = grads.buffer().values().map_or(0.0, |values| sum_of_squares(values.slice(piece)));
                let writing = Some(files.store(grads, extent, self.slots[slot].padded()));
                GradientShare::File { writing, squares }
            }
            _ => GradientShare::Memory(grads),
        };
    }

    /// Returns a new buffer of zeros for the gradient of a slot (its owned elements and padding).
    pub fn zeroed_grads(&self, slot: usize, rank: &R, dtype: DType) -> Result<TrackedBuffer<R::Buffer>> {
        let zeros = R::Buffer::zeros(rank.share_location(), dtype, self.slots[slot].len)?;
        Ok(TrackedBuffer::new(rank.ledger(), MemoryKind::Gradients, zeros))
    }

    /// Returns the sum of the squares of this rank's piece of each slot's gradient.
    ///
    /// # Errors
    /// A driver error.
    pub fn squares(&self) -> Result<Vec<f64>> {
        let slots = self.slots.iter().zip(&self.grads);
        let in_memory = slots.filter_map(|(slot, grads)| match grads {
            GradientShare::Memory(grads) => Some((grads.buffer(), slot.piece.clone())),
            GradientShare::Absent | GradientShare::File { .. } => None,
        });
        let parts: Vec<_> = in_memory.collect();
        let mut sums = R::Buffer::sums_of_squares(&parts)?.into_iter();
        let sum = |grads: &GradientShare<R>| match grads {
            GradientShare::Absent => 0.0,
            GradientShare::Memory(_) => sums.next().expect("a sum for each gradient in memory"),
            GradientShare::File { squares, .. } => *squares,
        };
        Ok(self.grads.iter().map(sum).collect())
    }

    /// Returns the states that a window of a sweep reads from files and writes back, in the order in which
    /// [`StateStorage::part`] requests them: weights, master weights, optimizer states, gradients.
    pub fn streams(&self, mode: SweepMode) -> Vec<StateStream<FileExtentOf<R>>> {
        let writes = mode.changes_states();
        let stream =
            |storage: &StateStorage<R>| storage.file().map(|e| StateStream { extent: e.clone(), reads: true, writes });
        let writes_weights = mode.changes();
        // 16-bit weights are recomputed from the master weights, if they exist.
        let from_master = self.master.is_some();
        let weights = self.weights.as_ref().and_then(stream);
        let weights = weights.map(|stream| StateStream { reads: !from_master, writes: writes_weights, ..stream });
        let weights = weights.into_iter().chain(self.master.as_ref().and_then(stream));
        let grads = self.grad_file.clone().map(|extent| StateStream { extent, reads: true, writes: false });
        let grads = grads.filter(|_| mode.has_gradients());
        let moments = self.moments.iter().filter_map(|moment| stream(&moment.storage)).chain(grads);
        let weights = weights.filter(|_| mode.has_weights());
        weights.chain(moments.filter(|_| mode.has_moments())).collect()
    }
}

/// Returns the sub-group and slot of each of `count` parameters.
pub(crate) fn param_slots<R: ShareStorage>(groups: &[SubGroup<R>], count: usize) -> Vec<(usize, usize)> {
    let mut param_slots = vec![(0, 0); count];
    for (g, group) in groups.iter().enumerate() {
        for (s, slot) in group.slots.iter().enumerate() {
            param_slots[slot.param] = (g, s);
        }
    }
    param_slots
}
