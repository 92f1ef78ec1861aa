//! Experts that are units: at stage 3, only the experts that a row on any rank chose are gathered or read, a few at a
//! time. Results have the same bits as at stage 0, where all experts are in memory.

use crate::support::experts::{EXPERT, Mixture, SHAPE, Shape, allow, choose_in_turn, rows, take_chosen};
use crate::support::processes::{as_program, descendants, start, stderr, wait_for, zerorun};
use crate::support::tiny::config;
use candle_core::DType;
use candle_zero::checkpoint::LoadOptions;
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
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

const STEPS: usize = 3;

/// A function that returns, for a micro step and a rank, the number of the rank's rows and the experts among which its
/// routers choose.
type Routes = dyn Fn(usize, usize) -> (usize, Vec<usize>) + Sync;

/// The bits of the losses and gradient norms of every rank, and the exported model.
type Trained = (Vec<(Vec<u32>, Vec<u64>)>, Vec<u8>);

/// Trains with `routes`, and returns the results of all ranks and the exported model.
fn train_with(
    world: usize,
    shape: Shape,
    config: &Value,
    routes: &Routes,
    more: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> Trained {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = more(Engine::builder().communicator(comm));
        let mut engine = builder.initialize(|vb| Mixture::new(shape, vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let (mut losses, mut norms) = (vec![], vec![]);
        for micro in 0..STEPS * accumulation {
            let (count, allowed) = routes(micro, rank);
            allow(allowed);
            let x = rows(micro * world + rank, count);
            let loss = engine.forward(|model| model.loss(&x))?;
            losses.push(loss.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            let updates = engine.is_gradient_accumulation_boundary();
            engine.step()?;
            if updates {
                norms.push(engine.global_grad_norm().unwrap().to_bits());
            }
        }
        // Nothing stays gathered after a step.
        let gathered = engine.memory_report().row(MemoryKind::Gathered).bytes.held;
        assert_eq!(gathered, 0, "rank {rank}");
        engine.export_safetensors(&file)?;
        Ok((losses, norms))
    });
    let ranks = ranks.unwrap().into_iter().collect::<candle_zero::Result<_>>().unwrap();
    (ranks, std::fs::read(&file).unwrap())
}

fn train(world: usize, shape: Shape, config: &Value, routes: &Routes) -> Trained {
    train_with(world, shape, config, routes, |builder| builder)
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Returns the number of rows and the experts of a micro step on a rank. Each rank chooses among three experts, none of
/// which the previous rank may choose, and each rank in turn has no rows.
fn disjoint(micro: usize, rank: usize) -> (usize, Vec<usize>) {
    let count = if (micro + rank).is_multiple_of(4) { 0 } else { 5 + rank };
    (count, (0..3).map(|i| (3 * rank + i + micro) % SHAPE.experts).collect())
}

/// Returns settings of stage 3 with groups of experts of several sizes.
fn group_sizes() -> [Value; 5] {
    let whole = json!({"stage3_param_persistence_threshold": 0});
    let with = |more: Value| {
        let mut zero = whole.clone();
        zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        zero
    };
    [
        whole.clone(),
        with(json!({"stage3_prefetch_bucket_size": 0})),
        with(json!({"stage3_prefetch_bucket_size": 2 * EXPERT, "reduce_bucket_size": 100})),
        with(json!({"stage3_prefetch_bucket_size": 3 * EXPERT, "stage3_max_live_parameters": EXPERT + 50})),
        with(json!({"stage3_prefetch_bucket_size": 2 * EXPERT, "overlap_comm": false, "stage3_max_reuse_distance": 0})),
    ]
}

#[test]
fn ranks_whose_rows_choose_different_experts_train_with_the_bits_of_stage_0() {
    for world in [1, 2, 4] {
        let reference = train(world, SHAPE, &config(0, 1, json!({}), json!({})), &disjoint);
        assert_ne!(reference.0[0].0[0], reference.0[0].0[STEPS - 1]);
        for stage in [1, 2] {
            assert!(train(world, SHAPE, &config(stage, 1, json!({}), json!({})), &disjoint) == reference);
        }
        for zero in group_sizes() {
            let got = train(world, SHAPE, &config(3, 1, zero.clone(), json!({})), &disjoint);
            assert_eq!(got.0, reference.0, "world {world}, {zero}");
            assert!(got.1 == reference.1, "world {world}, {zero}");
        }
        // Experts without units are gathered with their block, with the same bits.
        let plain = Shape { units: false, ..SHAPE };
        assert!(train(world, plain, &config(3, 1, group_sizes()[1].clone(), json!({})), &disjoint) == reference);
    }
}

#[test]
fn frozen_and_packed_experts_with_adapters_train_with_the_bits_of_stage_0() {
    let shape = Shape { adapter: true, ..SHAPE };
    let frozen = |builder: EngineBuilder| builder.trainable(|name, _| !name.contains("experts"));
    let packed = |builder: EngineBuilder| {
        let trained = builder.trainable(|name, _| !name.contains("experts"));
        trained.quantized(WeightPacking::Nf4(Nf4Scales::Bf16), |name, dims| name.contains("experts") && dims.len() == 2)
    };
    let bf16 = json!({"bf16": {"enabled": true}});
    for world in [1, 2] {
        let reference = train_with(world, shape, &config(0, 1, json!({}), json!({})), &disjoint, frozen);
        let of_packed = train_with(world, shape, &config(0, 1, json!({}), bf16.clone()), &disjoint, packed);
        for zero in group_sizes() {
            let got = train_with(world, shape, &config(3, 1, zero.clone(), json!({})), &disjoint, frozen);
            assert!(got == reference, "frozen, world {world}, {zero}");
            let got = train_with(world, shape, &config(3, 1, zero.clone(), bf16.clone()), &disjoint, packed);
            assert!(got == of_packed, "packed, world {world}, {zero}");
        }
    }
}

#[test]
fn groups_of_ranks_that_share_a_model_gather_the_experts_of_all_ranks() {
    let reference = train(4, SHAPE, &config(0, 1, json!({}), json!({})), &disjoint);
    let mut zero = group_sizes()[2].clone();
    zero["mics_shard_size"] = json!(2);
    assert!(train(4, SHAPE, &config(3, 1, zero, json!({})), &disjoint) == reference);
}

#[test]
fn an_evaluation_and_a_backward_pass_of_candle_gather_experts_and_leave_none_behind() {
    let run = |stage: u8, others: bool| {
        let config = config(stage, 1, group_sizes()[1].clone(), json!({}));
        let ranks = threads::run(2, |comm| {
            let mut engine =
                Engine::builder().communicator(comm).initialize(|vb| Mixture::new(SHAPE, vb), config.clone())?;
            let mut losses = Vec::new();
            for step in 0..2 {
                allow((0..3).map(|i| 3 * engine.rank() + i));
                let x = rows(step + 2 * engine.rank(), 5);
                let loss = engine.forward(|model| model.loss(&x))?;
                if others {
                    loss.backward()?;
                }
                engine.backward(&loss)?;
                engine.step()?;
                losses.push(engine.eval(|model| model.loss(&x))?.to_scalar::<f32>()?.to_bits());
                assert_eq!(engine.memory_report().row(MemoryKind::Gathered).bytes.held, 0);
            }
            Ok(losses)
        });
        ranks.unwrap().into_iter().collect::<candle_zero::Result<Vec<_>>>().unwrap()
    };
    let reference = run(0, false);
    assert_eq!(run(3, false), reference);
    assert_eq!(run(3, true), reference);
}

#[test]
fn experts_in_a_leaf_are_gathered_with_the_leaf() {
    let reference = train(2, SHAPE, &config(0, 1, json!({}), json!({})), &disjoint);
    let mut zero = group_sizes()[2].clone();
    zero["leaf_module"] = json!({"names": ["layer.0"]});
    assert!(train(2, SHAPE, &config(3, 1, zero, json!({})), &disjoint) == reference);
}

#[test]
fn experts_in_a_lower_precision_are_gathered_together_with_the_bits_of_stage_0() {
    // This tests the loop over the experts, which GPUs also use.
    let autocast = json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}});
    for checkpointed in [false, true] {
        let shape = Shape { checkpointed, ..SHAPE };
        let reference = train(2, shape, &config(0, 1, json!({}), autocast.clone()), &disjoint);
        for zero in &group_sizes()[1..3] {
            let got = train(2, shape, &config(3, 1, zero.clone(), autocast.clone()), &disjoint);
            assert_eq!(got.0, reference.0, "{checkpointed} {zero}");
            assert!(got.1 == reference.1, "{checkpointed} {zero}");
        }
    }
}

