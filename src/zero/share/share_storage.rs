//! The memory and the files in which a rank keeps its share.

use crate::memory::MemoryLedger;
use crate::offload::StateFiles;
use crate::precision::ElementBuffer;

/// The memory and the files of a rank that trains, or of a rehearsal of such a rank.
pub(crate) trait ShareStorage: Sized {
    /// A buffer in memory.
    type Buffer: ElementBuffer;
    /// The files of the states that are not in memory.
    type Files: StateFiles<Buffer = Self::Buffer>;

    /// Returns the location of those of this rank's master weights, optimizer states and gradients that are not in
    /// files.
    fn share_location(&self) -> &BufferLocationOf<Self>;
    /// Returns the place where the model computes, which also holds gathered parameters and the buffers of collectives.
    fn model_location(&self) -> &BufferLocationOf<Self>;
    fn files(&self) -> Option<&Self::Files>;
    fn ledger(&self) -> &MemoryLedger;
}

/// The location of a rank's buffer: a kind of memory.
pub(crate) type BufferLocationOf<R> = <<R as ShareStorage>::Buffer as ElementBuffer>::Location;

/// An extent of a file.
pub(crate) type FileExtentOf<R> = <<R as ShareStorage>::Files as StateFiles>::Extent;

/// The memory of a window of the optimizer step.
pub(crate) type StagingBufferOf<R> = <<R as ShareStorage>::Files as StateFiles>::Staging;
