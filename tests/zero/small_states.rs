//! 8-bit moments, and 16-bit weights and moments without f32 copies: the same bits at every stage, wherever states are
//! stored, after a resume and with a different number of ranks, in as little memory as promised.

use crate::support::tiny::{Outcome, Shape, Tiny, batch, config, train_with};
use candle_core::{DType, Device};
use candle_nn::{Linear, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, LoadOptions};
use candle_zero::comm::threads;
use candle_zero::config::Config;
use candle_zero::error::{EngineError, Error};
use candle_zero::estimate::{Estimate, Shapes};
use candle_zero::memory::MemoryKind;
use serde_json::{Value, json};
use std::path::Path;

const STEPS: usize = 8;

fn shape(units: bool) -> Shape {
    Shape { units, layers: 2, ..Shape::default() }
}

/// Returns a configuration with 8-bit moments, including those of parameters too small to fill a block.
fn eight_bit(name: &str) -> Value {
    json!({"optimizer": {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.1, "min_8bit_size": 20}}})
}

fn bf16_states() -> Value {
    json!({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})
}

fn released() -> Value {
    json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0})
}

fn offloaded(device: &str, folder: &Path) -> Value {
    let mut zero = released();
    zero["sub_group_size"] = json!(500);
    zero["offload_optimizer"] =
        json!({"device": device, "nvme_path": folder, "pipeline_read": true, "pipeline_write": true});
    zero["offload_param"] = json!({"device": device, "nvme_path": folder});
    zero
}

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

fn same_at_every_stage_and_place(more: &Value, first_stage: u8, stochastic: bool) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for world in [1, 2, 3] {
        let run = |stage, units, zero| {
            let config = config(stage, 2, zero, more.clone());
            train_with(world, shape(units), &config, STEPS, |builder| builder.stochastic_rounding(stochastic))
        };
        let reference = run(first_stage, false, json!({}));
        for stage in first_stage..4 {
            assert_same(&reference, &run(stage, true, released()), &format!("stage {stage}, world {world}, {more}"));
        }
        for (stage, device) in [(1, "cpu"), (2, "nvme"), (3, "nvme")] {
            let outcomes = run(stage, true, offloaded(device, folder.path()));
            assert_same(&reference, &outcomes, &format!("stage {stage}, world {world}, {device}, {more}"));
        }
    }
}

#[test]
fn moments_of_eight_bits_give_the_same_bits_at_every_stage_and_place() {
    same_at_every_stage_and_place(&eight_bit("AdamW8bit"), 0, false);
    same_at_every_stage_and_place(&eight_bit("Lion8bit"), 0, false);
    let mut with_bf16_weights = eight_bit("Adam8bit");
    with_bf16_weights["bf16"] = json!({"enabled": true, "bf16_master_weights_and_grads": true});
    same_at_every_stage_and_place(&with_bf16_weights, 1, false);
}

#[test]
fn states_of_16_bits_give_the_same_bits_at_every_stage_and_place_rounded_to_nearest_or_by_chance() {
    same_at_every_stage_and_place(&bf16_states(), 1, false);
    same_at_every_stage_and_place(&bf16_states(), 1, true);
    let fp16 = json!({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true, "initial_scale_power": 4}});
    same_at_every_stage_and_place(&fp16, 1, false);
}

#[test]
fn what_rounding_to_nearest_loses_rounding_by_chance_keeps() {
    // Each update is far smaller than half the distance between two adjacent bf16 values.
    let mut small = bf16_states();
    small["optimizer"] = json!({"type": "AdamW", "params": {"lr": 1e-5}});
    small["scheduler"] =
        json!({"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_max_lr": 1e-5, "warmup_min_lr": 1e-5}});
    let config = config(2, 1, json!({}), small);
    let run = |steps, stochastic| {
        let all = train_with(1, shape(false), &config, steps, |builder| builder.stochastic_rounding(stochastic));
        weights(&all[0].exported)
    };
    let changed = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a != b && a.abs() > 0.1).count();
    let (start, nearest, stochastic) = (run(0, false), run(10, false), run(10, true));
    assert_eq!(changed(&start, &nearest), 0);
    assert!(changed(&start, &stochastic) > 10, "{}", changed(&start, &stochastic));
}

