//! Buffers in checkpoints: saved by rank 0, loaded with a different number of ranks and at a different stage, and
//! checked like parameters.

use crate::support::convnet::{Net, Shape, batch, engine, steps};
use crate::support::tiny::config;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, ConsolidateSettings, LoadOptions, SaveOptions, consolidate};
use candle_zero::comm::threads;
use candle_zero::error::{CheckpointError, Error};
use serde_json::{Value, json};
use std::path::Path;

const SHAPE: Shape = Shape { units: true, checkpointed: false };

fn stage_config(stage: u8) -> Value {
    config(stage, 1, json!({"stage3_param_persistence_threshold": 0}), json!({}))
}

/// Returns an engine's statistics and its output for an image.
fn state(engine: &mut Engine<Net>) -> candle_zero::Result<(Vec<f32>, Vec<f32>)> {
    let (x, _) = batch(77, DType::F32);
    let logits = engine.eval(|net| net.logits(&x))?.flatten_all()?.to_vec1::<f32>()?;
    Ok((engine.model().statistics(), logits))
}

/// Trains on 2 ranks and saves; returns rank 0's state.
fn train_and_save(dir: &Path, stage: u8, options: &SaveOptions) -> (Vec<f32>, Vec<f32>) {
    let states = threads::run(2, |comm| {
        let mut engine = engine(comm, SHAPE, &stage_config(stage), |builder| builder)?;
        steps(&mut engine, 0, 3)?;
        engine.save_checkpoint_with(dir, Some("three"), Value::Null, options)?;
        let state = state(&mut engine)?;
        if options.in_background {
            // Changes the buffers while the save may still be writing them.
            let batch = batch(5, DType::F32);
            engine.forward(|net| net.loss(&batch))?;
            engine.wait_for_checkpoint()?;
        }
        Ok::<_, Error>(state)
    });
    states.unwrap().remove(0).unwrap()
}

#[test]
fn running_statistics_survive_saving_and_loading_at_another_world_size_and_stage() {
    for (stage, in_background) in [(0, false), (3, false), (2, true)] {
        let folder = tempfile::tempdir().unwrap();
        let before = train_and_save(folder.path(), stage, &SaveOptions { in_background, ..SaveOptions::default() });
        assert!(before.0.iter().any(|value| *value != 0.0 && *value != 1.0));
        for (world, stage) in [(1, 3), (2, 1), (3, 0), (3, 3)] {
            let loaded = threads::run(world, |comm| {
                let mut engine = engine(comm, SHAPE, &stage_config(stage), |builder| builder)?;
                engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?.unwrap();
                state(&mut engine)
            });
            for (rank, state) in loaded.unwrap().into_iter().enumerate() {
                assert_eq!(state.unwrap(), before, "rank {rank} of {world}, stage {stage}");
            }
        }
    }
}

#[test]
fn a_run_that_goes_on_after_loading_has_the_bits_of_one_that_never_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let all = threads::run(2, |comm| {
        let mut engine = engine(comm, SHAPE, &stage_config(2), |builder| builder)?;
        steps(&mut engine, 0, 2)?;
        engine.save_checkpoint(folder.path(), None, Value::Null)?;
        steps(&mut engine, 2, 2)
    });
    let resumed = threads::run(2, |comm| {
        let mut engine = engine(comm, SHAPE, &stage_config(2), |builder| builder)?;
        engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?;
        steps(&mut engine, 2, 2)
    });
    let outcomes = |ranks: Vec<candle_zero::Result<_>>| ranks.into_iter().map(|rank| rank.unwrap()).collect::<Vec<_>>();
    assert_eq!(outcomes(resumed.unwrap()), outcomes(all.unwrap()));
}

#[test]
fn a_consolidated_checkpoint_has_buffers_in_their_own_type_and_one_can_begin_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let before = train_and_save(folder.path(), 1, &SaveOptions::default());
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap().unwrap();
    let (out, settings) = (folder.path().join("out"), ConsolidateSettings::default());
    let mut reported = 0;
    let done = consolidate(&checkpoint, &out, &settings, &mut |bytes| reported = bytes).unwrap();
    assert_eq!((done.bytes, reported), (settings.bytes(&checkpoint), settings.bytes(&checkpoint)));
    let file = out.join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    assert_eq!(tensors.keys().filter(|name| name.contains(".running_")).count(), 6);
    let initialized = threads::run(1, |comm| {
        let mut engine = engine(comm, SHAPE, &stage_config(3), |builder| builder.init_from(&file))?;
        state(&mut engine)
    });
    assert_eq!(initialized.unwrap().remove(0).unwrap(), before);
}

