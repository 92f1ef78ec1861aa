//! Checkpoints: a run that resumes from one is bit-identical to a run that never stopped, at any stage and world size.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{DType, Device, Tensor};
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, LoadOptions, SaveOptions};
use candle_zero::comm::threads;
use candle_zero::error::{CheckpointError, EngineError, Error, Result};
use serde_json::{Value, json};
use std::path::Path;

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 2 };

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The values that a rank observes in a run.
#[derive(Debug, Clone, PartialEq, Default)]
struct Trace {
    losses: Vec<u64>,
    norms: Vec<u64>,
    scales: Vec<u64>,
    exported: Vec<u8>,
}

/// Trains until step `until`, and calls `act` before every step and after the last.
fn run(world: usize, config: &Value, until: u64, act: impl Fn(&mut Engine<Tiny>) -> Result<()> + Sync) -> Vec<Trace> {
    let folder = folder();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let micro = engine.config().batch.train_micro_batch_size_per_gpu;
        assert_eq!(micro % 2, 0);
        let mut seen = Trace::default();
        loop {
            act(&mut engine)?;
            if engine.global_steps() == until {
                break;
            }
            for step in 0..accumulation as u64 {
                // The samples of a step do not depend on the number of ranks or micro steps.
                let at = (engine.global_steps() * accumulation as u64 + step) as usize * world + rank;
                let (ids, targets) = batch(at);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                let losses = engine.gather_f64(&[f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?)])?;
                seen.losses.extend(losses.into_iter().map(|l| l[0].to_bits()));
                engine.step()?;
            }
            seen.norms.push(engine.global_grad_norm().unwrap().to_bits());
            seen.scales.push(engine.loss_scale().to_bits());
        }
        engine.export_safetensors(&file)?;
        Ok(seen)
    });
    let exported = std::fs::read(&file).unwrap();
    ranks.unwrap().into_iter().map(|r: Result<Trace>| Trace { exported: exported.clone(), ..r.unwrap() }).collect()
}

fn saves(dir: &Path, step: u64, options: SaveOptions) -> impl Fn(&mut Engine<Tiny>) -> Result<()> + Sync {
    move |engine| match engine.global_steps() == step {
        true => engine.save_checkpoint_with(dir, None, json!({"step": step}), &options).map(drop),
        false => Ok(()),
    }
}

fn loads(dir: &Path) -> impl Fn(&mut Engine<Tiny>) -> Result<()> + Sync {
    move |engine| {
        if engine.global_steps() == 0 {
            let loaded = engine.load_checkpoint(dir, None, &LoadOptions::default())?.unwrap();
            assert_eq!(loaded.client_state["step"], engine.global_steps());
            assert_eq!(loaded.global_samples, engine.global_samples());
        }
        Ok(())
    }
}

fn zero() -> Value {
    json!({"stage3_param_persistence_threshold": 300, "sub_group_size": 700})
}

fn precisions() -> [Value; 3] {
    [
        json!({}),
        json!({"bf16": {"enabled": true}}),
        json!({"fp16": {"enabled": true, "initial_scale_power": 20, "loss_scale_window": 5}}),
    ]
}

/// Returns the part of each rank's trace that follows the first `steps` steps of a run.
fn after(run: &[Trace], steps: usize) -> Vec<Trace> {
    run.iter()
        .map(|seen| {
            let per_step = seen.losses.len() / seen.norms.len();
            Trace {
                losses: seen.losses[steps * per_step..].to_vec(),
                norms: seen.norms[steps..].to_vec(),
                scales: seen.scales[steps..].to_vec(),
                exported: seen.exported.clone(),
            }
        })
        .collect()
}

