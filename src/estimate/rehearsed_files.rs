//! Files of a rehearsal: extents are recorded in the ledger, and requests are counted.

use super::meta_buffer::MetaBuffer;
use super::traffic::Traffic;
use crate::config::Aio;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry, TrackedBuffer};
use crate::offload::{ALIGN, DiskAccess, MAX_UNWRITTEN_BYTES, StateFiles, block_size, threads};
use crate::precision::ElementBuffer;
use candle_core::DType;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// An extent of a file, recorded in the ledger.
#[derive(Clone)]
pub(super) struct RehearsedExtent {
    pub dtype: DType,
    pub memory: Rc<RefCell<MemoryLedgerEntry>>,
}

/// The builder of a rehearsal's files, to which extents are added while sub-groups are laid out.
pub(super) struct RehearsedFileBuilder(pub MemoryLedger);

/// Files whose requests are counted.
pub(super) struct RehearsedFiles {
    pub access: DiskAccess,
    ledger: MemoryLedger,
    traffic: Rc<RefCell<Traffic>>,
    /// The bytes of the copies that direct access may need: each thread keeps a block for data that is not aligned.
    copies: usize,
    /// The gradients being written, each with its number, as if no write finished before it was waited for.
    unwritten: RefCell<VecDeque<(u64, TrackedBuffer<MetaBuffer>)>>,
    /// The number of gradients stored so far.
    stored: Cell<u64>,
}

impl RehearsedFiles {
    /// Creates the files. `largest` is the number of elements of the largest parameter.
    pub fn new(
        aio: &Aio,
        largest: usize,
        access: DiskAccess,
        ledger: MemoryLedger,
        traffic: Rc<RefCell<Traffic>>,
    ) -> Self {
        let block = block_size(aio).min(largest * DType::F32.size_in_bytes()).next_multiple_of(ALIGN) + ALIGN - 1;
        let copies = threads(aio) * block;
        Self { access, ledger, traffic, copies, unwritten: RefCell::default(), stored: Cell::new(0) }
    }

    /// Accounts for the copies of direct access, which may exist from then on.
    pub fn hold_copies(&self) {
        if self.access == DiskAccess::Direct {
            drop(self.ledger.hold(MemoryKind::Staging, self.copies));
        }
    }

    fn count_read(&self, extent: &RehearsedExtent, elements: usize) {
        self.traffic.borrow_mut().bytes_read += (elements * extent.dtype.size_in_bytes()) as u64;
    }

    fn count_write(&self, extent: &RehearsedExtent, elements: usize) {
        self.traffic.borrow_mut().bytes_written += (elements * extent.dtype.size_in_bytes()) as u64;
    }
}

impl StateFiles for RehearsedFiles {
    type Extent = RehearsedExtent;
    /// The size of the staging memory in bytes.
    type Staging = usize;
    type Transfer = usize;
    type Buffer = MetaBuffer;
    type Reading = MetaBuffer;
    type Writing = u64;

    fn dtype(extent: &RehearsedExtent) -> DType {
        extent.dtype
    }

    fn staging(bytes: usize) -> usize {
        bytes
    }

    fn len(staging: &usize) -> usize {
        *staging
    }

    fn read(&self, staging: usize, from: Option<(&RehearsedExtent, Range<usize>)>) -> usize {
        if let Some((extent, range)) = from {
            self.count_read(extent, range.len());
        }
        self.hold_copies();
        staging
    }

    fn write(&self, staging: usize, extent: &RehearsedExtent, range: Range<usize>) -> usize {
        self.count_write(extent, range.len());
        self.hold_copies();
        staging
    }

    fn wait(&self, transfer: usize) -> Result<usize> {
        Ok(transfer)
    }

    fn fill(&self, buffer: MetaBuffer, pieces: Vec<(RehearsedExtent, Range<usize>, usize)>) -> MetaBuffer {
        pieces.iter().for_each(|(extent, range, _)| self.count_read(extent, range.len()));
        buffer
    }

    fn wait_filled(&self, reading: MetaBuffer) -> Result<MetaBuffer> {
        Ok(reading)
    }

    fn store(&self, memory: TrackedBuffer<MetaBuffer>, extent: &RehearsedExtent, range: Range<usize>) -> u64 {
        self.count_write(extent, range.len());
        let mut unwritten = self.unwritten.borrow_mut();
        let bytes = |memory: &TrackedBuffer<MetaBuffer>| memory.buffer().capacity_in_bytes();
        while !unwritten.is_empty()
            && unwritten.iter().map(|u| bytes(&u.1)).sum::<usize>() + bytes(&memory) > MAX_UNWRITTEN_BYTES
        {
            unwritten.pop_front();
        }
        self.stored.update(|stored| stored + 1);
        unwritten.push_back((self.stored.get(), memory));
        self.stored.get()
    }

    fn wait_written(&self, number: u64) -> Result<()> {
        let mut unwritten = self.unwritten.borrow_mut();
        if let Ok(index) = unwritten.binary_search_by_key(&number, |(other, _)| *other) {
            unwritten.remove(index);
        }
        Ok(())
    }
}
