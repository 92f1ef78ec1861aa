//! Samples in a mapped file.
//!
//! The file is little-endian, in words of four bytes: a header of 16 words; each sample's ids, then one bit per id, set
//! if the id is a target, padded to whole words; an index of 8 words per sample (the offset of its ids in words, as
//! two words; the number of ids; the label; the line, as two words; a digest of ids and bits, as two words); a report
//! as JSON. The header contains a fingerprint of what the file was built from, the numbers of samples and tokens, the
//! positions of the file's parts, and a digest of the header, the index and the report. The header of an incomplete file
//! consists of zeros. All digests are checked when a file is opened, so a damaged file is rebuilt.
//!
//! The process that builds a file locks a second file next to it. Others wait for the lock and then map the result. The
//! kernel releases the lock of a process that exits before the file is complete.

use super::sample::Sample;
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use candle_zero::files::{self, ScratchFolder, WRITING};
use candle_zero::util::cache_home;
use memmap2::Mmap;
use rayon::prelude::*;
use std::ffi::OsStr;
use std::fs::File;
use std::hash::Hasher as _;
use std::io::{BufWriter, Read as _, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// The first bytes of a file of this format.
const MAGIC: &[u8; 8] = b"czsamp03";
const HEADER_BYTES: usize = 64;
/// The size of an index entry in bytes.
const INDEX_ENTRY_BYTES: usize = 32;

/// Returns the default folder for sample files: `candle-zero/samples` in `$XDG_CACHE_HOME` or `~/.cache`.
///
/// # Errors
/// [`FinetuneError::NoCache`] if neither is known.
pub fn default_cache() -> Result<PathBuf> {
    Ok(cache_root()?.join("samples"))
}

/// Creates the folder for samples, readable only by its owner, because data may be private. An existing folder keeps
/// its permissions, unless it is in candle-zero's own cache. Removes files that killed runs have left in the folder.
pub(super) fn private_cache(folder: &Path) -> std::io::Result<()> {
    let root = cache_root().ok().filter(|root| folder.starts_with(root));
    match &root {
        Some(root) => {
            files::private_folder(root)?;
            files::private_folder(folder)?;
        }
        None if folder.is_dir() => {}
        None => files::private_folder(folder)?,
    }
    files::sweep(folder, WRITING);
    files::sweep_locks(folder, is_lock);
    Ok(())
}

/// Returns whether a file name is that of a sample file's lock.
fn is_lock(name: &OsStr) -> bool {
    let fingerprint = name.to_str().and_then(|name| name.strip_suffix(".lock")?.rsplit_once('-')).map(|(_, end)| end);
    fingerprint.is_some_and(|end| end.len() == 16 && end.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Returns candle-zero's folder in the user's cache.
pub(crate) fn cache_root() -> Result<PathBuf> {
    let home = std::env::home_dir().filter(|home| home.is_absolute());
    let folder = cache_home(std::env::var_os("XDG_CACHE_HOME"), home).ok_or(FinetuneError::NoCache)?;
    Ok(folder.join("candle-zero"))
}

/// A mapped sample file.
#[derive(Debug)]
pub(super) struct SampleCache {
    map: Mmap,
    samples: usize,
    tokens: u64,
    /// The start of the index in bytes.
    index: usize,
    /// The start of the report in bytes.
    report: usize,
}

/// A sample in a mapped file.
#[derive(Debug, Clone, Copy)]
pub struct SampleRef<'a> {
    /// The ids as little-endian u32.
    ids: &'a [u8],
    /// A target bit for each id, in words.
    bits: &'a [u8],
    /// The index of the sample's label, if it has one.
    pub label: u32,
    /// The line that the sample comes from, counted from 1.
    pub line: u64,
}

impl<'a> SampleRef<'a> {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len() / 4
    }

    /// Returns whether the sample has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Iterates over the tokens.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.ids.chunks_exact(4).map(word)
    }

    /// Returns whether token `i` is to be predicted.
    ///
    /// # Panics
    ///
    /// Panics if there is no token `i`.
    pub fn is_target(&self, i: usize) -> bool {
        assert!(i < self.len(), "token {i} of {}", self.len());
        self.bits[i / 8] >> (i % 8) & 1 == 1
    }

    /// Returns the number of tokens that are predicted: all targets, not counting the sample's first token.
    pub fn target_count(&self) -> usize {
        let all: u32 = self.bits.iter().map(|byte| byte.count_ones()).sum();
        all as usize - usize::from(!self.is_empty() && self.is_target(0))
    }

    /// Returns a copy as a [`Sample`].
    pub fn to_sample(&self) -> Sample {
        Sample { ids: self.ids().collect(), targets: (0..self.len()).map(|i| self.is_target(i)).collect() }
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn long(bytes: &[u8]) -> u64 {
    u64::from(word(bytes)) | u64::from(word(&bytes[4..])) << 32
}

impl SampleCache {
    /// Maps the file at `path` if it is complete and was built from the inputs that `fingerprint` identifies. The inner
    /// error explains why it is not mapped.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, unless it does not exist.
    pub(super) fn open(path: &Path, fingerprint: u64) -> Result<Result<Self, &'static str>> {
        let io = |source| Error::Io { action: "read", path: path.into(), source };
        let file = match files::open(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Err("there is no file")),
            file => file.map_err(io)?,
        };
        // Earlier versions may have made the file readable by others.
        files::tighten(path);
        if file.metadata().map_err(io)?.len() < HEADER_BYTES as u64 {
            return Ok(Err("it is truncated"));
        }
        // SAFETY: the map is read-only and private to this value. Sample files get their names only when they are
        // complete, and are replaced, never changed. If another process nevertheless writes into such a file, it
        // changes numbers that are checked wherever they are used as positions.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self::check(map, fingerprint))
    }

    fn check(map: Mmap, fingerprint: u64) -> Result<Self, &'static str> {
        if &map[..8] != MAGIC {
            return Err("it has a different format");
        }
        let header: Vec<u64> = map[8..HEADER_BYTES].chunks_exact(8).map(long).collect();
        let [found, samples, tokens, index, report, end, digest] = header[..] else { return Err("it is truncated") };
        if end > map.len() as u64 {
            return Err("it is truncated");
        }
        if end < map.len() as u64 {
            return Err("it has bytes after its end");
        }
        let are_ordered = HEADER_BYTES as u64 <= index && index <= report && report <= end;
        if !are_ordered || samples.checked_mul(INDEX_ENTRY_BYTES as u64) != Some(report - index) {
            return Err("it is damaged");
        }
        let mut hash = XxHash3_64::new();
        hash.write(&map[..HEADER_BYTES - 8]);
        hash.write(&map[index as usize..]);
        if digest != hash.finish() {
            return Err("it is damaged");
        }
        if found != fingerprint {
            return Err("it was built from different data, or with a different tokenizer, template or options");
        }
        let cache = Self { map, samples: samples as usize, tokens, index: index as usize, report: report as usize };
        match (0..cache.samples).into_par_iter().all(|i| cache.is_intact(i)) {
            true => Ok(cache),
            false => Err("it is damaged"),
        }
    }

    /// Returns whether the ids and targets of sample `i` are those that were written.
    fn is_intact(&self, i: usize) -> bool {
        let entry = self.entry(i);
        let start = usize::try_from(long(entry)).ok().and_then(|start| start.checked_mul(4));
        let bytes = word(&entry[8..]) as usize * 4 + (word(&entry[8..]) as usize).div_ceil(32) * 4;
        let end = start.and_then(|start| start.checked_add(bytes)).filter(|end| *end <= self.index);
        let range = start.zip(end).filter(|(start, _)| *start >= HEADER_BYTES);
        range.is_some_and(|(start, end)| XxHash3_64::oneshot(&self.map[start..end]) == long(&entry[24..]))
    }

    /// Returns a hash of the samples' ids, targets, labels and order, regardless of what they were built from.
    pub(super) fn content_fingerprint(&self) -> u64 {
        let mut hash = XxHash3_64::new();
        for i in 0..self.samples {
            // The number of ids, the label and the digest.
            let entry = self.entry(i);
            hash.write(&entry[8..16]);
            hash.write(&entry[24..]);
        }
        hash.finish()
    }

    /// Returns the fingerprint of everything that the samples were built from.
    pub(super) fn fingerprint(&self) -> u64 {
        long(&self.map[8..16])
    }

    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the report as it was written.
    pub(super) fn report(&self) -> &[u8] {
        &self.map[self.report..]
    }

    /// Returns the length of sample `i` in tokens.
    pub(super) fn length(&self, i: usize) -> usize {
        word(&self.entry(i)[8..]) as usize
    }

    fn entry(&self, i: usize) -> &[u8] {
        assert!(i < self.samples, "sample {i} of {}", self.samples);
        &self.map[self.index + i * INDEX_ENTRY_BYTES..][..INDEX_ENTRY_BYTES]
    }

    /// Returns sample `i`.
    ///
    /// # Panics
    ///
    /// Panics if the sample does not exist, or if the file was changed while it was mapped.
    pub(super) fn sample(&self, i: usize) -> SampleRef<'_> {
        let entry = self.entry(i);
        let (start, count) = (long(entry) as usize * 4, word(&entry[8..]) as usize);
        let (ids, rest) = self.map[start..self.index].split_at(count * 4);
        let bits = &rest[..count.div_ceil(32) * 4];
        SampleRef { ids, bits, label: word(&entry[12..]), line: long(&entry[16..]) }
    }
}

