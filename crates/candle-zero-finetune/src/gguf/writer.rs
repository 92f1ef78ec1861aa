//! Writes files in GGUF format, version 3, front to back. llama.cpp and its ecosystem read this format.
//!
//! ```text
//!   magic, version, counts | keys and values | names, shapes, types and offsets of tensors | padding | tensors, padded
//! ```

use crate::error::Result;
use half::f16;

/// The value of a metadata key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum GgufValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    String(String),
    Bools(Vec<bool>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Strings(Vec<String>),
}

impl GgufValue {
    /// Returns the value that stores a size. A size above `u32::MAX` becomes `u32::MAX`.
    pub fn size(size: usize) -> Self {
        Self::U32(u32::try_from(size).unwrap_or(u32::MAX))
    }
}

/// The storage format of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GgmlFormat {
    F32,
    F16,
    /// Blocks of 32 8-bit integers with an f16 scale.
    Q8_0,
}

/// The number of elements in a block of [`GgmlFormat::Q8_0`].
pub(super) const BLOCK: usize = 32;
/// The alignment of tensors in bytes.
const ALIGNMENT: usize = 32;

impl GgmlFormat {
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
        }
    }

    /// Returns the name of the format, for error messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Returns the number of bytes of `elements` elements, which must fill complete blocks.
    fn bytes(self, elements: u64) -> u64 {
        match self {
            Self::F32 => 4 * elements,
            Self::F16 => 2 * elements,
            Self::Q8_0 => elements / BLOCK as u64 * (BLOCK as u64 + 2),
        }
    }

    /// Encodes values, which must fill complete blocks. If a value is too large for the format, returns it as the error;
    /// for [`GgmlFormat::Q8_0`], returns the largest magnitude of its block.
    pub fn encode(self, values: &[f32]) -> std::result::Result<Vec<u8>, f32> {
        let half = |value: f32| {
            let rounded = f16::from_f32(value);
            if value.is_finite() && rounded.is_infinite() { Err(value) } else { Ok(rounded.to_le_bytes()) }
        };
        match self {
            Self::F32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            Self::F16 => {
                let mut bytes = Vec::with_capacity(2 * values.len());
                for value in values {
                    bytes.extend(half(*value)?);
                }
                Ok(bytes)
            }
            Self::Q8_0 => {
                let mut bytes = Vec::with_capacity(values.len() / BLOCK * (BLOCK + 2));
                for block in values.chunks(BLOCK) {
                    let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                    let scale = largest / 127.0;
                    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                    bytes.extend(half(scale).map_err(|_| largest)?);
                    bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8).cast_unsigned()));
                }
                Ok(bytes)
            }
        }
    }
}

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GgufTensor {
    pub name: String,
    /// The dimensions, slowest first.
    pub shape: Vec<usize>,
    pub format: GgmlFormat,
}

impl GgufTensor {
    /// Returns the number of bytes of the elements.
    pub fn bytes(&self) -> u64 {
        self.format.bytes(self.shape.iter().product::<usize>() as u64)
    }
}

