//! Adapters of mixtures, on attention and on experts (PEFT's `target_parameters`), match PEFT step by step, give the
//! same bits at stages 0 and 3, and are written, read and merged as in PEFT. With experts in 4 bits, training gives the
//! same bits at all stages.

use crate::fixtures::{adamw, adapted, ids, max_difference, numbers, probe_values, rank_batch, step, values};
use crate::moe::MOE;
use candle_core::{DType, Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::nn::{LoraConfig, LoraTargets, is_adapter};
use candle_zero::precision::{FlatMut, FlatRef, Nf4Scales, WeightPacking};
use candle_zero::{Engine, Result};
use candle_zero_finetune::{Adapter, AdapterInitialValues, AdapterTensor, BaseModel, MergedModel, is_quantized};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const LOSS: f64 = 5e-5;
const NORM: f64 = 1e-4;
const WEIGHTS: f32 = 5e-5;

const CASES: [&str; 9] = [
    "gpt_oss.experts_r4",
    "mixtral.attn_r4",
    "mixtral.experts_r4",
    "olmoe.attn_r4",
    "olmoe.experts_r4",
    "qwen2_moe.experts_r4",
    "qwen3_moe.attn_experts_r4",
    "qwen3_moe.attn_r4",
    "qwen3_moe.experts_r4",
];

fn base_of(case: &str) -> BaseModel {
    MOE.base(case.split_once('.').unwrap().0)
}

/// Returns the mean loss of `model` on the inputs whose losses and logits are recorded.
fn recorded_loss(case: &str, model: &Decoder) -> f64 {
    let rows = ids(&MOE.json(format!("logits/{}.json", case.split_once('.').unwrap().0))["input_ids"]);
    let (inputs, targets) = rank_batch(&rows, 1, 0);
    f64::from(model.loss(&inputs, &targets).unwrap().to_scalar::<f32>().unwrap())
}

struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    adapter: Adapter,
}

fn train(case: &str, world: usize, stage: u8) -> Run {
    let base = base_of(case);
    let rates = numbers(&MOE.json(format!("lora/{case}/run.json"))["lr"]);
    let config = adamw(5e-3, stage);
    let runs = threads::run(world, |comm| -> Result<_> {
        let (rank, rates) = (comm.rank(), rates.clone());
        let initial = Adapter::read(MOE.path(format!("lora/{case}/initial")))?;
        let (sizes, lora) = (adapted(&base, &initial), initial.config.clone());
        let mut engine = Engine::builder()
            .communicator(comm)
            .device(Device::Cpu)
            .initial_values(Arc::new(AdapterInitialValues::new(&base, &sizes, Some(initial))?))
            .trainable(|name, _| is_adapter(name))
            .schedule(move |applied: u64| rates.get(applied as usize).copied().unwrap_or(0.0))
            .initialize(|vb| Decoder::new(&sizes, vb), config.clone())?;
        let (mut losses, mut norms) = (vec![], vec![]);
        for batch in MOE.batches() {
            let (inputs, targets) = rank_batch(&batch, world, rank);
            let (loss, norm) = step(&mut engine, |model| model.loss(&inputs, &targets))?;
            losses.push(loss);
            norms.push(norm);
        }
        Ok(Run { losses, norms, adapter: Adapter::of_engine(&mut engine, lora, None)? })
    });
    runs.unwrap().remove(0).unwrap()
}

fn follow(case: &str) {
    let record = MOE.json(format!("lora/{case}/run.json"));
    let (losses, norms) = (numbers(&record["loss"]), numbers(&record["grad_norm"]));
    for world in [1, 2] {
        let mut first: Option<Adapter> = None;
        for stage in [0, 3] {
            let context = format!("{case}, stage {stage}, world size {world}");
            let run = train(case, world, stage);
            let (mut worst, mut worst_norm) = (0f64, 0f64);
            assert_eq!((losses.len(), run.losses.len()), (20, 20));
            for step in 0..20 {
                worst = worst.max((run.losses[step] - losses[step]).abs());
                worst_norm = worst_norm.max((run.norms[step] / norms[step] - 1.0).abs());
            }
            println!("{context}: loss {worst:.1e}, norm {worst_norm:.1e}");
            assert!(worst <= LOSS && worst_norm <= NORM, "{context}: loss {worst:.1e}, norm {worst_norm:.1e}");
            check_adapter(&run.adapter, &record["final_adapter_probe"], &context);
            let first = first.get_or_insert_with(|| run.adapter.clone());
            assert!(*first == run.adapter, "{context}: bits differ from those of stage 0");
        }
    }
}

