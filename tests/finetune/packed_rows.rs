//! The loss of packed rows is that of the samples one by one.

use crate::fixtures::{MODELS, base, json};
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::models::Decoder;
use candle_zero::nn::Sequences;
use serde_json::{Value, json};

const LENGTH: usize = 128;

struct Sample {
    ids: Vec<u32>,
    targets: Vec<bool>,
}

fn samples(masked: bool) -> Vec<Sample> {
    let file = json("packing/sequences.json");
    let of = |key: &str| serde_json::from_value::<Vec<Vec<u32>>>(file[key].clone()).unwrap();
    let sample = |(ids, mask): (Vec<u32>, Vec<u32>)| {
        let targets = mask.iter().enumerate().map(|(i, is)| if masked { *is == 1 } else { i > 0 }).collect();
        Sample { ids, targets }
    };
    of("input_ids").into_iter().zip(of("loss_mask")).map(sample).collect()
}

/// Rows of samples, in the order in which they fit.
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

/// Ids, targets and the places of sequences. A position's target is the next token of its own sample.
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

/// Loss and gradient norm of all rows, by a rank of its own.
fn packed(name: &str, record: &Value, masked: bool, recomputes: bool) -> (f64, f64) {
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
    engine.step().unwrap();
    (f64::from(loss.to_scalar::<f32>().unwrap()), engine.get_global_grad_norm().unwrap())
}

#[test]
fn packed_rows_have_the_loss_and_the_gradients_of_their_samples_alone() {
    let file = json("packing/expected.json");
    for name in MODELS {
        for (case, masked) in [("all_tokens", false), ("masked", true)] {
            let record = &file["models"][name][case];
            let (loss, norm) = packed(name, record, masked, false);
            let far = (loss - record["loss"].as_f64().unwrap()).abs();
            let far_norm = (norm / record["grad_norm"].as_f64().unwrap() - 1.0).abs();
            println!("{name}, {case}: loss {far:.1e}, norm {far_norm:.1e}");
            assert!(far <= 2e-5 && far_norm <= 1e-4, "{name}, {case}: loss {far}, norm {far_norm}");
            assert_eq!(packed(name, record, masked, true), (loss, norm), "{name}, {case}: recomputed");
        }
    }
}
