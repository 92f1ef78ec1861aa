//! Experts that are divided among ranks: rows travel to them. Results have the same bits at every stage, and are those
//! of a job whose ranks all hold all experts, except for rounding.

use crate::support::experts::{EXPERT, Mixture, PER_ROW, SHAPE, Shape, allow, rows};
use crate::support::tiny::config;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::comm::threads;
use candle_zero::memory::MemoryKind;
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::{Engine, EngineBuilder};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: usize = 3;

/// The number of each rank's rows, and the experts among which their routers choose.
type Routes = dyn Fn(usize, usize) -> (usize, Vec<usize>) + Sync;

/// The losses and gradient norms of every rank, and the exported model.
type Trained = (Vec<(Vec<f32>, Vec<f64>)>, Vec<u8>);

/// A job: its number of ranks, and the number of ranks among which experts are divided.
#[derive(Debug, Clone, Copy)]
struct Job {
    world: usize,
    size: usize,
}

fn job(world: usize, size: usize) -> Job {
    Job { world, size }
}

/// Returns `config` with the section that divides experts among `size` ranks.
fn divided(mut config: Value, size: usize) -> Value {
    config["expert_parallel"] = json!({"enabled": true, "autoep_size": size});
    config["gradient_check"] = json!(false);
    config
}

/// Trains with `routes`, which returns the number of rows and the experts of a micro step (the first argument) on a rank
/// (the second one).
fn train_with(
    job: Job,
    shape: Shape,
    config: &Value,
    routes: &Routes,
    more: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> Trained {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let config = divided(config.clone(), job.size);
    let ranks = threads::run(job.world, |comm| {
        let rank = comm.rank();
        let builder = more(Engine::builder().communicator(comm));
        let mut engine = builder.initialize(|vb| Mixture::new(shape, vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let (mut losses, mut norms) = (vec![], vec![]);
        for micro in 0..STEPS * accumulation {
            let (count, allowed) = routes(micro, rank);
            allow(allowed);
            let x = rows(micro * job.world + rank, count);
            let loss = engine.forward(|model| model.loss(&x))?;
            losses.push(loss.to_scalar::<f32>()?);
            engine.backward(&loss)?;
            let updates = engine.is_gradient_accumulation_boundary();
            engine.step()?;
            if updates {
                norms.push(engine.global_grad_norm().unwrap());
            }
        }
        let gathered = engine.memory_report().row(MemoryKind::Gathered).bytes.held;
        assert_eq!(gathered, 0, "rank {rank}");
        engine.export_safetensors(&file)?;
        Ok((losses, norms))
    });
    let ranks = ranks.unwrap().into_iter().collect::<candle_zero::Result<_>>().unwrap();
    (ranks, std::fs::read(&file).unwrap())
}

fn train(job: Job, shape: Shape, config: &Value, routes: &Routes) -> Trained {
    train_with(job, shape, config, routes, |builder| builder)
}

/// Returns routes with which each rank chooses among three separate experts, and each rank in turn has no rows.
fn disjoint(micro: usize, rank: usize) -> (usize, Vec<usize>) {
    let count = if (micro + rank).is_multiple_of(4) { 0 } else { 5 + rank };
    (count, (0..3).map(|i| (3 * rank + i + micro) % SHAPE.experts).collect())
}

/// Returns settings of stage 3 with groups of experts of several sizes.
fn group_sizes() -> [Value; 4] {
    [
        json!({}),
        json!({"stage3_param_persistence_threshold": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2 * EXPERT,
               "reduce_bucket_size": 100, "stage3_max_reuse_distance": 0}),
    ]
}

fn bits(trained: &Trained) -> Vec<(Vec<u32>, Vec<u64>)> {
    let of_rank = |(losses, norms): &(Vec<f32>, Vec<f64>)| {
        (losses.iter().map(|loss| loss.to_bits()).collect(), norms.iter().map(|norm| norm.to_bits()).collect())
    };
    trained.0.iter().map(of_rank).collect()
}

/// Compares the values of two f32 models, relative to the largest value of each parameter.
fn assert_close(found: &Trained, expected: &Trained, tolerance: f64) {
    let values = |trained: &Trained| -> BTreeMap<String, Vec<f32>> {
        let tensors = safetensors::SafeTensors::deserialize(&trained.1).unwrap();
        let floats = |bytes: &[u8]| bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        tensors.tensors().into_iter().map(|(name, tensor)| (name, floats(tensor.data()))).collect()
    };
    for (name, expected) in values(expected) {
        let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (found, expected) in values(found)[&name].iter().zip(&expected) {
            assert!(f64::from((found - expected).abs()) <= tolerance * f64::from(largest), "{name}: {found} {expected}");
        }
    }
    for (found, expected) in found.0.iter().zip(&expected.0) {
        for (found, expected) in found.0.iter().zip(&expected.0) {
            assert!(f64::from((found - expected).abs()) <= tolerance * f64::from(expected.abs()), "{found} {expected}");
        }
        for (found, expected) in found.1.iter().zip(&expected.1) {
            assert!((found - expected).abs() <= tolerance * expected.abs(), "{found} {expected}");
        }
    }
}

#[test]
fn divided_experts_train_with_the_same_bits_at_every_stage() {
    for job in [job(2, 2), job(4, 2), job(4, 4)] {
        let reference = train(job, SHAPE, &config(0, 1, json!({}), json!({})), &disjoint);
        assert_ne!(reference.0[0].0[0], reference.0[0].0[STEPS - 1]);
        assert!(train(job, SHAPE, &config(0, 1, json!({}), json!({})), &disjoint) == reference);
        for stage in [1, 2] {
            let got = train(job, SHAPE, &config(stage, 1, json!({}), json!({})), &disjoint);
            assert_eq!(bits(&got), bits(&reference), "{job:?}, stage {stage}");
            assert!(got.1 == reference.1, "{job:?}, stage {stage}");
        }
        for zero in group_sizes() {
            let got = train(job, SHAPE, &config(3, 1, zero.clone(), json!({})), &disjoint);
            assert_eq!(bits(&got), bits(&reference), "{job:?}, {zero}");
            assert!(got.1 == reference.1, "{job:?}, {zero}");
        }
    }
}

#[test]
fn divided_experts_train_as_if_every_rank_held_all_of_them() {
    // Without momentum, a weight's change is proportional to its gradient.
    let sgd = json!({"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": true});
    for world in [2, 4] {
        for (stage, zero) in [(0, json!({})), (2, json!({})), (3, group_sizes()[3].clone())] {
            let config = config(stage, 2, zero, sgd.clone());
            let whole = train(job(world, 1), SHAPE, &config, &disjoint);
            for size in [2, 4].into_iter().filter(|size| *size <= world) {
                assert_close(&train(job(world, size), SHAPE, &config, &disjoint), &whole, 1e-6);
            }
        }
    }
}