/// Writes a file to `out`. `emit` passes on the bytes of the tensor with a given index, piece by piece.
///
/// # Errors
/// Errors of `out` and `emit`.
pub(crate) fn write(
    metadata: &[(String, GgufValue)],
    entries: &[GgufTensor],
    out: &mut dyn FnMut(&[u8]) -> Result<()>,
    mut emit: impl FnMut(usize, &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let header = header(metadata, entries);
    out(&header)?;
    for (at, entry) in entries.iter().enumerate() {
        emit(at, out)?;
        out(&vec![0; padding(entry.bytes())])?;
    }
    Ok(())
}

fn padding(bytes: u64) -> usize {
    (bytes.next_multiple_of(ALIGNMENT as u64) - bytes) as usize
}

fn header(metadata: &[(String, GgufValue)], entries: &[GgufTensor]) -> Vec<u8> {
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((entries.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut header, key);
        put_value(&mut header, value);
    }
    let mut offset = 0u64;
    for entry in entries {
        put_string(&mut header, &entry.name);
        header.extend((entry.shape.len() as u32).to_le_bytes());
        // The fastest dimension comes first.
        entry.shape.iter().rev().for_each(|dim| header.extend((*dim as u64).to_le_bytes()));
        header.extend(entry.format.id().to_le_bytes());
        header.extend(offset.to_le_bytes());
        offset += entry.bytes().next_multiple_of(ALIGNMENT as u64);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
    header
}

fn put_string(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn put_value(to: &mut Vec<u8>, value: &GgufValue) {
    const ARRAY: u32 = 9;
    let mut array = |kind: u32, len: usize| {
        [ARRAY, kind].iter().for_each(|id| to.extend(id.to_le_bytes()));
        to.extend((len as u64).to_le_bytes());
    };
    match value {
        GgufValue::Bools(values) => {
            array(7, values.len());
            to.extend(values.iter().map(|value| u8::from(*value)));
        }
        GgufValue::I32s(values) => {
            array(5, values.len());
            values.iter().for_each(|value| to.extend(value.to_le_bytes()));
        }
        GgufValue::F32s(values) => {
            array(6, values.len());
            values.iter().for_each(|value| to.extend(value.to_le_bytes()));
        }
        GgufValue::Strings(values) => {
            array(8, values.len());
            values.iter().for_each(|value| put_string(to, value));
        }
        GgufValue::U32(value) => {
            to.extend(4u32.to_le_bytes());
            to.extend(value.to_le_bytes());
        }
        GgufValue::F32(value) => {
            to.extend(6u32.to_le_bytes());
            to.extend(value.to_le_bytes());
        }
        GgufValue::Bool(value) => {
            to.extend(7u32.to_le_bytes());
            to.push(u8::from(*value));
        }
        GgufValue::String(value) => {
            to.extend(8u32.to_le_bytes());
            put_string(to, value);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::quantized::gguf_file::Content;
    use candle_core::{Device, quantized::gguf_file};
    use std::io::Cursor;

    #[test]
    fn candles_reader_finds_what_was_written() {
        let metadata = [
            ("general.architecture".to_owned(), GgufValue::String("llama".into())),
            ("n".to_owned(), GgufValue::U32(7)),
            ("x".to_owned(), GgufValue::F32(0.5)),
            ("b".to_owned(), GgufValue::Bool(true)),
            ("l".to_owned(), GgufValue::I32s(vec![1, -2])),
            ("f".to_owned(), GgufValue::F32s(vec![0.5, -1e9])),
            ("s".to_owned(), GgufValue::Strings(vec!["Ġa".into(), "b".into()])),
        ];
        let value = |i: usize| ((i * 37) % 101) as f32 / 10.0 - 5.0;
        let shapes = [(vec![5], GgmlFormat::F32), (vec![3, 7], GgmlFormat::F16), (vec![4, 64], GgmlFormat::Q8_0)];
        let entries: Vec<GgufTensor> = shapes
            .iter()
            .enumerate()
            .map(|(i, (shape, format))| GgufTensor { name: format!("t{i}"), shape: shape.clone(), format: *format })
            .collect();
        let values: Vec<Vec<f32>> =
            entries.iter().map(|entry| (0..entry.shape.iter().product()).map(value).collect()).collect();
        let mut file = Vec::new();
        let mut out = |bytes: &[u8]| {
            file.extend_from_slice(bytes);
            Ok(())
        };
        write(&metadata, &entries, &mut out, |at, take| take(&entries[at].format.encode(&values[at]).unwrap()))
            .unwrap();
        let mut reader = Cursor::new(file);
        let content = Content::read(&mut reader).unwrap();
        assert_eq!(content.metadata.len(), 7);
        assert_eq!(content.metadata["n"].to_u32().unwrap(), 7);
        assert_eq!(content.metadata["x"].to_f32().unwrap(), 0.5);
        assert!(content.metadata["b"].to_bool().unwrap());
        let [gguf_file::Value::String(a), gguf_file::Value::String(_)] = &content.metadata["s"].to_vec().unwrap()[..]
        else {
            panic!("two strings")
        };
        assert_eq!(a, "Ġa");
        assert_eq!(content.metadata["l"].to_vec().unwrap()[1].to_i32().unwrap(), -2);
        let floats = content.metadata["f"].to_vec().unwrap().iter().map(|value| value.to_f32().unwrap());
        assert_eq!(floats.collect::<Vec<_>>(), [0.5, -1e9]);
        for (i, (entry, values)) in entries.iter().zip(&values).enumerate() {
            let tensor = content.tensor(&mut reader, &entry.name, &Device::Cpu).unwrap();
            let tensor = tensor.dequantize(&Device::Cpu).unwrap();
            assert_eq!(tensor.dims(), entry.shape);
            let found = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let tolerance = [0.0, 0.003, 0.025][i];
            assert!(found.iter().zip(values).all(|(a, b)| (a - b).abs() <= tolerance), "{i}: {found:?}");
        }
    }

    #[test]
    fn a_value_beyond_f16_is_given_back() {
        assert_eq!(GgmlFormat::F16.encode(&[1.0, 70000.0]), Err(70000.0));
        assert_eq!(GgmlFormat::Q8_0.encode(&[1e8; 32]).map_err(|lost| lost > 65504.0), Err(true));
    }
}
