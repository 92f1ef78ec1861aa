//! Invalid model folders and descriptions: the error names the problem, and is reported before any weights are
//! read.

use crate::fixtures::{MODELS, base, copy, json, path};
use candle_core::{DType, Device};
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero_finetune::BaseModel;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

/// Returns the message, without the folder's name.
fn refused(folder: &Path) -> String {
    let text = BaseModel::open(folder).unwrap_err().to_string();
    text.replace(folder.to_str().unwrap(), "DIR")
}

/// Returns the message about a model with changed keys in config.json.
fn with_config(model: &str, change: impl FnOnce(&mut Value)) -> String {
    let folder = copy(model);
    edit(&folder.path().join("config.json"), change);
    refused(folder.path())
}

fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut content: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    change(&mut content);
    std::fs::write(file, content.to_string()).unwrap();
}

/// Returns the message about a model with one changed key.
fn with(model: &str, key: &str, value: Value) -> String {
    with_config(model, |config| config[key] = value)
}

#[test]
fn a_path_without_a_model_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(refused(&folder.path().join("nowhere")), @"DIR is not a model: there is no such file or folder; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    insta::assert_snapshot!(refused(folder.path()), @"DIR is not a model: it has neither config.json nor a GGUF file; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    std::fs::copy(path("models/llama/config.json"), folder.path().join("config.json")).unwrap();
    insta::assert_snapshot!(refused(folder.path()), @"DIR is not a model: it has neither model.safetensors nor model.safetensors.index.json; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    std::fs::write(folder.path().join("config.json"), "{\"model_type\": ").unwrap();
    insta::assert_snapshot!(refused(folder.path()), @"DIR/config.json is not a model description: EOF while parsing a value at line 1 column 15");
    std::fs::write(folder.path().join("config.json"), "[]").unwrap();
    insta::assert_snapshot!(refused(folder.path()), @"DIR/config.json is not a model description: it is not an object");
    let text = BaseModel::open(folder.path().join("config.json")).unwrap_err().to_string();
    insta::assert_snapshot!(text.replace(folder.path().to_str().unwrap(), "DIR"), @"DIR/config.json is not a model: it is a file whose name does not end in .gguf; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
}

#[test]
fn shards_that_are_missing_cut_short_or_elsewhere_are_named() {
    let folder = copy("qwen3");
    let (dir, index) = (folder.path(), folder.path().join("model.safetensors.index.json"));
    let shard = dir.join("model-00002-of-00004.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    std::fs::remove_file(&shard).unwrap();
    insta::assert_snapshot!(refused(dir), @"DIR/model.safetensors.index.json names DIR/model-00002-of-00004.safetensors, which has 13 of its tensors but cannot be read: No such file or directory (os error 2); all files of an index are needed");
    std::fs::write(&shard, &whole[..whole.len() - 5000]).unwrap();
    insta::assert_snapshot!(refused(dir), @"DIR/model-00002-of-00004.safetensors is not a readable safetensors file: it was cut short (it has 104312 of the 109312 bytes that its header describes)");
    std::fs::write(&shard, &whole[..100]).unwrap();
    insta::assert_snapshot!(refused(dir), @"DIR/model-00002-of-00004.safetensors is not a readable safetensors file: invalid header length");
    std::fs::write(&shard, &whole).unwrap();
    let good = std::fs::read(&index).unwrap();
    for place in ["../model-00001-of-00004.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""] {
        edit(&index, |index| index["weight_map"]["lm_head.weight"] = place.into());
        let text = refused(dir);
        assert!(text.contains("lm_head.weight is in") && text.contains(&format!("{place:?}")), "{text}");
    }
    insta::assert_snapshot!(refused(dir), @r#"according to DIR/model.safetensors.index.json, tensor lm_head.weight is in ""; an index names files in its own folder, without a path"#);
    std::fs::write(&index, &good).unwrap();
    edit(&index, |index| index["weight_map"]["lm_head.weight"] = "model-00001-of-00004.safetensors".into());
    insta::assert_snapshot!(refused(dir), @"according to DIR/model.safetensors.index.json, tensor lm_head.weight is in model-00001-of-00004.safetensors, which has no such tensor; one of the two files belongs to another model");
    std::fs::write(&index, "{}").unwrap();
    insta::assert_snapshot!(refused(dir), @r#"DIR/model.safetensors.index.json is not a valid index of safetensors files: it has no object "weight_map""#);
    std::fs::write(&index, &good).unwrap();
    BaseModel::open(dir).unwrap();
}

#[test]
fn weights_that_are_not_those_of_the_description_are_named() {
    insta::assert_snapshot!(with("llama", "intermediate_size", json!(120)), @"tensor model.layers.0.mlp.gate_proj.weight in DIR/model.safetensors has shape [128, 48], but DIR/config.json describes shape [120, 48]; take both files from the same model");
    insta::assert_snapshot!(with("llama", "vocab_size", json!(500)), @"tensor model.embed_tokens.weight in DIR/model.safetensors has shape [512, 48], but DIR/config.json describes shape [500, 48]; take both files from the same model");
    insta::assert_snapshot!(with("llama", "num_hidden_layers", json!(4)), @"DIR/model.safetensors has no tensor model.layers.3.input_layernorm.weight of shape [48], which the model needs; the file must hold exactly the model's tensors; it has model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight and 26 more");
    insta::assert_snapshot!(with("llama", "num_hidden_layers", json!(2)), @"DIR/model.safetensors holds tensors that the model does not have: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight, model.layers.2.mlp.up_proj.weight, model.layers.2.post_attention_layernorm.weight, model.layers.2.self_attn.k_proj.weight, model.layers.2.self_attn.o_proj.weight, model.layers.2.self_attn.q_proj.weight and 1 more; does it belong to a different model, or to one of a different size?");
    insta::assert_snapshot!(with("llama", "attention_bias", json!(true)), @"DIR/model.safetensors has no tensor model.layers.0.self_attn.q_proj.bias of shape [48], which the model needs; the file must hold exactly the model's tensors; it has model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight and 26 more");
    insta::assert_snapshot!(with("llama", "tie_word_embeddings", json!(false)), @"DIR/model.safetensors has no tensor lm_head.weight of shape [512, 48], which the model needs; the file must hold exactly the model's tensors; it has model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight and 26 more");
    insta::assert_snapshot!(with("qwen2", "model_type", json!("qwen3")), @"tensor model.layers.0.self_attn.q_proj.weight in DIR/model.safetensors has shape [56, 56], but DIR/config.json describes shape [512, 56]; take both files from the same model");
    // One tensor contains integers.
    let folder = copy("llama");
    let file = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let place = bytes.windows(5).position(|part| part == b"\"F32\"").unwrap();
    bytes[place..place + 5].copy_from_slice(b"\"I32\"");
    std::fs::write(&file, bytes).unwrap();
    let text = refused(folder.path());
    assert!(text.contains("is of type I32; only F32, F16 and BF16 can be read"), "{text}");
}

#[test]
fn descriptions_that_this_library_does_not_compute_with_are_refused() {
    insta::assert_snapshot!(with("llama", "model_type", json!("mamba")), @r#"DIR/config.json: model_type is "mamba", which is not supported; the supported types are cohere, cohere2, gemma2, gemma3, gemma3_text, glm, glm4, gpt2, gpt_oss, granite, llama, ministral, ministral3, mistral, mistral3, mixtral, nemotron, olmo2, olmo3, olmoe, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, smollm3, stablelm, starcoder2"#);
    insta::assert_snapshot!(with_config("llama", |config| { config.as_object_mut().unwrap().remove("model_type"); }), @"DIR/config.json: model_type is absent, which is not supported; the supported types are cohere, cohere2, gemma2, gemma3, gemma3_text, glm, glm4, gpt2, gpt_oss, granite, llama, ministral, ministral3, mistral, mistral3, mixtral, nemotron, olmo2, olmo3, olmoe, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, smollm3, stablelm, starcoder2");
    insta::assert_snapshot!(with("llama", "hidden_act", json!("relu")), @r#"DIR/config.json: hidden_act is "relu", but must be silu, swish, gelu_new or gelu_pytorch_tanh"#);
    insta::assert_snapshot!(with("gemma2", "hidden_activation", json!("gelu")), @r#"DIR/config.json: hidden_activation is "gelu", but must be silu, swish, gelu_new or gelu_pytorch_tanh"#);
    insta::assert_snapshot!(with("llama", "hidden_size", json!("48")), @r#"DIR/config.json: hidden_size is "48", but must be a whole number from 1 to 4294967295"#);
    insta::assert_snapshot!(with("llama", "hidden_size", json!(0)), @"DIR/config.json: hidden_size is 0, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("llama", "num_hidden_layers", json!(4_000_000_000u32)), @"DIR/config.json: num_hidden_layers is 4000000000, but must be at most 16384");
    insta::assert_snapshot!(with("llama", "num_key_value_heads", json!(3)), @"DIR/config.json: num_key_value_heads is 3, but must be a divisor of num_attention_heads (4), so that each key and value head serves the same number of query heads");
    insta::assert_snapshot!(with("llama", "rms_norm_eps", json!(-1e-5)), @"DIR/config.json: rms_norm_eps is -0.00001, but must be a positive number");
    insta::assert_snapshot!(with("llama", "head_dim", json!(1 << 28)), @"DIR/config.json: head_dim is 268435456, but must be at most 16384");
    insta::assert_snapshot!(with("llama", "head_dim", json!(13)), @"DIR/config.json: head_dim is 13, but must be even: rotary positions rotate pairs of elements");
    insta::assert_snapshot!(with_config("llama", |config| { config["head_dim"] = Value::Null; config["num_attention_heads"] = json!(5); }), @"DIR/config.json: hidden_size is 48, but must be a multiple of num_attention_heads (5) if head_dim is absent");
    insta::assert_snapshot!(with("llama", "rope_parameters", json!({"rope_type": "ntk", "factor": 4.0})), @r#"DIR/config.json: rope_parameters.rope_type is "ntk", but must be default, linear, dynamic, yarn, longrope or llama3"#);
    insta::assert_snapshot!(with("llama", "rope_parameters", json!({"rope_type": "linear"})), @"DIR/config.json: rope_parameters.factor is absent, but must be a positive number");
    insta::assert_snapshot!(with("llama", "rope_theta", json!(5e5)), @"DIR/config.json: rope_parameters.rope_theta is 10000.0, but must be equal to the outer rope_theta (500000)");
    insta::assert_snapshot!(with("llama", "rope_scaling", json!({"type": "linear", "factor": 2.0})), @r#"DIR/config.json: rope_scaling is {"factor":2.0,"type":"linear"}, but must be absent or equal to rope_parameters"#);
    insta::assert_snapshot!(with("llama32", "rope_parameters", json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 32})), @"DIR/config.json: rope_parameters.high_freq_factor is 1.0, but must be above low_freq_factor (4)");
    insta::assert_snapshot!(with("phi3", "partial_rotary_factor", json!(0.75)), @"DIR/config.json: rope_parameters.partial_rotary_factor is 1.0, but must be equal to the outer partial_rotary_factor (0.75)");
    insta::assert_snapshot!(with("phi3", "rope_parameters", json!({"rope_type": "longrope", "long_factor": [1.0]})), @"DIR/config.json: rope_parameters.short_factor is absent, but must be a list of positive numbers, one for each pair of elements of a head");
    insta::assert_snapshot!(with("qwen3", "layer_types", json!(["full_attention"])), @"DIR/config.json: layer_types is a list of length 1, but must be of length num_hidden_layers (3)");
    insta::assert_snapshot!(with("gemma3", "layer_types", json!(["chunked_attention", "full_attention", "full_attention"])), @r#"DIR/config.json: layer_types is a list that contains "chunked_attention", but must be a list of full_attention and sliding_attention"#);
    insta::assert_snapshot!(with("qwen2", "layer_types", json!(["full_attention", "sliding_attention"])), @"DIR/config.json: use_sliding_window is false, but must be true if layer_types contains sliding_attention");
    insta::assert_snapshot!(with("gemma2", "sliding_window", Value::Null), @"DIR/config.json: sliding_window is null, but must be a number if layer_types contains sliding_attention");
    insta::assert_snapshot!(with("gemma3", "use_bidirectional_attention", json!(true)), @"DIR/config.json: use_bidirectional_attention is true, but must be false: a language model does not see later tokens");
    insta::assert_snapshot!(with("gpt2", "n_head", json!(5)), @"DIR/config.json: n_embd is 48, but must be a multiple of n_head (5)");
    insta::assert_snapshot!(with("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)), @"DIR/config.json: scale_attn_by_inverse_layer_idx is true, but must be false: all layers scale attention scores in the same way");
    insta::assert_snapshot!(with("gpt2", "activation_function", json!("relu")), @r#"DIR/config.json: activation_function is "relu", but must be silu, swish, gelu, gelu_new, gelu_pytorch_tanh or relu2"#);
    insta::assert_snapshot!(with("llama", "quantization_config", json!({"quant_method": "gptq", "bits": 4})), @r#"DIR/config.json: quantization_config is {"bits":4,"quant_method":"gptq"}, but must be absent: weights are read in f32, bf16 or f16"#);
}

#[test]
fn a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused() {
    let base = base("llama");
    base.check_tokens(512).unwrap();
    insta::assert_snapshot!(base.check_tokens(515).unwrap_err(), @"the tokenizer has ids up to 514, but the model's embedding has 512 rows (3 too few); use the tokenizer that belongs to the model");
}

#[test]
fn a_tied_model_takes_no_output_projection_from_its_file() {
    let folder = copy("llama");
    let mut tensors = candle_core::safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu).unwrap();
    tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].ones_like().unwrap());
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let (tied, plain) = (BaseModel::open(folder.path()).unwrap(), base("llama"));
    let logits = |base: &BaseModel| {
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        model.last_logits(&[1, 2, 3]).unwrap()
    };
    assert_eq!(logits(&tied), logits(&plain));
}

#[test]
fn names_with_another_prefix_are_found() {
    for (name, prefix, other) in [
        ("llama", "model.", ""),
        ("gpt2", "transformer.", ""),
        ("gemma3", "model.", "model.language_model."),
        ("gemma3", "model.", "language_model.model."),
    ] {
        let folder = copy(name);
        let file = folder.path().join("model.safetensors");
        let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let renamed = tensors.into_iter().map(|(name, tensor)| (name.replacen(prefix, other, 1), tensor));
        let mut renamed: std::collections::HashMap<_, _> = renamed.collect();
        if name == "gemma3" {
            renamed.insert("vision_tower.patch.weight".into(), renamed.values().next().unwrap().clone());
            let text = json("models/gemma3/config.json");
            edit(&folder.path().join("config.json"), |config| {
                *config = json!({"model_type": "gemma3", "text_config": text, "vision_config": {}});
            });
        }
        candle_core::safetensors::save(&renamed, &file).unwrap();
        let (renamed, plain) = (BaseModel::open(folder.path()).unwrap(), base(name));
        let text_part =
            candle_zero::models::DecoderConfig { prefix: plain.config().prefix, ..renamed.config().clone() };
        assert_eq!(text_part, *plain.config());
        for (parameter, shape) in plain.config().parameters().unwrap() {
            let values =
                |base: &BaseModel| base.values().values(&parameter, &shape, 0..shape.iter().product()).unwrap();
            assert_eq!(values(&renamed), values(&plain), "{name}: {parameter}");
        }
    }
}

/// Generates values of the kinds that a person or a program may write.
fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0..300u32).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        Just(json!({})),
        Just(json!({"rope_type": "linear", "factor": 0})),
        Just(json!({"full_attention": 3, "sliding_attention": {"rope_theta": "x"}})),
        Just(json!(["full_attention", 3])),
        Just(json!([])),
    ]
}

proptest! {
    #[test]
    fn a_changed_value_is_refused_by_name_or_gives_a_model(
        model in 0..MODELS.len(), v4 in any::<bool>(), key in any::<prop::sample::Index>(), value in any_value()
    ) {
        let file = path("models").join(MODELS[model]).join(if v4 { "config.v4.json" } else { "config.json" });
        let mut config: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        config[key.get(&keys)] = value;
        match DecoderConfig::from_hugging_face(&config) {
            Err(error) => prop_assert!(error.to_string().starts_with("config.json: "), "{}", error),
            Ok(config) => {
                config.validate().unwrap();
                let elements = config.parameters().unwrap().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>();
                prop_assert_eq!(elements, config.num_parameters());
            }
        }
    }

    #[test]
    fn a_key_that_nothing_is_known_of_changes_nothing(model in 0..MODELS.len(), key in "x_[a-z]{1,9}", value in any_value()) {
        let mut config = json(format!("models/{}/config.json", MODELS[model]));
        let want = DecoderConfig::from_hugging_face(&config).unwrap();
        config[key] = value;
        prop_assert_eq!(DecoderConfig::from_hugging_face(&config).unwrap(), want);
    }
}
