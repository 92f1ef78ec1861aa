//! One parameter by its name: `safe_get_*`, `safe_set_*`, and parameters gathered outside of a forward.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::error::{EngineError, Error};
use candle_zero::memory::Kind;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

fn on_ranks<T: Send>(world: usize, rank: impl Fn(Arc<dyn Communicator>) -> candle_zero::Result<T> + Sync) -> Vec<T> {
    threads::run(world, rank).unwrap().into_iter().map(|r| r.unwrap()).collect()
}

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 2 };

fn tiny(comm: Arc<dyn Communicator>, config: &Value) -> candle_zero::Result<Engine<Tiny>> {
    Engine::builder().communicator(comm).device(Device::Cpu).initialize(|vb| Tiny::new(SHAPE, vb), config.clone())
}

/// Forward and backward.
fn pass(engine: &mut Engine<Tiny>, sample: usize) -> candle_zero::Result<()> {
    let (ids, targets) = batch(sample);
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    assert_eq!(tensor.dtype(), DType::F32);
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Every stage, with what is offloaded where it can be.
fn variants(folder: &Path) -> Vec<(u8, Value)> {
    let nvme = || json!({"device": "nvme", "nvme_path": folder});
    let released = json!({"stage3_param_persistence_threshold": 0});
    let all = json!({"stage3_param_persistence_threshold": 40, "offload_param": nvme(), "offload_optimizer": nvme()});
    let mut variants: Vec<(u8, Value)> = (0..3).map(|stage| (stage, json!({}))).collect();
    variants.extend([(1, json!({"offload_optimizer": {"device": "cpu"}})), (2, json!({"offload_optimizer": nvme()}))]);
    variants.extend([(3, released), (3, json!({})), (3, all)]);
    variants
}

/// A matrix of a unit, a small vector, and the embedding of the root.
const NAMES: [&str; 3] = ["layer.1.qkv.weight", "layer.0.norm.bias", "embed.weight"];

#[test]
fn values_gradients_and_states_are_the_same_at_every_stage_offload_and_world() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for precision in
        [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true, "loss_scale": 64}})]
    {
        for world in 1..=4 {
            let mut first: Option<Vec<Vec<u32>>> = None;
            for (stage, zero) in variants(folder.path()) {
                let mut first_of_stage: Option<Vec<Vec<u32>>> = None;
                let config = config(stage, 2, zero, precision.clone());
                let ranks = on_ranks(world, |comm| {
                    let mut engine = tiny(comm, &config)?;
                    let mut seen = vec![];
                    for micro in 0..3 {
                        for name in NAMES {
                            assert_eq!(engine.safe_get_full_grad(name)?.is_some(), micro == 1, "{name}");
                        }
                        let sample = micro * world + engine.rank();
                        pass(&mut engine, sample)?;
                        for name in NAMES {
                            let grad = engine.safe_get_full_grad(name)?.unwrap();
                            let value = engine.safe_get_full_fp32_param(name)?;
                            assert_eq!(grad.dims(), value.dims());
                            // The part of this rank is a part of the whole.
                            let local = [
                                engine.safe_get_local_fp32_param(name)?,
                                engine.safe_get_local_grad(name)?.unwrap(),
                                engine.safe_get_local_optimizer_state(name, "exp_avg")?,
                            ];
                            for (local, whole) in local.iter().zip([&value, &grad]) {
                                let (local, whole) = (bits(local), bits(whole));
                                let shard = whole.len().div_ceil(world);
                                let start = if stage == 0 { 0 } else { whole.len().min(engine.rank() * shard) };
                                assert_eq!(local, whole[start..start + local.len()]);
                                assert!(stage > 0 || local.len() == whole.len());
                            }
                            seen.extend([bits(&grad), bits(&value)]);
                            for key in ["exp_avg", "exp_avg_sq"] {
                                let state = engine.safe_get_full_optimizer_state(name, key)?;
                                assert_eq!(state.dims(), value.dims());
                                assert_eq!(bits(&state).iter().all(|bits| *bits == 0), engine.global_steps() == 0);
                                seen.push(bits(&state));
                            }
                        }
                        engine.step()?;
                    }
                    Ok(seen)
                });
                for seen in ranks {
                    if precision != json!({}) {
                        // In 16 bits the ranks of a stage agree; stages round gradients at different points.
                        assert!(*first_of_stage.get_or_insert_with(|| seen.clone()) == seen, "{config}, world {world}");
                        continue;
                    }
                    assert!(*first.get_or_insert_with(|| seen.clone()) == seen, "{config}, world {world}");
                }
            }
        }
    }
}

