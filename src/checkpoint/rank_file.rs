//! The file of one rank: a safetensors file whose metadata holds a checksum of every block of its data.

use super::layout::{BLOCK, Layout, PAGE};
use super::manifest::{FileEntry, Manifest, file_name};
use crate::error::{Error, Result};
use crate::offload::Aligned;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Result as IoResult};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// A file under construction.
pub(super) struct RankWriter {
    file: File,
    /// The same file around the page cache, where the file system allows that: several times faster (measured).
    direct: Option<File>,
    header: Header,
    /// What has not been written yet, less than a block.
    block: Aligned,
    filled: usize,
    /// Of the blocks that have been written.
    checksums: Vec<u64>,
}

/// The text before the data.
struct Header {
    tensors: Map<String, Value>,
    name: String,
    bytes: usize,
    data: u64,
}

impl Header {
    /// The header of `rank`'s file; `names` are the parameters'.
    fn new(layout: &Layout, names: &[&str], states: &[String], rank: usize) -> Self {
        let mut tensors = Map::new();
        let mut end = 0u64;
        for state in states {
            for (param, name) in names.iter().enumerate() {
                let (start, len) = (end, layout.shard(param, rank).len());
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

    /// Its JSON: as long for any checksums.
    fn text(&self, checksums: &[u64]) -> String {
        let blocks: String = checksums.iter().map(|sum| format!("{sum:016x}")).collect();
        let mut map = self.tensors.clone();
        map.insert("__metadata__".into(), json!({"block_bytes": BLOCK.to_string(), "block_checksums": blocks}));
        Value::Object(map).to_string()
    }
}

impl RankWriter {
    /// Begins the file of `rank` in `folder`, which must not have it.
    pub fn create(folder: &Path, layout: &Layout, names: &[&str], states: &[String], rank: usize) -> IoResult<Self> {
        let header = Header::new(layout, names, states, rank);
        let path = folder.join(&header.name);
        let file = File::create_new(&path)?;
        // So that a disk that is too small is found before anything is written. Where that cannot be asked, later.
        let reserved = fallocate(&file, FallocateFlags::empty(), 0, header.bytes as u64 + header.data);
        if let Err(error @ (Errno::NOSPC | Errno::DQUOT)) = reserved {
            return Err(error.into());
        }
        let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(path).ok();
        Ok(Self { file, direct, header, block: Aligned::new(BLOCK), filled: 0, checksums: Vec::new() })
    }

    /// Appends values.
    pub fn append(&mut self, mut bytes: &[u8]) -> IoResult<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK - self.filled));
            self.block.bytes_mut()[self.filled..self.filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = later;
            if self.filled == BLOCK {
                self.write_block()?;
            }
        }
        Ok(())
    }

    fn write_block(&mut self) -> IoResult<()> {
        let at = self.header.bytes as u64 + self.checksums.len() as u64 * BLOCK as u64;
        let bytes = &self.block.bytes_mut()[..self.filled];
        self.checksums.push(xxh3_64(bytes));
        // A part of a page goes through the page cache.
        let direct = self.direct.as_ref().filter(|_| self.filled.is_multiple_of(PAGE));
        match direct.map(|direct| direct.write_all_at(bytes, at)) {
            Some(Err(e)) if e.kind() == ErrorKind::InvalidInput => {
                self.direct = None;
                self.file.write_all_at(bytes, at)?;
            }
            Some(result) => result?,
            None => self.file.write_all_at(bytes, at)?,
        }
        self.filled = 0;
        Ok(())
    }

    /// Writes the header and brings all to the disk.
    pub fn finish(mut self) -> IoResult<FileEntry> {
        if self.filled > 0 {
            self.write_block()?;
        }
        let text = self.header.text(&self.checksums);
        let mut header = Vec::with_capacity(self.header.bytes);
        header.extend((self.header.bytes as u64 - 8).to_le_bytes());
        header.extend(text.as_bytes());
        // The format allows spaces there.
        header.resize(self.header.bytes, b' ');
        self.file.write_all_at(&header, 0)?;
        self.file.sync_all()?;
        Ok(FileEntry {
            name: self.header.name,
            bytes: self.header.bytes as u64 + self.header.data,
            header_bytes: self.header.bytes as u64,
            header_checksum: format!("{:016x}", xxh3_64(&header)),
        })
    }
}