#[test]
fn optimizers_with_factored_states_or_averages_go_on_with_the_same_bits_at_any_stage() {
    let files = folder();
    let optimizers = [
        json!({"type": "LARS", "params": {"lr": 5.0, "weight_decay": 0.01}}),
        json!({"type": "Adafactor"}),
        json!({"type": "Adafactor", "params": {"lr": 0.01, "beta1": 0.9}}),
        json!({"type": "AdamWScheduleFree", "params": {"lr": 0.02, "warmup_steps": 5, "r": 0.5}}),
    ];
    let nvme = json!({"device": "nvme", "nvme_path": files.path()});
    let stages = [(0, json!({})), (2, json!({})), (3, json!({"offload_optimizer": nvme}))];
    for optimizer in optimizers {
        let keys = json!({"optimizer": optimizer, "scheduler": null, "zero_allow_untested_optimizer": true});
        let configs = stages.clone().map(|(stage, more)| {
            let mut zero = zero();
            zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            config(stage, 1, zero, keys.clone())
        });
        let uninterrupted = run(2, &configs[0], 8, |_| Ok(()));
        for saving in &configs {
            let dir = folder();
            // An evaluation before the save leaves the average in the model.
            let saves = saves(dir.path(), 4, SaveOptions { in_background: true, ..SaveOptions::default() });
            let evaluates_and_saves = |engine: &mut Engine<Tiny>| {
                let (ids, targets) = batch(99);
                engine.eval(|model| model.loss(&ids, &targets))?;
                saves(engine)
            };
            assert_eq!(run(2, saving, 8, evaluates_and_saves), uninterrupted, "{optimizer}: saving");
            for resuming in &configs {
                let resumed = run(2, resuming, 8, loads(dir.path()));
                let case = format!("{optimizer}: {} to {}", saving["zero_optimization"], resuming["zero_optimization"]);
                assert_eq!(after(&uninterrupted, 4), resumed, "{case}");
            }
            // A different number of ranks divides the states differently.
            let resumed = run(1, &configs[1], 5, loads(dir.path()));
            assert!(resumed[0].losses.iter().all(|loss| f64::from_bits(*loss).is_finite()));
        }
    }
}

#[test]
fn states_of_another_optimizer_are_refused() {
    let keys = |kind: &str| {
        let optimizer = json!({"type": kind, "params": {"lr": 0.01}});
        json!({"optimizer": optimizer, "scheduler": null, "zero_allow_untested_optimizer": true})
    };
    let dir = folder();
    run(2, &config(1, 1, zero(), keys("Adafactor")), 2, saves(dir.path(), 1, SaveOptions::default()));
    let config = config(1, 1, zero(), keys("AdamWScheduleFree"));
    let ranks = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())?;
        engine.load_checkpoint(dir.path(), None, &LoadOptions::default()).map(drop)
    });
    let error = ranks.unwrap().remove(0).unwrap_err().to_string();
    let error = error.replace(&dir.path().display().to_string(), "DIR");
    insta::assert_snapshot!(error);
}

