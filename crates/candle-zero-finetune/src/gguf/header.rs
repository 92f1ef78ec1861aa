//! Reads the header of a GGUF file: its metadata, and the names, shapes, formats and positions of its tensors.
//!
//! Every count and every length is compared with the number of remaining bytes. Only then is memory allocated.

use super::tensor_types::TensorFormat;
use candle_core::quantized::gguf_file::Value;
use candle_zero::util::{counted, is_or_are};
use std::collections::HashMap;

/// The header of a file.
#[derive(Debug)]
pub(super) struct GgufHeader {
    pub metadata: HashMap<String, Value>,
    pub tensors: HashMap<String, TensorInfo>,
    /// The position in the file from which the offsets of tensors are counted.
    pub data_start: usize,
}

/// A tensor in a file.
#[derive(Debug, Clone)]
pub(super) struct TensorInfo {
    /// The dimensions, slowest first.
    pub shape: Vec<usize>,
    pub format: TensorFormat,
    /// The position of the first byte, counted from [`GgufHeader::data_start`].
    pub offset: u64,
}

impl TensorInfo {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The versions of the file format that are read. Version 1 has shorter counts, and is older than most models.
const VERSIONS: [u32; 2] = [2, 3];
/// The alignment of tensors in files that do not specify one.
const DEFAULT_ALIGNMENT: usize = 32;
/// The maximum number of dimensions of a tensor, as in ggml.
const MAX_DIMENSIONS: usize = 4;
/// The maximum number of elements in all arrays of the metadata. In memory, an element takes up to 32 times as many
/// bytes as in the file.
const MAX_ARRAY_ELEMENTS: usize = 1 << 24;
/// The maximum depth of arrays of arrays.
const MAX_ARRAY_DEPTH: usize = 4;
/// The minimum number of bytes of a key and its value: a length, a type and a value of one byte.
const MIN_KEY_BYTES: usize = 13;
/// The minimum number of bytes of the description of a tensor: a length, a rank, a format and an offset.
const MIN_TENSOR_BYTES: usize = 24;

impl GgufHeader {
    /// Reads the header of a file with these bytes, or returns why it cannot be read.
    pub fn read(file: &[u8]) -> Result<Self, String> {
        let mut bytes = HeaderBytes { file, at: 0, array_elements: 0 };
        if bytes.take(4, "the magic number")? != b"GGUF" {
            return Err("it does not begin with GGUF".into());
        }
        let version = bytes.u32("the version")?;
        if !VERSIONS.contains(&version) {
            let note = if VERSIONS.contains(&version.swap_bytes()) { " (the file is big-endian)" } else { "" };
            return Err(format!("its version is {version}{note}, but must be 2 or 3"));
        }
        let tensor_count = bytes.count("tensor", "", MIN_TENSOR_BYTES)?;
        let key_count = bytes.count("metadata key", "", MIN_KEY_BYTES)?;
        let mut metadata = HashMap::new();
        for _ in 0..key_count {
            let key = bytes.name("a metadata key")?;
            let kind = bytes.u32(&key)?;
            let value = bytes.value(kind, &key, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("its metadata has the key {key} twice"));
            }
        }
        let mut tensors = HashMap::new();
        for _ in 0..tensor_count {
            let name = bytes.name("the name of a tensor")?;
            let info = bytes.tensor(&name)?;
            if tensors.insert(name.clone(), info).is_some() {
                return Err(format!("it has two tensors named {name}"));
            }
        }
        let alignment = alignment(&metadata)?;
        let data_start = bytes.at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        Ok(Self { metadata, tensors, data_start })
    }
}

/// Returns the alignment of the tensors.
fn alignment(metadata: &HashMap<String, Value>) -> Result<usize, String> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let number = match value {
        Value::I32(number) => u64::try_from(*number).ok(),
        Value::I64(number) => u64::try_from(*number).ok(),
        Value::Bool(_) => None,
        value => value.to_u64().ok(),
    };
    match number.and_then(|number| usize::try_from(number).ok()) {
        Some(0) => Err(format!("{KEY} is 0, but must be a positive number")),
        Some(number) => Ok(number),
        None => Err(format!("{KEY} must be a positive whole number")),
    }
}

/// The maximum number of bytes in a metadata key or in the name of a tensor. llama.cpp's names have at most 64.
const MAX_NAME_BYTES: usize = 1024;

/// The bytes of a file, and how many of them were read.
struct HeaderBytes<'a> {
    file: &'a [u8],
    at: usize,
    /// The number of elements of all arrays so far.
    array_elements: usize,
}

impl<'a> HeaderBytes<'a> {
    fn remaining(&self) -> usize {
        self.file.len() - self.at
    }

