//! Mixtures of experts in GGUF files, in which one tensor contains a projection of all experts.

use crate::fixtures::path;
use candle_core::quantized::gguf_file::{self, Content, Value as GgufValue};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use candle_zero::models::DecoderConfig;
use candle_zero_finetune::{BaseModel, GgufFormat, MergedModel};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// The types of mixtures in transformers, and their architectures in GGUF files.
const KINDS: [(&str, &str); 4] =
    [("mixtral", "llama"), ("qwen2_moe", "qwen2moe"), ("qwen3_moe", "qwen3moe"), ("olmoe", "olmoe")];

fn description(kind: &str) -> Value {
    let mut config = json!({
        "model_type": kind, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "num_experts": 12, "num_experts_per_tok": 3,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3, "torch_dtype": "float32",
    });
    if kind.starts_with("qwen") {
        config["moe_intermediate_size"] = 32.into();
        config["norm_topk_prob"] = (kind == "qwen3_moe").into();
    }
    if kind == "qwen3_moe" {
        config["head_dim"] = 32.into();
    }
    if kind == "qwen2_moe" {
        config["shared_expert_intermediate_size"] = 64.into();
    }
    config
}

/// Returns values that f16 represents exactly and that differ between tensors and positions.
fn weights(config: &DecoderConfig) -> BTreeMap<String, Tensor> {
    let tensor = |(seed, (name, shape)): (usize, (String, Vec<usize>))| {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1024.0 - 1.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    };
    config.parameters().unwrap().into_iter().enumerate().map(tensor).collect()
}

/// Returns a folder with a model of this description and a tokenizer.
fn folder(description: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), description.to_string()).unwrap();
    let tensors = weights(&DecoderConfig::from_hugging_face(description).unwrap());
    candle_core::safetensors::save(
        &tensors.into_iter().collect::<HashMap<_, _>>(),
        folder.path().join("model.safetensors"),
    )
    .unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(path("models/llama").join(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// Returns the tensors with the names, shapes and row order of llama.cpp's converter.
fn converted(kind: &str, config: &DecoderConfig) -> BTreeMap<String, Tensor> {
    let tensors = weights(config);
    let mut all = BTreeMap::new();
    for (name, tensor) in &tensors {
        let mut name = name.replace("model.layers.", "blk.").replace("block_sparse_moe.", "mlp.");
        for (hugging_face, gguf) in [
            ("model.embed_tokens.", "token_embd."),
            ("model.norm.", "output_norm."),
            ("lm_head.", "output."),
            ("input_layernorm.", "attn_norm."),
            ("post_attention_layernorm.", "ffn_norm."),
            ("self_attn.q_norm.", "attn_q_norm."),
            ("self_attn.k_norm.", "attn_k_norm."),
            ("self_attn.q_proj.", "attn_q."),
            ("self_attn.k_proj.", "attn_k."),
            ("self_attn.v_proj.", "attn_v."),
            ("self_attn.o_proj.", "attn_output."),
            ("mlp.gate.", "ffn_gate_inp."),
            ("mlp.shared_expert_gate.", "ffn_gate_inp_shexp."),
            ("mlp.shared_expert.gate_proj.", "ffn_gate_shexp."),
            ("mlp.shared_expert.up_proj.", "ffn_up_shexp."),
            ("mlp.shared_expert.down_proj.", "ffn_down_shexp."),
        ] {
            name = name.replace(hugging_face, gguf);
        }
        if name.contains(".experts.") {
            continue;
        }
        let heads = match name.rsplit('.').nth(1) {
            Some("attn_q") if kind == "mixtral" => Some(config.num_attention_heads),
            Some("attn_k") if kind == "mixtral" => Some(config.num_key_value_heads),
            _ => None,
        };
        let tensor = match heads {
            Some(heads) => {
                let (rows, columns) = tensor.dims2().unwrap();
                let split_heads = tensor.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
                split_heads.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, columns)).unwrap()
            }
            None if name.contains("ffn_gate_inp_shexp") => tensor.squeeze(0).unwrap(),
            None => tensor.clone(),
        };
        all.insert(name, tensor);
    }
    let names = if kind == "mixtral" { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
    let module = if kind == "mixtral" { "block_sparse_moe" } else { "mlp" };
    for (block, (hugging_face, gguf)) in
        (0..2).flat_map(|block| names.into_iter().zip(["gate", "up", "down"]).map(move |n| (block, n)))
    {
        let expert =
            |expert: usize| &tensors[&format!("model.layers.{block}.{module}.experts.{expert}.{hugging_face}.weight")];
        let experts: Vec<&Tensor> = (0..12).map(expert).collect();
        all.insert(format!("blk.{block}.ffn_{gguf}_exps.weight"), Tensor::stack(&experts, 0).unwrap());
    }
    all
}

fn metadata(architecture: &str, config: &DecoderConfig) -> Vec<(String, GgufValue)> {
    let mixture = config.mixture.as_ref().unwrap();
    let size = |key: &str, size: usize| (format!("{architecture}.{key}"), GgufValue::U32(size as u32));
    let number = |key: &str, number: f64| (format!("{architecture}.{key}"), GgufValue::F32(number as f32));
    let mut all = vec![
        ("general.architecture".to_owned(), GgufValue::String(architecture.into())),
        size("context_length", config.ctx),
        size("embedding_length", config.hidden_size),
        size("block_count", config.blocks.len()),
        size("feed_forward_length", 96),
        size("attention.head_count", config.num_attention_heads),
        size("attention.head_count_kv", config.num_key_value_heads),
        size("attention.key_length", config.head_dim),
        size("expert_count", 12),
        size("expert_used_count", 3),
        number("attention.layer_norm_rms_epsilon", 1e-5),
        number("rope.freq_base", 1e4),
        ("tokenizer.ggml.padding_token_id".to_owned(), GgufValue::U32(3)),
    ];
    if architecture.starts_with("qwen") {
        all.push(size("expert_feed_forward_length", mixture.expert_width));
    }
    all.extend(mixture.shared_width.map(|width| size("expert_shared_feed_forward_length", width)));
    all
}

fn write(file: &Path, metadata: &[(String, GgufValue)], tensors: &BTreeMap<String, Tensor>, dtype: GgmlDType) {
    let metadata: Vec<(&str, &GgufValue)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let quantize = |(name, tensor): (&String, &Tensor)| {
        let dtype = if tensor.rank() == 1 || name.contains("gate_inp") { GgmlDType::F32 } else { dtype };
        (name.clone(), QTensor::quantize(tensor, dtype).unwrap())
    };
    let quantized: Vec<(String, QTensor)> = tensors.iter().map(quantize).collect();
    let quantized: Vec<(&str, &QTensor)> = quantized.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut std::fs::File::create(file).unwrap(), &metadata, &quantized).unwrap();
}

