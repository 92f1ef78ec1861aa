//! Buffers: their kinds, their agreement between ranks, and training with Candle's batch norm, which has buffers.

use crate::support::convnet::{Shape, batch, engine, steps, train};
use crate::support::swap::swap;
use crate::support::tiny::config;
use candle_core::{CpuStorage, DType, Device, Tensor, Var};
use candle_nn::{Init, Module, VarBuilder, VarMap};
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error, ParamError};
use candle_zero::memory::MemoryKind;
use candle_zero::zero::{BufferSync, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::json;
use std::collections::HashMap;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn batch_norm_gives_the_same_bits_at_all_stages_with_units_and_recomputed() {
    let folder = folder();
    for (world, accumulation) in [(1, 1), (2, 1), (2, 2)] {
        let of = |stage: u8, shape| {
            let file = folder.path().join("net.safetensors");
            let outcomes = train(world, shape, stage, accumulation, &file);
            (outcomes, std::fs::read(file).unwrap())
        };
        let (reference, exported) = of(0, Shape::default());
        assert!(reference[0].statistics.iter().any(|v| *v != 0.0 && *v != 1.0));
        for stage in 0..4 {
            for (units, checkpointed) in [(false, false), (true, false), (true, true)] {
                let (run, file) = of(stage, Shape { units, checkpointed });
                let what = format!("stage {stage}, world {world}, units {units}, recomputed {checkpointed}");
                assert_eq!(run, reference, "{what}");
                assert!(file == exported, "exported: {what}");
            }
        }
    }
}

#[test]
fn running_statistics_are_those_of_candle_alone() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let alone = candle_nn::batch_norm(2, 1e-5, vb).unwrap();
    let (x, _) = batch(3, DType::F32);
    alone.forward_train(&x).unwrap();
    let results = threads::run(1, |comm| {
        let build = |vb: VarBuilder<'_>| candle_nn::batch_norm(2, 1e-5, vb);
        let mut engine = Engine::builder().communicator(comm).initialize(build, config(2, 1, json!({}), json!({})))?;
        engine.forward(|norm| norm.forward_train(&x)?.sqr()?.sum_all())?;
        let norm = engine.model();
        Ok::<_, Error>((norm.running_mean().to_vec1::<f32>()?, norm.running_var().to_vec1::<f32>()?))
    });
    let (mean, var) = results.unwrap().remove(0).unwrap();
    assert_eq!(mean, alone.running_mean().to_vec1::<f32>().unwrap());
    assert_eq!(var, alone.running_var().to_vec1::<f32>().unwrap());
}

/// Returns, for each of 2 ranks under this rule, the statistics after the first step, at the beginning of the second
/// step's forward pass, and after that pass.
fn of_second_step(sync: BufferSync) -> Vec<(Vec<f32>, Vec<f32>, Vec<f32>)> {
    let config = config(1, 1, json!({}), json!({}));
    let results = threads::run(2, |comm| {
        let mut engine = engine(comm, Shape::default(), &config, |builder| builder.buffer_sync(sync))?;
        let after_one = steps(&mut engine, 0, 1)?.statistics;
        let (mut at_start, batch) = (vec![], batch(engine.rank(), DType::F32));
        engine.forward(|net| {
            at_start = net.statistics();
            net.loss(&batch)
        })?;
        Ok::<_, Error>((after_one, at_start, engine.model().statistics()))
    });
    results.unwrap().into_iter().map(|r| r.unwrap()).collect()
}

#[test]
fn a_training_forward_begins_with_rank_0s_buffers() {
    let ranks = of_second_step(BufferSync::FromRankZero);
    assert_ne!(ranks[0].0, ranks[1].0, "each rank has seen its own batch");
    assert_eq!(ranks[0].0, ranks[0].1);
    assert_eq!(ranks[1].1, ranks[0].1);
    assert_ne!(ranks[0].2, ranks[1].2);
}