/// Compares the recorded elements of every tensor with those of an adapter.
fn check_adapter(adapter: &Adapter, recorded: &Value, context: &str) {
    for (key, recorded) in recorded.as_object().unwrap() {
        let AdapterTensor { values, .. } = adapter.tensor(key.strip_prefix("base_model.model.").unwrap()).unwrap();
        for (found, want) in probe_values(values).iter().zip(numbers(recorded)) {
            assert!((found - want as f32).abs() <= WEIGHTS, "{context}: {key} is {found}, but must be {want}");
        }
    }
}

/// Checks an adapter that PEFT wrote before or after training: it is applied to the base, merged into the base, and
/// written again.
fn check_result(case: &str, stage: &str, want: f64) {
    let base = base_of(case);
    let folder = MOE.path(format!("lora/{case}/{stage}"));
    let out = tempfile::tempdir().unwrap();
    let names = base.config().parameters().unwrap();
    let read = Adapter::read(&folder).unwrap();
    read.write(out.path().join("adapter"), names.iter().map(|(name, _)| name.as_str())).unwrap();
    let adapter = Adapter::read(out.path().join("adapter")).unwrap();
    let sorted = |config: &LoraConfig| {
        let LoraTargets::Names(mut names) = config.targets.clone() else { panic!("{case}: {config:?}") };
        names.sort();
        LoraConfig { targets: LoraTargets::Names(names), ..config.clone() }
    };
    assert_eq!(sorted(&adapter.config), sorted(&read.config), "{case}");
    let tensors = |folder: &Path| -> HashMap<String, Vec<f32>> {
        let file = candle_core::safetensors::load(folder.join("adapter_model.safetensors"), &Device::Cpu).unwrap();
        file.into_iter().map(|(name, tensor)| (name, values(&tensor))).collect()
    };
    assert!(tensors(&folder) == tensors(&out.path().join("adapter")), "{case}: a different adapter was written");
    let peft = |folder: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
    };
    let (ours, theirs) = (peft(&out.path().join("adapter")), peft(&folder));
    assert_eq!(ours["target_parameters"], theirs["target_parameters"], "{case}");

    let sizes = adapted(&base, &adapter);
    let values = AdapterInitialValues::new(&base, &sizes, Some(adapter.clone())).unwrap();
    let model = Decoder::new(&sizes, values.var_builder(DType::F32, &Device::Cpu)).unwrap();
    let found = recorded_loss(case, &model);
    assert!((found - want).abs() <= LOSS, "{case}: the loss is {found}, but must be {want}");
    let merged = MergedModel::new(&base, Some(&adapter)).unwrap();
    merged.write_hugging_face(out.path().join("merged"), None).unwrap();
    let written = BaseModel::open(out.path().join("merged")).unwrap();
    let model = Decoder::new(written.config(), written.var_builder(DType::F32, &Device::Cpu)).unwrap();
    let found = recorded_loss(case, &model);
    assert!((found - want).abs() <= LOSS, "{case}: the merged loss is {found}, but must be {want}");
    let run = MOE.json(format!("lora/{case}/run.json"));
    let changed = run["merged_probe"].as_object().unwrap();
    assert_eq!(merged.counts(), (names.len(), changed.len()), "{case}");
    for (name, shape) in &names {
        let elements = shape.iter().product();
        let [before, after] = [&base, &written].map(|base| base.values().values(name, shape, 0..elements).unwrap());
        assert_eq!(before != after, changed.contains_key(name), "{case}: {name}");
        if stage == "final"
            && let Some(recorded) = changed.get(name)
        {
            for (found, want) in probe_values(&after).iter().zip(numbers(recorded)) {
                assert!((found - want as f32).abs() <= 1e-6, "{case}: merged {name} has {found}, but must have {want}");
            }
        }
    }
}

