//! Parameters that stay in f32 in a 16-bit model: the same bits at every stage and wherever states are stored,
//! and no master weights.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::error::{Error, ParamError};
use candle_zero::memory::MemoryKind;
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::optim::ParameterGroup;
use candle_zero::zero::{Unit, unit};
use serde_json::{Value, json};
use std::path::Path;

/// A layer that multiplies 16-bit activations by a scale in f32.
struct Scaled {
    linear: Linear,
    scale: Tensor,
}

impl Module for Scaled {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(x)?.to_dtype(DType::F32)?.broadcast_mul(&self.scale.to_dtype(DType::F32)?)?;
        y.tanh()?.to_dtype(x.dtype())
    }
}

fn build(vb: VarBuilder<'_>) -> Result<Vec<Unit<Scaled>>> {
    let layer = |i: usize| {
        unit(vb.pp(i), |vb| {
            let scale = vb.get_with_hints(7, "scale", candle_nn::Init::Const(1.0))?;
            Ok(Scaled { linear: linear(7, 7, vb)?, scale })
        })
    };
    (0..3).map(layer).collect()
}

fn config(stage: u8, nvme: Option<&Path>, precision: &str) -> Value {
    let mut zero = json!({"stage": stage, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 8});
    if let Some(folder) = nvme {
        zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder});
        zero["offload_param"] = json!({"device": "nvme", "nvme_path": folder});
    }
    json!({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        precision: {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": zero})
}

type Run = (Vec<u32>, Vec<u8>, [usize; 2]);

fn train(world: usize, config: &Value, keeps: bool) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let groups = if keeps { vec![ParameterGroup::new().names(["*.scale"]).keep_f32()] } else { vec![] };
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).parameter_groups(groups);
        let mut engine = builder.initialize(build, config.clone())?;
        let kept = engine.model()[0].inner().scale.dtype();
        assert_eq!(kept, if keeps { DType::F32 } else { engine.dtype() });
        let mut losses = vec![];
        for micro in 0..8 {
            let value = |i: usize| ((i * 5 + micro * 11 + rank * 3) % 13) as f32 / 6.0 - 1.0;
            let x = Tensor::from_iter((0..14).map(value), &Device::Cpu)?.reshape((2, 7))?.to_dtype(engine.dtype())?;
            let loss = engine.forward(|layers| {
                let y = layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))?;
                y.to_dtype(DType::F32)?.sqr()?.mean_all()
            })?;
            losses.push(loss.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            engine.step()?;
        }
        let report = engine.memory_report();
        for kind in [MemoryKind::Parameters, MemoryKind::MasterWeights, MemoryKind::Moments] {
            let row = report.row(kind);
            let held = row.bytes.held + row.file.held;
            if config["zero_optimization"]["offload_param"].is_null() {
                assert_eq!(held as f64, row.formula.unwrap() + row.padding, "{}: {report}", kind.name());
            }
        }
        engine.export_safetensors(&file)?;
        let held = |kind| report.row(kind).formula.unwrap() as usize;
        Ok((losses, [held(MemoryKind::Parameters), held(MemoryKind::MasterWeights)]))
    });
    let (losses, held) = ranks.unwrap().into_iter().map(candle_zero::Result::unwrap).next().unwrap();
    (losses, std::fs::read(&file).unwrap(), held)
}

#[test]
fn parameters_kept_in_f32_give_the_same_bits_at_every_stage_and_place() {
    let folder = tempfile::tempdir().unwrap();
    for precision in ["bf16", "fp16"] {
        for world in [1, 3] {
            let reference = train(world, &config(0, None, precision), true);
            for stage in 1..4 {
                let run = train(world, &config(stage, None, precision), true);
                assert!((&run.0, &run.1) == (&reference.0, &reference.1), "{precision}, stage {stage}, world {world}");
            }
            let nvme = train(world, &config(3, Some(folder.path()), precision), true);
            assert!((nvme.0, nvme.1) == (reference.0, reference.1), "{precision}, nvme, world {world}");
        }
    }
}

#[test]
fn a_parameter_kept_in_f32_has_four_bytes_and_no_master_weights() {
    let (kept, all) = (train(1, &config(0, None, "bf16"), true).2, train(1, &config(0, None, "bf16"), false).2);
    let scales = 3 * 7;
    assert_eq!(kept[0], all[0] + 2 * scales, "parameters");
    assert_eq!(kept[1], all[1] - 4 * scales, "master weights");
}

