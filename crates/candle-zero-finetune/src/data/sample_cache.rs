//! Samples in a file that is mapped.
//!
//! Little-endian, in words of four bytes: a header of 16 words; each sample's ids, then a bit for each that says whether
//! it is a target, in whole words; an index of 8 words a sample (offset of its ids in words as two, their number, label,
//! line as two, a digest of ids and bits as two); a report as JSON. The header has what the file was made of as one number,
//! where its parts lie, and a digest of itself, the index and the report: a file that was not written to its end has none.
//! All digests are checked when a file is opened, so one that was damaged is made again.
//!
//! Who makes a file has a lock on another one beside it. Others wait for that, and then map what was made; the kernel
//! releases the lock of a process that ends in between.

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
const HEADER: usize = 64;
/// Bytes of an entry of the index.
const ENTRY: usize = 32;

/// The folder for files of samples where none is given: `candle-zero/samples` in `$XDG_CACHE_HOME` or `~/.cache`.
///
/// # Errors
/// [`FinetuneError::NoCache`] where neither is known.
pub fn default_cache() -> Result<PathBuf> {
    Ok(own_cache()?.join("samples"))
}

/// Makes the folder for samples: what is private in data stays private in it. A folder that is there keeps its rights, but for
/// the library's own. What killed runs have left there goes.
pub(super) fn private_cache(folder: &Path) -> std::io::Result<()> {
    let own = own_cache().ok().filter(|own| folder.starts_with(own));
    match &own {
        Some(own) => {
            files::private_folder(own)?;
            files::private_folder(folder)?;
        }
        None if folder.is_dir() => {}
        None => files::private_folder(folder)?,
    }
    files::sweep(folder, WRITING);
    files::sweep_locks(folder, is_lock);
    Ok(())
}

