//! The file of one rank: a safetensors file whose metadata contains a checksum of every block of its data.

use super::disk_writer::DiskWriter;
use super::manifest::{FileEntry, Manifest, file_name};
use super::rank_file_layout::{BLOCK, PAGE, RankFileLayout};
use crate::error::{CheckpointError, Error, Result};
use crate::files;
use crate::offload::AlignedBuffer;
use crate::precision::FlatRef;
use crate::util::counted;
use crate::zero::share::state_access::PIECE;
use candle_core::DType;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Result as IoResult;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// The size of a write buffer in bytes: an incomplete block and several pieces. Requests are this large so that the
/// caller rarely waits for the disk thread, which may share its core with a training step.
const WRITE_BUFFER_BYTES: usize = BLOCK + 8 * PIECE * 4;

/// A file under construction: one buffer is filled while the other is written.
pub(super) struct RankFileWriter {
    file: File,
    header: RankFileHeader,
    /// The bytes that have not been written yet.
    buffer: AlignedBuffer,
    filled_bytes: usize,
    /// The position of the buffer in the file.
    position: u64,
    disk: DiskWriter,
}

/// The header before the data.
struct RankFileHeader {
    tensors: Map<String, Value>,
    name: String,
    bytes: usize,
    data: u64,
}

impl RankFileHeader {
    /// Creates the header of `rank`'s file; `names` are those of the parameters.
    fn new(layout: &RankFileLayout, names: &[&str], states: &[String], rank: usize) -> Self {
        let mut tensors = Map::new();
        let mut end = 0u64;
        for (number, state) in states.iter().enumerate() {
            let is_in = |param: usize| layout.states[number][param] && layout.is_in(param, rank);
            for (param, name) in names.iter().enumerate().filter(|(param, _)| is_in(*param)) {
                let (start, len) = (end, layout.shard(number, param, rank).len());
                end += len as u64 * 4;
                let info = json!({"dtype": "F32", "shape": [len], "data_offsets": [start, end]});
                tensors.insert(format!("{state}.{name}"), info);
            }
        }
        let mut header = Self { tensors, name: file_name(rank, layout.world_size), bytes: 0, data: end };
        let blocks = end.div_ceil(BLOCK as u64) as usize;
        header.bytes = (8 + header.text(&vec![0; blocks]).len()).next_multiple_of(PAGE);
        header
    }

    /// Returns the header's JSON, whose length does not depend on the checksums.
    fn text(&self, checksums: &[u64]) -> String {
        let blocks: String = checksums.iter().map(|sum| format!("{sum:016x}")).collect();
        let mut map = self.tensors.clone();
        map.insert("__metadata__".into(), json!({"block_bytes": BLOCK.to_string(), "block_checksums": blocks}));
        Value::Object(map).to_string()
    }
}

impl RankFileWriter {
    /// Creates the file of `rank` in `folder`, which must not contain it yet.
    pub fn create(
        folder: &Path,
        layout: &RankFileLayout,
        names: &[&str],
        states: &[String],
        rank: usize,
    ) -> IoResult<Self> {
        let header = RankFileHeader::new(layout, names, states, rank);
        let path = folder.join(&header.name);
        let file = File::create_new(&path)?;
        // Reserving space detects a disk that is too small before anything is written. If the file system cannot
        // reserve space, the lack of space is detected later.
        let reserved = fallocate(&file, FallocateFlags::empty(), 0, header.bytes as u64 + header.data);
        if let Err(error @ (Errno::NOSPC | Errno::DQUOT)) = reserved {
            return Err(error.into());
        }
        let disk = DiskWriter::start(&path, WRITE_BUFFER_BYTES)?;
        let position = header.bytes as u64;
        Ok(Self { file, header, buffer: AlignedBuffer::new(WRITE_BUFFER_BYTES), filled_bytes: 0, position, disk })
    }