#[test]
fn a_gradient_is_what_sgd_subtracts() {
    for (stage, world) in [(0, 2), (1, 3), (2, 2), (3, 3)] {
        let config = json!({
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0,
            "zero_allow_untested_optimizer": true, "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage}, "fp16": {"enabled": true, "loss_scale": 256},
        });
        on_ranks(world, |comm| {
            let mut engine = tiny(comm, &config)?;
            for micro in 0..2 {
                pass(&mut engine, micro)?;
                if micro == 0 {
                    engine.step()?;
                }
            }
            let name = "head.weight";
            let grad = engine.safe_get_full_grad(name)?.unwrap();
            let before = engine.safe_get_full_fp32_param(name)?;
            engine.step()?;
            assert!(engine.was_step_applied());
            let after = engine.safe_get_full_fp32_param(name)?;
            let error = ((before - after)? - &grad)?.abs()?.max_all()?.to_scalar::<f32>()?;
            let largest = grad.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(error <= 1e-6 && largest > 1e-3, "{error}, {largest}");
            Ok(())
        });
    }
}

#[test]
fn what_is_set_is_what_trains_at_every_stage_and_offload() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for precision in [json!({}), json!({"bf16": {"enabled": true}})] {
        for world in [1, 3] {
            let mut first: Option<Vec<Vec<u32>>> = None;
            for (stage, zero) in variants(folder.path()) {
                let mut first_of_stage: Option<Vec<Vec<u32>>> = None;
                let config = config(stage, 1, zero, precision.clone());
                let ranks = on_ranks(world, |comm| {
                    let mut engine = tiny(comm, &config)?;
                    let rank = engine.rank();
                    pass(&mut engine, rank)?;
                    engine.step()?;
                    let mut seen = vec![];
                    for name in NAMES {
                        let value = engine.safe_get_full_fp32_param(name)?;
                        let new = value.affine(0.5, 0.01)?;
                        engine.safe_set_full_fp32_param(name, &new)?;
                        assert_eq!(bits(&engine.safe_get_full_fp32_param(name)?), bits(&new));
                        let state = engine.safe_get_full_optimizer_state(name, "exp_avg")?.affine(-2.0, 0.001)?;
                        engine.safe_set_full_optimizer_state(name, &state, "exp_avg")?;
                        assert_eq!(bits(&engine.safe_get_full_optimizer_state(name, "exp_avg")?), bits(&state));
                    }
                    // The tensors that the model computes with have the values too.
                    let (ids, targets) = batch(5);
                    seen.push(bits(&engine.eval(|model| model.loss(&ids, &targets))?.to_dtype(DType::F32)?));
                    pass(&mut engine, rank + world)?;
                    let grad = engine.safe_get_full_grad(NAMES[0])?.unwrap().affine(0.25, 0.0)?;
                    engine.safe_set_full_grad(NAMES[0], &grad)?;
                    assert_eq!(bits(&engine.safe_get_full_grad(NAMES[0])?.unwrap()), bits(&grad));
                    engine.step()?;
                    for name in NAMES {
                        seen.push(bits(&engine.safe_get_full_fp32_param(name)?));
                        seen.push(bits(&engine.safe_get_full_optimizer_state(name, "exp_avg")?));
                    }
                    Ok(seen)
                });
                for seen in ranks {
                    if precision != json!({}) {
                        // In 16 bits the ranks of a stage agree; stages round gradients at different points.
                        assert!(*first_of_stage.get_or_insert_with(|| seen.clone()) == seen, "{config}, world {world}");
                        continue;
                    }
                    assert!(*first.get_or_insert_with(|| seen.clone()) == seen, "{config}, world {world}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_read_or_set_is_refused_by_name_and_changes_nothing() {
    for stage in [0, 3] {
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(stage, 1, json!({}), json!({})))?;
            let value = Tensor::zeros((3, 5), DType::F32, &Device::Cpu)?;
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.safe_get_full_fp32_param("layer.1.qkv.weigth").unwrap_err(), @"the model has no parameter layer.1.qkv.weigth: the nearest are layer.1.qkv.weight, layer.0.qkv.weight, layer.1.norm.weight");
                insta::assert_snapshot!(engine.safe_get_full_grad("x").unwrap_err(), @"the model has no parameter x: none is alike");
                insta::assert_snapshot!(engine.safe_get_full_optimizer_state("embed.weight", "exp_avrg").unwrap_err(), @"parameter embed.weight has no optimizer state exp_avrg: there are exp_avg, exp_avg_sq");
                insta::assert_snapshot!(engine.safe_set_full_fp32_param("embed.weight", &value).unwrap_err(), @"a value of shape [3, 5] is given for parameter embed.weight, whose shape is [37, 12]; give one of that shape");
            }
            let zeros = Tensor::zeros((37, 12), DType::F32, &Device::Cpu)?;
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.safe_set_full_grad("embed.weight", &zeros).unwrap_err(), @"parameter embed.weight has no gradient now: there is one from backward to the step that updates the weights, reduced and not frozen");
            }
            let own = (zeros.ones_like()? * engine.rank() as f64)?;
            let error = engine.safe_set_full_fp32_param("embed.weight", &own).unwrap_err();
            assert!(matches!(error, Error::Engine(EngineError::ArgumentsDiffer { .. })), "{error}");
            let (ids, targets) = batch(0);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.safe_set_full_fp32_param("embed.weight", &zeros).unwrap_err(), @"safe_set_full_fp32_param was called between forward and backward; the order of a micro step is forward, backward, step");
            }
            engine.backward(&loss)?;
            engine.step()
        });
    }
}