#[test]
fn the_mean_of_all_ranks_is_taken_at_the_end_of_a_step() {
    let (local, mean) = (of_second_step(BufferSync::None), of_second_step(BufferSync::Mean));
    assert_ne!(local[0].0, local[1].0);
    assert_eq!(local[1].0, local[1].1, "nothing is exchanged without a rule");
    assert_eq!(mean[0].0, mean[1].0);
    for (i, value) in mean[0].0.iter().enumerate() {
        let expected = ((f64::from(local[0].0[i]) + f64::from(local[1].0[i])) / 2.0) as f32;
        assert_eq!(*value, expected, "element {i}");
    }
}

#[test]
fn evaluation_changes_no_buffer_and_sync_buffers_makes_ranks_agree() {
    let config = config(3, 1, json!({}), json!({}));
    let results = threads::run(2, |comm| {
        let mut engine = engine(comm, Shape { units: true, checkpointed: false }, &config, |b| b)?;
        let trained = steps(&mut engine, 0, 2)?.statistics;
        let (x, _) = batch(9, DType::F32);
        engine.eval(|net| net.logits(&x))?;
        assert_eq!(engine.model().statistics(), trained);
        engine.sync_buffers()?;
        let logits = engine.eval(|net| net.logits(&x))?;
        Ok::<_, Error>((trained, engine.model().statistics(), logits.flatten_all()?.to_vec1::<f32>()?))
    });
    let ranks: Vec<_> = results.unwrap().into_iter().map(|r| r.unwrap()).collect();
    assert_ne!(ranks[0].0, ranks[1].0);
    assert_eq!(ranks[1].1, ranks[0].0);
    assert_eq!(ranks[0].2, ranks[1].2);
}

#[test]
fn batch_norm_trains_in_bf16_with_statistics_in_f32() {
    struct Normed(candle_nn::Linear, candle_nn::BatchNorm);
    let build = |vb: VarBuilder<'_>| {
        Ok(Normed(candle_nn::linear(3, 4, vb.pp("linear"))?, candle_nn::batch_norm(4, 1e-5, vb.pp("norm"))?))
    };
    let config = config(2, 1, json!({}), json!({"bf16": {"enabled": true}}));
    let results = threads::run(2, |comm| {
        let rank = comm.rank() as f32;
        let mut engine = Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config.clone())?;
        let x = Tensor::from_iter((0..12).map(|i| (i * i % 7) as f32 + rank), &Device::Cpu)?;
        let x = x.reshape((4, 3))?.to_dtype(DType::BF16)?;
        for _ in 0..3 {
            let loss = engine.forward(|Normed(linear, norm)| {
                let y = norm.forward_train(&linear.forward(&x)?)?;
                y.to_dtype(DType::F32)?.affine(1.0, -1.0)?.sqr()?.mean_all()
            })?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        let var = engine.model().1.running_var();
        assert_eq!(var.dtype(), DType::F32);
        Ok::<_, Error>(var.to_vec1::<f32>()?)
    });
    let var = results.unwrap().remove(0).unwrap();
    assert!(var.iter().all(|v| v.is_finite() && *v != 1.0), "{var:?}");
}

/// A layer with buffers of several types alongside a weight.
struct Mixed {
    weight: Tensor,
    ids: Tensor,
    count: Var,
    scale: Tensor,
}

impl Mixed {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let count = vb.get_with_hints_dtype((), "num_batches_tracked", Init::Const(0.0), DType::I64)?;
        Ok(Self {
            weight: vb.get_with_hints((3, 2), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?,
            ids: vb.get_with_hints_dtype(4, "ids", Init::Const(1.0), DType::U32)?,
            count: Var::from_tensor(&count)?,
            scale: vb.get_with_hints(2, "chosen.scale", Init::Const(0.5))?,
        })
    }
}

impl Module for Mixed {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.count.set(&(self.count.as_tensor() + 1f64)?.detach())?;
        let rows = self.weight.index_select(&self.ids, 0)?;
        x.matmul(&rows.t()?)?.broadcast_mul(&self.scale.sum_all()?)
    }
}

fn mixed(builder: EngineBuilder, stage: u8) -> candle_zero::Result<Engine<Mixed>> {
    let rule = |name: &str, shape: &[usize]| name == "chosen.scale" && shape == [2];
    builder.device(Device::Cpu).buffers(rule).initialize(Mixed::new, config(stage, 1, json!({}), json!({})))
}

