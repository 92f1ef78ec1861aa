//! Losses, gradient norms and weights of a pipeline are those of one rank that accumulates the gradients of the same
//! micro batches.

use candle_core::{Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, SoloCommunicator, threads};
use candle_zero::engine::PipelineEngine;
use candle_zero::nn::{LayerNorm, Linear};
use candle_zero::pipeline::PipelineModule;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) const WIDTH: usize = 24;
pub(super) const LAYERS: usize = 6;

/// A micro batch: inputs and targets.
pub(super) type Batch = (Tensor, Tensor);

pub(super) fn config(micro_batches: usize, stage: usize) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    })
}

/// Returns micro batch `micro_batch` of a step on the rank at position `data` among the ranks that train on different
/// data.
pub(super) fn batch(step: usize, micro_batch: usize, data: usize) -> Batch {
    let value = |i: usize| ((i * 37 + step * 101 + micro_batch * 13 + data * 7) % 97) as f32 / 97.0 - 0.5;
    let tensor = |from: usize, shape: (usize, usize)| {
        let values: Vec<f32> = (from..from + shape.0 * shape.1).map(value).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    (tensor(0, (4, WIDTH)), tensor(1000, (4, 3)))
}

pub(super) fn loss(y: &Tensor, target: &Tensor) -> candle_core::Result<Tensor> {
    y.sub(target)?.sqr()?.mean_all()
}

/// A layer with a residual connection, as in a transformer: its input's gradient has two terms.
pub(super) struct Residual(LayerNorm, Linear);

impl candle_nn::Module for Residual {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x + self.1.forward(&self.0.forward(x)?)?.silu()?
    }
}

pub(super) fn residual(vb: VarBuilder<'_>) -> candle_core::Result<Residual> {
    Ok(Residual(LayerNorm::new(WIDTH, 1e-5, vb.pp("norm"))?, Linear::new(WIDTH, WIDTH, vb.pp("fc"))?))
}

pub(super) fn module() -> PipelineModule<Batch> {
    let mut module = PipelineModule::new(|(x, _): &Batch| Ok(x.clone()), |y, (_, target)| loss(y, target));
    for layer in 0..LAYERS {
        module = module.layer(format!("layer.{layer}"), residual);
    }
    module.layer("act", |_| Ok(Activation::Gelu)).layer("head", |vb| Linear::new(WIDTH, 3, vb))
}

/// The model of [`module`], for an engine without a pipeline.
pub(super) struct Model(Vec<Residual>, Linear);

impl Model {
    pub(super) fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let layers = (0..LAYERS).map(|layer| residual(vb.pp(format!("layer.{layer}"))));
        Ok(Self(layers.collect::<candle_core::Result<_>>()?, Linear::new(WIDTH, 3, vb.pp("head"))?))
    }

    pub(super) fn output(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        use candle_nn::Module;
        let x = self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))?;
        self.1.forward(&Activation::Gelu.forward(&x)?)
    }

    pub(super) fn loss(&self, (x, target): &Batch) -> candle_core::Result<Tensor> {
        loss(&self.output(x)?, target)
    }
}

/// The result of a run: the loss and the gradient norm of each step, and the final weights by name.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<Option<f64>>,
    pub weights: Vec<(String, Vec<f32>)>,
}

pub(super) fn names() -> Vec<String> {
    let layers = (0..LAYERS).flat_map(|layer| {
        ["norm.weight", "norm.bias", "fc.weight", "fc.bias"].map(|name| format!("layer.{layer}.{name}"))
    });
    layers.chain(["head.weight", "head.bias"].map(String::from)).collect()
}

pub(super) fn weights<M>(engine: &mut Engine<M>, names: &[String]) -> Vec<(String, Vec<f32>)> {
    let values = |engine: &mut Engine<M>, name: &str| {
        Some(engine.safe_get_full_fp32_param(name).ok()?.flatten_all().unwrap().to_vec1().unwrap())
    };
    names.iter().filter_map(|name| Some((name.clone(), values(engine, name)?))).collect()
}

/// Trains on the ranks of `comm` without a pipeline.
pub(super) fn plain(
    comm: Arc<dyn Communicator>,
    micro_batches: usize,
    stage: usize,
    steps: usize,
) -> candle_zero::Result<Outcome> {
    let data = comm.rank();
    let builder = Engine::builder().communicator(comm).device(Device::Cpu);
    let mut engine = builder.gradient_check(false).initialize(Model::new, config(micro_batches, stage))?;
    let mut outcome = Outcome::default();
    for step in 0..steps {
        let mut sum = 0.0;
        for micro_batch in 0..micro_batches {
            let batch = batch(step, micro_batch, data);
            let loss = engine.forward(|model| model.loss(&batch))?;
            sum += f64::from(loss.to_scalar::<f32>()?);
            engine.backward(&loss)?;
            engine.step()?;
        }
        let means = engine.gather_f64(&[sum / micro_batches as f64])?;
        outcome.losses.push(means.iter().map(|mean| mean[0]).sum::<f64>() / means.len() as f64);
        outcome.norms.push(engine.global_grad_norm());
    }
    outcome.weights = weights(&mut engine, &names());
    Ok(outcome)
}

