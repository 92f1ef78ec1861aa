//! GGUF files of all families of decoders: their tensors, values and keys are those of llama.cpp's converter, and
//! models that llama.cpp computes differently are refused.

use crate::fixtures::path;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use candle_core::{Device, Tensor};
use candle_zero::models::DecoderConfig;
use candle_zero_finetune::{BaseModel, GgufFormat, MergedModel};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// A model, and what its file contains.
struct Case {
    kind: &'static str,
    architecture: &'static str,
    /// The keys of config.json in which the model differs from [`description`].
    differences: Value,
    /// The tensors outside the blocks, and those of a block, from gguf-py's lists. Those with a bias have a `+`.
    outer: &'static str,
    of_block: &'static str,
    keys: Vec<(&'static str, GgufValue)>,
}

fn description(kind: &str, differences: &Value) -> Value {
    let mut config = json!({
        "model_type": kind, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": null, "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3,
        "torch_dtype": "float32",
    });
    for (key, value) in differences.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn size(size: u32) -> GgufValue {
    GgufValue::U32(size)
}

fn number(number: f32) -> GgufValue {
    GgufValue::F32(number)
}

fn text(text: &str) -> GgufValue {
    GgufValue::String(text.into())
}

const UNTIED: &str = "token_embd output_norm output";
const TIED: &str = "token_embd output_norm";
const LAYER_NORM: &str = "token_embd output_norm+ output";
const PLAIN: &str = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down";
const QKV_BIASES: &str = "attn_norm attn_q+ attn_k+ attn_v+ attn_output ffn_norm ffn_gate ffn_up ffn_down";
const GEMMA2: &str = "attn_norm attn_q attn_k attn_v attn_output post_attention_norm ffn_norm ffn_gate ffn_up ffn_down \
                      post_ffw_norm";
const GEMMA3: &str = "attn_norm attn_q attn_q_norm attn_k attn_k_norm attn_v attn_output post_attention_norm ffn_norm \
                      ffn_gate ffn_up ffn_down post_ffw_norm";
const OLMO2: &str = "attn_q attn_k attn_v attn_output post_attention_norm attn_q_norm attn_k_norm post_ffw_norm ffn_gate \
                     ffn_up ffn_down";

fn cases() -> Vec<Case> {
    let case = |kind, architecture, differences, outer, of_block, keys: &[(&'static str, GgufValue)]| Case {
        kind,
        architecture,
        differences,
        outer,
        of_block,
        keys: keys.to_vec(),
    };
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32});
    let yarn_keys = [
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", number(2.0)),
        ("rope.scaling.original_context_length", size(32)),
        ("rope.scaling.attn_factor", number(1.0)),
        ("rope.scaling.yarn_beta_fast", number(32.0)),
        ("rope.scaling.yarn_beta_slow", number(1.0)),
    ];
    let gemma3 = json!({
        "num_hidden_layers": 6, "sliding_window": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 16,
    });
    let gemma3_keys = [
        ("rope.freq_base", number(1e6)),
        ("rope.scaling.type", text("linear")),
        ("rope.scaling.factor", number(8.0)),
        ("attention.sliding_window", size(16)),
        ("context_length", size(64)),
    ];
    let inner = |kind: &str, differences: &Value| json!({"text_config": description(kind, differences)});
    let longrope = json!({
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32, "sliding_window": 48,
        "rope_scaling": {"type": "longrope", "short_factor": [1, 1.5, 2, 3, 4, 5], "long_factor": [2, 2, 3, 4, 5, 6]},
    });
    vec![
        case(
            "llama",
            "llama",
            json!({"attention_bias": true, "mlp_bias": true}),
            UNTIED,
            "attn_norm attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm ffn_gate+ ffn_up+ ffn_down+",
            &[("rope.dimension_count", size(16)), ("attention.layer_norm_rms_epsilon", number(1e-5))],
        ),
        case(
            "mistral",
            "llama",
            json!({"sliding_window": 32, "head_dim": 32}),
            UNTIED,
            PLAIN,
            &[("context_length", size(32)), ("attention.key_length", size(32)), ("rope.dimension_count", size(32))],
        ),
        case(
            "ministral",
            "llama",
            json!({"sliding_window": 48, "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}),
            UNTIED,
            PLAIN,
            &[("context_length", size(48))],
        ),
        case("ministral3", "llama", json!({"rope_parameters": yarn}), UNTIED, PLAIN, &yarn_keys),
        case("mistral3", "llama", inner("mistral", &json!({})), UNTIED, PLAIN, &[("context_length", size(64))]),
        case("qwen2", "qwen2", json!({}), UNTIED, QKV_BIASES, &[("rope.freq_base", number(1e4))]),
        case(
            "qwen3",
            "qwen3",
            json!({"tie_word_embeddings": true}),
            TIED,
            "attn_norm attn_q attn_q_norm attn_k attn_k_norm attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
            &[],
        ),
        case(
            "gemma2",
            "gemma2",
            json!({"sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": true}),
            TIED,
            GEMMA2,
            &[
                ("attn_logit_softcapping", number(50.0)),
                ("final_logit_softcapping", number(30.0)),
                ("attention.sliding_window", size(16)),
                ("context_length", size(64)),
            ],
        ),
        case("gemma3_text", "gemma3", gemma3.clone(), UNTIED, GEMMA3, &gemma3_keys),
        case("gemma3", "gemma3", inner("gemma3_text", &gemma3), UNTIED, GEMMA3, &gemma3_keys),
        case(
            "phi3",
            "phi3",
            longrope,
            "token_embd output_norm output rope_factors_long rope_factors_short",
            "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down",
            &[
                ("rope.dimension_count", size(12)),
                ("rope.scaling.original_context_length", size(32)),
                ("attention.sliding_window", size(48)),
                ("context_length", size(48)),
            ],
        ),
        case(
            "glm",
            "chatglm",
            json!({}),
            UNTIED,
            "attn_norm attn_q+ attn_k+ attn_v+ attn_output ffn_norm ffn_up ffn_down",
            &[("rope.dimension_count", size(8))],
        ),
        case(
            "glm4",
            "glm4",
            json!({"attention_bias": false}),
            UNTIED,
            "attn_norm attn_q attn_k attn_v attn_output post_attention_norm ffn_norm ffn_up ffn_down post_ffw_norm",
            &[("rope.dimension_count", size(8))],
        ),
        case(
            "granite",
            "granite",
            json!({"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0}),
            UNTIED,
            PLAIN,
            &[
                ("attention.scale", number(0.125)),
                ("embedding_scale", number(12.0)),
                ("residual_scale", number(0.25)),
                ("logit_scale", number(8.0)),
            ],
        ),
        case("smollm3", "smollm3", json!({}), UNTIED, PLAIN, &[("rope.freq_base", number(1e4))]),
        case(
            "starcoder2",
            "starcoder2",
            json!({}),
            LAYER_NORM,
            "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm+ ffn_up+ ffn_down+",
            &[("attention.layer_norm_epsilon", number(1e-5))],
        ),
        case(
            "cohere",
            "command-r",
            json!({"tie_word_embeddings": true, "logit_scale": 0.25}),
            TIED,
            "attn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down",
            &[
                ("logit_scale", number(0.25)),
                ("rope.scaling.type", text("none")),
                ("attention.layer_norm_epsilon", number(1e-5)),
            ],
        ),
        case(
            "cohere2",
            "cohere2",
            json!({"tie_word_embeddings": true, "sliding_window": 16}),
            TIED,
            "attn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down",
            &[("logit_scale", number(0.0625)), ("attention.sliding_window", size(16)), ("context_length", size(64))],
        ),
        case("olmo2", "olmo2", json!({}), UNTIED, OLMO2, &[("attention.layer_norm_rms_epsilon", number(1e-5))]),
        case(
            "olmo3",
            "olmo2",
            json!({"sliding_window": 16, "rope_scaling": yarn}),
            UNTIED,
            OLMO2,
            &[
                &yarn_keys[..],
                &[
                    ("attention.sliding_window", size(16)),
                    (
                        "attention.sliding_window_pattern",
                        GgufValue::Array([true, true, true, false].map(GgufValue::Bool).to_vec()),
                    ),
                ],
            ]
            .concat(),
        ),
        case(
            "nemotron",
            "nemotron",
            json!({}),
            LAYER_NORM,
            "attn_norm+ attn_q attn_k attn_v attn_output ffn_norm+ ffn_up ffn_down",
            &[("rope.dimension_count", size(8)), ("attention.layer_norm_epsilon", number(1e-5))],
        ),
        case(
            "stablelm",
            "stablelm",
            json!({"use_qkv_bias": true}),
            LAYER_NORM,
            "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output ffn_norm+ ffn_gate ffn_up ffn_down",
            &[("rope.dimension_count", size(4)), ("use_parallel_residual", GgufValue::Bool(false))],
        ),
        case(
            "stablelm",
            "stablelm",
            json!({"use_parallel_residual": true}),
            LAYER_NORM,
            "attn_norm+ attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down",
            &[("use_parallel_residual", GgufValue::Bool(true))],
        ),
        case(
            "gpt_oss",
            "gpt-oss",
            gpt_oss(),
            UNTIED,
            "attn_norm post_attention_norm attn_q+ attn_k+ attn_v+ attn_output+ attn_sinks ffn_gate_inp+ ffn_gate_exps+ \
             ffn_up_exps+ ffn_down_exps+",
            &[
                ("expert_count", size(4)),
                ("expert_used_count", size(2)),
                ("expert_feed_forward_length", size(96)),
                ("attention.sliding_window", size(16)),
                ("rope.scaling.type", text("yarn")),
                ("rope.scaling.factor", number(4.0)),
                ("rope.freq_base", number(150_000.0)),
            ],
        ),
    ]
}

fn gpt_oss() -> Value {
    json!({
        "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": false},
    })
}

/// Returns values that f16 represents exactly, even with 1 added, and that differ between tensors and positions.
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
    let file = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors.into_iter().collect::<HashMap<_, _>>(), file).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(path("models/llama").join(name), folder.path().join(name)).unwrap();
    }
    folder
}

fn write(base: &BaseModel, file: &Path, format: GgufFormat) {
    MergedModel::new(base, None).unwrap().write_gguf(file, format).unwrap_or_else(|error| panic!("{error}"));
}

/// Returns the rows of queries or keys in llama.cpp's order: in each head, those of the two halves alternate.
fn interleaved(tensor: &Tensor, heads: usize) -> Tensor {
    let rows = tensor.dim(0).unwrap();
    let columns = tensor.elem_count() / rows;
    let split_heads = tensor.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
    split_heads.transpose(1, 2).unwrap().contiguous().unwrap().reshape(tensor.dims()).unwrap()
}

/// Returns the tensors that llama.cpp's converter would write.
fn converted(architecture: &str, config: &DecoderConfig) -> BTreeMap<String, Tensor> {
    let after_attention = match architecture {
        "gemma2" | "gemma3" | "olmo2" | "gpt-oss" => "post_attention_norm.",
        _ => "ffn_norm.",
    };
    let names = [
        ("post_self_attn_layernorm.", "post_attention_norm."),
        ("post_mlp_layernorm.", "post_ffw_norm."),
        ("post_attention_layernorm.", after_attention),
        ("pre_feedforward_layernorm.", "ffn_norm."),
        ("post_feedforward_layernorm.", "post_ffw_norm."),
        ("input_layernorm.", "attn_norm."),
        ("embed_tokens.", "token_embd."),
        ("lm_head.", "output."),
        ("self_attn.q_norm.", "attn_q_norm."),
        ("self_attn.k_norm.", "attn_k_norm."),
        ("self_attn.q_proj.", "attn_q."),
        ("self_attn.k_proj.", "attn_k."),
        ("self_attn.v_proj.", "attn_v."),
        ("self_attn.o_proj.", "attn_output."),
        ("self_attn.qkv_proj.", "attn_qkv."),
        ("self_attn.sinks", "attn_sinks.weight"),
        ("mlp.router.", "ffn_gate_inp."),
        ("mlp.gate_proj.", "ffn_gate."),
        ("mlp.up_proj.", "ffn_up."),
        ("mlp.gate_up_proj.", "ffn_up."),
        ("mlp.down_proj.", "ffn_down."),
        ("mlp.c_fc.", "ffn_up."),
        ("mlp.c_proj.", "ffn_down."),
    ];
    let mut all = BTreeMap::new();
    for (parameter, tensor) in weights(config) {
        let bare = parameter.strip_prefix(config.prefix).unwrap_or(&parameter);
        let mut name = bare.replace("layers.", "blk.");
        if let Some((block, experts)) = name.split_once(".mlp.experts.") {
            let ending = if experts.ends_with("_bias") { "bias" } else { "weight" };
            // [experts, in, out], or [experts, out]
            let transposed = if tensor.rank() == 3 { tensor.transpose(1, 2).unwrap() } else { tensor.clone() };
            let put = |all: &mut BTreeMap<_, _>, part: &str, tensor: Tensor| {
                all.insert(format!("{block}.ffn_{part}_exps.{ending}"), tensor.contiguous().unwrap());
            };
            if experts.starts_with("down_proj") {
                put(&mut all, "down", transposed);
                continue;
            }
            let every_other = |first: u32| {
                let columns: Vec<u32> = (first..transposed.dim(1).unwrap() as u32).step_by(2).collect();
                transposed.contiguous().unwrap().index_select(&Tensor::new(columns, &Device::Cpu).unwrap(), 1).unwrap()
            };
            put(&mut all, "gate", every_other(0));
            put(&mut all, "up", every_other(1));
            continue;
        }
        if name.starts_with("norm.") {
            name = format!("output_{name}");
        }
        let plus_one = ["gemma2", "gemma3", "nemotron"].contains(&architecture) && name.ends_with("norm.weight");
        for (hugging_face, gguf) in names {
            name = name.replace(hugging_face, gguf);
        }
        let is_permuted = ["llama", "granite", "smollm3"].contains(&architecture);
        let tensor = match name.rsplit('.').nth(1) {
            Some("attn_q") if is_permuted => interleaved(&tensor, config.num_attention_heads),
            Some("attn_k") if is_permuted => interleaved(&tensor, config.num_key_value_heads),
            _ if plus_one => (tensor + 1.0).unwrap(),
            _ => tensor,
        };
        all.insert(name, tensor);
    }
    all
}

/// Returns the names of the tensors in a list.
fn names(prefix: &str, list: &str) -> Vec<String> {
    let of = |name: &str| match name.strip_suffix('+') {
        Some(name) => vec![format!("{prefix}{name}.weight"), format!("{prefix}{name}.bias")],
        None => vec![format!("{prefix}{name}.weight")],
    };
    list.split_whitespace().flat_map(of).collect()
}

#[test]
fn files_of_all_families_have_the_tensors_the_values_and_the_keys_of_llama_cpp() {
    for Case { kind, architecture, differences, outer, of_block, keys } in cases() {
        let folder = folder(&description(kind, &differences));
        let base = BaseModel::open(folder.path()).unwrap();
        let file = folder.path().join("model.gguf");
        let mut want: BTreeSet<String> = names("", outer).into_iter().collect();
        (0..base.config().blocks.len()).for_each(|block| want.extend(names(&format!("blk.{block}."), of_block)));
        let expected = converted(architecture, base.config());
        for (format, dtype) in [(GgufFormat::F16, GgmlDType::F16), (GgufFormat::Q8_0, GgmlDType::Q8_0)] {
            write(&base, &file, format);
            let mut reader = std::fs::File::open(&file).unwrap();
            let content = Content::read(&mut reader).unwrap();
            assert!(
                content.tensor_infos.keys().collect::<BTreeSet<_>>().into_iter().eq(&want),
                "{kind}: {:?}",
                content.tensor_infos.keys()
            );
            for (name, tensor) in &expected {
                let info = &content.tensor_infos[name];
                assert_eq!(info.shape.dims(), tensor.dims(), "{kind}: {name}");
                let is_f32 = tensor.rank() == 1 || name.ends_with(".bias") || name.contains("gate_inp");
                assert_eq!(info.ggml_dtype, if is_f32 { GgmlDType::F32 } else { dtype }, "{kind}: {name}");
                let found = content.tensor(&mut reader, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
                let difference = crate::fixtures::max_difference(&found, tensor);
                let tolerance = if info.ggml_dtype == GgmlDType::Q8_0 { 5e-3 } else { 0.0 };
                assert!(difference <= tolerance, "{kind}: {name} differs by {difference}");
            }
            let value = |key: &str| format!("{:?}", content.metadata.get(key));
            assert_eq!(value("general.architecture"), format!("{:?}", Some(text(architecture))));
            for (key, expected) in &keys {
                assert_eq!(value(&format!("{architecture}.{key}")), format!("{:?}", Some(expected)), "{kind}: {key}");
            }
        }
    }
}

#[test]
fn models_that_llama_cpp_computes_differently_are_refused_with_the_key_and_its_assumption() {
    let refused = [
        ("llama", json!({"hidden_act": "gelu_pytorch_tanh"})),
        ("llama", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})),
        ("llama", json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": false}})),
        (
            "ministral3",
            json!({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}}),
        ),
        ("qwen2", json!({"head_dim": 32})),
        ("qwen3", json!({"attention_bias": true})),
        (
            "qwen3",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
        ),
        ("gemma2", json!({"sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": true})),
        ("gemma2", json!({"sliding_window": 16, "query_pre_attn_scalar": 16})),
        (
            "gemma2",
            json!({"sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": true, "attn_logit_softcapping": null}),
        ),
        (
            "gemma2",
            json!({"sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": true, "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ),
        ("gemma3_text", json!({"sliding_window": 16, "query_pre_attn_scalar": 16, "rope_local_base_freq": 5e3})),
        ("gemma3_text", json!({"sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0})),
        ("gemma3_text", json!({"sliding_window": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2})),
        ("smollm3", json!({"no_rope_layers": [1, 0, 1, 0]})),
        ("smollm3", json!({"attention_bias": true})),
        ("starcoder2", json!({"use_bias": false})),
        ("starcoder2", json!({"hidden_act": "gelu"})),
        ("cohere", json!({})),
        ("cohere2", json!({"sliding_window": 16, "tie_word_embeddings": true, "sliding_window_pattern": 2})),
        ("olmo2", json!({"tie_word_embeddings": true})),
        (
            "olmo3",
            json!({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ),
        (
            "olmo3",
            json!({"sliding_window": 16, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }}),
        ),
        ("nemotron", json!({"hidden_act": "silu"})),
        ("stablelm", json!({"tie_word_embeddings": true})),
        ("gpt_oss", json!({"swiglu_limit": 5.0})),
        ("gpt_oss", json!({"swiglu_alpha": 1.5})),
        ("gpt_oss", json!({"attention_bias": false})),
        ("gpt_oss", json!({"tie_word_embeddings": true})),
        ("gpt_oss", json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": true}})),
    ];
    let mut all = String::new();
    for (kind, differences) in refused {
        let mut described =
            if kind == "gpt_oss" { description(kind, &gpt_oss()) } else { description(kind, &json!({})) };
        differences.as_object().unwrap().iter().for_each(|(key, value)| described[key] = value.clone());
        let folder = folder(&described);
        let base = BaseModel::open(folder.path()).unwrap();
        let file = folder.path().join("model.gguf");
        let written = MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16);
        let error = written.err().unwrap_or_else(|| panic!("{kind} with {differences} is written")).to_string();
        assert!(!file.exists());
        all += &format!("{kind} {}\n", error.replace(folder.path().to_str().unwrap(), "DIR"));
    }
    insta::assert_snapshot!(all);
}