/// A file that is read. Nothing leaves it unchecked.
pub(super) struct RankFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    data_len: u64,
    checksums: Vec<u64>,
    /// The block that was read last.
    block: Vec<u8>,
    index: Option<usize>,
}

impl RankFile {
    /// Opens the file of `rank` and checks its length and its header.
    pub fn open(folder: &Path, manifest: &Manifest, rank: usize) -> Result<Self> {
        let entry = &manifest.files[rank];
        let path = folder.join(&entry.name);
        let wrong = |problem: String| Error::Checkpoint { path: path.clone(), problem };
        let unreadable = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => wrong("the file is missing. Load another tag".into()),
            _ => wrong(format!("{e}. Make it readable, or load another tag")),
        };
        let file = File::open(&path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?.len();
        if found != entry.bytes {
            let bytes = entry.bytes;
            return Err(wrong(format!("it has {found} bytes, and {bytes} were written. Load another tag")));
        }
        let header_bytes = usize::try_from(entry.header_bytes).map_err(|e| wrong(e.to_string()))?;
        let mut header = vec![0; header_bytes];
        file.read_exact_at(&mut header, 0).map_err(unreadable)?;
        if format!("{:016x}", xxh3_64(&header)) != entry.header_checksum {
            return Err(wrong("its header is damaged, or it is another file. Load another tag".into()));
        }
        let data_len = entry.bytes - entry.header_bytes;
        let checksums = checksums_in(&header, data_len.div_ceil(BLOCK as u64))
            .ok_or_else(|| wrong("its header has no checksums of its data. Load another tag".into()))?;
        Ok(Self { path, file, data_start: entry.header_bytes, data_len, checksums, block: Vec::new(), index: None })
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.checksums.len()
    }

    /// The blocks that bytes `range` of the data lie in.
    pub fn blocks_of(range: &Range<u64>) -> Range<usize> {
        (range.start / BLOCK as u64) as usize..range.end.div_ceil(BLOCK as u64) as usize
    }

    /// Reads a block and compares its checksum.
    pub fn check(&mut self, block: usize) -> Result<&[u8]> {
        if self.index != Some(block) {
            self.index = None;
            let at = block as u64 * BLOCK as u64;
            let len = (self.data_len - at).min(BLOCK as u64) as usize;
            self.block.resize(len, 0);
            let wrong = |problem: String| Error::Checkpoint { path: self.path.clone(), problem };
            let from = self.data_start + at;
            self.file
                .read_exact_at(&mut self.block, from)
                .map_err(|e| wrong(format!("{e} at byte {from}. Load another tag")))?;
            if xxh3_64(&self.block) != self.checksums[block] {
                let to = from + len as u64;
                return Err(wrong(format!(
                    "bytes {from} to {to} are damaged: they have another checksum than when they were written. Load another \
                     tag"
                )));
            }
            self.index = Some(block);
        }
        Ok(&self.block)
    }

    /// Gives the values of bytes `range` of the data to `take`, piece by piece.
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

/// The checksums in a header, if there are as many as there are blocks.
fn checksums_in(header: &[u8], blocks: u64) -> Option<Vec<u64>> {
    let json: Value = serde_json::from_slice(header.get(8..)?).ok()?;
    let metadata = json.get("__metadata__")?;
    let text = metadata.get("block_checksums")?.as_str()?;
    let is_right = metadata.get("block_bytes")?.as_str()? == BLOCK.to_string() && text.len() as u64 == blocks * 16;
    let parse = |hex: &[u8]| u64::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok();
    if is_right { text.as_bytes().chunks(16).map(parse).collect() } else { None }
}
