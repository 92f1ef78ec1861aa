//! The memory and the files in which a rank keeps its share.

use crate::memory::Ledger;
use crate::offload::StateFiles;
use crate::precision::ElementBuffer;

/// The memory and the files of a rank that trains, or of a rehearsal of one.
pub(crate) trait ShareMemory: Sized {
    /// ElementBuffer in memory.
    type Buffer: ElementBuffer;
    /// Where states lie that are not in memory.
    type Files: StateFiles<Buffer = Self::Buffer>;

    /// Where this rank's share lies, if not in files.
    fn share_place(&self) -> &BufferPlaceOf<Self>;
    /// Where the model computes: gathered parameters, and what travels between ranks.
    fn model_place(&self) -> &BufferPlaceOf<Self>;
    fn files(&self) -> Option<&Self::Files>;
    fn ledger(&self) -> &Ledger;
}

/// A kind of memory in which a rank has buffers.
pub(crate) type BufferPlaceOf<R> = <<R as ShareMemory>::Buffer as ElementBuffer>::Place;

/// A place in a file.
pub(crate) type FileExtentOf<R> = <<R as ShareMemory>::Files as StateFiles>::Extent;

/// Memory of a window of the optimizer step.
pub(crate) type StagingBufferOf<R> = <<R as ShareMemory>::Files as StateFiles>::Staging;