/// A writer of sample files.
pub(super) struct SampleCacheWriter {
    data: BufWriter<File>,
    /// The folder that contains the file until it gets its final name.
    scratch: ScratchFolder,
    /// The index, kept in a file until it is appended, because the index of many samples may not fit into memory.
    index: BufWriter<File>,
    /// The number of bytes written, including the header.
    at: u64,
    samples: u64,
    tokens: u64,
    bytes: Vec<u8>,
}

impl SampleCacheWriter {
    /// Creates a writer in a new folder next to `path`. If this run is killed, a later run removes the folder. Only
    /// this user can read the file.
    pub(super) fn new(path: &Path) -> std::io::Result<Self> {
        let folder = files::folder_of(path);
        let scratch = ScratchFolder::new(folder, WRITING)?;
        let file = File::options().write(true).create_new(true).mode(0o600).open(scratch.path().join("new"))?;
        let mut data = BufWriter::with_capacity(1 << 20, file);
        data.write_all(&[0; HEADER_BYTES])?;
        let index = BufWriter::new(tempfile::tempfile_in(folder)?);
        Ok(Self { data, scratch, index, at: HEADER_BYTES as u64, samples: 0, tokens: 0, bytes: vec![] })
    }

    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Appends a sample from line `line`.
    pub(super) fn push(&mut self, sample: &Sample, label: u32, line: u64) -> std::io::Result<()> {
        let count = u32::try_from(sample.ids.len()).map_err(|_| std::io::ErrorKind::FileTooLarge)?;
        self.bytes.clear();
        self.bytes.extend(sample.ids.iter().flat_map(|id| id.to_le_bytes()));
        for targets in sample.targets.chunks(32) {
            let bits = targets.iter().enumerate().fold(0, |bits, (i, target)| bits | u32::from(*target) << i);
            self.bytes.extend(bits.to_le_bytes());
        }
        self.data.write_all(&self.bytes)?;
        let mut entry = [0; INDEX_ENTRY_BYTES];
        entry[..8].copy_from_slice(&(self.at / 4).to_le_bytes());
        entry[8..12].copy_from_slice(&count.to_le_bytes());
        entry[12..16].copy_from_slice(&label.to_le_bytes());
        entry[16..24].copy_from_slice(&line.to_le_bytes());
        entry[24..].copy_from_slice(&XxHash3_64::oneshot(&self.bytes).to_le_bytes());
        self.index.write_all(&entry)?;
        self.at += self.bytes.len() as u64;
        self.samples += 1;
        self.tokens += u64::from(count);
        Ok(())
    }

