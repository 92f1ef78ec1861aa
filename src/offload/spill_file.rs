//! Inputs that recomputing units keep in a file from the forward pass to the backward pass.

use super::aligned_buffer::ALIGN;
use super::file_arena::{FileArena, TransferPiece};
use super::file_io::{FileIo, FileTransfer};
use crate::error::Result;
use crate::precision::Flat;
use crate::util::lock;
use candle_core::DType;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A file whose extents are reused.
pub(super) struct SpillFile {
    io: Arc<FileIo>,
    arena: Arc<FileArena>,
    /// The free extents by their length in bytes.
    free: Mutex<BTreeMap<usize, Vec<u64>>>,
}

/// Values in a file.
pub(crate) struct SpilledTensor {
    spill: Arc<SpillFile>,
    at: u64,
    /// The size of the extent in bytes.
    capacity: usize,
    len: usize,
    dtype: DType,
    writing: Mutex<Option<FileTransfer<Flat>>>,
}

impl SpillFile {
    pub fn new(io: Arc<FileIo>, arena: Arc<FileArena>) -> Self {
        Self { io, arena, free: Mutex::default() }
    }

    /// Returns the smallest free extent of `capacity` bytes or more, and its size.
    fn take_free_extent(&self, capacity: usize) -> Option<(u64, usize)> {
        let mut free = lock(&self.free);
        let (&capacity, offsets) = free.range_mut(capacity..).next()?;
        let at = offsets.pop()?;
        if offsets.is_empty() {
            free.remove(&capacity);
        }
        Some((at, capacity))
    }

    /// Begins to write `values`. Their memory is freed when they have been written.
    pub fn write(self: &Arc<Self>, values: Flat) -> Result<SpilledTensor> {
        let (len, dtype) = (values.len(), values.dtype());
        let capacity = values.size_in_bytes().next_multiple_of(ALIGN);
        let (at, capacity) = match self.take_free_extent(capacity) {
            Some(extent) => extent,
            None => (self.arena.reserve(capacity)?, capacity),
        };
        let piece = TransferPiece { arena: self.arena.clone(), offset: at, memory: 0..values.size_in_bytes() };
        let writing = Mutex::new(Some(self.io.write_and_drop(values, vec![piece])));
        Ok(SpilledTensor { spill: self.clone(), at, capacity, len, dtype, writing })
    }
}

impl SpilledTensor {
    /// Reads the values.
    pub fn fetch(&self) -> Result<Flat> {
        self.finish_writing()?;
        let values = Flat::zeros(self.dtype, self.len);
        let memory = 0..values.size_in_bytes();
        let piece = TransferPiece { arena: self.spill.arena.clone(), offset: self.at, memory };
        self.spill.io.read(values, vec![piece]).wait()
    }

    fn finish_writing(&self) -> Result<()> {
        lock(&self.writing).take().map_or(Ok(()), FileTransfer::written)
    }
}

impl Drop for SpilledTensor {
    fn drop(&mut self) {
        // An error here concerns values that are no longer needed.
        let _ = self.finish_writing();
        lock(&self.spill.free).entry(self.capacity).or_default().push(self.at);
    }
}
