//! gpt-oss, read from GGUF files in which the experts can be in MXFP4.

use crate::moe::MOE;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Tensor};
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero_finetune::{BaseModel, GgufFormat, MergedModel};
use std::collections::HashMap;
use std::path::Path;

fn all_values(base: &BaseModel, parameter: &str, shape: &[usize]) -> Vec<f32> {
    base.values().values(parameter, shape, 0..shape.iter().product()).unwrap()
}

/// Returns a folder with the tiny gpt-oss model of this name, the settings that all published models have, and a
/// tokenizer.
fn published(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let from = MOE.path("models").join(name);
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut json = MOE.json(format!("models/{name}/config.json"));
    for (key, value) in [("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)] {
        json[key] = value.into();
    }
    std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = MOE.path("models/gpt_oss_mxfp4").join(file);
        std::fs::copy(from, folder.path().join(file)).unwrap();
    }
    folder
}

/// Returns the configuration without the padding token, which these GGUF files do not contain.
fn without_padding(config: &DecoderConfig) -> DecoderConfig {
    DecoderConfig { padding: None, ..config.clone() }
}

#[test]
fn a_written_gpt_oss_is_read_as_the_same_model() {
    let folder = published("gpt_oss");
    let base = BaseModel::open(folder.path()).unwrap();
    let file = folder.path().join("model.gguf");
    for (format, accuracy) in [(GgufFormat::F16, 1e-3), (GgufFormat::Q8_0, 1e-2)] {
        MergedModel::new(&base, None).unwrap().write_gguf(&file, format).unwrap();
        let read = BaseModel::open(&file).unwrap();
        assert_eq!(without_padding(read.config()), without_padding(base.config()));
        assert_eq!(read.config_json()["model_type"], "gpt_oss");
        for (name, shape) in read.config().parameters().unwrap() {
            let (found, want) = (all_values(&read, &name, &shape), all_values(&base, &name, &shape));
            let largest = want.iter().fold(0f32, |max, x| max.max(x.abs()));
            let difference = found.iter().zip(&want).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
            assert!(
                found.len() == want.len() && difference <= accuracy * largest,
                "{format:?}: {name} differs by {difference} of {largest}"
            );
            let len = found.len();
            let row = shape.last().unwrap();
            let ranges =
                [0..1, len - 1..len, len / 3..2 * len / 3, row - 1..(2 * row + 1).min(len), len / 2..len / 2 + 1, 5..5];
            for range in ranges {
                let range = range.start.min(len)..range.end.min(len);
                let part = read.values().values(&name, &shape, range.clone()).unwrap();
                assert!(part == found[range.clone()], "{format:?}: {name} {range:?}");
            }
        }
    }
}

/// Appends a text, preceded by its length.
fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

/// Returns the number of a value's type, and its bytes.
fn bytes_of(value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::U32(number) => (4, number.to_le_bytes().to_vec()),
        Value::I32(number) => (5, number.to_le_bytes().to_vec()),
        Value::F32(number) => (6, number.to_le_bytes().to_vec()),
        Value::Bool(flag) => (7, vec![u8::from(*flag)]),
        Value::String(text) => {
            let mut bytes = Vec::new();
            put_text(&mut bytes, text);
            (8, bytes)
        }
        Value::Array(values) => {
            let kind = bytes_of(&values[0]).0;
            let elements: Vec<u8> = values.iter().flat_map(|value| bytes_of(value).1).collect();
            (9, [&kind.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &elements].concat())
        }
        other => panic!("{other:?}"),
    }
}

/// A tensor of a file: its name, its shape, the number of its format and its bytes.
type RawTensor = (String, Vec<usize>, u32, Vec<u8>);

