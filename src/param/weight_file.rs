//! One memory-mapped safetensors file.

use crate::error::{Error, ParamError, Result};
use crate::files::{self, release_pages};
use crate::precision::{FlatRef, has_non_finite};
use crate::tensor::bytes;
use crate::util::fnv1a;
use candle_core::{DType, Shape};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A mapped safetensors file.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    map: Mmap,
    data_start: usize,
    metadata: Metadata,
}

/// A tensor in a file.
#[derive(Debug, Clone, Copy)]
pub struct FileTensor<'a> {
    file: &'a WeightFile,
    info: &'a TensorInfo,
}

impl WeightFile {
    /// Opens and maps a file, and reads its header.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let file = files::open(path).map_err(io)?;
        // SAFETY: the map is only read. If another process truncated the file, reading the map would raise SIGBUS;
        // nothing in candle-zero writes weights in place, and copying a complete model to avoid the signal would be too
        // expensive.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let bad = |e: safetensors::SafeTensorError| {
            let why = match described_length(&map) {
                Some(described) if described > map.len() as u64 => {
                    format!(
                        "it was cut short (it has {} of the {described} bytes that its header describes)",
                        map.len()
                    )
                }
                _ => e.to_string(),
            };
            Error::from(ParamError::BadWeightFile { path: path.to_owned(), why })
        };
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(bad)?;
        // read_metadata has checked that the header's tensors are inside the file without gaps.
        Ok(Self { path: path.to_owned(), data_start: header + 8, map, metadata })
    }

    /// Returns the tensors, in no particular order.
    pub fn tensors(&self) -> impl Iterator<Item = (String, FileTensor<'_>)> {
        let tensors = self.metadata.tensors().into_iter();
        tensors.map(|(name, info)| (name, FileTensor { file: self, info }))
    }

    pub fn has(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    pub fn tensor(&self, name: &str) -> Option<FileTensor<'_>> {
        self.metadata.info(name).map(|info| FileTensor { file: self, info })
    }

    /// Returns a hash of the header and of 8 bytes at up to a thousand positions in the file, not of all data, which
    /// may be larger than memory.
    pub fn fingerprint(&self) -> u64 {
        const MAX_SAMPLES: usize = 1000;
        let step = self.map.len().div_ceil(MAX_SAMPLES).max(1);
        let data = self.map.chunks(step).flat_map(|c| &c[..c.len().min(8)]);
        let bytes: Vec<u8> = self.map[..self.data_start].iter().chain(data).copied().collect();
        // The system maps pages around each position, up to gigabytes for a large model.
        release_pages(&self.map, 0..self.map.len());
        fnv1a(&bytes)
    }
}

/// Returns the length of a file according to the header at its beginning, if the header is present.
fn described_length(start: &[u8]) -> Option<u64> {
    let (length, rest) = start.split_first_chunk::<8>()?;
    let length = u64::from_le_bytes(*length);
    let header = rest.get(..usize::try_from(length).ok()?)?;
    let header: Value = serde_json::from_slice(header).ok()?;
    let ends = header.as_object()?.values().filter_map(|info| info["data_offsets"][1].as_u64());
    ends.max()?.checked_add(8)?.checked_add(length)
}

/// Checks that no value is NaN or infinite. `values` are consecutive values of a parameter, beginning with element
/// `first`, which were read from `path`.
///
/// # Errors
/// [`ParamError::NotFinite`] with the first such value.
pub fn check_finite(path: &Path, name: &str, first: usize, values: &[f32]) -> Result<()> {
    if !has_non_finite(FlatRef::F32(values)) {
        return Ok(());
    }
    match values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        Some((i, value)) => {
            let (path, name) = (path.to_owned(), name.to_owned());
            Err(ParamError::NotFinite { path, name, element: first + i, value: *value }.into())
        }
        None => Ok(()),
    }
}

impl<'a> FileTensor<'a> {
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// Returns the name of the dtype, as in the file's header, and the tensor's bytes.
    pub fn raw(&self) -> (String, &'a [u8]) {
        let (start, end) = self.info.data_offsets;
        let bytes = &self.file.map[self.file.data_start + start..self.file.data_start + end];
        (format!("{:?}", self.info.dtype), bytes)
    }

    /// Releases the memory of the tensor's pages. Call this method after reading the bytes of [`raw`](Self::raw).
    pub fn release(&self) {
        let (start, end) = self.info.data_offsets;
        release_pages(&self.file.map, self.file.data_start + start..self.file.data_start + end);
    }

    /// Returns the path of the file that contains the tensor.
    pub fn file(&self) -> &'a Path {
        &self.file.path
    }

    /// Checks that the tensor can be read as a parameter `name` of `shape`.
    pub fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        let path = || self.file.path.clone();
        if self.info.shape != shape {
            let (found, expected) = (self.info.shape.clone(), shape.to_vec());
            return Err(ParamError::MisshapenTensor { path: path(), name: name.into(), found, expected }.into());
        }
        match self.info.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
            other => {
                let found = format!("{other:?}");
                Err(ParamError::TensorDtype { path: path(), name: name.into(), found }.into())
            }
        }
    }

    /// Returns elements `range` of the tensor as a parameter `name` of `shape`, in f32.
    pub fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        self.check(name, shape)?;
        // The header may have any length, so elements need not be aligned.
        fn read<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks::<N>().0.iter().map(|b| f(*b)).collect()
        }
        let (start, size) =
            (self.file.data_start + self.info.data_offsets.0, if self.info.dtype == Dtype::F32 { 4 } else { 2 });
        let byte_range = start + range.start * size..start + range.end * size;
        let bytes = &self.file.map[byte_range.clone()];
        let values = match self.info.dtype {
            Dtype::BF16 => read(bytes, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => read(bytes, |b| f16::from_le_bytes(b).to_f32()),
            _ => read(bytes, f32::from_le_bytes),
        };
        // The pages of a parameter that has been read are seldom needed again.
        release_pages(&self.file.map, byte_range);
        check_finite(&self.file.path, name, range.start, &values)?;
        Ok(values)
    }

    /// Returns the tensor's bytes in `dtype`, as a buffer `name` of `shape`.
    pub fn buffer(&self, name: &str, shape: &Shape, dtype: DType) -> Result<Vec<u8>> {
        let (path, info, expected) = (|| self.file.path.clone(), self.info, shape.dims());
        // A single number may have one dimension or none.
        let is_one = |dims: &[usize]| dims.iter().all(|dim| *dim == 1) && dims.len() < 2;
        if info.shape != expected && !(is_one(&info.shape) && is_one(expected)) {
            let (found, expected) = (info.shape.clone(), expected.to_vec());
            return Err(ParamError::MisshapenTensor { path: path(), name: name.into(), found, expected }.into());
        }
        let found = bytes::dtype_in_file(info.dtype);
        let (start, end) = info.data_offsets;
        let bytes = &self.file.map[self.file.data_start + start..self.file.data_start + end];
        found.and_then(|found| bytes::converted(bytes, found, dtype)).ok_or_else(|| {
            let (found, expected) = (format!("{:?}", info.dtype), format!("{dtype:?}"));
            ParamError::BufferFileDtype { path: path(), name: name.into(), found, expected }.into()
        })
    }
}