fn check_resumed_run(world: usize) {
    let files = folder();
    let nvme = |key: &str| json!({"device": "nvme", "nvme_path": files.path(), key: 0});
    for more in precisions() {
        let offloads = [
            (0, json!({})),
            (1, json!({})),
            (2, json!({})),
            (3, json!({})),
            (1, json!({"offload_optimizer": {"device": "cpu"}})),
            (2, json!({"offload_optimizer": {"device": "nvme", "nvme_path": files.path()}})),
            (
                3,
                json!({
                    "offload_optimizer": {"device": "nvme", "nvme_path": files.path(), "pipeline_read": true},
                    "offload_param": nvme("max_in_cpu"),
                }),
            ),
        ];
        for (i, (stage, offload)) in offloads.into_iter().enumerate() {
            let mut zero = zero();
            zero.as_object_mut().unwrap().extend(offload.as_object().unwrap().clone());
            let config = config(stage, 1 + i % 2, zero, more.clone());
            let dir = folder();
            let options = SaveOptions { in_background: i % 2 == 1, ..SaveOptions::default() };
            // Saving does not change the run that continues.
            let uninterrupted = run(world, &config, 40, |_| Ok(()));
            let saved = run(world, &config, 40, saves(dir.path(), 20, options));
            assert_eq!(uninterrupted, saved, "world {world}, stage {stage}, {more}, {offload}: saving");
            let resumed = run(world, &config, 40, loads(dir.path()));
            assert_eq!(after(&uninterrupted, 20), resumed, "world {world}, stage {stage}, {more}, {offload}: resumed");
        }
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_never_stopped_on_1_rank() {
    check_resumed_run(1);
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_never_stopped_on_2_ranks() {
    check_resumed_run(2);
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_never_stopped_on_4_ranks() {
    check_resumed_run(4);
}

/// Returns all states of the checkpoint in `dir`, by name.
fn states(dir: &Path) -> Vec<(String, Vec<u32>)> {
    let checkpoint = Checkpoint::open(dir, None).unwrap().unwrap();
    checkpoint.verify(|_| {}).unwrap();
    let manifest = checkpoint.manifest();
    let mut all = vec![];
    for (s, state) in manifest.states.iter().enumerate() {
        for (p, parameter) in manifest.parameters.iter().enumerate() {
            let values = checkpoint.read(s, p, 0..parameter.numel()).unwrap();
            all.push((format!("{state}.{}", parameter.name), values.iter().map(|v| v.to_bits()).collect()));
        }
    }
    all
}

#[test]
fn every_stage_and_world_size_loads_what_every_other_has_saved() {
    // A step has 12 micro batches for any world size.
    let with = |stage: u8, world: usize| {
        let more = json!({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 24});
        config(stage, 12 / world, zero(), more)
    };
    let combinations: Vec<(u8, usize)> = (0..4).flat_map(|stage| (1..=4).map(move |world| (stage, world))).collect();
    let reference = run(1, &with(0, 1), 5, |_| Ok(()));
    let loss = |bits: &u64| f64::from_bits(*bits);
    let mean = |seen: &Trace, step: usize| seen.losses[step * 12..(step + 1) * 12].iter().map(loss).sum::<f64>() / 12.0;
    for (stage, world) in &combinations {
        let dir = folder();
        run(*world, &with(*stage, *world), 3, saves(dir.path(), 3, SaveOptions::default()));
        let saved = states(dir.path());
        for (other_stage, other_world) in &combinations {
            let case = format!("stage {stage}, world {world} to stage {other_stage}, world {other_world}");
            let resaved = folder();
            let resumed = run(*other_world, &with(*other_stage, *other_world), 5, |engine| {
                loads(dir.path())(engine)?;
                saves(resaved.path(), 3, SaveOptions::default())(engine)
            });
            assert!(saved == states(resaved.path()), "states: {case}");
            for step in 3..5 {
                let (expected, found) = (mean(&reference[0], step), mean(&resumed[0], step - 3));
                assert!((expected - found).abs() <= 1e-6 * expected.abs(), "{found} for {expected}: {case}");
            }
        }
    }
}

/// Returns the contents of a checkpoint's rank files, in order.
fn rank_files(dir: &Path) -> Vec<Vec<u8>> {
    let checkpoint = Checkpoint::open(dir, None).unwrap().unwrap();
    let files = checkpoint.manifest().files.iter();
    files.map(|file| std::fs::read(checkpoint.path().join(&file.name)).unwrap()).collect()
}

#[test]
fn groups_save_the_files_of_stage_3_without_groups_and_load_any() {
    let files = folder();
    let nvme = || json!({"device": "nvme", "nvme_path": files.path()});
    let with = |stage: u8, world: usize, more: Value| {
        let mut zero = zero();
        zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config(stage, 12 / world, zero, json!({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 24}))
    };
    let plain = folder();
    let uninterrupted = run(4, &with(3, 4, json!({})), 5, saves(plain.path(), 3, SaveOptions::default()));
    let saved = states(plain.path());
    let in_files = json!({
        "mics_shard_size": 2, "offload_optimizer": nvme(), "offload_param": {"device": "nvme", "nvme_path": files.path(), "max_in_cpu": 0},
    });
    for (i, groups) in [json!({"mics_shard_size": 2}), json!({"mics_shard_size": 1}), in_files].into_iter().enumerate()
    {
        let dir = folder();
        let options = SaveOptions { in_background: i == 1, ..SaveOptions::default() };
        let seen = run(4, &with(3, 4, groups.clone()), 5, saves(dir.path(), 3, options));
        assert_eq!(uninterrupted, seen, "{groups}");
        assert!(rank_files(plain.path()) == rank_files(dir.path()), "files: {groups}");
        // Loads a checkpoint that was saved without groups into groups.
        assert_eq!(after(&uninterrupted, 3), run(4, &with(3, 4, groups.clone()), 5, loads(plain.path())), "{groups}");
        // Loads the checkpoint that was saved with groups into other combinations.
        for (stage, world, more) in [(3, 4, json!({})), (2, 3, json!({})), (3, 2, json!({"mics_shard_size": 1}))] {
            let resaved = folder();
            run(world, &with(stage, world, more), 3, |engine| {
                loads(dir.path())(engine)?;
                saves(resaved.path(), 3, SaveOptions::default())(engine)
            });
            assert!(saved == states(resaved.path()), "{groups} to stage {stage}, world {world}");
        }
    }
}

#[test]
fn a_checkpoint_of_any_precision_loads_into_any_other() {
    for from in precisions() {
        let dir = folder();
        run(2, &config(2, 1, zero(), from.clone()), 3, saves(dir.path(), 3, SaveOptions::default()));
        for to in precisions() {
            let resaved = folder();
            run(2, &config(3, 1, zero(), to.clone()), 3, |engine| {
                loads(dir.path())(engine)?;
                saves(resaved.path(), 3, SaveOptions::default())(engine)
            });
            assert!(states(dir.path()) == states(resaved.path()), "{from} to {to}");
        }
    }
}

#[test]
fn without_a_checkpoint_nothing_is_loaded_and_a_wrong_tag_is_an_error_that_names_the_others() {
    let dir = folder();
    let config = config(2, 1, zero(), json!({}));
    run(2, &config, 1, |engine| {
        let options = LoadOptions::default();
        if engine.global_steps() == 0 {
            assert!(engine.load_checkpoint(dir.path(), None, &options)?.is_none());
            engine.save_checkpoint(dir.path(), Some("first"), Value::Null)?;
            let error = engine.load_checkpoint(dir.path(), Some("frist"), &options).unwrap_err();
            assert!(matches!(error, Error::Checkpoint(CheckpointError::Unusable { .. })));
            assert!(error.to_string().contains("available: first"), "{error}");
            for tag in ["../first", "a/b", "", ".", "..", "latest", ".hidden", "end ", &"x".repeat(201)] {
                let error = engine.save_checkpoint(dir.path(), Some(tag), Value::Null).unwrap_err();
                assert!(error.to_string().contains("cannot be the name of a folder"), "{error}");
            }
        }
        Ok(())
    });
}

/// Takes one step on two ranks and loads with `options`. Returns the number of steps, the learning rate and the states
/// after the load.
fn loaded_with(dir: &Path, options: LoadOptions) -> (u64, f64, Vec<(String, Vec<u32>)>) {
    let resaved = folder();
    let settings = config(2, 1, zero(), json!({}));
    let ranks = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), settings.clone())?;
        let (ids, targets) = batch(engine.rank());
        let loss = engine.forward(|model| model.loss(&ids, &targets))?;
        engine.backward(&loss)?;
        engine.step()?;
        engine.load_checkpoint(dir, None, &options)?.unwrap();
        engine.save_checkpoint(resaved.path(), None, Value::Null)?;
        Ok((engine.global_steps(), engine.lr()[0]))
    });
    let (steps, rate): (u64, f64) = ranks.unwrap().remove(0).unwrap();
    (steps, rate, states(resaved.path()))
}

