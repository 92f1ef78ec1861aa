//! The memory that the ranks of one machine share.
//!
//! ```text
//!   page 0            magic, version, world size, first failure, whether all ranks are started, failure elsewhere
//!   2 pages per rank  control block: state, heartbeat, failure texts; published count and headers of each channel
//!   per seat          two slots of SLOT_BYTES: the data of an even and of an odd piece
//!   per pair, channel a mailbox: see `super::mailbox`
//! ```
//!
//! A channel is a set of slots for the collectives of one division of the ranks into groups; channel 0 is for those of
//! all ranks. A rank has a seat in every channel. Memory that is never touched takes no space.
//!
//! `zerorun` creates the region as a memfd and the ranks inherit it, or the first rank of the machine creates it and
//! hands it to the others. It has no name, needs no /dev/shm, and disappears with the last process. Ranks that are
//! threads use the same layout.
//!
//! A rank's block is written only by that rank, with four exceptions: threads that wait for the rank count themselves
//! in `sleepers`; without a launcher, ranks that notice its death claim the right to record the cause; the launcher, or
//! the rank whose claim was first, writes `cause` and changes a living state to DEAD; and the launcher records that a
//! process has ended without an error. This file defines where each word is; `super::piece_slots` and
//! `super::rank_state` define the order in which words are written and read.

use crate::error::{CommError, Error, Result};
use crate::util::counted;
use memmap2::{MmapOptions, MmapRaw};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
// Loom has its own versions of these: see `super::piece_slots`.
pub(in crate::comm) use std::hint::spin_loop;
pub(in crate::comm) use std::sync::atomic::{AtomicU32 as Word32, AtomicU64 as Word64};
pub(in crate::comm) use std::thread::yield_now;

const MAGIC: u64 = 0x6361_6e64_6c65_7a30; // "candlez0"
const VERSION: u64 = 6;
const PAGE: usize = 4096;
/// The maximum number of bytes of one rank's data in one piece, small enough to stay in cache. Each seat has two slots
/// of this size.
pub(in crate::comm) const SLOT_BYTES: usize = 1 << 17;
/// The number of bytes of a mailbox.
pub(in crate::comm) const MAILBOX_BYTES: usize = PAGE + (1 << 18);
/// The number of channels: one for all ranks, and the others for groups.
pub(in crate::comm) const CHANNELS: usize = 16;
/// The maximum time in milliseconds that a rank sleeps before it checks again whether all ranks have been started.
const ENTRY_NAP_MILLIS: u32 = 900;
/// The maximum number of bytes of a rank's reason for giving up, and of the cause of its death.
pub(in crate::comm) const TEXT_BYTES: usize = 1024;

// Offsets inside page 0.
const FIRST_FAILURE: usize = 24;
const ALL_STARTED: usize = 32;
const REMOTE_DEATH: usize = 40;
const REMOTE_DEATH_LEN: usize = 48;
const REMOTE_DEATH_TEXT: usize = 2048;

// Offsets inside a control block.
const STATE: usize = 64;
const TEXT_LEN: usize = 68;
const CAUSE_LEN: usize = 72;
const CAUSE_CLAIMED: usize = 76;
const HEARTBEAT: usize = 128;
const TEXT: usize = 1024;
const CAUSE: usize = 2048;
const SEATS: usize = PAGE;
const BLOCK: usize = 2 * PAGE;

// Offsets inside a seat, of which a control block has one per channel. The futex word, `PUBLISHED`, shares its cache
// line only with `SLEEPERS`.
const PUBLISHED: usize = 0;
const SLEEPERS: usize = 4;
const HEADERS: usize = 64; // two, of 64 bytes
const SEAT: usize = 256;
const _: () = assert!(CHANNELS * SEAT <= PAGE);

/// The kind of a failure text in a rank's control block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum FailureTextKind {
    /// The rank's reason for giving up.
    AbortReason,
    /// The cause of the rank's death, as the launcher or another rank saw it.
    Cause,
}

/// The memory that the ranks of one host share: a control block and data slots for each rank, and mailboxes for each
/// pair of ranks.
pub struct SharedMemoryRegion {
    map: MmapRaw,
    fd: OwnedFd,
    world_size: usize,
    /// Whether the ranks are processes rather than threads of this process.
    between_processes: bool,
}

