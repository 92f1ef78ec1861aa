//! Access to single parameters by name: `safe_get_*`, `safe_set_*`, and parameters gathered outside a forward pass.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::error::{EngineError, Error, ParamError};
use candle_zero::memory::MemoryKind;
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

/// Runs the forward and the backward pass.
fn pass(engine: &mut Engine<Tiny>, sample: usize) -> candle_zero::Result<()> {
    let (ids, targets) = batch(sample);
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    assert_eq!(tensor.dtype(), DType::F32);
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Returns all stages, with and without offload if the stage supports it.
fn variants(folder: &Path) -> Vec<(u8, Value)> {
    let nvme = || json!({"device": "nvme", "nvme_path": folder});
    let released = json!({"stage3_param_persistence_threshold": 0});
    let all = json!({"stage3_param_persistence_threshold": 40, "offload_param": nvme(), "offload_optimizer": nvme()});
    let mut variants: Vec<(u8, Value)> = (0..3).map(|stage| (stage, json!({}))).collect();
    variants.extend([(1, json!({"offload_optimizer": {"device": "cpu"}})), (2, json!({"offload_optimizer": nvme()}))]);
    variants.extend([(3, released), (3, json!({})), (3, all)]);
    variants
}

/// A matrix in a unit, a small vector, and the embedding outside all units.
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
                            // This rank's part is a slice of the full value.
                            let local = [
                                engine.safe_get_local_fp32_param(name)?,
                                engine.safe_get_local_grad(name)?.unwrap(),
                                engine.safe_get_local_optimizer_state(name, "exp_avg")?,
                            ];
                            let exp_avg = engine.safe_get_full_optimizer_state(name, "exp_avg")?;
                            for (local, full) in local.iter().zip([&value, &grad, &exp_avg]) {
                                let (local, full) = (bits(local), bits(full));
                                let shard = full.len().div_ceil(world);
                                let start = if stage == 0 { 0 } else { full.len().min(engine.rank() * shard) };
                                assert_eq!(local, full[start..start + local.len()]);
                                assert!(stage > 0 || local.len() == full.len());
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
                        // In 16 bits, the ranks of a stage agree; stages round gradients at different points.
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
                    // The tensors that the model computes with have the same values.
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
                        // In 16 bits, the ranks of a stage agree; stages round gradients at different points.
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
                insta::assert_snapshot!(engine.safe_get_full_grad("x").unwrap_err(), @"the model has no parameter x: no name is similar");
                insta::assert_snapshot!(engine.safe_get_full_optimizer_state("embed.weight", "exp_avrg").unwrap_err(), @"parameter embed.weight has no optimizer state exp_avrg: it has exp_avg, exp_avg_sq");
                insta::assert_snapshot!(engine.safe_set_full_fp32_param("embed.weight", &value).unwrap_err(), @"a value of shape [3, 5] is given for parameter embed.weight, whose shape is [37, 12]; give a value of that shape");
            }
            let zeros = Tensor::zeros((37, 12), DType::F32, &Device::Cpu)?;
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.safe_set_full_grad("embed.weight", &zeros).unwrap_err(), @"parameter embed.weight has no gradient now: a parameter that is not frozen has one from backward until the step that updates the weights");
            }
            let rank_value = (zeros.ones_like()? * engine.rank() as f64)?;
            let error = engine.safe_set_full_fp32_param("embed.weight", &rank_value).unwrap_err();
            assert!(matches!(error, Error::Engine(EngineError::ArgumentsDiffer { .. })), "{error}");
            let (ids, targets) = batch(0);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.safe_set_full_fp32_param("embed.weight", &zeros).unwrap_err(), @"safe_set_full_fp32_param was called between forward and backward; the order of calls in a micro step is forward, backward, step");
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
            insta::assert_snapshot!(error, @"parameter embed.weight has no optimizer state exp_avg: it has none");
        }
        let halved = (engine.safe_get_full_fp32_param("embed.weight")? * 0.5)?;
        engine.safe_set_full_fp32_param("embed.weight", &halved)?;
        assert_eq!(bits(&engine.safe_get_full_fp32_param("embed.weight")?), bits(&halved));
        engine.step()
    });
}

