//! The memory that the ranks of one machine share.
//!
//! ```text
//!   page 0            magic, version, world size, first failure, whether all ranks are started, failure elsewhere
//!   page 1 + r        control block of rank r: published pieces, state, heartbeat, headers, failure texts
//!   then, per rank    two slots of SLOT_BYTES: the data of an even and of an odd piece
//! ```
//!
//! `zerorun` creates the region as a memfd and the ranks inherit it, or rank 0 creates it and hands it to the others.
//! It has no name, needs no /dev/shm, and disappears with the last process. Ranks as threads share the same layout in
//! anonymous memory.
//!
//! A rank's block is written only by that rank, with one exception: `cause` and the transition from a living state to
//! DEAD are written by the launcher or, if there is none, by the one rank that has claimed them. This file defines
//! where each word lies; `super::pieces` and `super::rank_state` define the order in which words are written and
//! read.

use crate::error::{CommError, Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
// Loom has its own versions of these: see `super::pieces`.
pub(in crate::comm) use std::hint::spin_loop;
pub(in crate::comm) use std::thread::yield_now;

const MAGIC: u64 = 0x6361_6e64_6c65_7a30; // "candlez0"
const VERSION: u64 = 5;
const PAGE: usize = 4096;
/// The number of bytes of one rank's data in one piece; each rank has two such slots. Small enough to stay in cache.
pub(in crate::comm) const SLOT_BYTES: usize = 1 << 17;
/// How long a rank sleeps before it checks on its own whether all ranks have been started.
const ENTRY_NAP_MILLIS: u32 = 900;
/// The maximum number of bytes of a rank's reason for giving up, and of the cause of its death.
pub(in crate::comm) const TEXT_BYTES: usize = 1024;

// Offsets inside page 0.
const FIRST_FAILURE: usize = 24;
const ALL_STARTED: usize = 32;
const REMOTE_DEATH: usize = 40;
const REMOTE_DEATH_LEN: usize = 48;
const REMOTE_DEATH_TEXT: usize = 2048;

// Offsets inside a control block. The futex word has its own cache line.
const PUBLISHED: usize = 0;
const SLEEPERS: usize = 4;
const STATE: usize = 64;
const TEXT_LEN: usize = 68;
const CAUSE_LEN: usize = 72;
const CAUSE_CLAIMED: usize = 76;
const HEARTBEAT: usize = 128;
const HEADERS: usize = 192; // two of 64 bytes each
const TEXT: usize = 1024;
const CAUSE: usize = 2048;

/// A failure text in a rank's control block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum FailureText {
    /// The rank's reason for giving up.
    LastWords,
    /// The cause of the rank's death, as the launcher saw it.
    Cause,
}

/// The shared memory of one job: a control block and two data slots per rank.
pub struct SharedMemoryRegion {
    map: MmapRaw,
    fd: Option<OwnedFd>,
    world_size: usize,
}

