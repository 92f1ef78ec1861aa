//! GGUF files yield the model from which they were created. The tests write the files as llama.cpp's converter does.

use crate::fixtures::{base, json, tensors};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_zero::models::{Decoder, DecoderConfig, RotaryScaling};
use candle_zero_finetune::BaseModel;
use std::collections::BTreeMap;
use std::path::Path;

type Tensors = BTreeMap<String, Tensor>;

fn weights(model: &str) -> Tensors {
    let folder = crate::fixtures::path("models").join(model);
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.flat_map(tensors).map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).unwrap())).collect()
}

/// Returns the converter's name for a tensor.
fn name(architecture: &str, parameter: &str) -> String {
    let is_gemma = architecture.starts_with("gemma");
    let mut name = parameter.replace("model.layers.", "blk.");
    for (hugging_face, gguf) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", if is_gemma { "post_attention_norm" } else { "ffn_norm" }),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ] {
        name = name.replace(&format!("{hugging_face}."), &format!("{gguf}."));
    }
    name
}

/// Returns the query or key weights of a Llama in the converter's row order.
fn permuted(tensor: &Tensor, heads: usize) -> Tensor {
    let (rows, columns) = tensor.dims2().unwrap();
    let split_heads = tensor.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
    split_heads.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, columns)).unwrap()
}

fn converted(architecture: &str, config: &DecoderConfig, weights: &Tensors) -> Tensors {
    let convert = |(parameter, tensor): (&String, &Tensor)| {
        let tensor = match architecture {
            "llama" if parameter.contains("q_proj") => permuted(tensor, config.num_attention_heads),
            "llama" if parameter.contains("k_proj") => permuted(tensor, config.num_key_value_heads),
            gemma if gemma.starts_with("gemma") && parameter.ends_with("norm.weight") => (tensor + 1.0).unwrap(),
            _ => tensor.clone(),
        };
        (name(architecture, parameter), tensor)
    };
    weights.iter().map(convert).collect()
}

fn metadata(architecture: &str, config: &DecoderConfig) -> Vec<(String, Value)> {
    let size = |size: usize| Value::U32(size as u32);
    let mut all = vec![("general.architecture".to_owned(), Value::String(architecture.into()))];
    let mut add = |key: &str, value: Value| all.push((format!("{architecture}.{key}"), value));
    add("context_length", size(config.ctx));
    add("embedding_length", size(config.hidden_size));
    add("block_count", size(config.blocks.len()));
    add("feed_forward_length", size(config.intermediate_size));
    add("attention.head_count", size(config.num_attention_heads));
    add("attention.head_count_kv", size(config.num_key_value_heads));
    add("attention.key_length", size(config.head_dim));
    add("attention.value_length", size(config.head_dim));
    add("attention.layer_norm_rms_epsilon", Value::F32(config.norm_eps as f32));
    let rotary = config.blocks.last().unwrap().rotary.clone().unwrap();
    add("rope.freq_base", Value::F32(rotary.theta as f32));
    if let RotaryScaling::Linear { factor } = rotary.scaling {
        add("rope.scaling.type", Value::String("linear".into()));
        add("rope.scaling.factor", Value::F32(factor as f32));
    }
    if let (Some(window), false) = (config.blocks[0].window, architecture == "llama") {
        add("attention.sliding_window", size(window));
    }
    for (key, cap) in [("attn", config.attention_soft_cap), ("final", config.logit_soft_cap)] {
        if let Some(cap) = cap {
            add(&format!("{key}_logit_softcapping"), Value::F32(cap as f32));
        }
    }
    all.extend(config.padding.map(|id| ("tokenizer.ggml.padding_token_id".to_owned(), Value::U32(id))));
    all
}

/// Writes a file with these tensors. `dtype` returns the type of each tensor.
fn write(file: &Path, metadata: &[(String, Value)], tensors: &Tensors, dtype: impl Fn(&str) -> GgmlDType) {
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let quantized: Vec<(&str, QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), QTensor::quantize(tensor, dtype(name)).unwrap())).collect();
    let quantized: Vec<(&str, &QTensor)> = quantized.iter().map(|(name, tensor)| (*name, tensor)).collect();
    gguf_file::write(&mut std::fs::File::create(file).unwrap(), &metadata, &quantized).unwrap();
}

fn all_values(base: &BaseModel, parameter: &str, shape: &[usize]) -> Vec<f32> {
    base.values().values(parameter, shape, 0..shape.iter().product()).unwrap()
}