#[test]
fn a_frozen_parameter_has_values_and_neither_gradient_nor_states() {
    on_ranks(2, |comm| {
        let builder = Engine::builder().communicator(comm).trainable(|name, _| !name.starts_with("embed"));
        let mut engine = builder
            .initialize(|vb| Tiny::new(SHAPE, vb), config(2, 1, json!({}), json!({"bf16": {"enabled": true}})))?;
        pass(&mut engine, 0)?;
        assert!(engine.safe_get_full_grad("embed.weight")?.is_none());
        let error = engine.safe_get_full_optimizer_state("embed.weight", "exp_avg").unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"parameter embed.weight has no optimizer state exp_avg: there are none");
        }
        let halved = (engine.safe_get_full_fp32_param("embed.weight")? * 0.5)?;
        engine.safe_set_full_fp32_param("embed.weight", &halved)?;
        assert_eq!(bits(&engine.safe_get_full_fp32_param("embed.weight")?), bits(&halved));
        engine.step()
    });
}

// ---- gathered --------------------------------------------------------------------------------------------------

fn two(comm: Arc<dyn Communicator>, zero: Value) -> candle_zero::Result<Engine<[Linear; 2]>> {
    let config = config(3, 1, zero, json!({}));
    let build = |vb: candle_nn::VarBuilder<'_>| Ok([linear(4, 5, vb.pp("a"))?, linear(5, 3, vb.pp("b"))?]);
    Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config)
}

