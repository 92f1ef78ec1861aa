//! Messages between this process and those of other hosts, over MPI.
//!
//! All messages are sent and received without blocking, and progress is made by polling, so that a wait can end with an
//! error when a rank is gone. No call in this module waits for another process, except [`MpiLink::start`] and
//! [`MpiLink::gather`] at the start, and [`MpiLink::end`] at the end.

use super::library::MpiLibrary;
use crate::error::CommError;
use crate::util::lock;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The kind of a message. Messages of one kind between two ranks arrive in the order in which they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageTag {
    /// The collective that a rank is running.
    Header = 1,
    /// Elements.
    Data = 2,
    /// A notice that a rank gives up or leaves.
    Status = 3,
    /// A heartbeat of a host.
    Beat = 4,
    /// Elements in MPI's own large messages, for measurements.
    Plain = 5,
    /// The description of a message from one rank to another.
    MessageHeader = 6,
    /// Elements of such a message.
    MessageData = 7,
}

/// The number of kinds that a channel has room for.
const MAX_TAGS: usize = 8;

impl MessageTag {
    /// Returns the maximum number of bytes sent as one MPI message. Libraries send up to 64 KiB immediately; they
    /// announce a longer message, and send it when the other side, which may be busy, has asked for it.
    fn packet_bytes(self) -> usize {
        match self {
            Self::Plain => c_int::MAX as usize,
            Self::Header | Self::Data | Self::Status | Self::Beat | Self::MessageHeader | Self::MessageData => 60 << 10,
        }
    }
}

/// The time that the other ranks may take to end after one has failed.
const PEER_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// The additional delay per rank, for up to [`MAX_DELAYED_RANKS`] ranks, before a rank aborts a failed job: Open MPI's
/// mpirun may hang if several ranks abort at the same time; once one rank aborts, the next rank is ended before its
/// turn.
const ABORT_DELAY_PER_RANK: Duration = Duration::from_millis(500);
const MAX_DELAYED_RANKS: usize = 8;

/// This process among those that MPI connects.
pub(super) struct MpiLink {
    library: MpiLibrary,
    rank: usize,
    size: usize,
    /// The lock held during each call: the library is used by one thread at a time.
    calling: Mutex<()>,
    /// Whether any rank has failed, this one included. MPI is then not finalized normally.
    failed: AtomicBool,
}

impl MpiLink {
    /// Finds and initializes MPI. This function is called once per process.
    ///
    /// # Errors
    /// Returns the errors of [`MpiLibrary::find`] and [`MpiLibrary::init`].
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

