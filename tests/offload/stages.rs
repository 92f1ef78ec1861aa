//! Offload to files does not change a single bit: losses, gradient norms and parameters are those of a run in memory,
//! wherever states are stored and however they are transferred.

use crate::support::tiny::{Outcome, Shape, Tiny, batch, config, train, train_with};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::comm::threads;
use candle_zero::memory::MemoryKind;
use candle_zero::offload::DiskAccess;
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::path::Path;

const STEPS: usize = 20;

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    assert_eq!(a.len(), b.len(), "ranks: {what}");
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Returns `zero` with these sections for the optimizer's states and the parameters; files are in `folder`.
fn offloaded(zero: &Value, folder: &Path, optimizer: Value, param: Value) -> Value {
    let mut zero = zero.clone();
    for (key, section) in [("offload_optimizer", optimizer), ("offload_param", param)] {
        if section.is_object() {
            zero[key] = section;
            zero[key]["nvme_path"] = folder.to_str().unwrap().into();
        }
    }
    zero
}

fn nvme(more: Value) -> Value {
    let mut section = json!({"device": "nvme"});
    section.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    section
}

fn offload_gives_the_same_bits(world: usize, accumulation: usize) {
    let folder = folder();
    let shape = Shape { layers: 3, units: true, ..Shape::default() };
    let zero = json!({
        "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1500,
        "sub_group_size": 700,
    });
    let reference = train(world, shape, &config(3, accumulation, zero.clone(), json!({})), STEPS);
    let file = |more| nvme(more);
    let none = || json!(null);
    let all = || nvme(json!({"max_in_cpu": 0}));
    let cases = [
        (1, json!({"device": "cpu"}), none()),
        (3, json!({"device": "cpu"}), json!({"device": "cpu"})),
        (1, file(json!({})), none()),
        (2, file(json!({"pipeline_read": true, "pipeline_write": true})), none()),
        (3, file(json!({})), none()),
        (3, none(), all()),
        (3, none(), nvme(json!({"max_in_cpu": 9000}))),
        (3, file(json!({})), all()),
        (3, file(json!({"pipeline_read": true})), all()),
        (3, file(json!({"pipeline_write": true})), all()),
        (3, file(json!({"pipeline_read": true, "pipeline_write": true})), all()),
        (
            3,
            file(json!({"pipeline_read": true, "pipeline_write": true, "ratio": 0.5})),
            nvme(json!({"max_in_cpu": 9000})),
        ),
    ];
    for (stage, optimizer, param) in cases {
        let what = format!("stage {stage}, world {world}, accumulation {accumulation}, {optimizer}, {param}");
        let zero = offloaded(&zero, folder.path(), optimizer, param);
        assert_same(&reference, &train(world, shape, &config(stage, accumulation, zero, json!({})), STEPS), &what);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files are left over");
}

#[test]
fn offload_gives_the_same_bits_on_1_rank() {
    offload_gives_the_same_bits(1, 1);
}

#[test]
fn offload_gives_the_same_bits_on_1_rank_with_accumulation() {
    offload_gives_the_same_bits(1, 3);
}

#[test]
fn offload_gives_the_same_bits_on_2_ranks() {
    offload_gives_the_same_bits(2, 1);
}

#[test]
fn offload_gives_the_same_bits_on_2_ranks_with_accumulation() {
    offload_gives_the_same_bits(2, 3);
}

#[test]
fn every_access_to_files_gives_the_same_bits_in_every_precision() {
    let folder = folder();
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    // Some windows are smaller than parameters, and some parameters are smaller than windows.
    let zero =
        json!({"stage3_param_persistence_threshold": 300, "stage3_max_reuse_distance": 0, "sub_group_size": 5000});
    for more in [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true}})] {
        let reference = train(2, shape, &config(3, 2, zero.clone(), more.clone()), STEPS);
        for access in [DiskAccess::Direct, DiskAccess::Cached, DiskAccess::Mapped] {
            let both = json!({"pipeline_read": true, "pipeline_write": true});
            let mut more = more.clone();
            more["aio"] = json!({"block_size": 4096, "queue_depth": 3, "intra_op_parallelism": 2});
            more["activation_checkpointing"] = json!({"cpu_checkpointing": access == DiskAccess::Cached});
            let zero = offloaded(&zero, folder.path(), nvme(both), nvme(json!({"max_in_cpu": 0})));
            let run = train_with(2, shape, &config(3, 2, zero, more.clone()), STEPS, |b| b.disk_access(access));
            assert_same(&reference, &run, &format!("{access:?} {more}"));
            for outcome in run {
                let inputs = outcome.memory.row(MemoryKind::Activations).file.held;
                assert_eq!(inputs > 0, access == DiskAccess::Cached, "{inputs} bytes of inputs in files, {access:?}");
            }
        }
    }
}

