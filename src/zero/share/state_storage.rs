//! The storage of a sub-group's state: memory or a file.

use super::share_storage::{FileExtentOf, ShareStorage};
use crate::memory::TrackedBuffer;
use crate::offload::StagedState;
use crate::precision::{ElementBuffer, FlatMut};
use crate::tensor::flat_buffer::FlatBuffer;
use std::ops::Range;

/// The storage of one kind of state of a sub-group.
pub(crate) enum StateStorage<R: ShareStorage> {
    /// The complete state is in memory.
    Memory(TrackedBuffer<R::Buffer>),
    /// The state is in a file. Only the part that the step works on is in memory.
    File(FileExtentOf<R>),
}

impl<R: ShareStorage> StateStorage<R> {
    /// Returns the extent in a file.
    pub fn file(&self) -> Option<&FileExtentOf<R>> {
        match self {
            Self::Memory(_) => None,
            Self::File(extent) => Some(extent),
        }
    }
}

impl<R: ShareStorage<Buffer = FlatBuffer>> StateStorage<R> {
    /// Returns elements `range` of the sub-group, on the host: from memory, or from the next of the `staged` states.
    pub fn part<'a>(
        &'a mut self,
        staged: &mut std::slice::IterMut<'a, StagedState>,
        range: Range<usize>,
    ) -> FlatMut<'a> {
        match self {
            Self::Memory(buffer) => buffer.buffer_mut().slice_mut(range),
            Self::File(_) => staged.next().expect("a window contains all states in files").part(range),
        }
    }
}

/// Returns whether weights are on a GPU: in their `storage`, or, if they are not sharded, in the parameters' tensors.
pub(crate) fn weights_are_on_gpu<R: ShareStorage>(rank: &R, storage: Option<&StateStorage<R>>) -> bool {
    match storage {
        Some(StateStorage::Memory(weights)) => R::Buffer::is_device(&weights.buffer().location()),
        Some(StateStorage::File(_)) => false,
        None => R::Buffer::is_device(rank.model_location()),
    }
}