#[test]
fn two_ranks_have_the_gradients_of_one_rank_with_the_rows_of_both() {
    let routes = |_: usize, rank: usize| (6, vec![2 * rank, 2 * rank + 1, 7]);
    let zero = &group_sizes()[2];
    let two = train(2, SHAPE, &config(3, 1, zero.clone(), json!({})), &routes);
    // One rank takes the samples of both ranks in turn.
    let in_turn = move |micro: usize, _: usize| routes(micro, micro % 2);
    let one = train(1, SHAPE, &config(3, 2, zero.clone(), json!({})), &in_turn);
    let norms = |trained: &Trained| trained.0[0].1.iter().map(|bits| f64::from_bits(*bits)).collect::<Vec<_>>();
    for (one, two) in norms(&one).iter().zip(norms(&two)) {
        assert!((one - two).abs() < 1e-5 * one, "{one} {two}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_routes_on_any_ranks_never_hang_and_have_the_bits_of_stage_0(
        world in 1usize..=4, seed in any::<u32>(), bucket in 0usize..5, accumulation in 1usize..=2, files in any::<bool>(),
        checkpointed in any::<bool>(), bf16 in any::<bool>(), trained in any::<bool>(), adapter in any::<bool>(),
    ) {
        let shape = Shape { checkpointed, adapter, ..SHAPE };
        let routes = move |micro: usize, rank: usize| {
            let random = |i: usize| {
                let mixed = (seed as u64 ^ (micro * 8 + rank) as u64 ^ (i as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (mixed >> 40) as usize
            };
            // There are at least as many experts as each row needs, and, on average, one micro step in six has no rows.
            let first = random(0) % SHAPE.experts;
            let allowed = (0..2 + random(1) % 4).map(|i| (first + i * (1 + random(2) % 3)) % SHAPE.experts);
            let mut allowed: Vec<usize> = allowed.collect();
            allowed.extend([first, (first + 1) % SHAPE.experts]);
            (if random(3) % 6 == 0 { 0 } else { 1 + random(4) % 7 }, allowed)
        };
        let precision = if bf16 { json!({"bf16": {"enabled": true}}) } else { json!({}) };
        let builder = |builder: EngineBuilder| match trained {
            true => builder,
            false => builder.trainable(|name, _| !name.contains("experts")),
        };
        let reference = train_with(world, shape, &config(0, accumulation, json!({}), precision.clone()), &routes, builder);
        let folder = folder();
        let mut zero = json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket * EXPERT});
        if files {
            zero["offload_param"] = json!({"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 0});
            zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder.path()});
        }
        let got = train_with(world, shape, &config(3, accumulation, zero, precision), &routes, builder);
        prop_assert_eq!(&got.0, &reference.0);
        prop_assert!(got.1 == reference.1);
    }
}

// ---- bytes ---------------------------------------------------------------------------------------------------------

/// The transfers of one micro step, and the memory that it needs for gathered parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Traffic {
    /// The number of bytes read from files.
    read: u64,
    /// The number of elements gathered from all ranks.
    gathered: u64,
    /// The peak number of bytes of gathered parameters.
    peak: usize,
    /// The number of control messages, including those with which ranks agree on experts.
    control: u64,
    /// The number of experts that rows on any rank chose, summed over the layers.
    chosen: usize,
}