impl SharedMemoryRegion {
    /// Creates a region that child processes inherit (the memfd is not closed on exec). Called by the launcher, or by a
    /// rank.
    pub fn create(world_size: usize) -> Result<Self> {
        Self::make(world_size, rustix::fs::MemfdFlags::empty())
    }

    fn make(world_size: usize, flags: rustix::fs::MemfdFlags) -> Result<Self> {
        let system =
            |source| CommError::Region { action: "create the memory that ranks share", source: Arc::new(source) };
        let fd = rustix::fs::memfd_create("candle-zero", flags).map_err(|e| system(std::io::Error::from(e)))?;
        rustix::fs::ftruncate(&fd, Self::file_bytes(world_size)).map_err(|e| system(std::io::Error::from(e)))?;
        let map = MmapOptions::new().len(Self::bytes(world_size)).map_raw(&fd).map_err(system)?;
        let region = Self { map, fd, world_size, between_processes: true };
        region.write_header();
        Ok(region)
    }

    /// Opens the region that the launcher passed on as file descriptor `fd`, and takes ownership of it. May be called
    /// only once per process.
    pub(in crate::comm) fn inherit(fd: RawFd, world_size: usize) -> Result<Self> {
        let foreign = |found: String| Error::from(CommError::ForeignRegion { fd, found });
        // SAFETY: fstat only inspects the number; a closed descriptor gives an error.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let stat = rustix::fs::fstat(borrowed).map_err(|e| foreign(format!("a closed descriptor ({e})")))?;
        let bytes = Self::file_bytes(world_size);
        if stat.st_size as u64 != bytes {
            let (found, ranks) = (counted(stat.st_size, "byte"), counted(world_size, "rank"));
            return Err(foreign(format!("{found} instead of the {bytes} bytes of {ranks}")));
        }
        // SAFETY: the launcher passed the descriptor to this process for this purpose, and `comm::from_env`, the only
        // caller, does not get here again once it has succeeded. Nothing else in this process owns it.
        Self::open(unsafe { OwnedFd::from_raw_fd(fd) }, world_size)
    }

