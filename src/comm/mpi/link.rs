//! Messages between this process and those of other hosts, over MPI.
//!
//! Everything is sent and received without blocking and looked after in turns, so that a wait can end with an error when a
//! rank is gone: no call here waits for another process, but for [`MpiLink::gather`] at the start.

use super::library::MpiLibrary;
use crate::error::CommError;
use crate::util::lock;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a message is. Messages of one kind between two ranks arrive in the order in which they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageTag {
    /// Which collective a rank is in.
    Header = 1,
    /// Elements.
    Data = 2,
    /// A rank that gives up or leaves.
    Status = 3,
    /// A host that lives.
    Beat = 4,
    /// Elements, where MPI's own large messages are measured.
    Plain = 5,
}

impl MessageTag {
    /// The most bytes that go as one message of MPI's. Libraries send up to 64 KiB at once; a longer message they announce, and
    /// send when the other side, which may be busy, has asked for it.
    fn packet_bytes(self) -> usize {
        match self {
            Self::Plain => c_int::MAX as usize,
            Self::Header | Self::Data | Self::Status | Self::Beat => 60 << 10,
        }
    }
}

/// How long the other ranks may take to end after one has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How much later than the rank before it a rank ends them all, up to so many: Open MPI's mpirun may hang where several do so
/// at once, and where one does, the next is ended before its turn.
const TURN: Duration = Duration::from_millis(500);
const TURNS: usize = 8;

/// This process among those that MPI joins.
pub(super) struct MpiLink {
    library: MpiLibrary,
    rank: usize,
    size: usize,
    /// Held during each call: the library is promised one thread at a time.
    calling: Mutex<()>,
    /// Whether any rank has failed, this one included: MPI is then not ended in good order.
    failed: AtomicBool,
}

impl MpiLink {
    /// Finds and begins MPI. Once per process.
    ///
    /// # Errors
    /// Those of [`MpiLibrary::find`] and [`MpiLibrary::init`].
    pub(super) fn start() -> Result<Self, CommError> {
        let library = MpiLibrary::find()?;
        let (rank, size) = library.init()?;
        Ok(Self { library, rank, size, calling: Mutex::new(()), failed: AtomicBool::new(false) })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn library(&self) -> String {
        self.library.name()
    }

    /// Everybody's bytes, of which each gives the same number, in rank order. Blocks: for the start, when nobody waits for
    /// anything else.
    pub(super) fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut all = vec![0u8; own.len() * self.size];
        let (count, byte, world) = (own.len() as c_int, self.library.byte, self.library.world);
        let _calling = lock(&self.calling);
        // SAFETY: `own` has `count` bytes, `all` as many for each rank; handles of this library.
        let code = unsafe {
            (self.library.allgather)(own.as_ptr().cast(), count, byte, all.as_mut_ptr().cast(), count, byte, world)
        };
        self.library.check("MPI_Allgather", code)?;
        Ok(all.chunks_exact(own.len().max(1)).map(<[u8]>::to_vec).collect())
    }

    /// Begins to send.
    pub(super) fn send(self: &Arc<Self>, to: usize, tag: MessageTag, bytes: Vec<u8>) -> Result<MpiTransfer, CommError> {
        self.begin(to, tag, bytes, true)
    }

    /// Begins to receive `len` bytes.
    pub(super) fn receive(
        self: &Arc<Self>,
        from: usize,
        tag: MessageTag,
        len: usize,
    ) -> Result<MpiTransfer, CommError> {
        self.begin(from, tag, vec![0; len], false)
    }

    fn begin(
        self: &Arc<Self>,
        peer: usize,
        tag: MessageTag,
        bytes: Vec<u8>,
        sends: bool,
    ) -> Result<MpiTransfer, CommError> {
        let memory = Box::into_raw(bytes.into_boxed_slice());
        let mut transfer = MpiTransfer { link: self.clone(), requests: VecDeque::new(), memory };
        let (byte, world) = (self.library.byte, self.library.world);
        let peer = c_int::try_from(peer).expect("a rank of MPI");
        let (call, name) = if sends { (&self.library.isend, "MPI_Isend") } else { (&self.library.irecv, "MPI_Irecv") };
        let _calling = lock(&self.calling);
        // Both sides cut a message alike; one of no bytes is a packet too.
        let len = memory.len();
        for start in (0..len.max(1)).step_by(tag.packet_bytes()) {
            let count = (len - start).min(tag.packet_bytes()) as c_int;
            let mut request = 0u64;
            // SAFETY: `memory` holds `count` bytes from `start` on, and nobody else touches them until the request is done, as
            // `MpiTransfer` gives them back only then and never frees them before.
            let code = unsafe {
                let packet = memory.cast::<u8>().add(start);
                call(packet.cast(), count, byte, peer, tag as c_int, world, &mut request)
            };
            self.library.check(name, code)?;
            transfer.requests.push_back(request);
        }
        Ok(transfer)
    }

    /// A rank has failed.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether a rank has.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// The end of the process: MPI is ended in good order, which waits for the others to come here too, or, if a rank has
    /// failed, for all of them at once.
    pub(super) fn end(&self) {
        let failed = self.has_failed();
        if failed {
            // The others have been told, and end by themselves with their own words.
            std::thread::sleep(LAST_WORDS + TURN * self.rank.min(TURNS) as u32);
        }
        // A thread that is in a call now is not waited for for ever: it may be the one that ends the process.
        let _calling = self.calling.try_lock();
        // SAFETY: nothing of MPI's is called after this.
        unsafe { if failed { (self.library.abort)(self.library.world, 1) } else { (self.library.finalize)() } };
    }
}

/// A message on its way.
pub(super) struct MpiTransfer {
    link: Arc<MpiLink>,
    /// Those of its packets that are not done, in order.
    requests: VecDeque<u64>,
    /// Made from a box. Where a transfer is dropped on its way, which only happens after a failure, it is left to MPI for good.
    memory: *mut [u8],
}

// SAFETY: the memory is this value's, and MPI's calls are made under the link's lock.
unsafe impl Send for MpiTransfer {}

impl MpiTransfer {
    /// Whether it has been done. To ask also moves all others on.
    pub(super) fn is_done(&mut self) -> Result<bool, CommError> {
        while let Some(request) = self.requests.front_mut() {
            let mut flag = 0;
            let library = &self.link.library;
            let _calling = lock(&self.link.calling);
            // SAFETY: a request of this library that is not done.
            let code = unsafe { (library.test)(request, &mut flag, library.status_ignore) };
            library.check("MPI_Test", code)?;
            if flag == 0 {
                return Ok(false);
            }
            self.requests.pop_front();
        }
        Ok(true)
    }

    /// What was received, or sent.
    ///
    /// # Panics
    /// If it is not done.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        assert!(self.requests.is_empty(), "a message is taken when it is there");
        // SAFETY: made from a box, and MPI is done with it.
        unsafe { Box::from_raw(self.memory) }.into_vec()
    }
}