/// Returns the transfers of the forward and backward passes of a micro step in which the rows of each rank choose among
/// `allowed`.
fn traffic(world: usize, shape: Shape, zero: &Value, allowed: impl Fn(usize) -> Vec<usize> + Sync) -> Traffic {
    let config = config(3, 1, zero.clone(), json!({}));
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let mut engine =
            Engine::builder().communicator(comm).initialize(|vb| Mixture::new(shape, vb), config.clone())?;
        let mut last = None;
        // The second step follows the recorded order of the dense units.
        for step in 0..2 {
            allow(allowed(rank));
            let x = rows(step * world + rank, 8);
            take_chosen();
            let (files, comm) = (engine.offload_report(), engine.comm_report());
            let loss = engine.forward(|model| model.loss(&x))?;
            engine.backward(&loss)?;
            let elements = |report: &candle_zero::comm::CommReport| report.kind(CollectiveKind::AllGather).elements;
            let control = |report: &candle_zero::comm::CommReport| report.kind(CollectiveKind::Control).calls;
            let after = engine.comm_report();
            let traffic = Traffic {
                chosen: 0,
                read: engine.offload_report().since(&files).bytes_read,
                gathered: elements(&after) - elements(&comm),
                control: control(&after) - control(&comm),
                peak: engine.memory_report().row(MemoryKind::Gathered).bytes.peak,
            };
            last = Some((traffic, take_chosen()));
            engine.step()?;
        }
        Ok(last.unwrap())
    });
    let ranks = ranks.unwrap().into_iter().collect::<candle_zero::Result<Vec<_>>>().unwrap();
    assert!(ranks.windows(2).all(|pair| pair[0].0.gathered == pair[1].0.gathered), "{ranks:?}");
    let of_any = |layer: usize| ranks.iter().flat_map(|(_, chosen)| &chosen[layer]).collect::<BTreeSet<_>>().len();
    Traffic { chosen: (0..shape.layers).map(of_any).sum(), ..ranks[0].0 }
}

