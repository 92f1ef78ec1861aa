//! The engine on GPUs: stages 0 to 3 give the same bits as each other, and the CPU's losses. Ranks are threads with a GPU each, as
//! far as there are so many. Where no GPU answers, each test is skipped; scripts/gpu_check.sh counts that as "no GPU". CI runs
//! them on the stand-in of tools/mock_cuda.

use crate::support::device::{counted_bytes, gpu};
use crate::support::processes::as_program;
use crate::support::skips::skipped;
use crate::support::tiny::{Outcome, Shape, Tiny, absent_parameters_are_named, batch, config, train_on};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::comm::threads;
use serde_json::{Value, json};
use std::process::Command;

const STEPS: usize = 10;
/// Relative; f32 sums of another order.
const CPU_TOLERANCE: f32 = 1e-4;

/// Whether a GPU answers; `test` is skipped otherwise.
fn gpu_answers<T: Fn()>(test: T) -> bool {
    gpu(0).map_err(|e| skipped(test, format_args!("no CUDA device answers: {e}"))).is_ok()
}

fn zero() -> Value {
    json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700})
}

fn losses(outcome: &Outcome) -> Vec<f32> {
    outcome.losses.iter().map(|bits| f32::from_bits(*bits)).collect()
}

#[test]
fn stages_give_the_same_bits_and_the_losses_of_the_cpu() {
    if !gpu_answers(stages_give_the_same_bits_and_the_losses_of_the_cpu) {
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    for world in [1, 2, 4] {
        let on_gpu = |stage, shape| train_on(gpu, world, shape, &config(stage, 2, zero(), json!({})), STEPS);
        let reference = on_gpu(0, shape);
        let others = [(1, false), (2, false), (3, false), (3, true)];
        for (stage, checkpointed) in others {
            for (rank, (a, b)) in reference.iter().zip(on_gpu(stage, Shape { checkpointed, ..shape })).enumerate() {
                let what = format!("stage {stage}, rank {rank} of {world}, recomputing: {checkpointed}");
                assert_eq!(a.losses, b.losses, "losses: {what}");
                assert_eq!(a.norms, b.norms, "norms: {what}");
                assert!(a.exported == b.exported, "parameters: {what}");
            }
        }
        let on_cpu = train_on(|_| Ok(Device::Cpu), world, shape, &config(0, 2, json!({}), json!({})), STEPS);
        for (gpu, cpu) in reference.iter().zip(&on_cpu) {
            for (micro, (gpu, cpu)) in losses(gpu).into_iter().zip(losses(cpu)).enumerate() {
                let difference = ((gpu - cpu) / cpu).abs();
                assert!(difference <= CPU_TOLERANCE, "micro step {micro}, world {world}: {gpu} on the GPU, {cpu}");
            }
        }
    }
}

#[test]
fn bf16_trains_and_stages_agree() {
    if !gpu_answers(bf16_trains_and_stages_agree) {
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let bf16 = || json!({"bf16": {"enabled": true}});
    let reference = train_on(gpu, 2, shape, &config(0, 1, zero(), bf16()), 2 * STEPS);
    let first = losses(&reference[0]);
    assert!(first[2 * STEPS - 1] < first[0], "the model learns: {first:?}");
    for stage in 1..4 {
        let run = train_on(gpu, 2, shape, &config(stage, 1, zero(), bf16()), 2 * STEPS);
        assert_eq!(run[0].losses, reference[0].losses, "stage {stage}");
        assert!(run[0].exported == reference[0].exported, "parameters at stage {stage}");
    }
}

#[test]
fn an_absent_parameter_is_an_error_with_its_name() {
    if gpu_answers(an_absent_parameter_is_an_error_with_its_name) {
        absent_parameters_are_named(|| gpu(0));
    }
}

/// Set for a process that runs a test's own part alone.
const ALONE: &str = "CANDLE_ZERO_CUDA_ALONE";

/// What `test` prints when it runs alone in a process with a seed of the order of streams: other tests use the same GPUs.
fn alone(test: &str, seed: u64) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(as_program(module_path!(), test))
        .env(ALONE, "1")
        .env("MOCK_CUDA_SEED", seed.to_string())
        .output()
        .unwrap();
    assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().filter(|l| l.contains("stage ")).collect()
}

/// Whether the driver is the stand-in of tools/mock_cuda; `test` is skipped otherwise.
fn stand_in<T: Fn()>(test: T) -> bool {
    let there = counted_bytes(0).is_some();
    if !there {
        skipped(test, "needs the stand-in for CUDA, tools/mock_cuda");
    }
    there
}

#[test]
fn between_steps_a_gpu_holds_the_parameters_that_its_rank_holds() {
    let name = "between_steps_a_gpu_holds_the_parameters_that_its_rank_holds";
    if !stand_in(between_steps_a_gpu_holds_the_parameters_that_its_rank_holds) {
        return;
    }
    if std::env::var_os(ALONE).is_none() {
        alone(name, 0);
        return;
    }
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    for (stage, bf16) in (0..4u8).flat_map(|stage| [(stage, false), (stage, true)]) {
        let config = config(stage, 1, zero(), json!({"bf16": {"enabled": bf16}}));
        let held = threads::run(2, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(gpu(rank)?);
            let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?;
            let (ids, targets) = batch(rank);
            for _ in 0..2 {
                let (ids, targets) = (ids.to_device(engine.device())?, targets.to_device(engine.device())?);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            let report = engine.memory_report();
            Ok((
                counted_bytes(i32::try_from(rank).unwrap()).unwrap(),
                report.parameters,
                engine.trainable_parameters().len(),
            ))
        });
        for (rank, held) in held.unwrap().into_iter().enumerate() {
            let (bytes, parameters, tensors) = held.unwrap();
            // Each parameter has a leaf of a byte and a token of an f32 in the graph; an absent one is a byte too.
            let held = if stage == 3 { tensors } else { parameters * if bf16 { 2 } else { 4 } };
            assert_eq!(bytes, held + 5 * tensors, "stage {stage}, bf16: {bf16}, rank {rank}");
        }
    }
}

#[test]
fn any_order_of_streams_and_threads_gives_the_same_bits() {
    let name = "any_order_of_streams_and_threads_gives_the_same_bits";
    if !stand_in(any_order_of_streams_and_threads_gives_the_same_bits) {
        return;
    }
    if std::env::var_os(ALONE).is_some() {
        let shape = Shape { layers: 1, units: true, ..Shape::default() };
        for stage in [2, 3] {
            let run = train_on(gpu, 2, shape, &config(stage, 1, zero(), json!({})), 2);
            let digest = run[0].exported.iter().fold(0u64, |d, b| d.rotate_left(5) ^ u64::from(*b));
            println!("stage {stage}: {:?} {:?} {digest:x}", run[0].losses, run[0].norms);
        }
        return;
    }
    let want = alone(name, 0);
    assert!(want.contains("stage 2") && want.contains("stage 3"), "{want}");
    for seed in 1..=20 {
        assert_eq!(alone(name, seed), want, "seed {seed}");
    }
}
