//! The log of a Weights & Biases run: `run-ID.wandb`, whose frames are those of LevelDB's log.
//!
//! ```text
//! file    ":W&B" | 0xBEE1 (u16) | version 0 (u8) | blocks of 32 KiB, counted from the start of the file
//! block   frames | fewer than 7 zero bytes, if no frame header fits
//! frame   CRC-32 of kind and data (u32) | length of the data (u16) | kind (u8) | data
//! record  one frame (kind 1), or a first frame (2), any number of middle frames (3) and a last frame (4); a protobuf
//!         message `Record`
//! ```
//!
//! The checksum is that of zlib, not LevelDB's CRC-32C.

use std::fs::File;
use std::io::{BufReader, Read, Result, Seek as _, SeekFrom, Write as _};

/// The beginning of a file.
const FILE_HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
/// The size of a block.
const BLOCK: u64 = 32 << 10;
/// The size of a frame's header.
const FRAME_HEADER: u64 = 7;
/// The maximum size of a record that is read back.
const MAX_RECORD: usize = 64 << 20;

/// The kinds of frames.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// A file that records are appended to.
#[derive(Debug)]
pub(super) struct TransactionLog {
    file: File,
    len: u64,
}

impl TransactionLog {
    /// Begins a log in an empty file.
    pub fn begin(mut file: File) -> Result<Self> {
        file.write_all(&FILE_HEADER)?;
        Ok(Self { file, len: FILE_HEADER.len() as u64 })
    }

    /// Continues a file. Its records are passed to `is_kept`, one after the other; the first that is not kept is
    /// removed with everything after it, as is an incomplete last record left by a process that was killed. Returns
    /// `None`, and leaves the file unchanged, if it does not begin as a log does.
    pub fn resume(file: File, is_kept: impl FnMut(&[u8]) -> bool) -> Result<Option<Self>> {
        let Some(len) = kept_length(&file, is_kept)? else { return Ok(None) };
        file.set_len(len)?;
        Ok(Some(Self { file, len }))
    }

    /// Removes the first record that is not kept, and everything after it.
    pub fn rewind(&mut self, is_kept: impl FnMut(&[u8]) -> bool) -> Result<()> {
        if let Some(len) = kept_length(&self.file, is_kept)? {
            self.file.set_len(len)?;
            self.len = len;
        }
        Ok(())
    }

    /// Appends records with a single write, so that they are visible outside the process.
    pub fn append(&mut self, records: &[Vec<u8>]) -> Result<()> {
        let mut bytes = Vec::new();
        records.iter().for_each(|record| push_record(&mut bytes, self.len, record));
        self.file.write_all(&bytes).inspect_err(|_| {
            // A part that was written before the disk was full is removed.
            _ = self.file.set_len(self.len);
        })?;
        self.len += bytes.len() as u64;
        Ok(())
    }
}

/// Appends a record to bytes that will be written at position `start` of the file.
fn push_record(bytes: &mut Vec<u8>, start: u64, record: &[u8]) {
    let mut rest = record;
    let mut is_first = true;
    loop {
        let remaining = BLOCK - (start + bytes.len() as u64) % BLOCK;
        if remaining < FRAME_HEADER {
            bytes.extend(std::iter::repeat_n(0, remaining as usize));
            continue;
        }
        let capacity = (remaining - FRAME_HEADER) as usize;
        let (data, tail) = rest.split_at(capacity.min(rest.len()));
        rest = tail;
        let kind = match (is_first, rest.is_empty()) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        bytes.extend(checksum(kind, data).to_le_bytes());
        bytes.extend((data.len() as u16).to_le_bytes());
        bytes.push(kind);
        bytes.extend(data);
        if rest.is_empty() {
            return;
        }
        is_first = false;
    }
}

fn checksum(kind: u8, data: &[u8]) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&[kind]);
    checksum.update(data);
    checksum.finalize()
}

/// Returns the number of bytes up to the first record that is damaged or not kept, or `None` if the file is of another
/// kind.
fn kept_length(file: &File, mut is_kept: impl FnMut(&[u8]) -> bool) -> Result<Option<u64>> {
    let mut file = file;
    file.seek(SeekFrom::Start(0))?;
    let mut reader = LogReader { file: BufReader::with_capacity(BLOCK as usize, file), position: 0 };
    let mut header = [0; FILE_HEADER.len()];
    if !reader.fill(&mut header)? || header != FILE_HEADER {
        return Ok(None);
    }
    let mut len = reader.position;
    while let Some(record) = reader.record()? {
        if !is_kept(&record) {
            break;
        }
        len = reader.position;
    }
    Ok(Some(len))
}

/// A reader of records, one after the other.
struct LogReader<R> {
    file: R,
    position: u64,
}