/// Returns the configuration of a small GPT-2 with a width of 16 and two blocks.
fn gpt() -> GptConfig {
    GptConfig { vocab: 31, ctx: 8, n_embd: 16, n_layer: 2, n_head: 2, ..GptConfig::preset("nano").unwrap() }
}

/// Norms, one linear layer of each block, and the token embedding, which is also the output projection.
const KEPT: [&str; 3] = ["ln_*", "mlp.c_fc", "wte"];

fn is_kept(name: &str) -> bool {
    name.contains("ln_") || name.contains("mlp.c_fc") || name.starts_with("wte")
}

fn with_modules(mut config: Value, modules: Value) -> Value {
    config["data_types"] = json!({"keep_in_fp32_modules": modules});
    config
}

fn train_gpt(engine: &mut Engine<Gpt>, micro_steps: std::ops::Range<u32>, rank: u32) -> candle_zero::Result<Vec<u32>> {
    let mut losses = vec![];
    for micro in micro_steps {
        let id = |i: u32| (i * 7 + micro * 5 + rank * 3) % 31;
        let ids = Tensor::from_iter((0..8).map(id), &Device::Cpu)?.reshape((1, 8))?;
        let targets = Tensor::from_iter((1..9).map(id), &Device::Cpu)?.reshape((1, 8))?;
        let loss = engine.forward(|model| model.loss(&ids, &targets))?;
        losses.push(loss.to_scalar::<f32>()?.to_bits());
        engine.backward(&loss)?;
        engine.step()?;
    }
    Ok(losses)
}

#[test]
fn modules_that_the_file_keeps_in_f32_give_the_same_bits_at_every_stage() {
    let run = |config: &Value| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        let ranks = threads::run(2, |comm| {
            let rank = comm.rank() as u32;
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Gpt::new(&gpt(), vb), config.clone())?;
            let losses = train_gpt(&mut engine, 0..8, rank)?;
            let report = engine.memory_report();
            engine.export_safetensors(&file)?;
            let rows = [MemoryKind::Parameters, MemoryKind::MasterWeights].map(|kind| {
                let row = report.row(kind);
                assert_eq!(row.bytes.held as f64, row.formula.unwrap() + row.padding, "{}: {report}", kind.name());
                row.formula.unwrap() as usize
            });
            Ok((losses, rows))
        });
        let ranks = ranks.unwrap().into_iter().map(candle_zero::Result::unwrap).collect::<Vec<_>>();
        (ranks.iter().map(|rank| rank.0.clone()).collect::<Vec<_>>(), std::fs::read(&file).unwrap(), ranks[0].1)
    };
    let tensors = |file: &[u8]| {
        let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
        let all = tensors.tensors().into_iter();
        all.map(|(name, t)| (name, t.shape().iter().product::<usize>())).collect::<Vec<_>>()
    };
    for precision in ["bf16", "fp16"] {
        let reference = run(&with_modules(config(0, None, precision), json!(KEPT)));
        for stage in 1..4 {
            let other = run(&with_modules(config(stage, None, precision), json!(KEPT)));
            assert!((&other.0, &other.1) == (&reference.0, &reference.1), "{precision}, stage {stage}");
        }
        let sizes = tensors(&reference.1);
        let elements =
            |kept: bool| sizes.iter().filter(|(name, _)| is_kept(name) == kept).map(|(_, numel)| numel).sum::<usize>();
        let (kept, others) = (elements(true), elements(false));
        assert!(kept > 2000 && others > 2000, "{sizes:?}");
        // Elements that are kept in f32 take four bytes and have no master weights; the others take two, and four in
        // master weights.
        assert_eq!(reference.2, [4 * kept + 2 * others, 4 * others], "{precision}");
        let auto = run(&with_modules(config(0, None, precision), json!("auto")));
        assert_eq!(auto.2, [2 * (kept + others), 4 * (kept + others)], "{precision}");
        assert_ne!(auto.0, reference.0, "{precision}: more digits give different losses");
    }
}

