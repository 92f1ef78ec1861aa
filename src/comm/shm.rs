//! The memory that the ranks of one machine share.
//!
//! ```text
//!   page 0            magic, version, world size, the first failure
//!   page 1 + r        control block of rank r: published pieces, state, heartbeat, fingerprints, last words
//!   then, per rank    two slots of SLOT_BYTES: the data of an even and of an odd piece
//! ```
//!
//! `zerorun` makes the region as a memfd and the ranks inherit it: it has no name, needs no /dev/shm, and is gone
//! with the last process. Ranks as threads share the same layout in anonymous memory.
//!
//! # Orderings
//!
//! A rank's block is written by that rank alone (`cause` and the step from a living state to DEAD by the launcher).
//! `published` is stored with Release (and stronger) after the piece's data and fingerprint, and loaded with Acquire
//! before a peer reads them. `state` is stored with Release after the text that explains it, and loaded with Acquire before the
//! text is read. The first failure is set before the state that tells of it, so that the echo of a failure, which
//! follows from that state, cannot be taken for the first. Nothing else carries an ordering.

use crate::error::{CommError, Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const MAGIC: u64 = 0x6361_6e64_6c65_7a30; // "candlez0"
const VERSION: u64 = 3;
const PAGE: usize = 4096;
/// Bytes of one rank's data in one piece; two such slots per rank. Small enough to stay in cache.
pub(super) const SLOT_BYTES: usize = 1 << 17;
const TEXT_BYTES: usize = 1024;

// Offsets inside page 0.
const FIRST_FAILURE: usize = 24;

// Offsets inside a control block. The futex word has a cache line of its own.
const PUBLISHED: usize = 0;
const SLEEPERS: usize = 4;
const STATE: usize = 64;
const TEXT_LEN: usize = 68;
const CAUSE_LEN: usize = 72;
const HEARTBEAT: usize = 128;
const FINGERPRINTS: usize = 192; // two, of 64 bytes
const TEXT: usize = 1024;
const CAUSE: usize = 2048;

/// How a rank stands in the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankState {
    /// Has not opened the region yet.
    Absent,
    /// Takes part.
    Running,
    /// Has left in good order.
    Finished,
    /// Gave up, with its last words.
    Aborted(String),
    /// Its process ended, as the launcher saw it.
    Dead(String),
}

/// What the first rank to fail did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its process ended badly.
    Died = 1,
    /// It gave up after an error of its own.
    GaveUp = 2,
    /// It left in good order while others needed it.
    Left = 3,
    /// Its heartbeat stopped.
    Silent = 4,
    /// It lived, but others waited for it longer than their limit.
    Late = 5,
}

impl Fault {
    const ALL: [Self; 5] = [Self::Died, Self::GaveUp, Self::Left, Self::Silent, Self::Late];
}

const ABSENT: u32 = 0;
const RUNNING: u32 = 1;
const FINISHED: u32 = 2;
const ABORTED: u32 = 3;
const DEAD: u32 = 4;

/// Shared memory of one job: a control block and two data slots per rank.
pub struct Region {
    map: MmapRaw,
    fd: Option<OwnedFd>,
    world_size: usize,
}

impl Region {
    /// Makes a region that child processes inherit (the memfd is not closed on exec). Called by the launcher.
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

    /// Opens the region that the launcher passed on as file descriptor `fd`, which this takes over: it may be called
    /// once per process.
    pub(super) fn inherit(fd: RawFd, world_size: usize) -> Result<Self> {
        let foreign = |found: String| Error::from(CommError::ForeignRegion { fd, found });
        // SAFETY: fcntl only looks at the number; a closed descriptor gives an error.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let stat = rustix::fs::fstat(borrowed).map_err(|e| foreign(format!("a closed descriptor ({e})")))?;
        let bytes = Self::bytes(world_size);
        if stat.st_size as u64 != bytes as u64 {
            return Err(foreign(format!("{} bytes where {bytes} belong to {world_size} ranks", stat.st_size)));
        }
        // SAFETY: the launcher passed the descriptor to this process for this purpose, and `comm::from_env`, the only
        // caller, comes here no more once it has succeeded. So nothing else here owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Ranks that start helpers of their own must not keep the region alive through them.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|e| CommError::Region { action: "open", source: Arc::new(e.into()) })?;
        let map = MmapOptions::new()
            .len(bytes)
            .map_raw(&fd)
            .map_err(|source| CommError::Region { action: "map", source: Arc::new(source) })?;
        let region = Self { map, fd: Some(fd), world_size };
        let header = [region.word(0), region.word(8), region.word(16)].map(|w| w.load(Ordering::Acquire));
        if header != [MAGIC, VERSION, world_size as u64] {
            return Err(foreign(format!("a header {header:x?}")));
        }
        Ok(region)
    }

