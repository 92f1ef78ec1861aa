//! Checkpoints of format version 1, written by programs that predate buffers and frozen parameters
//! (tests/fixtures/checkpoints: two linear layers after three steps on two ranks, and their weights after two more).

use crate::support::processes::repository;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder};
use candle_zero::Engine;
use candle_zero::checkpoint::{Checkpoint, LoadOptions};
use candle_zero::comm::threads;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

type Model = (Linear, Linear);

fn build(vb: VarBuilder<'_>) -> candle_core::Result<Model> {
    Ok((candle_nn::linear(3, 5, vb.pp("a"))?, candle_nn::linear(5, 1, vb.pp("b"))?))
}

fn fixture(name: &str) -> PathBuf {
    repository().join("tests/fixtures/checkpoints").join(name)
}

/// Returns the configuration of the programs that wrote these checkpoints, with the given stage.
fn config(fp16: bool, stage: u8) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    });
    if fp16 {
        config["fp16"] = json!({"enabled": true, "initial_scale_power": 8, "loss_scale_window": 3});
    }
    config
}

/// Loads on `world` ranks and trains until step `until` as the older program did; returns the master weights.
fn resume(name: &str, world: usize, stage: u8, until: u64, options: LoadOptions) -> Vec<f32> {
    let fp16 = name == "fp16";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    let ranks = threads::run(world, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).seed(5);
        let mut engine = builder.initialize(build, config(fp16, stage))?;
        let loaded = engine.load_checkpoint(fixture(name), None, &options)?.expect("a checkpoint");
        assert_eq!((loaded.client_state, engine.global_steps()), (json!({"note": "old"}), 3));
        assert_eq!(
            engine.loss_scale(),
            if fp16 && options.load_optimizer_states { 256.0 } else { engine.loss_scale() }
        );
        while engine.global_steps() < until {
            let at = engine.global_steps() as usize * 2 + engine.rank();
            let x = Tensor::from_iter((0..6).map(|i| ((i * 7 + at * 5) % 11) as f32 / 8.0 - 0.5), &Device::Cpu)?;
            let x = x.reshape((2, 3))?.to_dtype(if fp16 { DType::F16 } else { DType::F32 })?;
            let loss =
                engine.forward(|(a, b)| b.forward(&a.forward(&x)?.tanh()?)?.affine(1.0, -1.0)?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        engine.export_safetensors(&file)
    });
    ranks.unwrap().into_iter().for_each(|rank: candle_zero::Result<()>| rank.unwrap());
    weights(&file)
}

fn weights(file: &Path) -> Vec<f32> {
    let mut all: Vec<_> = candle_core::safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all.iter().flat_map(|(_, values)| values.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn checkpoints_of_version_1_are_whole_and_load_at_any_stage_and_number_of_ranks() {
    for name in ["f32", "fp16"] {
        let checkpoint = Checkpoint::open(fixture(name), None).unwrap().unwrap();
        checkpoint.verify(|_| {}).unwrap();
        let manifest = checkpoint.manifest();
        assert_eq!((manifest.world_size, manifest.parameters.len()), (2, 4));
        assert!(manifest.buffers.is_none() && manifest.set_lr.is_none() && manifest.rounding_seed.is_none());
        let mut saved: Vec<(&str, Vec<f32>)> = manifest
            .parameters
            .iter()
            .enumerate()
            .map(|(param, p)| (p.name.as_str(), checkpoint.read(0, param, 0..p.numel()).unwrap()))
            .collect();
        saved.sort_by(|a, b| a.0.cmp(b.0));
        let saved: Vec<f32> = saved.into_iter().flat_map(|(_, values)| values).collect();
        for (world, stage) in [(1, 0), (2, 1), (2, 3), (3, 2)] {
            assert_eq!(
                resume(name, world, stage, 3, LoadOptions::default()),
                saved,
                "{name}, world size {world}, stage {stage}"
            );
        }
    }
}

#[test]
fn a_run_goes_on_from_a_checkpoint_of_version_1_as_the_program_that_wrote_it_did() {
    for (name, tolerance) in [("f32", 1e-6), ("fp16", 2e-4)] {
        let expected = weights(&fixture(name).join("after_5.safetensors"));
        for stage in [1, 2, 3] {
            let distance = max_difference(&resume(name, 2, stage, 5, LoadOptions::default()), &expected);
            assert!(distance < tolerance, "{name}, stage {stage}: {distance}");
        }
        // Without its optimizer states, the run would differ.
        let options = LoadOptions { load_optimizer_states: false, ..LoadOptions::default() };
        let distance = max_difference(&resume(name, 2, 2, 5, options), &expected);
        assert!(distance > 4.0 * tolerance, "{name}: {distance}");
    }
}

#[test]
fn what_is_written_says_that_it_is_of_a_version_that_older_programs_do_not_know() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = threads::run(1, |comm| {
        let mut engine =
            Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config(false, 0))?;
        engine.save_checkpoint(folder.path(), None, Value::Null)
    });
    let path = ranks.unwrap().remove(0).unwrap();
    let manifest: Value = serde_json::from_slice(&std::fs::read(path.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["version"], 2);
    let older = std::fs::read(fixture("f32").join("global_step3/manifest.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&older).unwrap()["version"], 1);
}
