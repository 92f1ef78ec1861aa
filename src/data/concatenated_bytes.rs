//! Concatenates the text of many files into one sequence of bytes. Large files are mapped; small ones are copied into
//! memory one after the other.

use memmap2::{Advice, Mmap};

/// The minimum size in bytes of a mapped file. The ranks of a machine share the pages of a mapped file, and the system
/// can reclaim them when it needs memory. However, a process is limited to tens of thousands of mappings.
pub(super) const MIN_MAPPED_BYTES: u64 = 1 << 20;

/// A sequence of bytes.
#[derive(Debug, Default)]
pub(super) struct ConcatenatedBytes {
    /// The segments, each with the offset of its first byte.
    parts: Vec<(usize, TextFileBytes)>,
    len: usize,
}

/// The bytes of one file.
#[derive(Debug)]
enum TextFileBytes {
    Static(&'static [u8]),
    Read(Vec<u8>),
    Mapped(Mmap),
}

impl TextFileBytes {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Static(bytes) => bytes,
            Self::Read(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl ConcatenatedBytes {
    pub fn of_static(text: &'static str) -> Self {
        Self { parts: vec![(0, TextFileBytes::Static(text.as_bytes()))], len: text.len() }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends a copy of `bytes`.
    pub fn append(&mut self, bytes: &[u8]) {
        match self.parts.last_mut() {
            Some((_, TextFileBytes::Read(buffer))) => buffer.extend_from_slice(bytes),
            _ => self.parts.push((self.len, TextFileBytes::Read(bytes.to_vec()))),
        }
        self.len += bytes.len();
    }

    /// Appends a file without copying it.
    pub fn append_map(&mut self, map: Mmap) {
        let start = self.len;
        self.len += map.len();
        self.parts.push((start, TextFileBytes::Mapped(map)));
    }

    /// Returns the segments that contain bytes `start .. start + count`, with the range within each segment.
    fn segment_ranges(&self, start: usize, count: usize) -> impl Iterator<Item = (&TextFileBytes, usize, usize)> {
        let end = start + count;
        assert!(end <= self.len, "bytes {start} .. {end} of {}", self.len);
        let first = self.parts.partition_point(|(begin, _)| *begin <= start).saturating_sub(1);
        let parts = self.parts[first..].iter().take_while(move |(begin, _)| *begin < end);
        parts.map(move |(begin, part)| (part, start.saturating_sub(*begin), (end - begin).min(part.bytes().len())))
    }

    /// Returns bytes `start .. start + count`, segment by segment.
    pub fn parts(&self, start: usize, count: usize) -> impl Iterator<Item = &[u8]> {
        self.segment_ranges(start, count).map(|(part, from, to)| &part.bytes()[from..to])
    }

    /// Informs the system that bytes `start .. start + count` will be needed soon.
    pub fn will_need(&self, start: usize, count: usize) {
        for (part, from, to) in self.segment_ranges(start, count) {
            if let TextFileBytes::Mapped(map) = part {
                // This is only a hint.
                _ = map.advise_range(Advice::WillNeed, from, to - from);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn any_range_of_files_that_are_mapped_and_read_is_that_of_their_bytes() {
        let mut text = ConcatenatedBytes::default();
        let mut all: Vec<u8> = vec![];
        for (number, len) in [3, 5, 0, 7, 4, 1].into_iter().enumerate() {
            let bytes: Vec<u8> = (0..len).map(|i| (number * 10 + i) as u8).collect();
            if number % 3 == 1 {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&bytes).unwrap();
                // SAFETY: no one else has access to the file.
                text.append_map(unsafe { Mmap::map(&file) }.unwrap());
            } else {
                text.append(&bytes);
            }
            all.extend(bytes);
        }
        assert_eq!((text.len(), text.parts.len()), (all.len(), 5));
        for start in 0..=all.len() {
            for end in start..=all.len() {
                let parts: Vec<&[u8]> = text.parts(start, end - start).collect();
                assert_eq!(parts.concat(), all[start..end]);
                text.will_need(start, end - start);
            }
        }
    }
}
