//! More families of decoders: logits, losses and training match transformers, with config.json as transformers 4 and 5
//! write it, and at stages 0 and 3.

use crate::fixtures::{
    ProbeTolerances, Records, adamw, check_probes, check_session, ids, max_difference, next_tokens, numbers, step,
    values,
};
use crate::support::processes::repository;
use candle_core::{DType, Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::{Engine, Result};
use candle_zero_finetune::{BaseModel, MergedModel};
use serde_json::{Value, json};
use std::collections::HashMap;

const MODELS: [&str; 18] = [
    "cohere2",
    "gemma3_vlm",
    "glm",
    "glm4",
    "granite",
    "llama_dynamic",
    "llama_longrope",
    "llama_yarn",
    "ministral3",
    "mistral_nemo",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi4_mini",
    "qwen2_yarn",
    "smollm3",
    "stablelm",
    "starcoder2",
];

/// The tolerances from the records' README. `WEIGHTS` is for the recorded elements of the final weights.
const LOGITS: f32 = 1e-4;
const LOSS: f64 = 2e-5;
const LOSS_AFTER_STEPS: f64 = 5e-5;
const NORM: f64 = 1e-4;
const WEIGHTS: ProbeTolerances = ProbeTolerances { typical: 5e-5, outlier: 20.0 * 5e-5, key_biases: 1e-2 };

const FAMILIES: Records = Records("families");

fn check_logits(name: &str, base: &BaseModel) {
    let (recorded, summary) =
        (FAMILIES.tensors(format!("logits/{name}.safetensors")), FAMILIES.json(format!("logits/{name}.json")));
    let tolerance = if ["granite", "cohere2"].contains(&name) { 3e-5 } else { LOGITS };
    for (inputs, logits) in [("input_ids", "logits"), ("input_ids_short", "logits_short")] {
        let (Some(inputs), Some(logits)) = (recorded.get(inputs), recorded.get(logits)) else { continue };
        let inputs = inputs.to_dtype(DType::U32).unwrap();
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        let difference = max_difference(&model.forward(&inputs).unwrap(), logits);
        assert!(difference <= tolerance, "{name}: logits differ by {difference}");
        println!("{name}, {} tokens: logits {difference:.1e}", inputs.dim(1).unwrap());
    }
    let all = ids(&summary["input_ids"]);
    let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
    let loss = f64::from(model.loss(&all, &next_tokens(&all)).unwrap().to_scalar::<f32>().unwrap());
    let want = summary["mean_next_token_loss"].as_f64().unwrap();
    assert!((loss - want).abs() <= LOSS, "{name}: the loss is {loss}, but must be {want}");
}

#[test]
fn logits_and_losses_of_more_families_are_those_of_transformers() {
    MODELS.iter().for_each(|name| check_logits(name, &FAMILIES.base(name)));
}

#[test]
fn a_config_json_of_transformers_4_describes_the_same_model_of_more_families() {
    for name in MODELS {
        let of = |file: &str| DecoderConfig::read(FAMILIES.path("models").join(name).join(file)).unwrap();
        assert_eq!(of("config.json"), of("config.v4.json"), "{name}");
        check_logits(name, &BaseModel::open(FAMILIES.copy_with(name, "config.v4.json").path()).unwrap());
    }
}

#[test]
fn models_of_more_families_have_the_parameters_of_their_files_and_count_them() {
    for name in MODELS {
        let base = FAMILIES.base(name);
        let parameters = base.config().parameters().unwrap();
        let elements: usize = parameters.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(base.config().num_parameters(), elements, "{name}");
        if name != "gemma3_vlm" {
            assert_eq!(FAMILIES.json(format!("logits/{name}.json"))["parameters"], elements, "{name}");
        }
    }
}

#[test]
fn generation_with_a_cache_computes_the_logits_of_complete_rows() {
    for name in MODELS {
        let base = FAMILIES.base(name);
        let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
        let rows = FAMILIES.json(format!("logits/{name}.json"))["input_ids"].clone();
        let rows: Vec<Vec<u32>> = serde_json::from_value(rows).unwrap();
        // Rotary positions that depend on the length begin to change at position 24.
        let row = &rows[0][..20];
        check_session(name, &model, row, LOGITS);
    }
}

struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<u8>,
}

fn train(name: &str, plain: &Value, batches: &[Tensor], world: usize, stage: u8) -> Run {
    let (base, rates) = (FAMILIES.base(name), numbers(&plain["lr"]));
    let config = adamw(1e-3, stage);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let runs = threads::run(world, |comm| -> Result<_> {
        let (rank, rates) = (comm.rank(), rates.clone());
        let builder = Engine::builder()
            .communicator(comm)
            .device(Device::Cpu)
            .initial_values(base.values())
            .schedule(move |applied: u64| rates.get(applied as usize).copied().unwrap_or(0.0));
        let mut engine = builder.initialize(|vb| Decoder::new(base.config(), vb), config.clone())?;
        let (mut losses, mut norms) = (vec![], vec![]);
        for batch in batches {
            let rows = batch.dim(0)?;
            let inputs = batch.narrow(0, rank * rows / world, rows / world)?;
            let targets = next_tokens(&inputs);
            let (loss, norm) = step(&mut engine, |model| model.loss(&inputs, &targets))?;
            losses.push(loss);
            norms.push(norm);
        }
        engine.export_safetensors(&file)?;
        Ok((losses, norms))
    });
    let (losses, norms) = runs.unwrap().remove(0).unwrap();
    Run { losses, norms, weights: std::fs::read(&file).unwrap() }
}

