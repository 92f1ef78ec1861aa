//! The engine on GPUs: stages 0 to 3 give the same bits as each other, and the CPU's losses. Ranks are threads with a GPU each, as
//! far as there are so many. Where no GPU answers, each test is skipped; scripts/gpu_check.sh counts that as "no GPU". CI runs
//! them on the stand-in of tools/mock_cuda.

use crate::support::skips::skipped;
use crate::support::tiny::{Outcome, Shape, absent_parameters_are_named, config, train, train_on};
use candle_core::Device;
use candle_core::cuda_backend::{WrapErr, cudarc::driver::CudaContext};
use serde_json::{Value, json};

const STEPS: usize = 10;
/// Relative; f32 sums of another order.
const CPU_TOLERANCE: f32 = 1e-4;

fn gpu(rank: usize) -> candle_core::Result<Device> {
    let gpus = usize::try_from(CudaContext::device_count().w()?).unwrap();
    Device::new_cuda(rank % gpus.max(1))
}

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
        let on_cpu = train(world, shape, &config(0, 2, json!({}), json!({})), STEPS);
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
