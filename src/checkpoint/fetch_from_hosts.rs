//! Fetches parts of a checkpoint that only other hosts have, through the communicator, into a folder on this host.
//!
//! ```text
//!   each rank    for each header and block, a bit: needed, and not on its host -> all
//!   each round   one piece from every rank that has some to send               -> all; hosts that need it write it
//! ```
//!
//! The ranks of a host take turns sending. A fetched file has the length of the original, with holes for the parts that
//! no rank of the receiving host needs. Everything is checked: a block of a rank file is compared with its checksum
//! before it is sent, and again when the receiver reads it; the file of buffers is checked by the receiver only.

use super::folder::{FETCHED_PREFIX, write_error};
use super::locate::{LocatedCheckpoint, files};
use super::rank_agreement::remote_failure;
use super::rank_file::RankFileReader;
use super::rank_file_layout::BLOCK;
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree, gather, texts};
use crate::error::{CheckpointError, Error, Result};
use crate::files::open;
use crate::notice::emit;
use crate::util::counted;
use rustix::fs::{FlockOperation, flock};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The number of bytes that a rank sends in a round; each rank receives the bytes of all ranks.
const ROUND_BYTES: u64 = 256 << 10;

/// The folder with the data from other hosts. It is removed when the rank that created it drops this value.
pub(super) struct FetchedFiles {
    path: PathBuf,
    _folder_and_lock: Option<(TempDir, File)>,
}

impl FetchedFiles {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A part of a file: its header or a block of its data. The file of buffers has no header, only blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FilePart {
    file: usize,
    /// The index of the part in its file: 0 is the header, 1 the first block.
    number: usize,
}

/// The parts of all files, indexed consecutively.
struct FileParts {
    /// The length of each file and of its header.
    files: Vec<(u64, u64)>,
    /// The index of the first part of each file, then the total number of parts.
    starts: Vec<usize>,
}

impl FileParts {
    fn new(located: &LocatedCheckpoint) -> Self {
        let header = |file: usize| located.manifest.files.get(file).map_or(0, |entry| entry.header_bytes);
        let files: Vec<_> = files(&located.manifest).enumerate().map(|(i, (_, bytes))| (bytes, header(i))).collect();
        let count = |(bytes, header): &(u64, u64)| 1 + (bytes - header).div_ceil(BLOCK as u64) as usize;
        let starts = files.iter().scan(0, |at, file| {
            *at += count(file);
            Some(*at)
        });
        Self { starts: std::iter::once(0).chain(starts).collect(), files }
    }

    fn count(&self, file: usize) -> usize {
        self.starts[file + 1] - self.starts[file]
    }

    /// Iterates over all parts with their indices.
    fn iter(&self) -> impl Iterator<Item = (usize, FilePart)> + '_ {
        let parts_of = |file: usize| (0..self.count(file)).map(move |number| FilePart { file, number });
        (0..self.files.len()).flat_map(parts_of).enumerate()
    }

    /// Returns the part's byte range in its file.
    fn bytes(&self, part: FilePart) -> Range<u64> {
        let (bytes, header) = self.files[part.file];
        match part.number {
            0 => 0..header,
            block => {
                let start = header + (block as u64 - 1) * BLOCK as u64;
                start..bytes.min(start + BLOCK as u64)
            }
        }
    }
}