fn weights(exported: &[u8]) -> Vec<f32> {
    let file = safetensors::SafeTensors::deserialize(exported).unwrap();
    let by_name: std::collections::BTreeMap<_, _> = file.tensors().into_iter().collect();
    let bytes: Vec<u8> = by_name.values().flat_map(|view| view.data().to_vec()).collect();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Trains from step `steps.0` to step `steps.1` after loading the checkpoint in `load`, if there is one, saves to
/// `save`, and returns the losses.
fn train_from(world: usize, config: &Value, steps: (usize, usize), load: Option<&Path>, save: &Path) -> Vec<Vec<u32>> {
    train_from_with_seed(42, world, config, steps, load, save)
}

/// Trains like [`train_from`], with an engine that uses this seed.
fn train_from_with_seed(
    seed: u64,
    world: usize,
    config: &Value,
    (from, to): (usize, usize),
    load: Option<&Path>,
    save: &Path,
) -> Vec<Vec<u32>> {
    // With two ranks, each has its own samples; other numbers of ranks only load and save.
    let results = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).stochastic_rounding(true).seed(seed);
        let mut engine = builder.initialize(|vb| Tiny::new(shape(true), vb), config.clone())?;
        if let Some(folder) = load {
            engine.load_checkpoint(folder, None, &LoadOptions::default())?.expect("a checkpoint");
        }
        let mut losses = vec![];
        for step in from..to {
            let (ids, targets) = batch(step * world + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            engine.step()?;
        }
        engine.save_checkpoint(save, Some("end"), Value::Null)?;
        Ok(losses)
    });
    results.unwrap().into_iter().map(Result::unwrap).collect()
}

#[test]
fn a_run_that_is_saved_at_two_ranks_and_passes_through_others_goes_on_to_the_bit() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| folder.path().join(name);
    for (i, more) in [eight_bit("AdamW8bit"), eight_bit("Lion8bit"), bf16_states()].into_iter().enumerate() {
        let on = |stage, zero| config(stage, 1, zero, more.clone());
        let at = |name: &str| at(&format!("{name}{i}"));
        std::fs::create_dir(at("files")).unwrap();
        let uninterrupted = train_from(2, &on(2, json!({})), (0, 8), None, &at("whole"));
        let first = train_from(2, &on(3, released()), (0, 4), None, &at("a"));
        train_from(1, &on(1, json!({})), (0, 0), Some(&at("a")), &at("b"));
        train_from(3, &on(3, offloaded("nvme", &at("files"))), (0, 0), Some(&at("b")), &at("c"));
        let second = train_from(2, &on(1, json!({})), (4, 8), Some(&at("c")), &at("d"));
        for rank in 0..2 {
            assert_eq!([&first[rank][..], &second[rank][..]].concat(), uninterrupted[rank], "{more}");
        }
        for file in ["rank_00000_of_00002.safetensors", "rank_00001_of_00002.safetensors"] {
            let read = |run: &str| std::fs::read(at(run).join("end").join(file)).unwrap();
            assert!(read("whole") == read("d"), "{file}: {more}");
        }
    }
}

#[test]
fn rounding_by_chance_goes_on_where_it_was_saved_whatever_seed_and_number_of_ranks_the_next_engine_has() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| folder.path().join(name);
    let on = |stage| config(stage, 1, json!({}), bf16_states());
    let uninterrupted = train_from(2, &on(2), (0, 6), None, &at("whole"));
    let first = train_from(2, &on(1), (0, 3), None, &at("a"));
    train_from_with_seed(7, 3, &on(3), (0, 0), Some(&at("a")), &at("b"));
    train_from_with_seed(8, 1, &on(1), (0, 0), Some(&at("b")), &at("c"));
    let second = train_from_with_seed(9, 2, &on(3), (3, 6), Some(&at("c")), &at("d"));
    for rank in 0..2 {
        assert_eq!([&first[rank][..], &second[rank][..]].concat(), uninterrupted[rank]);
    }
    for file in ["rank_00000_of_00002.safetensors", "rank_00001_of_00002.safetensors"] {
        let read = |run: &str| std::fs::read(at(run).join("end").join(file)).unwrap();
        assert!(read("whole") == read("d"), "{file}");
    }
    let manifest = |run: &str| Checkpoint::open(at(run), None).unwrap().unwrap().manifest().rounding_seed;
    assert_eq!([manifest("whole"), manifest("b"), manifest("c"), manifest("d")], [Some(42); 4]);
}

