//! Reads files of JSON lines that another process may be appending to.

use crate::files::{self, MAX_LINE_BYTES};
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::Result;
use std::path::Path;

/// Opens a file of a run for reading.
pub(super) fn open(path: &Path) -> Result<File> {
    #[cfg(test)]
    cost::add(1, 0);
    files::open(path)
}

/// Reads a complete file of at most `max_bytes` bytes.
pub(super) fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let bytes = files::read(path, max_bytes)?;
    #[cfg(test)]
    cost::add(1, bytes.len() as u64);
    Ok(bytes)
}

/// Calls `on_line` with every complete line from byte `start` on: a value that is read from a JSON object, or the
/// reason why the line is not an object. Returns the position after the last complete line.
pub(super) fn complete_lines<T: DeserializeOwned>(
    file: File,
    start: u64,
    on_line: &mut dyn FnMut(std::result::Result<T, String>),
) -> Result<u64> {
    let end = files::complete_lines(file, start, &mut |offset, line| {
        on_line(match line {
            Some(line) => {
                serde_json::from_slice(line).map_err(|_| format!("the line at byte {offset} is not a JSON object"))
            }
            None => Err(format!("the line at byte {offset} is longer than {MAX_LINE_BYTES} bytes")),
        });
    })?;
    #[cfg(test)]
    cost::add(0, end - start);
    Ok(end)
}

/// The files that this thread has opened and the bytes that it has read, for tests.
#[cfg(test)]
pub(super) mod cost {
    use std::cell::Cell;

    thread_local!(static COST: Cell<(u64, u64)> = const { Cell::new((0, 0)) });

    pub fn add(files: u64, bytes: u64) {
        COST.with(|cost| cost.set((cost.get().0 + files, cost.get().1 + bytes)));
    }

    /// Returns the cost since the last call.
    pub fn take() -> (u64, u64) {
        COST.with(|cost| cost.replace((0, 0)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Map, Value};

    fn lines(bytes: &[u8], from: u64) -> (Vec<String>, u64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        std::fs::write(&path, bytes).unwrap();
        let mut all = Vec::new();
        let end =
            complete_lines(open(&path).unwrap(), from, &mut |line: std::result::Result<Map<String, Value>, _>| {
                all.push(line.map_or_else(|problem| problem, |line| Value::from(line).to_string()));
            });
        (all, end.unwrap())
    }

    #[test]
    fn a_torn_last_line_is_ignored_at_every_byte() {
        let text = b"{\"a\":1}\n{\"b\":2}\n";
        for cut in 0..=text.len() {
            let whole = text[..cut].iter().filter(|byte| **byte == b'\n').count();
            let (all, end) = lines(&text[..cut], 0);
            assert_eq!((all.len(), end), (whole, 8 * whole as u64), "cut at {cut}");
        }
        assert_eq!(lines(text, 8), (vec!["{\"b\":2}".into()], 16));
        assert_eq!(lines(text, 100), (vec![], 100));
    }

    #[test]
    fn a_line_in_the_middle_that_is_no_object_is_named() {
        let (all, end) = lines(b"{\"a\":1}\n\0\0\n[1]\n\n{\"b\":\xff}\n{\"c\":3}\n", 0);
        assert_eq!(all.len(), 6);
        assert_eq!(all[1], "the line at byte 8 is not a JSON object");
        assert_eq!((all[5].as_str(), end), ("{\"c\":3}", 32));
        let mut long = vec![b'x'; MAX_LINE_BYTES as usize + 10];
        long.extend(b"\n{\"d\":4}\n");
        let (all, end) = lines(&long, 0);
        assert_eq!(all, ["the line at byte 0 is longer than 4194304 bytes", "{\"d\":4}"]);
        assert_eq!(end, long.len() as u64);
        assert_eq!(lines(&long[..MAX_LINE_BYTES as usize - 1], 0), (vec![], 0));
    }
}
