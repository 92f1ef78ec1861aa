//! Local steps: islands of ranks that exchange the changes in their weights only every few steps.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod checkpoints;
mod convergence;
mod faults;
mod killed;
mod reference;
mod server;
mod stages;

#[path = "../support/mod.rs"]
mod support;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::engine::InitialValues;
use candle_zero::nn::Linear;
use serde_json::{Value, json};
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// The number of samples of an island in each step.
const BATCH: usize = 4;

/// Returns the values that the recorded reference uses.
fn values(count: usize, seed: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|i| (((i * 37 + seed * 101) % 97) as f32 / 97.0 - 0.5) * scale).collect()
}

struct Model(Linear, Linear);

impl Model {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self(Linear::new(6, 8, vb.pp("first"))?, Linear::new(8, 3, vb.pp("second"))?))
    }

    fn loss(&self, (x, target): &(Tensor, Tensor)) -> candle_core::Result<Tensor> {
        use candle_nn::Module;
        self.1.forward(&self.0.forward(x)?.tanh()?)?.sub(target)?.sqr()?.mean_all()
    }
}

const NAMES: [&str; 4] = ["first.weight", "first.bias", "second.weight", "second.bias"];
const SIZES: [usize; 4] = [48, 8, 24, 3];

/// Returns the part of an island's batch that rank `rank` of `ranks` trains on.
fn batch(step: usize, island: usize, (rank, ranks): (usize, usize)) -> (Tensor, Tensor) {
    let tensor = |width: usize, seed: usize, scale: f32| {
        let all = Tensor::from_vec(values(BATCH * width, seed, scale), (BATCH, width), &Device::Cpu).unwrap();
        all.narrow(0, rank * (BATCH / ranks), BATCH / ranks).unwrap()
    };
    (tensor(6, step * 7 + island * 3 + 1, 2.0), tensor(3, step * 5 + island * 11 + 2, 1.0))
}

fn config(local_steps: &Value, stage: usize, islands: usize) -> Value {
    let mut section = local_steps.clone();
    section["islands"] = json!(islands);
    json!({
        "train_batch_size": BATCH * islands,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_check": false,
        "local_steps": section,
    })
}

/// The weights with which the recorded reference begins.
#[derive(Debug)]
struct Start;

impl InitialValues for Start {
    fn has(&self, _: &str) -> bool {
        true
    }

    fn values(&self, name: &str, _: &[usize], range: Range<usize>) -> candle_zero::Result<Vec<f32>> {
        let number = NAMES.iter().position(|known| *known == name).unwrap();
        Ok(values(SIZES[number], number, 0.4)[range].to_vec())
    }

    fn fingerprint(&self) -> u64 {
        0
    }
}

fn engine(comm: Arc<dyn Communicator>, config: Value) -> candle_zero::Result<Engine<Model>> {
    let builder = Engine::builder().communicator(comm).device(Device::Cpu).initial_values(Arc::new(Start));
    builder.initialize(Model::new, config)
}

/// Takes steps `steps`, counted from 1.
fn train(engine: &mut Engine<Model>, steps: RangeInclusive<usize>) -> candle_zero::Result<()> {
    let (island, islands) = engine.island().unwrap_or((0, 1));
    let ranks = engine.world_size() / islands;
    for step in steps {
        let batch = batch(step, island, (engine.rank() % ranks, ranks));
        let loss = engine.forward(|model| model.loss(&batch))?;
        engine.backward(&loss)?;
        engine.step()?;
    }
    Ok(())
}

fn weights(engine: &mut Engine<Model>) -> Vec<Vec<f32>> {
    let of = |name| engine.safe_get_full_fp32_param(name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    NAMES.map(of).to_vec()
}

/// Runs `rank` on every rank and returns the results in rank order.
fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(Arc<dyn Communicator>) -> candle_zero::Result<T> + Sync) -> Vec<T> {
    threads::run(ranks, rank).unwrap().into_iter().map(|result| result.unwrap()).collect()
}
