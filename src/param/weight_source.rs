//! The sources of initial values: a random rule, safetensors files, or the caller.

use super::init::init_values;
use super::weight_files::WeightFiles;
use crate::error::{ParamError, Result};
use crate::tensor::bytes;
use crate::util::fnv1a;
use candle_core::{DType, Shape};
use candle_nn::Init;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Initial values of parameters by name, for weights that are in files of another format, under other names or in
/// several places. All ranks have the same values. Each rank requests the values that it keeps.
pub trait InitialValues: Debug + Send + Sync {
    /// Returns whether this source has the values of parameter `name`. Other parameters are initialized from their
    /// hints and the seed.
    fn has(&self, name: &str) -> bool;

    /// Returns elements `range`, in row-major order, of parameter `name` of `shape`, in f32.
    ///
    /// # Errors
    /// A tensor of a different shape, or one that cannot be read.
    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>>;

    /// Returns a hash that ranks compare to check that they begin with the same values.
    fn fingerprint(&self) -> u64;
}

/// A source of initial values.
#[derive(Debug)]
pub enum WeightSource {
    /// A rule that uses the seed and the parameter's name, with the model's own init hints.
    Random {
        /// The seed.
        seed: u64,
    },
    /// Safetensors files with exactly the model's parameters.
    Files(WeightFiles),
    /// The caller's values, and the random rule for other parameters.
    Given {
        /// The caller's values.
        values: Arc<dyn InitialValues>,
        /// The seed.
        seed: u64,
    },
}

impl WeightSource {
    /// Opens a safetensors file, an index of several such files, or a folder with either.
    pub fn files(path: &Path) -> Result<Self> {
        Ok(Self::Files(WeightFiles::open(path)?))
    }

    /// Returns a hash that ranks compare to check that they begin with the same weights. For each file, the hash covers
    /// the header and up to a thousand positions, not all data, which may be larger than memory.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Self::Random { seed } => fnv1a(&seed.to_le_bytes()),
            Self::Files(files) => files.fingerprint(),
            Self::Given { values, seed } => {
                let numbers = [values.fingerprint(), *seed].map(u64::to_le_bytes);
                fnv1a(numbers.as_flattened())
            }
        }
    }

    /// Returns elements `range` of parameter `name`, in f32.
    pub(crate) fn values(&self, name: &str, shape: &Shape, init: Init, range: Range<usize>) -> Result<Vec<f32>> {
        // If the parameter does not fit in memory, this gives an error instead of aborting the process.
        let mut probe = Vec::<f32>::new();
        if probe.try_reserve_exact(range.len()).is_err() {
            return Err(ParamError::NoMemory { name: name.into(), elements: range.len() }.into());
        }
        drop(probe);
        match self {
            Self::Files(files) => files.values(name, shape.dims(), range),
            Self::Given { values, .. } if values.has(name) => values.values(name, shape.dims(), range),
            Self::Random { seed } | Self::Given { seed, .. } => Ok(init_values(*seed, name, shape, init, range)),
        }
    }

    /// Returns the requested initialization, or zeros if the values come from files and so do not depend on it.
    pub(crate) fn hint(&self, init: Init) -> Init {
        if let Self::Files(_) = self { Init::Const(0.0) } else { init }
    }

    /// Returns the bytes of buffer `name` in `dtype`.
    pub(crate) fn buffer(&self, name: &str, shape: &Shape, init: Init, dtype: DType) -> Result<Vec<u8>> {
        let numel = shape.elem_count();
        match (self, init) {
            (Self::Files(files), _) => files.buffer(name, shape, dtype),
            (Self::Given { values, .. }, _) if values.has(name) => {
                let values = values.values(name, shape.dims(), 0..numel)?;
                Ok(bytes::encode(dtype, values.into_iter().map(f64::from)))
            }
            // The constant is not converted to f32 first, because f32 cannot represent all integers.
            (_, Init::Const(value)) => Ok(bytes::encode(dtype, std::iter::repeat_n(value, numel))),
            (Self::Random { seed } | Self::Given { seed, .. }, init) => {
                let values = init_values(*seed, name, shape, init, 0..numel);
                Ok(bytes::encode(dtype, values.into_iter().map(f64::from)))
            }
        }
    }

    /// Returns whether a parameter of that name is known to exist.
    pub(crate) fn contains(&self, name: &str) -> bool {
        match self {
            Self::Random { .. } => false,
            Self::Files(files) => files.find(name).is_some(),
            Self::Given { values, .. } => values.has(name),
        }
    }

    /// Returns an error if files contain tensors that the model has not requested, other than dispensable buffers.
    pub(crate) fn check_all_used(&self, used: &BTreeSet<&str>) -> Result<()> {
        if let Self::Files(files) = self { files.check_all_used(used) } else { Ok(()) }
    }
}

impl InitialValues for WeightFiles {
    fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        self.values(name, shape, range)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint()
    }
}
