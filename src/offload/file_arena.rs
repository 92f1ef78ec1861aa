//! One file of offloaded state: space is reserved at its end, and every extent is read and written in blocks.
//!
//! The file has no name. It disappears with the process, however the process ends, and no other process can truncate
//! it. Reserved space therefore stays reserved, and every mapped page exists.

use super::aligned_buffer::{ALIGN, AlignedBuffer};
use super::disk_access::DiskAccess;
use super::offload_folder::OffloadFolder;
use crate::error::{Error, OffloadError, Result};
use crate::files;
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry, MemoryTier};
use crate::util::lock;
use candle_core::DType;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{Advice, FallocateFlags, IFlags, ioctl_getflags, ioctl_setflags};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{Error as IoError, ErrorKind, IoSliceMut};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

/// A position in a file and the bytes of a buffer that belong there.
pub(crate) struct TransferPiece {
    pub arena: Arc<FileArena>,
    /// The offset in the file, a multiple of [`ALIGN`].
    pub offset: u64,
    pub memory: Range<usize>,
}

/// A file under `nvme_path`.
#[derive(Debug)]
pub(crate) struct FileArena {
    folder: Arc<OffloadFolder>,
    kind: MemoryKind,
    name: &'static str,
    cached: File,
    /// The same file, opened for access that bypasses the page cache, if the file system allows that.
    direct: Option<File>,
    reserved: Mutex<ArenaReservation>,
    ledger: MemoryLedger,
}

#[derive(Debug)]
struct ArenaReservation {
    /// The length of the file.
    bytes: u64,
    given_back: u64,
    ledger_entry: MemoryLedgerEntry,
    /// The latest mapping. The file may have grown since it was mapped.
    map: Option<Arc<MmapRaw>>,
}

/// Returns whether direct access to an empty file works: some file systems allow opening a file for direct access, but
/// then refuse requests.
fn supports_requests(direct: &File) -> bool {
    let refused = direct
        .write_all_at(AlignedBuffer::new(ALIGN).bytes_mut(), 0)
        .is_err_and(|e| e.kind() == ErrorKind::InvalidInput);
    !refused && rustix::fs::ftruncate(direct, 0).is_ok()
}

/// Opens the same file, which is empty, for access that bypasses the page cache. Returns `None` if this fails.
#[doc(hidden)]
pub fn open_direct(cached: &File) -> Option<File> {
    // The file is opened again by path, because a duplicated handle would share its flags with the original.
    let path = format!("/proc/self/fd/{}", cached.as_raw_fd());
    files::open_direct(path).filter(supports_requests)
}

impl FileArena {
    /// Creates an empty file for `kind`. `name` is for messages.
    pub fn create(
        folder: &Arc<OffloadFolder>,
        kind: MemoryKind,
        name: &'static str,
        ledger: &MemoryLedger,
    ) -> Result<Arc<Self>> {
        let cached = folder.unnamed_file()?;
        let direct = open_direct(&cached);
        // Without this flag, btrfs copies the written data to a new place, so every write needs new space. Other file
        // systems lack the flag.
        let _ = ioctl_getflags(&cached).and_then(|flags| ioctl_setflags(&cached, flags | IFlags::NOCOW));
        let ledger_entry = ledger.hold_in(MemoryTier::File, kind, 0);
        Ok(Arc::new(Self {
            folder: folder.clone(),
            kind,
            name,
            cached,
            direct,
            reserved: Mutex::new(ArenaReservation { bytes: 0, given_back: 0, ledger_entry, map: None }),
            ledger: ledger.clone(),
        }))
    }

