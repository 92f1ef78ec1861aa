//! Experts that are divided among ranks: rows travel to the ranks that hold their experts. Results have the same bits
//! at every stage, and are those of a job whose ranks all hold all experts, except for rounding.

use crate::support::experts::{EXPERT, Mixture, SHAPE, Shape, WIDTH, allow, choose_in_turn, rows};
use crate::support::processes::{as_program, descendants, start, stderr, wait_for, zerorun};
use crate::support::tiny::config;
use candle_zero::checkpoint::{Checkpoint, ConsolidateSettings, LoadOptions, consolidate};
use candle_zero::comm::{CollectiveKind, threads};
use candle_zero::config::Config;
use candle_zero::error::Error;
use candle_zero::estimate::{Estimate, EstimateOptions, Shapes};
use candle_zero::memory::MemoryKind;
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::{Engine, EngineBuilder};
use proptest::prelude::*;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

const STEPS: usize = 3;

/// A function that returns, for a micro step and a rank, the number of the rank's rows and the experts among which its
/// routers choose.
type Routes = dyn Fn(usize, usize) -> (usize, Vec<usize>) + Sync;

/// A function that changes an engine's options.
type Change = dyn Fn(EngineBuilder) -> EngineBuilder + Sync;

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

/// Trains with `routes`, and returns the results of all ranks and the exported model.
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

/// Returns the number of rows and the experts of a micro step on a rank. Each rank chooses among three experts, none of
/// which the previous rank may choose, and each rank in turn has no rows.
fn disjoint(micro: usize, rank: usize) -> (usize, Vec<usize>) {
    let count = if (micro + rank).is_multiple_of(4) { 0 } else { 5 + rank };
    (count, (0..3).map(|i| (3 * rank + i + micro) % SHAPE.experts).collect())
}

/// Returns settings of stage 3 with groups of experts of several sizes.
fn group_sizes() -> [Value; 5] {
    [
        json!({}),
        json!({"stage3_param_persistence_threshold": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2 * EXPERT,
               "reduce_bucket_size": 100, "stage3_max_reuse_distance": 0}),
        json!({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, "overlap_comm": false}),
    ]
}

fn bits(trained: &Trained) -> Vec<(Vec<u32>, Vec<u64>)> {
    let of_rank = |(losses, norms): &(Vec<f32>, Vec<f64>)| {
        (losses.iter().map(|loss| loss.to_bits()).collect(), norms.iter().map(|norm| norm.to_bits()).collect())
    };
    trained.0.iter().map(of_rank).collect()
}

