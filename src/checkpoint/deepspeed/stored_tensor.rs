//! The position of a tensor's elements: the storage, and the first element in it.

use super::pickle::PickleProblem;
use super::pickle_value::PickleValue;
use candle_core::DType;
use half::{bf16, f16};

/// The maximum number of dimensions of a tensor, as in PyTorch.
const MAX_AXES: usize = 64;

/// The element type of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StorageType {
    F32,
    F16,
    Bf16,
    F64,
    I64,
    I32,
    I16,
    I8,
    U8,
    /// A byte that is 0 or 1.
    Bool,
}

impl StorageType {
    fn of(storage: &PickleValue<'_>) -> Result<Self, PickleProblem> {
        match storage.name() {
            Some("torch.FloatStorage") => Ok(Self::F32),
            Some("torch.HalfStorage") => Ok(Self::F16),
            Some("torch.BFloat16Storage") => Ok(Self::Bf16),
            Some("torch.DoubleStorage") => Ok(Self::F64),
            Some("torch.LongStorage") => Ok(Self::I64),
            Some("torch.IntStorage") => Ok(Self::I32),
            Some("torch.ShortStorage") => Ok(Self::I16),
            Some("torch.CharStorage") => Ok(Self::I8),
            Some("torch.ByteStorage") => Ok(Self::U8),
            Some("torch.BoolStorage") => Ok(Self::Bool),
            other => Err(format!(
                "{} is a tensor of {}; floats of 16 to 64 bits, integers of 8 to 64 bits and booleans can be read",
                storage.path(),
                other.unwrap_or("an unknown type")
            )),
        }
    }

    /// Returns whether weights and optimizer states can have this type.
    fn is_narrow_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Returns the type that represents all values of this storage type in memory and in this library's files.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::F64 => DType::F64,
            Self::I64 => DType::I64,
            Self::I32 => DType::I32,
            Self::I16 | Self::I8 => DType::I16,
            Self::U8 | Self::Bool => DType::U8,
        }
    }

    /// Converts elements of a file to elements of [`dtype`](Self::dtype), also little-endian.
    pub fn to_library_format(self, bytes: Vec<u8>) -> Vec<u8> {
        match self {
            Self::I8 => bytes.into_iter().flat_map(|byte| i16::from(byte as i8).to_le_bytes()).collect(),
            _ => bytes,
        }
    }

    /// Returns the size in bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Converts a file's little-endian elements to f32. Their type must be one that weights can have.
    pub fn widen(self, bytes: &[u8], out: &mut [f32]) {
        fn convert<const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn([u8; N]) -> f32) {
            out.iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(out, b)| *out = f(*b));
        }
        match self {
            Self::F32 => convert(bytes, out, f32::from_le_bytes),
            Self::F16 => convert(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Self::Bf16 => convert(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            _ => unreachable!("StoredTensor::of_weights rejects other types"),
        }
    }
}

/// A tensor whose elements are contiguous in a storage.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    /// The path in the pickle, for messages.
    pub path: String,
    /// The storage's key, which is its name in the archive.
    pub storage: String,
    pub kind: StorageType,
    pub shape: Vec<usize>,
    /// The number of elements that precede the tensor in the storage; `length` is the number of its own elements.
    pub start: usize,
    pub length: usize,
}

impl StoredTensor {
    /// Returns the size in bytes of the tensor's elements.
    pub fn bytes(&self) -> u64 {
        (self.length as u64).saturating_mul(self.kind.size() as u64)
    }

    /// Returns the tensor of weights or optimizer states that `value` describes.
    pub fn of_weights(value: &PickleValue<'_>) -> Result<Self, PickleProblem> {
        let tensor = Self::of(value)?;
        match tensor.kind.is_narrow_float() {
            true => Ok(tensor),
            false => Err(format!(
                "{} is a tensor of {:?}; weights and moments are float32, float16 or bfloat16",
                tensor.path, tensor.kind
            )),
        }
    }

    /// Returns the tensor that `value` describes.
    pub fn of(value: &PickleValue<'_>) -> Result<Self, PickleProblem> {
        let not_a_tensor = || value.wrong_kind("a tensor");
        let (name, arguments) = value.call().ok_or_else(not_a_tensor)?;
        match name {
            "torch._utils._rebuild_tensor_v2" => Self::rebuild(value, &arguments),
            // A tensor with attributes: (function, type, arguments, attributes).
            "torch._tensor._rebuild_from_type_v2" => {
                let function = arguments.item(0)?.name() == Some("torch._utils._rebuild_tensor_v2");
                if function { Self::rebuild(value, &arguments.item(2)?) } else { Err(not_a_tensor()) }
            }
            // (tensor, requires_grad, hooks)
            "torch._utils._rebuild_parameter" => {
                let inner = arguments.item(0)?;
                match inner.call() {
                    Some(("torch._utils._rebuild_tensor_v2", arguments)) => Self::rebuild(value, &arguments),
                    _ => Err(not_a_tensor()),
                }
            }
            _ => Err(not_a_tensor()),
        }
    }

    /// Reads a tensor from the arguments storage, offset, shape, strides, requires_grad, hooks.
    fn rebuild(value: &PickleValue<'_>, arguments: &PickleValue<'_>) -> Result<Self, PickleProblem> {
        let storage = arguments.item(0)?;
        // ("storage", class, key, device, elements)
        let storage = storage.storage().ok_or_else(|| storage.wrong_kind("a storage"))?;
        let start = arguments.item(1)?.count()?;
        let shape = shape(&arguments.item(2)?)?;
        let strides = shape_of_counts(&arguments.item(3)?)?;
        let length = elements(&shape).ok_or_else(|| format!("{} has an impossible shape {shape:?}", value.path()))?;
        if length > 1 && !is_contiguous(&shape, &strides) {
            return Err(format!(
                "{} is a non-contiguous view (shape {shape:?}, strides {strides:?}); only contiguous tensors can be \
                 read",
                value.path()
            ));
        }
        Ok(Self {
            path: value.path().to_owned(),
            kind: StorageType::of(&storage.item(1)?)?,
            storage: storage.item(2)?.text()?.to_owned(),
            start,
            length,
            shape,
        })
    }
}

/// Reads a shape: a tuple of counts, or a torch.Size of such a tuple.
pub(super) fn shape(value: &PickleValue<'_>) -> Result<Vec<usize>, PickleProblem> {
    match value.call() {
        Some(("torch.Size", arguments)) => shape_of_counts(&arguments.item(0)?),
        _ => shape_of_counts(value),
    }
}

fn shape_of_counts(value: &PickleValue<'_>) -> Result<Vec<usize>, PickleProblem> {
    match value.items()? {
        items if items.len() > MAX_AXES => Err(value.wrong_kind("a shape")),
        items => items.iter().map(PickleValue::count).collect(),
    }
}

/// Returns the number of elements of a shape, unless it overflows.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size))
}

fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    let fits = shape.iter().zip(strides).rev().all(|(size, stride)| {
        // The stride of a dimension with one element is never used.
        let fits = *size == 1 || *stride == expected;
        expected *= size;
        fits
    });
    fits && shape.len() == strides.len()
}