    /// A region of this process alone, for ranks as threads.
    pub fn anonymous(world_size: usize) -> Result<Self> {
        let map = MmapOptions::new()
            .len(Self::bytes(world_size))
            .map_anon()
            .map_err(|source| CommError::Region { action: "map", source: Arc::new(source) })?;
        let region = Self { map: map.into(), fd: None, world_size };
        region.write_header();
        Ok(region)
    }

    fn write_header(&self) {
        self.word(0).store(MAGIC, Ordering::Relaxed);
        self.word(8).store(VERSION, Ordering::Relaxed);
        self.word(16).store(self.world_size as u64, Ordering::Release);
    }

    /// Number of ranks that the region was made for.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The descriptor to hand to child processes.
    ///
    /// # Panics
    /// For a region made by [`Region::anonymous`], which has none.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("an anonymous region has no descriptor").as_fd()
    }

    /// Whether ranks are processes (a memfd) rather than threads (anonymous memory).
    pub(super) fn is_shared_between_processes(&self) -> bool {
        self.fd.is_some()
    }

    /// The launcher's word that the process of `rank` has ended badly. Every waiting rank returns an error with `why`.
    pub fn mark_dead(&self, rank: usize, why: &str) {
        self.blame(rank, Fault::Died);
        self.write_text(rank, CAUSE, CAUSE_LEN, why);
        self.leave(rank, DEAD);
    }

    /// The launcher's word that the process of `rank` has ended with exit code 0.
    pub fn mark_left(&self, rank: usize) {
        self.leave(rank, FINISHED);
    }

    pub(super) fn enter(&self, rank: usize) -> Result<()> {
        let state = self.word32(self.block(rank) + STATE);
        match state.compare_exchange(ABSENT, RUNNING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(_) => Err(CommError::RankTaken { rank, state: self.state(rank).describe() }.into()),
        }
    }

    pub(super) fn finish(&self, rank: usize) {
        self.leave(rank, FINISHED);
    }

    /// The word of `rank` that it gives up, and why. Once per rank: others may be reading the text from then on.
    pub(super) fn abort(&self, rank: usize, why: &str) {
        self.write_text(rank, TEXT, TEXT_LEN, why);
        if matches!(self.state(rank), RankState::Absent | RankState::Running) {
            self.blame(rank, Fault::GaveUp);
        }
        self.leave(rank, ABORTED);
    }

    /// Records the first failure of the job; later ones change nothing.
    pub(super) fn blame(&self, rank: usize, fault: Fault) {
        let value = (rank as u64 + 1) << 8 | fault as u64;
        let _ = self.word(FIRST_FAILURE).compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The failure from which all others follow, if there is one: the rank, and what it did.
    pub(crate) fn first_failure(&self) -> Option<(usize, Fault)> {
        let value = self.word(FIRST_FAILURE).load(Ordering::Acquire);
        let fault = Fault::ALL.into_iter().find(|fault| *fault as u64 == value & 0xff)?;
        let rank = (value >> 8).checked_sub(1)? as usize;
        (rank < self.world_size).then_some((rank, fault))
    }

    /// Why `rank` has given up, in its own words.
    pub(crate) fn last_words(&self, rank: usize) -> Option<String> {
        match self.state(rank) {
            RankState::Aborted(why) => Some(why),
            _ => None,
        }
    }

    /// From a living state to `state`, once; what came first stays. Wakes whoever waits for the rank.
    fn leave(&self, rank: usize, state: u32) {
        let word = self.word32(self.block(rank) + STATE);
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| (now <= RUNNING).then_some(state));
        wake(self.published(rank));
    }

    pub(super) fn state(&self, rank: usize) -> RankState {
        match self.word32(self.block(rank) + STATE).load(Ordering::Acquire) {
            ABSENT => RankState::Absent,
            RUNNING => RankState::Running,
            FINISHED => RankState::Finished,
            ABORTED => RankState::Aborted(self.read_text(rank, TEXT, TEXT_LEN)),
            DEAD => RankState::Dead(self.read_text(rank, CAUSE, CAUSE_LEN)),
            other => RankState::Aborted(format!("it wrote the unknown state {other}")),
        }
    }

    /// Pieces that `rank` has published, modulo 2^32; the word that waiting ranks sleep on.
    pub(super) fn published(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.block(rank) + PUBLISHED)
    }

    /// Tells that `rank` has published `pieces`, with all that it wrote before, and wakes whoever sleeps until then.
    pub(super) fn publish(&self, rank: usize, pieces: u32) {
        let word = self.published(rank);
        // In the one order of all SeqCst operations either this store comes before the sleeper's look at the word, and
        // it does not sleep, or its count comes before the look at the count here, and it is woken.
        word.store(pieces, Ordering::SeqCst);
        if self.sleepers(rank).load(Ordering::SeqCst) > 0 {
            wake(word);
        }
    }

    /// Sleeps until `rank` has published more than the `seen` pieces, it has left, or about `millis` have passed.
    pub(super) fn sleep_until_published(&self, rank: usize, seen: u32, millis: u32) {
        let (word, sleepers) = (self.published(rank), self.sleepers(rank));
        sleepers.fetch_add(1, Ordering::SeqCst);
        if word.load(Ordering::SeqCst) == seen {
            sleep_on(word, seen, millis);
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Threads that sleep on [`published`](Self::published) of `rank`. One that is killed in its sleep counts for
    /// good, which only makes for wakes in vain.
    fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.word32(self.block(rank) + SLEEPERS)
    }

    /// Counts up while the process of `rank` lives; stays 0 for ranks that are threads.
    pub(super) fn heartbeat(&self, rank: usize) -> &AtomicU64 {
        self.word(self.block(rank) + HEARTBEAT)
    }

    /// Words of the fingerprint of `rank`'s even (0) or odd (1) piece.
    pub(super) fn fingerprint_word(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.word(self.block(rank) + FINGERPRINTS + parity * 64 + word * 8)
    }

    /// Start of the even (0) or odd (1) slot of `rank`; SLOT_BYTES long, aligned to a page.
    pub(super) fn slot(&self, rank: usize, parity: usize) -> *mut u8 {
        assert!(rank < self.world_size && parity < 2);
        let offset = PAGE * (1 + self.world_size) + (rank * 2 + parity) * SLOT_BYTES;
        // SAFETY: the offset is inside the mapping, which `bytes` sized for all ranks.
        unsafe { self.map.as_mut_ptr().add(offset) }
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

    fn write_text(&self, rank: usize, at: usize, len_at: usize, text: &str) {
        let mut end = text.len().min(TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: the area is TEXT_BYTES long inside the mapping and written by one process, before the state that
        // publishes it is stored with Release; a second text of the same kind is the same writer's.
        unsafe {
            let area = self.map.as_mut_ptr().add(self.block(rank) + at);
            std::ptr::copy_nonoverlapping(text.as_ptr(), area, end);
        }
        self.word32(self.block(rank) + len_at).store(end as u32, Ordering::Release);
    }

    fn read_text(&self, rank: usize, at: usize, len_at: usize) -> String {
        let len = (self.word32(self.block(rank) + len_at).load(Ordering::Acquire) as usize).min(TEXT_BYTES);
        let mut bytes = vec![0; len];
        // SAFETY: inside the mapping; the writer finished before the state that the caller has seen.
        unsafe {
            let area = self.map.as_mut_ptr().add(self.block(rank) + at);
            std::ptr::copy_nonoverlapping(area, bytes.as_mut_ptr(), len);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl RankState {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Absent => "absent".into(),
            Self::Running => "running".into(),
            Self::Finished => "finished".into(),
            Self::Aborted(why) => format!("stopped: {why}"),
            Self::Dead(why) => format!("dead: {why}"),
        }
    }
}

/// Wakes every thread, of any process, that sleeps on `word`.
fn wake(word: &AtomicU32) {
    // An error can only mean that nobody is there to be woken.
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
}

/// Sleeps until `word` is no longer `seen`, or about `millis` have passed.
fn sleep_on(word: &AtomicU32, seen: u32, millis: u32) {
    let limit = rustix::thread::futex::Timespec { tv_sec: 0, tv_nsec: i64::from(millis) * 1_000_000 };
    // Woken, changed already, interrupted, timed out: the caller looks again in every case.
    let _ = rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), seen, Some(&limit));
}