#[test]
fn integers_and_what_a_rule_chooses_are_buffers_and_no_parameters() {
    let folder = folder();
    let file = folder.path().join("mixed.safetensors");
    for stage in 0..4 {
        let results = threads::run(2, |comm| {
            let mut engine = mixed(Engine::builder().communicator(comm), stage)?;
            let x = Tensor::ones((2, 2), DType::F32, &Device::Cpu)?;
            for _ in 0..3 {
                let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            let memory = engine.memory_report();
            assert_eq!(memory.parameters, 6);
            assert_eq!(memory.row(MemoryKind::Buffers).bytes.held, 4 * 4 + 8 + 2 * 4);
            engine.export_safetensors(&file)?;
            engine.save_16bit_model(folder.path(), "mixed16.safetensors")
        });
        results.unwrap().into_iter().for_each(|r: candle_zero::Result<()>| r.unwrap());
        let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        assert_eq!(tensors.len(), 4);
        assert_eq!(tensors["ids"].to_vec1::<u32>().unwrap(), [1; 4]);
        assert_eq!(tensors["num_batches_tracked"].to_scalar::<i64>().unwrap(), 3);
        assert_eq!(tensors["chosen.scale"].to_vec1::<f32>().unwrap(), [0.5; 2]);
        // Another run starts from the export.
        let results = threads::run(1, |comm| {
            let engine = mixed(Engine::builder().communicator(comm).init_from(&file), stage)?;
            Ok::<_, Error>(engine.model().count.to_scalar::<i64>()?)
        });
        assert_eq!(results.unwrap().remove(0).unwrap(), 3);
    }
}

/// Returns the error of a model that starts from a file with these tensors, if there is one.
fn error_from(
    tensors: &[(&str, Tensor)],
    build: impl Fn(VarBuilder<'_>) -> candle_core::Result<()> + Sync,
) -> Option<Error> {
    let folder = folder();
    let file = folder.path().join("weights.safetensors");
    let tensors: HashMap<String, Tensor> = tensors.iter().map(|(name, t)| ((*name).to_string(), t.clone())).collect();
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let results = threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).init_from(&file);
        builder.initialize(&build, config(0, 1, json!({}), json!({}))).map(drop)
    });
    results.unwrap().remove(0).err()
}

#[test]
fn a_file_must_have_the_buffers_in_their_shape_and_kind() {
    let weight = ("weight", Tensor::ones(2, DType::F32, &Device::Cpu).unwrap());
    let ids = |t: Tensor| ("position_ids", t);
    let build = |vb: VarBuilder<'_>| {
        vb.get(2, "weight")?;
        let ids = vb.get_with_hints_dtype((1, 3), "position_ids", Init::Const(0.0), DType::U32)?;
        assert_eq!(ids.to_vec2::<u32>()?, [[0, 1, 2]]);
        Ok(())
    };
    let of = |t: candle_core::Result<Tensor>| error_from(&[weight.clone(), ids(t.unwrap())], build);
    // Position ids as Hugging Face writes them, in i64, and the counter of PyTorch's batch norm.
    let right = Tensor::new(&[[0i64, 1, 2]], &Device::Cpu).unwrap();
    let counter = ("norm.num_batches_tracked", Tensor::new(7i64, &Device::Cpu).unwrap());
    assert!(error_from(&[weight.clone(), ids(right), counter], build).is_none());
    let missing = error_from(std::slice::from_ref(&weight), build).unwrap();
    assert!(matches!(&missing, Error::Param(ParamError::MissingTensor { name, .. }) if name == "position_ids"));
    let shape = of(Tensor::new(&[0i64, 1, 2], &Device::Cpu)).unwrap();
    assert!(matches!(&shape, Error::Param(ParamError::MisshapenTensor { name, .. }) if name == "position_ids"));
    for wrong in [Tensor::new(&[[0f32, 1., 2.]], &Device::Cpu), Tensor::new(&[[0i64, -1, 2]], &Device::Cpu)] {
        let error = of(wrong).unwrap();
        let is_named =
            matches!(&error, Error::Param(ParamError::BufferFileDtype { name, .. }) if name == "position_ids");
        assert!(is_named, "{error}");
    }
}

