//! Failures in a job with several ranks, and the errors on each rank.

use crate::support::tiny::config;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Init, Linear, Module, VarBuilder, linear};
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error, ParamError};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::path::Path;

fn plain(stage: u8) -> Value {
    config(stage, 1, json!({"stage3_param_persistence_threshold": 0}), json!({}))
}

/// Returns the error messages of all ranks; every rank must have failed.
fn errors<T: Send + std::fmt::Debug>(results: Vec<candle_zero::Result<T>>) -> Vec<String> {
    results.into_iter().map(|r| r.unwrap_err().to_string()).collect()
}

// ---- absent parameters -----------------------------------------------------------------------------------------

struct Leaky {
    unit: Unit<Linear>,
    /// The unit's weight, accessible from outside.
    weight: Tensor,
    other: Linear,
}

impl Leaky {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let mut weight = None;
        let unit = unit(vb.pp("inner"), |vb| {
            let layer = linear(4, 4, vb)?;
            weight = Some(layer.weight().clone());
            Ok(layer)
        })?;
        Ok(Self { unit, weight: weight.unwrap(), other: linear(4, 1, vb.pp("other"))? })
    }

    fn loss(&self) -> Result<Tensor> {
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        let y = self.unit.forward(&x)?.matmul(&self.weight)?;
        self.other.forward(&y)?.sqr()?.mean_all()
    }
}

#[test]
fn a_parameter_used_outside_of_its_unit_is_named_at_stage_3_and_fine_below() {
    for stage in 0..3 {
        let mut engine = Engine::initialize(Leaky::new, plain(stage)).unwrap();
        let loss = engine.forward(Leaky::loss).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    let mut config = plain(3);
    config["zero_optimization"]["stage3_max_reuse_distance"] = json!(0);
    let results = threads::run(2, |comm| {
        let mut engine = Engine::builder().communicator(comm).initialize(Leaky::new, config.clone())?;
        engine.forward(Leaky::loss)
    });
    for error in results.unwrap() {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Param(ParamError::Absent { .. })));
        insta::allow_duplicates! { insta::assert_snapshot!(error, @"an operation used a sharded parameter that is not currently gathered: inner.weight, inner.bias; use parameters only inside the closure given to engine.forward or engine.eval, and a unit's parameters only inside that unit's forward pass (dtype mismatch in matmul, lhs: F32, rhs: F6E2M3)"); }
    }
}

#[test]
fn a_parameter_used_outside_of_forward_is_an_error_too_at_stage_3() {
    let engine = Engine::initialize(|vb| linear(4, 3, vb), plain(3)).unwrap();
    let weight = engine.model().weight();
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    assert!(x.matmul(&weight.t().unwrap()).is_err());
    assert!((weight * 2.0).is_err());
    assert!(weight.to_vec2::<f32>().is_err());
}

// ---- losses and gradients that are not finite ------------------------------------------------------------------

fn loss_of(factor: f64) -> impl FnMut(&Linear) -> Result<Tensor> {
    move |model| model.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()? * factor
}

fn one_step(engine: &mut Engine<Linear>, factor: f64) -> candle_zero::Result<()> {
    let loss = engine.forward(loss_of(factor))?;
    engine.backward(&loss)?;
    engine.step()
}

/// Removes the name of the collective, which depends on a rank's progress.
fn without_collective(text: &str) -> String {
    let end = text.find(" while rank").unwrap_or(text.len());
    text[..end].to_string()
}

#[test]
fn a_loss_of_one_rank_that_is_not_a_number_stops_all_ranks_in_f32_and_names_that_rank() {
    for stage in 0..4 {
        let results = threads::run(3, |comm| {
            let rank = comm.rank();
            let mut engine = Engine::builder().communicator(comm).initialize(|vb| linear(4, 3, vb), plain(stage))?;
            one_step(&mut engine, 1.0)?;
            one_step(&mut engine, if rank == 1 { f64::NAN } else { 1.0 })
        });
        let texts = errors(results.unwrap());
        insta::allow_duplicates! {
            insta::assert_snapshot!(texts[1], @"the loss is NaN on rank 1 in optimizer step 1 (micro step 1); lower the learning rate, clip gradients (gradient_clipping), and check the data of this step");
            insta::assert_snapshot!(without_collective(&texts[0]), @"rank 1 stopped (the loss is NaN on rank 1 in optimizer step 1 (micro step 1); lower the learning rate, clip gradients (gradient_clipping), and check the data of this step)");
            insta::assert_snapshot!(without_collective(&texts[2]), @"rank 1 stopped (the loss is NaN on rank 1 in optimizer step 1 (micro step 1); lower the learning rate, clip gradients (gradient_clipping), and check the data of this step)");
        }
    }
}