/// Compares the parameters of two f32 models, with a tolerance relative to the largest value of each parameter, and the
/// losses and norms.
fn assert_close(found: &Trained, expected: &Trained, tolerance: f64) {
    let values = |trained: &Trained| -> BTreeMap<String, Vec<f32>> {
        let tensors = safetensors::SafeTensors::deserialize(&trained.1).unwrap();
        let floats = |bytes: &[u8]| bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        tensors.tensors().into_iter().map(|(name, tensor)| (name, floats(tensor.data()))).collect()
    };
    for (name, expected) in values(expected) {
        let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (found, expected) in values(found)[&name].iter().zip(&expected) {
            assert!(
                f64::from((found - expected).abs()) <= tolerance * f64::from(largest),
                "{name}: {found} {expected}"
            );
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

#[test]
fn divided_experts_that_are_frozen_or_packed_or_recompute_have_the_same_bits_at_every_stage() {
    let adapted = Shape { adapter: true, ..SHAPE };
    let trained = |builder: EngineBuilder| builder;
    let frozen = |builder: EngineBuilder| builder.trainable(|name, _| !name.contains("experts"));
    let packed = |builder: EngineBuilder| {
        let frozen = builder.trainable(|name, _| !name.contains("experts"));
        frozen.quantized(WeightPacking::Nf4(Nf4Scales::Bf16), |name, dims| name.contains("experts") && dims.len() == 2)
    };
    // Only one expert, which one rank of each group holds, and the last layer are trained, so nothing before that
    // expert needs a gradient.
    let one = |builder: EngineBuilder| {
        builder.trainable(|name, _| name.starts_with("layer.1.mlp.experts.6.") || name.starts_with("last"))
    };
    let cases: [(&str, Shape, Value, &Change); 7] = [
        ("frozen", adapted, json!({}), &frozen),
        ("packed", adapted, json!({}), &packed),
        ("packed in bf16", adapted, json!({"bf16": {"enabled": true}}), &packed),
        ("adapted", adapted, json!({}), &trained),
        ("bf16", SHAPE, json!({"bf16": {"enabled": true}}), &trained),
        ("recomputed in fp16", Shape { checkpointed: true, ..SHAPE }, json!({"fp16": {"enabled": true}}), &trained),
        ("one", SHAPE, json!({}), &one),
    ];
    for (name, shape, more, builder) in cases {
        for job in [job(2, 2), job(4, 2)] {
            let reference = train_with(job, shape, &config(0, 1, json!({}), more.clone()), &disjoint, builder);
            let got = train_with(job, shape, &config(1, 1, json!({}), more.clone()), &disjoint, builder);
            assert!(bits(&got) == bits(&reference) && got.1 == reference.1, "{name}, {job:?}");
            for zero in &group_sizes()[1..] {
                let got = train_with(job, shape, &config(3, 1, zero.clone(), more.clone()), &disjoint, builder);
                assert_eq!(bits(&got), bits(&reference), "{name}, {job:?}, {zero}");
                assert!(got.1 == reference.1, "{name}, {job:?}, {zero}");
            }
            if !more.as_object().unwrap().is_empty() {
                continue;
            }
            let sgd =
                json!({"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": true});
            let sgd = config(0, 1, json!({}), sgd);
            let whole = train_with(self::job(job.world, 1), shape, &sgd, &disjoint, builder);
            assert_close(&train_with(job, shape, &sgd, &disjoint, builder), &whole, 1e-6);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn random_routes_on_any_ranks_never_hang_and_have_the_gradients_of_one_rank(
        world in 1usize..=4, divisor in 0usize..3, seed in any::<u32>(), stage in 0u8..4, bucket in 0usize..5,
        checkpointed in any::<bool>(),
    ) {
        let sizes: Vec<usize> = [1, 2, 4].into_iter().filter(|size| world % size == 0).collect();
        let job = job(world, sizes[divisor.min(sizes.len() - 1)]);
        let shape = Shape { checkpointed, ..SHAPE };
        let routes = move |micro: usize, rank: usize| {
            let random = |i: usize| {
                let mixed = (seed as u64 ^ (micro * 8 + rank) as u64 ^ (i as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (mixed >> 40) as usize
            };
            // There are at least as many experts as each row needs, and, on average, one micro step in three has no
            // rows.
            let first = random(0) % SHAPE.experts;
            let allowed = (0..2 + random(1) % 4).map(|i| (first + i * (1 + random(2) % 3)) % SHAPE.experts);
            let mut allowed: Vec<usize> = allowed.collect();
            allowed.extend([first, (first + 1) % SHAPE.experts]);
            (if random(3) % 3 == 0 { 0 } else { 1 + random(4) % 7 }, allowed)
        };
        let sgd = json!({"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": true});
        let zero = json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket * EXPERT});
        let zero = if stage == 3 { zero } else { json!({}) };
        let got = train(job, shape, &config(stage, 1, zero.clone(), sgd.clone()), &routes);
        // One rank takes the rows of all ranks in turn.
        let in_turn = move |micro: usize, _: usize| routes(micro / world, micro % world);
        let one = train(self::job(1, 1), shape, &config(0, world, json!({}), sgd), &in_turn);
        let of_one = (0..world).map(|rank| (one.0[0].0.iter().skip(rank).step_by(world).copied().collect(), one.0[0].1.clone()));
        assert_close(&got, &(of_one.collect(), one.1.clone()), 3e-6);
    }
}

// ---- memory --------------------------------------------------------------------------------------------------------

#[test]
fn a_rank_holds_only_the_states_of_its_experts() {
    // The router, the norm, and the layers outside the blocks.
    let dense = SHAPE.layers * (SHAPE.experts * WIDTH + WIDTH) + 5 * WIDTH;
    let experts = SHAPE.layers * SHAPE.experts * EXPERT;
    for (stage, bf16) in [(0u8, false), (1, true), (2, false), (3, true), (3, false)] {
        for job in [job(2, 2), job(4, 2), job(4, 4), job(4, 1)] {
            let precision = json!({"bf16": {"enabled": bf16}});
            let zero = if stage == 3 { group_sizes()[1].clone() } else { json!({}) };
            let config = divided(config(stage, 1, zero, precision), job.size);
            let reports = threads::run(job.world, |comm| {
                let rank = comm.rank();
                let mut engine =
                    Engine::builder().communicator(comm).initialize(|vb| Mixture::new(SHAPE, vb), config.clone())?;
                for step in 0..2 {
                    allow([]);
                    let loss = engine.forward(|model| model.loss(&rows(step * 4 + rank, 8)))?;
                    engine.backward(&loss)?;
                    engine.step()?;
                }
                Ok(engine.memory_report())
            });
            let holders = job.world / job.size;
            for report in reports.unwrap() {
                let report = report.unwrap();
                // All tensors divide evenly among the ranks, so there is no padding.
                let elements = |sharded: bool| match sharded {
                    true => dense / job.world + experts / job.size / holders,
                    false => dense + experts / job.size,
                };
                let size = if bf16 { 2 } else { 4 };
                let expected = [
                    (MemoryKind::Parameters, elements(stage == 3) * size),
                    (MemoryKind::MasterWeights, if bf16 { elements(stage > 0) * 4 } else { 0 }),
                    (MemoryKind::Moments, elements(stage > 0) * 8),
                ];
                for (kind, bytes) in expected {
                    let row = report.row(kind);
                    assert_eq!(row.bytes.held, bytes, "{job:?}, stage {stage}, {}\n{report}", kind.name());
                    assert_eq!(row.formula.unwrap() + row.padding, bytes as f64, "{}\n{report}", kind.name());
                }
                let gradients = report.row(MemoryKind::Gradients);
                assert_eq!(gradients.formula.unwrap() as usize, elements(stage >= 2) * size, "{report}");
                if stage != 1 {
                    assert_eq!(gradients.bytes.peak, elements(stage >= 2) * size, "{job:?}, stage {stage}\n{report}");
                }
            }
        }
    }
}

#[test]
fn an_estimate_counts_the_memory_and_the_collectives_of_divided_experts() {
    for (job, stage, checkpointed, bucket) in [
        (job(2, 2), 0, false, 0),
        (job(4, 2), 1, false, 0),
        (job(4, 2), 2, false, 0),
        (job(2, 2), 3, false, 2 * EXPERT),
        (job(4, 2), 3, true, 3 * EXPERT),
        (job(4, 4), 3, false, 0),
    ] {
        let zero = match stage {
            3 => json!({
                "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket,
                "stage3_max_reuse_distance": 0,
            }),
            _ => json!({}),
        };
        let config = divided(config(stage, 1, zero, json!({})), job.size);
        let shape = Shape { checkpointed, ..SHAPE };
        let ranks = threads::run(job.world, |comm| {
            let rank = comm.rank();
            let mut engine =
                Engine::builder().communicator(comm).initialize(|vb| Mixture::new(shape, vb), config.clone())?;
            choose_in_turn();
            let mut before = engine.comm_report();
            for step in 0..4 {
                before = engine.comm_report();
                let loss = engine.forward(|model| model.loss(&rows(step * job.world + rank, 16)))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            Ok((engine.memory_report(), before, engine.comm_report()))
        });
        let shapes = Shapes::of("mixture", |vb| Mixture::new(shape, vb)).unwrap();
        let options = EstimateOptions { recompute: checkpointed, ..EstimateOptions::default() };
        let config = Config::load(config, job.world).unwrap();
        let estimate = Estimate::with(&shapes, &config, options).unwrap();
        for rank in ranks.unwrap() {
            let (memory, before, after) = rank.unwrap();
            assert_eq!(estimate.memory.rows, memory.rows, "{job:?}, {stage}\n{}\n{memory}", estimate.memory);
            for kind in [CollectiveKind::AllGather, CollectiveKind::ReduceScatter, CollectiveKind::Control] {
                let (before, after, expected) = (before.kind(kind), after.kind(kind), estimate.step.kind(kind));
                let found = [after.calls - before.calls, after.elements - before.elements];
                assert_eq!([expected.calls, expected.elements], found, "{} {job:?}, stage {stage}", kind.name());
            }
        }
    }
    let shapes = Shapes::of("mixture", |vb| Mixture::new(Shape { experts: 7, ..SHAPE }, vb)).unwrap();
    let config = Config::load(divided(config(3, 1, json!({}), json!({})), 2), 2).unwrap();
    let refused = Estimate::with(&shapes, &config, EstimateOptions::default()).unwrap_err().to_string();
    insta::assert_snapshot!(refused, @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, which does not divide the 7 experts of a layer; use a divisor of 7");
}

// ---- checkpoints ---------------------------------------------------------------------------------------------------

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Loads the checkpoint in `from`, if it is given, trains for `steps` steps, and saves to `to`. Returns the exported
/// model.
fn train_from(job: Job, stage: u8, from: Option<&Path>, to: &Path, steps: usize) -> Vec<u8> {
    let config = divided(config(stage, 1, json!({}), json!({"bf16": {"enabled": true}})), job.size);
    let file = to.join("model.safetensors");
    std::fs::create_dir_all(to).unwrap();
    let ranks = threads::run(job.world, |comm| {
        let rank = comm.rank();
        let mut engine =
            Engine::builder().communicator(comm).initialize(|vb| Mixture::new(SHAPE, vb), config.clone())?;
        if let Some(from) = from {
            engine.load_checkpoint(from, None, &LoadOptions::default())?.unwrap();
        }
        for step in 0..steps {
            allow([]);
            let loss = engine.forward(|model| model.loss(&rows(step * 4 + rank, 8)))?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        engine.save_checkpoint(to, None, Value::Null)?;
        engine.export_safetensors(&file)?;
        Ok(())
    });
    ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    std::fs::read(&file).unwrap()
}

/// Returns the names and contents of the rank files of a checkpoint after `steps` steps.
fn rank_files(dir: &Path, steps: usize) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir.join(format!("global_step{steps}"))).unwrap().map(|entry| entry.unwrap());
    let files = entries.map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()));
    files.filter(|(name, _)| name.starts_with("rank_")).collect()
}

#[test]
fn checkpoints_of_divided_experts_load_with_any_division_and_any_number_of_ranks() {
    let dir = folder();
    let to = |name: &str| dir.path().join(name);
    let first = train_from(job(2, 2), 1, None, &to("a"), 2);
    assert!(train_from(job(1, 1), 3, Some(&to("a")), &to("b"), 0) == first);
    assert!(train_from(job(4, 4), 0, Some(&to("b")), &to("c"), 0) == first);
    assert!(train_from(job(4, 2), 3, Some(&to("c")), &to("d"), 0) == first);
    assert!(train_from(job(2, 1), 2, Some(&to("d")), &to("e"), 0) == first);
    assert!(train_from(job(2, 2), 3, Some(&to("e")), &to("f"), 0) == first);
    // Weights and optimizer states of all parameters are the same, to the byte.
    let saved = rank_files(&to("a"), 2);
    assert!(saved.len() == 2 && saved == rank_files(&to("f"), 2));
    assert!(rank_files(&to("c"), 2).len() == 4);
    // The weights of all experts are in a consolidated file.
    let checkpoint = Checkpoint::open(to("a"), None).unwrap().unwrap();
    checkpoint.verify(|_| ()).unwrap();
    consolidate(&checkpoint, to("whole"), &ConsolidateSettings::default(), &mut |_| ()).unwrap();
    let consolidated = std::fs::read(to("whole").join("model.safetensors")).unwrap();
    let [found, expected] = [&consolidated, &first].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
    assert!(expected.len() > 2 * SHAPE.experts * 3 && found.len() == expected.len());
    for (name, tensor) in expected.tensors() {
        assert!(found.tensor(&name).unwrap().data() == tensor.data(), "{name}");
    }
    // Training continues with the same bits.
    let once = train_from(job(2, 2), 2, None, &to("g"), 2);
    assert!(once == first);
    let ends = ["a", "f", "g"].map(|from| train_from(job(2, 2), 3, Some(&to(from)), &to(&format!("{from}2")), 2));
    assert!(ends.windows(2).all(|pair| pair[0] == pair[1]) && ends[0] != first);
}

// ---- access --------------------------------------------------------------------------------------------------------

#[test]
fn every_rank_can_read_and_set_the_parameters_of_all_experts() {
    for (job, stage) in [(job(2, 2), 0), (job(4, 2), 1), (job(4, 2), 3), (job(4, 4), 3)] {
        let config = divided(config(stage, 1, json!({}), json!({})), job.size);
        let ranks = threads::run(job.world, |comm| {
            let rank = comm.rank();
            let mut engine =
                Engine::builder().communicator(comm).initialize(|vb| Mixture::new(SHAPE, vb), config.clone())?;
            let name = "layer.1.mlp.experts.5.up.weight";
            let before = engine.safe_get_full_fp32_param(name)?;
            engine.safe_set_full_fp32_param(name, &(&before * 2.0)?)?;
            let after = engine.safe_get_full_fp32_param(name)?;
            assert!(engine.safe_get_full_grad(name)?.is_none());
            assert_eq!((&before * 2.0)?.to_vec2::<f32>()?, after.to_vec2::<f32>()?);
            allow([4, 5, 6]);
            let loss = engine.forward(|model| model.loss(&rows(rank, 6)))?;
            engine.backward(&loss)?;
            let gradient = engine.safe_get_full_grad(name)?.unwrap();
            engine.safe_set_full_grad(name, &(&gradient * 0.5)?)?;
            let gradient = gradient.to_vec2::<f32>()?;
            engine.step()?;
            let moment = engine.safe_get_full_optimizer_state(name, "exp_avg")?.to_vec2::<f32>()?;
            assert!(engine.check_gradients().is_err());
            let evaluated = engine.eval(|model| model.loss(&rows(9, 6)))?.to_scalar::<f32>()?;
            Ok((gradient, moment, evaluated))
        });
        let ranks = ranks.unwrap().into_iter().collect::<candle_zero::Result<Vec<_>>>().unwrap();
        assert!(ranks.windows(2).all(|pair| pair[0] == pair[1]));
        assert!(ranks[0].0.iter().flatten().any(|value| *value != 0.0));
    }
}

#[test]
fn experts_can_be_frozen_and_unfrozen_and_their_gradients_held() {
    let run = |job: Job, stage: u8, holds: bool| {
        let config = divided(config(stage, 2, group_sizes()[3].clone(), json!({})), job.size);
        let ranks = threads::run(job.world, |comm| {
            let rank = comm.rank();
            let mut engine =
                Engine::builder().communicator(comm).initialize(|vb| Mixture::new(SHAPE, vb), config.clone())?;
            let mut losses = Vec::new();
            for step in 0..4 {
                // Freezes the experts of one rank, then all of them, then none.
                engine.set_trainable(|name, _| match step {
                    1 => {
                        !["experts.4.", "experts.5.", "experts.6.", "experts.7."].iter().any(|part| name.contains(part))
                    }
                    2 => !name.contains("experts"),
                    _ => true,
                })?;
                for micro in 0..2 {
                    let (count, allowed) = disjoint(2 * step + micro, rank);
                    allow(allowed);
                    let x = rows(2 * step + micro + 8 * rank, count);
                    let mut pass = |engine: &mut Engine<Mixture>| {
                        let loss = engine.forward(|model| model.loss(&x))?;
                        losses.push(loss.to_scalar::<f32>()?.to_bits());
                        engine.backward(&loss)
                    };
                    match holds && micro == 0 {
                        true => engine.no_sync(pass)?,
                        false => pass(&mut engine)?,
                    }
                    engine.step()?;
                }
            }
            let names = ["layer.0.mlp.experts.1.up.weight", "layer.1.mlp.experts.6.down.weight"];
            let values = names.map(|name| engine.safe_get_full_fp32_param(name).unwrap().to_vec2::<f32>().unwrap());
            Ok((losses, values))
        });
        ranks.unwrap().into_iter().collect::<candle_zero::Result<Vec<_>>>().unwrap()
    };
    for job in [job(2, 2), job(4, 2)] {
        let reference = run(job, 0, false);
        assert!((1..4).all(|stage| run(job, stage, false) == reference), "{job:?}");
        assert!(run(job, 0, true) == run(job, 1, true), "{job:?}");
    }
}

// ---- errors --------------------------------------------------------------------------------------------------------

/// Returns the error with which an engine is refused on `world` ranks, without the backtrace.
fn refusal(world: usize, shape: Shape, config: &Value) -> String {
    let ranks = threads::run(world, |comm| {
        Engine::builder().communicator(comm).initialize(|vb| Mixture::new(shape, vb), config.clone()).map(drop)
    });
    let errors: Vec<Error> = ranks.unwrap().into_iter().map(|rank| rank.unwrap_err()).collect();
    candle_zero::error::without_backtrace(&errors[0].to_string()).to_string()
}

#[test]
fn divisions_that_cannot_be_are_refused() {
    let with = |size: i64, zero: Value, more: Value| {
        let mut config = config(3, 1, zero, more);
        config["expert_parallel"] = json!({"enabled": true, "autoep_size": size});
        config
    };
    let refused = |world, size, more: Value| refusal(world, SHAPE, &with(size, json!({}), more));
    insta::assert_snapshot!(refused(4, 3, json!({})), @"the configuration given as a value: `expert_parallel.autoep_size`: expected a divisor of the number of ranks, 4 (one of 1, 2, 4), found 3");
    insta::assert_snapshot!(refused(2, 0, json!({})), @"the configuration given as a value: `expert_parallel.autoep_size`: expected a divisor of the number of ranks, 2 (one of 1, 2), found 0");
    insta::assert_snapshot!(refusal(2, Shape { experts: 7, ..SHAPE }, &with(2, json!({}), json!({}))), @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, which does not divide the 7 experts of layer.0.mlp.experts; use a divisor of 7");
    insta::assert_snapshot!(refusal(2, Shape { units: false, ..SHAPE }, &with(2, json!({}), json!({}))), @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, but the model has no experts whose tensors are separate units; build its experts with routed_units, or remove the section");
    insta::assert_snapshot!(refused(2, 2, json!({"optimizer": {"type": "Muon"}})), @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, but the optimizer needs complete parameters, or their norms over all ranks; use an optimizer such as AdamW");
    insta::assert_snapshot!(refused(2, 2, json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}})), @"the configuration given as a value: `expert_parallel.autoep_size`: 2 cannot be used together with torch_autocast, because experts are computed in the model's own format; remove expert_parallel or torch_autocast");
    insta::assert_snapshot!(refusal(2, SHAPE, &with(2, json!({"mics_shard_size": 2}), json!({}))), @"the configuration given as a value: `expert_parallel.autoep_size`: 2 cannot be used together with zero_optimization.mics_shard_size, because experts are sharded only among the ranks that hold them; remove expert_parallel or zero_optimization.mics_shard_size");
    insta::assert_snapshot!(refusal(2, SHAPE, &with(2, json!({"leaf_module": {"names": ["layer.0"]}}), json!({}))), @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, but zero_optimization.ignore_unused_parameters or leaf_module is set, and neither can be combined with experts that are divided among ranks; remove it");
    let of_leaf = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).leaf_units(["layer.1"]);
        builder.initialize(|vb| Mixture::new(SHAPE, vb), with(2, json!({}), json!({}))).map(drop)
    });
    insta::assert_snapshot!(of_leaf.unwrap()[0].as_ref().unwrap_err(), @"cannot divide experts among ranks: layer.1.mlp.experts.0.gate.weight is in a leaf unit, all of whose parameters are gathered together; do not mark the unit as a leaf, or remove the section expert_parallel");
    let folder = folder();
    let files = json!({"offload_param": {"device": "nvme", "nvme_path": folder.path()}});
    insta::assert_snapshot!(refusal(2, SHAPE, &with(2, files, json!({}))), @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, but states are offloaded to files; use the device cpu, or remove one of the two");
}

#[test]
fn a_rank_that_does_not_run_a_layer_with_divided_experts_is_told_so() {
    let config = divided(config(0, 1, json!({}), json!({})), 2);
    let ranks = threads::run(2, |comm| {
        let mut engine =
            Engine::builder().communicator(comm).initialize(|vb| Mixture::new(SHAPE, vb), config.clone())?;
        let (x, skips) = (rows(0, 4), engine.rank() == 1);
        let loss = engine.forward(|model| if skips { model.loss_without_blocks(&x) } else { model.loss(&x) });
        Ok(loss.and_then(|loss| engine.backward(&loss)).unwrap_err())
    });
    let errors: Vec<Error> = ranks.unwrap().into_iter().map(|error| error.unwrap()).collect();
    assert!(errors.iter().any(|error| error.to_string().contains("every rank must")), "{errors:?}");
}

// ---- killed jobs ---------------------------------------------------------------------------------------------------

#[test]
#[ignore = "the next tests start it on each rank"]
fn training_program() {
    let Some(folder) = std::env::var_os("TEST_FOLDER") else { return };
    let folder = Path::new(&folder);
    let config = divided(config(3, 1, group_sizes()[3].clone(), json!({"bf16": {"enabled": true}})), 2);
    let shape = Shape { checkpointed: true, ..SHAPE };
    let mut engine = Engine::initialize(|vb| Mixture::new(shape, vb), config).unwrap();
    let dir = folder.join("checkpoints");
    engine.load_checkpoint(&dir, None, &LoadOptions::default()).unwrap();
    println!("process {}", std::process::id());
    while engine.global_steps() < 8 {
        let step = engine.global_steps() as usize;
        let (count, allowed) = disjoint(step, engine.rank());
        allow(allowed);
        let x = rows(step * 4 + engine.rank(), count);
        let loss = engine.forward(|model| model.loss(&x)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        engine.save_checkpoint(&dir, None, Value::Null).unwrap();
        println!("step {step}");
        std::io::stdout().flush().unwrap();
    }
    engine.export_safetensors(folder.join("model.safetensors")).unwrap();
}

/// Returns a command that runs the program on 4 ranks in `folder`.
fn program(folder: &Path) -> std::process::Command {
    let mut command = zerorun();
    command.args(["--num_ranks", "4", "--timeout", "60s"]).arg(std::env::current_exe().unwrap());
    command.args(as_program(module_path!(), "training_program")).env("TEST_FOLDER", folder);
    command.env("RAYON_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
    command
}

/// Runs the program. If `kill_after` is given, kills all its processes when rank 0 has reported that many steps.
fn run_program(folder: &Path, kill_after: Option<usize>) {
    let mut job = start(&mut program(folder));
    let launcher = i32::try_from(job.id()).unwrap();
    let lines = BufReader::new(job.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let steps = lines.filter(|line| line.starts_with("[rank 0] step")).take(kill_after.unwrap_or(usize::MAX)).count();
    if let Some(kill_after) = kill_after {
        assert_eq!(steps, kill_after);
        let ranks = wait_for("the ranks", || Some(descendants(launcher)).filter(|ranks| ranks.len() >= 4));
        for pid in [launcher].iter().chain(&ranks) {
            let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
        }
        job.wait().unwrap();
        wait_for("the processes to end", || {
            ranks.iter().all(|pid| !crate::support::processes::runs(*pid)).then_some(())
        });
        return;
    }
    let output = job.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_killed_job_with_divided_experts_ends_with_the_bytes_of_one_that_never_was() {
    let (calm, killed) = (folder(), folder());
    run_program(calm.path(), None);
    for kill_after in [2, 3] {
        run_program(killed.path(), Some(kill_after));
    }
    run_program(killed.path(), None);
    let model = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(model(calm.path()) == model(killed.path()));
}

#[test]
fn a_rank_that_dies_while_rows_travel_is_named_and_nobody_hangs() {
    // A step consists mostly of exchanges of rows, so the kills hit different exchanges.
    for kill_after in 1..7 {
        let folder = folder();
        let mut job = start(&mut program(folder.path()));
        let mut lines = BufReader::new(job.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        let (mut victim, mut steps) = (None, 0);
        while victim.is_none() || steps < kill_after {
            let line = lines.next().unwrap();
            // The test harness may have written the beginning of the line.
            if let Some((_, pid)) = line.split_once("process ").filter(|_| line.starts_with("[rank 1]")) {
                victim = Some(pid.parse::<i32>().unwrap());
            }
            steps += usize::from(line.starts_with("[rank 0] step"));
        }
        kill_process(Pid::from_raw(victim.unwrap()).unwrap(), Signal::KILL).unwrap();
        lines.for_each(drop);
        let output = job.wait_with_output().unwrap();
        assert!(!output.status.success());
        let text = stderr(&output);
        assert!(text.contains("rank 1 failed first: it was killed by SIGKILL (9)"), "{text}");
        for rank in [0, 2, 3] {
            let is_of = |line: &str| line.starts_with(&format!("[rank {rank}]"));
            let named = text.lines().any(|line| is_of(line) && line.contains("RankDied") && line.contains("peer: 1"));
            assert!(named, "rank {rank} does not name rank 1\n{text}");
        }
        assert!(!folder.path().join("model.safetensors").exists());
    }
}