/// Fetches the parts that this rank needs and that this host's folder lacks: the `needed` blocks of rank files, with
/// the headers of these files, and all buffers. Returns `None` if no host lacks a needed part. Collective.
///
/// # Errors
/// Fails on all ranks if a file cannot be read or written, and if a collective fails.
pub(super) fn fetch(
    comm: &dyn Communicator,
    dir: &Path,
    located: &LocatedCheckpoint,
    needed: &BTreeMap<usize, BTreeSet<usize>>,
) -> Result<Option<FetchedFiles>, JointOperationFailure> {
    let (hosts, parts) = (&located.hosts, FileParts::new(located));
    let home = hosts.first(comm.rank());
    let mut bits = vec![0u8; parts.starts[parts.files.len()].div_ceil(8)];
    for (at, part) in parts.iter().filter(|(_, part)| !located.hosts_of_files[part.file].contains(&home)) {
        let is_needed = match needed.get(&part.file) {
            Some(blocks) => part.number == 0 || blocks.contains(&(part.number - 1)),
            None => part.file == located.manifest.files.len(),
        };
        bits[at / 8] |= u8::from(is_needed) << (at % 8);
    }
    let bits_of_ranks = gather(comm, bits)?;
    let is_set = |bits: &[u8], at: usize| bits[at / 8] >> (at % 8) & 1 == 1;
    let is_needed_by = |at: usize, first: usize| hosts.ranks(first).any(|rank| is_set(&bits_of_ranks[rank], at));
    // The first host that has a part sends it; its ranks take turns.
    let mut queues: Vec<Vec<FilePart>> = vec![Vec::new(); comm.size()];
    let mut turns = vec![0; comm.size()];
    for (at, part) in parts.iter().filter(|(at, _)| bits_of_ranks.iter().any(|bits| is_set(bits, *at))) {
        let first = located.hosts_of_files[part.file][0];
        let ranks: Vec<usize> = hosts.ranks(first).collect();
        queues[ranks[turns[first] % ranks.len()]].push(part);
        debug_assert!(!is_needed_by(at, first));
        turns[first] += 1;
    }
    if queues.iter().all(Vec::is_empty) {
        return Ok(None);
    }
    let bytes: u64 = queues.iter().flatten().map(|part| parts.bytes(*part)).map(|range| range.end - range.start).sum();
    if comm.rank() == 0 {
        let tag = &located.manifest.tag;
        let (bytes, pronoun) = (counted(bytes, "byte"), if bytes == 1 { "it" } else { "them" });
        emit(&format!("checkpoint {tag}: sending {bytes} to hosts that lack {pronoun}"));
    }
    let folder_and_lock = if hosts.makes_folder() { new_folder(dir).map(Some) } else { Ok(None) };
    let folder_and_lock = agree(comm, folder_and_lock.map_err(|e| write_error(dir, &e)), remote_failure(dir))?;
    let name = folder_and_lock.as_ref().and_then(|(folder, _)| folder.path().file_name());
    let name = name.map(|name| name.to_string_lossy());
    let names = texts(comm, &name.unwrap_or_default())?;
    let fetched = FetchedFiles { path: dir.join(&names[home]), _folder_and_lock: folder_and_lock };
    let is_needed_here = |part: FilePart| is_needed_by(parts.starts[part.file] + part.number, home);
    let mut sender = PartReader { located, open: None };
    let mut receiver = PartWriter { folder: fetched.path(), located, parts: &parts, open: BTreeMap::new() };
    let mut streams: Vec<SendQueue<'_>> = queues.into_iter().map(|queue| SendQueue::new(queue, &parts)).collect();
    let mut failure = None;
    loop {
        let round: Vec<_> = streams.iter_mut().map(Iterator::next).collect();
        if round.iter().all(Option::is_none) {
            break;
        }
        // The first byte indicates whether the sender has failed.
        let mut message = vec![0u8; 1 + ROUND_BYTES as usize];
        if let (Some((part, at)), None) = (&round[comm.rank()], &failure) {
            let (bytes, start) = (&mut message[1..][..(at.end - at.start) as usize], at.start);
            failure = sender.read(*part, start, bytes).err();
        }
        message[0] = u8::from(failure.is_some());
        let messages = gather(comm, message)?;
        if messages.iter().any(|message| message[0] != 0) {
            break;
        }
        for (piece, message) in round.iter().zip(&messages).filter(|_| hosts.makes_folder()) {
            let Some((part, at)) = piece else { continue };
            if failure.is_none() && is_needed_here(*part) {
                failure = receiver.write(*part, at.start, &message[1..][..(at.end - at.start) as usize]).err();
            }
        }
    }
    agree(comm, failure.map_or(Ok(()), Err), remote_failure(&located.path))?;
    Ok(Some(fetched))
}

