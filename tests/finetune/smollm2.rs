//! Compares a real model, SmolLM2-135M-Instruct, with records of transformers and PEFT. The variable
//! `CANDLE_ZERO_SMOLLM2`, which scripts/check_finetune.sh sets, names the model's folder.

use crate::fixtures::{json as record, max_difference, numbers};
use crate::support::skips::skipped;
use candle_core::{DType, Device, Tensor};
use candle_zero::comm::SoloCommunicator;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::nn::{LoraConfig, is_adapter};
use candle_zero::{Engine, Result};
use candle_zero_finetune::{Adapter, AdapterInitialValues, AdapterTensor, BaseModel};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

const CTX: usize = 512;

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

fn model<T: Fn()>(test: T) -> Option<BaseModel> {
    let folder = variable("CANDLE_ZERO_SMOLLM2");
    if folder.is_none() {
        skipped(test, "CANDLE_ZERO_SMOLLM2 does not name a folder of SmolLM2-135M-Instruct");
    }
    folder.map(|folder| BaseModel::open(folder).unwrap())
}

fn decoder(base: &BaseModel) -> Decoder {
    let config = DecoderConfig { ctx: CTX, ..base.config().clone() };
    Decoder::new(&config, base.var_builder(DType::F32, &Device::Cpu)).unwrap()
}

fn ids(list: &Value) -> Vec<u32> {
    serde_json::from_value(list.clone()).unwrap()
}