#[test]
fn every_recorded_adapter_of_a_mixture_is_followed() {
    let mut found: Vec<String> = std::fs::read_dir(MOE.path("lora"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, CASES);
}

#[test]
fn adapters_of_experts_are_read_written_applied_and_merged_as_peft_does() {
    for case in CASES {
        // The recorded initial adapters without parts for experts have no effect (their B is 0), so only those with
        // such parts are checked.
        let want = MOE.json(format!("lora/{case}/run.json"))["loss_logits_inputs"].clone();
        if case.contains("experts") {
            check_result(case, "initial", want["initial_adapter"].as_f64().unwrap());
        }
    }
    let case = "qwen3_moe.attn_experts_r4";
    let want = MOE.json(format!("lora/{case}/run.json"))["loss_logits_inputs"]["final_adapter"].clone();
    check_result(case, "final", want.as_f64().unwrap());
}

macro_rules! cases {
    ($($name:ident: $case:literal;)*) => {
        $(#[test]
        fn $name() {
            follow($case);
        })*
    };
}

cases! {
    lora_on_experts_of_gpt_oss_follows_peft: "gpt_oss.experts_r4";
    lora_on_attention_of_mixtral_follows_peft: "mixtral.attn_r4";
    lora_on_experts_of_mixtral_follows_peft: "mixtral.experts_r4";
    lora_on_attention_of_olmoe_follows_peft: "olmoe.attn_r4";
    lora_on_experts_of_olmoe_follows_peft: "olmoe.experts_r4";
    lora_on_experts_of_qwen2_moe_follows_peft: "qwen2_moe.experts_r4";
    lora_on_attention_and_experts_of_qwen3_moe_follows_peft: "qwen3_moe.attn_experts_r4";
    lora_on_attention_of_qwen3_moe_follows_peft: "qwen3_moe.attn_r4";
    lora_on_experts_of_qwen3_moe_follows_peft: "qwen3_moe.experts_r4";
}

#[test]
fn all_linear_projections_are_those_that_peft_selects() {
    let projections_of = |name: &str| {
        let mut ends: Vec<String> = MOE
            .base(name)
            .config()
            .projections()
            .unwrap()
            .iter()
            .map(|path| path.rsplit_once("layers.").unwrap().1.to_owned())
            .collect();
        ends.sort();
        ends
    };
    let attention = |layer: usize| ["k_proj", "o_proj", "q_proj", "v_proj"].map(|p| format!("{layer}.self_attn.{p}"));
    assert_eq!(projections_of("mixtral"), [attention(0), attention(1)].concat());
    assert_eq!(projections_of("gpt_oss"), [attention(0), attention(1)].concat());
    let mlp = ["down_proj", "gate_proj", "up_proj"];
    let dense = mlp.map(|p| format!("1.mlp.{p}"));
    assert_eq!(projections_of("qwen3_moe"), [&attention(0)[..], &dense, &attention(1)].concat());
    let shared = |layer: usize| {
        let experts = mlp.map(|p| format!("{layer}.mlp.shared_expert.{p}"));
        [&experts[..], &[format!("{layer}.mlp.shared_expert_gate")], &attention(layer)].concat()
    };
    assert_eq!(projections_of("qwen2_moe"), [shared(0), shared(1)].concat());
}

#[test]
fn targets_of_experts_that_do_not_exist_are_refused() {
    let text = |model: &str, lora: &str| {
        let base = MOE.base(model);
        let sizes = DecoderConfig { lora: Some(lora.parse().unwrap()), ..base.config().clone() };
        AdapterInitialValues::new(&base, &sizes, None).unwrap_err().to_string()
    };
    insta::assert_snapshot!(text("mixtral", "target_parameters=experts.w1"), @"LoRA target parameter experts.w1 is not the end of the name of a parameter of experts; the parameters that can have an adapter are mlp.experts.down_proj, mlp.experts.gate_up_proj");
    insta::assert_snapshot!(text("qwen3_moe", "target_parameters=mlp.experts.down_proj,targets=w1"), @"LoRA target w1 is not the end of a projection's name; the projections that can have an adapter are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; all-linear means all of them (norms, embeddings, routers, experts and the output projection get none)");
    let llama = crate::fixtures::base("llama");
    let sizes = DecoderConfig {
        lora: Some("target_parameters=mlp.experts.down_proj".parse().unwrap()),
        ..llama.config().clone()
    };
    insta::assert_snapshot!(AdapterInitialValues::new(&llama, &sizes, None).unwrap_err(), @"LoRA target parameter mlp.experts.down_proj is not the end of the name of a parameter of experts; the model has no mixture of experts; leave target_parameters out");
}

#[test]
fn an_adapter_of_experts_for_another_mixture_is_refused_by_tensor() {
    let refusal = |adapter: &str, model: &str| {
        let (base, folder) = (MOE.base(model), MOE.path(format!("lora/{adapter}/initial")));
        let adapter = Adapter::read(&folder).unwrap();
        let sizes = adapted(&base, &adapter);
        let error = AdapterInitialValues::new(&base, &sizes, Some(adapter)).unwrap_err().to_string();
        error.replace(folder.to_str().unwrap(), "DIR")
    };
    insta::assert_snapshot!(refusal("mixtral.experts_r4", "olmoe"), @"the adapter DIR (trained on mixtral) does not fit this model: layers.0.mlp.experts.base_layer.lora_A.weight: it has shape [16, 32], but the model needs [24, 32]; use the model that it was trained on");
    insta::assert_snapshot!(refusal("qwen3_moe.experts_r4", "gpt_oss"), @"the adapter DIR (trained on qwen3_moe) does not fit this model: layers.0.mlp.experts.base_layer.lora_A.weight: it has shape [24, 40], but the model needs [16, 32]; use the model that it was trained on");
}

const NF4: WeightPacking = WeightPacking::Nf4(Nf4Scales::DoubleQuantized);

/// Takes three steps with adapters of attention and experts on a base in 4 bits. Layer `unpacked`, if given, is not
/// packed. Returns the losses and the adapters.
fn train_on_four_bits(model: &str, world: usize, stage: u8, unpacked: Option<usize>) -> (Vec<f64>, Vec<Vec<f32>>) {
    let base = MOE.base(model);
    let lora = "r=4,targets=q_proj,target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj";
    let sizes = DecoderConfig { lora: Some(lora.parse().unwrap()), ..base.config().clone() };
    let rule = move |name: &str, shape: &[usize]| {
        is_quantized(name, shape) && unpacked.is_none_or(|unpacked| !name.contains(&format!("layers.{unpacked}.")))
    };
    let config = json!({
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    let runs = threads::run(world, |comm| -> Result<_> {
        let rank = comm.rank();
        let values = AdapterInitialValues::new(&base, &sizes, None)?.quantized(NF4, DType::F32, rule);
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(Arc::new(values));
        let builder = builder.trainable(|name, _| is_adapter(name)).quantized(NF4, rule);
        let mut engine = builder.initialize(|vb| Decoder::new(&sizes, vb), config.clone())?;
        let mut losses = vec![];
        for batch in &MOE.batches()[..3] {
            let (inputs, targets) = rank_batch(batch, world, rank);
            losses.push(step(&mut engine, |model| model.loss(&inputs, &targets))?.0);
        }
        let names = engine.trainable_parameters();
        let full_values = |name: &String| Ok(self::values(&engine.safe_get_full_fp32_param(name)?));
        Ok((losses, names.iter().map(full_values).collect::<Result<_>>()?))
    });
    runs.unwrap().remove(0).unwrap()
}

#[test]
fn experts_in_four_bits_give_the_same_bits_at_every_stage() {
    for model in ["mixtral", "gpt_oss"] {
        for world in [1, 2] {
            let reference = train_on_four_bits(model, world, 0, None);
            for stage in 1..=3 {
                assert!(
                    train_on_four_bits(model, world, stage, None) == reference,
                    "{model}, stage {stage}, world size {world}"
                );
            }
            let partly_packed = train_on_four_bits(model, world, 3, Some(0));
            assert!(partly_packed.0[0] != reference.0[0], "{model}: layer 0 is packed although it is left out");
        }
    }
}

#[test]
fn no_block_of_four_bits_has_elements_of_two_experts() {
    // Each expert has almost the same values whether it is packed together with the others or separately.
    let base = MOE.base("gpt_oss");
    let rounded = |values: &[f32]| {
        let mut bytes = vec![0; NF4.packed_len(values.len())];
        NF4.pack(FlatRef::F32(values), &mut bytes);
        let mut unpacked = vec![0f32; values.len()];
        NF4.unpack(&bytes, FlatMut::F32(&mut unpacked));
        unpacked
    };
    let parameters = base.config().parameters().unwrap();
    let packed = parameters.iter().filter(|(name, shape)| is_quantized(name, shape) && shape.len() == 3);
    let mut count = 0;
    for (name, shape) in packed {
        let [experts, rows, columns] = shape[..] else { panic!("{shape:?}") };
        let len = rows * columns;
        let values = base.values().values(name, shape, 0..experts * len).unwrap();
        let together = rounded(&values);
        for expert in 0..experts {
            let mine = expert * len..(expert + 1) * len;
            let alone = rounded(&values[mine.clone()]);
            // Small differences are allowed because a scale of scales is shared by more elements than one expert has.
            let difference = max_difference(
                &Tensor::new(&together[mine], &Device::Cpu).unwrap(),
                &Tensor::new(alone, &Device::Cpu).unwrap(),
            );
            assert!(difference <= 1e-2, "{name}, expert {expert}: {difference}");
        }
        count += 1;
    }
    assert_eq!(count, 4);
    let separate = MOE.base("mixtral").config().parameters().unwrap();
    let packed = separate.iter().filter(|(name, shape)| is_quantized(name, shape)).count();
    assert_eq!(packed, 2 * (4 + 4 * 3));
}
