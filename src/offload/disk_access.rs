//! The ways to read and write a file.

use super::available_memory::available_memory;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

/// The way in which files of offloaded state are accessed.
///
/// The following speeds in GB/s were measured on a virtual disk, for cold reads and for writes including a final sync:
/// without the page cache, 2.5 to 3.6 and 4 to 6; through the page cache, 2.0 to 3.3 and 3.5; through a mapping, 1 to 2
/// and 1.2 to 2. State that is already in the page cache is read through it at 20 to 40 GB/s, and through a mapping at
/// 7 to 15 GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DiskAccess {
    /// Without the page cache (`O_DIRECT`): fastest if the state is larger than the remaining memory.
    Direct,
    /// Through the page cache, by system calls: fastest if the page cache can hold the state.
    Cached,
    /// Through the page cache, by copies to and from the mapped file, whose pages are released after use. This is for
    /// file systems that refuse direct access.
    Mapped,
}

impl DiskAccess {
    pub(super) const ALL: [Self; 3] = [Self::Direct, Self::Cached, Self::Mapped];

    /// Returns the fastest access for files of `bytes` bytes in total.
    pub(crate) fn fastest(bytes: u64, direct_is_possible: bool) -> Self {
        match () {
            () if bytes <= available_memory() / 2 => Self::Cached,
            () if direct_is_possible => Self::Direct,
            () => Self::Mapped,
        }
    }
}

impl fmt::Display for DiskAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "without the page cache",
            Self::Cached => "through the page cache",
            Self::Mapped => "through a mapping",
        })
    }
}

/// The current access. It may change while requests are pending, because all kinds of access see the same bytes.
#[derive(Debug)]
pub(super) struct AtomicDiskAccess(AtomicU8);

impl AtomicDiskAccess {
    pub fn new(access: DiskAccess) -> Self {
        Self(AtomicU8::new(access as u8))
    }

    pub fn set(&self, access: DiskAccess) {
        // This store publishes nothing else, so no ordering is needed.
        self.0.store(access as u8, Ordering::Relaxed);
    }

    /// Returns whether the current access is direct. Copies may then be needed for alignment.
    pub fn is_direct(&self) -> bool {
        self.0.load(Ordering::Relaxed) == DiskAccess::Direct as u8
    }

    pub fn get(&self) -> DiskAccess {
        DiskAccess::ALL[usize::from(self.0.load(Ordering::Relaxed))]
    }

    /// Returns the access to use for a file, which may not support the chosen access.
    pub fn of_file(&self, allows_direct: bool) -> DiskAccess {
        match self.get() {
            DiskAccess::Direct if !allows_direct => DiskAccess::Mapped,
            access => access,
        }
    }
}
