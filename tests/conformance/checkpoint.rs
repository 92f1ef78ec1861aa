//! Recorded behaviour of DeepSpeed's checkpoints (tags, resuming, and loading with a different number of ranks) and of
//! its coalesced reductions.

use crate::support::recorded::is_left_out;
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::Device;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::comm::{Communicator, threads};
use candle_zero::layout::{shard_len, shard_range};
use candle_zero::precision::Flat;
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The number of steps after which the recorded checkpoints were saved.
const SAVED_AT: u64 = 3;

/// Returns the cases whose id starts with `id` and that are not left out.
fn cases(id: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(include_str!("../fixtures/conformance_checkpoint.json")).unwrap();
    let cases: Vec<_> =
        all.into_iter().filter(|case| case["id"].as_str().unwrap().starts_with(id) && !is_left_out(case)).collect();
    assert!(!cases.is_empty(), "no cases {id}");
    cases
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// Returns the configuration of a case. A step has 4 samples for any number of ranks.
fn case_config(input: &Value, world: usize) -> Value {
    let precision = match input["precision"].as_str().unwrap_or("fp32") {
        "fp32" => json!({}),
        "fp16" => json!({"fp16": {"enabled": true, "initial_scale_power": 8}}),
        "bf16" => json!({"bf16": {"enabled": true}}),
        "bf16acc32" => json!({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}),
        other => panic!("no such precision here: {other}"),
    };
    let mut config = config(number(&input["stage"]) as u8, 1, json!({}), precision);
    config["train_micro_batch_size_per_gpu"] = json!(4 / world);
    config["checkpoint"] = json!({"tag_validation": input["tag_validation"].as_str().unwrap_or("Warn")});
    config
}

fn on_ranks<T: Send>(world: usize, config: &Value, work: impl Fn(&mut Engine<Tiny>) -> Result<T> + Sync) -> Vec<T> {
    let shape = Shape { units: true, checkpointed: false, layers: 1 };
    let ranks = threads::run(world, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        work(&mut builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?)
    });
    ranks.unwrap().into_iter().map(Result::unwrap).collect()
}

