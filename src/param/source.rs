//! Where initial values come from: a random rule, or a safetensors file.

use super::buffer::is_needless;
use super::init::init_values;
use crate::error::{Error, ParamError, Result};
use crate::files;
use crate::tensor::bytes;
use crate::util::{fnv1a, list};
use candle_core::{DType, Shape};
use candle_nn::Init;
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Where initial values come from.
#[derive(Debug)]
pub enum Source {
    /// A rule of seed and name, with the model's own init hints.
    Random {
        /// The seed.
        seed: u64,
    },
    /// A safetensors file with exactly the model's parameters.
    File(WeightFile),
}

/// A mapped safetensors file of f32, f16 or bf16 tensors.
#[derive(Debug)]
pub struct WeightFile {
    path: PathBuf,
    map: Mmap,
    data_start: usize,
    metadata: Metadata,
}

impl Source {
    /// Opens a safetensors file.
    pub fn file(path: &Path) -> Result<Self> {
        Ok(Self::File(WeightFile::open(path)?))
    }

    /// A hash by which ranks see that they begin with the same weights. Of a file: its header and a thousand places of
    /// its data, not all of it, which may be larger than memory.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Self::Random { seed } => fnv1a(&seed.to_le_bytes()),
            Self::File(WeightFile { map, data_start, .. }) => {
                const PLACES: usize = 1000;
                let step = map.len().div_ceil(PLACES).max(1);
                let data = map.chunks(step).flat_map(|c| &c[..c.len().min(8)]);
                let bytes: Vec<u8> = map[..*data_start].iter().chain(data).copied().collect();
                fnv1a(&bytes)
            }
        }
    }

    /// Elements `range` of parameter `name`, in f32.
    pub(crate) fn values(&self, name: &str, shape: &Shape, init: Init, range: Range<usize>) -> Result<Vec<f32>> {
        // A size beyond all memory is an error rather than the end of the process.
        let mut probe = Vec::<f32>::new();
        if probe.try_reserve_exact(range.len()).is_err() {
            return Err(ParamError::NoMemory { name: name.into(), elements: range.len() }.into());
        }
        drop(probe);
        match self {
            Self::Random { seed } => Ok(init_values(*seed, name, shape, init, range)),
            Self::File(file) => file.values(name, shape, range),
        }
    }

    /// What a parameter is asked to begin with, as far as that decides it: a file does not heed it.
    pub(crate) fn hint(&self, init: Init) -> Init {
        if let Self::Random { .. } = self { init } else { Init::Const(0.0) }
    }

    /// The bytes of buffer `name` in `dtype`.
    pub(crate) fn buffer(&self, name: &str, shape: &Shape, init: Init, dtype: DType) -> Result<Vec<u8>> {
        let numel = shape.elem_count();
        match (self, init) {
            (Self::File(file), _) => file.buffer(name, shape, dtype),
            // Not by way of f32, which has not all integers.
            (Self::Random { .. }, Init::Const(value)) => Ok(bytes::encode(dtype, std::iter::repeat_n(value, numel))),
            (Self::Random { seed }, init) => {
                let values = init_values(*seed, name, shape, init, 0..numel);
                Ok(bytes::encode(dtype, values.into_iter().map(f64::from)))
            }
        }
    }

    /// Whether a parameter of that name is known to exist.
    pub(crate) fn contains(&self, name: &str) -> bool {
        matches!(self, Self::File(file) if file.info(name).is_some())
    }

    /// An error if the file holds tensors that the model has not asked for, but for buffers that say nothing.
    pub(crate) fn check_all_used(&self, used: &BTreeSet<&str>) -> Result<()> {
        let Self::File(file) = self else { return Ok(()) };
        let used: BTreeSet<String> = used.iter().map(|name| file.name_of(name)).collect();
        let tensors = file.metadata.tensors().into_iter();
        let unused = tensors.filter(|(name, info)| !used.contains(name) && !is_needless(name, &info.shape));
        let mut extra: Vec<String> = unused.map(|(name, _)| name).collect();
        extra.sort();
        match extra.is_empty() {
            true => Ok(()),
            false => Err(ParamError::ExtraTensors { path: file.path.clone(), names: list(&extra) }.into()),
        }
    }
}

/// The weights in a folder of Hugging Face.
const FILE_OF_FOLDER: &str = "model.safetensors";
/// In front of the names of a GPT-2 with a language model's head.
const PREFIX: &str = "transformer.";

