//! A GAN of two engines: the generator's loss passes through the discriminator's model.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::comm::Communicator;
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::sync::Arc;

/// The number of a rank's samples in a step.
const BATCH: usize = 8;

/// A network of two layers.
pub struct Net(Linear, Linear);

impl Net {
    fn new(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(linear(inputs, 17, vb.pp("hidden"))?, linear(17, outputs, vb.pp("out"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

/// A generator and a discriminator.
pub struct Gan {
    pub generator: Engine<Net>,
    pub discriminator: Engine<Net>,
}

/// Returns numbers between -1 and 1 that depend only on the seed.
fn values(seed: usize, shape: (usize, usize)) -> Result<Tensor> {
    let value = |i: usize| (((i * 7919 + seed * 104_729 + 13) % 2003) as f32 / 1001.5) - 1.0;
    Tensor::from_iter((0..shape.0 * shape.1).map(value), &Device::Cpu)?.reshape(shape)
}

/// Returns the mean squared difference between `scores` and `goal`.
fn distance(scores: &Tensor, goal: f64) -> Result<Tensor> {
    (scores - goal)?.sqr()?.mean_all()
}

pub fn config(stage: u8) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.5, 0.9]}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    })
}

impl Gan {
    /// Creates the engines for the job that `comm` or, without it, the environment describes.
    pub fn new(stage: u8, comm: Option<Arc<dyn Communicator>>) -> candle_zero::Result<Self> {
        let builder = |seed: u64| -> EngineBuilder {
            let builder = Engine::builder().device(Device::Cpu).seed(seed);
            comm.iter().fold(builder, |builder, comm| builder.communicator(comm.clone()))
        };
        Ok(Self {
            generator: builder(1).initialize(|vb| Net::new(3, 2, vb), config(stage))?,
            discriminator: builder(2).initialize(|vb| Net::new(2, 1, vb), config(stage))?,
        })
    }

    /// Takes a step of the discriminator, on real samples and detached fake ones.
    pub fn judge(&mut self, step: usize) -> candle_zero::Result<Tensor> {
        let seed = step * 64 + self.generator.rank();
        let fake = self.generator.eval(|g| g.forward(&values(seed, (BATCH, 3))?))?;
        let real = (values(seed + 32, (BATCH, 2))? * 0.1)?.affine(1.0, 0.5)?;
        let loss =
            self.discriminator.forward(|d| distance(&d.forward(&real)?, 1.0)? + distance(&d.forward(&fake)?, 0.0)?)?;
        self.discriminator.backward(&loss)?;
        self.discriminator.step()?;
        Ok(loss)
    }

    /// Takes a step of the generator, through the discriminator.
    pub fn generate(&mut self, step: usize) -> candle_zero::Result<Tensor> {
        let loss = self.generator_loss(step)?;
        self.generator.backward(&loss)?;
        self.generator.step()?;
        Ok(loss)
    }

    fn generator_loss(&mut self, step: usize) -> candle_zero::Result<Tensor> {
        let Self { generator, discriminator } = self;
        let seed = step * 64 + 7 + generator.rank();
        let through = |g: &Net| -> Result<Tensor> {
            let fake = g.forward(&values(seed, (BATCH, 3))?)?;
            let scores = discriminator.forward(|d| d.forward(&fake)).map_err(candle_core::Error::wrap)?;
            distance(&scores, 1.0)
        };
        generator.forward(through)
    }

    /// Runs the generator's forward and backward passes through the discriminator, and drops the gradients of the
    /// generator.
    pub fn try_generator(&mut self, step: usize) -> candle_zero::Result<()> {
        let loss = self.generator_loss(step)?;
        self.generator.backward(&loss)?;
        self.generator.zero_grad()
    }

    /// Trains for `steps` steps. Returns the bits of all losses and gradient norms of this rank and, on rank 0, the
    /// bytes of the exported weights.
    pub fn train(&mut self, steps: usize) -> candle_zero::Result<Vec<u64>> {
        let mut bits = vec![];
        for step in 0..steps {
            for loss in [self.judge(step)?, self.generate(step)?] {
                bits.push(u64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits()));
            }
            let norms = [self.discriminator.global_grad_norm(), self.generator.global_grad_norm()];
            bits.extend(norms.map(|norm| norm.unwrap_or(f64::NAN).to_bits()));
        }
        let folder = tempfile::tempdir().unwrap();
        for (name, engine) in [("generator", &mut self.generator), ("discriminator", &mut self.discriminator)] {
            let file = folder.path().join(name);
            // Rank 0 writes the file in its own folder. The other ranks return only their losses and norms.
            engine.export_safetensors(&file)?;
            let bytes = if engine.rank() == 0 { std::fs::read(&file).unwrap() } else { vec![] };
            bits.extend(bytes.iter().map(|byte| u64::from(*byte)));
        }
        Ok(bits)
    }
}
