//! Writes to a parameter by code other than the engine are detected: they would be lost with the next update.

use crate::support::tiny::config;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::error::{Error, ParamError};
use candle_zero::zero::{Unit, unit};
use serde_json::json;

struct Model {
    first: Linear,
    second: Unit<Linear>,
}

fn model(vb: VarBuilder<'_>) -> Result<Model> {
    Ok(Model { first: linear(6, 40, vb.pp("first"))?, second: unit(vb.pp("second"), |vb| linear(40, 40, vb))? })
}

fn loss(model: &Model) -> Result<Tensor> {
    let x = Tensor::from_iter((0..18).map(|i| (i % 5) as f32 / 3.0 - 0.7), &Device::Cpu)?.reshape((3, 6))?;
    model.second.forward(&model.first.forward(&x)?)?.sqr()?.mean_all()
}

/// The time of the write.
#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    BeforeTheFirstForward,
    InForward,
    BeforeStep,
    AfterStep,
}

/// Trains for three steps. `write` changes a parameter before the first step, during the second, or right after it.
fn run(stage: u8, when: When, write: fn(&Model) -> Result<()>) -> candle_zero::Result<()> {
    let results = threads::run(2, move |comm| {
        let config = config(stage, 1, json!({}), json!({}));
        let mut engine = Engine::builder().communicator(comm).device(Device::Cpu).initialize(model, config)?;
        let outside = |engine: &Engine<Model>, now: When| -> candle_zero::Result<()> {
            if now == when {
                write(engine.model())?;
            }
            Ok(())
        };
        outside(&engine, When::BeforeTheFirstForward)?;
        for step in 0..3 {
            let loss = engine.forward(|model| {
                if step == 1 && when == When::InForward {
                    write(model)?;
                }
                loss(model)
            })?;
            engine.backward(&loss)?;
            if step == 1 {
                outside(&engine, When::BeforeStep)?;
            }
            engine.step()?;
            if step == 1 {
                outside(&engine, When::AfterStep)?;
            }
        }
        Ok(())
    });
    results.unwrap().into_iter().next().unwrap()
}

/// Calls of Candle's functions that change a tensor in place.
const WRITES: [fn(&Model) -> Result<()>; 4] = [
    |model| model.first.weight().zero_set(),
    |model| model.first.weight().slice_set(&Tensor::ones((40, 6), DType::F32, &Device::Cpu)?, 0, 0),
    |model| model.first.bias().unwrap().one_set(),
    |model| {
        let ids = Tensor::zeros((1, 6), DType::U32, &Device::Cpu)?;
        model.first.weight().scatter_set(&ids, &Tensor::full(9f32, (1, 6), &Device::Cpu)?, 0)
    },
];

#[test]
fn a_write_is_found_wherever_it_happens_at_every_stage() {
    for stage in 0..4 {
        for when in [When::BeforeTheFirstForward, When::InForward, When::BeforeStep, When::AfterStep] {
            if stage == 3 && when != When::InForward {
                continue;
            }
            for (number, write) in WRITES.into_iter().enumerate() {
                let error = run(stage, when, write).unwrap_err();
                let Error::Param(ParamError::Written { name }) = &error else {
                    panic!("stage {stage}, {when:?}, write {number}: {error}")
                };
                assert!(name.starts_with("first."), "{name}");
            }
        }
    }
}

#[test]
fn what_a_unit_has_at_stage_3_is_looked_at_before_it_goes() {
    struct Writes(Linear);
    impl Module for Writes {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.0.weight().zero_set()?;
            self.0.forward(x)
        }
    }
    let config = config(3, 1, json!({"stage3_param_persistence_threshold": 0}), json!({}));
    let build = |vb: VarBuilder<'_>| unit(vb.pp("second"), |vb| Ok(Writes(linear(6, 6, vb)?)));
    let mut engine = Engine::initialize(build, config).unwrap();
    let x = Tensor::ones((3, 6), DType::F32, &Device::Cpu).unwrap();
    let error = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all()).unwrap_err();
    assert!(matches!(error, Error::Param(ParamError::Written { .. })), "{error}");
}

#[test]
fn what_is_gathered_is_for_reading() {
    for stage in [0, 3] {
        let zero = json!({"stage3_param_persistence_threshold": 0});
        let mut engine = Engine::initialize(model, config(stage, 1, zero, json!({}))).unwrap();
        let sum = engine.gathered(&["first.weight"], |model| model.first.weight().sum_all()?.to_scalar::<f32>());
        assert!(sum.is_ok());
        let error = engine.gathered(&["first.weight"], |model| model.first.weight().zero_set()).unwrap_err();
        assert!(error.to_string().contains("Engine::gathered_mut"), "stage {stage}: {error}");
    }
}

#[test]
fn the_engines_own_ways_are_no_such_writes() {
    let folder = tempfile::tempdir().unwrap();
    for stage in 0..4 {
        let config = config(stage, 2, json!({}), json!({}));
        let mut engine = Engine::initialize(model, config).unwrap();
        for step in 0..6 {
            let loss = engine.forward(loss).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
            let weight = engine.safe_get_full_fp32_param("first.weight").unwrap();
            match step {
                1 => engine.safe_set_full_fp32_param("first.weight", &(weight * 0.5).unwrap()).unwrap(),
                3 => _ = engine.save_checkpoint(folder.path(), Some("a"), json!({})).unwrap(),
                5 => _ = engine.load_checkpoint(folder.path(), Some("a"), &LoadOptions::default()).unwrap(),
                _ => {}
            }
        }
    }
}
