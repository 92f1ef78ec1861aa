//! Local steps train about as well as synchronous training on the same number of tokens, and transfer a fraction of the
//! bytes.

use super::on_ranks;
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::comm::Communicator;
use candle_zero::data::TokenData;
use candle_zero::models::{Gpt, GptConfig};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) const ISLANDS: usize = 4;
const BATCH: usize = 4;
const SEQUENCE: usize = 64;

/// Returns inputs and targets of sequences that begin at `starts`.
fn tokens(data: &TokenData, starts: impl Iterator<Item = usize>) -> (Tensor, Tensor) {
    let (mut inputs, mut targets, mut rows) = (Vec::new(), Vec::new(), 0);
    for start in starts {
        data.extend(start, SEQUENCE, &mut inputs);
        data.extend(start + 1, SEQUENCE, &mut targets);
        rows += 1;
    }
    let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (rows, SEQUENCE), &Device::Cpu).unwrap();
    (tensor(inputs), tensor(targets))
}

/// Trains on the first nine tenths of the corpus, calling `after_step` after each step. Returns the validation loss on
/// the rest, and the bytes that this rank received from other islands or, if there are no islands, from all other
/// ranks.
pub(super) fn train_and_validate(
    comm: Arc<dyn Communicator>,
    local_steps: Option<Value>,
    steps: usize,
    mut after_step: impl FnMut(&Engine<Gpt>),
) -> candle_zero::Result<(f64, u64)> {
    let data = TokenData::open(None)?;
    let split = data.len() / 10 * 9;
    let mut config = json!({
        "train_batch_size": ISLANDS * BATCH, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": 20}},
    });
    if let Some(section) = local_steps {
        config["local_steps"] = section;
    }
    let gpt = GptConfig::preset("nano").unwrap();
    let builder = Engine::builder().communicator(comm).device(Device::Cpu);
    let mut engine = builder.initialize(|vb| Gpt::new(&gpt, vb), config)?;
    while engine.global_steps() < steps as u64 {
        let batch = engine.global_steps() * ISLANDS as u64 + engine.rank() as u64;
        let draw = |row: usize| {
            let number = batch * BATCH as u64 + row as u64;
            // Multiplicative hashing spreads consecutive numbers over the corpus.
            (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) as usize % (split - SEQUENCE - 1)
        };
        let (inputs, targets) = tokens(&data, (0..BATCH).map(draw));
        let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
        engine.backward(&loss)?;
        engine.step()?;
        after_step(&engine);
    }
    let report = engine.island_report().unwrap_or_else(|| engine.comm_report());
    engine.synchronize_islands()?;
    let (mut sum, mut batches) = (0.0, 0);
    let starts: Vec<usize> = (split..data.len() - SEQUENCE - 1).step_by(SEQUENCE).collect();
    for starts in starts.chunks(16) {
        let (inputs, targets) = tokens(&data, starts.iter().copied());
        sum += f64::from(engine.eval(|model| model.loss(&inputs, &targets))?.to_scalar::<f32>()?);
        batches += 1;
    }
    Ok((sum / f64::from(batches), report.data_wire_bytes()))
}

#[test]
#[ignore = "takes half an hour; run it with: cargo test --release --test local_steps -- --ignored --nocapture"]
fn fifty_local_steps_on_four_islands_are_within_one_percent_of_synchronous_training() {
    let steps = std::env::var("CANDLE_ZERO_STEPS").map_or(10_000, |steps| steps.parse().unwrap());
    let (synchronous, all_bytes) = on_ranks(ISLANDS, |comm| train_and_validate(comm, None, steps, |_| {}))[0];
    eprintln!("synchronous: validation loss {synchronous:.4}, {all_bytes} bytes");
    for (section, share) in [
        (json!({"steps": 50}), 50.0),
        (json!({"steps": 50, "wire_dtype": "int8"}), 190.0),
        (json!({"steps": 50, "wire_dtype": "int4"}), 360.0),
        (json!({"steps": 50, "fragments": 5, "fragment_delay": 5, "fragment_alpha": 0.5}), 50.0),
    ] {
        let mut section = section;
        section["islands"] = json!(ISLANDS);
        let (loss, bytes) = on_ranks(ISLANDS, |comm| train_and_validate(comm, Some(section.clone()), steps, |_| {}))[0];
        let (change, fraction) = (loss / synchronous - 1.0, all_bytes as f64 / bytes as f64);
        eprintln!("{section}: validation loss {loss:.4} ({:+.2} %), 1/{fraction:.0} of the bytes", 100.0 * change);
        assert!(change < 0.01, "{section}: {loss} instead of {synchronous}");
        assert!(fraction > 0.95 * share, "{section}: 1/{fraction}");
    }
}