#[test]
fn a_file_of_f32_has_the_description_and_the_weights_of_its_model() {
    for (model, architecture) in [
        ("llama", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
        ("phi3", "phi3"),
    ] {
        let plain = base(model);
        let mut want = json(format!("models/{model}/config.json"));
        match model {
            // GGUF cannot represent these special features of the recorded models.
            "mistral" => {
                want["model_type"] = "llama".into();
            }
            "gemma2" => want["query_pre_attn_scalar"] = 16.into(),
            "gemma3" => {
                want["query_pre_attn_scalar"] = 16.into();
                want["layer_types"] = ["sliding_attention"; 3].to_vec().into();
            }
            _ => (),
        }
        let mut metadata = metadata(architecture, plain.config());
        if model == "gemma3" {
            metadata.retain(|(key, _)| !key.contains("rope.freq_base"));
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        write(&file, &metadata, &converted(architecture, plain.config(), &weights(model)), |_| GgmlDType::F32);
        for path in [file.as_path(), folder.path()] {
            let read = BaseModel::open(path).unwrap();
            assert_eq!(read.config(), &DecoderConfig::from_hugging_face(&want).unwrap(), "{model}");
            assert_eq!(read.config(), &DecoderConfig::from_hugging_face(read.config_json()).unwrap(), "{model}");
            for (parameter, shape) in read.config().parameters().unwrap() {
                let (got, want) = (all_values(&read, &parameter, &shape), all_values(&plain, &parameter, &shape));
                // The converter adds 1 to the weights of Gemma's norms in f32, which rounds them.
                let most =
                    if architecture.starts_with("gemma") && parameter.ends_with("norm.weight") { 2e-7 } else { 0.0 };
                let difference = got.iter().zip(&want).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(difference <= most && got.len() == want.len(), "{model}: {parameter} differs by {difference}");
            }
        }
    }
}

#[test]
fn parts_are_those_of_the_whole_in_every_format() {
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true,
    });
    let config = DecoderConfig::from_hugging_face(&config).unwrap();
    let numbers =
        |len: usize, seed: usize| (0..len).map(move |i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0);
    let parameters = config.parameters().unwrap();
    let weights: Tensors = parameters
        .iter()
        .enumerate()
        .map(|(seed, (name, shape))| {
            let values = numbers(shape.iter().product(), seed);
            (name.clone(), Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(shape.as_slice()).unwrap())
        })
        .collect();
    let converted = converted("llama", &config, &weights);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    for (dtype, accuracy) in [
        (GgmlDType::F32, 0.0),
        (GgmlDType::F16, 1e-3),
        (GgmlDType::BF16, 8e-3),
        (GgmlDType::Q8_0, 1e-2),
        (GgmlDType::Q4_0, 0.2),
        (GgmlDType::Q4_1, 0.2),
        (GgmlDType::Q5_0, 0.1),
        (GgmlDType::Q5_1, 0.1),
        (GgmlDType::Q4K, 0.2),
        (GgmlDType::Q6K, 0.05),
    ] {
        let dtype_of = |name: &str| if name.contains("norm") { GgmlDType::F32 } else { dtype };
        write(&file, &metadata("llama", &config), &converted, dtype_of);
        let base = BaseModel::open(&file).unwrap();
        assert_eq!(base.config(), &config);
        for (parameter, shape) in &parameters {
            let got = all_values(&base, parameter, shape);
            // Candle itself reads the tensor, and the converter's order is undone explicitly.
            let quantized = QTensor::quantize(&converted[&name("llama", parameter)], dtype_of(parameter)).unwrap();
            let back = quantized.dequantize(&Device::Cpu).unwrap();
            let heads = if parameter.contains("q_proj") { Some(8) } else { parameter.contains("k_proj").then_some(2) };
            let back = match heads {
                Some(heads) => {
                    let split_heads = back.reshape((heads, shape[0] / heads / 2, 2, shape[1])).unwrap();
                    split_heads.transpose(1, 2).unwrap().contiguous().unwrap()
                }
                None => back,
            };
            assert!(got == crate::fixtures::values(&back), "{dtype:?}: {parameter}");
            let difference = got
                .iter()
                .zip(crate::fixtures::values(&weights[parameter]))
                .fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(difference <= accuracy, "{dtype:?}: {parameter} differs by {difference}");
            let len = got.len();
            for range in [0..1, len - 1..len, len / 3..2 * len / 3, len / 2 - 7..len / 2 + 300, 5..5] {
                let range = range.start.min(len)..range.end.min(len);
                let part = base.values().values(parameter, shape, range.clone()).unwrap();
                assert!(part == got[range.clone()], "{dtype:?}: {parameter} {range:?}");
            }
        }
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        assert!(model.last_logits(&[1, 2, 3]).unwrap().iter().all(|logit| logit.is_finite()));
    }
}

#[test]
fn the_scaling_of_llama_3_is_found_in_its_factors() {
    let mut config = json("models/llama32/config.json");
    let (model, folder) = (weights("llama32"), tempfile::tempdir().unwrap());
    let file = folder.path().join("model.gguf");
    for (original, is_known) in [(8192, true), (32, false)] {
        config["rope_parameters"]["original_max_position_embeddings"] = original.into();
        let described = DecoderConfig::from_hugging_face(&config).unwrap();
        let rule = described.blocks[0].rotary.clone().unwrap();
        let plain = candle_zero::models::RotaryConfig { scaling: RotaryScaling::None, ..rule.clone() };
        let (plain, scaled) = (plain.frequencies(16, 1).unwrap(), rule.frequencies(16, 1).unwrap());
        let factors: Vec<f32> = plain.iter().zip(&scaled).map(|(plain, scaled)| (plain / scaled) as f32).collect();
        let mut tensors = converted("llama", &described, &model);
        tensors.insert("rope_freqs.weight".into(), Tensor::new(factors, &Device::Cpu).unwrap());
        write(&file, &metadata("llama", &described), &tensors, |_| GgmlDType::F32);
        match BaseModel::open(&file) {
            Ok(base) => assert!(is_known && *base.config() == described, "{:?}", base.config()),
            Err(error) => assert!(!is_known && error.to_string().contains("rope_freqs.weight"), "{error}"),
        }
    }
}