    /// Reserves `bytes` more bytes at the end and returns the offset at which they begin. They read as zeros.
    pub fn reserve(&self, bytes: usize) -> Result<u64> {
        assert!(bytes.is_multiple_of(ALIGN), "files grow by complete pages");
        let mut reserved = lock(&self.reserved);
        let start = reserved.bytes;
        let len = bytes as u64;
        if bytes == 0 {
            return Ok(start);
        }
        let result = match self.folder.ask_for(len) {
            true => self.grow(start, bytes),
            false => Err(ErrorKind::StorageFull.into()),
        };
        if let Err(error) = result {
            // Some file systems keep a partial reservation. If that cannot be undone, the only effect is that the space
            // is reported as used.
            let _ = rustix::fs::ftruncate(&self.cached, start);
            return Err(match error.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => self.folder.refused(),
                _ => self.error("reserve", error),
            });
        }
        self.folder.count_granted(len);
        reserved.bytes += len;
        self.account(&mut reserved);
        Ok(start)
    }

    fn grow(&self, start: u64, bytes: usize) -> std::io::Result<()> {
        match rustix::fs::fallocate(&self.cached, FallocateFlags::empty(), start, bytes as u64) {
            Err(Errno::OPNOTSUPP) => self.fill(start, bytes),
            result => result.map_err(IoError::from),
        }
    }

    /// Reserves space by writing zeros, if the file system supports no other way.
    fn fill(&self, start: u64, bytes: usize) -> std::io::Result<()> {
        let zeros = vec![0u8; bytes.min(1 << 20)];
        for at in (0..bytes).step_by(zeros.len()) {
            self.cached.write_all_at(&zeros[..zeros.len().min(bytes - at)], start + at as u64)?;
        }
        // The space is guaranteed only after a sync.
        self.cached.sync_data()
    }

    /// Frees the space of `range`, which must no longer be in use.
    pub fn give_back(&self, range: Range<u64>) {
        let len = range.end - range.start;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // If a file system cannot do this, the space stays reserved until the job ends.
        if len > 0 && rustix::fs::fallocate(&self.cached, flags, range.start, len).is_ok() {
            let mut reserved = lock(&self.reserved);
            reserved.given_back += len;
            self.account(&mut reserved);
        }
    }

    fn account(&self, reserved: &mut ArenaReservation) {
        reserved.ledger_entry.resize(usize::try_from(reserved.bytes - reserved.given_back).unwrap_or(usize::MAX));
    }

    pub fn allows_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Reads the bytes that begin at offset `at`. `bounce` is memory for a copy, used if `out` is not aligned as
    /// required.
    pub fn read(&self, access: DiskAccess, at: u64, out: &mut [u8], bounce: &mut BounceBuffer) -> std::io::Result<()> {
        match (access, &self.direct) {
            (DiskAccess::Direct, Some(direct)) if is_aligned(out) => direct.read_exact_at(out, at),
            (DiskAccess::Direct, Some(direct)) => {
                let block = bounce.get(out.len(), &self.ledger);
                direct.read_exact_at(block, at)?;
                out.copy_from_slice(&block[..out.len()]);
                Ok(())
            }
            (DiskAccess::Mapped, _) => self.with_mapped(at, out.len(), |mapped| {
                // SAFETY: `mapped` points to `out.len()` bytes of the file. Nothing writes them during the copy,
                // because an extent of a file is in only one transfer at a time.
                unsafe { mapped.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) }
            }),
            _ => self.cached.read_exact_at(out, at),
        }
    }

    /// Writes `bytes` at offset `at`. Between their end and the next multiple of [`ALIGN`], the file then
    /// contains zeros or its previous bytes.
    pub fn write(&self, access: DiskAccess, at: u64, bytes: &[u8], bounce: &mut BounceBuffer) -> std::io::Result<()> {
        match (access, &self.direct) {
            (DiskAccess::Direct, Some(direct)) if is_aligned(bytes) => direct.write_all_at(bytes, at),
            (DiskAccess::Direct, Some(direct)) => {
                let block = bounce.get(bytes.len(), &self.ledger);
                block[..bytes.len()].copy_from_slice(bytes);
                block[bytes.len()..].fill(0);
                direct.write_all_at(block, at)
            }
            (DiskAccess::Mapped, _) => self.with_mapped(at, bytes.len(), |mapped| {
                // SAFETY: as in `read`; in addition, the mapping allows writes because the file is open for writing.
                unsafe { mapped.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
            }),
            _ => self.cached.write_all_at(bytes, at),
        }
    }

    /// Calls `copy` with the `len` mapped bytes that begin at offset `at`, and releases their pages afterwards.
    fn with_mapped(&self, at: u64, len: usize, copy: impl FnOnce(*mut u8)) -> std::io::Result<()> {
        let map = self.map()?;
        let at = usize::try_from(at).map_err(|_| IoError::from(ErrorKind::FileTooLarge))?;
        assert!(at.checked_add(len).is_some_and(|end| end <= map.len()), "a block is inside its file");
        let _resident = self.ledger.hold_in(MemoryTier::Mapped, self.kind, len.next_multiple_of(ALIGN));
        copy(map.as_mut_ptr().wrapping_add(at));
        let page = rustix::param::page_size();
        let (start, end) = (at / page * page, (at + len).next_multiple_of(page).min(map.len()));
        // SAFETY: the range is within the mapping. The mapping is shared, so releasing pages loses nothing: written
        // data is in the page cache, and a thread that is copying a neighbouring block in one of the pages gets the
        // page back immediately.
        unsafe {
            let start = map.as_mut_ptr().add(start);
            rustix::mm::madvise(start.cast(), end.saturating_sub(at / page * page), rustix::mm::Advice::LinuxDontNeed)?;
        }
        Ok(())
    }

    /// Returns the mapping of the entire file, creating a new one if the file has grown.
    fn map(&self) -> std::io::Result<Arc<MmapRaw>> {
        let mut reserved = lock(&self.reserved);
        let len = usize::try_from(reserved.bytes).map_err(|_| IoError::from(ErrorKind::FileTooLarge))?;
        match &reserved.map {
            Some(map) if map.len() == len => Ok(map.clone()),
            _ => {
                let map = Arc::new(MmapOptions::new().len(len).map_raw(&self.cached)?);
                reserved.map = Some(map.clone());
                Ok(map)
            }
        }
    }

    /// Waits until everything that was written is on the disk.
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fdatasync(&self.cached).map_err(|errno| self.error("sync", errno.into()))
    }

    /// Removes the file from the page cache, except data that is not on the disk yet. Returns the fraction that is
    /// still cached, estimated from samples, if the system reports it.
    pub fn evict(&self) -> Result<Option<f64>> {
        const SAMPLES: u64 = 64;
        let advise = |advice| {
            rustix::fs::fadvise(&self.cached, 0, None, advice).map_err(|errno| self.error("evict", errno.into()))
        };
        advise(Advice::DontNeed)?;
        // When a page is examined, the system must not read its neighbours.
        advise(Advice::Random)?;
        let pages = lock(&self.reserved).bytes / ALIGN as u64;
        let is_cached = |i: u64| {
            let (mut byte, at) = ([0u8], u64::midpoint(i * pages / SAMPLES, (i + 1) * pages / SAMPLES) * ALIGN as u64);
            match preadv2(&self.cached, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
                Ok(_) => Some(1.0),
                Err(Errno::AGAIN) => Some(0.0),
                Err(_) => None,
            }
        };
        let cached_samples: Option<f64> = (0..SAMPLES).map(is_cached).sum();
        advise(Advice::Normal)?;
        Ok(cached_samples.map(|cached_samples| cached_samples / SAMPLES as f64))
    }

    pub fn error(&self, action: &'static str, source: IoError) -> Error {
        OffloadError::Io { action, what: self.name, path: self.folder.path().to_owned(), source }.into()
    }
}

fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().align_offset(ALIGN) == 0 && bytes.len().is_multiple_of(ALIGN)
}

/// The memory of one thread for blocks that do not have the alignment that direct access requires.
#[derive(Default)]
pub(crate) struct BounceBuffer(Option<(AlignedBuffer, MemoryLedgerEntry)>);

impl BounceBuffer {
    /// Returns whether no memory is allocated.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Returns memory for `len` bytes, rounded up to the size that direct access requires.
    fn get(&mut self, len: usize, ledger: &MemoryLedger) -> &mut [u8] {
        let len = len.next_multiple_of(ALIGN);
        let memory = match self.0.take() {
            Some(memory) if memory.0.len() >= len => memory,
            smaller => {
                drop(smaller);
                (AlignedBuffer::new(len), ledger.hold(MemoryKind::Staging, len + ALIGN - 1))
            }
        };
        &mut self.0.insert(memory).0.bytes_mut()[..len]
    }
}

/// Consecutive elements of one dtype in a file.
#[derive(Debug, Clone)]
pub(crate) struct FileExtent {
    arena: Arc<FileArena>,
    /// The number of bytes before the first element.
    start: u64,
    dtype: DType,
}

impl FileExtent {
    /// Creates an extent without elements, which will consist of the next elements reserved in `arena`.
    pub fn at_end_of(arena: &Arc<FileArena>, dtype: DType) -> Self {
        Self { arena: arena.clone(), start: lock(&arena.reserved).bytes, dtype }
    }

    /// Reserves `count` more elements. Nothing else may have been reserved in the file since the extent began.
    pub fn grow(&self, count: usize) -> Result<()> {
        let bytes = count.checked_mul(self.dtype.size_in_bytes());
        self.arena.reserve(bytes.ok_or_else(|| self.arena.error("reserve", ErrorKind::FileTooLarge.into()))?)?;
        Ok(())
    }

    /// Counts `count` more elements as requested, although there is no space for them.
    pub fn ask_for(&self, count: usize) {
        self.arena.folder.ask_for((count as u64).saturating_mul(self.dtype.size_in_bytes() as u64));
    }

    /// Frees the space of the first `count` elements.
    pub fn give_back(&self, count: usize) {
        self.arena.give_back(self.start..self.start + (count * self.dtype.size_in_bytes()) as u64);
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the piece with the elements `range`. `in_buffer` is their position in a buffer, counted in elements.
    /// `range` must begin at an offset at which file access may begin.
    pub fn piece(&self, range: Range<usize>, in_buffer: usize) -> TransferPiece {
        let size = self.dtype.size_in_bytes();
        let offset = self.start + (range.start * size) as u64;
        assert!(offset.is_multiple_of(ALIGN as u64), "pieces start at page boundaries");
        TransferPiece { arena: self.arena.clone(), offset, memory: in_buffer * size..(in_buffer + range.len()) * size }
    }
}
