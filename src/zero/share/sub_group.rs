//! This rank's share of the model, sub-group by sub-group: what the optimizer works through.
//!
//! A sub-group is a run of parameters whose shares lie one after the other, in one buffer or one part of a file per
//! kind of state, and that are of one class: Muon's matrices and AdamW's vectors have different states, and of frozen
//! parameters there are weights alone, so each class has sub-groups of its own. The optimizer step goes from sub-group
//! to sub-group.
//!
//! | | stage 0 | stages 1, 2 | stage 3 |
//! |---|---|---|---|
//! | owned | the whole parameter | its shard | its shard |
//! | `weights` | - (in the tensors) | - (in the tensors) | shards in the model's dtype |
//! | `master` | 16-bit only | 16-bit only | 16-bit only |
//! | `grads`, `moments` | whole | shards | shards |
//!
//! Where nothing is offloaded to files, all of it is in memory. `offload_param` moves `weights`, `offload_optimizer`
//! the others. Gradients have a buffer per parameter: the one that a large gradient was reduced in.

use super::optim_state::OptimState;
use super::share_memory::{FileExtentOf, ShareMemory};
use super::state_storage::StateStorage;
use crate::error::Result;
use crate::memory::{MemoryKind, TrackedBuffer};
use crate::offload::{StateFiles, StateStream};
use crate::optim::ParamClass;
use crate::param::ParamId;
use crate::precision::{ElementBuffer, WeightPacking, sum_of_squares};
use candle_core::DType;
use std::ops::Range;

/// Where the owned part of one parameter lies in its sub-group.
#[derive(Debug, Clone)]
pub(crate) struct SubGroupSlot {
    pub param: ParamId,
    /// ElementBuffer of the whole parameter that this rank owns.
    pub owned: Range<usize>,
    /// Of these, counted from the first, the piece that this rank answers for: all of them where optimizer states are sharded
    /// and no other rank has the same shard.
    pub piece: Range<usize>,
    /// Offset of the first of them in the sub-group. Packed weights are counted in words.
    pub at: usize,
    /// ElementBuffer, or words, of a rank's share of the parameter, the padding of the last ranks included.
    pub len: usize,
}

impl SubGroupSlot {
    /// The owned elements in the sub-group, without padding.
    pub fn range(&self) -> Range<usize> {
        self.at..self.at + self.owned.len()
    }

    /// The share in the sub-group, with its padding.
    pub fn padded(&self) -> Range<usize> {
        self.at..self.at + self.len
    }

    /// Where elements `range` of the whole parameter, which this rank owns, lie in the sub-group.
    pub fn place(&self, range: &Range<usize>) -> Range<usize> {
        self.at + range.start - self.owned.start..self.at + range.end - self.owned.start
    }
}

/// This rank's gradient of one parameter.
pub(crate) enum GradientShare<R: ShareMemory> {
    /// None has arrived since the last step.
    Absent,
    /// The gradient is in memory.
    Memory(TrackedBuffer<R::Buffer>),
    /// The gradient is in the sub-group's gradient file, or on its way there.
    File {
        /// The way there, until it has been waited for.
        writing: Option<<R::Files as StateFiles>::Writing>,
        /// Sum of the squares of this rank's piece.
        squares: f64,
    },
}

/// One sub-group of this rank's share.
pub(crate) struct SubGroup<R: ShareMemory> {
    pub class: ParamClass,
    pub slots: Vec<SubGroupSlot>,
    /// ElementBuffer of each kind of state, padding included.
    pub len: usize,
    pub weights: Option<StateStorage<R>>,
    pub master: Option<StateStorage<R>>,
    /// Per slot.
    pub grads: Vec<GradientShare<R>>,
    /// Where gradients lie, if not in memory.
    pub grad_file: Option<FileExtentOf<R>>,
    pub moments: Vec<OptimState<R>>,
}

/// The states that a sweep through a share has in memory, and whether it changes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SweepMode {
    /// Everything, which stays as it is.
    Look,
    /// Everything: weights and moments change by the gradients.
    Update,
    /// Moments, which change by the gradients. Weights stay where they are.
    Moments,
    /// Weights, which change by something else than the gradients.
    Weights,
}