    /// Returns the bytes of all ranks, in rank order. All ranks pass the same number of bytes. This call blocks, so use
    /// it only at the start, when no rank waits for anything else.
    pub(super) fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut all = vec![0u8; own.len() * self.size];
        let (count, byte, world) = (own.len() as c_int, self.library.byte, self.library.world);
        let _calling = lock(&self.calling);
        // SAFETY: `own` has `count` bytes, `all` as many for each rank; the handles are this library's.
        let code = unsafe {
            (self.library.allgather)(own.as_ptr().cast(), count, byte, all.as_mut_ptr().cast(), count, byte, world)
        };
        self.library.check("MPI_Allgather", code)?;
        Ok(all.chunks_exact(own.len().max(1)).map(<[u8]>::to_vec).collect())
    }

    /// Begins to send a message.
    pub(super) fn send(self: &Arc<Self>, to: usize, tag: MessageTag, bytes: Vec<u8>) -> Result<MpiTransfer, CommError> {
        self.send_on(0, to, tag, bytes)
    }

    /// Begins to send a message in a channel. Messages of different channels are kept apart.
    pub(super) fn send_on(
        self: &Arc<Self>,
        channel: usize,
        to: usize,
        tag: MessageTag,
        bytes: Vec<u8>,
    ) -> Result<MpiTransfer, CommError> {
        self.begin((to, channel, tag), bytes, true)
    }

    /// Begins to receive `len` bytes.
    pub(super) fn receive(
        self: &Arc<Self>,
        from: usize,
        tag: MessageTag,
        len: usize,
    ) -> Result<MpiTransfer, CommError> {
        self.receive_on(0, from, tag, len)
    }

    /// Begins to receive `len` bytes in a channel.
    pub(super) fn receive_on(
        self: &Arc<Self>,
        channel: usize,
        from: usize,
        tag: MessageTag,
        len: usize,
    ) -> Result<MpiTransfer, CommError> {
        self.begin((from, channel, tag), vec![0; len], false)
    }

    fn begin(
        self: &Arc<Self>,
        (peer, channel, tag): (usize, usize, MessageTag),
        bytes: Vec<u8>,
        sends: bool,
    ) -> Result<MpiTransfer, CommError> {
        let memory = Box::into_raw(bytes.into_boxed_slice());
        let mut transfer = MpiTransfer { link: self.clone(), requests: VecDeque::new(), memory };
        let (byte, world) = (self.library.byte, self.library.world);
        let peer = c_int::try_from(peer).expect("an MPI rank fits in a C int");
        let number = (channel * MAX_TAGS + tag as usize) as c_int;
        let (call, name) = if sends { (&self.library.isend, "MPI_Isend") } else { (&self.library.irecv, "MPI_Irecv") };
        let _calling = lock(&self.calling);
        // Both sides split a message in the same way; an empty message is a packet too.
        let len = memory.len();
        for start in (0..len.max(1)).step_by(tag.packet_bytes()) {
            let count = (len - start).min(tag.packet_bytes()) as c_int;
            let mut request = 0u64;
            // SAFETY: `memory` holds `count` bytes from `start` on, and nothing else accesses them until the request is
            // done, because `MpiTransfer` returns them only then and never frees them before.
            let code = unsafe {
                let packet = memory.cast::<u8>().add(start);
                call(packet.cast(), count, byte, peer, number, world, &mut request)
            };
            self.library.check(name, code)?;
            transfer.requests.push_back(request);
        }
        Ok(transfer)
    }

    /// Records that a rank has failed.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether a rank has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Ends MPI at the end of the process: finalizes it, which waits for the other ranks to reach this point too, or,
    /// if a rank has failed, aborts all of them.
    pub(super) fn end(&self) {
        let failed = self.has_failed();
        if failed {
            // The others have been notified, and end on their own with their own error messages.
            std::thread::sleep(PEER_EXIT_TIMEOUT + ABORT_DELAY_PER_RANK * self.rank.min(MAX_DELAYED_RANKS) as u32);
        }
        // Do not wait indefinitely for a thread that is in a call: it may be the one that ends the process.
        let _calling = self.calling.try_lock();
        // SAFETY: no MPI function is called after this.
        unsafe { if failed { (self.library.abort)(self.library.world, 1) } else { (self.library.finalize)() } };
    }
}

/// A message in flight.
pub(super) struct MpiTransfer {
    link: Arc<MpiLink>,
    /// The requests of its unfinished packets, in order.
    requests: VecDeque<u64>,
    /// The message's memory, taken from a box. If a transfer is dropped in flight, which only happens after a failure,
    /// its memory is left to MPI permanently.
    memory: *mut [u8],
}

// SAFETY: this value owns the memory, and MPI is called under the link's lock.
unsafe impl Send for MpiTransfer {}

impl MpiTransfer {
    /// Returns whether the transfer is done. The call also makes progress on all other transfers.
    pub(super) fn is_done(&mut self) -> Result<bool, CommError> {
        while let Some(request) = self.requests.front_mut() {
            let mut flag = 0;
            let library = &self.link.library;
            let _calling = lock(&self.link.calling);
            // SAFETY: the request is this library's and not done.
            let code = unsafe { (library.test)(request, &mut flag, library.status_ignore) };
            library.check("MPI_Test", code)?;
            if flag == 0 {
                return Ok(false);
            }
            self.requests.pop_front();
        }
        Ok(true)
    }

    /// Returns the bytes that were received or sent.
    ///
    /// # Panics
    /// Panics if the transfer is not complete.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        assert!(self.requests.is_empty(), "the bytes of a message are taken only when its transfer is complete");
        // SAFETY: the memory comes from a box, and MPI is done with it.
        unsafe { Box::from_raw(self.memory) }.into_vec()
    }
}
