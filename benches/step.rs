//! Measures a complete training step (forward, backward, optimizer) of a GPT at each stage and in each dtype, on two
//! ranks that are threads. Items are tokens of all ranks. Each rank computes on as many threads as zerorun would give
//! it.
//!
//!     cargo bench --bench step
//!
//! Also measures the engine's overhead: the model `mini` on one rank at stage 0, alternating with the same model and
//! optimizer in a plain loop.
//!
//!     cargo bench --bench step -- engine_cost [ROUNDS]
#![allow(clippy::unwrap_used)]

mod keep_memory;

use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_zero::comm::threads;
use candle_zero::config::Config;
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::optim::{Optimizer, StepContext, base_lr, from_config};
use candle_zero::precision::{FlatMut, FlatRef};
use candle_zero::{Engine, Result};
use divan::Bencher;
use divan::counter::ItemsCount;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Instant;

const RANKS: usize = 2;
const MICRO_BATCH: usize = 4;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let engine_cost = args.iter().position(|arg| arg == "engine_cost");
    // A rank gets as many threads as `zerorun` would give it.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if engine_cost.is_some() { cores } else { (cores / RANKS).max(1) }.to_string();
    keep_memory::start_as_a_rank(&[("RAYON_NUM_THREADS", &threads), ("CANDLE_NUM_THREADS", &threads)]);
    match engine_cost {
        Some(index) => {
            let rounds = args.get(index + 1).and_then(|rounds| rounds.parse().ok()).unwrap_or(15);
            [false, true].into_iter().for_each(|bf16| compare_with_plain_loop(bf16, rounds));
        }
        None => divan::main(),
    }
}

fn config(stage: u8, micro_batch: usize, bf16: bool) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
    })
}

/// Returns token ids `[batch, ctx]` and the ids that follow them.
fn batch(gpt: &GptConfig, batch: usize, rank: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let ids = |shift| {
        let token = |i: usize| ((rank + i + shift) * 31 % 251) as u32;
        Tensor::from_iter((0..batch * gpt.ctx).map(token), &Device::Cpu)?.reshape((batch, gpt.ctx))
    };
    Ok((ids(0)?, ids(1)?))
}

/// Trains in the background. In each measured call, every rank runs one step.
fn measure(bencher: Bencher<'_, '_>, preset: &str, stage: u8, bf16: bool) {
    let gpt = GptConfig::preset(preset).unwrap();
    let config = config(stage, MICRO_BATCH, bf16);
    let (start_senders, start_receivers): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| channel::<()>()).unzip();
    let start_receivers: Vec<_> = start_receivers.into_iter().map(Mutex::new).collect();
    let (step_sender, step_receiver) = channel::<()>();
    let step_of_all = move || {
        start_senders.iter().for_each(|start| start.send(()).unwrap());
        (0..RANKS).for_each(|_| step_receiver.recv().unwrap());
    };
    std::thread::scope(|scope| {
        let (gpt, config, start_receivers) = (&gpt, &config, &start_receivers);
        let ranks = scope.spawn(move || {
            threads::run(RANKS, |comm| -> Result<()> {
                let (rank, builder) = (comm.rank(), Engine::builder().communicator(comm).device(Device::Cpu));
                let mut engine = builder.initialize(|vb| Gpt::new(gpt, vb), config.clone())?;
                let (inputs, targets) = batch(gpt, MICRO_BATCH, rank)?;
                for () in start_receivers[rank].lock().unwrap().iter() {
                    let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
                    engine.backward(&loss)?;
                    engine.step()?;
                    step_sender.send(()).unwrap();
                }
                Ok(())
            })
        });
        // The first steps allocate buffers and record the order of units.
        (0..3).for_each(|_| step_of_all());
        bencher.counter(ItemsCount::new(RANKS * MICRO_BATCH * gpt.ctx)).bench_local(&step_of_all);
        drop(step_of_all);
        ranks.join().unwrap().unwrap().into_iter().for_each(|rank| rank.unwrap());
    });
}

#[divan::bench(args = [0, 1, 2, 3], sample_count = 30, sample_size = 1)]
fn nano_f32(bencher: Bencher<'_, '_>, stage: u8) {
    measure(bencher, "nano", stage, false);
}

#[divan::bench(args = [0, 1, 2, 3], sample_count = 30, sample_size = 1)]
fn nano_bf16(bencher: Bencher<'_, '_>, stage: u8) {
    measure(bencher, "nano", stage, true);
}

#[divan::bench(args = [0, 1, 2, 3], sample_count = 10, sample_size = 1)]
fn mini_f32(bencher: Bencher<'_, '_>, stage: u8) {
    measure(bencher, "mini", stage, false);
}

