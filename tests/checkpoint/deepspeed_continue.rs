//! Training resumes from DeepSpeed's checkpoints and follows DeepSpeed's own recorded run.

use crate::support::processes::repository;
use crate::support::skips::skipped;
use candle_core::{DType, Device};
use candle_zero::Engine;
use candle_zero::checkpoint::deepspeed::{DeepSpeedCheckpoint, DeepSpeedStateKind};
use candle_zero::checkpoint::{Checkpoint, LoadOptions, import};
use candle_zero::comm::threads;
use candle_zero::data::{BatchPartition, Loader, SampleOrder, TokenData};
use candle_zero::error::{CheckpointError, Error};
use candle_zero::models::{Gpt, GptConfig};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The relative tolerances for the loss and the gradient norm in f32, bf16 and fp16.
const TOLERANCES: [(f64, f64); 3] = [(2e-5, 2e-4), (5e-3, 3e-2), (5e-3, 3e-2)];

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Imports the checkpoint in `folder` into a new folder.
fn import_checkpoint(folder: &Path) -> (tempfile::TempDir, DeepSpeedCheckpoint) {
    let source = DeepSpeedCheckpoint::open(folder.join("checkpoint"), None).unwrap();
    let target = temporary();
    import(&source, target.path(), "imported", |_, _| {}).unwrap();
    (target, source)
}

#[test]
fn an_imported_checkpoint_holds_deepspeeds_state_bit_for_bit() {
    for name in ["zero2_fp16_tiny", "zero3_f32_tiny"] {
        let (target, source) = import_checkpoint(&repository().join("tests/fixtures/deepspeed").join(name));
        let checkpoint = Checkpoint::open(target.path(), None).unwrap().unwrap();
        checkpoint.verify(|_| {}).unwrap();
        let manifest = checkpoint.manifest();
        assert_eq!((manifest.global_steps, manifest.global_samples, manifest.optimizer_steps), (5, 80, 5));
        assert_eq!(manifest.client_state["note"], "hello");
        for (s, state) in [DeepSpeedStateKind::Master, DeepSpeedStateKind::ExpAvg, DeepSpeedStateKind::ExpAvgSq]
            .into_iter()
            .enumerate()
        {
            for (p, parameter) in source.parameters().iter().enumerate() {
                assert_eq!(manifest.parameters[p].name, parameter.name);
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let found = checkpoint.read(s, p, 0..parameter.elements()).unwrap();
                assert!(bits(found) == bits(source.read(state, p).unwrap()), "{} of {name}", parameter.name);
            }
        }
        let error = import(&source, target.path(), "imported", |_, _| {}).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint(CheckpointError::Unusable { .. })), "{error}");
    }
}

/// Checks that training from the checkpoint follows the recorded run within the tolerances.
fn follow(folder: &Path, tokens: &Path) {
    let run: Value = serde_json::from_slice(&std::fs::read(folder.join("trajectory.json")).unwrap()).unwrap();
    let size = |key: &str| run["model"][key].as_u64().unwrap() as usize;
    let model = GptConfig {
        n_layer: size("n_layer"),
        n_head: size("n_head"),
        n_embd: size("n_embd"),
        ctx: size("ctx"),
        vocab: size("vocab"),
        ..GptConfig::preset("nano").unwrap()
    };
    let ds_config = &run["ds_config"];
    let is_on = |section: &str| ds_config[section]["enabled"] == true;
    let (loss_tolerance, norm_tolerance) = TOLERANCES[usize::from(is_on("bf16")) + 2 * usize::from(is_on("fp16"))];
    let (target, _) = import_checkpoint(folder);
    let rows: Vec<&Value> = run["rows"].as_array().unwrap().iter().skip(5).collect();
    let results = threads::run(run["world"].as_u64().unwrap() as usize, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Gpt::new(&model, vb), ds_config.clone())?;
        let loaded = engine.load_checkpoint(target.path(), None, &LoadOptions::default())?.unwrap();
        let shape = BatchPartition::new(&engine.config().batch, engine.world_size(), engine.rank());
        let data = TokenData::open(Some(tokens))?;
        let mut loader = Loader::new(data, SampleOrder::Sequential, shape, model.ctx, model.vocab, &Device::Cpu)?;
        loader.resume(loaded.global_samples);
        let mut measured = vec![];
        for _ in &rows {
            let (lr, scale) = (engine.lr()[0], engine.loss_scale());
            let batch = loader.next().unwrap()?;
            let loss = engine.forward(|gpt| gpt.loss(&batch.inputs, &batch.targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            let local_loss = f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
            let losses = engine.gather_f64(&[local_loss])?;
            let loss = losses.iter().map(|l| l[0]).sum::<f64>() / losses.len() as f64;
            measured.push([loss, lr, scale, engine.global_grad_norm().unwrap()]);
        }
        Ok(measured)
    });
    let measured = results.unwrap().remove(0).unwrap();
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let mut worst = (0f64, 0f64);
    for ([loss, lr, scale, norm], row) in measured.into_iter().zip(&rows) {
        let recorded = |key: &str| row[key].as_f64();
        let relative = |a: f64, key: &str| recorded(key).map_or(0.0, |b| (a - b).abs() / b.abs());
        worst = (worst.0.max(relative(loss, "loss")), worst.1.max(relative(norm, "grad_norm")));
        assert!(relative(lr, "lr") <= 1e-9, "{name}: lr {lr} for {row}");
        assert!(relative(loss, "loss") <= loss_tolerance, "{name}: loss {loss} for {row}");
        assert!(relative(norm, "grad_norm") <= norm_tolerance, "{name}: norm {norm} for {row}");
        if let Some(expected) = recorded("loss_scale") {
            assert_eq!(scale, expected, "{name}: {row}");
        }
    }
    println!("{name}: {} steps, worst relative difference: loss {:.1e}, norm {:.1e}", rows.len(), worst.0, worst.1);
}

#[test]
fn training_goes_on_along_deepspeeds_own_run() {
    let shared = repository().join("../shared");
    let tokens: PathBuf = shared.join("parity/licenses.u16");
    let Ok(folders) = std::fs::read_dir(shared.join("deepspeed_checkpoints")) else {
        return skipped(
            training_goes_on_along_deepspeeds_own_run,
            format_args!("there is no {}/deepspeed_checkpoints", shared.display()),
        );
    };
    for folder in folders.map(|e| e.unwrap().path()).filter(|path| path.is_dir()) {
        follow(&folder, &tokens);
    }
}
