//! Weights in safetensors files. The first byte selects a complete file, only a header, or the index of several
//! files.

use super::{join, split};
use crate::scratch;
use candle_zero::candle_core::{DType, Shape};
use candle_zero::param::WeightFiles;

/// Words of headers.
pub(super) const WORDS: [&str; 19] = [
    "__metadata__",
    "dtype",
    "shape",
    "data_offsets",
    "F32",
    "F16",
    "BF16",
    "F64",
    "I64",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F4",
    "format",
    "weight_map",
    "total_size",
    "../",
    "a.safetensors",
    "\\u0000",
];

/// The maximum number of bytes of data after a header.
const DATA: usize = 4096;

/// Opens a file and reads all of its tensors.
///
/// # Panics
/// Panics if a tensor's number of elements does not match its shape.
pub fn run(data: &[u8]) -> bool {
    let (first, rest) = split(data);
    match first % 3 {
        0 => read("file.safetensors", rest),
        1 => read("file.safetensors", &file(rest)),
        _ => {
            scratch::write("a.safetensors", &file(HEADERS[0].as_bytes()));
            read("model.safetensors.index.json", rest)
        }
    }
}

/// Returns a file with this header, and data of the length that the header specifies.
fn file(header: &[u8]) -> Vec<u8> {
    let json: serde_json::Value = serde_json::from_slice(header).unwrap_or_default();
    let tensors = json.as_object().into_iter().flatten();
    let end = tensors.filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64()).max().unwrap_or(0);
    let data: Vec<u8> = (0..DATA.min(usize::try_from(end).unwrap_or(DATA))).map(|at| (at * 7) as u8 & 0x3f).collect();
    [&(header.len() as u64).to_le_bytes()[..], header, &data].concat()
}

fn read(name: &str, bytes: &[u8]) -> bool {
    let path = scratch::write(name, bytes);
    let Ok(files) = WeightFiles::open(&path) else { return false };
    let tensors: Vec<(String, Vec<usize>)> =
        files.tensors().map(|(name, tensor)| (name.to_owned(), tensor.shape().to_vec())).collect();
    for (name, shape) in &tensors {
        let elements: usize = shape.iter().product();
        if let Ok(values) = files.values(name, shape, 0..elements) {
            assert_eq!(values.len(), elements, "{name}");
            assert_eq!(
                files.values(name, shape, elements / 2..elements).map_or(0, |half| half.len()),
                elements.div_ceil(2)
            );
        }
        for dtype in [DType::F32, DType::BF16, DType::I64, DType::U8] {
            if let Ok(bytes) = files.buffer(name, &Shape::from(shape.clone()), dtype) {
                assert_eq!(bytes.len(), elements * dtype.size_in_bytes(), "{name}");
            }
        }
        let _ = files.find(name);
    }
    let _ = (files.unused(&Default::default()), files.missing("x", &[1]).to_string(), files.fingerprint());
    true
}

/// Returns files, headers and an index.
pub fn seeds() -> Vec<Vec<u8>> {
    let files = HEADERS.iter().map(|header| join(0, &file(header.as_bytes())));
    let headers = HEADERS.iter().map(|header| join(1, header.as_bytes()));
    files.chain(headers).chain([join(2, INDEX.as_bytes())]).collect()
}

const INDEX: &str =
    r#"{"metadata":{"total_size":24},"weight_map":{"a.weight":"a.safetensors","a.bias":"a.safetensors"}}"#;

const HEADERS: [&str; 3] = [
    r#"{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"a.bias":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}"#,
    r#"{"h.0.attn.bias":{"dtype":"BOOL","shape":[1,1,2,2],"data_offsets":[0,4]},"x":{"dtype":"BF16","shape":[3],"data_offsets":[4,10]},"y":{"dtype":"F16","shape":[],"data_offsets":[10,12]},"i":{"dtype":"I64","shape":[1],"data_offsets":[12,20]}}    "#,
    r#"{"e":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},"none":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},"d":{"dtype":"F64","shape":[1,1],"data_offsets":[4,12]}}"#,
];
