//! Small helpers that every module may use: locks, a stable hash, names in a message.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks; a panic of another holder has been reported already and leaves nothing half-done that matters here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// The value that a lock or a condition variable hands out, also after a panic of another holder (see [`lock`]).
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// A stable 64-bit hash (FNV-1a); std's hasher may change between releases of Rust.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The folder of a user's caches: `$XDG_CACHE_HOME` (`xdg`) where that is an absolute path, as the XDG base directory
/// specification says, else `.cache` in the user's `home`.
pub(crate) fn cache_home(xdg: Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.or_else(|| home.map(|home| home.join(".cache")))
}

/// Names for a message: the first few, and how many more.
pub(crate) fn list<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).map(|n| n.as_ref()).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text += &format!(" and {} more", names.len() - SHOWN);
    }
    text
}
