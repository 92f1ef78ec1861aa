//! `SyncBatchNorm`: ranks with parts of a batch compute what one rank computes from the complete batch.

use crate::support::tiny::config;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{BatchNorm, BatchNormConfig, Conv2d, Conv2dConfig, Linear, Module, ModuleT, VarBuilder, VarMap};
use candle_zero::comm::threads;
use candle_zero::error::Error;
use candle_zero::nn::{SyncBatchNorm, cross_entropy, in_training, sync_batch_norm};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::path::Path;

enum Norm {
    Candle(BatchNorm),
    Sync(SyncBatchNorm),
}

impl Norm {
    fn new(sync: bool, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(match sync {
            true => Self::Sync(sync_batch_norm(width, 1e-5, vb)?),
            false => Self::Candle(candle_nn::batch_norm(width, 1e-5, vb)?),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Candle(norm) => norm.forward_t(x, in_training()),
            Self::Sync(norm) => norm.forward_t(x, in_training()),
        }
    }
}

struct Block(Conv2d, Norm);

impl Block {
    fn new(sync: bool, [inputs, outputs]: [usize; 2], vb: VarBuilder<'_>) -> Result<Self> {
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        let conv = candle_nn::conv2d_no_bias(inputs, outputs, 3, config, vb.pp("conv"))?;
        Ok(Self(conv, Norm::new(sync, outputs, vb.pp("norm"))?))
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?)?.relu()
    }
}

struct Net(Block, Unit<Block>, Linear);

impl Net {
    fn new(sync: bool, recompute: bool, vb: VarBuilder<'_>) -> Result<Self> {
        let block = unit(vb.pp("b"), |vb| Block::new(sync, [3, 4], vb))?.checkpointed(recompute);
        Ok(Self(Block::new(sync, [2, 3], vb.pp("a"))?, block, candle_nn::linear(4, 3, vb.pp("head"))?))
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let x = self.1.forward(&self.0.forward(x)?)?;
        cross_entropy(&self.2.forward(&x.mean((2, 3))?)?, y)
    }
}

/// Returns six images and their classes.
fn images() -> (Tensor, Tensor) {
    let pixel = |i: usize| ((i * i * 31 + i * 7) % 97) as f32 / 30.0 - 1.0 + (i / 32) as f32 * 0.3;
    let x = Tensor::from_iter((0..6 * 2 * 4 * 4).map(pixel), &Device::Cpu).unwrap().reshape((6, 2, 4, 4)).unwrap();
    (x, Tensor::new(&[0u32, 1, 2, 2, 0, 1], &Device::Cpu).unwrap())
}

fn sgd(stage: u8, more: Value) -> Value {
    let mut config = config(stage, 1, json!({"stage3_param_persistence_threshold": 0}), more);
    config["optimizer"] = json!({"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}});
    config["gradient_clipping"] = json!(0.0);
    config["zero_allow_untested_optimizer"] = json!(true);
    config.as_object_mut().unwrap().remove("scheduler");
    config
}

/// Returns the mean loss of each of four steps in which each rank has its part of the images, and writes the weights
/// and statistics to `file`.
fn train(world: usize, stage: u8, sync: bool, recompute: bool, file: &Path) -> Vec<f32> {
    let losses = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Net::new(sync, recompute, vb), sgd(stage, json!({})))?;
        let part = 6 / world;
        let (x, y) = images();
        let (x, y) = (x.narrow(0, rank * part, part)?, y.narrow(0, rank * part, part)?);
        let mut losses = vec![];
        for _ in 0..4 {
            let loss = engine.forward(|net| net.loss(&x, &y))?;
            engine.backward(&loss)?;
            engine.step()?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        engine.export_safetensors(file)?;
        Ok::<_, Error>(losses)
    });
    let losses: Vec<Vec<f32>> = losses.unwrap().into_iter().map(|losses| losses.unwrap()).collect();
    (0..4).map(|step| losses.iter().map(|rank| rank[step]).sum::<f32>() / world as f32).collect()
}

#[test]
fn parts_of_a_batch_train_as_the_whole_with_candles_batch_norm() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    let expected = train(1, 0, false, false, &whole);
    assert!(expected[3] < expected[0] - 0.05, "the loss does not fall: {expected:?}");
    let expected_tensors = candle_core::safetensors::load(&whole, &Device::Cpu).unwrap();
    for world in [1, 2, 3] {
        let losses = train(world, 2, true, false, &parts);
        let close = |a: f32, b: f32| (a - b).abs() <= 2e-5 * b.abs().max(0.1);
        assert!(
            losses.iter().zip(&expected).all(|(a, b)| close(*a, *b)),
            "world size {world}: {losses:?} {expected:?}"
        );
        let tensors = candle_core::safetensors::load(&parts, &Device::Cpu).unwrap();
        assert_eq!(tensors.len(), expected_tensors.len());
        for (name, expected) in &expected_tensors {
            let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (a, b) in values(&tensors[name]).into_iter().zip(values(expected)) {
                assert!((a - b).abs() < 2e-5, "{name}, world size {world}: {a} {b}");
            }
        }
    }
}

#[test]
fn stages_and_recomputation_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("net");
    let results = |stage, recompute| (train(2, stage, true, recompute, &file), std::fs::read(&file).unwrap());
    let reference = results(0, false);
    for stage in 0..4 {
        for recompute in [false, true] {
            assert!(results(stage, recompute) == reference, "stage {stage}, recomputed {recompute}");
        }
    }
}

