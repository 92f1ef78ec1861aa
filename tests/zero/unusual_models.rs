//! Unusual models and call orders give the same bits at every stage: units used twice, skipped or nested,
//! shared parameters, odd sizes, evaluation and repeated forward passes in the middle of a step.

use crate::support::tiny::config;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear, linear_no_bias};
use candle_zero::comm::{Communicator, threads};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const WIDTH: usize = 6;

/// A model, represented by its loss as a function of the input.
type Model = Box<dyn Fn(&Tensor) -> Result<Tensor>>;
/// A function that runs one micro step up to and including the backward pass, and returns the loss.
type MicroStep = fn(&mut Engine<Model>, &Tensor, usize) -> candle_zero::Result<Tensor>;

fn plain(engine: &mut Engine<Model>, x: &Tensor, _: usize) -> candle_zero::Result<Tensor> {
    let loss = engine.forward(|model| model(x))?;
    engine.backward(&loss)?;
    Ok(loss)
}

fn input(sample: usize) -> Tensor {
    let values = (0..3 * WIDTH).map(|i| ((i * 7 + sample * 11) % 13) as f32 / 6.0 - 1.0);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((3, WIDTH)).unwrap()
}

fn engine(
    comm: Arc<dyn Communicator>,
    build: fn(VarBuilder<'_>) -> Result<Model>,
    config: &Value,
) -> candle_zero::Result<Engine<Model>> {
    Engine::builder().communicator(comm).initialize(build, config.clone())
}

/// Returns the losses of all ranks, and the exported parameters.
fn run(
    world: usize,
    build: fn(VarBuilder<'_>) -> Result<Model>,
    config: &Value,
    micro_step: MicroStep,
) -> (Vec<Vec<f32>>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let losses = threads::run(world, |comm| {
        let rank = comm.rank();
        let mut engine = engine(comm, build, config)?;
        let mut losses = vec![];
        for micro in 0..6 * engine.config().batch.gradient_accumulation_steps {
            let loss = micro_step(&mut engine, &input(micro * world + rank), micro)?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
            engine.step()?;
        }
        engine.export_safetensors(&file)?;
        Ok(losses)
    });
    let losses = losses.unwrap().into_iter().map(|losses| losses.unwrap()).collect();
    (losses, std::fs::read(&file).unwrap())
}

/// Checks that stages 0 to 3 agree bit for bit, with several ways of gathering at stage 3.
fn stages_agree(world: usize, build: fn(VarBuilder<'_>) -> Result<Model>, micro_step: MicroStep) {
    let gathering = [
        json!({"stage3_param_persistence_threshold": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
        json!({"stage3_param_persistence_threshold": 8, "stage3_max_live_parameters": 50, "reduce_bucket_size": 1, "allgather_bucket_size": 0, "sub_group_size": 0}),
    ];
    for accumulation in [1, 2] {
        let reference = run(world, build, &config(0, accumulation, json!({}), json!({})), micro_step);
        assert!(reference.0.iter().all(|losses| losses[0] != losses[losses.len() - 1]), "it trains");
        for stage in 1..4 {
            for zero in &gathering {
                let got = run(world, build, &config(stage, accumulation, zero.clone(), json!({})), micro_step);
                let what = format!("stage {stage}, world {world}, accumulation {accumulation}, {zero}");
                assert_eq!(got.0, reference.0, "{what}");
                assert!(got.1 == reference.1, "{what}");
            }
        }
    }
}

fn layer(vb: VarBuilder<'_>) -> Result<Linear> {
    linear(WIDTH, WIDTH, vb)
}

fn units(vb: &VarBuilder<'_>, count: usize) -> Result<Vec<Unit<Linear>>> {
    (0..count).map(|i| unit(vb.pp(format!("h.{i}")), layer)).collect()
}

fn three_units(vb: VarBuilder<'_>) -> Result<Model> {
    let (first, units) = (layer(vb.pp("first"))?, units(&vb, 3)?);
    Ok(Box::new(move |x| {
        let x = units.iter().try_fold(first.forward(x)?, |x, unit| unit.forward(&x)?.tanh())?;
        x.sqr()?.mean_all()
    }))
}

#[test]
fn evaluation_between_forward_and_backward_changes_nothing() {
    stages_agree(2, three_units, |engine, x, _| {
        let loss = engine.forward(|model| model(x))?;
        let seen = engine.eval(|model| model(x))?;
        assert_eq!(seen.to_scalar::<f32>()?, loss.to_scalar::<f32>()?);
        engine.backward(&loss)?;
        engine.eval(|model| model(x))?;
        Ok(loss)
    });
}

#[test]
fn of_several_forwards_the_loss_that_is_given_to_backward_counts() {
    stages_agree(2, three_units, |engine, x, micro| {
        let mut loss = engine.forward(|model| model(x))?;
        for _ in 0..micro % 3 {
            let other = engine.forward(|model| model(&x.affine(0.5, 0.0)?))?;
            loss = if micro < 4 { (loss + other)? } else { other };
        }
        engine.backward(&loss)?;
        Ok(loss)
    });
}

fn same_units_again(vb: &VarBuilder<'_>, recompute: bool) -> Result<Model> {
    let (first, units) = (layer(vb.pp("first"))?, units(vb, 2)?);
    let units: Vec<_> = units.into_iter().map(|unit| unit.checkpointed(recompute)).collect();
    Ok(Box::new(move |x| {
        let mut x = first.forward(x)?;
        for unit in [&units[0], &units[1], &units[0], &units[0]] {
            x = unit.forward(&x)?.tanh()?;
        }
        x.sqr()?.mean_all()
    }))
}

#[test]
fn units_may_be_used_several_times_in_one_forward() {
    stages_agree(2, |vb| same_units_again(&vb, false), plain);
    stages_agree(2, |vb| same_units_again(&vb, true), plain);
}

#[test]
fn units_may_be_skipped_after_the_first_step() {
    thread_local! {
        static SKIP: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    let build = |vb: VarBuilder<'_>| -> Result<Model> {
        let (first, units) = (layer(vb.pp("first"))?, units(&vb, 3)?);
        Ok(Box::new(move |x| {
            let mut x = first.forward(x)?;
            for (i, unit) in units.iter().enumerate() {
                if i != 1 || !SKIP.get() {
                    x = unit.forward(&x)?.tanh()?;
                }
            }
            x.sqr()?.mean_all()
        }))
    };
    stages_agree(2, build, |engine, x, micro| {
        SKIP.set(micro % 3 == 1);
        plain(engine, x, micro)
    });
}

fn shared_scale(vb: &VarBuilder<'_>, recompute: bool) -> Result<Model> {
    struct Scaled(Tensor, Linear);
    impl Module for Scaled {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.1.forward(x)?.broadcast_mul(&self.0)?.tanh()
        }
    }
    let first = layer(vb.pp("first"))?;
    let scale = vb.get_with_hints(WIDTH, "scale", candle_nn::init::ONE)?;
    let block = |i: usize| {
        let block = unit(vb.pp(format!("h.{i}")), |vb| Ok(Scaled(scale.clone(), layer(vb)?)))?;
        Ok(block.checkpointed(recompute))
    };
    let units: Vec<_> = (0..3).map(block).collect::<Result<_>>()?;
    Ok(Box::new(move |x| {
        let x = units.iter().try_fold(first.forward(x)?, |x, unit| unit.forward(&x))?;
        x.sqr()?.mean_all()
    }))
}

#[test]
fn units_may_share_a_parameter_that_lies_outside_of_them() {
    stages_agree(2, |vb| shared_scale(&vb, false), plain);
    stages_agree(2, |vb| shared_scale(&vb, true), plain);
}

#[test]
fn units_may_share_a_parameter_by_its_name() {
    fn build(vb: VarBuilder<'_>, recompute: bool) -> Result<Model> {
        let first = layer(vb.pp("first"))?;
        let names = ["a", "shared", "b", "shared", "c"];
        let units: Vec<_> =
            names.iter().map(|name| Ok(unit(vb.pp(name), layer)?.checkpointed(recompute))).collect::<Result<_>>()?;
        let last = layer(vb.pp("c"))?;
        Ok(Box::new(move |x| {
            let x = units.iter().try_fold(first.forward(x)?, |x, unit| unit.forward(&x)?.tanh())?;
            last.forward(&x)?.sqr()?.mean_all()
        }))
    }
    stages_agree(2, |vb| build(vb, false), plain);
    stages_agree(2, |vb| build(vb, true), plain);
}

fn nested(vb: &VarBuilder<'_>, outer_recomputes: bool, inner_recomputes: bool) -> Result<Model> {
    struct Outer {
        before: Linear,
        inner: Unit<Linear>,
    }
    impl Module for Outer {
        /// Uses its own parameters both before and after the inner unit.
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let y = self.inner.forward(&self.before.forward(x)?)?.tanh()?;
            self.before.forward(&y)
        }
    }
    let first = layer(vb.pp("first"))?;
    let outer = |i: usize| {
        let outer = unit(vb.pp(format!("outer.{i}")), |vb| {
            let inner = unit(vb.pp("inner"), layer)?.checkpointed(inner_recomputes);
            Ok(Outer { before: layer(vb.pp("before"))?, inner })
        })?;
        Ok(outer.checkpointed(outer_recomputes))
    };
    let outers: Vec<_> = (0..2).map(outer).collect::<Result<_>>()?;
    Ok(Box::new(move |x| {
        let x = outers.iter().try_fold(first.forward(x)?, |x, unit| unit.forward(&x)?.tanh())?;
        x.sqr()?.mean_all()
    }))
}

#[test]
fn units_may_lie_in_units() {
    stages_agree(2, |vb| nested(&vb, false, false), plain);
    stages_agree(2, |vb| nested(&vb, true, false), plain);
    stages_agree(2, |vb| nested(&vb, false, true), plain);
    stages_agree(2, |vb| nested(&vb, true, true), plain);
}

/// Returns a model with parameters of 0, 1, 2 and 3 elements.
fn tiny(vb: VarBuilder<'_>) -> Result<Model> {
    struct Odd(Vec<Tensor>);
    impl Module for Odd {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let all = Tensor::cat(&self.0, 0)?;
            x.broadcast_mul(&all)
        }
    }
    let first = linear_no_bias(WIDTH, WIDTH, vb.pp("first"))?;
    let odd = unit(vb.pp("odd"), |vb| {
        let get = |n: usize| vb.get_with_hints(n, &format!("w{n}"), candle_nn::init::ONE);
        Ok(Odd((0..4).map(get).collect::<Result<_>>()?))
    })?;
    let empty = unit(vb.pp("empty"), |vb| Ok(Odd(vec![vb.get_with_hints(0, "w", candle_nn::init::ONE)?])))?;
    Ok(Box::new(move |x| {
        let x = odd.forward(&odd.forward(&first.forward(x)?)?)?;
        let none = empty.forward(&x.narrow(1, 0, 0)?)?;
        let none = empty.forward(&none)?.sum_all()?;
        x.sqr()?.mean_all()? + none
    }))
}

#[test]
fn parameters_may_have_fewer_elements_than_there_are_ranks() {
    stages_agree(2, tiny, plain);
    stages_agree(5, tiny, plain);
}

#[test]
fn a_model_may_have_one_parameter() {
    let build = |vb: VarBuilder<'_>| -> Result<Model> {
        let only = linear_no_bias(WIDTH, 1, vb)?;
        Ok(Box::new(move |x| only.forward(x)?.sqr()?.mean_all()))
    };
    stages_agree(2, build, plain);
    stages_agree(4, build, plain);
}

#[test]
fn an_engine_may_be_dropped_at_any_point_of_a_step() {
    for calls in 0..4 {
        let config = config(3, 2, json!({"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1}), json!({}));
        let results = threads::run(3, |comm| {
            let mut engine = engine(comm, three_units, &config)?;
            for micro in 0..2 {
                let x = input(micro);
                plain(&mut engine, &x, micro)?;
                engine.step()?;
            }
            let x = input(2);
            if calls > 0 {
                let loss = engine.forward(|model| model(&x))?;
                if calls > 1 {
                    engine.backward(&loss)?;
                }
                if calls > 2 {
                    engine.step()?;
                }
            }
            Ok(())
        });
        assert!(results.unwrap().into_iter().all(|r| r.is_ok()), "after {calls} calls");
    }
}

#[test]
fn ranks_that_begin_with_different_weights_are_refused() {
    let config = config(0, 1, json!({}), json!({}));
    let folder = tempfile::tempdir().unwrap();
    let file = |seed| folder.path().join(format!("{seed}.safetensors"));
    for seed in [1, 2] {
        let mut engine = Engine::builder().seed(seed).initialize(three_units, config.clone()).unwrap();
        engine.export_safetensors(file(seed)).unwrap();
    }
    let initialize = |builders: [EngineBuilder; 2]| {
        let builders = builders.map(|b| Mutex::new(Some(b)));
        let results = threads::run(2, |comm| {
            let builder = builders[comm.rank()].lock().unwrap().take().unwrap();
            builder.communicator(comm).initialize(three_units, config.clone()).map(drop)
        });
        results.unwrap().into_iter().map(|r| r.err().map(|e| e.to_string()).unwrap_or_default()).collect::<Vec<_>>()
    };
    assert_eq!(initialize([Engine::builder().seed(1), Engine::builder().seed(1)]), ["", ""]);
    assert_eq!(initialize([1, 1].map(|seed| Engine::builder().init_from(file(seed)))), ["", ""]);
    let texts = initialize([1, 2].map(|seed| Engine::builder().seed(seed)));
    insta::assert_snapshot!(texts[0], @"the initial weights of rank 0 differ from those of rank 1: a different seed or init_from file; every rank must use the same seed and file (unlike in DeepSpeed, rank 0's weights are not sent to the others)");
    assert_eq!(initialize([1, 2].map(|seed| Engine::builder().init_from(file(seed)))), texts);
}

#[test]
fn a_file_that_cannot_be_written_costs_nothing_but_the_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (wrong, right) = (folder.path().join("none/model.safetensors"), folder.path().join("model.safetensors"));
    let results = threads::run(2, |comm| {
        let mut engine = engine(comm, three_units, &config(3, 1, json!({}), json!({})))?;
        let text = engine.export_safetensors(&wrong).unwrap_err().to_string();
        plain(&mut engine, &input(0), 0)?;
        engine.step()?;
        engine.export_safetensors(&right)?;
        Ok(text.replace(&folder.path().display().to_string(), "FOLDER"))
    });
    let texts: Vec<_> = results.unwrap().into_iter().map(|r| r.unwrap()).collect();
    assert!(texts[0].starts_with("cannot write FOLDER/none/model.safetensors: No such file"), "{}", texts[0]);
    insta::assert_snapshot!(texts[1], @"cannot write FOLDER/none/model.safetensors: rank 0 failed; see its error for the cause");
    let plain_file = folder.path().join("plain");
    std::fs::write(&plain_file, "").unwrap();
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&right), mode(&plain_file), "with the permissions of any new file");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
}
