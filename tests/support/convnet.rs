//! A small convolutional network with Candle's batch norm, and functions that train it on ranks that are threads.

use super::tiny::config;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{BatchNorm, Conv2d, Conv2dConfig, Linear, Module, ModuleT, VarBuilder, batch_norm};
use candle_zero::comm::{Communicator, threads};
use candle_zero::nn::in_training;
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

pub const CHANNELS: usize = 4;
pub const CLASSES: usize = 5;

/// The structure of the network.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape {
    pub units: bool,
    pub checkpointed: bool,
}

/// Convolution, batch norm and ReLU.
pub struct Block {
    conv: Conv2d,
    pub norm: BatchNorm,
}

impl Block {
    pub fn new(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        let conv = candle_nn::conv2d_no_bias(inputs, outputs, 3, config, vb.pp("conv"))?;
        Ok(Self { conv, norm: batch_norm(outputs, 1e-5, vb.pp("norm"))? })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward_t(&self.conv.forward(x)?, in_training())?.relu()
    }
}

pub enum Layer {
    Unit(Unit<Block>),
    Plain(Block),
}

impl Layer {
    pub fn block(&self) -> &Block {
        match self {
            Self::Unit(unit) => unit.inner(),
            Self::Plain(block) => block,
        }
    }
}

pub struct Net {
    first: Block,
    layers: Vec<Layer>,
    head: Linear,
}

impl Net {
    pub fn new(shape: Shape, vb: VarBuilder<'_>) -> Result<Self> {
        let layer = |i: usize| {
            let (vb, inputs) = (vb.pp(format!("layer.{i}")), CHANNELS + i);
            Ok(if shape.units {
                Layer::Unit(unit(vb, |vb| Block::new(inputs, inputs + 1, vb))?.checkpointed(shape.checkpointed))
            } else {
                Layer::Plain(Block::new(inputs, inputs + 1, vb)?)
            })
        };
        Ok(Self {
            first: Block::new(2, CHANNELS, vb.pp("first"))?,
            layers: (0..2).map(layer).collect::<Result<_>>()?,
            head: candle_nn::linear(CHANNELS + 2, CLASSES, vb.pp("head"))?,
        })
    }

    pub fn loss(&self, (x, y): &(Tensor, Tensor)) -> Result<Tensor> {
        candle_zero::nn::cross_entropy(&self.logits(x)?, y)
    }

    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.layers.iter().try_fold(self.first.forward(x)?, |x, layer| match layer {
            Layer::Unit(unit) => unit.forward(&x),
            Layer::Plain(block) => block.forward(&x),
        })?;
        self.head.forward(&x.mean((2, 3))?)
    }

    pub fn norms(&self) -> impl Iterator<Item = &BatchNorm> {
        std::iter::once(&self.first).chain(self.layers.iter().map(Layer::block)).map(|block| &block.norm)
    }

    /// Returns all running statistics.
    pub fn statistics(&self) -> Vec<f32> {
        let values = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        self.norms().flat_map(|norm| [values(norm.running_mean()), values(norm.running_var())].concat()).collect()
    }
}

/// Returns the three images of the sample with this index, and their classes.
pub fn batch(sample: usize, dtype: DType) -> (Tensor, Tensor) {
    let pixel = |i: usize| (((sample * 131 + i * 37) % 101) as f32 / 50.0 - 1.0) * (1.0 + sample as f32 * 0.1);
    let x = Tensor::from_iter((0..3 * 2 * 4 * 4).map(pixel), &Device::Cpu).unwrap();
    let classes: Vec<u32> = (0..3).map(|i| ((sample + i) % CLASSES) as u32).collect();
    let x = x.reshape((3, 2, 4, 4)).unwrap().to_dtype(dtype).unwrap();
    (x, Tensor::new(classes, &Device::Cpu).unwrap())
}

/// The results of a rank's run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub losses: Vec<u32>,
    pub norms: Vec<u64>,
    pub statistics: Vec<f32>,
}

/// Trains for `steps` optimizer steps from micro step `from` on.
pub fn steps(engine: &mut Engine<Net>, from: usize, steps: usize) -> candle_zero::Result<Outcome> {
    let (world, rank, dtype) = (engine.world_size(), engine.rank(), engine.dtype());
    let accumulation = engine.config().batch.gradient_accumulation_steps;
    let (mut losses, mut norms) = (vec![], vec![]);
    for micro in from..from + steps * accumulation {
        let batch = batch(micro * world + rank, dtype);
        let loss = engine.forward(|net| net.loss(&batch))?;
        losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
        engine.backward(&loss)?;
        let boundary = engine.is_gradient_accumulation_boundary();
        engine.step()?;
        if boundary {
            norms.push(engine.global_grad_norm().unwrap().to_bits());
        }
    }
    Ok(Outcome { losses, norms, statistics: engine.model().statistics() })
}

/// Creates an engine for the network on one of several ranks that are threads.
pub fn engine(
    comm: Arc<dyn Communicator>,
    shape: Shape,
    config: &Value,
    more: impl FnOnce(EngineBuilder) -> EngineBuilder,
) -> candle_zero::Result<Engine<Net>> {
    let builder = more(Engine::builder().communicator(comm).device(Device::Cpu));
    builder.initialize(|vb| Net::new(shape, vb), config.clone())
}

/// Trains on `world` ranks that are threads, and writes the exported file to `export`.
pub fn train(world: usize, shape: Shape, stage: u8, accumulation: usize, export: &Path) -> Vec<Outcome> {
    let zero = json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0});
    let config = config(stage, accumulation, zero, json!({}));
    let outcomes = threads::run(world, |comm| {
        let mut engine = engine(comm, shape, &config, |builder| builder)?;
        let outcome = steps(&mut engine, 0, 4)?;
        engine.export_safetensors(export)?;
        Ok(outcome)
    });
    outcomes.unwrap().into_iter().map(|outcome: candle_zero::Result<_>| outcome.unwrap()).collect()
}