    /// Writes full blocks if there is no room for `elements` more elements; `elements` must be at most [`PIECE`].
    pub fn make_room(&mut self, elements: usize) -> IoResult<()> {
        if self.filled_bytes + elements * 4 <= self.buffer.len() {
            return Ok(());
        }
        let mut next = self.disk.spare()?;
        let full_blocks = self.filled_bytes - self.filled_bytes % BLOCK;
        let rest = &self.buffer.bytes_mut()[full_blocks..self.filled_bytes];
        next.bytes_mut()[..rest.len()].copy_from_slice(rest);
        self.filled_bytes = rest.len();
        self.disk.write(std::mem::replace(&mut self.buffer, next), full_blocks, self.position);
        self.position += full_blocks as u64;
        Ok(())
    }

    /// Appends values, for which there must be room.
    pub fn append(&mut self, values: FlatRef<'_>) {
        let start = self.filled_bytes / 4;
        self.buffer.elements(DType::F32, start..start + values.len()).copy_cast(values);
        self.filled_bytes += values.len() * 4;
    }

    /// Writes the remaining data and the header, and syncs the file to disk.
    pub fn finish(self) -> IoResult<FileEntry> {
        self.disk.write(self.buffer, self.filled_bytes, self.position);
        let text = self.header.text(&self.disk.finish()?);
        let mut header = Vec::with_capacity(self.header.bytes);
        header.extend((self.header.bytes as u64 - 8).to_le_bytes());
        header.extend(text.as_bytes());
        // The format allows spaces after the JSON.
        header.resize(self.header.bytes, b' ');
        self.file.write_all_at(&header, 0)?;
        self.file.sync_all()?;
        Ok(FileEntry {
            name: self.header.name,
            bytes: self.header.bytes as u64 + self.header.data,
            header_bytes: self.header.bytes as u64,
            header_checksum: format!("{:016x}", XxHash3_64::oneshot(&header)),
            host: None,
        })
    }
}

/// A file that is being read. All data is checked before it is returned.
pub(super) struct RankFileReader {
    path: PathBuf,
    file: File,
    data_start: u64,
    data_len: u64,
    checksums: Vec<u64>,
    /// The block that was read last.
    block: Vec<u8>,
    index: Option<usize>,
}

impl RankFileReader {
    /// Opens the file of `rank` and checks its length and its header.
    pub fn open(folder: &Path, manifest: &Manifest, rank: usize) -> Result<Self> {
        let entry = &manifest.files[rank];
        let path = folder.join(&entry.name);
        let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: path.clone(), problem });
        let unreadable = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => wrong(entry.missing()),
            _ => wrong(format!("{e}; make it readable, or load another tag")),
        };
        let file = files::open(&path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?.len();
        if found != entry.bytes {
            let (found, bytes) = (counted(found, "byte"), entry.bytes);
            return Err(wrong(format!("it has {found}, but {bytes} were written; load another tag")));
        }
        let header_bytes = usize::try_from(entry.header_bytes).map_err(|e| wrong(e.to_string()))?;
        let mut header = vec![0; header_bytes];
        file.read_exact_at(&mut header, 0).map_err(unreadable)?;
        if format!("{:016x}", XxHash3_64::oneshot(&header)) != entry.header_checksum {
            return Err(wrong("its header is damaged, or it is a different file; load another tag".into()));
        }
        let data_len = entry.bytes - entry.header_bytes;
        let checksums = checksums_in(&header, data_len.div_ceil(BLOCK as u64))
            .ok_or_else(|| wrong("its header has no checksums of its data; load another tag".into()))?;
        Ok(Self { path, file, data_start: entry.header_bytes, data_len, checksums, block: Vec::new(), index: None })
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.checksums.len()
    }

    /// Returns the blocks that contain bytes `range` of the data.
    pub fn blocks_of(range: &Range<u64>) -> Range<usize> {
        (range.start / BLOCK as u64) as usize..range.end.div_ceil(BLOCK as u64) as usize
    }

    /// Reads a block and compares it with its checksum.
    pub fn check(&mut self, block: usize) -> Result<&[u8]> {
        if self.index != Some(block) {
            self.index = None;
            let at = block as u64 * BLOCK as u64;
            let len = (self.data_len - at).min(BLOCK as u64) as usize;
            self.block.resize(len, 0);
            let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: self.path.clone(), problem });
            let from = self.data_start + at;
            self.file
                .read_exact_at(&mut self.block, from)
                .map_err(|e| wrong(format!("{e} at byte {from}; load another tag")))?;
            if XxHash3_64::oneshot(&self.block) != self.checksums[block] {
                let to = from + len as u64;
                return Err(wrong(format!(
                    "bytes {from} to {to} are damaged: their checksum differs from the one written; load another tag"
                )));
            }
            self.index = Some(block);
        }
        Ok(&self.block)
    }

    /// Reads bytes of the file from `at` on: all within the header, which [`open`](Self::open) has checked, or all
    /// within one block of the data, which is checked here.
    pub fn read_at(&mut self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let Some(at_data) = at.checked_sub(self.data_start) else {
            let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: self.path.clone(), problem });
            return self
                .file
                .read_exact_at(bytes, at)
                .map_err(|e| wrong(format!("{e} at byte {at}; load another tag")));
        };
        let range = at_data..at_data + bytes.len() as u64;
        self.read(range, |part| bytes.copy_from_slice(part))
    }

    /// Passes bytes `range` of the data to `take`, piece by piece.
    pub fn read(&mut self, range: Range<u64>, mut take: impl FnMut(&[u8])) -> Result<()> {
        let mut at = range.start;
        for block in Self::blocks_of(&range) {
            let start = block as u64 * BLOCK as u64;
            let bytes = self.check(block)?;
            let end = range.end.min(start + bytes.len() as u64);
            take(&bytes[(at - start) as usize..(end - start) as usize]);
            at = end;
        }
        Ok(())
    }
}

