//! Recorded training runs of DeepSpeed 0.19.8 are followed step by step.
//!
//! Initial weights and tokens are generated (tests/support/synth.rs); the tolerances are those in the README of the
//! recordings.

use crate::support::{device, synth};
use candle_core::Tensor;
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::models::{Gpt, GptConfig};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::path::Path;

/// The relative tolerances of loss and gradient norm.
const F32: (f64, f64) = (2e-5, 2e-4);
const BF16: (f64, f64) = (5e-3, 3e-2);
const LR: f64 = 1e-9;

pub fn write_weights(path: &Path) {
    let weights = synth::weights(synth::NANO);
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let stored: Vec<_> = weights.iter().map(|(name, shape, values)| (name, shape, bytes(values))).collect();
    let views = stored.iter().map(|(n, s, b)| (*n, TensorView::new(Dtype::F32, s.to_vec(), b).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn follow(name: &str, json: &str, (loss_tolerance, norm_tolerance): (f64, f64)) {
    let run: Value = serde_json::from_str(json).unwrap();
    let number = |key: &str| run[key].as_u64().unwrap() as usize;
    let (world, micro, gas) = (number("world"), number("micro"), number("gas"));
    let rows = run["rows"].as_array().unwrap();
    // The folder is on a disk, as required by runs with offload.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let init = folder.path().join("init.safetensors");
    write_weights(&init);
    let tokens = synth::tokens();
    let config = GptConfig::preset("nano").unwrap();
    let ctx = config.ctx;
    let mut ds_config = run["ds_config"].clone();
    let mut in_files = false;
    for section in ["offload_optimizer", "offload_param"] {
        if let Some(path) = ds_config["zero_optimization"].get_mut(section).and_then(|s| s.get_mut("nvme_path")) {
            *path = folder.path().to_str().unwrap().into();
            in_files = true;
        }
    }
    let results = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(device::of_rank(rank)?).init_from(&init);
        let mut engine = builder.initialize(|vb| Gpt::new(&config, vb), ds_config.clone())?;
        let mut measured = vec![];
        for step in 0..rows.len() {
            let lr = engine.lr()[0];
            let mut loss_sum = 0.0;
            for acc in 0..gas {
                let first = step * micro * gas * world + acc * micro * world + rank * micro;
                let (inputs, targets) = synth::samples(&tokens, ctx, first, micro);
                let tensor = |ids| Tensor::from_vec(ids, (micro, ctx), engine.device()).unwrap();
                let (inputs, targets) = (tensor(inputs), tensor(targets));
                let loss = engine.forward(|gpt| gpt.loss(&inputs, &targets))?;
                loss_sum += f64::from(loss.to_scalar::<f32>()?);
                engine.backward(&loss)?;
                engine.step()?;
            }
            let losses = engine.gather_f64(&[loss_sum / gas as f64])?;
            let loss = losses.iter().map(|l| l[0]).sum::<f64>() / world as f64;
            measured.push((loss, lr, engine.global_grad_norm().unwrap()));
        }
        let files = engine.offload_report();
        assert_eq!(files.bytes_read > 0 && files.bytes_written > 0, in_files, "{files}");
        Ok(measured)
    });
    let measured = results.unwrap().remove(0).unwrap();
    let (mut worst_loss, mut worst_norm) = (0f64, 0f64);
    for (step, ((loss, lr, norm), row)) in measured.iter().zip(rows).enumerate() {
        let recorded = |key: &str| row[key].as_f64();
        let relative = |a: f64, b: f64| (a - b).abs() / b.abs();
        let expected = recorded("loss").unwrap();
        worst_loss = worst_loss.max(relative(*loss, expected));
        assert!(relative(*loss, expected) <= loss_tolerance, "{name}, step {step}: loss {loss}, recorded {expected}");
        let expected = recorded("lr").unwrap();
        assert!((lr - expected).abs() <= LR * expected.abs(), "{name}, step {step}: lr {lr}, recorded {expected}");
        if let Some(expected) = recorded("grad_norm") {
            worst_norm = worst_norm.max(relative(*norm, expected));
            let within = relative(*norm, expected) <= norm_tolerance;
            assert!(within, "{name}, step {step}: gradient norm {norm}, recorded {expected}");
        }
    }
    println!("{name}: {} steps, worst relative difference: loss {worst_loss:.1e}, norm {worst_norm:.1e}", rows.len());
}

macro_rules! trajectories {
    ($($name:ident: $tolerance:expr;)*) => {
        $(#[test]
        fn $name() {
            let json = include_str!(concat!("../fixtures/trajectories/", stringify!($name), ".json"));
            follow(stringify!($name), json, $tolerance);
        })*
    };
}

trajectories! {
    s0_f32_w1_g1: F32;
    s0_f32_w2_g1_noclip_nosched: F32;
    s1_f32_w2_g1: F32;
    s2_f32_w2_g1_sgd: F32;
    s2_f32_w2_g4: F32;
    s3_f32_w2_g2_adaml2_cosine_clip03: F32;
    s2_bf16_w2_g1: BF16;
    s3_bf16_w1_g2: BF16;
    s2_f32_w2_g1_offload_cpu: F32;
    s3_f32_w2_g2_nvme_all: F32;
}