/// Whether that is the name of the lock of a file of samples.
fn is_lock(name: &OsStr) -> bool {
    let fingerprint = name.to_str().and_then(|name| name.strip_suffix(".lock")?.rsplit_once('-')).map(|(_, end)| end);
    fingerprint.is_some_and(|end| end.len() == 16 && end.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// The folder of this library in the user's cache.
pub(crate) fn own_cache() -> Result<PathBuf> {
    let home = std::env::home_dir().filter(|home| home.is_absolute());
    let folder = cache_home(std::env::var_os("XDG_CACHE_HOME"), home).ok_or(FinetuneError::NoCache)?;
    Ok(folder.join("candle-zero"))
}

/// A mapped file of samples.
#[derive(Debug)]
pub(super) struct SampleCache {
    map: Mmap,
    samples: usize,
    tokens: u64,
    /// Where the index begins, in bytes.
    index: usize,
    /// Where the report begins.
    report: usize,
}

/// A sample in a mapped file.
#[derive(Debug, Clone, Copy)]
pub struct SampleRef<'a> {
    /// Little-endian u32.
    ids: &'a [u8],
    /// A bit for each, in words.
    bits: &'a [u8],
    /// The number of its label, where it has one.
    pub label: u32,
    /// The line that it comes from, from 1.
    pub line: u64,
}

impl<'a> SampleRef<'a> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len() / 4
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The tokens.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.ids.chunks_exact(4).map(word)
    }

    /// Whether token `i` is to be predicted.
    ///
    /// # Panics
    ///
    /// If there is no token `i`.
    pub fn is_target(&self, i: usize) -> bool {
        assert!(i < self.len(), "token {i} of {}", self.len());
        self.bits[i / 8] >> (i % 8) & 1 == 1
    }

    /// Number of tokens that are predicted: the targets, but for the first token.
    pub fn predicted(&self) -> usize {
        let all: u32 = self.bits.iter().map(|byte| byte.count_ones()).sum();
        all as usize - usize::from(!self.is_empty() && self.is_target(0))
    }

    /// A copy.
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
    /// Maps the file at `path` if it is whole and was made of what `fingerprint` says. The inner error says what else it is.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be read, unless there is none.
    pub(super) fn open(path: &Path, fingerprint: u64) -> Result<Result<Self, &'static str>> {
        let io = |source| Error::Io { action: "read", path: path.into(), source };
        let file = match files::open(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Err("there is none")),
            file => file.map_err(io)?,
        };
        // What versions of the past have made readable to others.
        files::tighten(path);
        if file.metadata().map_err(io)?.len() < HEADER as u64 {
            return Ok(Err("it is truncated"));
        }
        // SAFETY: the map is read-only and private to this value. Files of samples appear under their names whole and are
        // replaced, never changed; what another process writes into one changes numbers that are checked where they are
        // used as places.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self::check(map, fingerprint))
    }

    fn check(map: Mmap, fingerprint: u64) -> Result<Self, &'static str> {
        if &map[..8] != MAGIC {
            return Err("it is of another format");
        }
        let header: Vec<u64> = map[8..HEADER].chunks_exact(8).map(long).collect();
        let [found, samples, tokens, index, report, end, digest] = header[..] else { return Err("it is truncated") };
        if end != map.len() as u64 {
            return Err("it is truncated");
        }
        let whole = HEADER as u64 <= index && index <= report && report <= end;
        if !whole || samples.checked_mul(ENTRY as u64) != Some(report - index) {
            return Err("it is damaged");
        }
        let mut hash = XxHash3_64::new();
        hash.write(&map[..HEADER - 8]);
        hash.write(&map[index as usize..]);
        if digest != hash.finish() {
            return Err("it is damaged");
        }
        if found != fingerprint {
            return Err("it is of other data, another tokenizer, template or options");
        }
        let cache = Self { map, samples: samples as usize, tokens, index: index as usize, report: report as usize };
        match (0..cache.samples).into_par_iter().all(|i| cache.is_whole(i)) {
            true => Ok(cache),
            false => Err("it is damaged"),
        }
    }

    /// Whether the ids and targets of sample `i` are those that were written.
    fn is_whole(&self, i: usize) -> bool {
        let entry = self.entry(i);
        let start = usize::try_from(long(entry)).ok().and_then(|start| start.checked_mul(4));
        let bytes = word(&entry[8..]) as usize * 4 + (word(&entry[8..]) as usize).div_ceil(32) * 4;
        let end = start.and_then(|start| start.checked_add(bytes)).filter(|end| *end <= self.index);
        let place = start.zip(end).filter(|(start, _)| *start >= HEADER);
        place.is_some_and(|(start, end)| XxHash3_64::oneshot(&self.map[start..end]) == long(&entry[24..]))
    }

    /// Of the samples, whatever they were made of: their ids, targets and labels, and their order.
    pub(super) fn content(&self) -> u64 {
        let mut hash = XxHash3_64::new();
        for i in 0..self.samples {
            // Their number, the label and the digest.
            let entry = self.entry(i);
            hash.write(&entry[8..16]);
            hash.write(&entry[24..]);
        }
        hash.finish()
    }

    /// Of what the samples were made of.
    pub(super) fn fingerprint(&self) -> u64 {
        long(&self.map[8..16])
    }

    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The report, as it was written.
    pub(super) fn report(&self) -> &[u8] {
        &self.map[self.report..]
    }

    /// Length of sample `i` in tokens.
    pub(super) fn length(&self, i: usize) -> usize {
        word(&self.entry(i)[8..]) as usize
    }

    fn entry(&self, i: usize) -> &[u8] {
        assert!(i < self.samples, "sample {i} of {}", self.samples);
        &self.map[self.index + i * ENTRY..][..ENTRY]
    }

    /// Sample `i`.
    ///
    /// # Panics
    ///
    /// If there is none, or if the file was changed while it was mapped.
    pub(super) fn sample(&self, i: usize) -> SampleRef<'_> {
        let entry = self.entry(i);
        let (start, count) = (long(entry) as usize * 4, word(&entry[8..]) as usize);
        let (ids, rest) = self.map[start..self.index].split_at(count * 4);
        let bits = &rest[..count.div_ceil(32) * 4];
        SampleRef { ids, bits, label: word(&entry[12..]), line: long(&entry[16..]) }
    }
}

/// Writes a file of samples.
pub(super) struct SampleCacheWriter {
    data: BufWriter<File>,
    /// It has that name in the end.
    scratch: ScratchFolder,
    /// The index, until it is appended: for files of many samples it is larger than what may be in memory.
    index: BufWriter<File>,
    /// Bytes written, header included.
    at: u64,
    samples: u64,
    tokens: u64,
    bytes: Vec<u8>,
}