#[test]
fn options_say_what_is_loaded() {
    let dir = folder();
    run(2, &config(2, 1, zero(), json!({})), 3, saves(dir.path(), 3, SaveOptions::default()));
    let saved = states(dir.path());
    let all = LoadOptions::default();
    let (steps, rate, found) = loaded_with(dir.path(), all);
    assert!(steps == 3 && found == saved);
    let parameters = |states: &[(String, Vec<u32>)]| states[..states.len() / 3].to_vec();
    let moments = |states: &[(String, Vec<u32>)]| states[states.len() / 3..].to_vec();

    let module = loaded_with(dir.path(), LoadOptions { load_module_only: true, ..all });
    assert!(module.0 == 1 && module.1 != rate && parameters(&module.2) == parameters(&saved));
    let without = loaded_with(dir.path(), LoadOptions { load_optimizer_states: false, ..all });
    assert!(without.0 == 3 && without.1 == rate && parameters(&without.2) == parameters(&saved));
    // In both cases, the moments are those of the engine's own step.
    assert!(moments(&without.2) == moments(&module.2) && moments(&without.2) != moments(&saved));
    let schedule = loaded_with(dir.path(), LoadOptions { load_lr_scheduler_states: false, ..all });
    assert!(schedule.0 == 3 && schedule.1 == module.1 && schedule.2 == saved);
}