#[test]
fn a_damaged_or_missing_file_of_buffers_is_found_before_anything_changes() {
    let folder = tempfile::tempdir().unwrap();
    train_and_save(folder.path(), 1, &SaveOptions::default());
    let file = folder.path().join("three/buffers.safetensors");
    let mut damaged = std::fs::read(&file).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    for bytes in [Some(damaged), None] {
        match bytes {
            Some(bytes) => std::fs::write(&file, bytes).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        let results = threads::run(2, |comm| {
            let mut engine = engine(comm, SHAPE, &stage_config(1), |builder| builder)?;
            let before = state(&mut engine)?;
            let error = engine.load_checkpoint(folder.path(), None, &LoadOptions::default()).unwrap_err();
            assert_eq!(state(&mut engine)?, before);
            // The engine can continue.
            steps(&mut engine, 0, 1)?;
            Ok::<_, Error>(error)
        });
        for error in results.unwrap() {
            let error = error.unwrap();
            let is_named = matches!(&error, Error::Checkpoint(CheckpointError::Unusable { path, .. }) if *path == file);
            assert!(is_named, "{error}");
        }
    }
}

/// Returns a function that builds a model with one weight and a buffer of ids.
fn with_ids(len: usize, dtype: DType) -> impl Fn(VarBuilder<'_>) -> candle_core::Result<(Tensor, Var)> {
    move |vb| {
        let ids = vb.get_with_hints_dtype(len, "position_ids", Init::Const(7.0), dtype)?;
        Ok((vb.get(2, "weight")?, Var::from_tensor(&ids)?))
    }
}

#[test]
fn a_buffer_of_another_shape_or_kind_or_none_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let run = |len, dtype, load: Option<LoadOptions>| {
        let results = threads::run(1, |comm| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(with_ids(len, dtype), stage_config(0))?;
            match load {
                Some(options) => drop(engine.load_checkpoint(folder.path(), None, &options)?),
                None => drop(engine.save_checkpoint(folder.path(), None, Value::Null)?),
            }
            Ok::<_, Error>(engine.model().1.to_dtype(DType::F64)?.to_vec1::<f64>()?)
        });
        results.unwrap().remove(0)
    };
    run(3, DType::I64, None).unwrap();
    let strict = Some(LoadOptions::default());
    // Values are converted to another integer type that can represent them.
    assert_eq!(run(3, DType::U8, strict).unwrap(), [7.0; 3]);
    for error in [run(4, DType::I64, strict).unwrap_err(), run(3, DType::F64, strict).unwrap_err()] {
        assert!(error.to_string().contains("buffer position_ids"), "{error}");
    }
    let load_without_buffer = |options| {
        let results = threads::run(1, |comm| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| vb.get(2, "weight"), stage_config(0))?;
            engine.load_checkpoint(folder.path(), None, &options).map(drop)
        });
        results.unwrap().remove(0)
    };
    let error = load_without_buffer(LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("the model lacks the buffer position_ids"), "{error}");
    load_without_buffer(LoadOptions { load_module_strict: false, ..LoadOptions::default() }).unwrap();
}

#[test]
fn buffers_that_say_nothing_may_be_missing_in_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let run = |names: &[&str], shape: (usize, usize, usize, usize), load: bool| {
        let results = threads::run(1, |comm| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu).buffers(|name, _| name != "weight");
            let build = |vb: VarBuilder<'_>| {
                names.iter().try_for_each(|name| vb.get(shape, name).map(drop))?;
                vb.get(2, "weight")
            };
            let mut engine = builder.initialize(build, stage_config(0))?;
            match load {
                true => engine.load_checkpoint(folder.path(), None, &LoadOptions::default()).map(drop),
                false => engine.save_checkpoint(folder.path(), None, Value::Null).map(drop),
            }
        });
        results.unwrap().remove(0)
    };
    let needless = ["bn.num_batches_tracked", "h.0.attn.bias", "h.0.attn.masked_bias", "l.rotary_emb.inv_freq"];
    run(&needless, (1, 1, 2, 2), false).unwrap();
    run(&[], (1, 1, 2, 2), true).unwrap();
    // A bias with this name that is not square is not a mask.
    run(&["h.0.attn.bias"], (1, 1, 2, 3), false).unwrap();
    let error = run(&[], (1, 1, 2, 3), true).unwrap_err();
    assert!(error.to_string().contains("the model lacks the buffer h.0.attn.bias"), "{error}");
}