/// Returns the checksums in a header, if there are as many as there are blocks.
fn checksums_in(header: &[u8], blocks: u64) -> Option<Vec<u64>> {
    let json: Value = serde_json::from_slice(header.get(8..)?).ok()?;
    let metadata = json.get("__metadata__")?;
    let text = metadata.get("block_checksums")?.as_str()?;
    let is_valid = metadata.get("block_bytes")?.as_str()? == BLOCK.to_string() && text.len() as u64 == blocks * 16;
    let parse = |hex: &[u8]| u64::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok();
    if is_valid { text.as_bytes().chunks(16).map(parse).collect() } else { None }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::layout::ShardCut;
    use crate::zero::share::state_access::pieces;
    use std::collections::BTreeMap;

    #[test]
    fn a_file_of_several_buffers_holds_every_value_and_the_checksum_of_every_block() {
        let folder = tempfile::tempdir().unwrap();
        // Neither pieces, blocks nor pages end at parameter boundaries.
        let numels = [WRITE_BUFFER_BYTES / 4 + 12_345, 3, WRITE_BUFFER_BYTES / 2 + 1];
        let cuts = numels.map(ShardCut::anywhere).to_vec();
        let (positions, states) = (vec![0; 3], vec![vec![true; 3]]);
        let layout =
            RankFileLayout { world_size: 1, pipeline_ranks: 1, positions, cuts, states, lens: BTreeMap::new() };
        let mut file = RankFileWriter::create(folder.path(), &layout, &["a", "b", "c"], &["fp32".into()], 0).unwrap();
        let value = |i: usize| (i.wrapping_mul(2_654_435_761) >> 8) as u32 as f32;
        let mut before = 0;
        for numel in numels {
            for piece in pieces(&(0..numel)) {
                file.make_room(piece.len()).unwrap();
                let values: Vec<f32> = piece.map(|i| value(before + i)).collect();
                file.append(FlatRef::F32(&values));
            }
            before += numel;
        }
        let entry = file.finish().unwrap();
        let bytes = std::fs::read(folder.path().join(&entry.name)).unwrap();
        assert_eq!(bytes.len() as u64, entry.bytes);
        let (header, data) = bytes.split_at(entry.header_bytes as usize);
        assert_eq!(format!("{:016x}", XxHash3_64::oneshot(header)), entry.header_checksum);
        assert_eq!(data.len(), before * 4);
        assert!(data.chunks(4).enumerate().all(|(i, b)| b == value(i).to_le_bytes()));
        let blocks = data.chunks(BLOCK).map(XxHash3_64::oneshot).collect::<Vec<u64>>();
        assert_eq!(checksums_in(header, blocks.len() as u64), Some(blocks));
    }
}
