//! Parameters that stay in f32 in a 16-bit model: the same bits at every stage and place, no master weights.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::memory::Kind;
use candle_zero::optim::ParameterGroup;
use candle_zero::zero::{Unit, unit};
use serde_json::{Value, json};
use std::path::Path;

/// A layer with a scale in f32 on activations of 16 bits.
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
        for kind in [Kind::Parameters, Kind::MasterWeights, Kind::Moments] {
            let row = report.row(kind);
            let held = row.bytes.held + row.file.held;
            if config["zero_optimization"]["offload_param"].is_null() {
                assert_eq!(held as f64, row.formula.unwrap() + row.padding, "{}: {report}", kind.name());
            }
        }
        engine.export_safetensors(&file)?;
        let held = |kind| report.row(kind).formula.unwrap() as usize;
        Ok((losses, [held(Kind::Parameters), held(Kind::MasterWeights)]))
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