fn all_values(base: &BaseModel, parameter: &str, shape: &[usize]) -> Vec<f32> {
    base.values().values(parameter, shape, 0..shape.iter().product()).unwrap()
}

/// Returns the largest difference between the weights of a model and those that [`weights`] returns.
fn difference(base: &BaseModel) -> f32 {
    let want = weights(base.config());
    let of = |(name, shape): (String, Vec<usize>)| {
        let want = want[&name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let got = all_values(base, &name, &shape);
        assert_eq!(got.len(), want.len(), "{name}");
        got.iter().zip(want).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
    };
    base.config().parameters().unwrap().into_iter().map(of).fold(0f32, f32::max)
}

#[test]
fn a_file_of_a_mixture_has_the_description_and_the_weights_of_its_model() {
    for (kind, architecture) in KINDS {
        let config = DecoderConfig::from_hugging_face(&description(kind)).unwrap();
        let (folder, tensors) = (tempfile::tempdir().unwrap(), converted(kind, &config));
        let file = folder.path().join("model.gguf");
        for (dtype, accuracy) in [(GgmlDType::F32, 0.0), (GgmlDType::Q8_0, 1e-2), (GgmlDType::Q4_0, 0.2)] {
            write(&file, &metadata(architecture, &config), &tensors, dtype);
            let base = BaseModel::open(&file).unwrap();
            assert_eq!(base.config(), &config, "{kind}");
            assert_eq!(base.config_json()["model_type"], kind);
            let largest = difference(&base);
            assert!(largest <= accuracy, "{kind} in {dtype:?} differs by {largest}");
            // Parts of an expert need not begin at the start of a block of the format.
            for (name, shape) in config.parameters().unwrap().iter().filter(|(name, _)| name.contains(".experts.11.")) {
                let all = all_values(&base, name, shape);
                for range in [0..1, 31..97, all.len() - 5..all.len(), 7..7] {
                    let part = base.values().values(name, shape, range.clone()).unwrap();
                    assert!(part == all[range.clone()], "{kind} in {dtype:?}: {name} {range:?}");
                }
            }
        }
    }
}

#[test]
fn a_written_mixture_has_the_keys_and_tensors_of_llama_cpp_and_is_read_as_the_same_model() {
    for (kind, architecture) in KINDS {
        let folder = folder(&description(kind));
        let base = BaseModel::open(folder.path()).unwrap();
        let file = folder.path().join("model.gguf");
        for (format, accuracy) in [(GgufFormat::F16, 0.0), (GgufFormat::Q8_0, 1e-2)] {
            let merged = MergedModel::new(&base, None).unwrap();
            merged.write_gguf(&file, format).unwrap();
            let read = BaseModel::open(&file).unwrap();
            assert_eq!(read.config(), base.config(), "{kind}");
            let largest = difference(&read);
            assert!(largest <= accuracy, "{kind} in {format:?} differs by {largest}");
        }
        let content = Content::read(&mut std::fs::File::open(&file).unwrap()).unwrap();
        let (keys, expected) = (metadata(architecture, base.config()), converted(kind, base.config()));
        for (key, value) in keys {
            assert_eq!(format!("{:?}", content.metadata[&key]), format!("{value:?}"), "{kind}: {key}");
        }
        let names: BTreeSet<&String> = content.tensor_infos.keys().collect();
        assert!(names.into_iter().eq(expected.keys()), "{kind}");
        for (name, info) in &content.tensor_infos {
            assert_eq!(info.shape.dims(), expected[name].dims(), "{kind}: {name}");
            let is_f32 = expected[name].rank() == 1 || name.contains("ffn_gate_inp");
            assert_eq!(info.ggml_dtype, if is_f32 { GgmlDType::F32 } else { GgmlDType::Q8_0 }, "{kind}: {name}");
        }
    }
}

#[test]
fn mixtures_that_llama_cpp_computes_differently_are_not_written() {
    let refusal = |description: &Value| {
        let folder = folder(description);
        let base = BaseModel::open(folder.path()).unwrap();
        let file = folder.path().join("model.gguf");
        let error = MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap_err().to_string();
        assert!(!file.exists());
        error.replace(folder.path().to_str().unwrap(), "DIR")
    };
    let with = |kind: &str, key: &str, value: Value| {
        let mut description = description(kind);
        description[key] = value;
        refusal(&description)
    };
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!([1])));
    insta::assert_snapshot!(with("qwen3_moe", "norm_topk_prob", json!(false)));
    insta::assert_snapshot!(with("olmoe", "norm_topk_prob", json!(true)));
    insta::assert_snapshot!(with("olmoe", "clip_qkv", json!(1.0)));
}