impl SweepMode {
    pub fn has_weights(self) -> bool {
        self != Self::Moments
    }

    /// Moments and gradients.
    pub fn has_moments(self) -> bool {
        self != Self::Weights
    }

    pub fn changes(self) -> bool {
        self != Self::Look
    }
}

impl<R: ShareMemory> SubGroup<R> {
    /// The packing of its weights and where they lie, if they are packed.
    pub fn packed(&self) -> Option<(WeightPacking, &StateStorage<R>)> {
        self.class.weights.packing().zip(self.weights.as_ref())
    }

    /// Takes a gradient out, to be added to and put back; nothing where none has arrived.
    pub fn take_grads(&mut self, slot: usize, rank: &R) -> Result<Option<TrackedBuffer<R::Buffer>>> {
        match (std::mem::replace(&mut self.grads[slot], GradientShare::Absent), &self.grad_file, rank.files()) {
            (GradientShare::Memory(grads), ..) => Ok(Some(grads)),
            (GradientShare::File { writing, .. }, Some(extent), Some(files)) => {
                writing.map_or(Ok(()), |writing| files.written(writing))?;
                let room = self.zeroed_grads(slot, rank, R::Files::dtype(extent))?;
                let pieces = vec![(extent.clone(), self.slots[slot].padded(), 0)];
                room.try_map(|room| files.filled(files.fill(room, pieces))).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A gradient is complete as far as this micro step goes: it stays in memory, or begins its way to the file.
    pub fn put_grads(&mut self, slot: usize, grads: TrackedBuffer<R::Buffer>, rank: &R) {
        self.grads[slot] = match (&self.grad_file, rank.files()) {
            (Some(extent), Some(files)) => {
                // Now, while it is in memory. The last micro step's is what counts.
                let piece = self.slots[slot].piece.clone();
                let squares = grads.buffer().values().map_or(0.0, |values| sum_of_squares(values.slice(piece)));
                let writing = Some(files.store(grads, extent, self.slots[slot].padded()));
                GradientShare::File { writing, squares }
            }
            _ => GradientShare::Memory(grads),
        };
    }

    /// The gradient buffer of a slot (its owned elements and padding), zeroed where none has arrived.
    pub fn zeroed_grads(&self, slot: usize, rank: &R, dtype: DType) -> Result<TrackedBuffer<R::Buffer>> {
        let zeros = R::Buffer::zeros(rank.share_place(), dtype, self.slots[slot].len)?;
        Ok(TrackedBuffer::new(rank.ledger(), MemoryKind::Gradients, zeros))
    }

    /// Sum of the squares of this rank's piece of each slot's gradient.
    ///
    /// # Errors
    /// The driver's.
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

    /// The states that a window of a sweep reads from files and writes back, in the order in which [`StateStorage::part`] asks
    /// for it: weights, master weights, moments, gradients.
    pub fn streams(&self, mode: SweepMode) -> Vec<StateStream<FileExtentOf<R>>> {
        let writes = mode.changes();
        let changes =
            |storage: &StateStorage<R>| storage.file().map(|e| StateStream { extent: e.clone(), reads: true, writes });
        // 16-bit weights are made anew from the master weights, if there are some.
        let made_anew = self.master.is_some();
        let of_weights = self.weights.as_ref().and_then(changes).map(|s| StateStream { reads: !made_anew, ..s });
        let weights = of_weights.into_iter().chain(self.master.as_ref().and_then(changes));
        let grads = self.grad_file.clone().map(|extent| StateStream { extent, reads: true, writes: false });
        let moments = self.moments.iter().filter_map(|moment| changes(&moment.storage)).chain(grads);
        let weights = weights.filter(|_| mode.has_weights());
        weights.chain(moments.filter(|_| mode.has_moments())).collect()
    }
}

/// Sub-group and slot of each of `count` parameters.
pub(crate) fn places<R: ShareMemory>(groups: &[SubGroup<R>], count: usize) -> Vec<(usize, usize)> {
    let mut places = vec![(0, 0); count];
    for (g, group) in groups.iter().enumerate() {
        for (s, slot) in group.slots.iter().enumerate() {
            places[slot.param] = (g, s);
        }
    }
    places
}