impl SharedMemoryRegion {
    /// Creates a region that child processes inherit (the memfd is not closed on exec). Called by the launcher, or by a
    /// rank.
    pub fn create(world_size: usize) -> Result<Self> {
        let system = |source| CommError::Region { action: "create", source: Arc::new(source) };
        let fd = rustix::fs::memfd_create("candle-zero", rustix::fs::MemfdFlags::empty())
            .map_err(|e| system(std::io::Error::from(e)))?;
        let bytes = Self::bytes(world_size);
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| system(std::io::Error::from(e)))?;
        let map = MmapOptions::new().len(bytes).map_raw(&fd).map_err(system)?;
        let region = Self { map, fd: Some(fd), world_size };
        region.write_header();
        Ok(region)
    }

    /// Opens the region that the launcher passed on as file descriptor `fd`, and takes ownership of it. May be called
    /// only once per process.
    pub(in crate::comm) fn inherit(fd: RawFd, world_size: usize) -> Result<Self> {
        let foreign = |found: String| Error::from(CommError::ForeignRegion { fd, found });
        // SAFETY: fcntl only inspects the number; a closed descriptor gives an error.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let stat = rustix::fs::fstat(borrowed).map_err(|e| foreign(format!("a closed descriptor ({e})")))?;
        let bytes = Self::bytes(world_size);
        if stat.st_size as u64 != bytes as u64 {
            return Err(foreign(format!("{} bytes instead of the {bytes} bytes of {world_size} ranks", stat.st_size)));
        }
        // SAFETY: the launcher passed the descriptor to this process for this purpose, and `comm::from_env`, the only
        // caller, does not get here again once it has succeeded. So nothing else in this process owns it.
        Self::open(unsafe { OwnedFd::from_raw_fd(fd) }, world_size)
    }

    /// Opens the region behind a descriptor, which was created for the same number of ranks.
    pub(in crate::comm) fn open(fd: OwnedFd, world_size: usize) -> Result<Self> {
        let (number, bytes) = (fd.as_raw_fd(), Self::bytes(world_size));
        // Ranks that start their own child processes must not keep the region alive through them.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|e| CommError::Region { action: "open", source: Arc::new(e.into()) })?;
        let map = MmapOptions::new()
            .len(bytes)
            .map_raw(&fd)
            .map_err(|source| CommError::Region { action: "map", source: Arc::new(source) })?;
        let region = Self { map, fd: Some(fd), world_size };
        let header = [region.word(0), region.word(8), region.word(16)].map(|w| w.load(Ordering::Acquire));
        if header != [MAGIC, VERSION, world_size as u64] {
            return Err(CommError::ForeignRegion { fd: number, found: format!("a header {header:x?}") }.into());
        }
        Ok(region)
    }

    /// Creates a region that only this process can access, for ranks as threads.
    pub fn anonymous(world_size: usize) -> Result<Self> {
        let map = MmapOptions::new()
            .len(Self::bytes(world_size))
            .map_anon()
            .map_err(|source| CommError::Region { action: "map", source: Arc::new(source) })?;
        let region = Self { map: map.into(), fd: None, world_size };
        region.write_header();
        region.let_in();
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
    ///
    /// # Panics
    /// The region was made by [`SharedMemoryRegion::anonymous`] and has no descriptor.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("an anonymous region has no descriptor").as_fd()
    }

    /// Returns whether ranks are processes (a memfd) rather than threads (anonymous memory).
    pub(in crate::comm) fn is_shared_between_processes(&self) -> bool {
        self.fd.is_some()
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

    /// Called by the launcher: records that all ranks have been started. The ranks that have started sleep until then:
    /// if many ranks share few cores, the first would otherwise delay the start of the last.
    pub fn let_in(&self) {
        let all_started = self.word32(ALL_STARTED);
        all_started.store(1, Ordering::Release);
        wake(all_started);
    }

    /// Returns the number of pieces that `rank` has published, modulo 2^32. Waiting ranks sleep on this word.
    pub(in crate::comm) fn published(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.block(rank) + PUBLISHED)
    }

    /// Returns the number of threads that sleep on [`published`](Self::published) of `rank`. A thread that is killed
    /// while it sleeps stays counted, which only causes unnecessary wakes.
    pub(in crate::comm) fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.block(rank) + SLEEPERS)
    }

    /// Returns the state of `rank`, as a number.
    pub(in crate::comm) fn state_word(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.block(rank) + STATE)
    }

    /// Records, once, that `rank` of another host is gone, and why. Called by the launcher or, if there is none that
    /// watches other hosts, by this host's first rank. The text is written before the word.
    pub fn mark_remote_death(&self, rank: usize, why: &str) {
        let mut end = why.len().min(TEXT_BYTES);
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        if self.word(REMOTE_DEATH).load(Ordering::Acquire) != 0 {
            return;
        }
        // SAFETY: the area is inside page 0 and TEXT_BYTES long; one process of the host writes it, once: before the
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

    /// Returns whether this call is the first to claim the cause of death of `rank`: without a launcher, several ranks
    /// may notice the death.
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

    /// Returns a word of the header of `rank`'s even (0) or odd (1) piece.
    pub(in crate::comm) fn header_word(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        assert!(parity < 2 && word < 8);
        self.word(self.block(rank) + HEADERS + parity * 64 + word * 8)
    }

    /// Returns the start of the even (0) or odd (1) slot of `rank`, to read; SLOT_BYTES long, aligned to a page.
    pub(in crate::comm) fn slot(&self, rank: usize, parity: usize) -> *const u8 {
        self.slot_mut(rank, parity)
    }

    /// Returns the start of a slot, to write.
    pub(in crate::comm) fn slot_mut(&self, rank: usize, parity: usize) -> *mut u8 {
        assert!(rank < self.world_size && parity < 2);
        let offset = PAGE * (1 + self.world_size) + (rank * 2 + parity) * SLOT_BYTES;
        // SAFETY: the offset is inside the mapping, which `bytes` sized for all ranks.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Returns a text of `rank`, to read; TEXT_BYTES long.
    pub(in crate::comm) fn text(&self, rank: usize, which: FailureText) -> *const u8 {
        self.text_mut(rank, which)
    }

    /// Returns a text of `rank`, to write.
    pub(in crate::comm) fn text_mut(&self, rank: usize, which: FailureText) -> *mut u8 {
        let at = match which {
            FailureText::LastWords => TEXT,
            FailureText::Cause => CAUSE,
        };
        // SAFETY: the offset is inside the rank's block.
        unsafe { self.map.as_mut_ptr().add(self.block(rank) + at) }
    }

    /// Returns the number of bytes of the text.
    pub(in crate::comm) fn text_len(&self, rank: usize, which: FailureText) -> &AtomicU32 {
        let at = match which {
            FailureText::LastWords => TEXT_LEN,
            FailureText::Cause => CAUSE_LEN,
        };
        self.word32(self.block(rank) + at)
    }

    fn bytes(world_size: usize) -> usize {
        PAGE * (1 + world_size) + world_size * 2 * SLOT_BYTES
    }

    fn block(&self, rank: usize) -> usize {
        assert!(rank < self.world_size, "rank {rank} of {}", self.world_size);
        PAGE * (1 + rank)
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
    // An error can only mean that no thread is there to be woken.
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
}

/// Sleeps until `word` is no longer `seen`, or about `millis` have passed.
pub(in crate::comm) fn sleep_on(word: &AtomicU32, seen: u32, millis: u32) {
    let limit = rustix::thread::futex::Timespec { tv_sec: 0, tv_nsec: i64::from(millis) * 1_000_000 };
    // Woken, already changed, interrupted or timed out: the caller checks again in every case.
    let _ = rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), seen, Some(&limit));
}