#[test]
fn every_access_to_files_gives_the_same_bits_at_every_stage_and_world_size() {
    let folder = folder();
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let zero = json!({"stage3_param_persistence_threshold": 0, "sub_group_size": 3000});
    for (world, stage) in [(1, 1), (1, 3), (2, 1), (2, 2)] {
        for more in [json!({}), json!({"bf16": {"enabled": true}})] {
            let reference = train(world, shape, &config(stage, 1, zero.clone(), more.clone()), STEPS);
            for access in [DiskAccess::Direct, DiskAccess::Cached, DiskAccess::Mapped] {
                let param = if stage == 3 { nvme(json!({"max_in_cpu": 0})) } else { json!(null) };
                let zero = offloaded(&zero, folder.path(), nvme(json!({"pipeline_read": true})), param);
                let config = config(stage, 1, zero, more.clone());
                let run = train_with(world, shape, &config, STEPS, |b| b.disk_access(access));
                assert_same(&reference, &run, &format!("stage {stage}, world {world}, {access:?} {more}"));
            }
        }
    }
}

// ---- more models, optimizers and calls ---------------------------------------------------------------------------

/// Parameters that are larger than a window of the step, and small ones.
struct Mixed(Unit<Linear>, Linear);

impl Mixed {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self(unit(vb.pp("wide"), |vb| linear(64, 100, vb))?, linear(100, 7, vb.pp("head"))?))
    }

    fn loss(&self, dtype: DType, sample: usize) -> candle_core::Result<Tensor> {
        let x = Tensor::from_iter((0..128).map(|i| ((i * 7 + sample * 5) % 11) as f32 / 11.0), &Device::Cpu)?;
        let x = x.reshape((2, 64))?.to_dtype(dtype)?;
        self.1.forward(&self.0.forward(&x)?.relu()?)?.to_dtype(DType::F32)?.sqr()?.mean_all()
    }
}

/// Returns the bits of losses (of training and of an evaluation after each micro step), gradient norms and loss scales,
/// the numbers of skipped steps, and the exported parameters.
fn run_mixed(world: usize, config: &Value, steps: usize) -> (Vec<Vec<u64>>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let mut engine =
            Engine::builder().communicator(comm).device(Device::Cpu).initialize(Mixed::new, config.clone())?;
        let (dtype, rank) = (engine.dtype(), engine.rank());
        let mut seen = vec![];
        while engine.global_steps() < steps as u64 {
            let sample = engine.micro_steps() as usize * world + rank;
            let loss = engine.forward(|model| model.loss(dtype, sample))?;
            engine.backward(&loss)?;
            let is_boundary = engine.is_gradient_accumulation_boundary();
            engine.step()?;
            let eval = engine.eval(|model| model.loss(dtype, 3))?;
            for loss in [loss, eval] {
                seen.push(u64::from(loss.to_scalar::<f32>()?.to_bits()));
            }
            if is_boundary {
                seen.push(engine.global_grad_norm().unwrap().to_bits());
                seen.push(engine.loss_scale().to_bits());
                seen.push(engine.skipped_steps());
            }
        }
        engine.export_safetensors(&file)?;
        Ok(seen)
    });
    let ranks = ranks.unwrap().into_iter().map(Result::unwrap).collect();
    (ranks, std::fs::read(&file).unwrap())
}

fn pipelines() -> [Value; 4] {
    [[false, false], [true, false], [false, true], [true, true]]
        .map(|[read, write]| nvme(json!({"pipeline_read": read, "pipeline_write": write})))
}