/// The number of ranks along the pipeline, the schedule, and the number of chunks per rank.
pub(super) type Shape = (usize, &'static str, usize);

pub(super) fn piped(
    comm: Arc<dyn Communicator>,
    module: PipelineModule<Batch>,
    (ranks, kind, chunks): Shape,
    micro_batches: usize,
    stage: usize,
    steps: usize,
) -> candle_zero::Result<Outcome> {
    let data = comm.rank() / ranks;
    let builder = Engine::builder().communicator(comm).device(Device::Cpu);
    let mut config = config(micro_batches, stage);
    config["pipeline"] = json!({"stages": ranks, "schedule": kind, "chunks": chunks});
    let mut engine = builder.initialize_pipeline(module, config)?;
    let mut outcome = Outcome::default();
    for step in 0..steps {
        outcome.losses.push(engine.train_batch(|micro_batch| Ok(batch(step, micro_batch, data)))?);
        outcome.norms.push(engine.global_grad_norm());
    }
    outcome.weights = parameters(&mut engine)?;
    Ok(outcome)
}

pub(super) fn parameters<B>(engine: &mut PipelineEngine<B>) -> candle_zero::Result<Vec<(String, Vec<f32>)>> {
    let values = |engine: &mut PipelineEngine<B>, name: String| {
        let values = engine.parameter(&name)?.unwrap().flatten_all()?.to_vec1()?;
        Ok((name, values))
    };
    engine.parameter_names().into_iter().map(|name| values(engine, name)).collect()
}

/// Joins the weights of the ranks of a pipeline, which have the same losses and norms.
pub(super) fn joined(outcomes: Vec<Outcome>) -> Outcome {
    let mut all = Outcome { weights: Vec::new(), ..outcomes[0].clone() };
    for outcome in outcomes {
        assert_eq!((&outcome.losses, &outcome.norms), (&all.losses, &all.norms));
        all.weights.extend(outcome.weights);
    }
    let order = names();
    all.weights.sort_by_key(|(name, _)| order.iter().position(|known| known == name));
    all
}

#[test]
fn a_pipeline_has_the_bits_of_one_rank_with_accumulation() {
    let expected = plain(Arc::new(SoloCommunicator::default()), 8, 0, 10).unwrap();
    assert_eq!(expected.weights.len(), 4 * LAYERS + 2);
    for (ranks, kind, chunks) in [
        (1, "1f1b", 1),
        (2, "1f1b", 1),
        (4, "1f1b", 1),
        (2, "interleaved", 2),
        (4, "interleaved", 2),
        (2, "interleaved", 3),
        (1, "zero_bubble", 1),
        (2, "zero_bubble", 1),
        (4, "zero_bubble", 1),
        (2, "zero_bubble", 3),
        (1, "zbv", 2),
        (2, "zbv", 2),
        (4, "zbv", 2),
    ] {
        let run = |comm| piped(comm, module(), (ranks, kind, chunks), 8, 0, 10);
        let outcomes: Vec<Outcome> = threads::run(ranks, run).unwrap().into_iter().map(|r| r.unwrap()).collect();
        // A rank has only the parameters of its stages.
        assert!(ranks == 1 || outcomes.iter().all(|outcome| outcome.weights.len() < expected.weights.len()));
        assert!(joined(outcomes) == expected, "{ranks} ranks, {kind} with {chunks} chunks");
    }
}

#[test]
fn two_pipelines_of_two_ranks_have_the_bits_of_stage_1_on_two_ranks() {
    let expected = threads::run(2, |comm| plain(comm, 4, 1, 10)).unwrap().remove(0).unwrap();
    for stage in [0, 1] {
        let outcomes = threads::run(4, |comm| piped(comm, module(), (2, "1f1b", 1), 4, stage, 10)).unwrap();
        let outcomes: Vec<Outcome> = outcomes.into_iter().map(|r| r.unwrap()).collect();
        for pipeline in outcomes.chunks(2) {
            assert!(joined(pipeline.to_vec()) == expected, "stage {stage}");
        }
    }
}

#[test]
fn a_pipeline_that_cannot_be_is_refused_in_words() {
    let refused = |world: usize, shape: Shape, module: fn() -> PipelineModule<Batch>| {
        let run = |comm| piped(comm, module(), shape, 4, 0, 1).map(drop);
        threads::run(world, run).unwrap().swap_remove(0).unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused(3, (2, "1f1b", 1), module), @"cannot train in a pipeline: pipeline.stages is 2, but 3 ranks cannot be divided into groups of the configured sizes (pipeline 2), which need a multiple of 2 ranks; start a different number of ranks, or change these sizes");
    insta::assert_snapshot!(refused(4, (4, "interleaved", 3), module), @"cannot train in a pipeline: 4 ranks along the pipeline (pipeline.stages; auto: all ranks) with 3 chunks each (pipeline.chunks) need more stages than the model's 8 layers can fill; use fewer ranks or chunks");
    insta::assert_snapshot!(refused(2, (2, "1f1b", 2), module), @"cannot train in a pipeline: pipeline.chunks is 2, but pipeline.schedule 1f1b needs 1 chunk per rank; use interleaved for more");
    insta::assert_snapshot!(refused(2, (2, "1f1b", 1), || module().layer("layer.0", residual)), @"cannot train in a pipeline: layers 0 and 8 share parameter layer.0.norm.weight; only the first layer and the last one may share one, and it must be the first layer's only parameter; put the shared parameter into one layer");
}