    /// Opens the region behind a descriptor, which was created for the same number of ranks.
    pub(in crate::comm) fn open(fd: OwnedFd, world_size: usize) -> Result<Self> {
        let (number, bytes) = (fd.as_raw_fd(), Self::bytes(world_size));
        // Ranks that start their own child processes must not keep the region alive through them.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|e| CommError::Region {
            action: "open the memory that ranks share",
            source: Arc::new(e.into()),
        })?;
        let map = MmapOptions::new().len(bytes).map_raw(&fd).map_err(|source| CommError::Region {
            action: "map the memory that ranks share",
            source: Arc::new(source),
        })?;
        let region = Self { map, fd, world_size, between_processes: true };
        let header = [region.word(0), region.word(8), region.word(16)].map(|w| w.load(Ordering::Acquire));
        if header != [MAGIC, VERSION, world_size as u64] {
            return Err(CommError::ForeignRegion { fd: number, found: format!("a header {header:x?}") }.into());
        }
        Ok(region)
    }

    /// Creates a region that only this process can access, for ranks that are threads.
    pub fn anonymous(world_size: usize) -> Result<Self> {
        let region = Self { between_processes: false, ..Self::make(world_size, rustix::fs::MemfdFlags::CLOEXEC)? };
        region.mark_all_started();
        Ok(region)
    }

    fn write_header(&self) {
        self.word(0).store(MAGIC, Ordering::Relaxed);
        self.word(8).store(VERSION, Ordering::Relaxed);
        self.word(16).store(self.world_size as u64, Ordering::Release);
    }

    /// Returns the number of ranks for which the region was created.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the descriptor to hand to child processes.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns whether ranks are processes rather than threads of one process.
    pub(in crate::comm) fn is_shared_between_processes(&self) -> bool {
        self.between_processes
    }

    /// Returns the index of the seat of `rank` in a channel.
    pub(in crate::comm) fn seat(&self, channel: usize, rank: usize) -> usize {
        assert!(channel < CHANNELS && rank < self.world_size, "rank {rank} in channel {channel}");
        channel * self.world_size + rank
    }

    /// Maps the memory for the messages from one rank to another in a channel. Both ranks do so separately, when they
    /// first need it.
    ///
    /// # Errors
    /// Fails if the system cannot map it.
    pub(in crate::comm) fn map_mailbox(
        &self,
        channel: usize,
        from: usize,
        to: usize,
    ) -> std::result::Result<MmapRaw, CommError> {
        assert!(to < self.world_size, "from rank {from} to rank {to}");
        let pair = self.seat(channel, from) * self.world_size + to;
        let at = Self::bytes(self.world_size) + pair * MAILBOX_BYTES;
        let map = MmapOptions::new().offset(at as u64).len(MAILBOX_BYTES).map_raw(&self.fd);
        map.map_err(|source| CommError::Region { action: "map the memory that ranks share", source: Arc::new(source) })
    }

    /// Joins as `rank`, and waits until all ranks have been started.
    pub(in crate::comm) fn enter(&self, rank: usize) -> Result<()> {
        self.start(rank).map_err(|state| CommError::RankTaken { rank, state: state.describe() })?;
        let all_started = self.word32(ALL_STARTED);
        while all_started.load(Ordering::Acquire) == 0 {
            sleep_on(all_started, 0, ENTRY_NAP_MILLIS);
        }
        Ok(())
    }

    /// Records that all ranks have been started. Called by the launcher or the rank that created the region. The ranks
    /// that have started sleep until then: if many ranks share few cores, the first would otherwise delay the start of
    /// the last.
    pub fn mark_all_started(&self) {
        let all_started = self.word32(ALL_STARTED);
        all_started.store(1, Ordering::Release);
        wake(all_started);
    }

    /// Returns the number of pieces published in a seat, modulo 2^32: the word on which waiting ranks sleep.
    pub(in crate::comm) fn published(&self, seat: usize) -> &AtomicU32 {
        self.word32(self.seat_offset(seat) + PUBLISHED)
    }

    /// Returns the number of threads that sleep on [`published`](Self::published) of a seat. A thread that is killed
    /// while asleep stays counted, which only causes unnecessary wakes.
    pub(in crate::comm) fn sleepers(&self, seat: usize) -> &AtomicU32 {
        self.word32(self.seat_offset(seat) + SLEEPERS)
    }

    /// Returns the state of `rank`, as a number.
    pub(in crate::comm) fn state_word(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.block(rank) + STATE)
    }

    /// Records that `rank` of another host is gone, and why; only the first call has an effect. Called by the launcher
    /// or, if there is none that watches other hosts, by this host's first rank. The text is written before the word
    /// that publishes it.
    pub fn mark_remote_death(&self, rank: usize, why: &str) {
        let mut end = why.len().min(TEXT_BYTES);
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        if self.word(REMOTE_DEATH).load(Ordering::Acquire) != 0 {
            return;
        }
        // SAFETY: the area is inside page 0 and TEXT_BYTES long; one process of the host writes it once, before the
        // word that publishes it is stored with Release.
        unsafe { std::ptr::copy_nonoverlapping(why.as_ptr(), self.map.as_mut_ptr().add(REMOTE_DEATH_TEXT), end) };
        self.word(REMOTE_DEATH_LEN).store(end as u64, Ordering::Relaxed);
        self.word(REMOTE_DEATH).store(rank as u64 + 1, Ordering::Release);
    }

    /// Returns the rank of another host that is recorded as gone, and why.
    pub(in crate::comm) fn remote_death(&self) -> Option<(usize, String)> {
        let rank = self.word(REMOTE_DEATH).load(Ordering::Acquire).checked_sub(1)? as usize;
        let mut text = vec![0; (self.word(REMOTE_DEATH_LEN).load(Ordering::Relaxed) as usize).min(TEXT_BYTES)];
        // SAFETY: inside the area, which was written before the word that was seen above.
        unsafe {
            let from = self.map.as_mut_ptr().add(REMOTE_DEATH_TEXT);
            std::ptr::copy_nonoverlapping(from, text.as_mut_ptr(), text.len());
        }
        Some((rank, String::from_utf8_lossy(&text).into_owned()))
    }

    /// Claims the right to record the cause of death of `rank`, and returns whether this call is the first to do so:
    /// without a launcher, several ranks may notice the death.
    pub(in crate::comm) fn claims_cause(&self, rank: usize) -> bool {
        self.word32(self.block(rank) + CAUSE_CLAIMED).swap(1, Ordering::AcqRel) == 0
    }

    /// Returns the first failure of the job, as a number; 0 while there is none.
    pub(in crate::comm) fn first_failure_word(&self) -> &AtomicU64 {
        self.word(FIRST_FAILURE)
    }

    /// Returns the heartbeat of `rank`. It counts up while the rank's process lives, and stays 0 for ranks that are
    /// threads.
    pub(in crate::comm) fn heartbeat(&self, rank: usize) -> &AtomicU64 {
        self.word(self.block(rank) + HEARTBEAT)
    }

    /// Returns a word of the header of a seat's even (0) or odd (1) piece.
    pub(in crate::comm) fn header_word(&self, seat: usize, parity: usize, word: usize) -> &AtomicU64 {
        assert!(parity < 2 && word < 8);
        self.word(self.seat_offset(seat) + HEADERS + parity * 64 + word * 8)
    }

    /// Returns the start of the even (0) or odd (1) slot of a seat, for reading. It is SLOT_BYTES long and aligned to a
    /// page.
    pub(in crate::comm) fn slot(&self, seat: usize, parity: usize) -> *const u8 {
        self.slot_mut(seat, parity)
    }

    /// Returns the start of a slot, for writing.
    pub(in crate::comm) fn slot_mut(&self, seat: usize, parity: usize) -> *mut u8 {
        assert!(seat < CHANNELS * self.world_size && parity < 2);
        let offset = PAGE + BLOCK * self.world_size + (seat * 2 + parity) * SLOT_BYTES;
        // SAFETY: the offset is inside the mapping, which `bytes` sized for all seats.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Returns the start of a failure text of `rank`, which has room for TEXT_BYTES, for reading.
    pub(in crate::comm) fn text(&self, rank: usize, kind: FailureTextKind) -> *const u8 {
        self.text_mut(rank, kind)
    }

    /// Returns the start of a failure text of `rank`, for writing.
    pub(in crate::comm) fn text_mut(&self, rank: usize, kind: FailureTextKind) -> *mut u8 {
        let at = match kind {
            FailureTextKind::AbortReason => TEXT,
            FailureTextKind::Cause => CAUSE,
        };
        // SAFETY: the offset is inside the rank's block.
        unsafe { self.map.as_mut_ptr().add(self.block(rank) + at) }
    }

    /// Returns the number of bytes of a failure text of `rank`.
    pub(in crate::comm) fn text_len(&self, rank: usize, kind: FailureTextKind) -> &AtomicU32 {
        let at = match kind {
            FailureTextKind::AbortReason => TEXT_LEN,
            FailureTextKind::Cause => CAUSE_LEN,
        };
        self.word32(self.block(rank) + at)
    }

    /// Returns the number of bytes without mailboxes, which are mapped one by one.
    fn bytes(world_size: usize) -> usize {
        PAGE + BLOCK * world_size + CHANNELS * world_size * 2 * SLOT_BYTES
    }

    /// Returns the number of bytes with the mailboxes of all pairs of ranks.
    fn file_bytes(world_size: usize) -> u64 {
        (Self::bytes(world_size) + CHANNELS * world_size * world_size * MAILBOX_BYTES) as u64
    }

    fn block(&self, rank: usize) -> usize {
        assert!(rank < self.world_size, "rank {rank} of {}", self.world_size);
        PAGE + BLOCK * rank
    }

    fn seat_offset(&self, seat: usize) -> usize {
        let (channel, rank) = (seat / self.world_size, seat % self.world_size);
        assert!(channel < CHANNELS, "seat {seat} of {}", counted(self.world_size, "rank"));
        self.block(rank) + SEATS + channel * SEAT
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.map.len());
        // SAFETY: inside the mapping, aligned, lives as long as self, and only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.map.len());
        // SAFETY: as in `word`; the 32-bit words do not overlap the 64-bit ones.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }
}

/// Wakes every thread, of any process, that sleeps on `word`.
pub(in crate::comm) fn wake(word: &AtomicU32) {
    // An error can only mean that there is no thread to wake.
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
}

/// Sleeps until `word` is no longer `seen`, or about `millis` milliseconds have passed.
pub(in crate::comm) fn sleep_on(word: &AtomicU32, seen: u32, millis: u32) {
    let limit = rustix::thread::futex::Timespec { tv_sec: 0, tv_nsec: i64::from(millis) * 1_000_000 };
    // Woken, already changed, interrupted or timed out: the caller checks again in every case.
    let _ = rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), seen, Some(&limit));
}