fn row(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

#[test]
fn the_real_model_has_the_logits_and_losses_of_transformers() {
    let Some(base) = model(the_real_model_has_the_logits_and_losses_of_transformers) else { return };
    let (model, record) = (decoder(&base), record("smollm2/forward.json"));
    for prompt in record["prompts"].as_array().unwrap() {
        let logits = model.last_logits(&ids(&prompt["input_ids"])).unwrap();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        for (id, want) in order.iter().zip(prompt["top5"].as_array().unwrap()) {
            assert_eq!(*id as u64, want["id"].as_u64().unwrap(), "{}", prompt["text"]);
            assert!((f64::from(logits[*id]) - want["logit"].as_f64().unwrap()).abs() < 2e-3, "{want}");
        }
    }
    for text in record["texts"].as_array().unwrap() {
        let ids = ids(&text["input_ids"]);
        let loss = model.loss(&row(&ids[..ids.len() - 1]), &row(&ids[1..])).unwrap().to_scalar::<f32>().unwrap();
        assert!((f64::from(loss) - text["mean_next_token_loss"].as_f64().unwrap()).abs() < 1e-4, "{loss}");
    }
}

/// Returns number `i` of a sequence in [-1, 1), by the rule that generated the initial adapter of the recording.
fn uniform(seed: u64, i: u64) -> f32 {
    let z = ((seed << 32) + i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let z = z ^ (z >> 31);
    ((z >> 40) as f64 / f64::from(1 << 23) - 1.0) as f32
}

/// Returns the adapter with which the recorded training begins: A from [`uniform`], and B with zeros.
fn initial(config: &DecoderConfig, lora: &LoraConfig) -> Adapter {
    const ORDER: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let mut values = vec![0f32; shape.iter().product()];
        if name.contains("lora_A") {
            let parts: Vec<&str> = name.split('.').collect();
            let block: u64 = parts[2].parse().unwrap();
            let index = ORDER.iter().position(|part| *part == parts[4]).unwrap() as u64;
            let scale = (1.0 / (shape[1] as f64).sqrt()) as f32;
            let draw = |i| uniform(1000 + 7 * block + index, i) * scale;
            values.iter_mut().enumerate().for_each(|(i, value)| *value = draw(i as u64));
        }
        (name, AdapterTensor { shape, values })
    };
    let parameters = config.parameters().unwrap().into_iter().filter(|(name, _)| is_adapter(name));
    Adapter::new(lora.clone(), None, parameters.map(tensor))
}

#[test]
fn the_real_model_follows_pefts_20_steps_of_lora() {
    let Some(base) = model(the_real_model_follows_pefts_20_steps_of_lora) else { return };
    let (want, rows) = (record("smollm2/lora_f32.json"), record("smollm2/chats.tokens.json"));
    let lora: LoraConfig = "r=16,alpha=32,targets=all-linear".parse().unwrap();
    let config = DecoderConfig { ctx: CTX, lora: Some(lora.clone()), ..base.config().clone() };
    let values = AdapterInitialValues::new(&base, &config, Some(initial(&config, &lora))).unwrap();
    let settings = json!({
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
    });
    let mut engine = Engine::builder()
        .communicator(Arc::new(SoloCommunicator::default()))
        .device(Device::Cpu)
        .initial_values(Arc::new(values))
        .trainable(|name, _| is_adapter(name))
        .initialize(|vb| Decoder::new(&config, vb), settings)
        .unwrap();
    let (losses, norms) = (numbers(&want["loss"]), numbers(&want["grad_norm"]));
    let (mut loss_gap, mut norm_gap) = ([0f64; 2], 0f64);
    for (step, row) in rows["rows"].as_array().unwrap().iter().take(losses.len()).enumerate() {
        let (loss, norm) = train(&mut engine, row).unwrap();
        let error = (loss - losses[step]).abs();
        let is_late = usize::from(step > 6);
        loss_gap[is_late] = loss_gap[is_late].max(error);
        norm_gap = norm_gap.max((norm / norms[step] - 1.0).abs());
        assert!(error < [1e-4, 1e-3][is_late], "step {step}: {loss}, {}", losses[step]);
        assert!((norm / norms[step] - 1.0).abs() < 1e-3, "step {step}: {norm}, {}", norms[step]);
    }
    println!("losses: {:.1e} (steps 0-6), {:.1e} (later); gradient norms: {norm_gap:.1e}", loss_gap[0], loss_gap[1]);
    let adapter = Adapter::of_engine(&mut engine, lora, None).unwrap();
    for (name, norm) in want["final_adapter_l2"].as_object().unwrap() {
        let values = &adapter.tensor(name).unwrap().values;
        let found = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        assert!((found / norm.as_f64().unwrap() - 1.0).abs() < 1e-2, "{name}: {found}, {norm}");
    }
}

/// Takes a step on one conversation. Returns the mean loss of the targets, and the gradient norm before clipping.
fn train(engine: &mut Engine<Decoder>, sample: &Value) -> Result<(f64, f64)> {
    let all = ids(&sample["input_ids"]);
    let mask: Vec<u8> = serde_json::from_value(sample["loss_mask"].clone()).unwrap();
    let targets: Vec<i64> =
        all.iter().zip(&mask).skip(1).map(|(id, mask)| if *mask == 1 { i64::from(*id) } else { -100 }).collect();
    let (inputs, targets) = (row(&all[..all.len() - 1]), Tensor::new(targets, &Device::Cpu)?.unsqueeze(0)?);
    let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok((f64::from(loss.to_scalar::<f32>()?), engine.global_grad_norm().unwrap()))
}

#[test]
#[ignore = "writes logits that scripts/check_finetune.py compares with those of PEFT and transformers"]
fn logits_for_peft() {
    let base = BaseModel::open(variable("CANDLE_ZERO_SMOLLM2").unwrap()).unwrap();
    let adapter = Adapter::read(variable("CANDLE_ZERO_ADAPTER").unwrap()).unwrap();
    let config = DecoderConfig { ctx: CTX, lora: Some(adapter.config.clone()), ..base.config().clone() };
    let values = AdapterInitialValues::new(&base, &config, Some(adapter)).unwrap();
    let adapted = Decoder::new(&config, values.var_builder(DType::F32, &Device::Cpu)).unwrap();
    let plain = decoder(&base);
    let mut all: HashMap<String, Tensor> = HashMap::new();
    for (number, sample) in record("smollm2/chats.tokens.json")["rows"].as_array().unwrap().iter().take(3).enumerate() {
        let ids = row(&ids(&sample["input_ids"])[..64]);
        let logits = |model: &Decoder| model.forward(&ids).unwrap().detach();
        let (base, adapter) = (logits(&plain), logits(&adapted));
        assert!(max_difference(&base, &adapter) > 0.0);
        all.insert(format!("base.{number}"), base);
        all.insert(format!("adapter.{number}"), adapter);
        all.insert(format!("ids.{number}"), ids);
    }
    candle_core::safetensors::save(&all, variable("CANDLE_ZERO_LOGITS").unwrap()).unwrap();
}