// ---- local parts, and changes by one rank -----------------------------------------------------------------------

/// Returns this rank's part of a full value.
fn part(engine: &Engine<Tiny>, whole: &Tensor) -> candle_core::Result<Tensor> {
    let whole = whole.flatten_all()?;
    let (len, shard) = (whole.elem_count(), whole.elem_count().div_ceil(engine.world_size()));
    let start = len.min(engine.rank() * shard);
    whole.narrow(0, start, shard.min(len - start))
}

/// Trains with all values set part by part or in full, and returns each rank's resulting values.
fn set_and_train(world: usize, config: &Value, by_part: bool) -> Vec<Vec<Vec<u32>>> {
    on_ranks(world, |comm| {
        let mut engine = tiny(comm, config)?;
        let rank = engine.rank();
        pass(&mut engine, rank)?;
        engine.step()?;
        for name in NAMES {
            let value = engine.safe_get_full_fp32_param(name)?.affine(0.5, 0.01)?;
            let state = engine.safe_get_full_optimizer_state(name, "exp_avg")?.affine(-2.0, 0.001)?;
            if by_part {
                engine.safe_set_local_fp32_param(name, &part(&engine, &value)?)?;
                engine.safe_set_local_optimizer_state(name, &part(&engine, &state)?, "exp_avg")?;
            } else {
                engine.safe_set_full_fp32_param(name, &value)?;
                engine.safe_set_full_optimizer_state(name, &state, "exp_avg")?;
            }
            assert_eq!(bits(&engine.safe_get_full_fp32_param(name)?), bits(&value));
            assert_eq!(bits(&engine.safe_get_full_optimizer_state(name, "exp_avg")?), bits(&state));
        }
        let (ids, targets) = batch(5);
        let mut seen = vec![bits(&engine.eval(|model| model.loss(&ids, &targets))?.to_dtype(DType::F32)?)];
        pass(&mut engine, rank + world)?;
        let grad = engine.safe_get_full_grad(NAMES[0])?.unwrap().affine(0.25, 0.0)?;
        if by_part {
            engine.safe_set_local_grad(NAMES[0], &part(&engine, &grad)?)?;
        } else {
            engine.safe_set_full_grad(NAMES[0], &grad)?;
        }
        // In float16, a quarter of a small number is rounded.
        if engine.dtype() != DType::F16 {
            assert_eq!(bits(&engine.safe_get_full_grad(NAMES[0])?.unwrap()), bits(&grad));
        }
        engine.step()?;
        for name in NAMES {
            seen.push(bits(&engine.safe_get_full_fp32_param(name)?));
        }
        Ok(seen)
    })
}

#[test]
fn what_each_rank_sets_of_its_own_part_is_as_if_the_whole_had_been_set() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for precision in
        [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true, "loss_scale": 64}})]
    {
        for world in [1, 2, 3] {
            for (stage, zero) in variants(folder.path()).into_iter().filter(|(stage, _)| *stage > 0) {
                let config = config(stage, 1, zero, precision.clone());
                let (parts, wholes) = (set_and_train(world, &config, true), set_and_train(world, &config, false));
                assert!(parts == wholes, "{config}, world {world}");
            }
        }
    }
}

