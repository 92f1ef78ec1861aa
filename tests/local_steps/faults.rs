//! Islands that overflow, cannot save, or were saved at different times: nothing hangs, and parts of different saves
//! are not mixed.

use super::{Model, batch, config, engine, on_ranks, train, weights};
use candle_core::{DType, Device, Tensor};
use candle_zero::Engine;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn synchronizing_islands_without_training_changes_nothing() {
    let found = on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&json!({"steps": 2}), 1, 2))?;
        train(&mut engine, 1..=4)?;
        let after_a_window = weights(&mut engine);
        engine.synchronize_islands()?;
        let once = weights(&mut engine);
        engine.synchronize_islands()?;
        Ok([after_a_window, once, weights(&mut engine)])
    });
    assert!(found.iter().flatten().all(|weights| *weights == found[0][0]));
}

#[test]
fn a_run_that_was_synchronized_resumes_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let section = json!({"steps": 4, "fragment_delay": 2});
    let run = |resumes: bool| {
        on_ranks(2, |comm| {
            let mut engine = engine(comm, config(&section, 1, 2))?;
            if resumes {
                engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?.unwrap();
            } else {
                train(&mut engine, 1..=5)?;
                engine.synchronize_islands()?;
                engine.save_checkpoint(dir.path(), None, Value::Null)?;
            }
            train(&mut engine, 6..=7)?;
            Ok(weights(&mut engine))
        })
    };
    assert!(run(false) == run(true));
}

#[test]
fn an_island_that_cannot_save_is_an_error_on_all_ranks_and_training_continues() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("island_1"), "in the way").unwrap();
    let found = on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&json!({"steps": 50}), 1, 2))?;
        train(&mut engine, 1..=1)?;
        let refused = [
            engine.check_save_dir(dir.path()).unwrap_err().to_string(),
            engine.save_checkpoint(dir.path(), None, Value::Null).unwrap_err().to_string(),
        ];
        train(&mut engine, 2..=3)?;
        assert_eq!(engine.gather_f64(&[1.0])?.len(), 2);
        Ok(refused.map(|text| text.replace(&dir.path().display().to_string(), "DIR")))
    });
    insta::assert_snapshot!(found[0].join("\n"), @"
    the checkpoint DIR cannot be used: rank 1 failed; see its error for the cause
    the checkpoint DIR cannot be used: rank 1 failed; see its error for the cause
    ");
    insta::assert_snapshot!(found[1].join("\n"), @"
    the checkpoint DIR/island_1 cannot be used: it is a file, but checkpoints are saved to a folder; give another path
    the checkpoint DIR/island_1 cannot be used: it is a file, but checkpoints are saved to a folder; give another path
    ");
    assert!(!dir.path().join("latest").exists());
    assert_eq!(std::fs::read_to_string(dir.path().join("island_1")).unwrap(), "in the way");
}

/// Trains for 4 steps in fp16 with an overflow on island 0 in step `overflow_step`, and a background save after step 1.
/// Returns whether each step was applied, for each rank.
fn with_overflow(dir: &Path, window: usize, overflow_step: usize, check: bool) -> Vec<Vec<bool>> {
    on_ranks(2, |comm| {
        let rank = comm.rank();
        let mut config = config(&json!({"steps": window}), 1, 2);
        config["fp16"] = json!({"enabled": true, "initial_scale_power": 4});
        config["gradient_check"] = json!(check);
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine: Engine<Model> = builder.initialize(Model::new, config)?;
        let mut applied = Vec::new();
        for step in 1..=4 {
            let (x, y) = batch(step, rank, (0, 1));
            let factor = if rank == 0 && step == overflow_step { 60_000.0 } else { 1.0 };
            let half = |x: Tensor| (x * factor)?.to_dtype(DType::F16);
            let batch = (half(x)?, half(y)?);
            let loss = engine.forward(|model| model.loss(&batch))?;
            engine.backward(&loss)?;
            engine.step()?;
            applied.push(engine.was_step_applied());
            engine.stop_requested()?;
            if step == 1 {
                let options = SaveOptions { in_background: true, ..SaveOptions::default() };
                engine.save_checkpoint_with(dir, None, Value::Null, &options)?;
            }
        }
        engine.wait_for_checkpoint()?;
        Ok(applied)
    })
}

#[test]
fn an_overflow_on_one_island_skips_its_step_only() {
    for (window, overflow_step, check) in [(50, 2, false), (2, 2, false), (50, 1, true), (1, 1, true)] {
        let dir = tempfile::tempdir().unwrap();
        let applied = with_overflow(dir.path(), window, overflow_step, check);
        let expected: Vec<bool> = (1..=4).map(|step| step != overflow_step).collect();
        assert_eq!(applied, [expected, vec![true; 4]], "windows of {window}, overflow in step {overflow_step}");
        assert!(dir.path().join("global_step1").exists() && dir.path().join("island_1/global_step1").exists());
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn checkpoints_of_different_saves_are_not_mixed() {
    let dir = tempfile::tempdir().unwrap();
    let save = |steps: usize| {
        on_ranks(2, |comm| {
            let mut engine = engine(comm, config(&json!({"steps": 3}), 1, 2))?;
            train(&mut engine, 1..=steps)?;
            engine.save_checkpoint(dir.path(), Some("last"), Value::Null).map(drop)
        });
    };
    save(2);
    copy(&dir.path().join("last"), &dir.path().join("kept"));
    save(4);
    // This is the state that a job leaves if it dies before island 0 publishes its checkpoint.
    std::fs::remove_dir_all(dir.path().join("last")).unwrap();
    copy(&dir.path().join("kept"), &dir.path().join("last"));
    let refused = on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&json!({"steps": 3}), 1, 2))?;
        let refused = engine.load_checkpoint(dir.path(), None, &LoadOptions::default()).map(drop).unwrap_err();
        train(&mut engine, 1..=3)?;
        Ok(refused.to_string().replace(&dir.path().display().to_string(), "DIR"))
    });
    insta::assert_snapshot!(refused[0], @"cannot take local steps: checkpoint last in DIR is not complete: the part of rank 1's island is from a different save; load another tag, or remove the island_* folders and start a different number of islands, which all begin with the first island's part");
    assert_eq!(refused[0], refused[1]);
}