    /// Returns the next `len` bytes, which contain `field`.
    fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], String> {
        let (remaining, total) = (self.remaining(), self.file.len());
        if len > remaining {
            return Err(format!(
                "{field} takes {}, but only {remaining} of the file's {} {} left: the file is truncated or damaged",
                counted(len, "byte"),
                counted(total, "byte"),
                is_or_are(remaining)
            ));
        }
        let bytes = &self.file[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, field)?);
        Ok(array)
    }

    fn u32(&mut self, field: &str) -> Result<u32, String> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64, String> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Reads the number of items in `location`. Each item takes at least `min_bytes` bytes.
    fn count(&mut self, item: &str, location: &str, min_bytes: usize) -> Result<usize, String> {
        let count = self.u64(&format!("the number of {item}s{location}"))?;
        let max_count = self.remaining() / min_bytes;
        match usize::try_from(count).ok().filter(|count| *count <= max_count) {
            Some(count) => Ok(count),
            None => Err(format!(
                "it has {}{location}, but the {} that {} at most {max_count}: the file is truncated or damaged",
                counted(count, item),
                counted(self.remaining(), "byte"),
                if self.remaining() == 1 { "is left holds" } else { "are left hold" }
            )),
        }
    }

    fn text(&mut self, field: &str) -> Result<String, String> {
        let len = self.count("byte", &format!(" in {field}"), 1)?;
        let bytes = self.take(len, field)?;
        // Some tokens are not valid UTF-8, and some writers end strings with zeros.
        Ok(String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned())
    }

    /// Reads a key or a name, which messages show.
    fn name(&mut self, field: &str) -> Result<String, String> {
        let name = self.text(field)?;
        if name.len() > MAX_NAME_BYTES {
            return Err(format!("{field} has {} bytes, but must have at most {MAX_NAME_BYTES}", name.len()));
        }
        match name.chars().any(char::is_control) {
            true => Err(format!("{field} contains control characters: {name:?}")),
            false => Ok(name),
        }
    }

    /// Reads a value of a type.
    fn value(&mut self, kind: u32, key: &str, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array(key)?)),
            1 => Value::I8(i8::from_le_bytes(self.array(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            4 => Value::U32(u32::from_le_bytes(self.array(key)?)),
            5 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => match self.array(key)? {
                [0u8] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(format!("{key} has the Boolean value {other}, but must be 0 or 1")),
            },
            8 => Value::String(self.text(key)?),
            9 => Value::Array(self.values(key, depth)?),
            10 => Value::U64(u64::from_le_bytes(self.array(key)?)),
            11 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            other => return Err(format!("{key} has values of type {other}, but must have a type from 0 to 12")),
        })
    }

    /// Reads the values of an array.
    fn values(&mut self, key: &str, depth: usize) -> Result<Vec<Value>, String> {
        if depth == MAX_ARRAY_DEPTH {
            return Err(format!("{key} has arrays that are nested more than {MAX_ARRAY_DEPTH} levels deep"));
        }
        let kind = self.u32(key)?;
        let min_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            other => return Err(format!("{key} has values of type {other}, but must have a type from 0 to 12")),
        };
        let len = self.count("value", &format!(" in {key}"), min_bytes)?;
        self.array_elements = self.array_elements.saturating_add(len);
        if self.array_elements > MAX_ARRAY_ELEMENTS {
            return Err(format!(
                "the lists in its metadata up to {key} have {} values, but may have at most {MAX_ARRAY_ELEMENTS}",
                self.array_elements
            ));
        }
        (0..len).map(|_| self.value(kind, key, depth + 1)).collect()
    }

    /// Reads the description of a tensor.
    fn tensor(&mut self, name: &str) -> Result<TensorInfo, String> {
        let field = format!("the description of tensor {name}");
        let rank = self.u32(&field)? as usize;
        if rank > MAX_DIMENSIONS {
            return Err(format!("tensor {name} has {rank} dimensions, but must have at most {MAX_DIMENSIONS}"));
        }
        let mut shape = Vec::with_capacity(rank);
        for _ in 0..rank {
            shape.push(self.u64(&field)?);
        }
        // The fastest dimension comes first.
        shape.reverse();
        let sizes = shape.iter().map(|size| usize::try_from(*size).ok()).collect::<Option<Vec<usize>>>();
        let is_small = |sizes: &Vec<usize>| sizes.iter().try_fold(1usize, |all, size| all.checked_mul(*size)).is_some();
        let Some(sizes) = sizes.filter(is_small) else {
            return Err(format!(
                "tensor {name} has shape {shape:?}, which has more elements than memory has addresses"
            ));
        };
        let format = TensorFormat::of_id(self.u32(&field)?);
        Ok(TensorInfo { shape: sizes, format, offset: self.u64(&field)? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn file(version: u32, tensors: u64, keys: u64, rest: &[u8]) -> Vec<u8> {
        [b"GGUF", &version.to_le_bytes()[..], &tensors.to_le_bytes(), &keys.to_le_bytes(), rest].concat()
    }

    fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        [&text(name)[..], &kind.to_le_bytes(), value].concat()
    }

    fn tensor(name: &str, shape: &[u64], format: u32, offset: u64) -> Vec<u8> {
        let mut bytes = [&text(name)[..], &(shape.len() as u32).to_le_bytes()].concat();
        shape.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend(format.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes
    }

    fn array(kind: u32, len: u64, values: &[u8]) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &len.to_le_bytes(), values].concat()
    }

    #[test]
    fn values_of_all_types_and_tensors_are_read_in_both_versions() {
        let keys = [
            key("a", 0, &[200]),
            key("b", 1, &[200]),
            key("c", 2, &500u16.to_le_bytes()),
            key("d", 3, &(-500i16).to_le_bytes()),
            key("e", 4, &70_000u32.to_le_bytes()),
            key("f", 5, &(-70_000i32).to_le_bytes()),
            key("g", 6, &0.5f32.to_le_bytes()),
            key("h", 7, &[1]),
            key("i", 8, &text("Ġa")),
            key("j", 9, &array(9, 2, &[array(4, 1, &7u32.to_le_bytes()), array(8, 1, &text("x"))].concat())),
            key("k", 10, &(1u64 << 40).to_le_bytes()),
            key("l", 11, &(-1i64 << 40).to_le_bytes()),
            key("m", 12, &0.25f64.to_le_bytes()),
            key("general.alignment", 4, &64u32.to_le_bytes()),
        ];
        let tensors = [tensor("t", &[32, 3], 39, 0), tensor("u", &[5], 0, 64)];
        for version in VERSIONS {
            let bytes = file(version, 2, keys.len() as u64, &[keys.concat(), tensors.concat()].concat());
            let header = GgufHeader::read(&bytes).unwrap();
            let all: Vec<String> =
                "abcdefghijklm".chars().map(|c| format!("{:?}", header.metadata[&*c.to_string()])).collect();
            assert_eq!(
                all.join(" "),
                "U8(200) I8(-56) U16(500) I16(-500) U32(70000) I32(-70000) F32(0.5) Bool(true) String(\"Ġa\") \
                 Array([Array([U32(7)]), Array([String(\"x\")])]) U64(1099511627776) I64(-1099511627776) F64(0.25)"
            );
            assert_eq!(header.tensors["t"].shape, [3, 32]);
            assert_eq!(header.tensors["t"].format, TensorFormat::Mxfp4);
            assert_eq!((&header.tensors["u"].shape[..], header.tensors["u"].offset), (&[5][..], 64));
            assert_eq!(header.data_start, bytes.len().next_multiple_of(64));
            // No truncated header is accepted.
            for len in 0..bytes.len() {
                assert!(GgufHeader::read(&bytes[..len]).is_err(), "{len}");
            }
        }
    }

    #[test]
    fn zeros_at_the_end_of_strings_are_removed_and_names_that_messages_cannot_show_are_refused() {
        let keys = [key("a\0", 8, &text("llama\0\0"))].concat();
        let header = GgufHeader::read(&file(3, 0, 1, &keys)).unwrap();
        assert!(matches!(&header.metadata["a"], Value::String(value) if value == "llama"));
        let refused = |name: &str| GgufHeader::read(&file(3, 0, 1, &key(name, 7, &[1]))).unwrap_err();
        assert_eq!(refused(&"x".repeat(1025)), "a metadata key has 1025 bytes, but must have at most 1024");
        assert_eq!(refused("a\u{1b}[31m"), r#"a metadata key contains control characters: "a\u{1b}[31m""#);
    }

    #[test]
    fn headers_that_contradict_themselves_or_their_size_are_refused() {
        let error = |bytes: &[u8]| GgufHeader::read(bytes).unwrap_err();
        let of_key = |key: Vec<u8>| error(&file(3, 0, 1, &key));
        let of_tensor = |tensor: Vec<u8>| error(&file(3, 1, 0, &tensor));
        let nested = (0..5).fold(array(0, 1, &[0]), |inner, _| array(9, 1, &inner));
        let many =
            [key("a", 9, &array(0, 1 << 23, &vec![0; 1 << 23])), key("b", 9, &array(0, 1 << 24, &vec![0; 1 << 24]))];
        let all = [
            error(b"GGML1234"),
            error(b"GG"),
            error(&file(1, 0, 0, &[])),
            error(&file(3u32.swap_bytes(), 0, 0, &[])),
            error(&file(3, 7, 0, &[0; 100])),
            error(&file(3, 0, u64::MAX, &[0; 100])),
            of_key([&(1u64 << 60).to_le_bytes()[..], &[0; 20]].concat()),
            of_key(key("long", 8, &(1u64 << 40).to_le_bytes())),
            of_key(key("list", 9, &array(4, 1 << 50, &[0; 64]))),
            of_key(key("list", 9, &array(13, 1, &[0; 64]))),
            of_key(key("flag", 7, &[2])),
            of_key(key("what", 99, &[0; 8])),
            of_key(key("deep", 9, &nested)),
            error(&file(3, 0, 2, &many.concat())),
            error(&file(3, 0, 2, &[key("same", 0, &[1]), key("same", 0, &[1])].concat())),
            of_key(key("general.alignment", 4, &[0; 4])),
            of_key(key("general.alignment", 5, &(-8i32).to_le_bytes())),
            of_tensor(tensor("t", &[1; 5], 0, 0)),
            of_tensor(tensor("t", &[1 << 40, 1 << 40], 0, 0)),
            error(&file(3, 2, 0, &[tensor("t", &[1], 0, 0), tensor("t", &[1], 0, 0)].concat())),
        ];
        insta::assert_snapshot!(all.join("\n"));
    }
}
