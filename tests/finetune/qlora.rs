//! Low-rank adapters on a 4-bit base, and on blocks that are recomputed in the backward pass.

use crate::fixtures::{base, max_difference, tensors, values};
use candle_core::{DType, Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::nn::is_adapter;
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::{Engine, Result};
use candle_zero_finetune::{AdapterInitialValues, is_quantized};
use serde_json::{Value, json};
use std::sync::Arc;

struct Run {
    losses: Vec<f32>,
    adapter: Vec<Vec<f32>>,
}

#[derive(Clone)]
struct Case {
    model: &'static str,
    lora: &'static str,
    packing: Option<WeightPacking>,
    world: usize,
    config: Value,
}

/// Takes three steps on four rows.
fn train(case: &Case) -> Run {
    let base = base(case.model);
    let sizes = DecoderConfig { lora: Some(case.lora.parse().unwrap()), ..base.config().clone() };
    let runs = threads::run(case.world, |comm| -> Result<_> {
        let rank = comm.rank();
        let mut builder =
            Engine::builder().communicator(comm).device(Device::Cpu).trainable(|name, _| is_adapter(name));
        let dtype = if case.config["bf16"].is_null() { DType::F32 } else { DType::BF16 };
        let first = AdapterInitialValues::new(&base, &sizes, None)?;
        builder = match case.packing {
            Some(packing) => builder.quantized(packing, is_quantized).initial_values(Arc::new(first.quantized(
                packing,
                dtype,
                is_quantized,
            ))),
            None => builder.initial_values(Arc::new(first)),
        };
        let mut config = case.config.clone();
        config["train_batch_size"] = json!(4);
        config["optimizer"] = json!({"type": "AdamW", "params": {"lr": 1e-2}});
        let mut engine = builder.initialize(|vb| Decoder::new(&sizes, vb), config)?;
        let mut losses = vec![];
        let rows = 4 / case.world;
        for step in 0..3u32 {
            let id = |row: usize, at: usize| (row as u32 * 31 + at as u32 * 17 + step * 7) % sizes.vocab as u32;
            let ids = (rank * rows..(rank + 1) * rows).flat_map(|row| (0..24).map(move |at| id(row, at)));
            let ids = Tensor::from_iter(ids, &Device::Cpu)?.reshape((rows, 24))?;
            let (inputs, targets) = (ids.narrow(1, 0, 23)?.contiguous()?, ids.narrow(1, 1, 23)?.contiguous()?);
            let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            let of_ranks = engine.gather_f64(&[f64::from(loss.to_scalar::<f32>()?)])?;
            losses.push(of_ranks.iter().map(|loss| loss[0] as f32).sum::<f32>() / case.world as f32);
        }
        let names = engine.trainable_parameters();
        let full_values = |name: &String| Ok(values(&engine.safe_get_full_fp32_param(name)?));
        let adapter = names.iter().map(full_values).collect::<Result<_>>()?;
        Ok(Run { losses, adapter })
    });
    runs.unwrap().remove(0).unwrap()
}

fn assert_same(a: &Run, b: &Run, context: &str) {
    assert_eq!(a.losses, b.losses, "{context}");
    assert!(a.adapter == b.adapter, "{context}: the bits of the adapter differ");
}

const NF4: WeightPacking = WeightPacking::Nf4(Nf4Scales::DoubleQuantized);

fn stage(stage: u8) -> Value {
    json!({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
}

#[test]
fn qlora_gives_the_same_bits_at_every_stage() {
    for world in [1, 2] {
        let case = Case { model: "llama", lora: "r=16", packing: Some(NF4), world, config: stage(0) };
        let reference = train(&case);
        assert!(reference.losses[2] < reference.losses[0]);
        for number in 1..=3 {
            let run = train(&Case { config: stage(number), ..case.clone() });
            assert_same(&reference, &run, &format!("stage {number}, world size {world}"));
        }
        let plain = train(&Case { packing: None, config: stage(3), ..case });
        assert!(plain.losses != reference.losses, "the losses of a 4-bit base must differ from those in f32");
    }
}

#[test]
fn a_fresh_adapter_of_dora_beside_four_bits_changes_nothing() {
    for model in ["llama", "gpt2"] {
        let base = base(model);
        let ids = tensors(format!("logits/{model}.safetensors"))["input_ids"].to_dtype(DType::U32).unwrap();
        let logits = |lora: Option<&str>| {
            let sizes = DecoderConfig { lora: lora.map(|lora| lora.parse().unwrap()), ..base.config().clone() };
            let config =
                json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}});
            let runs = threads::run(2, |comm| {
                let values = AdapterInitialValues::new(&base, &sizes, None)?.quantized(NF4, DType::F32, is_quantized);
                let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(Arc::new(values));
                // Norms are trained too, because some cases have no adapter.
                let builder = builder.trainable(|name, shape| is_adapter(name) || shape.len() == 1);
                let builder = builder.quantized(NF4, is_quantized);
                let config =
                    json!({"train_batch_size": 2, "optimizer": config["optimizer"], "zero_optimization": {"stage": 3}});
                let mut engine = builder.initialize(|vb| Decoder::new(&sizes, vb), config)?;
                engine.eval(|model| model.forward(&ids)?.get(1))
            });
            runs.unwrap().remove(0).unwrap()
        };
        let (want, found) = (logits(None), logits(Some("r=4,dora")));
        let difference = max_difference(&found, &want);
        assert!(difference <= 2e-5, "{model}: logits differ by {difference}");
    }
}

#[test]
fn adapters_get_the_same_bits_from_blocks_that_run_again_in_backward() {
    let recomputation = json!({"every_unit": true});
    let mut wrong = 0;
    for (model, lora) in
        [("llama", "r=8"), ("llama", "r=8,dora,dropout=0.1"), ("qwen3", "r=4"), ("gpt2", "r=4"), ("gemma2", "r=4")]
    {
        for bf16 in [false, true] {
            for number in [0, 3] {
                let mut config = stage(number);
                if bf16 {
                    config["bf16"] = json!({"enabled": true});
                }
                let case = Case { model, lora, packing: None, world: 1, config };
                let reference = train(&case);
                let mut config = case.config.clone();
                config["activation_checkpointing"] = recomputation.clone();
                let run = train(&Case { config, ..case.clone() });
                let context = format!("{model}, {lora}, bf16 {bf16}, stage {number}");
                wrong += usize::from(reference.losses != run.losses || reference.adapter != run.adapter);
                println!("{context}: {:?} {:?} {}", reference.losses, run.losses, reference.adapter == run.adapter);
            }
        }
    }
    assert_eq!(wrong, 0);
}