#[test]
fn the_bytes_read_in_a_step_are_those_of_the_experts_that_rows_chose() {
    let folder = folder();
    let zero = json!({
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2 * EXPERT,
        "offload_param": {"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 0},
    });
    for (checkpointed, passes) in [(false, 2), (true, 3)] {
        let shape = Shape { checkpointed, ..SHAPE };
        for world in [1, 2] {
            // Rank 1 chooses different experts from rank 0.
            let traffic_of =
                |count: usize| traffic(world, shape, &zero, |rank| (0..count).map(|i| 4 * rank + i).collect());
            let (two, four) = (traffic_of(2), traffic_of(4));
            assert!(two.chosen == 2 * shape.layers * world && four.chosen > two.chosen + 2, "{two:?} {four:?}");
            // Each rank reads its shard of the experts that any rank chose, in each pass of each layer.
            let experts = |traffic: Traffic| (passes * traffic.chosen * EXPERT / world * 4) as u64;
            assert_eq!(four.read - two.read, experts(four) - experts(two), "world {world}, {checkpointed}");
            // The rest is read for the dense units.
            let dense = (32 * 4 + 32 + 2 * (32 + 8 * 32)) as u64 * 4 / world as u64;
            let rest = two.read - experts(two);
            assert!(rest >= dense && rest < 8 * dense.max(4096), "{rest} {dense}");
        }
    }
}

#[test]
fn ranks_gather_the_union_of_their_experts_and_agree_once_for_each_layer_and_pass() {
    // With a reuse distance of 0, every unit is gathered in both passes.
    let zero = |bucket: usize| {
        json!({
            "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket, "stage3_max_reuse_distance": 0,
        })
    };
    let traffic_of = |count: usize, bucket: usize| {
        traffic(2, SHAPE, &zero(bucket), |rank| (0..count).map(|i| 4 * rank + i).collect())
    };
    let plain = Shape { units: false, ..SHAPE };
    for bucket in [0, EXPERT, 3 * EXPERT] {
        let (two, four) = (traffic_of(2, bucket), traffic_of(4, bucket));
        // Each rank contributes half of each expert, in the forward and in the backward pass.
        assert_eq!(four.gathered - two.gathered, ((four.chosen - two.chosen) * 2 * EXPERT / 2) as u64);
        assert!(four.chosen > two.chosen);
        let plain = traffic(2, plain, &zero(bucket), |rank| vec![4 * rank, 4 * rank + 1]);
        assert_eq!(plain.gathered - two.gathered, ((2 * 8 - two.chosen) * 2 * EXPERT / 2) as u64);
        // The backward pass uses the experts of the forward pass, without another agreement.
        assert_eq!(two.control, plain.control + SHAPE.layers as u64);
        assert!(two.peak < plain.peak, "{two:?} {plain:?}");
        // A block that recomputes agrees again.
        let again =
            traffic(2, Shape { checkpointed: true, ..SHAPE }, &zero(bucket), |rank| vec![4 * rank, 4 * rank + 1]);
        assert_eq!(again.control, plain.control + 2 * SHAPE.layers as u64);
    }
    // A single rank has no other rank to agree with, and ranks that choose the same experts gather each once.
    let alone = |shape: Shape| traffic(1, shape, &zero(0), |_| vec![1, 2]).control;
    assert_eq!(alone(SHAPE), alone(plain));
    let same = traffic(2, SHAPE, &zero(0), |_| vec![1, 2]);
    assert_eq!(traffic_of(2, 0).gathered - same.gathered, (SHAPE.layers * 2 * 2 * EXPERT / 2) as u64);
}

#[test]
fn only_two_groups_of_experts_are_in_memory_at_a_time() {
    let shape = Shape { experts: 24, ..SHAPE };
    let peak = |bucket: usize| {
        let zero = json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket});
        traffic(1, shape, &zero, |_| (0..24).collect()).peak
    };
    let dense = (2 * (32 + 24 * 32) + 32 * 5) * 4;
    for experts in [1, 2, 4] {
        let most = dense + 2 * experts * EXPERT * 4;
        assert!(peak(experts * EXPERT) <= most, "{experts}: {} of {most}", peak(experts * EXPERT));
    }
    assert!(peak(0) <= dense + EXPERT * 4);
}

