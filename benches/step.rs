//! A whole training step (forward, backward, optimizer) of the nano GPT on two ranks as threads, by stage and dtype.
//! Items are tokens of all ranks.
//!
//!     cargo bench --bench step
#![allow(clippy::unwrap_used)]

use candle_core::{Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::{Engine, Result};
use divan::Bencher;
use divan::counter::ItemsCount;
use serde_json::json;
use std::sync::Mutex;
use std::sync::mpsc::channel;

const RANKS: usize = 2;
const MICRO_BATCH: usize = 4;

fn main() {
    divan::main();
}

/// Trains in the background, a step of every rank at a time, each time that the clock starts.
fn measure(bencher: Bencher<'_, '_>, stage: u8, bf16: bool) {
    let gpt = GptConfig::preset("nano").unwrap();
    let config = json!({
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
    });
    let (starts, started): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| channel::<()>()).unzip();
    let started: Vec<_> = started.into_iter().map(Mutex::new).collect();
    let (done, ended) = channel::<()>();
    let step_of_all = move || {
        starts.iter().for_each(|start| start.send(()).unwrap());
        (0..RANKS).for_each(|_| ended.recv().unwrap());
    };
    std::thread::scope(|scope| {
        let (gpt, config, started) = (&gpt, &config, &started);
        let ranks = scope.spawn(move || {
            threads::run(RANKS, |comm| -> Result<()> {
                let (rank, builder) = (comm.rank(), Engine::builder().communicator(comm).device(Device::Cpu));
                let mut engine = builder.initialize(|vb| Gpt::new(gpt, vb), config.clone())?;
                let ids = |shift| {
                    let token = |i: usize| ((rank + i + shift) * 31 % 251) as u32;
                    Tensor::from_iter((0..MICRO_BATCH * gpt.ctx).map(token), &Device::Cpu)?
                        .reshape((MICRO_BATCH, gpt.ctx))
                };
                let (inputs, targets) = (ids(0)?, ids(1)?);
                for () in started[rank].lock().unwrap().iter() {
                    let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
                    engine.backward(&loss)?;
                    engine.step()?;
                    done.send(()).unwrap();
                }
                Ok(())
            })
        });
        // The first step makes buffers and records the order of units.
        step_of_all();
        bencher.counter(ItemsCount::new(RANKS * MICRO_BATCH * gpt.ctx)).bench_local(&step_of_all);
        drop(step_of_all);
        ranks.join().unwrap().unwrap().into_iter().for_each(|rank| rank.unwrap());
    });
}

#[divan::bench(args = [0, 1, 2, 3], sample_count = 10, sample_size = 1)]
fn nano_f32(bencher: Bencher<'_, '_>, stage: u8) {
    measure(bencher, stage, false);
}

#[divan::bench(args = [0, 1, 2, 3], sample_count = 10, sample_size = 1)]
fn nano_bf16(bencher: Bencher<'_, '_>, stage: u8) {
    measure(bencher, stage, true);
}