impl WeightFile {
    /// Opens and maps a file, or `model.safetensors` in a folder, and reads its header.
    pub fn open(path: &Path) -> Result<Self> {
        let of_folder = path.join(FILE_OF_FOLDER);
        let path = if of_folder.is_file() { &of_folder } else { path };
        let io = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let file = files::open(path).map_err(io)?;
        // SAFETY: the map is only read. A file that another process cuts short meanwhile would raise SIGBUS; weights
        // are not written in place by anything here, and copying a model of any size to avoid that would cost more.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let bad = |e: safetensors::SafeTensorError| {
            let why = match path.extension() {
                Some(ending) if ending == "json" => "an index of several files is not read, give one file".into(),
                _ => e.to_string(),
            };
            Error::from(ParamError::BadWeightFile { path: path.to_owned(), why })
        };
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(bad)?;
        // read_metadata has checked that the header's tensors lie inside the file without gaps.
        Ok(Self { path: path.to_owned(), data_start: header + 8, map, metadata })
    }

    /// Names and shapes of the tensors, in no order.
    pub fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.metadata.tensors().into_iter().map(|(name, info)| (name, info.shape.clone())).collect()
    }

    /// The name of a parameter's tensor. Hugging Face writes a GPT-2 with a language model's head under `transformer.`,
    /// and one without, as the published files are, without it.
    fn name_of(&self, parameter: &str) -> String {
        let with_prefix = format!("{PREFIX}{parameter}");
        let is_there = |name: &str| self.metadata.info(name).is_some();
        match parameter.strip_prefix(PREFIX) {
            _ if is_there(parameter) => parameter.into(),
            _ if is_there(&with_prefix) => with_prefix,
            Some(bare) if is_there(bare) => bare.into(),
            _ => parameter.into(),
        }
    }

    fn info(&self, parameter: &str) -> Option<&TensorInfo> {
        self.metadata.info(&self.name_of(parameter))
    }

    /// The error about a tensor that is not there.
    fn missing(&self, name: &str, shape: &Shape) -> Error {
        let mut names: Vec<String> = self.metadata.tensors().into_keys().collect();
        names.sort();
        let (few, more) = names.split_at(names.len().min(3));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
        let (name, shape, has) = (name.into(), shape.dims().to_vec(), format!("{}{more}", few.join(", ")));
        ParamError::MissingTensor { path: self.path.clone(), name, shape, has }.into()
    }

    /// The bytes of a buffer in `dtype`.
    fn buffer(&self, name: &str, shape: &Shape, dtype: DType) -> Result<Vec<u8>> {
        let path = || self.path.clone();
        let expected = shape.dims();
        let Some(info) = self.info(name) else { return Err(self.missing(name, shape)) };
        // A single number has one dimension or none.
        let is_one = |dims: &[usize]| dims.iter().all(|dim| *dim == 1) && dims.len() < 2;
        if info.shape != expected && !(is_one(&info.shape) && is_one(expected)) {
            let (found, expected) = (info.shape.clone(), expected.to_vec());
            return Err(ParamError::MisshapenTensor { path: path(), name: name.into(), found, expected }.into());
        }
        let found = bytes::dtype_in_file(info.dtype);
        let (start, end) = info.data_offsets;
        let bytes = &self.map[self.data_start + start..self.data_start + end];
        found.and_then(|found| bytes::converted(bytes, found, dtype)).ok_or_else(|| {
            let (found, expected) = (format!("{:?}", info.dtype), format!("{dtype:?}"));
            ParamError::BufferFileDtype { path: path(), name: name.into(), found, expected }.into()
        })
    }

    fn values(&self, name: &str, shape: &Shape, range: Range<usize>) -> Result<Vec<f32>> {
        let path = || self.path.clone();
        let Some(info) = self.info(name) else { return Err(self.missing(name, shape)) };
        if info.shape != shape.dims() {
            let (found, expected) = (info.shape.clone(), shape.dims().to_vec());
            return Err(ParamError::MisshapenTensor { path: path(), name: name.into(), found, expected }.into());
        }
        let bytes = |size: usize| {
            let start = self.data_start + info.data_offsets.0;
            &self.map[start + range.start * size..start + range.end * size]
        };
        // The header's length is any number of bytes, so elements need not be aligned.
        fn read<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks::<N>().0.iter().map(|b| f(*b)).collect()
        }
        let TensorInfo { dtype, .. } = info;
        match dtype {
            safetensors::Dtype::F32 => Ok(read(bytes(4), f32::from_le_bytes)),
            safetensors::Dtype::BF16 => Ok(read(bytes(2), |b| bf16::from_le_bytes(b).to_f32())),
            safetensors::Dtype::F16 => Ok(read(bytes(2), |b| f16::from_le_bytes(b).to_f32())),
            other => {
                let found = format!("{other:?}");
                Err(ParamError::TensorDtype { path: path(), name: name.into(), found }.into())
            }
        }
    }
}