#[test]
fn islands_are_equal_after_an_exchange_although_only_weights_were_loaded() {
    for options in [
        LoadOptions { load_module_only: true, ..LoadOptions::default() },
        LoadOptions { load_optimizer_states: false, ..LoadOptions::default() },
    ] {
        let dir = tempfile::tempdir().unwrap();
        let found = on_ranks(2, |comm| {
            let mut engine = engine(comm, config(&json!({"steps": 4}), 1, 2))?;
            train(&mut engine, 1..=6)?;
            engine.save_checkpoint(dir.path(), None, Value::Null)?;
            engine.load_checkpoint(dir.path(), None, &options)?;
            train(&mut engine, 7..=8)?;
            engine.synchronize_islands()?;
            Ok(weights(&mut engine))
        });
        assert!(found[0] == found[1]);
    }
}

#[test]
fn groups_masters_accumulation_and_frozen_parameters_take_local_steps() {
    let run = |stage: usize, more: Value| {
        on_ranks(4, |comm| {
            let mut config = config(&json!({"steps": 2}), stage, 2);
            let (all, zero) = (config.as_object_mut().unwrap(), more["zero"].as_object().cloned().unwrap_or_default());
            all["zero_optimization"].as_object_mut().unwrap().extend(zero);
            all.extend(more["config"].as_object().cloned().unwrap_or_default());
            let builder = Engine::builder()
                .communicator(comm)
                .device(Device::Cpu)
                .initial_values(std::sync::Arc::new(super::Start));
            let mut engine = builder.trainable(|name, _| name != "first.bias").initialize(Model::new, config)?;
            let dtype = engine.dtype();
            let (island, _) = engine.island().unwrap();
            for step in 1..=6 {
                let (x, y) = batch(step, island, (engine.rank() % 2, 2));
                let batch = (x.to_dtype(dtype)?, y.to_dtype(dtype)?);
                let loss = engine.forward(|model| model.loss(&batch))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            engine.synchronize_islands()?;
            Ok(weights(&mut engine))
        })
    };
    for more in [
        json!({}),
        json!({"config": {"bf16": {"enabled": true}}}),
        json!({"config": {"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}}),
        json!({"config": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}}),
    ] {
        let masters_only = more["config"]["bf16"]["bf16_master_weights_and_grads"].is_null();
        let expected = run(1, more.clone());
        assert!(expected.iter().all(|weights| *weights == expected[0]), "{more}");
        assert_ne!(expected[0][0], super::values(super::SIZES[0], 0, 0.4));
        for stage in if masters_only { vec![0, 2, 3] } else { vec![2, 3] } {
            assert!(run(stage, more.clone()) == expected, "{more}, stage {stage}");
        }
        let mut groups = more.clone();
        groups["zero"] = json!({"mics_shard_size": 1});
        assert!(run(3, groups) == expected, "{more}, a copy on each rank");
    }
}