#[test]
fn a_checkpoint_with_modules_in_f32_goes_on_at_another_stage_and_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let values = |engine: &mut Engine<Gpt>| -> candle_zero::Result<Vec<u32>> {
        let mut bits = vec![];
        for name in ["wte.weight", "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.weight"] {
            let values = engine.safe_get_full_fp32_param(name)?.flatten_all()?.to_vec1::<f32>()?;
            bits.extend(values.into_iter().map(f32::to_bits));
        }
        Ok(bits)
    };
    let make = |stage: u8, modules: Value| with_modules(config(stage, None, "bf16"), modules);
    let saved = threads::run(2, |comm| {
        let rank = comm.rank() as u32;
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Gpt::new(&gpt(), vb), make(3, json!(KEPT)))?;
        train_gpt(&mut engine, 0..4, rank)?;
        engine.save_checkpoint(path, Some("a"), json!({}))?;
        values(&mut engine)
    });
    let saved = saved.unwrap().into_iter().map(candle_zero::Result::unwrap).next().unwrap();
    // The values are the same even if the new run keeps nothing in f32, because master weights have full precision.
    for (stage, modules) in [(0, json!(KEPT)), (2, json!(KEPT)), (1, json!("auto"))] {
        let mut engine = Engine::builder()
            .device(Device::Cpu)
            .initialize(|vb| Gpt::new(&gpt(), vb), make(stage, modules.clone()))
            .unwrap();
        engine.load_checkpoint(path, Some("a"), &LoadOptions::default()).unwrap();
        assert!(values(&mut engine).unwrap() == saved, "stage {stage}, {modules}");
        train_gpt(&mut engine, 4..6, 0).unwrap();
    }
}

#[test]
fn a_buffer_of_a_kept_module_is_f32_and_a_model_built_for_evaluation_computes_the_same() {
    type Model = (candle_zero::nn::Linear, Tensor);
    let make = |modules: Value| {
        let build = |vb: VarBuilder<'_>| {
            let scale = vb.get_with_hints(3, "head.inv_freq", candle_nn::Init::Const(0.3))?;
            Ok((candle_zero::nn::Linear::new(4, 3, vb.pp("head"))?, scale))
        };
        let config = with_modules(config(3, None, "bf16"), modules);
        let mut engine = Engine::builder().device(Device::Cpu).initialize(build, config).unwrap();
        let (linear, scale) = engine.model();
        let dtypes = [linear.weight().dtype(), scale.dtype()];
        let x =
            Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((2, 4)).unwrap().to_dtype(DType::BF16).unwrap();
        let run = |(linear, scale): &Model| {
            let y = linear.forward(&x)?;
            assert_eq!(y.dtype(), DType::BF16);
            y.to_dtype(DType::F32)?.broadcast_mul(&scale.to_dtype(DType::F32)?)?.flatten_all()
        };
        let output = engine.eval(run).unwrap().to_vec1::<f32>().unwrap();
        engine.build_for_eval(build).unwrap();
        assert_eq!(engine.eval(run).unwrap().to_vec1::<f32>().unwrap(), output);
        (dtypes, output)
    };
    let (kept, others) = (make(json!(["head"])), make(json!("auto")));
    assert_eq!((kept.0, others.0), ([DType::F32; 2], [DType::BF16; 2]));
    assert_ne!(kept.1, others.1);
}

#[test]
fn a_module_that_the_model_does_not_have_is_an_error_with_those_that_are_like_it() {
    let message = |module: &str| {
        let config = with_modules(config(1, None, "bf16"), json!(["ln_f", module]));
        let error = Engine::builder().device(Device::Cpu).initialize(|vb| Gpt::new(&gpt(), vb), config).err().unwrap();
        assert!(matches!(error, Error::Param(ParamError::NoSuchModule { .. })), "{error}");
        error.to_string()
    };
    insta::assert_snapshot!(message("c_fcc"), @"data_types.keep_in_fp32_modules: the model has no module c_fcc: the nearest is c_fc; a module is given as complete dot-separated parts of a parameter's name, in which * matches any characters; correct the name, or remove it");
    insta::assert_snapshot!(message("router"), @"data_types.keep_in_fp32_modules: the model has no module router: no name is similar; the modules are attn, c_attn, c_fc, c_proj, h, ln_1, ln_2, ln_f and 3 more; a module is given as complete dot-separated parts of a parameter's name, in which * matches any characters; correct the name, or remove it");
}
