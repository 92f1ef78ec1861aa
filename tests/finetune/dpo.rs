//! Preference optimization matches PyTorch step by step. The reference model is the model without its adapters.

use crate::fixtures::{base, json as record, numbers, path};
use candle_core::{Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::nn::{Sequences, is_adapter, without_adapters};
use candle_zero::{Engine, Result};
use candle_zero_finetune::{Adapter, AdapterInitialValues, dpo_loss};
use serde_json::{Value, json};
use std::sync::Arc;

/// Rows of the chosen answers of some pairs, followed by rows of the rejected ones.
struct Batch {
    ids: Tensor,
    targets: Tensor,
    sequences: Sequences,
}

impl Batch {
    fn of(pairs: &[Value]) -> Self {
        let tokens = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
        let answers = ["chosen", "rejected"].iter().flat_map(|side| pairs.iter().map(move |pair| (pair, *side)));
        let texts: Vec<(usize, Vec<u32>)> = answers
            .map(|(pair, side)| {
                let prompt = tokens(&pair["prompt"]);
                (prompt.len(), [prompt, tokens(&pair[side])].concat())
            })
            .collect();
        let lengths: Vec<usize> = texts.iter().map(|(_, text)| text.len() - 1).collect();
        let time = lengths.iter().copied().max().unwrap();
        let rows = texts.iter().map(|(prompt, text)| {
            let mut ids = text[..text.len() - 1].to_vec();
            let target = |i: usize| if i + 1 < *prompt { -100 } else { i64::from(text[i + 1]) };
            let mut targets: Vec<i64> = (0..ids.len()).map(target).collect();
            ids.resize(time, 3);
            targets.resize(time, -100);
            (ids, targets)
        });
        let (ids, targets): (Vec<_>, Vec<_>) = rows.unzip();
        Self {
            ids: Tensor::new(ids, &Device::Cpu).unwrap(),
            targets: Tensor::new(targets, &Device::Cpu).unwrap(),
            sequences: Sequences::padded(&lengths, time).unwrap(),
        }
    }

    /// Returns the sums of log probabilities of the chosen answers and of the rejected ones.
    fn sums(&self, model: &Decoder) -> candle_core::Result<[Tensor; 2]> {
        let sums = model.log_probabilities(&self.ids, &self.targets, Some(&self.sequences))?.sum(1)?;
        let pairs = sums.dim(0)? / 2;
        Ok([sums.narrow(0, 0, pairs)?, sums.narrow(0, pairs, pairs)?])
    }
}

fn follow(case: &str) {
    let all = record("dpo/expected.json");
    let (expected, beta) = (&all["cases"][case], all["beta"].as_f64().unwrap());
    let batches: Vec<Vec<Value>> = serde_json::from_value(record("dpo/batches.json")).unwrap();
    let base = base("llama");
    for world in [1, 2] {
        let mut first: Option<Adapter> = None;
        for stage in [0, 3] {
            let context = format!("{case}, stage {stage}, world size {world}");
            let config = json!({
                "train_batch_size": 4,
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            });
            let runs = threads::run(world, |comm| -> Result<_> {
                let rank = comm.rank();
                let initial = Adapter::read(path(format!("lora/llama.{case}/initial")))?;
                let lora = initial.config.clone();
                let sizes = DecoderConfig { lora: Some(lora.clone()), ..base.config().clone() };
                let builder = Engine::builder().communicator(comm).device(Device::Cpu);
                let builder =
                    builder.initial_values(Arc::new(AdapterInitialValues::new(&base, &sizes, Some(initial))?));
                let builder = builder.trainable(|name, _| is_adapter(name));
                let mut engine = builder.initialize(|vb| Decoder::new(&sizes, vb), config.clone())?;
                let mut steps = vec![];
                for pairs in &batches {
                    let batch = Batch::of(&pairs[rank * 4 / world..(rank + 1) * 4 / world]);
                    let mut reference = None;
                    engine.eval(|model| {
                        let sums = without_adapters(|| batch.sums(model))?;
                        let first = sums[0].clone();
                        reference = Some(sums);
                        Ok(first)
                    })?;
                    let reference = reference.unwrap();
                    let mut metrics = [0.0; 2];
                    let loss = engine.forward(|model| {
                        let [chosen, rejected] = batch.sums(model)?;
                        let dpo = dpo_loss([&chosen, &rejected], [&reference[0], &reference[1]], beta)?;
                        metrics = [dpo.rewards.margin, dpo.rewards.accuracy];
                        Ok(dpo.loss)
                    })?;
                    engine.backward(&loss)?;
                    engine.step()?;
                    let local = [f64::from(loss.to_scalar::<f32>()?), metrics[0], metrics[1]];
                    let all = engine.gather_f64(&local)?;
                    let mean = |i: usize| all.iter().map(|local| local[i]).sum::<f64>() / world as f64;
                    steps.push([mean(0), engine.global_grad_norm().unwrap(), mean(1), mean(2)]);
                }
                Ok((steps, Adapter::of_engine(&mut engine, lora, None)?))
            });
            let (steps, adapter) = runs.unwrap().remove(0).unwrap();
            let keys = ["loss", "grad_norm", "reward_margin_mean", "accuracy"];
            let [losses, norms, margins, accuracies] = keys.map(|key| numbers(&expected[key]));
            assert_eq!((steps.len(), losses.len()), (8, 8));
            for (i, [loss, norm, margin, accuracy]) in steps.iter().enumerate() {
                assert!((loss - losses[i]).abs() <= 2e-4, "{context}, step {i}: loss {loss}, {}", losses[i]);
                assert!((norm / norms[i] - 1.0).abs() <= 1e-3, "{context}, step {i}: norm {norm}, {}", norms[i]);
                assert!((margin - margins[i]).abs() <= 1e-3, "{context}, step {i}: margin {margin}, {}", margins[i]);
                assert!((accuracy - accuracies[i]).abs() <= 1e-6, "{context}, step {i}: {accuracy}, {}", accuracies[i]);
            }
            let file = candle_core::safetensors::load(
                path(format!("dpo/llama.{case}.final_adapter.safetensors")),
                &Device::Cpu,
            );
            for (key, want) in &file.unwrap() {
                let found = adapter.tensor(key.strip_prefix("base_model.model.").unwrap()).unwrap();
                let want = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let error = found.values.iter().zip(&want).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
                assert!(error <= 1e-3 && found.values.len() == want.len(), "{context}: {key} differs by {error}");
            }
            let first = first.get_or_insert_with(|| adapter.clone());
            assert!(*first == adapter, "{context}: bits differ from those of stage 0");
        }
    }
}

#[test]
fn with_lora_on_attention_dpo_follows_pytorch() {
    follow("attn_r8");
}

#[test]
fn with_rslora_on_all_layers_dpo_follows_pytorch() {
    follow("all_r4_rslora");
}
