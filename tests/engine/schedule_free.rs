//! AdamWScheduleFree: training with one set of weights, evaluation and export with their average.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::error::Result;
use candle_zero::optim::ParameterGroup;
use serde_json::{Value, json};
use std::path::Path;

const SHAPE: Shape = Shape { layers: 2, units: true, checkpointed: false };
const STEPS: usize = 5;

fn keys(more: Value) -> Value {
    let params = json!({"lr": 0.02, "eps": 1e-4, "weight_decay": 0.01, "warmup_steps": 2});
    let mut keys = json!({"optimizer": {"type": "AdamWScheduleFree", "params": params}, "scheduler": null});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

/// A point in a micro step at which a program may evaluate.
#[derive(Debug, Clone, Copy, PartialEq)]
enum EvaluationAfter {
    Forward,
    Backward,
    Step,
}

type Losses = Vec<u32>;

/// Trains, calls `probe` at each point of [`EvaluationAfter`], and returns the losses of rank 0 and the exported file.
fn train(
    world: usize,
    config: &Value,
    probe: impl Fn(&mut Engine<Tiny>, EvaluationAfter) -> Result<()> + Sync,
) -> (Losses, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (ids, targets) = batch(step * world + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            losses.push(loss.to_scalar::<f32>()?.to_bits());
            probe(&mut engine, EvaluationAfter::Forward)?;
            engine.backward(&loss)?;
            probe(&mut engine, EvaluationAfter::Backward)?;
            engine.step()?;
            probe(&mut engine, EvaluationAfter::Step)?;
        }
        engine.export_safetensors(&file)?;
        Ok::<_, candle_zero::Error>(losses)
    });
    let losses = ranks.unwrap().into_iter().map(|rank| rank.unwrap()).next().unwrap();
    (losses, std::fs::read(&file).unwrap())
}

fn evaluate(engine: &mut Engine<Tiny>) -> Result<u32> {
    let (ids, targets) = batch(1000);
    Ok(engine.eval(|model| model.loss(&ids, &targets))?.to_scalar::<f32>()?.to_bits())
}

fn zero(stage: u8, files: Option<&Path>) -> Value {
    let mut zero = json!({"sub_group_size": 100, "stage3_param_persistence_threshold": 40});
    if let (Some(folder), true) = (files, stage > 0) {
        zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder});
        if stage == 3 {
            zero["offload_param"] = json!({"device": "nvme", "nvme_path": folder, "max_in_cpu": 0});
        }
    }
    zero
}

#[test]
fn evaluations_at_any_point_change_no_bit_of_the_training_at_any_stage_and_in_files() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for world in [1, 2] {
        let reference = train(world, &config(0, 1, json!({}), keys(json!({}))), |_, _| Ok(()));
        for (stage, files) in [(0, None), (1, None), (2, Some(folder.path())), (3, None), (3, Some(folder.path()))] {
            let config = config(stage, 1, zero(stage, files), keys(json!({})));
            for point in [EvaluationAfter::Forward, EvaluationAfter::Backward, EvaluationAfter::Step] {
                let evaluating = train(world, &config, |engine, current| {
                    if current == point {
                        evaluate(engine)?;
                    }
                    Ok(())
                });
                let context = format!("stage {stage}, world {world}, {files:?}, {point:?}");
                assert_eq!(evaluating.0, reference.0, "losses: {context}");
                assert!(evaluating.1 == reference.1, "exported weights: {context}");
            }
        }
    }
}

#[test]
fn evaluations_and_exports_have_the_same_weights_which_are_not_those_that_are_trained() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("average.safetensors");
    for (world, stage) in [(1, 0), (2, 2), (2, 3)] {
        let config = config(stage, 1, zero(stage, None), keys(json!({})));
        let ranks = threads::run(world, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())?;
            for step in 0..STEPS {
                let (ids, targets) = batch(step * world + rank);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            let evaluated = evaluate(&mut engine)?;
            engine.export_safetensors(&file)?;
            let (ids, targets) = batch(1000);
            let trained = engine.forward(|model| model.loss(&ids, &targets))?.to_scalar::<f32>()?.to_bits();
            Ok::<_, candle_zero::Error>((evaluated, trained))
        });
        let ranks: Vec<_> = ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
        assert!(ranks.iter().all(|rank| *rank == ranks[0]));
        let (evaluated, trained) = ranks[0];
        assert_ne!(evaluated, trained);
        let weights = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let vb = candle_nn::VarBuilder::from_tensors(weights, candle_core::DType::F32, &Device::Cpu);
        let model = Tiny::new(Shape { units: false, ..SHAPE }, vb).unwrap();
        let (ids, targets) = batch(1000);
        let loss: Tensor = model.loss(&ids, &targets).unwrap();
        assert_eq!(loss.to_scalar::<f32>().unwrap().to_bits(), evaluated, "stage {stage}");
    }
}