impl<R: Read> LogReader<R> {
    /// Fills a buffer. Returns false if the file ends before the buffer is full.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<bool> {
        match self.file.read_exact(buffer) {
            Ok(()) => {
                self.position += buffer.len() as u64;
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the kind and the data of the next frame, or `None` if it is damaged or cut off.
    fn frame(&mut self) -> Result<Option<(u8, Vec<u8>)>> {
        let remaining = BLOCK - self.position % BLOCK;
        let mut padding = [0; FRAME_HEADER as usize];
        if remaining < FRAME_HEADER {
            let padding = &mut padding[..remaining as usize];
            if !self.fill(padding)? || padding.iter().any(|byte| *byte != 0) {
                return Ok(None);
            }
        }
        let mut header = [0; FRAME_HEADER as usize];
        if !self.fill(&mut header)? {
            return Ok(None);
        }
        let [a, b, c, d, low, high, kind] = header;
        let mut data = vec![0; usize::from(u16::from_le_bytes([low, high]))];
        let fits = data.len() as u64 <= BLOCK - 1 - (self.position - 1) % BLOCK;
        let is_intact = fits && self.fill(&mut data)? && checksum(kind, &data) == u32::from_le_bytes([a, b, c, d]);
        Ok(is_intact.then_some((kind, data)))
    }

    /// Returns the next record, or `None` if no complete record follows.
    fn record(&mut self) -> Result<Option<Vec<u8>>> {
        let mut record = match self.frame()? {
            Some((FULL, data)) => return Ok(Some(data)),
            Some((FIRST, data)) => data,
            _ => return Ok(None),
        };
        loop {
            match self.frame()? {
                Some((kind @ (MIDDLE | LAST), data)) if record.len() + data.len() <= MAX_RECORD => {
                    record.extend(data);
                    if kind == LAST {
                        return Ok(Some(record));
                    }
                }
                _ => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    fn open(path: &std::path::Path) -> File {
        OpenOptions::new().create(true).append(true).read(true).open(path).unwrap()
    }

    fn records(path: &std::path::Path) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        kept_length(&open(path), |record| {
            found.push(record.to_vec());
            true
        })
        .unwrap();
        found
    }

    /// Computes CRC-32 bit by bit, with the polynomial and the order of bits of zlib.
    fn crc_bit_by_bit(bytes: &[u8]) -> u32 {
        !bytes
            .iter()
            .fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (0xedb8_8320 * (crc & 1))))
    }

    #[test]
    fn a_small_record_has_the_bytes_of_the_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run-x.wandb");
        TransactionLog::begin(open(&path)).unwrap().append(&[b"abc".to_vec(), vec![]]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let expected = [
            b":W&B\xe1\xbe\x00".as_slice(),
            &crc_bit_by_bit(b"\x01abc").to_le_bytes(),
            b"\x03\x00\x01abc",
            &crc_bit_by_bit(b"\x01").to_le_bytes(),
            b"\x00\x00\x01",
        ];
        assert_eq!(bytes, expected.concat());
        assert_eq!(crc_bit_by_bit(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn records_of_every_size_around_a_block_are_read_back_after_any_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run-x.wandb");
        let block = BLOCK as usize;
        // After the first record, 0 to 15 bytes of its block are left.
        for remaining in 0..16 {
            _ = std::fs::remove_file(&path);
            let written: Vec<Vec<u8>> = [block - 14 - remaining, 0, 1, 2 * block + 17, block - 7, 3]
                .iter()
                .enumerate()
                .map(|(number, size)| vec![number as u8 + 1; *size])
                .collect();
            let mut log = TransactionLog::begin(open(&path)).unwrap();
            log.append(&written[..2]).unwrap();
            log.append(&written[2..]).unwrap();
            assert_eq!(records(&path), written, "{remaining}");
            assert_eq!(path.metadata().unwrap().len(), log.len);
            drop(log);

            // The last byte is missing: the last record is dropped, and others follow in its place.
            open(&path).set_len(path.metadata().unwrap().len() - 1).unwrap();
            let mut log = TransactionLog::resume(open(&path), |_| true).unwrap().unwrap();
            log.append(&[b"new".to_vec()]).unwrap();
            let mut expected = written.clone();
            expected[5] = b"new".to_vec();
            assert_eq!(records(&path), expected, "{remaining}");
            log.rewind(|record| record.len() < 2 * block).unwrap();
            assert_eq!(records(&path), written[..3], "{remaining}");
            log.append(&written[3..]).unwrap();
            assert_eq!(records(&path), written, "{remaining}");
        }
    }

    #[test]
    fn what_comes_after_damage_is_dropped_and_a_file_of_another_kind_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run-x.wandb");
        TransactionLog::begin(open(&path)).unwrap().append(&[b"one".to_vec(), b"two".to_vec()]).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        drop(TransactionLog::resume(open(&path), |_| true).unwrap().unwrap());
        assert_eq!((records(&path), path.metadata().unwrap().len()), (vec![b"one".to_vec()], 17));
        for other in ["", ":W&", "notes, not a log"] {
            std::fs::write(&path, other).unwrap();
            assert!(TransactionLog::resume(open(&path), |_| true).unwrap().is_none());
            assert_eq!(std::fs::read_to_string(&path).unwrap(), other);
        }
        // A frame that claims to be longer than its block.
        let long = [&FILE_HEADER[..], &[0; 4], &[0xff, 0xff, FULL]].concat();
        std::fs::write(&path, long).unwrap();
        assert!(records(&path).is_empty());
    }
}
