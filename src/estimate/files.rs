//! Files of a rehearsal: space is entered in the ledger, and requests are counted.

use super::blank::Blank;
use super::rehearsal::Rehearsal;
use super::traffic::Traffic;
use crate::config::Aio;
use crate::error::Result;
use crate::memory::{Held, Kind, Ledger, Tier, Tracked};
use crate::offload::{ALIGN, DiskAccess, Files, UNWRITTEN, block_size, threads};
use crate::optim::Role;
use crate::precision::FlatRef;
use crate::zero::lay_out::{self, State};
use candle_core::DType;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// Space of a file: its element type, its bytes and their entry in the ledger.
#[derive(Clone)]
pub(super) struct Space {
    dtype: DType,
    bytes: Rc<RefCell<(usize, Held)>>,
}

impl Space {
    fn resize(&self, resize: impl FnOnce(usize) -> usize) {
        let (bytes, held) = &mut *self.bytes.borrow_mut();
        *bytes = resize(*bytes);
        held.resize(*bytes);
    }
}

/// Files while sub-groups are laid out.
pub(super) struct Spaces(pub Ledger);

impl<'a> lay_out::Carrier<Rehearsal<'a>> for Spaces {
    fn begin(&self, state: State, _: Role, dtype: DType) -> Space {
        Space { dtype, bytes: Rc::new(RefCell::new((0, self.0.hold_in(Tier::File, state.kind(), 0)))) }
    }

    fn grow(&mut self, space: &Space, count: usize) -> Result<()> {
        space.resize(|bytes| bytes + count * space.dtype.size_in_bytes());
        Ok(())
    }

    fn write(&mut self, _: &Space, _: usize, _: FlatRef<'_>) -> Result<()> {
        Ok(())
    }

    fn written(&mut self) -> Result<()> {
        Ok(())
    }

    fn take_back(
        &mut self,
        space: &Space,
        _: usize,
        room: impl FnOnce() -> Tracked<Blank>,
    ) -> Result<Option<Tracked<Blank>>> {
        let memory = room();
        space.resize(|_| 0);
        Ok(Some(memory))
    }
}

/// Requests to files.
pub(super) struct Requests {
    pub access: DiskAccess,
    ledger: Ledger,
    traffic: Rc<RefCell<Traffic>>,
    /// Bytes of the copies that direct access may need: each thread keeps a block that does not lie as it has to.
    copies: usize,
    unwritten: RefCell<Unwritten>,
}

/// Gradients on their way, as if no disk were fast enough to write one before it has to be waited for.
#[derive(Default)]
struct Unwritten {
    queue: VecDeque<(u64, Tracked<Blank>)>,
    bytes: usize,
    /// Gradients so far.
    count: u64,
}

impl Unwritten {
    fn remove(&mut self, index: usize) {
        self.bytes -= self.queue.remove(index).map_or(0, |(_, memory)| memory.bytes());
    }
}

impl Requests {
    /// `largest`: elements of the largest parameter.
    pub fn new(aio: &Aio, largest: usize, access: DiskAccess, ledger: Ledger, traffic: Rc<RefCell<Traffic>>) -> Self {
        let block = block_size(aio).min(largest * DType::F32.size_in_bytes()).next_multiple_of(ALIGN) + ALIGN - 1;
        Self { access, ledger, traffic, copies: threads(aio) * block, unwritten: RefCell::default() }
    }

    /// Copies may be there now.
    pub fn hold_copies(&self) {
        if self.access == DiskAccess::Direct {
            drop(self.ledger.hold(Kind::Staging, self.copies));
        }
    }
}

impl Files for Requests {
    type Extent = Space;
    /// Its bytes.
    type Staging = usize;
    type Transfer = usize;
    type Memory = Tracked<Blank>;
    type Writing = u64;

    fn dtype(space: &Space) -> DType {
        space.dtype
    }

    fn staging(bytes: usize) -> usize {
        bytes
    }

    fn len(staging: &usize) -> usize {
        *staging
    }

    fn read(&self, staging: usize, space: &Space, range: Range<usize>) -> usize {
        self.traffic.borrow_mut().read(range.len(), space.dtype);
        self.hold_copies();
        staging
    }

    fn clear(&self, staging: usize) -> usize {
        staging
    }

    fn write(&self, staging: usize, space: &Space, range: Range<usize>) -> usize {
        self.traffic.borrow_mut().write(range.len(), space.dtype);
        self.hold_copies();
        staging
    }

    fn wait(&self, transfer: usize) -> Result<usize> {
        Ok(transfer)
    }

    fn fetch(&self, memory: Tracked<Blank>, space: &Space, range: Range<usize>) -> Result<Tracked<Blank>> {
        self.traffic.borrow_mut().read(range.len(), space.dtype);
        Ok(memory)
    }

    fn store(&self, memory: Tracked<Blank>, space: &Space, range: Range<usize>) -> u64 {
        self.traffic.borrow_mut().write(range.len(), space.dtype);
        let mut unwritten = self.unwritten.borrow_mut();
        while !unwritten.queue.is_empty() && unwritten.bytes + memory.bytes() > UNWRITTEN {
            unwritten.remove(0);
        }
        unwritten.count += 1;
        unwritten.bytes += memory.bytes();
        let number = unwritten.count;
        unwritten.queue.push_back((number, memory));
        number
    }

    fn written(&self, number: u64) -> Result<()> {
        let mut unwritten = self.unwritten.borrow_mut();
        if let Ok(index) = unwritten.queue.binary_search_by_key(&number, |(number, _)| *number) {
            unwritten.remove(index);
        }
        Ok(())
    }
}
