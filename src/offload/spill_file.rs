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
    room: usize,
    len: usize,
    dtype: DType,
    writing: Mutex<Option<FileTransfer<Flat>>>,
}

impl SpillFile {
    pub fn new(io: Arc<FileIo>, arena: Arc<FileArena>) -> Self {
        Self { io, arena, free: Mutex::default() }
    }

    /// Returns the smallest free extent of `room` bytes or more, and its size.
    fn free_place(&self, room: usize) -> Option<(u64, usize)> {
        let mut free = lock(&self.free);
        let (&room, places) = free.range_mut(room..).next()?;
        let at = places.pop()?;
        if places.is_empty() {
            free.remove(&room);
        }
        Some((at, room))
    }

    /// Begins to write `values`. Their memory is freed when they have been written.
    pub fn write(self: &Arc<Self>, values: Flat) -> Result<SpilledTensor> {
        let (len, dtype) = (values.len(), values.dtype());
        let room = values.size_in_bytes().next_multiple_of(ALIGN);
        let (at, room) = match self.free_place(room) {
            Some(place) => place,
            None => (self.arena.reserve(room)?, room),
        };
        let piece = TransferPiece { arena: self.arena.clone(), at, memory: 0..values.size_in_bytes() };
        let writing = Mutex::new(Some(self.io.write_and_drop(values, vec![piece])));
        Ok(SpilledTensor { spill: self.clone(), at, room, len, dtype, writing })
    }
}

impl SpilledTensor {
    /// Reads the values.
    pub fn fetch(&self) -> Result<Flat> {
        self.settle()?;
        let values = Flat::zeros(self.dtype, self.len);
        let piece = TransferPiece { arena: self.spill.arena.clone(), at: self.at, memory: 0..values.size_in_bytes() };
        self.spill.io.read(values, vec![piece]).wait()
    }

    fn settle(&self) -> Result<()> {
        lock(&self.writing).take().map_or(Ok(()), FileTransfer::written)
    }
}

impl Drop for SpilledTensor {
    fn drop(&mut self) {
        // An error here concerns values that are no longer needed.
        let _ = self.settle();
        lock(&self.spill.free).entry(self.room).or_default().push(self.at);
    }
}