#[test]
fn a_loss_that_is_not_a_number_skips_the_step_in_fp16_and_halves_the_scale_after_the_hysteresis() {
    let folder = tempfile::tempdir().unwrap();
    let (before, after) = (folder.path().join("before"), folder.path().join("after"));
    for stage in 0..4 {
        let mut config = plain(stage);
        config["fp16"] = json!({"enabled": true, "initial_scale_power": 8, "hysteresis": 2});
        let results = threads::run(2, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm);
            let mut engine = builder.initialize(|vb| linear(4, 3, vb), config.clone())?;
            let run = |engine: &mut Engine<Linear>, factor: f64| {
                let x = Tensor::ones((2, 4), DType::F16, &Device::Cpu)?;
                let loss = engine.forward(|m| m.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()? * factor)?;
                engine.backward(&loss)?;
                engine.step()
            };
            run(&mut engine, 1.0)?;
            engine.export_safetensors(&before)?;
            let mut rows = vec![];
            for _ in 0..3 {
                // Only rank 1's loss is not finite, but rank 0 skips the step, too.
                run(&mut engine, if rank == 1 { f64::NAN } else { 1.0 })?;
                assert!(!engine.was_step_applied());
                assert_eq!(engine.global_grad_norm(), Some(f64::INFINITY));
                rows.push((engine.skipped_steps(), engine.loss_scale()));
            }
            engine.export_safetensors(&after)?;
            run(&mut engine, 1.0)?;
            assert!(engine.was_step_applied() && engine.global_grad_norm().unwrap().is_finite());
            assert_eq!((engine.global_steps(), engine.skipped_steps()), (5, 3));
            Ok(rows)
        });
        // As in DeepSpeed, stage 0 does not support hysteresis.
        let scales = if stage == 0 { [128.0, 64.0, 32.0] } else { [256.0, 128.0, 64.0] };
        for rows in results.unwrap() {
            assert_eq!(rows.unwrap(), [(1, scales[0]), (2, scales[1]), (3, scales[2])], "stage {stage}");
        }
        assert!(std::fs::read(&before).unwrap() == std::fs::read(&after).unwrap(), "weights are unchanged");
    }
}

/// Returns a function that computes a loss of 0, whose gradient is infinite on rank 1: the derivative of the square
/// root at 0.
fn root_loss(rank: usize) -> impl FnMut(&Tensor) -> Result<Tensor> {
    move |param| if rank == 1 { (param * 0.5)?.sqrt()?.sum_all() } else { param.sum_all() }
}