/// Creates a folder in `dir` that no save removes.
fn new_folder(dir: &Path) -> std::io::Result<(TempDir, File)> {
    super::folder::create_all(dir)?;
    let folder = tempfile::Builder::new().prefix(FETCHED_PREFIX).tempdir_in(dir)?;
    let lock = File::open(folder.path())?;
    _ = flock(&lock, FlockOperation::NonBlockingLockExclusive);
    Ok((folder, lock))
}

/// A queue of the pieces that a rank sends.
struct SendQueue<'a> {
    parts: &'a FileParts,
    queue: std::vec::IntoIter<FilePart>,
    /// The part that is being sent, and its remaining bytes.
    rest: Option<(FilePart, Range<u64>)>,
}

impl<'a> SendQueue<'a> {
    fn new(queue: Vec<FilePart>, parts: &'a FileParts) -> Self {
        Self { parts, queue: queue.into_iter(), rest: None }
    }
}

impl Iterator for SendQueue<'_> {
    type Item = (FilePart, Range<u64>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((part, rest)) = self.rest.as_mut().filter(|(_, rest)| !rest.is_empty()) {
                let piece = rest.start..rest.end.min(rest.start + ROUND_BYTES);
                rest.start = piece.end;
                return Some((*part, piece));
            }
            let part = self.queue.next()?;
            self.rest = Some((part, self.parts.bytes(part)));
        }
    }
}

/// The reader of the bytes that this rank sends.
struct PartReader<'a> {
    located: &'a LocatedCheckpoint,
    open: Option<(usize, PartSource)>,
}

enum PartSource {
    Rank(RankFileReader),
    Buffers(File),
}

impl PartReader<'_> {
    /// Reads bytes of the file, starting at `at`; all of them are within one part.
    fn read(&mut self, part: FilePart, at: u64, bytes: &mut [u8]) -> Result<()> {
        let LocatedCheckpoint { path, manifest, .. } = self.located;
        if self.open.as_ref().is_none_or(|(file, _)| *file != part.file) {
            let source = match (manifest.files.get(part.file), &manifest.buffers) {
                (None, Some(entry)) => {
                    PartSource::Buffers(open(path.join(&entry.name)).map_err(|e| unreadable(path, &e))?)
                }
                _ => PartSource::Rank(RankFileReader::open(path, manifest, part.file)?),
            };
            self.open = Some((part.file, source));
        }
        match self.open.as_mut().map(|(_, source)| source) {
            Some(PartSource::Rank(file)) => file.read_at(at, bytes),
            Some(PartSource::Buffers(file)) => file.read_exact_at(bytes, at).map_err(|e| unreadable(path, &e)),
            None => unreachable!("it was opened"),
        }
    }
}

fn unreadable(path: &Path, why: &std::io::Error) -> Error {
    let problem = format!("its buffers cannot be read: {why}; make them readable, or load another tag");
    CheckpointError::Unusable { path: path.to_owned(), problem }.into()
}

/// The writer of the bytes that this host needs.
struct PartWriter<'a> {
    folder: &'a Path,
    located: &'a LocatedCheckpoint,
    parts: &'a FileParts,
    open: BTreeMap<usize, File>,
}

impl PartWriter<'_> {
    fn write(&mut self, part: FilePart, at: u64, bytes: &[u8]) -> Result<()> {
        let mut write = || {
            let file = match self.open.entry(part.file) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    let name = files(&self.located.manifest).nth(part.file).map(|(name, _)| name).unwrap_or_default();
                    let file = File::create_new(self.folder.join(name))?;
                    file.set_len(self.parts.files[part.file].0)?;
                    entry.insert(file)
                }
            };
            file.write_all_at(bytes, at)
        };
        write().map_err(|e| write_error(self.folder, &e))
    }
}
