//! A file written by `torch.save`: an uncompressed zip archive with one pickle and the bytes of its storages.

use super::pickle::{Pickle, PickleProblem};
use super::stored_tensor::StoredTensor;
use crate::error::{CheckpointError, Error, Result};
use crate::files;
use crate::util::counted;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use zip::{CompressionMethod, ZipArchive};

/// The maximum size of a pickle. The pickle of a model has about 500 bytes per tensor.
const MAX_PICKLE_BYTES: u64 = 32 << 20;
/// The maximum size of the small entries alongside the pickle.
const MAX_NOTE_BYTES: u64 = 64;
/// The maximum number of bytes of a storage that are in memory at a time, not counting the requested elements.
const READ_CHUNK: usize = 1 << 18;

/// A file written by `torch.save`. Only its list of entries stays in memory.
#[derive(Debug)]
pub(super) struct TorchArchive {
    path: PathBuf,
    /// The byte range of each storage, by its key.
    storages: HashMap<String, StorageSpan>,
}

/// A range of bytes in a file.
#[derive(Debug, Clone, Copy)]
struct StorageSpan {
    start: u64,
    length: u64,
}

impl TorchArchive {
    /// Opens the file and reads its pickle.
    pub fn open(path: &Path) -> Result<(Self, Pickle)> {
        let io = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let file = files::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        Self::read_entries(path, file, length).map_err(|problem| damaged_error(path, &problem))
    }