#[test]
fn a_gradient_that_is_not_finite_with_a_finite_loss_stops_f32_and_names_the_parameter() {
    for stage in 0..4 {
        let results = threads::run(2, |comm| {
            let rank = comm.rank();
            let build = |vb: VarBuilder<'_>| vb.get_with_hints(6, "radius", Init::Const(0.0));
            let mut engine = Engine::builder().communicator(comm).initialize(build, plain(stage))?;
            let loss = engine.forward(root_loss(rank))?;
            assert_eq!(loss.to_scalar::<f32>()?, 0.0);
            engine.backward(&loss)?;
            let error = engine.step().unwrap_err();
            assert!(matches!(error, Error::Engine(EngineError::NonFiniteGradient { .. })));
            assert_eq!(engine.global_steps(), 0);
            if stage < 3 {
                assert_eq!(engine.model().to_vec1::<f32>()?, [0.0; 6], "the weights are unchanged");
            }
            Ok(error.to_string())
        });
        let texts: Vec<String> = results.unwrap().into_iter().map(|r| r.unwrap()).collect();
        insta::allow_duplicates! {
            insta::assert_snapshot!(texts[0], @"the gradient of radius is not finite on rank 0 in optimizer step 0; the weights are unchanged; look for non-finite or very large values in the initial weights and in the data of this step");
            insta::assert_snapshot!(texts[1], @"the gradient of radius is not finite on rank 1 in optimizer step 0; the weights are unchanged; look for non-finite or very large values in the initial weights and in the data of this step");
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_in_one_shard_names_its_rank_to_the_others() {
    // Only the last of six elements is bad; it is in rank 1's piece at every stage.
    for stage in 0..4 {
        let results = threads::run(2, |comm| {
            let build = |vb: VarBuilder<'_>| vb.get_with_hints(6, "radius", Init::Const(0.0));
            let mut engine = Engine::builder().communicator(comm).initialize(build, plain(stage))?;
            let shift = Tensor::new(&[1f32, 1.0, 1.0, 1.0, 1.0, 0.0], &Device::Cpu)?;
            let loss = engine.forward(|param| (param + &shift)?.sqrt()?.sum_all())?;
            engine.backward(&loss)?;
            engine.step()
        });
        let texts = errors(results.unwrap());
        insta::allow_duplicates! {
            insta::assert_snapshot!(texts[0], @"gradients are not finite on rank 1 in optimizer step 0; the weights are unchanged; look for non-finite or very large values in the initial weights and in the data of this step");
            insta::assert_snapshot!(texts[1], @"the gradient of radius is not finite on rank 1 in optimizer step 0; the weights are unchanged; look for non-finite or very large values in the initial weights and in the data of this step");
        }
    }
}

// ---- ranks that differ -----------------------------------------------------------------------------------------

#[test]
fn models_that_differ_between_ranks_are_refused_on_every_rank() {
    for stage in 0..4 {
        let results = threads::run(2, |comm| {
            let outputs = 3 + comm.rank();
            Engine::builder().communicator(comm).initialize(|vb| linear(4, outputs, vb), plain(stage)).map(drop)
        });
        let texts = errors(results.unwrap());
        insta::allow_duplicates! {
            insta::assert_snapshot!(texts[0], @"rank 0 built a different model from rank 1: 2 parameters with 15 elements in total, hash 8e013166, instead of 2 parameters with 20 elements in total, hash 6e925670 (the hash is of the names, shapes and units); every rank must build the same model");
            insta::assert_snapshot!(texts[1], @"rank 1 built a different model from rank 0: 2 parameters with 20 elements in total, hash 6e925670, instead of 2 parameters with 15 elements in total, hash 8e013166 (the hash is of the names, shapes and units); every rank must build the same model");
        }
    }
    // These models differ only in names; the next ones differ only in units.
    let results = threads::run(2, |comm| {
        let name = ["left", "right"][comm.rank()];
        Engine::builder().communicator(comm).initialize(|vb| linear(4, 3, vb.pp(name)), plain(2)).map(drop)
    });
    insta::assert_snapshot!(errors(results.unwrap())[0], @"rank 0 built a different model from rank 1: 2 parameters with 15 elements in total, hash bd869fe8, instead of 2 parameters with 15 elements in total, hash 6e06c99e (the hash is of the names, shapes and units); every rank must build the same model");
    let results = threads::run(2, |comm| {
        let rank = comm.rank();
        let build = |vb: VarBuilder<'_>| {
            if rank == 0 { linear(4, 3, vb).map(drop) } else { unit(vb, |vb| linear(4, 3, vb)).map(drop) }
        };
        Engine::builder().communicator(comm).initialize(build, plain(3)).map(drop)
    });
    assert!(results.unwrap().into_iter().all(|r| matches!(r, Err(Error::Engine(EngineError::ModelsDiffer { .. })))));
}

#[test]
fn configurations_that_differ_between_ranks_are_refused_on_every_rank() {
    let with = |key: &str, value: Value| {
        let mut config = plain(2);
        config[key] = value;
        config
    };
    let others = [
        with("gradient_clipping", json!(0.25)),
        with("gradient_accumulation_steps", json!(2)),
        with("zero_optimization", json!({"stage": 3, "stage3_param_persistence_threshold": 0})),
        with("bf16", json!({"enabled": true})),
    ];
    let messages = others.map(|other| {
        let results = threads::run(3, |comm| {
            let config = if comm.rank() == 2 { other.clone() } else { plain(2) };
            Engine::builder().communicator(comm).initialize(|vb| linear(4, 3, vb), config).map(drop)
        });
        let [first, second, third] = errors(results.unwrap()).try_into().unwrap();
        assert_eq!(first.replace("rank 0", "rank 1"), second);
        [first, third]
    });
    insta::assert_snapshot!(messages[0][0], @"rank 0 has a different configuration from rank 2: gradient_clipping is 0.5 on rank 0 and 0.25 on rank 2; every rank must get the same file or value, and the same schedule");
    let [clipping, accumulation, stage, dtype] = messages.map(|[_, third]| third);
    insta::assert_snapshot!(clipping, @"rank 2 has a different configuration from rank 0: gradient_clipping is 0.25 on rank 2 and 0.5 on rank 0; every rank must get the same file or value, and the same schedule");
    insta::assert_snapshot!(accumulation, @"rank 2 has a different configuration from rank 0: gradient_accumulation_steps is 2 on rank 2 and 1 on rank 0, train_batch_size is 12 on rank 2 and 6 on rank 0; every rank must get the same file or value, and the same schedule");
    insta::assert_snapshot!(stage, @"rank 2 has a different configuration from rank 0: zero_optimization.overlap_comm is true on rank 2 and false on rank 0, zero_optimization.stage is 3 on rank 2 and 2 on rank 0; every rank must get the same file or value, and the same schedule");
    insta::assert_snapshot!(dtype, @"rank 2 has a different configuration from rank 0: bf16.enabled is true on rank 2 and false on rank 0; every rank must get the same file or value, and the same schedule");
}

#[test]
fn weights_that_differ_between_ranks_are_refused_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["a", "b"].map(|name| folder.path().join(name));
    for (file, fill) in files.iter().zip([0u8, 1]) {
        write_filled(file, &[("weight", Dtype::F32, &[3, 4]), ("bias", Dtype::F32, &[3])], fill);
    }
    let seeds = |rank: usize| Engine::builder().seed(rank as u64);
    let weights = |rank: usize| Engine::builder().init_from(&files[rank]);
    let builders: [&(dyn Fn(usize) -> EngineBuilder + Sync); 2] = [&seeds, &weights];
    for builder in builders {
        let results = threads::run(2, |comm| {
            builder(comm.rank()).communicator(comm).initialize(|vb| linear(4, 3, vb), plain(3)).map(drop)
        });
        let texts = errors(results.unwrap());
        insta::allow_duplicates! {
            insta::assert_snapshot!(texts[0], @"the initial weights of rank 0 differ from those of rank 1: a different seed or init_from file; every rank must use the same seed and file (unlike in DeepSpeed, rank 0's weights are not sent to the others)");
            insta::assert_snapshot!(texts[1], @"the initial weights of rank 1 differ from those of rank 0: a different seed or init_from file; every rank must use the same seed and file (unlike in DeepSpeed, rank 0's weights are not sent to the others)");
        }
    }
}

#[test]
fn a_configuration_refused_on_one_rank_stops_the_others_with_its_words() {
    let results = threads::run(2, |comm| {
        let mut config = plain(2);
        if comm.rank() == 1 {
            config["gradient_cliping"] = json!(1.0);
        }
        Engine::builder().communicator(comm).initialize(|vb| linear(4, 3, vb), config).map(drop)
    });
    let texts = errors(results.unwrap());
    insta::assert_snapshot!(texts[1], @"the configuration given as a value: `gradient_cliping`: not a key at the top level; did you mean `gradient_clipping`?");
    insta::assert_snapshot!(without_collective(&texts[0]), @"rank 1 stopped (the configuration given as a value: `gradient_cliping`: not a key at the top level; did you mean `gradient_clipping`?)");
}

// ---- weight files ----------------------------------------------------------------------------------------------

fn write(path: &Path, tensors: &[(&str, Dtype, &[usize])]) {
    write_filled(path, tensors, 0);
}

/// Writes tensors whose bytes are all `fill`.
fn write_filled(path: &Path, tensors: &[(&str, Dtype, &[usize])], fill: u8) {
    let bytes = vec![fill; 4096];
    let view = |dtype: Dtype, shape: &[usize]| {
        let size = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        TensorView::new(dtype, shape.to_vec(), &bytes[..size]).unwrap()
    };
    let views = tensors.iter().map(|(name, dtype, shape)| (*name, view(*dtype, shape)));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Returns the error, the same on all ranks, about a weight file for a linear layer with 4 inputs and 3 outputs.
fn refusal(tensors: &[(&str, Dtype, &[usize])]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write(&file, tensors);
    refusal_of(&file)
}

fn refusal_of(file: &Path) -> String {
    let folder = format!("{}/", file.parent().unwrap().display());
    let mut all = vec![];
    for stage in 0..4 {
        let results = threads::run(2, |comm| {
            let builder = Engine::builder().communicator(comm).init_from(file);
            builder.initialize(|vb| linear(4, 3, vb), plain(stage)).map(drop)
        });
        all.extend(errors(results.unwrap()).into_iter().map(|text| text.replace(&folder, "")));
    }
    assert!(all.iter().all(|text| *text == all[0]), "{all:?}");
    all.remove(0)
}

#[test]
fn a_weight_file_must_hold_exactly_the_models_parameters() {
    use Dtype::{BF16, F16, F32, F64, I64};
    let bias: (&str, Dtype, &[usize]) = ("bias", F32, &[3]);
    insta::assert_snapshot!(refusal(&[bias]), @"model.safetensors has no tensor weight of shape [3, 4], which the model needs; the file must hold exactly the model's tensors; it has bias");
    insta::assert_snapshot!(refusal(&[("weight", F32, &[3, 4]), bias, ("lm_head.weight", F32, &[2]), ("extra", F32, &[1])]), @"model.safetensors holds tensors that the model does not have: extra, lm_head.weight; does it belong to a different model, or to one of a different size?");
    insta::assert_snapshot!(refusal(&[("weight", F32, &[4, 3]), bias]), @"tensor weight in model.safetensors has shape [4, 3], but the model's parameter has [3, 4]; check the model's sizes");
    insta::assert_snapshot!(refusal(&[("weight", I64, &[3, 4]), bias]), @"tensor weight in model.safetensors is of type I64; only F32, F16 and BF16 can be read");
    insta::assert_snapshot!(refusal(&[("weight", F64, &[3, 4]), bias]), @"tensor weight in model.safetensors is of type F64; only F32, F16 and BF16 can be read");
    // 16-bit files are read.
    let folder = tempfile::tempdir().unwrap();
    for dtype in [F16, BF16, F32] {
        let file = folder.path().join("model.safetensors");
        write(&file, &[("weight", dtype, &[3, 4]), bias]);
        let mut engine = Engine::builder().init_from(&file).initialize(|vb| linear(4, 3, vb), plain(2)).unwrap();
        assert_eq!(engine.eval(loss_of(1.0)).unwrap().to_scalar::<f32>().unwrap(), 0.0);
    }
}

#[test]
fn a_weight_file_must_be_there_and_be_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    insta::assert_snapshot!(refusal_of(&file), @"cannot read model.safetensors: No such file or directory (os error 2)");
    std::fs::write(&file, b"PK\x03\x04 this is a pickle in a zip").unwrap();
    insta::assert_snapshot!(refusal_of(&file), @"model.safetensors is not a readable safetensors file: header too large");
    std::fs::write(&file, b"").unwrap();
    insta::assert_snapshot!(refusal_of(&file), @"model.safetensors is not a readable safetensors file: header too small");
    // The file is truncated: its header describes data that does not exist.
    write(&file, &[("weight", Dtype::F32, &[3, 4]), ("bias", Dtype::F32, &[3])]);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 8]).unwrap();
    insta::assert_snapshot!(refusal_of(&file), @"model.safetensors is not a readable safetensors file: it was cut short (it has 180 of the 188 bytes that its header describes)");
}