fn write_file(file: &Path, metadata: &HashMap<String, Value>, tensors: &[RawTensor]) {
    let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        let (kind, value) = bytes_of(value);
        put_text(&mut bytes, key);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    }
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, format, content) in tensors {
        put_text(&mut bytes, name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| bytes.extend((*size as u64).to_le_bytes()));
        bytes.extend(format.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
        data.extend(content);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    std::fs::write(file, [bytes, data].concat()).unwrap();
}

/// Returns the blocks of one output in llama.cpp's format, given those in the published format. A byte of the published
/// format contains two neighbouring elements; a byte of llama.cpp's format contains two elements that are half a block
/// apart.
fn repacked(blocks: &[u8], scales: &[u8]) -> Vec<u8> {
    let of_block = |(block, scale): (&[u8], &u8)| {
        let code = |at: usize| block[at / 2] >> (4 * (at % 2)) & 15;
        std::iter::once(*scale).chain((0..16).map(move |at| code(at) | code(at + 16) << 4)).collect::<Vec<u8>>()
    };
    blocks.chunks_exact(16).zip(scales).flat_map(of_block).collect()
}

#[test]
fn a_gpt_oss_in_mxfp4_has_the_weights_and_the_logits_of_its_folder() {
    let folder = published("gpt_oss_mxfp4");
    let base = BaseModel::open(folder.path()).unwrap();
    let file = folder.path().join("model.gguf");
    MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap();
    let mut reader = std::fs::File::open(&file).unwrap();
    let content = Content::read(&mut reader).unwrap();
    let packed = MOE.tensors("models/gpt_oss_mxfp4/model.safetensors");
    let raw = |name: &str| packed[name].flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let mut tensors: Vec<RawTensor> = Vec::new();
    for (name, info) in &content.tensor_infos {
        let shape = info.shape.dims().to_vec();
        let (block, rest) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).unwrap_or(("", name));
        // The published outputs of gate and up alternate.
        let part = match rest {
            "ffn_gate_exps.weight" => Some(("gate_up_proj", 0, 2)),
            "ffn_up_exps.weight" => Some(("gate_up_proj", 1, 2)),
            "ffn_down_exps.weight" => Some(("down_proj", 0, 1)),
            _ => None,
        };
        if let Some((projection, first, step)) = part {
            let names =
                ["blocks", "scales"].map(|part| format!("model.layers.{block}.mlp.experts.{projection}_{part}"));
            let [blocks, scales] = names.map(|name| raw(&name));
            let each = shape[2] / 32;
            let outputs = blocks.chunks_exact(16 * each).zip(scales.chunks_exact(each)).skip(first).step_by(step);
            let bytes: Vec<u8> = outputs.flat_map(|(blocks, scales)| repacked(blocks, scales)).collect();
            assert_eq!(bytes.len(), shape.iter().product::<usize>() / 32 * 17);
            tensors.push((name.clone(), shape, 39, bytes));
            continue;
        }
        let tensor = content.tensor(&mut reader, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
        let bytes = crate::fixtures::values(&tensor).into_iter().flat_map(f32::to_le_bytes).collect();
        tensors.push((name.clone(), shape, 0, bytes));
    }
    write_file(&file, &content.metadata, &tensors);
    let read = BaseModel::open(&file).unwrap();
    let mut experts = 0;
    for (name, shape) in read.config().parameters().unwrap() {
        if name.ends_with("_proj") {
            let (found, want) = (all_values(&read, &name, &shape), all_values(&base, &name, &shape));
            assert!(found == want, "{name}");
            let (third, row) = (found.len() / 3, shape[2]);
            for range in [third..third + 1, third..third + 3 * row, row - 1..row + 1] {
                assert_eq!(
                    read.values().values(&name, &shape, range.clone()).unwrap(),
                    found[range.clone()],
                    "{name} {range:?}"
                );
            }
            experts += 1;
        }
    }
    assert!(experts > 0);
    // The other weights have been rounded to f16, which represents bf16 values exactly unless they are very small or very
    // large.
    let ids = Tensor::new(vec![vec![1u32, 5, 9, 200, 17, 3, 44, 2]], &Device::Cpu).unwrap();
    let [expected, found] = [&base, &read].map(|base| {
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        model.forward(&ids).unwrap()
    });
    let difference = crate::fixtures::max_difference(&expected, &found);
    assert!(difference <= 1e-5, "logits differ by {difference}");
}

#[test]
fn a_file_of_gpt_oss_that_cannot_be_read_is_refused() {
    let folder = published("gpt_oss");
    let base = BaseModel::open(folder.path()).unwrap();
    let file = folder.path().join("model.gguf");
    MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap();
    let mut reader = std::fs::File::open(&file).unwrap();
    let content = Content::read(&mut reader).unwrap();
    let raw = |format: u32| -> Vec<RawTensor> {
        let of = |(name, info): (&String, &candle_core::quantized::gguf_file::TensorInfo)| {
            let is_first = name == "blk.0.ffn_up_exps.weight";
            let shape = info.shape.dims().to_vec();
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            (name.clone(), shape, if is_first { format } else { 0 }, bytes)
        };
        content.tensor_infos.iter().map(of).collect()
    };
    let error = || BaseModel::open(&file).unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "DIR");
    let mut all = Vec::new();
    for format in [20, 77] {
        write_file(&file, &content.metadata, &raw(format));
        all.push(error());
    }
    let mut without = raw(0);
    without.retain(|(name, ..)| name != "blk.0.ffn_up_exps.weight");
    write_file(&file, &content.metadata, &without);
    all.push(error().split("; the file").next().unwrap().to_owned());
    let mut other = content.metadata.clone();
    other.insert("gpt-oss.expert_gating_func".into(), Value::U32(2));
    write_file(&file, &other, &raw(0));
    all.push(error());
    insta::assert_snapshot!(all.join("\n"));
}