/// Returns the name of a recorded tensor in exported weights, which contain no vision tower.
fn exported_name(recorded: &str) -> Option<String> {
    if ["vision_tower.", "multi_modal_projector."].iter().any(|part| recorded.contains(part)) {
        return None;
    }
    Some(match recorded.strip_prefix("language_model.model.") {
        Some(bare) => format!("model.language_model.{bare}"),
        None => recorded.to_owned(),
    })
}

#[test]
fn training_of_more_families_follows_pytorch_at_every_stage_and_world_size() {
    let batches = FAMILIES.batches();
    for name in MODELS {
        let plain = FAMILIES.json(format!("trajectories/{name}.json"))["plain"].clone();
        for world in [1, 2] {
            let runs = [0, 3].map(|stage| train(name, &plain, &batches, world, stage));
            let (losses, norms) = (numbers(&plain["loss"]), numbers(&plain["grad_norm"]));
            let run = &runs[0];
            assert_eq!((losses.len(), run.losses.len()), (10, 10));
            let mut worst = [0f64; 2];
            for step in 0..10 {
                worst[0] = worst[0].max((run.losses[step] - losses[step]).abs());
                worst[1] = worst[1].max((run.norms[step] / norms[step] - 1.0).abs());
            }
            println!("{name}, world size {world}: loss {:.1e}, norm {:.1e}", worst[0], worst[1]);
            assert!(worst[0] <= LOSS_AFTER_STEPS && worst[1] <= NORM, "{name}, world size {world}: {worst:?}");
            check_probes(name, &plain["final_weight_probe"], &run.weights, &WEIGHTS, exported_name);
            assert!(
                runs[1].weights == run.weights,
                "{name}: stages 0 and 3 give different bits with world size {world}"
            );
            assert_eq!((&runs[1].losses, &runs[1].norms), (&run.losses, &run.norms), "{name}");
        }
    }
}

/// Returns the error about a model whose description was changed.
fn refused(name: &str, change: impl FnOnce(&mut Value)) -> String {
    let folder = FAMILIES.copy_with(name, "config.json");
    let file = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&file, config.to_string()).unwrap();
    let error = BaseModel::open(folder.path()).unwrap_err().to_string();
    error.replace(&folder.path().display().to_string(), "DIR")
}