#[test]
fn a_call_that_one_rank_alone_makes_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let results = threads::run(2, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).initialize(|vb| linear(4, 1, vb), plain(2))?;
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        for _ in 0..2 {
            let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            engine.step()?;
            if rank == 0 {
                engine.save_checkpoint(folder.path(), None, json!(null))?;
            }
        }
        Ok(())
    });
    let all = errors(results.unwrap());
    let message = all.iter().find(|text| text.contains("have diverged")).unwrap_or_else(|| panic!("{all:?}"));
    assert!(message.contains("save_checkpoint (control no. "), "{message}");
    assert!(message.contains("backward (") || message.contains("step ("), "{message}");
    assert!(message.contains("never on only some of them as in `if rank == 0`"), "{message}");
}

#[test]
fn a_tensor_that_is_computed_while_the_model_is_built_is_refused_at_every_stage() {
    type Derived = fn(&Tensor) -> Result<Tensor>;
    let derived: [Derived; 4] = [|w| w.t()?.contiguous(), |w| w * 2.0, |w| w.sum_all(), |w| Tensor::cat(&[w, w], 0)];
    for stage in 0..4 {
        for derive in derived {
            let build = |vb: VarBuilder<'_>| {
                let layer = linear(4, 3, vb.pp("a"))?;
                let derived = derive(layer.weight())?;
                Ok((layer, derived))
            };
            let error = Engine::initialize(build, plain(stage)).map(drop).unwrap_err();
            insta::allow_duplicates! { insta::assert_snapshot!(error, @"the model computes with a parameter while the model is being built (the last parameter taken is a.bias): the result would keep the initial values forever while the parameter is trained; compute the result in the forward pass (views such as t() and reshape may be taken immediately)"); }
        }
    }
}