#[test]
fn one_buffer_has_one_shape_and_one_type() {
    let ask = |vb: &VarBuilder<'_>, len: usize, dtype| vb.get_with_hints_dtype(len, "ids", Init::Const(0.0), dtype);
    let of = |second: (usize, DType)| {
        let results = threads::run(1, |comm| {
            let build = |vb: VarBuilder<'_>| {
                vb.get(2, "weight")?;
                ask(&vb, 3, DType::U32)?;
                ask(&vb, second.0, second.1)
            };
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            builder.initialize(build, config(0, 1, json!({}), json!({}))).map(drop)
        });
        results.unwrap().remove(0)
    };
    of((3, DType::U32)).unwrap();
    let shape = of((4, DType::U32)).unwrap_err();
    assert!(matches!(&shape, Error::Param(ParamError::Twice { name, .. }) if name == "ids"), "{shape}");
    let dtype = of((3, DType::I64)).unwrap_err();
    assert!(matches!(&dtype, Error::Param(ParamError::BufferTwice { name, .. }) if name == "ids"), "{dtype}");
    let other = of((3, DType::F8E4M3)).unwrap_err();
    assert!(matches!(&other, Error::Param(_)), "{other}");
}

/// Returns the results of 3 ranks whose models depend on the rank's index.
fn errors_of_ranks(
    stage: u8,
    build: impl Fn(usize, VarBuilder<'_>) -> candle_core::Result<()> + Sync,
) -> Vec<candle_zero::Result<()>> {
    let results = threads::run(3, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        builder.initialize(|vb| build(rank, vb), config(stage, 1, json!({}), json!({}))).map(drop)
    });
    results.unwrap()
}

#[test]
fn initial_values_that_depend_on_the_rank_are_an_error_with_the_name_at_every_stage() {
    for stage in 0..4 {
        for build in [
            |rank: usize, vb: VarBuilder<'_>| {
                vb.get_with_hints(4, "a", Init::Const(1.0))?;
                let hint = if rank == 1 { Init::Const(0.5) } else { Init::Const(0.0) };
                vb.pp("layer").get_with_hints(4, "odd", hint).map(drop)
            },
            |rank: usize, vb: VarBuilder<'_>| {
                vb.get_with_hints(4, "a", Init::Const(1.0))?;
                let ids = vb.pp("layer").get_with_hints_dtype(2, "odd", Init::Const(0.0), DType::U32)?;
                let value = Tensor::new(&[0u32, u32::from(rank == 1)], vb.device())?;
                Var::from_tensor(&ids)?.set(&value)
            },
        ] {
            for (rank, result) in errors_of_ranks(stage, build).into_iter().enumerate() {
                let error = result.unwrap_err();
                let Error::Engine(EngineError::InitialValuesDiffer { subject, rank: here, other, .. }) = &error else {
                    panic!("stage {stage}: {error}")
                };
                assert!(subject.ends_with("layer.odd") && *here == rank && *other != rank, "{error}");
            }
        }
    }
    let same = |_, vb: VarBuilder<'_>| vb.get_with_hints(4, "a", Init::Const(1.0)).map(drop);
    errors_of_ranks(1, same).into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_buffer_in_a_unit_is_there_outside_of_its_forward() {
    let build = |vb: VarBuilder<'_>| unit(vb.pp("block"), |vb| candle_nn::batch_norm(3, 1e-5, vb));
    let results = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let engine = builder.initialize(build, config(3, 1, json!({}), json!({})))?;
        Ok::<_, Error>(engine.model().inner().running_var().to_vec1::<f32>()?)
    });
    results.unwrap().into_iter().for_each(|values| assert_eq!(values.unwrap(), [1.0; 3]));
}

/// Returns one weight, and a buffer of 3 ids.
fn with_ids(vb: VarBuilder<'_>) -> candle_core::Result<(Tensor, Tensor)> {
    let ids = vb.pp("rows").get_with_hints_dtype(3, "ids", Init::Const(7.0), DType::U32)?;
    Ok((vb.get_with_hints(4, "weight", Init::Const(1.0))?, ids))
}