#[test]
fn another_model_loads_what_it_knows_where_it_need_not_be_the_same() {
    let dir = folder();
    let settings = config(3, 1, zero(), json!({}));
    run(2, &settings, 3, saves(dir.path(), 3, SaveOptions::default()));
    let larger = Shape { layers: 3, ..SHAPE };
    let resaved = folder();
    let ranks = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(larger, vb), settings.clone())?;
        let error = engine.load_checkpoint(dir.path(), None, &LoadOptions::default()).unwrap_err();
        let loose = LoadOptions { load_module_strict: false, ..LoadOptions::default() };
        engine.load_checkpoint(dir.path(), None, &loose)?.unwrap();
        engine.save_checkpoint(resaved.path(), None, Value::Null)?;
        Ok(error.to_string())
    });
    let text = ranks.unwrap().remove(0).unwrap();
    assert!(text.contains("it lacks") && text.contains("load_module_strict false"), "{text}");
    let found = states(resaved.path());
    let saved = states(dir.path());
    assert!(saved.len() < found.len() && saved.iter().all(|state| found.contains(state)));
}

/// Runs `act` with the engine of a single rank at stage 1.
fn on_one_rank<T: Send>(act: impl Fn(&mut Engine<Tiny>) -> Result<T> + Sync) -> T {
    let settings = config(1, 1, zero(), json!({}));
    let ranks = threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        act(&mut builder.initialize(|vb| Tiny::new(SHAPE, vb), settings.clone())?)
    });
    ranks.unwrap().remove(0).unwrap()
}

fn train(engine: &mut Engine<Tiny>) -> Result<()> {
    train_on(engine, Ok)
}

fn train_on(engine: &mut Engine<Tiny>, mut change: impl FnMut(Tensor) -> candle_core::Result<Tensor>) -> Result<()> {
    let (ids, targets) = batch(engine.global_steps() as usize);
    let loss = engine.forward(|model| change(model.loss(&ids, &targets)?))?;
    engine.backward(&loss)?;
    engine.step()
}