#[test]
fn parameters_that_are_frozen_keep_the_average_and_begin_anew_from_it() {
    for (world, stage) in [(1, 0), (2, 1), (2, 3)] {
        let config = config(stage, 1, zero(stage, None), keys(json!({})));
        let ranks = threads::run(world, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())?;
            let step = |engine: &mut Engine<Tiny>, number: usize| {
                let (ids, targets) = batch(number * world + rank);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                engine.backward(&loss)?;
                engine.step()
            };
            for number in 0..3 {
                step(&mut engine, number)?;
            }
            let average = engine.safe_get_full_fp32_param("head.weight")?.flatten_all()?.to_vec1::<f32>()?;
            let evaluated = evaluate(&mut engine)?;
            engine.set_trainable(|name, _| !name.starts_with("head"))?;
            assert_eq!(evaluate(&mut engine)?, evaluated);
            step(&mut engine, 3)?;
            let frozen = engine.safe_get_full_fp32_param("head.weight")?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(frozen, average, "stage {stage}");
            engine.set_trainable(|_, _| true)?;
            step(&mut engine, 4)?;
            // After the first step in which a parameter is trained again, its average equals the state z.
            let z = engine.safe_get_full_optimizer_state("head.weight", "z")?.flatten_all()?.to_vec1::<f32>()?;
            let again = engine.safe_get_full_fp32_param("head.weight")?.flatten_all()?.to_vec1::<f32>()?;
            assert!(again != average);
            assert!(z.iter().zip(&again).all(|(z, x)| (z - x).abs() <= 1e-6), "stage {stage}");
            Ok::<_, candle_zero::Error>(())
        });
        ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    }
}

#[test]
fn a_custom_schedule_is_refused_by_optimizers_that_determine_their_rate() {
    let refused = |optimizer: &str| {
        let config = json!({"train_batch_size": 1, "optimizer": {"type": optimizer}});
        let builder = Engine::builder().schedule(|_: u64| 1e-3);
        builder.initialize(|vb| candle_nn::linear(4, 1, vb), config).err().unwrap().to_string()
    };
    insta::assert_snapshot!(refused("AdamWScheduleFree"), @"AdamWScheduleFree with this configuration determines its learning rate itself and cannot follow a schedule; leave the schedule out (EngineBuilder::schedule, scheduler), or use another optimizer (Adafactor: set relative_step to false)");
    insta::assert_snapshot!(refused("Adafactor"), @"Adafactor with this configuration determines its learning rate itself and cannot follow a schedule; leave the schedule out (EngineBuilder::schedule, scheduler), or use another optimizer (Adafactor: set relative_step to false)");
}

#[test]
fn a_rate_of_a_group_and_set_lr_change_the_steps() {
    let config = json!({"train_batch_size": 1, "optimizer": {"type": "AdamWScheduleFree", "params": {"lr": 0.1}}});
    let groups = vec![ParameterGroup::new().names(["bias"]).lr(0.5)];
    let builder = Engine::builder().parameter_groups(groups);
    let mut engine = builder.initialize(|vb| candle_nn::linear(4, 1, vb), config).unwrap();
    assert_eq!(engine.lr(), [0.5, 0.1]);
    engine.set_lr(0.0).unwrap();
    let before = engine.safe_get_full_fp32_param("weight").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let loss =
        engine.forward(|model| model.weight().sqr()?.sum_all()? + model.bias().unwrap().sqr()?.sum_all()?).unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap();
    let after = engine.safe_get_full_fp32_param("weight").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(before, after);
}