#[test]
fn a_view_that_is_taken_while_the_model_is_built_follows_the_training_at_every_stage() {
    let losses = |stage: u8| {
        let build = |vb: VarBuilder<'_>| {
            let w = vb.get_with_hints((3, 4), "w", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
            Ok((w.t()?, w.reshape((2, 6))?))
        };
        let mut config = plain(stage);
        config["zero_optimization"]["stage3_param_persistence_threshold"] = json!(0);
        let mut engine = Engine::initialize(build, config).unwrap();
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let mut step = || {
            let loss = engine.forward(|(t, r)| x.matmul(t)?.sqr()?.mean_all()? + r.sqr()?.mean_all()?).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
            loss.to_scalar::<f32>().unwrap().to_bits()
        };
        // The learning rate begins at 0.
        [(); 6].map(|()| step())
    };
    let reference = losses(0);
    assert_ne!(reference[0], reference[5]);
    (1..4).for_each(|stage| assert_eq!(losses(stage), reference, "stage {stage}"));
}

#[test]
fn a_sharded_parameter_of_another_engine_is_said_to_be_that() {
    for stage in [0, 3] {
        let other = Engine::initialize(|vb| linear(4, 3, vb), plain(3)).unwrap();
        let mut engine = Engine::initialize(|vb| linear(4, 4, vb), plain(stage)).unwrap();
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let error = engine.forward(|m| other.model().forward(&m.forward(&x)?)).unwrap_err();
        assert!(matches!(error, Error::Param(ParamError::AbsentElsewhere { .. })), "stage {stage}: {error}");
    }
}

