//! The loss and the gradient norms of packed rows equal those of the separate samples.

use crate::fixtures::{MODELS, base, json, values};
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::models::Decoder;
use candle_zero::nn::Sequences;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const LENGTH: usize = 128;

struct Sample {
    ids: Vec<u32>,
    targets: Vec<bool>,
}

fn samples(masked: bool) -> Vec<Sample> {
    let file = json("packing/sequences.json");
    let lists = |key: &str| serde_json::from_value::<Vec<Vec<u32>>>(file[key].clone()).unwrap();
    let sample = |(ids, mask): (Vec<u32>, Vec<u32>)| {
        let targets = mask.iter().enumerate().map(|(i, flag)| if masked { *flag == 1 } else { i > 0 }).collect();
        Sample { ids, targets }
    };
    lists("input_ids").into_iter().zip(lists("loss_mask")).map(sample).collect()
}

/// Packs each sample into the first row that has room for it.
fn rows(samples: Vec<Sample>) -> Vec<Vec<Sample>> {
    let mut rows: Vec<Vec<Sample>> = Vec::new();
    for sample in samples {
        let room = |row: &&mut Vec<Sample>| {
            row.iter().map(|sample| sample.ids.len()).sum::<usize>() + sample.ids.len() <= LENGTH
        };
        match rows.iter_mut().find(room) {
            Some(row) => row.push(sample),
            None => rows.push(vec![sample]),
        }
    }
    rows
}

/// Returns the ids, the targets and the sequences of rows. The target at a position is the next token of the same
/// sample.
fn batch(rows: &[Vec<Sample>]) -> (Tensor, Tensor, Sequences) {
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    for row in rows {
        for sample in row {
            ids.extend(&sample.ids);
            let next = (1..sample.ids.len()).map(|i| if sample.targets[i] { i64::from(sample.ids[i]) } else { -100 });
            targets.extend(next.chain([-100]));
        }
        ids.resize(ids.len().next_multiple_of(LENGTH), 3);
        targets.resize(ids.len(), -100);
    }
    let lengths: Vec<Vec<usize>> = rows.iter().map(|row| row.iter().map(|sample| sample.ids.len()).collect()).collect();
    let shape = (rows.len(), LENGTH);
    let ids = Tensor::from_vec(ids, shape, &Device::Cpu).unwrap();
    let targets = Tensor::from_vec(targets, shape, &Device::Cpu).unwrap();
    (ids, targets, Sequences::from_lengths(&lengths, LENGTH).unwrap())
}

/// Returns the loss, the gradient norm, and the norm of each parameter's gradient, over all rows.
fn packed(name: &str, record: &Value, masked: bool, recomputes: bool) -> (f64, f64, BTreeMap<String, f64>) {
    let rows = rows(samples(masked));
    let (ids, targets, sequences) = batch(&rows);
    let base = base(name);
    let mut sizes = base.config().clone();
    sizes.checkpoint_activations = recomputes;
    let config = json!({
        "train_micro_batch_size_per_gpu": rows.len(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 3},
    });
    let builder = Engine::builder().device(Device::Cpu).initial_values(base.values());
    let mut engine = builder.initialize(|vb| Decoder::new(&sizes, vb), config).unwrap();
    let divisor = record["targets"].as_f64();
    let loss = engine.forward(|model| model.loss_packed(&ids, &targets, Some(&sequences), divisor)).unwrap();
    engine.backward(&loss).unwrap();
    let mut norms = BTreeMap::new();
    for (parameter, _) in base.config().parameters().unwrap() {
        let gradient = values(&engine.safe_get_full_grad(&parameter).unwrap().unwrap());
        let square: f64 = gradient.iter().map(|x| f64::from(*x).powi(2)).sum();
        norms.insert(parameter, square.sqrt());
    }
    engine.step().unwrap();
    (f64::from(loss.to_scalar::<f32>().unwrap()), engine.global_grad_norm().unwrap(), norms)
}

#[test]
fn packed_rows_have_the_loss_and_the_gradients_of_their_samples_alone() {
    let file = json("packing/expected.json");
    for name in MODELS {
        for (case, masked) in [("all_tokens", false), ("masked", true)] {
            let record = &file["models"][name][case];
            let run = packed(name, record, masked, false);
            let (loss, norm, norms) = &run;
            let error = (loss - record["loss"].as_f64().unwrap()).abs();
            let relative = |norm: f64, recorded: &Value| (norm / recorded.as_f64().unwrap() - 1.0).abs();
            let recorded = &record["param_grad_norms"];
            // The gradients of parameters are compared by their norms: the gradient of the keys' part of GPT-2's
            // c_attn.bias consists only of rounding errors, so its relative error is meaningless.
            let worst = norms.iter().map(|(name, norm)| (relative(*norm, &recorded[name]), name));
            let worst = worst.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
            let total = relative(*norm, &record["grad_norm"]);
            println!("{name}, {case}: loss {error:.1e}, norm {total:.1e}, of parameters {worst:?}");
            assert!(error <= 2e-5 && total <= 1e-4 && worst.0 <= 1e-4, "{name}, {case}: {error}, {total}, {worst:?}");
            assert!(packed(name, record, masked, true) == run, "{name}, {case}: recomputed");
        }
    }
}
