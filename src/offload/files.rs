//! What moves states between files and memory: the threads of an [`Io`], or a rehearsal that only counts.

use super::aligned::Aligned;
use super::arena::Extent;
use super::io::{Io, Transfer};
use crate::error::Result;
use crate::memory::Tracked;
use candle_core::DType;
use std::ops::Range;

/// Files of states. Ranges are elements of an extent, and begin where a file allows it.
pub(crate) trait Files {
    /// The place of a state.
    type Extent: Clone;
    /// Memory of a window.
    type Staging;
    /// A window on its way.
    type Transfer;
    /// A state in memory.
    type Memory;
    /// A state on its way to its file, after which its memory is free.
    type Writing;

    /// Element type.
    fn dtype(extent: &Self::Extent) -> DType;
    /// Memory of `bytes` bytes.
    fn staging(bytes: usize) -> Self::Staging;
    /// Its bytes.
    fn len(staging: &Self::Staging) -> usize;
    /// Begins to fill a window.
    fn read(&self, staging: Self::Staging, extent: &Self::Extent, range: Range<usize>) -> Self::Transfer;
    /// Fills a window with zeros.
    fn clear(&self, staging: Self::Staging) -> Self::Transfer;
    /// Begins to bring a window back.
    fn write(&self, staging: Self::Staging, extent: &Self::Extent, range: Range<usize>) -> Self::Transfer;
    /// Waits for a window, and gives its memory back.
    fn wait(&self, transfer: Self::Transfer) -> Result<Self::Staging>;
    /// Fills `memory`.
    fn fetch(&self, memory: Self::Memory, extent: &Self::Extent, range: Range<usize>) -> Result<Self::Memory>;
    /// Begins to write `memory`, which is then free. Waits first where much is unwritten yet.
    fn store(&self, memory: Self::Memory, extent: &Self::Extent, range: Range<usize>) -> Self::Writing;
    /// Waits until it is written.
    fn written(&self, writing: Self::Writing) -> Result<()>;
}

impl Files for Io {
    type Extent = Extent;
    type Staging = Aligned;
    type Transfer = Transfer<Aligned>;
    type Memory = Tracked;
    type Writing = Transfer<Tracked>;

    fn dtype(extent: &Extent) -> DType {
        extent.dtype()
    }

    fn staging(bytes: usize) -> Aligned {
        Aligned::new(bytes)
    }

    fn len(staging: &Aligned) -> usize {
        staging.len()
    }

    fn read(&self, staging: Aligned, extent: &Extent, range: Range<usize>) -> Transfer<Aligned> {
        Self::read(self, staging, vec![extent.piece(range, 0)])
    }

    fn clear(&self, mut staging: Aligned) -> Transfer<Aligned> {
        staging.bytes_mut().fill(0);
        Self::read(self, staging, Vec::new())
    }

    fn write(&self, staging: Aligned, extent: &Extent, range: Range<usize>) -> Transfer<Aligned> {
        Self::write(self, staging, vec![extent.piece(range, 0)])
    }

    fn wait(&self, transfer: Transfer<Aligned>) -> Result<Aligned> {
        transfer.wait()
    }

    fn fetch(&self, memory: Tracked, extent: &Extent, range: Range<usize>) -> Result<Tracked> {
        Self::read(self, memory, vec![extent.piece(range, 0)]).wait()
    }

    fn store(&self, memory: Tracked, extent: &Extent, range: Range<usize>) -> Transfer<Tracked> {
        self.write_and_drop(memory, vec![extent.piece(range, 0)])
    }

    fn written(&self, writing: Transfer<Tracked>) -> Result<()> {
        writing.written()
    }
}