/// Returns the names in a folder, including hidden ones.
fn names(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_load_after_a_forward_alone_forgets_what_that_forward_gathered() {
    let files = folder();
    let nvme = json!({"offload_param": {"device": "nvme", "nvme_path": files.path()}});
    for offload in [json!({}), nvme] {
        let mut zero = zero();
        zero.as_object_mut().unwrap().extend(offload.as_object().unwrap().clone());
        let settings = config(3, 1, zero, json!({}));
        let dir = folder();
        let uninterrupted = run(2, &settings, 6, saves(dir.path(), 3, SaveOptions::default()));
        let rolled_back = std::sync::atomic::AtomicUsize::new(0);
        let reloaded = run(2, &settings, 6, |engine| {
            if engine.global_steps() == 5 && rolled_back.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2 {
                let (ids, targets) = batch(1);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?.unwrap();
                let error = engine.backward(&loss).unwrap_err();
                assert!(matches!(error, Error::Engine(EngineError::OutOfOrder { .. })), "{error}");
            }
            Ok(())
        });
        let reloaded: Vec<Trace> = after(&reloaded, 5);
        assert_eq!(after(&uninterrupted, 3), reloaded, "{offload}");
    }
}

#[test]
fn what_is_no_checkpoint_is_never_replaced() {
    let dir = folder();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    std::fs::write(dir.path().join("data/mine"), "mine").unwrap();
    std::fs::write(dir.path().join("best"), "mine").unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("link")).unwrap();
    let before = names(dir.path());
    on_one_rank(|engine| {
        for tag in ["data", "best", "link"] {
            let error = engine.save_checkpoint(dir.path(), Some(tag), Value::Null).unwrap_err().to_string();
            assert!(
                error.contains(tag) && error.contains("is not a checkpoint") && error.contains("another tag"),
                "{error}"
            );
        }
        Ok(())
    });
    assert_eq!(names(dir.path()), before);
    assert_eq!(std::fs::read_to_string(dir.path().join("data/mine")).unwrap(), "mine");
}

#[test]
fn a_tag_that_is_saved_again_is_replaced() {
    let dir = folder();
    for save_latest in [true, false] {
        let options = SaveOptions { save_latest, ..SaveOptions::default() };
        on_one_rank(|engine| {
            engine.save_checkpoint_with(dir.path(), Some("same"), json!(1), &options)?;
            train(engine)?;
            engine.save_checkpoint_with(dir.path(), Some("same"), json!(2), &options).map(drop)
        });
        let checkpoint = Checkpoint::open(dir.path(), Some("same")).unwrap().unwrap();
        checkpoint.verify(|_| {}).unwrap();
        assert_eq!(checkpoint.manifest().client_state, 2);
        assert_eq!(names(dir.path()), ["latest", "same"]);
    }
}

#[test]
fn latest_is_readable_for_whom_other_new_files_are() {
    use std::os::unix::fs::PermissionsExt;
    let dir = folder();
    on_one_rank(|engine| engine.save_checkpoint(dir.path(), Some("one"), Value::Null));
    std::fs::write(dir.path().join("other"), "").unwrap();
    let mode = |name: &str| dir.path().join(name).metadata().unwrap().permissions().mode();
    assert_eq!(mode("latest"), mode("other"));
}

#[test]
fn a_save_in_the_background_outlives_a_step_that_fails() {
    let dir = folder();
    on_one_rank(|engine| {
        train(engine)?;
        let options = SaveOptions { in_background: true, ..SaveOptions::default() };
        engine.save_checkpoint_with(dir.path(), Some("before"), Value::Null, &options)?;
        // The loss is finite, but its gradients are not: the derivative of the square root at 0 is infinite.
        let error = train_on(engine, |loss| &loss + (&loss - &loss)?.sqrt()?).unwrap_err();
        assert!(matches!(error, Error::Engine(EngineError::NonFiniteGradient { .. })), "{error}");
        Ok(())
    });
    assert_eq!(names(dir.path()), ["before", "latest"]);
    states(dir.path());
}

