//! Releases the memory of pages of a mapped file.

use memmap2::{Mmap, UncheckedAdvice};
use std::ops::Range;

/// The number of bytes that Linux maps around an address at which a file is read for the first time.
const FAULT_AROUND: usize = 64 << 10;

/// Releases the memory of pages that were read, and of the pages that the system has mapped around them. Otherwise, the
/// map keeps this memory until it is dropped. If the pages are read again, they come from the system's cache or
/// from the file.
///
/// # Panics
/// Panics if `bytes` is not inside the map.
pub fn release_pages(map: &Mmap, bytes: Range<usize>) {
    assert!(bytes.start <= bytes.end && bytes.end <= map.len(), "bytes outside the map");
    let bytes = bytes.start.saturating_sub(FAULT_AROUND)..map.len().min(bytes.end.saturating_add(FAULT_AROUND));
    // SAFETY: the map is of a file and never written to, so pages that are read again have the file's content.
    let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.end - bytes.start) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn released_bytes_are_read_again_from_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &content).unwrap();
        // SAFETY: nothing changes the file.
        let map = unsafe { Mmap::map(file.as_file()) }.unwrap();
        for bytes in [0..0, 5..6, 100_000..200_000, 299_999..300_000, 0..300_000] {
            assert!(map[..] == content[..]);
            release_pages(&map, bytes);
        }
        assert!(map[..] == content[..]);
    }
}
