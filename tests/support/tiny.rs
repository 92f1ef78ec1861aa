//! A tiny transformer, and threads that train it as ranks.

use super::device;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use candle_zero::comm::{CommReport, Communicator, threads};
use candle_zero::error::{Error, ParamError};
use candle_zero::memory::MemoryReport;
use candle_zero::nn::{Conv1D, Embedding, LayerNorm, causal_attention, cross_entropy, gelu_tanh};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::sync::Arc;

pub const VOCAB: usize = 37;
pub const WIDTH: usize = 12;
pub const TIME: usize = 6;

/// The structure of the tiny model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape {
    pub units: bool,
    pub checkpointed: bool,
    pub layers: usize,
}

pub struct Block {
    norm: LayerNorm,
    qkv: Conv1D,
    proj: Conv1D,
}

impl Block {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(WIDTH, 1e-5, vb.pp("norm"))?,
            qkv: Conv1D::new(WIDTH, 3 * WIDTH, 0.2, vb.pp("qkv"))?,
            proj: Conv1D::new(WIDTH, WIDTH, 0.2, vb.pp("proj"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = causal_attention(&self.qkv.forward(&self.norm.forward(x)?)?, 2)?;
        x + gelu_tanh(&self.proj.forward(&y)?)?
    }
}

pub enum Layer {
    Unit(Unit<Block>),
    Plain(Block),
}

/// An embedding, blocks and an output projection with odd sizes, so that shards are padded.
pub struct Tiny {
    embed: Embedding,
    layers: Vec<Layer>,
    head: Conv1D,
}

impl Tiny {
    pub fn new(shape: Shape, vb: VarBuilder<'_>) -> Result<Self> {
        let layer = |i: usize| {
            let vb = vb.pp(format!("layer.{i}"));
            Ok(if shape.units {
                Layer::Unit(unit(vb, Block::new)?.checkpointed(shape.checkpointed))
            } else {
                Layer::Plain(Block::new(vb)?)
            })
        };
        Ok(Self {
            embed: Embedding::new(VOCAB, WIDTH, vb.pp("embed"))?,
            layers: (0..shape.layers).map(layer).collect::<Result<_>>()?,
            head: Conv1D::new(WIDTH, VOCAB, 0.2, vb.pp("head"))?,
        })
    }

    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut x = self.embed.forward(ids)?;
        for layer in &self.layers {
            x = match layer {
                Layer::Unit(unit) => unit.forward(&x)?,
                Layer::Plain(block) => block.forward(&x)?,
            };
        }
        cross_entropy(&self.head.forward(&x)?, targets)
    }
}

/// Returns the two sequences of the sample with this index, and their targets.
pub fn batch(sample: usize) -> (Tensor, Tensor) {
    // Each token follows from the one before, so there is something to learn.
    let token = |i: usize| ((0..i).fold(sample * 13 + 1, |t, _| (5 * t + 3) % VOCAB) % VOCAB) as u32;
    let ids = |shift| Tensor::from_iter((0..2 * TIME).map(|i| token(i + shift)), &Device::Cpu).unwrap();
    (ids(0).reshape((2, TIME)).unwrap(), ids(1).reshape((2, TIME)).unwrap())
}

/// The results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The bits of the loss of every micro step of this rank.
    pub losses: Vec<u32>,
    /// The bits of every gradient norm.
    pub norms: Vec<u64>,
    /// The exported file.
    pub exported: Vec<u8>,
    pub memory: MemoryReport,
    pub comm: CommReport,
}

/// Returns a configuration with `zero` merged into the section `zero_optimization`, and `more` into the top level.
pub fn config(stage: u8, accumulation: usize, zero: Value, more: Value) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    });
    for (key, value) in zero.as_object().unwrap() {
        config["zero_optimization"][key] = value.clone();
    }
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// Trains the tiny model for `steps` optimizer steps on `world` ranks, each on the device that [`device::of_rank`]
/// returns.
pub fn train(world: usize, shape: Shape, config: &Value, steps: usize) -> Vec<Outcome> {
    train_with(world, shape, config, steps, |builder| builder)
}