#[test]
fn without_an_engine_it_is_batch_norm_with_its_gradients() {
    for (affine, dims) in [(true, vec![4, 3, 5]), (false, vec![4, 3, 5]), (true, vec![6, 3])] {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let config = BatchNormConfig { eps: 1e-3, affine, momentum: 0.3, ..BatchNormConfig::default() };
        let candle = candle_nn::batch_norm(3, config, vb.pp("candle")).unwrap();
        let sync = sync_batch_norm(3, config, vb.pp("sync")).unwrap();
        let numel = dims.iter().product();
        let x = Tensor::from_iter((0..numel).map(|i: usize| ((i * 29) % 17) as f32 * 0.3), &Device::Cpu).unwrap();
        let x = Var::from_tensor(&x.reshape(&dims[..]).unwrap()).unwrap();
        let g = Tensor::from_iter((0..numel).map(|i: usize| ((i * 13) % 11) as f32 - 4.0), &Device::Cpu).unwrap();
        let g = g.reshape(&dims[..]).unwrap();
        let close = |a: &Tensor, b: &Tensor| {
            let difference = (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() < 1e-5, "{a} {b}");
        };
        for train in [true, false] {
            let [a, b] = [candle.forward_t(&x, train).unwrap(), sync.forward_t(&x, train).unwrap()];
            close(&a, &b);
            let [ga, gb] = [a, b].map(|y| (y * &g).unwrap().sum_all().unwrap().backward().unwrap());
            close(ga.get(&x).unwrap(), gb.get(&x).unwrap());
            if let (Some((w, b)), Some((sw, sb))) = (candle.weight_and_bias(), sync.weight_and_bias()) {
                close(ga.get(w).unwrap(), gb.get(sw).unwrap());
                close(ga.get(b).unwrap(), gb.get(sb).unwrap());
            }
            close(candle.running_mean(), sync.running_mean());
            close(candle.running_var(), sync.running_var());
        }
    }
}

#[test]
fn it_trains_and_evaluates_in_bf16_with_statistics_in_f32() {
    struct Normed(Linear, SyncBatchNorm);
    let build =
        |vb: VarBuilder<'_>| Ok(Normed(candle_nn::linear(3, 4, vb.pp("l"))?, sync_batch_norm(4, 1e-5, vb.pp("n"))?));
    let results = threads::run(2, |comm| {
        let rank = comm.rank() as f32;
        let builder: EngineBuilder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(build, sgd(3, json!({"bf16": {"enabled": true}})))?;
        let x = Tensor::from_iter((0..12).map(|i| (i * i % 7) as f32 + rank), &Device::Cpu)?;
        let x = x.reshape((4, 3))?.to_dtype(DType::BF16)?;
        let run = |Normed(linear, norm): &Normed| {
            let y = norm.forward_t(&linear.forward(&x)?, in_training())?;
            y.to_dtype(DType::F32)?.affine(1.0, -1.0)?.sqr()?.mean_all()
        };
        for _ in 0..3 {
            let loss = engine.forward(run)?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        let evaluated = engine.eval(run)?.to_scalar::<f32>()?;
        let norm = &engine.model().1;
        assert_eq!(norm.running_var().dtype(), DType::F32);
        Ok::<_, Error>((evaluated.is_finite(), norm.running_mean().to_vec1::<f32>()?))
    });
    let ranks: Vec<_> = results.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
    assert!(ranks[0].0);
    assert_eq!(ranks[0].1, ranks[1].1, "running statistics are those of both ranks");
}

#[test]
fn weights_in_f32_normalize_an_input_of_bf16() {
    let x = Tensor::from_iter((0..24).map(|i| (i * i % 7) as f32), &Device::Cpu).unwrap().reshape((8, 3)).unwrap();
    let outcome = |format: DType| {
        let varmap = VarMap::new();
        let norm = sync_batch_norm(3, 1e-5, VarBuilder::from_varmap(&varmap, format, &Device::Cpu)).unwrap();
        let y = norm.forward_train(&x.to_dtype(DType::BF16).unwrap()).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let grads = (&y * &y).unwrap().sum_all().unwrap().backward().unwrap();
        let (weight, bias) = norm.weight_and_bias().unwrap();
        let [dw, db] = [weight, bias].map(|parameter| grads.get(parameter).unwrap().clone());
        assert_eq!([dw.dtype(), db.dtype()], [format; 2]);
        [y, dw.to_dtype(DType::BF16).unwrap(), db.to_dtype(DType::BF16).unwrap()]
            .map(|t| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    // The weights are ones and the biases zeros, which are the same numbers in both formats.
    assert_eq!(outcome(DType::F32), outcome(DType::BF16));
}

#[test]
fn wrong_inputs_are_errors_in_words() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let norm = sync_batch_norm(3, 1e-5, vb.clone()).unwrap();
    let error_for = |dims: &[usize]| {
        let x = Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        norm.forward_train(&x).unwrap_err().to_string()
    };
    assert!(error_for(&[2, 4, 5]).contains("[batch, 3, ..]"));
    assert!(error_for(&[3]).contains("[batch, 3, ..]"));
    assert!(error_for(&[1, 3]).contains("at least two"));
    for config in [
        BatchNormConfig { eps: -1.0, ..BatchNormConfig::default() },
        BatchNormConfig { momentum: 1.5, ..BatchNormConfig::default() },
        BatchNormConfig { remove_mean: false, ..BatchNormConfig::default() },
    ] {
        let error = sync_batch_norm(3, config, vb.pp("other")).unwrap_err().to_string();
        assert!(error.contains("sync_batch_norm"), "{error}");
    }
}