#[test]
fn a_part_that_cannot_be_set_is_refused_on_every_rank_and_changes_nothing() {
    on_ranks(2, |comm| {
        let mut engine = tiny(comm, &config(0, 1, json!({}), json!({})))?;
        let value = Tensor::zeros(12, DType::F32, &Device::Cpu)?;
        insta::allow_duplicates! {
            insta::assert_snapshot!(engine.safe_set_local_fp32_param(NAMES[1], &value).unwrap_err(), @"safe_set_local_fp32_param sets a rank's part of a parameter, but at stage 0 nothing is divided among the ranks; call safe_set_full_fp32_param on all ranks with the same value, or use stage 1, 2 or 3");
        }
        assert!(engine.safe_set_local_grad(NAMES[1], &value).is_err());
        assert!(engine.safe_set_local_optimizer_state(NAMES[1], &value, "exp_avg").is_err());
        Ok(())
    });
    for stage in 1..4 {
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(stage, 1, json!({}), json!({})))?;
            let before = bits(&engine.safe_get_full_fp32_param(NAMES[1])?);
            // The value has the right length on rank 0 and is too long on rank 1.
            let value = Tensor::zeros(6 + engine.rank(), DType::F32, &Device::Cpu)?;
            let error = engine.safe_set_local_fp32_param(NAMES[1], &value).unwrap_err();
            insta::allow_duplicates! {
                if engine.rank() == 0 {
                    insta::assert_snapshot!(error, @"safe_set_local_fp32_param changed nothing: rank 1 failed; see its error for the cause");
                } else {
                    insta::assert_snapshot!(error, @"a value of shape [7] is given for rank 1's part of parameter layer.0.norm.bias, which has shape [6]; give a value of the shape that safe_get_local_fp32_param returns");
                }
            }
            let right = Tensor::zeros(6, DType::F32, &Device::Cpu)?;
            let error = engine.safe_set_local_grad(NAMES[1], &right).unwrap_err();
            assert!(matches!(error, Error::Engine(EngineError::GradientAbsent { .. })), "{error}");
            let error = engine.safe_set_local_optimizer_state(NAMES[1], &right, "momentum").unwrap_err();
            assert!(error.to_string().contains("it has exp_avg, exp_avg_sq"), "{error}");
            assert_eq!(bits(&engine.safe_get_full_fp32_param(NAMES[1])?), before);
            pass(&mut engine, 0)?;
            engine.step()
        });
    }
}

#[test]
fn what_one_rank_makes_of_gathered_values_is_the_value_on_all_ranks_at_every_stage_and_offload() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for precision in [json!({}), json!({"bf16": {"enabled": true}})] {
        for (world, modifier) in [(1, 0), (2, 1), (3, 1)] {
            let mut first: Option<Vec<Vec<u32>>> = None;
            for (stage, zero) in variants(folder.path()) {
                let config = config(stage, 1, zero, precision.clone());
                let ranks = on_ranks(world, |comm| {
                    let mut engine = tiny(comm, &config)?;
                    let rank = engine.rank();
                    pass(&mut engine, rank)?;
                    engine.step()?;
                    let before: Vec<Tensor> = NAMES
                        .iter()
                        .map(|name| engine.safe_get_full_fp32_param(name))
                        .collect::<candle_zero::Result<_>>()?;
                    let mut ran = false;
                    engine.gathered_mut(&NAMES, modifier, |values| {
                        ran = true;
                        for (value, before) in values.iter_mut().zip(&before) {
                            assert_eq!(bits(value), bits(before));
                            // The values include negative zeros.
                            *value = before.relu()?.neg()?;
                        }
                        Ok(())
                    })?;
                    assert_eq!(ran, rank == modifier);
                    let mut seen = vec![];
                    for (name, before) in NAMES.iter().zip(&before) {
                        let value = bits(&engine.safe_get_full_fp32_param(name)?);
                        assert_eq!(value, bits(&before.relu()?.neg()?), "{name}");
                        assert!(value.contains(&(-0f32).to_bits()), "{name}");
                        if precision == json!({}) {
                            seen.push(value);
                        }
                    }
                    // The tensors that the model computes with have the same values.
                    let (ids, targets) = batch(5);
                    let loss = bits(&engine.eval(|model| model.loss(&ids, &targets))?.to_dtype(DType::F32)?);
                    pass(&mut engine, rank)?;
                    engine.step()?;
                    if precision == json!({}) {
                        seen.extend([loss, bits(&engine.safe_get_full_fp32_param(NAMES[0])?)]);
                    } else {
                        seen.push(vec![]);
                    }
                    Ok(seen)
                });
                for seen in ranks {
                    assert!(*first.get_or_insert_with(|| seen.clone()) == seen, "{config}, world {world}");
                }
            }
        }
    }
}