#[test]
fn parameters_larger_than_a_window_and_evals_between_steps_keep_their_bits() {
    let folder = folder();
    for world in [1, 2] {
        for group in [1000, 1_000_000] {
            let zero = json!({"stage3_param_persistence_threshold": 50, "sub_group_size": group});
            for more in [json!({}), json!({"bf16": {"enabled": true}})] {
                for stage in 1..=3 {
                    let reference = run_mixed(world, &config(stage, 2, zero.clone(), more.clone()), 8);
                    for optimizer in pipelines() {
                        let param = if stage == 3 { nvme(json!({"max_in_cpu": 0})) } else { json!(null) };
                        let what = format!("world {world}, groups of {group}, stage {stage}, {more}, {optimizer}");
                        let zero = offloaded(&zero, folder.path(), optimizer, param);
                        let run = run_mixed(world, &config(stage, 2, zero, more.clone()), 8);
                        assert!(run == reference, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn sgd_with_and_without_momentum_keeps_its_bits_in_files() {
    let folder = folder();
    let zero = json!({"stage3_param_persistence_threshold": 0, "sub_group_size": 3000});
    for momentum in [0.0, 0.9] {
        // The smallest number of buffers that is allowed.
        let count = if momentum == 0.0 { 2 } else { 3 };
        let sgd = json!({"type": "SGD", "params": {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1}});
        for half in [false, true] {
            let more = json!({"optimizer": sgd, "bf16": {"enabled": half}, "zero_allow_untested_optimizer": true});
            for stage in [2, 3] {
                let reference = run_mixed(2, &config(stage, 1, zero.clone(), more.clone()), 8);
                for mut optimizer in pipelines() {
                    optimizer["buffer_count"] = json!(count);
                    let param = if stage == 3 { nvme(json!({"max_in_cpu": 0})) } else { json!(null) };
                    let what = format!("{momentum}, {more}, stage {stage}, {optimizer}");
                    let zero = offloaded(&zero, folder.path(), optimizer, param);
                    assert!(run_mixed(2, &config(stage, 1, zero, more.clone()), 8) == reference, "{what}");
                }
            }
        }
    }
}

#[test]
fn gradients_of_another_type_and_way_keep_their_bits_in_files() {
    let folder = folder();
    for stage in 1..=3 {
        for scatter in [false, true] {
            for accumulate in ["fp32", "bf16"] {
                let zero = json!({"reduce_scatter": scatter, "stage3_param_persistence_threshold": 0});
                let more = json!({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": accumulate}});
                let reference = run_mixed(2, &config(stage, 3, zero.clone(), more.clone()), 6);
                let zero = offloaded(&zero, folder.path(), nvme(json!({"pipeline_write": true})), json!(null));
                let what = format!("stage {stage}, {accumulate}, reduce_scatter {scatter}");
                assert!(run_mixed(2, &config(stage, 3, zero, more.clone()), 6) == reference, "{what}");
            }
        }
    }
}

#[test]
fn skipped_steps_leave_files_as_they_are() {
    let folder = folder();
    let fp16 = json!({"fp16": {"enabled": true, "initial_scale_power": 28, "hysteresis": 1}});
    for stage in [1, 2, 3] {
        let zero = json!({"stage3_param_persistence_threshold": 0});
        let reference = run_mixed(2, &config(stage, 2, zero.clone(), fp16.clone()), 20);
        let skipped = *reference.0[0].last().unwrap();
        assert!((2..19).contains(&skipped), "{skipped}");
        for optimizer in pipelines() {
            let param = if stage == 3 { nvme(json!({"max_in_cpu": 0})) } else { json!(null) };
            let zero = offloaded(&zero, folder.path(), optimizer, param);
            assert!(run_mixed(2, &config(stage, 2, zero.clone(), fp16.clone()), 20) == reference, "stage {stage}");
            // The first steps overflow, so an export after them contains the initial weights.
            let [first, later] =
                [1, 2].map(|steps| run_mixed(2, &config(stage, 2, zero.clone(), fp16.clone()), steps).1);
            assert!(first == later, "stage {stage}");
        }
    }
}

#[test]
fn an_engine_dropped_in_the_middle_of_an_accumulation_leaves_nothing_and_unlocks_the_folder() {
    let folder = folder();
    let zero = json!({"stage3_param_persistence_threshold": 0});
    let zero = offloaded(&zero, folder.path(), nvme(json!({})), nvme(json!({"max_in_cpu": 0})));
    let config = config(3, 4, zero, json!({"activation_checkpointing": {"cpu_checkpointing": true}}));
    let shape = Shape { layers: 2, units: true, checkpointed: true };
    // The engine is dropped before the first call, after forward, after backward, and after step. A loss may outlive
    // its engine.
    for calls in 0..4 {
        let results = threads::run(2, |comm| {
            let mut engine =
                Engine::builder().communicator(comm).initialize(|vb| Tiny::new(shape, vb), config.clone())?;
            let (ids, targets) = batch(calls);
            let mut kept = None;
            if calls > 0 {
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                if calls > 1 {
                    engine.backward(&loss)?;
                }
                if calls > 2 {
                    engine.step()?;
                }
                kept = Some(loss);
            }
            drop(engine);
            Ok(kept)
        });
        let kept: Vec<_> = results.unwrap().into_iter().map(Result::unwrap).collect();
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.filter(|name| name != ".candle-zero.lock").count(), 0);
        drop(kept);
    }
}