/// Trains the tiny model after applying `more` to the engine's builder.
pub fn train_with(
    world: usize,
    shape: Shape,
    config: &Value,
    steps: usize,
    more: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> Vec<Outcome> {
    train_as(|comm| Ok(more(builder_on(device::of_rank, comm)?)), world, shape, config, steps)
}

/// Trains the tiny model over communicators that `over` creates from those of the threads.
pub fn train_over(
    over: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Sync,
    world: usize,
    shape: Shape,
    config: &Value,
    steps: usize,
) -> Vec<Outcome> {
    train_as(|comm| builder_on(device::of_rank, over(comm)), world, shape, config, steps)
}

/// Trains the tiny model on the device that `device` returns for each rank.
pub fn train_on(
    device: impl Fn(usize) -> Result<Device> + Sync,
    world: usize,
    shape: Shape,
    config: &Value,
    steps: usize,
) -> Vec<Outcome> {
    train_as(|comm| builder_on(&device, comm), world, shape, config, steps)
}

fn builder_on(device: impl Fn(usize) -> Result<Device>, comm: Arc<dyn Communicator>) -> Result<EngineBuilder> {
    let device = device(comm.rank())?;
    Ok(Engine::builder().communicator(comm).device(device))
}

fn train_as(
    builder: impl Fn(Arc<dyn Communicator>) -> Result<EngineBuilder> + Sync,
    world: usize,
    shape: Shape,
    config: &Value,
    steps: usize,
) -> Vec<Outcome> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let outcomes = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = builder(comm)?;
        let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let (mut losses, mut norms) = (vec![], vec![]);
        for micro in 0..steps * accumulation {
            let (ids, targets) = batch(micro * world + rank);
            let (ids, targets) = (ids.to_device(engine.device())?, targets.to_device(engine.device())?);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            let boundary = engine.is_gradient_accumulation_boundary();
            engine.step()?;
            if boundary {
                norms.push(engine.global_grad_norm().unwrap().to_bits());
            }
        }
        let (memory, comm) = (engine.memory_report(), engine.comm_report());
        engine.export_safetensors(&file)?;
        Ok((losses, norms, memory, comm))
    });
    let outcomes: Vec<_> = outcomes.unwrap().into_iter().collect::<candle_zero::Result<_>>().unwrap();
    let exported = std::fs::read(&file).unwrap();
    let outcome = |(losses, norms, memory, comm)| Outcome { losses, norms, exported: exported.clone(), memory, comm };
    outcomes.into_iter().map(outcome).collect()
}

/// Checks that, at stage 3, any operation that uses a unit's parameter outside the unit fails with an error that names
/// the parameter.
pub fn absent_parameters_are_named(device: fn() -> Result<Device>) {
    type Use = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let uses: [(&str, Use); 7] = [
        ("product", |w, x| x.matmul(w)),
        ("product of two", |w, _| w.matmul(w)),
        ("sum of all", |w, _| w.sum_all()),
        ("affine", |w, _| w.affine(2.0, 0.0)),
        ("both operands", |w, _| w.add(w)),
        ("transposed copy", |w, _| w.t()?.contiguous()),
        ("rows", |w, _| w.index_select(&Tensor::new(&[0u32, 2], w.device())?, 0)),
    ];
    for (name, run) in uses {
        let config = config(3, 1, json!({"stage3_param_persistence_threshold": 0}), json!({}));
        let results = threads::run(1, |comm| {
            let build = |vb: VarBuilder<'_>| unit(vb.pp("layer"), |vb| candle_nn::linear(4, 4, vb));
            let builder = Engine::builder().communicator(comm).device(device()?);
            let mut engine = builder.initialize(build, config.clone())?;
            let x = Tensor::ones((2, 4), DType::F32, engine.device())?;
            engine.forward(|model| model.forward(&x))?;
            engine.forward(|model| run(model.inner().weight(), &x))
        });
        let error = results.unwrap().remove(0).unwrap_err();
        let named = matches!(&error, Error::Param(ParamError::Absent { names, .. }) if names.contains("layer.weight"));
        assert!(named, "{name}: {error}");
    }
}