#[test]
fn an_estimate_counts_the_bytes_of_a_mixture_whose_experts_are_all_chosen() {
    for (world, checkpointed, bucket) in [(1, false, 2 * EXPERT), (2, false, 0), (2, true, 3 * EXPERT)] {
        let zero = json!({
            "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket, "stage3_max_reuse_distance": 0,
        });
        let config = config(3, 1, zero, json!({"gradient_check": false}));
        let shape = Shape { checkpointed, ..SHAPE };
        let ranks = threads::run(world, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm);
            let mut engine = builder.initialize(|vb| Mixture::new(shape, vb), config.clone())?;
            choose_in_turn();
            let mut before = engine.comm_report();
            for step in 0..4 {
                before = engine.comm_report();
                take_chosen();
                let x = rows(step * world + rank, 16);
                let loss = engine.forward(|model| model.loss(&x))?;
                engine.backward(&loss)?;
                engine.step()?;
                assert!(take_chosen().iter().all(|chosen| chosen.len() == shape.experts));
            }
            Ok((engine.memory_report(), before, engine.comm_report()))
        });
        let shapes = Shapes::of("mixture", |vb| Mixture::new(shape, vb)).unwrap();
        let options = EstimateOptions { recompute: checkpointed, ..EstimateOptions::default() };
        let estimate = Estimate::with(&shapes, &Config::load(config, world).unwrap(), options).unwrap();
        for rank in ranks.unwrap() {
            let (memory, before, after) = rank.unwrap();
            assert_eq!(
                estimate.memory.rows, memory.rows,
                "world {world}, {checkpointed}\n{}\n{memory}",
                estimate.memory
            );
            for kind in [CollectiveKind::AllGather, CollectiveKind::ReduceScatter, CollectiveKind::Control] {
                let (before, after, expected) = (before.kind(kind), after.kind(kind), estimate.step.kind(kind));
                let found = [after.calls - before.calls, after.elements - before.elements];
                assert_eq!([expected.calls, expected.elements], found, "{} {world} {checkpointed}", kind.name());
            }
        }
    }
}

// ---- errors --------------------------------------------------------------------------------------------------------