#[test]
fn ranks_that_round_in_different_ways_are_told() {
    // All ranks begin with the same weights, whatever their seed.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (weights, config) = (folder.path().join("weights"), config(1, 1, json!({}), bf16_states()));
    let run = |stochastic: [bool; 2], seeds: [u64; 2], export: bool| {
        let results = threads::run(2, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu).seed(seeds[rank]);
            let builder = if export { builder } else { builder.init_from(&weights) };
            let builder = builder.stochastic_rounding(stochastic[rank]);
            let mut engine = builder.initialize(|vb| Tiny::new(shape(true), vb), config.clone())?;
            if export { engine.export_safetensors(&weights) } else { Ok(()) }
        });
        results.unwrap()
    };
    let all_well = |results: Vec<candle_zero::Result<()>>| results.into_iter().for_each(|result| result.unwrap());
    all_well(run([true; 2], [3; 2], true));
    all_well(run([true; 2], [3; 2], false));
    // Rounding to nearest uses no seed.
    all_well(run([false; 2], [3, 4], false));
    for (stochastic, seeds) in [([true, false], [3; 2]), ([true; 2], [3, 4])] {
        for (rank, result) in run(stochastic, seeds, false).into_iter().enumerate() {
            let error = result.unwrap_err();
            let is_told = matches!(&error, Error::Engine(EngineError::RoundingDiffers { rank: r, other }) if *r == rank && *other == 1 - rank);
            assert!(is_told, "{error}");
            if rank == 0 {
                insta::allow_duplicates! {
                    insta::assert_snapshot!(error, @"rank 0 rounds differently from rank 1: one rounds to nearest and the other stochastically, or their seeds differ; every rank must use the same EngineBuilder::stochastic_rounding and EngineBuilder::seed");
                }
            }
        }
    }
}

/// Returns a layer with a large matrix, and a bias with too few elements for 8-bit moments.
fn build(vb: VarBuilder<'_>) -> candle_core::Result<Linear> {
    linear(300, 500, vb)
}

#[test]
fn two_moments_take_at_most_2_1_bytes_a_parameter_and_estimates_are_exact() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut eight = eight_bit("AdamW8bit");
    eight["optimizer"]["params"]["min_8bit_size"] = json!(4096);
    for (more, bytes, first) in [(eight, 2.1, 0), (bf16_states(), 4.0, 1)] {
        for world in [1, 2, 3] {
            for stage in first..4 {
                for device in ["none", "nvme"].into_iter().filter(|device| *device == "none" || stage > 0) {
                    let mut zero = released();
                    zero["offload_optimizer"] = json!({"device": device, "nvme_path": folder.path()});
                    let config = config(stage, 1, zero, more.clone());
                    let what = format!("stage {stage}, world {world}, {device}, {more}");
                    let reports = threads::run(world, |comm| {
                        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
                        let mut engine = builder.initialize(build, config.clone())?;
                        for _ in 0..3 {
                            let dtype = engine.config().precision.dtype();
                            let x = candle_core::Tensor::ones((2, 300), dtype, &Device::Cpu)?;
                            let loss =
                                engine.forward(|model| candle_nn::Module::forward(model, &x)?.sqr()?.mean_all())?;
                            engine.backward(&loss)?;
                            engine.step()?;
                        }
                        Ok(engine.memory_report())
                    });
                    let shapes = Shapes::of("linear", build).unwrap();
                    let estimate = Estimate::new(&shapes, &Config::load(config.clone(), world).unwrap()).unwrap();
                    for (rank, report) in reports.unwrap().into_iter().enumerate() {
                        let report = report.unwrap();
                        let row = report.row(MemoryKind::Moments);
                        let share = report.parameters as f64 / if stage == 0 { 1.0 } else { world as f64 };
                        let held = (row.bytes.held + row.file.held) as f64;
                        assert_eq!(held, row.formula.unwrap() + row.padding, "{what}\n{report}");
                        assert!(held - row.padding <= bytes * share, "{what}\n{report}");
                        assert_eq!(report.row(MemoryKind::MasterWeights).bytes.peak, 0, "{what}");
                        if rank == 0 {
                            for kind in [
                                MemoryKind::Moments,
                                MemoryKind::MasterWeights,
                                MemoryKind::Parameters,
                                MemoryKind::Gradients,
                            ] {
                                let (counted, estimated) = (report.row(kind), estimate.memory.row(kind));
                                assert_eq!(
                                    (counted.bytes.held, counted.file.held),
                                    (estimated.bytes.held, estimated.file.held),
                                    "{what}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