    /// Completes the file and renames it to `path`.
    pub(super) fn finish(mut self, path: &Path, fingerprint: u64, report: &[u8]) -> std::io::Result<()> {
        let mut index = self.index.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        let report_at = self.at + index.stream_position()?;
        let end = report_at + report.len() as u64;
        let mut header = MAGIC.to_vec();
        for number in [fingerprint, self.samples, self.tokens, self.at, report_at, end] {
            header.extend(number.to_le_bytes());
        }
        let mut hash = XxHash3_64::new();
        hash.write(&header);
        index.seek(SeekFrom::Start(0))?;
        let mut piece = vec![0; 1 << 16];
        loop {
            let read = index.read(&mut piece)?;
            if read == 0 {
                break;
            }
            hash.write(&piece[..read]);
            self.data.write_all(&piece[..read])?;
        }
        hash.write(report);
        self.data.write_all(report)?;
        header.extend(hash.finish().to_le_bytes());
        let mut file = self.data.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header)?;
        file.sync_all()?;
        std::fs::rename(self.scratch.path().join("new"), path)?;
        files::sync_folder(files::folder_of(path))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn write(path: &Path, samples: &[Sample]) {
        let mut writer = SampleCacheWriter::new(path).unwrap();
        for (i, sample) in samples.iter().enumerate() {
            writer.push(sample, i as u32 % 3, i as u64 + 1).unwrap();
        }
        writer.finish(path, 7, b"{}").unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn samples_come_back_as_they_were(lengths in prop::collection::vec(0_usize..100, 0..20), seed: u64) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("x.samples");
            let number = |i: usize, j: usize| candle_zero::util::mix(seed ^ (i * 1000 + j) as u64);
            let sample = |(i, n): (usize, &usize)| Sample {
                ids: (0..*n).map(|j| number(i, j) as u32).collect(),
                targets: (0..*n).map(|j| number(i, j) >> 40 & 1 == 1).collect(),
            };
            let samples: Vec<Sample> = lengths.iter().enumerate().map(sample).collect();
            write(&path, &samples);
            let cache = SampleCache::open(&path, 7).unwrap().unwrap();
            prop_assert_eq!(cache.samples(), samples.len());
            prop_assert_eq!(cache.tokens(), lengths.iter().sum::<usize>() as u64);
            prop_assert_eq!(cache.report(), b"{}");
            for (i, sample) in samples.iter().enumerate() {
                let found = cache.sample(i);
                prop_assert_eq!(&found.to_sample(), sample);
                prop_assert_eq!(cache.length(i), sample.ids.len());
                prop_assert_eq!((found.label, found.line), (i as u32 % 3, i as u64 + 1));
                prop_assert_eq!(found.target_count(), sample.targets.iter().skip(1).filter(|t| **t).count());
            }
        }
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.samples");
        // The files of an unfinished writer, in a folder that is no longer locked.
        let writer = SampleCacheWriter::new(&path).unwrap();
        let killed = folder.path().join(format!("{WRITING}aaaaaa"));
        std::fs::create_dir(&killed).unwrap();
        for entry in std::fs::read_dir(writer.scratch.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), killed.join(entry.file_name())).unwrap();
        }
        assert!(killed.join("new").exists());
        drop(writer);
        // The folder of another program.
        let foreign = format!("{WRITING}bbbbbb");
        std::fs::create_dir(folder.path().join(&foreign)).unwrap();
        std::fs::write(folder.path().join(&foreign).join("new"), "mine").unwrap();
        let names = [".x.samples-abc", "x.samples-abc", "y.samples"];
        names.iter().for_each(|name| std::fs::write(folder.path().join(name), "").unwrap());
        write(&path, &[]);
        assert_eq!(std::fs::read(folder.path().join(&foreign).join("new")).unwrap(), b"mine");
        let remaining = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut remaining: Vec<_> = remaining.map(|name| name.into_string().unwrap()).collect();
        remaining.sort();
        assert_eq!(remaining, [foreign.as_str(), ".x.samples-abc", "x.samples", "x.samples-abc", "y.samples"]);
    }

    #[test]
    fn a_truncated_or_foreign_file_is_none_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.samples");
        let problem = |fingerprint| SampleCache::open(&path, fingerprint).unwrap().unwrap_err();
        assert_eq!(problem(7), "there is no file");
        write(&path, &[Sample { ids: vec![1, 2, 3], targets: vec![false, true, true] }]);
        assert!(problem(8).starts_with("it was built from different data"));
        let complete = std::fs::read(&path).unwrap();
        for bytes in 0..complete.len() {
            std::fs::write(&path, &complete[..bytes]).unwrap();
            assert_eq!(problem(7), "it is truncated", "{bytes}");
        }
        // Changes each byte of the header, of three ids and a word of bits, of the index and of the report.
        for byte in 0..complete.len() {
            let mut damaged = complete.clone();
            damaged[byte] ^= 0x10;
            std::fs::write(&path, damaged).unwrap();
            let message = problem(7);
            assert!(
                !message.starts_with("it was built from different data") && message != "there is no file",
                "{byte}: {message}"
            );
        }
        let mut longer = complete.clone();
        longer.push(0);
        std::fs::write(&path, longer).unwrap();
        assert_eq!(problem(7), "it has bytes after its end");
        std::fs::write(&path, [0; 100]).unwrap();
        assert_eq!(problem(7), "it has a different format");
    }
}