#[test]
fn a_number_of_units_that_differs_from_that_of_the_experts_is_refused() {
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F32, &candle_core::Device::Cpu);
    let error = crate::support::experts::with_units_of(3, 2, &vb).unwrap_err();
    insta::assert_snapshot!(candle_zero::error::without_backtrace(&error.to_string()), @"experts: the MLP has 3 experts, but 2 units; build one unit for each expert");
}

#[test]
fn a_rank_that_does_not_run_the_layer_is_told_so() {
    let zero = group_sizes()[1].clone();
    let ranks = threads::run(2, |comm| {
        let config = config(3, 1, zero.clone(), json!({}));
        let builder = Engine::builder().communicator(comm);
        let mut engine = builder.initialize(|vb| Mixture::new(SHAPE, vb), config)?;
        let (x, skips) = (rows(0, 4), engine.rank() == 1);
        let loss = engine.forward(|model| if skips { model.loss_without_blocks(&x) } else { model.loss(&x) });
        Ok(loss.and_then(|loss| engine.backward(&loss)).unwrap_err())
    });
    let errors: Vec<Error> = ranks.unwrap().into_iter().map(|error| error.unwrap()).collect();
    assert!(errors.iter().any(|error| error.to_string().contains("every rank must")), "{errors:?}");
}

// ---- killed jobs ---------------------------------------------------------------------------------------------------

#[test]
#[ignore = "the next test starts it on each rank"]
fn training_program() {
    let Some(folder) = std::env::var_os("TEST_FOLDER") else { return };
    let folder = Path::new(&folder);
    let files = folder.join("files");
    let zero = json!({
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2 * EXPERT,
        "offload_param": {"device": "nvme", "nvme_path": files, "max_in_cpu": 0},
        "offload_optimizer": {"device": "nvme", "nvme_path": files},
    });
    let config = config(3, 1, zero, json!({"bf16": {"enabled": true}}));
    let shape = Shape { checkpointed: true, ..SHAPE };
    let mut engine = Engine::initialize(|vb| Mixture::new(shape, vb), config).unwrap();
    let dir = folder.join("checkpoints");
    engine.load_checkpoint(&dir, None, &LoadOptions::default()).unwrap();
    while engine.global_steps() < 12 {
        let step = engine.global_steps() as usize;
        let (count, allowed) = disjoint(step, engine.rank());
        allow(allowed);
        let x = rows(step * 2 + engine.rank(), count);
        let loss = engine.forward(|model| model.loss(&x)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        engine.save_checkpoint(&dir, None, Value::Null).unwrap();
        println!("step {step}");
        std::io::stdout().flush().unwrap();
    }
    engine.export_safetensors(folder.join("model.safetensors")).unwrap();
    println!("done");
}

/// Runs the program on 2 ranks in `folder`. If `kill_after` is given, kills all its processes when rank 0 has reported
/// that many steps.
fn run_program(folder: &Path, kill_after: Option<usize>) {
    std::fs::create_dir_all(folder.join("files")).unwrap();
    let mut command = zerorun();
    command.args(["--num_ranks", "2", "--timeout", "60s"]).arg(std::env::current_exe().unwrap());
    command.args(as_program(module_path!(), "training_program")).env("TEST_FOLDER", folder);
    let mut job = start(command.env("RAYON_NUM_THREADS", "1"));
    let launcher = i32::try_from(job.id()).unwrap();
    let lines = BufReader::new(job.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let steps = lines.filter(|line| line.starts_with("[rank 0] step")).take(kill_after.unwrap_or(usize::MAX)).count();
    if let Some(kill_after) = kill_after {
        assert_eq!(steps, kill_after);
        let ranks = wait_for("the ranks", || Some(descendants(launcher)).filter(|ranks| ranks.len() >= 2));
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
fn a_killed_job_with_experts_in_files_ends_with_the_bytes_of_one_that_never_was() {
    let (calm, killed) = (folder(), folder());
    run_program(calm.path(), None);
    for kill_after in [2, 3] {
        run_program(killed.path(), Some(kill_after));
    }
    run_program(killed.path(), None);
    let model = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(model(calm.path()) == model(killed.path()));
}