#[test]
fn files_that_cannot_be_read_are_refused() {
    let (plain, folder) = (base("llama"), tempfile::tempdir().unwrap());
    let file = folder.path().join("model.gguf");
    let text = || BaseModel::open(&file).unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "DIR");
    let (good, tensors) = (metadata("llama", plain.config()), converted("llama", plain.config(), &weights("llama")));
    let with = |key: &str, value: Option<Value>| {
        let mut metadata = good.clone();
        metadata.retain(|(known, _)| known != key);
        metadata.extend(value.map(|value| (key.to_owned(), value)));
        write(&file, &metadata, &tensors, |_| GgmlDType::F32);
        text()
    };
    insta::assert_snapshot!(with("general.architecture", Some(Value::String("mamba".into()))), @"DIR/model.gguf: general.architecture is mamba, but must be one of llama, qwen2, qwen2moe, qwen3, qwen3moe, olmoe, gemma2, gemma3, phi3, gpt-oss");
    insta::assert_snapshot!(with("general.architecture", None), @"DIR/model.gguf is not a readable GGUF file: its metadata has no general.architecture");
    insta::assert_snapshot!(with("llama.block_count", None), @"DIR/model.gguf: llama.block_count is absent, but must be a whole number");
    insta::assert_snapshot!(with("llama.block_count", Some(Value::U32(4))), @"DIR/model.gguf has no tensor model.layers.3.input_layernorm.weight of shape [48], which the model needs; the file must hold exactly the model's tensors; it has blk.0.attn_k.weight, blk.0.attn_norm.weight, blk.0.attn_output.weight, blk.0.attn_q.weight, blk.0.attn_v.weight, blk.0.ffn_down.weight, blk.0.ffn_gate.weight, blk.0.ffn_norm.weight and 21 more");
    insta::assert_snapshot!(with("llama.block_count", Some(Value::U32(2))), @"DIR/model.gguf holds tensors that the model does not have: blk.2.attn_k.weight, blk.2.attn_norm.weight, blk.2.attn_output.weight, blk.2.attn_q.weight, blk.2.attn_v.weight, blk.2.ffn_down.weight, blk.2.ffn_gate.weight, blk.2.ffn_norm.weight and 1 more; does it belong to a different model, or to one of a different size?");
    insta::assert_snapshot!(with("llama.feed_forward_length", Some(Value::U32(100))), @"tensor model.layers.0.mlp.gate_proj.weight in DIR/model.gguf has shape [128, 48], but the file's metadata describes shape [100, 48]; the file is inconsistent; download or convert it again");
    insta::assert_snapshot!(with("llama.embedding_length", Some(Value::String("x".into()))), @r#"DIR/model.gguf: llama.embedding_length is "x", but must be a whole number from 1 to 4294967295"#);
    insta::assert_snapshot!(with("llama.rope.scaling.type", Some(Value::String("ntk".into()))), @r#"DIR/model.gguf: llama.rope.scaling.type is "ntk", but must be none, linear or yarn"#);
    insta::assert_snapshot!(with("llama.rope.scaling.type", Some(Value::String("yarn".into()))), @"DIR/model.gguf: llama.rope.scaling.factor is absent, but must be a number");
    insta::assert_snapshot!(with("llama.expert_count", Some(Value::U32(8))), @"DIR/model.gguf: llama.expert_used_count is absent, but must be a whole number");
    insta::assert_snapshot!(with("llama.attention.head_count_kv", Some(Value::Array(vec![Value::U32(2); 3]))), @"DIR/model.gguf: llama.attention.head_count_kv is a list of 3 values, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("general.alignment", Some(Value::U32(0))), @"DIR/model.gguf is not a readable GGUF file: general.alignment is 0, but must be a positive number");
    write(&file, &good, &tensors, |_| GgmlDType::F32);
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    insta::assert_snapshot!(text(), @"DIR/model.gguf is not a readable GGUF file: tensor token_embd.weight ends beyond the end of the file (203008 bytes): the file is truncated or damaged");
    std::fs::write(&file, &whole[..100]).unwrap();
    assert!(text().starts_with("DIR/model.gguf is not a readable GGUF file: "), "{}", text());
    std::fs::write(&file, b"no GGUF").unwrap();
    assert!(text().starts_with("DIR/model.gguf is not a readable GGUF file: "), "{}", text());
    std::fs::write(&file, &whole).unwrap();
    std::fs::copy(&file, folder.path().join("other.gguf")).unwrap();
    let several = BaseModel::open(folder.path()).unwrap_err().to_string();
    assert!(several.contains("several GGUF files") && several.contains("other.gguf"), "{several}");
}