#[test]
fn options_of_more_families_that_are_not_supported_are_refused_by_name() {
    let with = |name, key: &'static str, value: Value| refused(name, move |config| config[key] = value);
    let rope =
        |name, key: &'static str, value: Value| refused(name, move |config| config["rope_parameters"][key] = value);
    insta::assert_snapshot!(with("stablelm", "qk_layernorm", json!(true)), @"DIR/config.json: qk_layernorm is true, but must be false: layer norms of queries and keys are not supported");
    insta::assert_snapshot!(with("stablelm", "use_parallel_residual", json!(true)), @"DIR/model.safetensors holds tensors that the model does not have: model.layers.0.post_attention_layernorm.bias, model.layers.0.post_attention_layernorm.weight, model.layers.1.post_attention_layernorm.bias, model.layers.1.post_attention_layernorm.weight; does it belong to a different model, or to one of a different size?");
    insta::assert_snapshot!(with("cohere2", "hidden_act", json!("relu2")), @r#"DIR/config.json: hidden_act is "relu2", but must be silu, swish, gelu_new or gelu_pytorch_tanh"#);
    insta::assert_snapshot!(with("nemotron", "hidden_act", json!("relu")), @r#"DIR/config.json: hidden_act is "relu", but must be silu, swish, gelu, gelu_new, gelu_pytorch_tanh or relu2"#);
    insta::assert_snapshot!(with("smollm3", "no_rope_layers", json!([1, 2, 1, 0])), @"DIR/config.json: no_rope_layers is [1,2,1,0], but must be a list of 1s (blocks with rotary positions) and 0s (blocks without)");
    insta::assert_snapshot!(with("smollm3", "no_rope_layers", json!([1, 0])), @"DIR/config.json: no_rope_layers is a list of length 2, but must be of length num_hidden_layers (4)");
    insta::assert_snapshot!(with("smollm3", "layer_types", json!(["sliding_attention", "full_attention", "full_attention", "full_attention"])), @"DIR/config.json: use_sliding_window is false, but must be true if layer_types contains sliding_attention");
    insta::assert_snapshot!(with("glm4", "partial_rotary_factor", json!(0.25)), @"DIR/config.json: rope_parameters.partial_rotary_factor is 0.5, but must be equal to the outer partial_rotary_factor (0.25)");
    insta::assert_snapshot!(rope("glm4", "partial_rotary_factor", json!(0.05)), @"DIR/config.json: partial_rotary_factor is 0.05, but must be at most 1, and must rotate an even number, at least 2, of the 16 elements in a head");
    insta::assert_snapshot!(with("granite", "residual_multiplier", json!(0)), @"DIR/config.json: residual_multiplier is 0, but must be a positive number");
    insta::assert_snapshot!(with("olmo2", "num_attention_heads", json!(5)), @"DIR/config.json: hidden_size is 48, but must be a multiple of num_attention_heads (5) if head_dim is absent");
    insta::assert_snapshot!(rope("llama_yarn", "rope_type", json!("ntk")), @r#"DIR/config.json: rope_parameters.rope_type is "ntk", but must be default, linear, dynamic, yarn, longrope or llama3"#);
    insta::assert_snapshot!(rope("llama_yarn", "factor", json!("four")), @r#"DIR/config.json: rope_parameters.factor is "four", but must be a positive number"#);
    insta::assert_snapshot!(refused("llama_yarn", |config| { config["rope_parameters"].as_object_mut().unwrap().remove("factor"); }), @"DIR/config.json: rope_parameters.factor is absent, but must be a positive number");
    insta::assert_snapshot!(rope("llama_yarn", "beta_fast", json!(-1)), @"DIR/config.json: rope_parameters.beta_fast is -1, but must be a positive number");
    insta::assert_snapshot!(rope("llama_dynamic", "factor", json!(0)), @"DIR/config.json: rope_parameters.factor is 0, but must be a positive number");
    insta::assert_snapshot!(rope("llama_longrope", "long_factor", json!([1.0, 2.0])), @"DIR/config.json: rope_parameters.long_factor is a list of length 2, but must be a list of the length of short_factor (8)");
    insta::assert_snapshot!(rope("llama_longrope", "short_factor", Value::Null), @"DIR/config.json: rope_parameters.short_factor is null, but must be a list of positive numbers, one for each pair of elements of a head");
    insta::assert_snapshot!(refused("llama_longrope", |config| {
        let short = json!([1.0, 2.0, 3.0]);
        config["rope_parameters"]["long_factor"] = short.clone();
        config["rope_parameters"]["short_factor"] = short;
    }), @"DIR/config.json: short_factor is a list of length 3, but must be a list of length 8, the number of rotated pairs in a head");
    insta::assert_snapshot!(rope("llama_longrope", "original_max_position_embeddings", json!(1)), @"DIR/config.json: rope_parameters.original_max_position_embeddings is 1, but must be at least 2 with rope type longrope");
    insta::assert_snapshot!(rope("ministral3", "original_max_position_embeddings", Value::Null), @"DIR/config.json: rope_parameters.original_max_position_embeddings is null, but must be a whole number");
    insta::assert_snapshot!(refused("gemma3_vlm", |config| { config["text_config"]["model_type"] = json!("gpt2"); }), @r#"DIR/config.json: text_config.model_type is "gpt2", but must be one of cohere, cohere2, gemma2, gemma3_text, glm, glm4, gpt_oss, granite, llama, ministral, ministral3, mistral, mixtral, nemotron, olmo2, olmo3, olmoe, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, smollm3, stablelm, starcoder2"#);
}

#[test]
fn the_documentation_lists_every_model_type() {
    let page = std::fs::read_to_string(repository().join("docs/finetuning.md")).unwrap();
    let rows = page.lines().skip_while(|line| !line.starts_with("| `model_type` | models |")).skip(2);
    let names = rows.take_while(|line| line.starts_with('|')).map(|line| line.split('|').nth(1).unwrap());
    let mut listed: Vec<String> =
        names.flat_map(|cell| cell.split(',')).map(|name| name.trim().trim_matches('`').to_owned()).collect();
    listed.sort();
    let error = refused("glm", |config| config["model_type"] = json!("none"));
    let known = error.split("the supported types are ").nth(1).unwrap();
    assert_eq!(listed.join(", "), known);
}

#[test]
fn a_merged_model_of_images_and_text_contains_its_other_parts_unchanged() {
    let (base, out) = (FAMILIES.base("gemma3_vlm"), tempfile::tempdir().unwrap());
    let target = out.path().join("merged");
    MergedModel::new(&base, None).unwrap().write_hugging_face(&target, None).unwrap();
    let before = FAMILIES.tensors("models/gemma3_vlm/model.safetensors");
    let after = candle_core::safetensors::load(target.join("model.safetensors"), &Device::Cpu).unwrap();
    let names = |all: &HashMap<String, Tensor>| all.keys().cloned().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(names(&before), names(&after));
    assert!(before.keys().any(|name| name.starts_with("vision_tower.")));
    for (name, tensor) in &before {
        assert_eq!(values(tensor), values(&after[name]), "{name}");
    }
    assert_eq!(BaseModel::open(&target).unwrap().config(), base.config());
}