impl SampleCacheWriter {
    /// Writes beside `path`, in a folder that a later run removes if this one is killed. Only this user can read the file.
    pub(super) fn new(path: &Path) -> std::io::Result<Self> {
        let folder = files::folder_of(path);
        let scratch = ScratchFolder::new(folder, WRITING)?;
        let file = File::options().write(true).create_new(true).mode(0o600).open(scratch.path().join("new"))?;
        let mut data = BufWriter::with_capacity(1 << 20, file);
        data.write_all(&[0; HEADER])?;
        let index = BufWriter::new(tempfile::tempfile_in(folder)?);
        Ok(Self { data, scratch, index, at: HEADER as u64, samples: 0, tokens: 0, bytes: vec![] })
    }

    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Appends a sample of `line`.
    pub(super) fn push(&mut self, sample: &Sample, label: u32, line: u64) -> std::io::Result<()> {
        let count = u32::try_from(sample.ids.len()).map_err(|_| std::io::ErrorKind::FileTooLarge)?;
        self.bytes.clear();
        self.bytes.extend(sample.ids.iter().flat_map(|id| id.to_le_bytes()));
        for targets in sample.targets.chunks(32) {
            let bits = targets.iter().enumerate().fold(0, |bits, (i, target)| bits | u32::from(*target) << i);
            self.bytes.extend(bits.to_le_bytes());
        }
        self.data.write_all(&self.bytes)?;
        let mut entry = [0; ENTRY];
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

    /// Completes the file and gives it its name.
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
                prop_assert_eq!(found.predicted(), sample.targets.iter().skip(1).filter(|t| **t).count());
            }
        }
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.samples");
        // What a writer has by then, in a folder that nobody has locked any more.
        let writer = SampleCacheWriter::new(&path).unwrap();
        let killed = folder.path().join(format!("{WRITING}aaaaaa"));
        std::fs::create_dir(&killed).unwrap();
        for entry in std::fs::read_dir(writer.scratch.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), killed.join(entry.file_name())).unwrap();
        }
        assert!(killed.join("new").exists());
        drop(writer);
        // Of somebody else.
        let foreign = format!("{WRITING}bbbbbb");
        std::fs::create_dir(folder.path().join(&foreign)).unwrap();
        std::fs::write(folder.path().join(&foreign).join("new"), "mine").unwrap();
        let names = [".x.samples-abc", "x.samples-abc", "y.samples"];
        names.iter().for_each(|name| std::fs::write(folder.path().join(name), "").unwrap());
        write(&path, &[]);
        assert_eq!(std::fs::read(folder.path().join(&foreign).join("new")).unwrap(), b"mine");
        let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut left: Vec<_> = left.map(|name| name.into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, [foreign.as_str(), ".x.samples-abc", "x.samples", "x.samples-abc", "y.samples"]);
    }

    #[test]
    fn a_truncated_or_foreign_file_is_none_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.samples");
        let why = |fingerprint| SampleCache::open(&path, fingerprint).unwrap().unwrap_err();
        assert_eq!(why(7), "there is none");
        write(&path, &[Sample { ids: vec![1, 2, 3], targets: vec![false, true, true] }]);
        assert!(why(8).starts_with("it is of other data"));
        let whole = std::fs::read(&path).unwrap();
        for bytes in 0..whole.len() {
            std::fs::write(&path, &whole[..bytes]).unwrap();
            assert_eq!(why(7), "it is truncated", "{bytes}");
        }
        // Every byte: of the header, of three ids and a word of bits, of the index and the report.
        for byte in 0..whole.len() {
            let mut other = whole.clone();
            other[byte] ^= 0x10;
            std::fs::write(&path, other).unwrap();
            let said = why(7);
            assert!(!said.starts_with("it is of other data") && said != "there is none", "{byte}: {said}");
        }
        let mut longer = whole.clone();
        longer.push(0);
        std::fs::write(&path, longer).unwrap();
        assert_eq!(why(7), "it is truncated");
        std::fs::write(&path, [0; 100]).unwrap();
        assert_eq!(why(7), "it is of another format");
    }
}