fn step(engine: &mut Engine<[Linear; 2]>) -> candle_zero::Result<()> {
    let x = Tensor::full((engine.rank() + 1) as f32, (2, 4), &Device::Cpu)?;
    let loss = engine.forward(|[a, b]| b.forward(&a.forward(&x)?)?.sqr()?.mean_all())?;
    engine.backward(&loss)?;
    engine.step()
}

#[test]
fn parameters_are_whole_inside_of_gathered_and_released_after_it() {
    for world in 1..=3 {
        on_ranks(world, |comm| {
            let mut engine = two(comm, json!({"stage3_param_persistence_threshold": 0}))?;
            step(&mut engine)?;
            let held = engine.memory_report().row(Kind::Gathered).bytes.held;
            let seen = engine.gathered(&["b.bias", "a.weight", "b.bias"], |[a, b]| {
                assert!(b.weight().sum_all().is_err(), "not asked for");
                Ok((a.weight().copy()?, b.bias().unwrap().copy()?))
            })?;
            assert_eq!(bits(&seen.0), bits(&engine.safe_get_full_fp32_param("a.weight")?));
            assert_eq!(bits(&seen.1), bits(&engine.safe_get_full_fp32_param("b.bias")?));
            assert_eq!(engine.memory_report().row(Kind::Gathered).bytes.held, held);
            assert!(engine.model()[0].weight().sum_all().is_err(), "released again");
            // An error of the closure releases them too.
            let error = engine.gathered(&["a.weight"], |_| -> candle_core::Result<()> { candle_core::bail!("mine") });
            assert!(error.unwrap_err().to_string().contains("mine"));
            assert!(engine.model()[0].weight().sum_all().is_err());
            assert!(
                engine.gathered(&["c.weight"], |_| Ok(())).unwrap_err().to_string().contains("no parameter c.weight")
            );
            step(&mut engine)
        });
    }
}

#[test]
fn reading_between_all_calls_of_a_micro_step_changes_no_bit() {
    let train = |looks: bool| {
        on_ranks(2, |comm| {
            let config = config(3, 1, json!({"stage3_param_persistence_threshold": 40}), json!({}));
            let shape = Shape { checkpointed: true, ..SHAPE };
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config)?;
            let look = |engine: &mut Engine<Tiny>, between_passes: bool| -> candle_zero::Result<()> {
                if looks {
                    engine.gathered(&NAMES, |_| Ok(()))?;
                    engine.safe_get_full_fp32_param(NAMES[0])?;
                    let emptied = engine.empty_partition_cache();
                    assert!(emptied.is_err() == between_passes, "{emptied:?}");
                }
                Ok(())
            };
            for micro in 0..3 {
                let (ids, targets) = batch(2 * micro + engine.rank());
                look(&mut engine, false)?;
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                look(&mut engine, true)?;
                engine.backward(&loss)?;
                look(&mut engine, false)?;
                engine.step()?;
            }
            Ok((bits(&engine.safe_get_full_fp32_param(NAMES[0])?), engine.get_global_grad_norm().unwrap().to_bits()))
        })
    };
    assert_eq!(train(false), train(true));
}

#[test]
fn after_empty_partition_cache_nothing_is_gathered_until_it_is_needed() {
    // All parameters are persistent.
    on_ranks(2, |comm| {
        let mut engine = two(comm, json!({"stage3_param_persistence_threshold": 1000}))?;
        step(&mut engine)?;
        let gathered = |engine: &Engine<_>| {
            let report = engine.memory_report();
            report.row(Kind::Gathered).bytes.held + report.row(Kind::Persistent).bytes.held
        };
        assert!(gathered(&engine) > 0);
        for _ in 0..2 {
            engine.empty_partition_cache()?;
            assert_eq!(gathered(&engine), 0);
            assert!(engine.model()[0].weight().sum_all().is_err());
        }
        engine.eval(|[a, _]| a.weight().sum_all())?;
        engine.empty_partition_cache()?;
        step(&mut engine)?;
        assert!(gathered(&engine) > 0);
        Ok(())
    });
}