#[test]
fn two_engines_save_into_one_folder_and_neither_clears_what_the_other_writes() {
    let dir = folder();
    on_one_rank(|first| {
        let options = SaveOptions { in_background: true, ..SaveOptions::default() };
        first.save_checkpoint_with(dir.path(), Some("first"), json!(1), &options)?;
        on_one_rank(|second| {
            let error = second.save_checkpoint(dir.path(), Some("first"), json!(2)).unwrap_err().to_string();
            assert!(error.contains("another save of first is in progress"), "{error}");
            second.save_checkpoint(dir.path(), Some("second"), json!(2))
        });
        first.wait_for_checkpoint()
    });
    assert_eq!(names(dir.path()), ["first", "latest", "second"]);
    for tag in ["first", "second"] {
        Checkpoint::open(dir.path(), Some(tag)).unwrap().unwrap().verify(|_| {}).unwrap();
    }
    // Leftovers of a dead job are removed, even by a job that only checks the folder.
    for saves in [true, false] {
        let leftover = |name: &str| dir.path().join(name);
        std::fs::create_dir(leftover(".candle-zero-saving-dead")).unwrap();
        std::fs::write(leftover(".candle-zero-latest-dead"), "").unwrap();
        std::fs::create_dir(leftover(".candle-zero-writing-abcdef")).unwrap();
        on_one_rank(|engine| match saves {
            true => engine.save_checkpoint(dir.path(), Some("second"), Value::Null).map(drop),
            false => engine.check_save_dir(dir.path()),
        });
        assert_eq!(names(dir.path()), ["first", "latest", "second"]);
    }
}

#[test]
fn a_save_waits_a_moment_for_a_process_that_is_dying_to_let_go_of_the_folder() {
    let dir = folder();
    let leftover = dir.path().join(".candle-zero-saving-again");
    std::fs::create_dir(&leftover).unwrap();
    let locked = std::fs::File::open(&leftover).unwrap();
    rustix::fs::flock(&locked, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let dying = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        drop(locked);
    });
    on_one_rank(|engine| engine.save_checkpoint(dir.path(), Some("again"), Value::Null));
    dying.join().unwrap();
    assert_eq!(names(dir.path()), ["again", "latest"]);
}

#[test]
fn numbers_of_client_state_come_back_bit_for_bit_and_what_would_not_is_an_error() {
    let dir = folder();
    let numbers: Vec<f64> =
        (1..2000u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11) as f64 * 1e-17).collect();
    on_one_rank(|engine| {
        engine.save_checkpoint(dir.path(), Some("numbers"), json!(numbers))?;
        let loaded = engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?.unwrap();
        assert_eq!(loaded.client_state, json!(numbers));
        let deep = (0..500).fold(json!(0), |inner, _| json!([inner]));
        let error = engine.save_checkpoint(dir.path(), Some("deep"), deep).unwrap_err().to_string();
        assert!(error.contains("could not be loaded again"), "{error}");
        Ok(())
    });
    assert_eq!(names(dir.path()), ["latest", "numbers"]);
}

#[test]
fn what_was_just_saved_and_what_latest_names_is_always_kept() {
    let dir = folder();
    let quiet = SaveOptions { save_latest: false, keep: Some(2), ..SaveOptions::default() };
    on_one_rank(|engine| {
        engine.save_checkpoint_with(dir.path(), None, Value::Null, &quiet)?;
        // The file has a final line break, as if an editor had written it.
        std::fs::write(dir.path().join("latest"), "global_step0\n").unwrap();
        for _ in 1..=3 {
            train(engine)?;
            engine.save_checkpoint_with(dir.path(), None, Value::Null, &quiet)?;
        }
        Ok(())
    });
    assert_eq!(names(dir.path()), ["global_step0", "global_step2", "global_step3", "latest"]);
    // An incomplete checkpoint does not count.
    std::fs::remove_file(dir.path().join("global_step3/rank_00000_of_00001.safetensors")).unwrap();
    let train_and_save = |steps: usize| {
        on_one_rank(|engine| {
            (0..steps).try_for_each(|_| train(engine))?;
            engine.save_checkpoint_with(dir.path(), None, Value::Null, &quiet).map(drop)
        });
    };
    train_and_save(1);
    assert_eq!(names(dir.path()), ["global_step0", "global_step1", "global_step2", "global_step3", "latest"]);
    // Nothing is removed if `latest` cannot be read, and the save still succeeds.
    std::fs::write(dir.path().join("latest"), [0xff]).unwrap();
    train_and_save(4);
    let all = ["global_step0", "global_step1", "global_step2", "global_step3", "global_step4", "latest"];
    assert_eq!(names(dir.path()), all);
}