/// Returns a function that builds a model with a trainable layer and one more parameter, which may have no elements.
fn with_parameter(
    name: &'static str,
    shape: &'static [usize],
) -> impl Fn(VarBuilder<'_>) -> Result<(Linear, Tensor)> + Sync {
    move |vb| {
        Ok((linear(4, 1, vb.pp("layer"))?, vb.get_with_hints(shape, name, candle_nn::init::DEFAULT_KAIMING_NORMAL)?))
    }
}

#[test]
fn parameters_without_elements_train_and_are_saved_at_every_stage() {
    for shape in [&[0][..], &[0, 3], &[3, 0], &[2, 0, 3]] {
        for (stage, world) in [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)] {
            let folder = tempfile::tempdir().unwrap();
            let results = threads::run(world, |comm| {
                let mut engine =
                    Engine::builder().communicator(comm).initialize(with_parameter("empty", shape), plain(stage))?;
                let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
                for _ in 0..2 {
                    let loss = engine
                        .forward(|(layer, empty)| layer.forward(&x)?.sqr()?.mean_all()? + empty.sqr()?.sum_all()?)?;
                    engine.backward(&loss)?;
                    engine.step()?;
                }
                engine.save_checkpoint(folder.path(), None, json!({}))?;
                engine.load_checkpoint(folder.path(), None, &Default::default())?;
                engine.export_safetensors(folder.path().join("all.safetensors"))?;
                Ok(engine.safe_get_full_fp32_param("empty")?.dims().to_vec())
            });
            for result in results.unwrap() {
                let result: candle_zero::Result<Vec<usize>> = result;
                assert_eq!(result.unwrap_or_else(|e| panic!("{shape:?} at stage {stage}: {e}")), shape);
            }
            let exported = candle_core::safetensors::load(folder.path().join("all.safetensors"), &Device::Cpu).unwrap();
            assert_eq!(exported["empty"].dims(), shape, "stage {stage}");
        }
    }
}