fn step(engine: &mut Engine<(Tensor, Tensor)>) -> candle_zero::Result<()> {
    let loss = engine.forward(|(weight, _)| weight.sqr()?.sum_all())?;
    engine.backward(&loss)?;
    engine.step()
}

fn is_changed_ids(error: &Error) -> bool {
    matches!(error, Error::Param(ParamError::BufferChanged { name, .. }) if name == "rows.ids")
}

#[test]
fn a_buffer_whose_shape_changes_is_an_error_with_its_name_in_a_step_and_the_last_checkpoint_is_whole() {
    for (world, sync, broken, changed) in [
        (1, BufferSync::FromRankZero, 0, CpuStorage::U32(vec![1, 2, 3, 4])),
        (1, BufferSync::Mean, 0, CpuStorage::U32(vec![1, 2])),
        (2, BufferSync::FromRankZero, 0, CpuStorage::U32(vec![])),
        (2, BufferSync::FromRankZero, 1, CpuStorage::F32(vec![1.0, 2.0, 3.0])),
        (2, BufferSync::None, 1, CpuStorage::U32(vec![1; 30])),
    ] {
        let folder = folder();
        let config = config(2, 1, json!({}), json!({}));
        let results = threads::run(world, |comm| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu).buffer_sync(sync);
            let mut engine = builder.initialize(with_ids, config.clone())?;
            step(&mut engine)?;
            engine.save_checkpoint(folder.path(), None, json!({}))?;
            if engine.rank() == broken {
                swap(&engine.model().1, changed.clone());
            }
            step(&mut engine)
        });
        let errors: Vec<Error> = results.unwrap().into_iter().map(|result| result.unwrap_err()).collect();
        assert!(is_changed_ids(&errors[broken]), "world {world}: {}", errors[broken]);
        // The other ranks do not wait forever, and repeat the error of the rank that failed.
        let others = errors.iter().enumerate().filter(|(rank, _)| *rank != broken);
        others.for_each(|(_, error)| assert!(error.to_string().contains("buffer rows.ids of shape [3]"), "{error}"));
        let loaded = threads::run(1, |comm| {
            let mut engine = Engine::builder().communicator(comm).initialize(with_ids, config.clone())?;
            engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?.unwrap();
            Ok::<_, Error>(engine.model().1.to_vec1::<u32>()?)
        });
        assert_eq!(loaded.unwrap().remove(0).unwrap(), [7; 3]);
    }
}

#[test]
fn a_buffer_whose_shape_changes_is_an_error_before_a_save_writes_and_a_load_puts_it_back() {
    let folder = folder();
    let [saved, refused] = ["saved", "refused"].map(|name| folder.path().join(name));
    let results = threads::run(2, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(with_ids, config(1, 1, json!({}), json!({})))?;
        step(&mut engine)?;
        engine.save_checkpoint(&saved, None, json!({}))?;
        let rank = engine.rank();
        let ids = engine.model().1.clone();
        let original = (rank == 0).then(|| swap(&ids, CpuStorage::U32(vec![1, 2, 3, 4])));
        let error = engine.save_checkpoint(&refused, None, json!({})).unwrap_err();
        if rank == 0 {
            insta::assert_snapshot!(error, @"buffer rows.ids of shape [3] holds 4 elements of type U32 instead of 3 elements of type U32; a buffer keeps its original shape and type; change its values with Var::set");
        }
        assert!(!refused.exists());
        // Once the buffer is repaired, the run continues. Loading a checkpoint also repairs it.
        if let Some(original) = original {
            swap(&ids, original);
        }
        engine.save_checkpoint(&refused, None, json!({}))?;
        step(&mut engine)?;
        swap(&ids, CpuStorage::I64(vec![1; 5]));
        engine.load_checkpoint(&saved, None, &LoadOptions::default())?.unwrap();
        step(&mut engine)?;
        Ok::<_, Error>(ids.to_vec1::<u32>()?)
    });
    results.unwrap().into_iter().for_each(|ids| assert_eq!(ids.unwrap(), [7; 3]));
}