    fn read_entries(path: &Path, file: File, file_length: u64) -> Result<(Self, Pickle), PickleProblem> {
        let mut zip = ZipArchive::new(BufReader::new(file))
            .map_err(|e| format!("it is not a complete zip archive of the kind that torch.save writes ({e})"))?;
        let stem = stem(&zip)?;
        check_byte_order(&mut zip, &stem)?;
        let pickle = read_entry(&mut zip, &format!("{stem}/data.pkl"), MAX_PICKLE_BYTES)?;
        let mut storages = HashMap::new();
        let folder = format!("{stem}/data/");
        for index in 0..zip.len() {
            let entry = zip.by_index_raw(index).map_err(|e| format!("entry {index} of the archive: {e}"))?;
            let Ok(name) = entry.name() else { continue };
            let Some(key) = name.strip_prefix(&folder) else { continue };
            let start = entry.data_start().ok_or_else(|| format!("{name} has no data"))?;
            let length = entry.size();
            let is_plain = entry.compression() == CompressionMethod::Stored && !entry.encrypted();
            if !is_plain || entry.compressed_size() != length {
                return Err(format!("{name} is compressed or encrypted, but torch.save writes neither"));
            }
            if start.checked_add(length).is_none_or(|end| end > file_length) {
                return Err(format!("{name} of {} extends beyond the end of the file", counted(length, "byte")));
            }
            storages.insert(key.to_owned(), StorageSpan { start, length });
        }
        Ok((Self { path: path.to_owned(), storages }, Pickle::parse(&pickle)?))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size in bytes of all storages.
    pub fn storage_bytes(&self) -> u64 {
        self.storages.values().fold(0, |sum, span| sum.saturating_add(span.length))
    }

    /// Returns an error unless all elements of `tensor` are in the file.
    pub fn check(&self, tensor: &StoredTensor) -> Result<(), PickleProblem> {
        self.span(tensor, 0..tensor.length).map(drop)
    }

    /// Returns the byte range of elements `range` of `tensor`.
    fn span(&self, tensor: &StoredTensor, range: Range<usize>) -> Result<StorageSpan, PickleProblem> {
        let StoredTensor { path, storage, kind, start, length, .. } = tensor;
        let entry = self.storages.get(storage);
        if *length == 0 {
            return Ok(StorageSpan { start: 0, length: 0 });
        }
        let entry = entry.ok_or_else(|| format!("{path}: the archive has no storage data/{storage}"))?;
        let bytes = |elements: usize| u64::try_from(elements.checked_mul(kind.size())?).ok();
        let byte_position = |element: usize| bytes(start.checked_add(element)?).filter(|end| *end <= entry.length);
        let span = || match (byte_position(range.start), byte_position(range.end)) {
            (Some(first), Some(end)) if range.end <= *length => {
                Some(StorageSpan { start: entry.start.checked_add(first)?, length: end.checked_sub(first)? })
            }
            _ => None,
        };
        span().ok_or_else(|| {
            format!(
                "{path}: elements {} to {} of a tensor of {} that starts at element {start} are not in \
                 data/{storage}, which has {}",
                range.start,
                range.end,
                counted(*length, "element"),
                counted(entry.length, "byte")
            )
        })
    }

    /// Reads elements `range` of `tensor` into `out`, which has the same length.
    pub fn read(&self, tensor: &StoredTensor, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let span = self.span(tensor, range).map_err(|problem| damaged_error(&self.path, &problem))?;
        let io = |source| Error::Io { action: "read", path: self.path.clone(), source };
        let mut file = files::open(&self.path).map_err(io)?;
        file.seek(SeekFrom::Start(span.start)).map_err(io)?;
        let size = tensor.kind.size();
        let mut bytes = vec![0; READ_CHUNK.min(out.len().saturating_mul(size))];
        for out in out.chunks_mut(READ_CHUNK / size) {
            let bytes = &mut bytes[..out.len() * size];
            file.read_exact(bytes).map_err(io)?;
            tensor.kind.widen(bytes, out);
        }
        Ok(())
    }

    /// Reads all elements of `tensor` as raw bytes.
    pub fn read_bytes(&self, tensor: &StoredTensor) -> Result<Vec<u8>> {
        let span = self.span(tensor, 0..tensor.length).map_err(|problem| damaged_error(&self.path, &problem))?;
        let io = |source| Error::Io { action: "read", path: self.path.clone(), source };
        let mut file = files::open(&self.path).map_err(io)?;
        file.seek(SeekFrom::Start(span.start)).map_err(io)?;
        // The length is at most that of the file.
        let mut bytes = vec![0; usize::try_from(span.length).unwrap_or(usize::MAX)];
        file.read_exact(&mut bytes).map_err(io)?;
        Ok(bytes)
    }

    /// Returns an error unless all bytes match their checksums.
    pub fn verify(&self) -> Result<()> {
        let io = |source| Error::Io { action: "read", path: self.path.clone(), source };
        let file = files::open(&self.path).map_err(io)?;
        verify(BufReader::new(file)).map_err(|problem| damaged_error(&self.path, &problem))
    }
}

fn verify(file: BufReader<File>) -> Result<(), PickleProblem> {
    let mut zip = ZipArchive::new(file).map_err(|e| e.to_string())?;
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index).map_err(|e| format!("entry {index} of the archive: {e}"))?;
        let name = entry.name().map_or_else(|_| format!("entry {index}"), |name| name.into_owned());
        std::io::copy(&mut entry, &mut std::io::sink()).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

/// Returns the error for a file that cannot be understood.
pub(super) fn damaged_error(path: &Path, problem: &str) -> Error {
    let problem = format!(
        "{problem}; the file is damaged, or its layout is not DeepSpeed 0.19's; copy it again, or save the checkpoint \
         again with that version"
    );
    CheckpointError::DeepSpeed { path: path.to_owned(), problem }.into()
}

/// Returns the archive's top folder: the file's name when it was saved.
fn stem(zip: &ZipArchive<BufReader<File>>) -> Result<String, PickleProblem> {
    let names = (0..zip.len()).filter_map(|i| zip.name_for_index(i)?.ok());
    let mut stems = names.filter_map(|name| name.strip_suffix("/data.pkl").map(str::to_owned));
    match (stems.next(), stems.next()) {
        (Some(stem), None) => Ok(stem),
        (None, _) => Err("the archive has no data.pkl".into()),
        (Some(_), Some(_)) => Err("the archive has more than one data.pkl".into()),
    }
}

fn check_byte_order(zip: &mut ZipArchive<BufReader<File>>, stem: &str) -> Result<(), PickleProblem> {
    let name = format!("{stem}/byteorder");
    if zip.index_for_name(&name).is_none() {
        // The file was written by a version of PyTorch before 2.1, whose files are little-endian on all relevant
        // machines.
        return Ok(());
    }
    match read_entry(zip, &name, MAX_NOTE_BYTES)?.as_slice() {
        b"little" => Ok(()),
        _ => Err("its byte order is not little-endian, the only one that can be read".into()),
    }
}

/// Returns the bytes of a small entry after comparing them with its checksum.
fn read_entry(zip: &mut ZipArchive<BufReader<File>>, name: &str, limit: u64) -> Result<Vec<u8>, PickleProblem> {
    let entry = zip.by_name(name).map_err(|e| format!("{name}: {e}"))?;
    if entry.size() > limit {
        return Err(format!("{name} has {} bytes; at most {limit} are read", entry.size()));
    }
    let mut bytes = vec![];
    // One byte more than the limit is requested, so that the end, where the checksum is compared, is always reached.
    entry.take(limit + 1).read_to_end(&mut bytes).map_err(|e| format!("{name}: {e}"))?;
    Ok(bytes)
}