#[test]
fn a_name_that_files_cannot_have_is_refused_while_the_model_is_built() {
    for stage in [0, 3] {
        let error = Engine::initialize(with_parameter("__metadata__", &[3]), plain(stage)).map(drop).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"a parameter or buffer is named __metadata__, which safetensors files reserve for their header; give it another name");
        }
    }
}

#[test]
fn a_loss_in_f64_gives_the_same_bits_at_every_stage() {
    let losses = |stage| {
        let results = threads::run(2, |comm| {
            let rank = comm.rank();
            let mut engine = Engine::builder().communicator(comm).initialize(|vb| linear(4, 1, vb), plain(stage))?;
            let x = (Tensor::ones((2, 4), DType::F32, &Device::Cpu)? * (rank as f64 + 1.0))?;
            let mut losses = vec![];
            for _ in 0..4 {
                let loss = engine.forward(|m| m.forward(&x)?.to_dtype(DType::F64)?.sqr()?.mean_all())?;
                losses.push(loss.to_scalar::<f64>()?.to_bits());
                engine.backward(&loss)?;
                engine.step()?;
            }
            Ok(losses)
        });
        results.unwrap().into_iter().map(|r: candle_zero::Result<Vec<u64>>| r.unwrap()).collect::<Vec<_>>()
    };
    let reference = losses(0);
    assert_ne!(reference[0][0], reference[0][3]);
    (1..4).for_each(|stage| assert_eq!(losses(stage), reference, "stage {stage}"));
}

#[test]
fn a_copy_of_a_parameter_that_the_constructor_made_is_named_as_a_cause() {
    let build = |vb: VarBuilder<'_>| {
        let layer = linear(4, 4, vb)?;
        let copy = layer.weight().copy()?;
        Ok((layer, copy))
    };
    let mut engine = Engine::initialize(build, plain(0)).unwrap();
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let error = engine.forward(|(layer, copy)| layer.forward(&x.matmul(copy)?)?.sqr()?.mean_all()).unwrap_err();
    assert!(matches!(error, Error::Param(ParamError::AbsentElsewhere { .. })), "{error}");
    assert!(error.to_string().contains("a copy that the model's constructor made"), "{error}");
}

#[test]
fn candles_error_about_a_sharded_parameter_becomes_one_that_says_what_to_do() {
    let mut config = plain(3);
    config["zero_optimization"]["stage3_param_persistence_threshold"] = json!(0);
    let engine = Engine::initialize(|vb| linear(4, 3, vb), config).unwrap();
    let error: Error = engine.model().weight().sqr().unwrap_err().into();
    let Error::Param(ParamError::AbsentElsewhere { why }) = &error else { panic!("{error}") };
    assert!(!why.contains('\n') && why.contains("unary"), "{why}");
    assert!(error.to_string().contains("safe_get_full_fp32_param"), "{error}");
}

#[test]
fn an_own_layer_says_outside_of_an_engine_that_its_parameter_is_sharded() {
    let mut config = plain(3);
    config["zero_optimization"]["stage3_param_persistence_threshold"] = json!(0);
    let engine = Engine::initialize(|vb| candle_zero::nn::Linear::new(4, 3, vb), config).unwrap();
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let error = engine.model().forward(&x).unwrap_err().to_string();
    insta::assert_snapshot!(error, @"linear: the parameter of shape [3, 4] is sharded and is not currently gathered; use it inside engine.forward or eval");
}