#[divan::bench(args = [0, 1, 2, 3], sample_count = 10, sample_size = 1)]
fn mini_bf16(bencher: Bencher<'_, '_>, stage: u8) {
    measure(bencher, "mini", stage, true);
}

/// A variable of the plain loop with its optimizer state.
struct TrainedVar {
    var: Var,
    state: RefCell<State>,
}

struct State {
    /// The master weights of a bf16 variable.
    master: Option<Vec<f32>>,
    moments: Vec<Vec<f32>>,
}

/// One in-place optimizer step on one variable. The second operand is the variable's gradient.
struct Update<'a> {
    optimizer: &'a dyn Optimizer,
    ctx: StepContext,
    state: &'a RefCell<State>,
}

impl InplaceOp2 for Update<'_> {
    fn name(&self) -> &'static str {
        "update"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        _: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        let State { master, moments } = &mut *self.state.borrow_mut();
        let mut moments: Vec<&mut [f32]> = moments.iter_mut().map(Vec::as_mut_slice).collect();
        let (from, to) = grad_layout.contiguous_offsets().unwrap();
        match (param, grad, master) {
            (CpuStorage::F32(param), CpuStorage::F32(grad), None) => {
                self.optimizer.update(&self.ctx, param, FlatRef::F32(&grad[from..to]), &mut moments, None);
            }
            (CpuStorage::BF16(param), CpuStorage::BF16(grad), Some(master)) => {
                let (grad, copy) = (FlatRef::BF16(&grad[from..to]), FlatMut::BF16(param));
                self.optimizer.update(&self.ctx, master, grad, &mut moments, Some(copy));
            }
            _ => unreachable!("gradients have the parameters' dtype"),
        }
        Ok(())
    }
}

/// Compares the time of a step with and without the engine, measured alternately.
fn compare_with_plain_loop(bf16: bool, rounds: usize) {
    const BATCH: usize = 8;
    let gpt = GptConfig::preset("mini").unwrap();
    let config = config(0, BATCH, bf16);
    let (inputs, targets) = batch(&gpt, BATCH, 0).unwrap();

    let optimizer_config = Config::load(config.clone(), 1).unwrap().optimizer.unwrap();
    let optimizer = from_config(&optimizer_config);
    let vars = VarMap::new();
    let dtype = if bf16 { DType::BF16 } else { DType::F32 };
    let plain = Gpt::new(&gpt, VarBuilder::from_varmap(&vars, dtype, &Device::Cpu)).unwrap();
    let trained_vars = vars.all_vars().into_iter().map(|var| {
        let values = || var.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        let moments = optimizer.state_names().iter().map(|_| vec![0f32; var.elem_count()]).collect();
        TrainedVar { state: RefCell::new(State { master: bf16.then(values), moments }), var }
    });
    let trained_vars: Vec<TrainedVar> = trained_vars.collect();
    let mut steps = 0;
    let mut plain_step = || {
        let start = Instant::now();
        steps += 1;
        let loss = plain.loss(&inputs, &targets).unwrap();
        let grads = loss.backward().unwrap();
        let ctx = StepContext::new(base_lr(&optimizer_config), steps);
        for TrainedVar { var, state } in &trained_vars {
            let update = Update { optimizer: optimizer.as_ref(), ctx, state };
            var.inplace_op2(grads.get(var).unwrap(), &update).unwrap();
        }
        drop((grads, loss));
        start.elapsed().as_secs_f64()
    };

    // Without a launcher, there is one rank.
    let builder = Engine::builder().device(Device::Cpu);
    let mut engine = builder.initialize(|vb| Gpt::new(&gpt, vb), config).unwrap();
    let mut engine_step = || {
        let start = Instant::now();
        let loss = engine.forward(|model| model.loss(&inputs, &targets)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        drop(loss);
        start.elapsed().as_secs_f64()
    };

    // The first steps of both allocate their buffers.
    for _ in 0..3 {
        plain_step();
        engine_step();
    }
    let pairs: Vec<(f64, f64)> = (0..rounds).map(|_| (engine_step(), plain_step())).collect();
    let median = |of: fn(&(f64, f64)) -> f64| {
        let mut all: Vec<f64> = pairs.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    println!(
        "mini {dtype:?} batch {BATCH} x {}, threads: {}, rounds: {rounds}; engine {:.1} ms, plain loop {:.1} ms, \
         ratio {:.3}",
        gpt.ctx,
        rayon::current_num_threads(),
        1e3 * median(|pair| pair.0),
        1e3 * median(|pair| pair.1),
        median(|pair| pair.0 / pair.1),
    );
}
