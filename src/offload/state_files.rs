//! The interface of transfers between files and memory: implemented by the threads of a [`FileIo`], and by a rehearsal
//! that only counts.

use super::aligned_buffer::AlignedBuffer;
use super::file_arena::FileExtent;
use super::file_io::{FileIo, FileTransfer};
use crate::error::Result;
use crate::memory::TrackedBuffer;
use crate::precision::Flat;
use crate::tensor::flat_buffer::FlatBuffer;
use candle_core::DType;
use std::ops::Range;

/// The files of states. Buffers are on the host. Ranges are counted in elements of an extent, and begin at offsets at
/// which file access may begin.
pub(crate) trait StateFiles {
    /// The extent of a state in a file.
    type Extent: Clone;
    /// The memory of a window.
    type Staging;
    /// A window in transfer.
    type Transfer;
    /// A buffer of elements in memory.
    type Buffer;
    /// A pending read of elements into a buffer.
    type Reading;
    /// A pending write of a state to its file, after which its memory is free.
    type Writing;

    /// Returns the element type.
    fn dtype(extent: &Self::Extent) -> DType;
    /// Creates memory of `bytes` bytes.
    fn staging(bytes: usize) -> Self::Staging;
    /// Returns the number of bytes.
    fn len(staging: &Self::Staging) -> usize;
    /// Begins to fill a window from a file, or fills it with zeros.
    fn read(&self, staging: Self::Staging, source: Option<(&Self::Extent, Range<usize>)>) -> Self::Transfer;
    /// Begins to write a window back.
    fn write(&self, staging: Self::Staging, extent: &Self::Extent, range: Range<usize>) -> Self::Transfer;
    /// Waits for a window, and returns its memory.
    fn wait(&self, transfer: Self::Transfer) -> Result<Self::Staging>;
    /// Begins to fill parts of a buffer. Each of `pieces` consists of an extent, the range to read, and the range's
    /// position in the buffer, counted in elements.
    fn fill(&self, buffer: Self::Buffer, pieces: Vec<(Self::Extent, Range<usize>, usize)>) -> Self::Reading;
    /// Waits until the parts are filled.
    fn wait_filled(&self, reading: Self::Reading) -> Result<Self::Buffer>;
    /// Begins to write a state, whose memory is freed when it has been written. Waits first if many bytes are still
    /// unwritten.
    fn store(&self, memory: TrackedBuffer<Self::Buffer>, extent: &Self::Extent, range: Range<usize>) -> Self::Writing;
    /// Waits until the state is written.
    fn wait_written(&self, writing: Self::Writing) -> Result<()>;
}

impl StateFiles for FileIo {
    type Extent = FileExtent;
    type Staging = AlignedBuffer;
    type Transfer = FileTransfer<AlignedBuffer>;
    type Buffer = FlatBuffer;
    type Reading = FileTransfer<Flat>;
    type Writing = FileTransfer<TrackedBuffer>;

    fn dtype(extent: &FileExtent) -> DType {
        extent.dtype()
    }

    fn staging(bytes: usize) -> AlignedBuffer {
        AlignedBuffer::new(bytes)
    }

    fn len(staging: &AlignedBuffer) -> usize {
        staging.len()
    }

    fn read(
        &self,
        mut staging: AlignedBuffer,
        source: Option<(&FileExtent, Range<usize>)>,
    ) -> FileTransfer<AlignedBuffer> {
        if source.is_none() {
            staging.bytes_mut().fill(0);
        }
        Self::read(self, staging, source.into_iter().map(|(extent, range)| extent.piece(range, 0)).collect())
    }

    fn write(&self, staging: AlignedBuffer, extent: &FileExtent, range: Range<usize>) -> FileTransfer<AlignedBuffer> {
        Self::write(self, staging, vec![extent.piece(range, 0)])
    }

    fn wait(&self, transfer: FileTransfer<AlignedBuffer>) -> Result<AlignedBuffer> {
        transfer.wait()
    }

    fn fill(&self, buffer: FlatBuffer, pieces: Vec<(FileExtent, Range<usize>, usize)>) -> FileTransfer<Flat> {
        let pieces = pieces.into_iter().map(|(extent, range, at)| extent.piece(range, at)).collect();
        Self::read(self, buffer.into_host(), pieces)
    }

    fn wait_filled(&self, reading: FileTransfer<Flat>) -> Result<FlatBuffer> {
        Ok(reading.wait()?.into())
    }

    fn store(
        &self,
        memory: TrackedBuffer<FlatBuffer>,
        extent: &FileExtent,
        range: Range<usize>,
    ) -> FileTransfer<TrackedBuffer> {
        self.write_and_drop(memory.map(FlatBuffer::into_host), vec![extent.piece(range, 0)])
    }

    fn wait_written(&self, writing: FileTransfer<TrackedBuffer>) -> Result<()> {
        writing.written()
    }
}