/// Trains for `count` steps, and returns the bits of the losses.
fn steps(engine: &mut Engine<Tiny>, count: u64) -> Result<Vec<u32>> {
    let (rank, world) = (engine.rank(), engine.world_size());
    (0..count)
        .map(|_| {
            let (ids, targets) = batch(engine.global_steps() as usize * world + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            Ok(loss.to_dtype(candle_core::DType::F32)?.to_scalar::<f32>()?.to_bits())
        })
        .collect()
}

/// Trains until [`SAVED_AT`] and saves under the default tag.
fn save(dir: &Path, world: usize, config: &Value, client_state: &Value) {
    on_ranks(world, config, |engine| {
        steps(engine, SAVED_AT)?;
        engine.save_checkpoint(dir, None, client_state.clone())
    });
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn tags_and_latest_are_as_recorded() {
    for case in cases("ckrun-files") {
        let (dir, world) = (folder(), number(&case["input"]["world_size"]));
        on_ranks(world, &case_config(&case["input"], world), |engine| {
            steps(engine, SAVED_AT)?;
            engine.save_checkpoint(dir.path(), None, json!({}))?;
            let without_latest = SaveOptions { save_latest: false, ..SaveOptions::default() };
            engine.save_checkpoint_with(dir.path(), Some("foo"), json!({}), &without_latest)
        });
        let entries = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        // The content of a tag's folder differs between libraries.
        let recorded = case["expect"]["files"].as_array().unwrap().iter().map(|f| f.as_str().unwrap());
        let recorded = recorded.filter(|f| !f.ends_with(".py")).map(|f| f.split('/').next().unwrap().to_string());
        let entries: BTreeSet<_> = entries.filter(|name| !name.starts_with('.')).collect();
        assert_eq!(entries, recorded.collect::<BTreeSet<_>>(), "{}", case["id"]);
        let latest = std::fs::read_to_string(dir.path().join("latest")).unwrap();
        assert_eq!(latest, case["expect"]["latest_text"].as_str().unwrap(), "{}", case["id"]);
    }
    for case in cases("ckptfiles") {
        let (dir, world) = (folder(), number(&case["input"]["world_size"]));
        on_ranks(world, &case_config(&case["input"], world), |engine| {
            steps(engine, case["input"]["global_steps"].as_u64().unwrap())?;
            engine.save_checkpoint(dir.path(), None, json!({}))
        });
        let latest = std::fs::read_to_string(dir.path().join("latest")).unwrap();
        assert!(dir.path().join(case["expect"]["tag"].as_str().unwrap()).is_dir(), "{}", case["id"]);
        assert_eq!(latest, case["expect"]["latest"].as_str().unwrap(), "{}", case["id"]);
    }
}

#[test]
fn a_folder_without_latest_is_no_error_and_an_unknown_tag_is_one() {
    for case in cases("ckrun-missing") {
        let dir = folder();
        on_ranks(2, &case_config(&case["input"], 2), |engine| {
            assert_eq!(engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?, None, "{}", case["id"]);
            Ok(())
        });
    }
    for case in cases("ckrun-badtag") {
        let (dir, config) = (folder(), case_config(&case["input"], 2));
        save(dir.path(), 2, &config, &json!({}));
        on_ranks(2, &config, |engine| {
            let error = engine.load_checkpoint(dir.path(), case["input"]["tag"].as_str(), &LoadOptions::default());
            let error = error.unwrap_err().to_string();
            assert!(error.contains("nosuch") && error.contains("global_step3"), "{}: {error}", case["id"]);
            Ok(())
        });
    }
}

#[test]
fn resuming_gives_the_same_losses_and_counters() {
    for case in cases("ckrun-resume") {
        let (input, expect) = (&case["input"], &case["expect"]);
        let (dir, world) = (folder(), number(&input["world_size"]));
        let config = case_config(input, world);
        let uninterrupted = on_ranks(world, &config, |engine| {
            steps(engine, SAVED_AT)?;
            engine.save_checkpoint(dir.path(), None, input["client_state"].clone())?;
            steps(engine, SAVED_AT)
        });
        let resumed = on_ranks(world, &config, |engine| {
            let loaded = engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?.unwrap();
            assert_eq!(loaded.client_state, expect["client_state_back"]);
            let counters = json!({
                "global_steps": engine.global_steps(), "global_samples": engine.global_samples(),
                "skipped_steps": engine.skipped_steps(), "micro_steps": engine.micro_steps(),
            });
            for (name, value) in counters.as_object().unwrap() {
                // In candle-zero, the count of micro steps continues, because it determines dropout masks; DeepSpeed
                // restarts the count in every process.
                let recorded = if name == "micro_steps" { &json!(SAVED_AT) } else { &expect[name] };
                assert_eq!(value, recorded, "{name} of {}", case["id"]);
            }
            let tag = Path::new(expect["returned_path"].as_str().unwrap()).parent().unwrap();
            assert_eq!(loaded.path, dir.path().join(tag));
            steps(engine, SAVED_AT)
        });
        assert_eq!(uninterrupted, resumed, "{}", case["id"]);
    }
}

#[test]
fn what_is_loaded_at_another_number_of_ranks_is_as_recorded() {
    for case in cases("ckrun-resize").into_iter().chain(cases("ckpt-resize")) {
        let (input, dir) = (&case["input"], folder());
        let (saved, loaded) = (number(&input["saved_world_size"]), number(&input["loaded_world_size"]));
        let states = input["load_optimizer_states"] != false && input["mode"] != "load_optimizer_states=false";
        let options = LoadOptions {
            load_optimizer_states: states,
            load_module_only: input["mode"] == "load_module_only=true",
            ..LoadOptions::default()
        };
        save(dir.path(), saved, &case_config(input, saved), &json!({}));
        on_ranks(loaded, &case_config(input, loaded), |engine| {
            assert!(engine.load_checkpoint(dir.path(), None, &options)?.is_some());
            let after = case["expect"]["global_steps_after"].as_u64().unwrap_or(SAVED_AT);
            assert_eq!(engine.global_steps(), after, "{}", case["id"]);
            Ok(())
        });
    }
}

#[test]
fn the_same_tag_on_all_ranks_is_valid_and_no_folder_is_not() {
    for case in cases("ckpt-tag") {
        let input = json!({"stage": 2, "tag_validation": case["input"]["tag_validation"]});
        save(folder().path(), 2, &case_config(&input, 2), &json!({}));
    }
    for case in cases("savedir") {
        let input = json!({"stage": 1});
        on_ranks(1, &case_config(&input, 1), |engine| {
            let dir = case["input"]["save_dir"].as_str().unwrap();
            assert!(engine.save_checkpoint(dir, None, json!({})).is_err(), "{}", case["id"]);
            Ok(())
        });
    }
}

// ---- collective ------------------------------------------------------------------------------------------------

/// Returns this rank's shard of the mean over ranks of `value`, without padding.
fn reduced_mean(comm: &Arc<dyn Communicator>, value: &[f32]) -> Result<Vec<f32>> {
    let (world, rank) = (comm.size(), comm.rank());
    let mut padded = value.to_vec();
    padded.resize(shard_len(value.len(), world) * world, 0.0);
    let sum = comm.reduce_scatter(Flat::F32(padded), 0).wait()?;
    let Flat::F32(sum) = sum else { panic!("f32 stays f32") };
    Ok(sum[..shard_range(value.len(), world, rank).len()].iter().map(|v| v / world as f32).collect())
}

#[test]
fn shares_of_a_reduction_are_as_recorded() {
    for case in cases("rsc-") {
        let inputs = case["input"]["inputs"].as_array().unwrap();
        let ranks = threads::run(number(&case["input"]["world_size"]), |comm| {
            let values = |input: &Value| -> Vec<f32> {
                let factor = if input["value"] == "0" { 0.0 } else { comm.rank() as f32 };
                let start: usize = match input["value"].as_str().unwrap() {
                    "rank*arange(6,9)" => 6,
                    "rank*arange(0,6)" | "0" => 0,
                    other => panic!("no such input here: {other}"),
                };
                (start..start + number(&input["shape"][0])).map(|i| factor * i as f32).collect()
            };
            inputs.iter().map(|input| reduced_mean(&comm, &values(input))).collect::<Result<Vec<_>>>()
        });
        for (rank, outputs) in ranks.unwrap().into_iter().enumerate() {
            let recorded: Vec<Vec<f32>> =
                serde_json::from_value(case["expect"][format!("outputs_rank{rank}")].clone()).unwrap();
            assert_eq!(outputs.unwrap(), recorded, "{}", case["id"]);
        }
    }
    for case in cases("qr-") {
        let shape: Vec<usize> = serde_json::from_value(case["input"]["shape"].clone()).unwrap();
        let (numel, world) = (shape.iter().product(), number(&case["input"]["world_size"]));
        let lens: Vec<_> = (0..world).map(|rank| shard_range(numel, world, rank).len()).collect();
        assert_eq!(json!(lens), case["expect"]["output_numel"], "{}", case["id"]);
    }
}
