//! Reads files of lines that another process may be appending to.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Result, Seek as _, SeekFrom};

/// The maximum number of bytes of a line, including its end.
pub const MAX_LINE_BYTES: u64 = 4 << 20;

/// Calls `on_line` with every complete line of the file from byte `from` on: with the position of the line and its
/// bytes, or without bytes if it is longer than [`MAX_LINE_BYTES`]. A last line without its end is left out, because it
/// is still being written or its writer was killed. Returns the position after the last complete line.
pub fn complete_lines(mut file: File, from: u64, on_line: &mut dyn FnMut(u64, Option<&[u8]>)) -> Result<u64> {
    file.seek(SeekFrom::Start(from))?;
    let (mut reader, mut piece, mut position) = (BufReader::with_capacity(1 << 16, file), Vec::new(), from);
    loop {
        let mut length = 0;
        loop {
            piece.clear();
            let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut piece)? as u64;
            length += read;
            if piece.last() == Some(&b'\n') {
                break;
            }
            if read < MAX_LINE_BYTES {
                return Ok(position);
            }
        }
        on_line(position, (length <= MAX_LINE_BYTES).then_some(&piece));
        position += length;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8], from: u64) -> (Vec<(u64, Option<usize>)>, u64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, bytes).unwrap();
        let mut all = Vec::new();
        let mut on_line = |at, line: Option<&[u8]>| all.push((at, line.map(<[u8]>::len)));
        let end = complete_lines(File::open(&path).unwrap(), from, &mut on_line).unwrap();
        (all, end)
    }

    #[test]
    fn a_torn_last_line_is_ignored_at_every_byte() {
        let text = b"a: 1\n\nb: 2\n";
        for cut in 0..=text.len() {
            let ends: Vec<u64> = (0..cut).filter(|at| text[*at] == b'\n').map(|at| at as u64 + 1).collect();
            let (all, end) = lines(&text[..cut], 0);
            assert_eq!((all.len(), end), (ends.len(), ends.last().copied().unwrap_or(0)), "cut at {cut}");
        }
        assert_eq!(lines(text, 6), (vec![(6, Some(5))], 11));
        assert_eq!(lines(text, 100), (vec![], 100));
    }

    #[test]
    fn a_line_that_is_too_long_has_no_bytes_and_is_awaited_to_its_end() {
        let max = MAX_LINE_BYTES as usize;
        for length in [max - 1, max, max + 1, 2 * max, 2 * max + 3] {
            let mut text = vec![b'x'; length - 1];
            assert_eq!(lines(&text, 0), (vec![], 0), "{length} without its end");
            text.extend(b"\nyz\n");
            let expected = vec![(0, (length <= max).then_some(length)), (length as u64, Some(3))];
            assert_eq!(lines(&text, 0), (expected, text.len() as u64), "{length}");
        }
    }
}