#[test]
fn the_newest_checkpoints_are_kept() {
    let dir = folder();
    let options = SaveOptions { keep: Some(2), ..SaveOptions::default() };
    run(2, &config(1, 1, zero(), json!({})), 5, |engine| {
        let path = engine.save_checkpoint_with(dir.path(), None, Value::Null, &options)?;
        assert_eq!(path, dir.path().join(format!("global_step{}", engine.global_steps())));
        Ok(())
    });
    assert_eq!(names(dir.path()), ["global_step4", "global_step5", "latest"]);
}

#[test]
fn ranks_that_save_under_different_tags_take_rank_0s_or_fail_as_the_config_says() {
    for validation in ["ignore", "Warn", "FAIL"] {
        let dir = folder();
        let settings = config(2, 1, zero(), json!({"checkpoint": {"tag_validation": validation}}));
        run(2, &settings, 0, |engine| {
            let tag = ["first", "the second rank's"][engine.rank()];
            let saved = engine.save_checkpoint(dir.path(), Some(tag), Value::Null);
            if validation == "FAIL" {
                let text = saved.unwrap_err().to_string();
                assert!(text.contains("rank 1 and rank 0 name different tags") && text.contains(tag), "{text}");
            } else {
                assert_eq!(saved?, dir.path().join("first"));
            }
            // The ranks are in step.
            engine.save_checkpoint(dir.path(), Some("both"), Value::Null).map(drop)
        });
        assert_eq!(dir.path().join("first").exists(), validation != "FAIL");
        assert!(!dir.path().join("the second rank's").exists());
        states(dir.path());
    }
}

#[test]
fn a_decoupled_writer_saves_in_the_background() {
    for decoupled in [false, true] {
        let dir = folder();
        let settings = config(1, 1, zero(), json!({"checkpoint": {"writer": {"decoupled": decoupled}}}));
        run(1, &settings, 0, |engine| {
            engine.save_checkpoint(dir.path(), Some("here"), Value::Null)?;
            assert_eq!(dir.path().join("here").exists(), !decoupled);
            engine.wait_for_checkpoint()?;
            assert!(dir.path().join("here").exists());
            Ok(())
        });
    }
}

#[test]
fn save_16bit_model_writes_what_the_model_computes_with_at_every_stage() {
    for more in precisions() {
        for stage in 0..4 {
            let dir = folder();
            let new = dir.path().join("new");
            let seen = run(2, &config(stage, 1, zero(), more.clone()), 2, |engine| match engine.global_steps() {
                2 => engine.save_16bit_model(&new, "model.safetensors"),
                _ => Ok(()),
            });
            let exact = candle_core::safetensors::load_buffer(&seen[0].exported, &Device::Cpu).unwrap();
            let saved = candle_core::safetensors::load(new.join("model.safetensors"), &Device::Cpu).unwrap();
            assert_eq!(exact.len(), saved.len());
            for (name, exact) in exact {
                let values = |t: &candle_core::Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                let dtype = if more.get("bf16").is_some() {
                    DType::BF16
                } else if more.get("fp16").is_some() {
                    DType::F16
                } else {
                    DType::F32
                };
                assert_eq!(saved[&name].dtype(), dtype);
                let rounded = exact.to_dtype(dtype).unwrap();
                assert_eq!(values(&rounded).unwrap(), values(&saved[&name]).unwrap(), "{name}, stage {stage}, {more}");
            }
            // A folder that cannot be created is an error without consequences.
            std::fs::write(dir.path().join("file"), "").unwrap();
            run(2, &config(stage, 1, zero(), more.clone()), 0, |engine| {
                let error = engine.save_16bit_model(dir.path().join("file/below"), "model.safetensors").unwrap_err();
                assert!(matches!(error, Error::Io { .. }), "{error}");
                Ok(())
            });
        }
    }
}