#[test]
fn a_modification_that_fails_changes_nothing_and_all_ranks_go_on() {
    for stage in [0, 3] {
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(stage, 1, json!({}), json!({})))?;
            let before = bits(&engine.safe_get_full_fp32_param(NAMES[1])?);
            let is_modifier = engine.rank() == 1;
            let failed = engine.gathered_mut(&[NAMES[1]], 1, |_| candle_core::bail!("mine")).unwrap_err().to_string();
            let reshaped = engine.gathered_mut(&[NAMES[1]], 1, |values| {
                values[0] = values[0].reshape((3, 4))?;
                Ok(())
            });
            let reshaped = reshaped.unwrap_err();
            if is_modifier {
                assert!(failed.contains("mine"), "{failed}");
                assert!(matches!(reshaped, Error::Param(ParamError::ValueShape { .. })), "{reshaped}");
            } else {
                insta::allow_duplicates! {
                    insta::assert_snapshot!(failed, @"gathered_mut changed nothing: rank 1 failed; see its error for the cause");
                }
                assert_eq!(reshaped.to_string(), failed);
            }
            let nobody = engine.gathered_mut(&[NAMES[1]], 2, |_| Ok(())).unwrap_err();
            insta::allow_duplicates! {
                insta::assert_snapshot!(nobody, @"gathered_mut was asked to run on rank 2, but the ranks are 0 to 1; give one of them");
            }
            let differ = engine.gathered_mut(&[NAMES[1]], engine.rank(), |_| Ok(())).unwrap_err();
            assert!(matches!(differ, Error::Engine(EngineError::ArgumentsDiffer { .. })), "{differ}");
            assert!(engine.gathered_mut(&["x"], 0, |_| Ok(())).unwrap_err().to_string().contains("no parameter x"));
            assert_eq!(bits(&engine.safe_get_full_fp32_param(NAMES[1])?), before);
            pass(&mut engine, 0)?;
            engine.step()
        });
    }
}

#[test]
fn values_of_other_shapes_on_other_ranks_are_an_error_on_all() {
    on_ranks(2, |comm| {
        let mut engine = tiny(comm, &config(3, 1, json!({}), json!({})))?;
        // The value is zero on both ranks, but only rank 0's has the right shape.
        let shape = if engine.rank() == 0 { (37, 12) } else { (12, 37) };
        let error = engine.safe_set_full_fp32_param("embed.weight", &Tensor::zeros(shape, DType::F32, &Device::Cpu)?);
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Engine(EngineError::ArgumentsDiffer { .. })), "{error}");
        pass(&mut engine, 0)?;
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
            let held = engine.memory_report().row(MemoryKind::Gathered).bytes.held;
            let seen = engine.gathered(&["b.bias", "a.weight", "b.bias"], |[a, b]| {
                assert!(b.weight().sum_all().is_err(), "b.weight was not requested");
                Ok((a.weight().copy()?, b.bias().unwrap().copy()?))
            })?;
            assert_eq!(bits(&seen.0), bits(&engine.safe_get_full_fp32_param("a.weight")?));
            assert_eq!(bits(&seen.1), bits(&engine.safe_get_full_fp32_param("b.bias")?));
            assert_eq!(engine.memory_report().row(MemoryKind::Gathered).bytes.held, held);
            assert!(engine.model()[0].weight().sum_all().is_err(), "released again");
            // An error in the closure also releases the parameters.
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
    let train = |reads: bool| {
        on_ranks(2, |comm| {
            let config = config(3, 1, json!({"stage3_param_persistence_threshold": 40}), json!({}));
            let shape = Shape { checkpointed: true, ..SHAPE };
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config)?;
            let read = |engine: &mut Engine<Tiny>, between_passes: bool| -> candle_zero::Result<()> {
                if reads {
                    engine.gathered(&NAMES, |_| Ok(()))?;
                    engine.safe_get_full_fp32_param(NAMES[0])?;
                    let emptied = engine.empty_partition_cache();
                    assert!(emptied.is_err() == between_passes, "{emptied:?}");
                }
                Ok(())
            };
            for micro in 0..3 {
                let (ids, targets) = batch(2 * micro + engine.rank());
                read(&mut engine, false)?;
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                read(&mut engine, true)?;
                engine.backward(&loss)?;
                read(&mut engine, false)?;
                engine.step()?;
            }
            Ok((bits(&engine.safe_get_full_fp32_param(NAMES[0])?), engine.global_grad_norm().unwrap().to_bits()))
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
            report.row(MemoryKind::Gathered).bytes.held + report.row(MemoryKind::Persistent).bytes.held
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
