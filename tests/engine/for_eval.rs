//! A model instance that is built for evaluation computes with the weights of the trained instance.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::error::{Error, ParamError};
use candle_zero::zero::{Unit, unit};
use serde_json::json;
use std::cell::Cell;

#[test]
fn it_sees_every_step_at_every_stage() {
    for (stage, world) in [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)] {
        for units in [false, true] {
            let ranks = threads::run(world, |comm| {
                let zero = json!({"stage3_param_persistence_threshold": if units { 0 } else { 100 }});
                let build = |vb: VarBuilder<'_>| Tiny::new(Shape { units, layers: 2, ..Shape::default() }, vb);
                let engine = || Engine::builder().communicator(comm.clone()).device(Device::Cpu);
                let mut engine = engine().initialize(build, config(stage, 1, zero, json!({})))?;
                let held = engine.memory_report();
                engine.build_for_eval(build)?;
                assert_eq!(
                    engine.memory_report().to_string(),
                    held.to_string(),
                    "the evaluation instance has no separate weights"
                );
                for sample in 0..3 {
                    let (ids, targets) = batch(sample * world + comm.rank());
                    let seen = engine.eval(|model| model.loss(&ids, &targets))?;
                    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                    assert_eq!(seen.to_scalar::<f32>()?.to_bits(), loss.to_scalar::<f32>()?.to_bits());
                    engine.backward(&loss)?;
                    engine.step()?;
                }
                Ok(())
            });
            ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
        }
    }
}

/// A layer that records whether Candle tracks its computation.
struct Watched(Unit<Linear>, Cell<bool>);

impl Watched {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(unit(vb.pp("a"), |vb| linear(4, 4, vb))?, Cell::new(false)))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = self.0.inner();
        self.1.set(self.1.get() | inner.weight().t()?.track_op());
        self.0.forward(x)
    }
}

#[test]
fn candle_records_nothing_of_it() {
    for stage in [0, 3] {
        let mut engine = Engine::initialize(Watched::new, config(stage, 1, json!({}), json!({}))).unwrap();
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let mut is_recorded = || {
            let recorded = Cell::new(false);
            let run = |model: &Watched| {
                let y = model.forward(&x);
                recorded.set(model.1.get());
                y
            };
            engine.eval(run).unwrap();
            let before = recorded.get();
            engine.build_for_eval(Watched::new).unwrap();
            engine.eval(run).unwrap();
            (before, recorded.get())
        };
        assert_eq!(is_recorded(), (true, false), "stage {stage}");
    }
}

#[test]
fn another_model_is_refused_by_the_name_that_it_takes() {
    let mut engine = Engine::initialize(Watched::new, config(3, 1, json!({}), json!({}))).unwrap();
    let mut refused = |name: &'static str, in_: &'static str| {
        let other =
            |vb: VarBuilder<'_>| Ok(Watched(unit(vb.pp(in_), |vb| linear(4, 4, vb.pp(name)))?, Cell::default()));
        let error = engine.build_for_eval(other).unwrap_err();
        assert!(matches!(error, Error::Param(ParamError::NotTheModel { .. })), "{error}");
        error.to_string()
    };
    assert!(refused("b", "a").contains("a.b.weight"));
    assert!(refused("", "c").contains("uses c,"));
    let misshapen = |vb: VarBuilder<'_>| Ok(Watched(unit(vb.pp("a"), |vb| linear(4, 5, vb))?, Cell::default()));
    assert!(matches!(engine.build_for_eval(misshapen), Err(Error::Param(ParamError::Twice { .. }))));
    // The engine continues with its previous instance.
    engine.eval(|model| model.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)).unwrap();
}