#[test]
fn files_of_mixtures_that_contradict_themselves_are_refused() {
    let config = DecoderConfig::from_hugging_face(&description("qwen3_moe")).unwrap();
    let (folder, tensors) = (tempfile::tempdir().unwrap(), converted("qwen3_moe", &config));
    let file = folder.path().join("model.gguf");
    let refusal = |metadata: &[(String, GgufValue)], tensors: &BTreeMap<String, Tensor>| {
        write(&file, metadata, tensors, GgmlDType::F32);
        let error = BaseModel::open(&file).unwrap_err().to_string();
        error.replace(folder.path().to_str().unwrap(), "DIR")
    };
    let with = |key: &str, value: Option<GgufValue>| {
        let mut metadata = metadata("qwen3moe", &config);
        metadata.retain(|(known, _)| *known != format!("qwen3moe.{key}"));
        metadata.extend(value.map(|value| (format!("qwen3moe.{key}"), value)));
        refusal(&metadata, &tensors)
    };
    insta::assert_snapshot!(with("expert_count", None));
    insta::assert_snapshot!(with("expert_count", Some(GgufValue::U32(0))));
    insta::assert_snapshot!(with("expert_count", Some(GgufValue::U32(8))));
    insta::assert_snapshot!(with("expert_used_count", None));
    insta::assert_snapshot!(with("expert_used_count", Some(GgufValue::U32(13))));
    insta::assert_snapshot!(with("expert_feed_forward_length", Some(GgufValue::U32(16))));
    insta::assert_snapshot!(with("expert_gating_func", Some(GgufValue::U32(2))));
    insta::assert_snapshot!(with("expert_weights_scale", Some(GgufValue::F32(2.5))));
    let mut without = tensors.clone();
    without.remove("blk.1.ffn_up_exps.weight");
    insta::assert_snapshot!(refusal(&metadata("qwen3moe", &config), &without));
    let mut fewer = tensors.clone();
    fewer.insert(
        "blk.1.ffn_up_exps.weight".into(),
        tensors["blk.1.ffn_up_exps.weight"].narrow(0, 0, 11).unwrap().affine(1.0, 0.0).unwrap(),
    );
    insta::assert_snapshot!(refusal(&metadata("qwen3moe", &config), &fewer));
    // A dense model claims to have experts.
    let mut of_qwen2 = metadata("qwen3moe", &config);
    of_qwen2[0].1 = GgufValue::String("qwen2".into());
    of_qwen2.iter_mut().for_each(|(key, _)| *key = key.replace("qwen3moe.", "qwen2."));
    insta::assert_snapshot!(refusal(&of_qwen2, &tensors));
}
