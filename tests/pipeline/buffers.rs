//! Running statistics in a pipeline: each rank keeps those of its stages, and a checkpoint has those of all stages.

use super::same_bits::{Batch, WIDTH, batch, config, loss};
use candle_core::{Device, Tensor};
use candle_nn::{BatchNorm, Module, ModuleT, VarBuilder};
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::{Communicator, SoloCommunicator, threads};
use candle_zero::memory::MemoryKind;
use candle_zero::nn::{Linear, in_training};
use candle_zero::pipeline::PipelineModule;
use candle_zero::{Engine, EngineBuilder, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const LAYERS: usize = 5;
const MICRO_BATCHES: usize = 4;

struct Normed(Linear, BatchNorm);

impl Normed {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let norm = candle_nn::batch_norm(WIDTH, 1e-5, vb.pp("norm"))?;
        Ok(Self(Linear::new(WIDTH, WIDTH, vb.pp("fc"))?, norm))
    }
}

impl Module for Normed {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward_t(&self.0.forward(x)?, in_training())?.silu()
    }
}

fn module() -> PipelineModule<Batch> {
    let mut module = PipelineModule::new(|(x, _): &Batch| Ok(x.clone()), |y, (_, target)| loss(y, target));
    for layer in 0..LAYERS {
        module = module.layer(format!("layer.{layer}"), Normed::new);
    }
    module.layer("head", |vb| Linear::new(WIDTH, 3, vb))
}

struct Model(Vec<Normed>, Linear);

impl Model {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let layers = (0..LAYERS).map(|layer| Normed::new(vb.pp(format!("layer.{layer}"))));
        Ok(Self(layers.collect::<candle_core::Result<_>>()?, Linear::new(WIDTH, 3, vb.pp("head"))?))
    }

    fn loss(&self, (x, target): &Batch) -> candle_core::Result<Tensor> {
        let x = self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))?;
        loss(&self.1.forward(&x)?, target)
    }
}

/// Loads the checkpoint in `from`, if given, trains for some steps, and saves to `to`. Returns the loss of each step
/// and of an evaluation at the end, on rank 0.
fn train(
    (world, pipeline): (usize, Option<Value>),
    from: Option<&Path>,
    to: &Path,
    steps: std::ops::Range<usize>,
) -> Vec<f64> {
    let mut config = config(MICRO_BATCHES, 0);
    let builder = |comm: Arc<dyn Communicator>| -> EngineBuilder {
        Engine::builder().communicator(comm).device(Device::Cpu).gradient_check(false)
    };
    let options = LoadOptions::default();
    let Some(section) = pipeline else {
        let run = |comm: Arc<dyn Communicator>| -> Result<Vec<f64>> {
            let data = comm.rank();
            let mut engine = builder(comm).initialize(Model::new, config.clone())?;
            if let Some(from) = from {
                assert!(engine.load_checkpoint(from, None, &options)?.is_some());
            }
            let mut losses = Vec::new();
            let mean = |engine: &Engine<Model>, sum: f64| -> Result<f64> {
                let means = engine.gather_f64(&[sum / MICRO_BATCHES as f64])?;
                Ok(means.iter().map(|mean| mean[0]).sum::<f64>() / means.len() as f64)
            };
            for step in steps.clone() {
                let mut sum = 0.0;
                for micro_batch in 0..MICRO_BATCHES {
                    let loss = engine.forward(|model| model.loss(&batch(step, micro_batch, data)))?;
                    sum += f64::from(loss.to_scalar::<f32>()?);
                    engine.backward(&loss)?;
                    engine.step()?;
                }
                losses.push(mean(&engine, sum)?);
            }
            engine.sync_buffers()?;
            let mut sum = 0.0;
            for micro_batch in 0..MICRO_BATCHES {
                let loss = engine.eval(|model| model.loss(&batch(100, micro_batch, data)))?;
                sum += f64::from(loss.to_scalar::<f32>()?);
            }
            losses.push(mean(&engine, sum)?);
            engine.save_checkpoint(to, None, json!(null))?;
            Ok(losses)
        };
        return threads::run(world, run).unwrap().swap_remove(0).unwrap();
    };
    config["pipeline"] = section;
    let run = |comm: Arc<dyn Communicator>| -> Result<Vec<f64>> {
        let mut engine = builder(comm).initialize_pipeline(module(), config.clone())?;
        if let Some(from) = from {
            assert!(engine.load_checkpoint(from, None, &options)?.is_some());
        }
        // Each layer has two statistics in f32. This rank has those of its own layers.
        let norms = engine.parameter_names().iter().filter(|name| name.ends_with("norm.weight")).count();
        let report = engine.memory_report();
        assert_eq!(report.row(MemoryKind::Buffers).bytes.held, norms * 2 * WIDTH * 4);
        let data = engine.data_position().0;
        let mut losses = Vec::new();
        for step in steps.clone() {
            losses.push(engine.train_batch(|micro_batch| Ok(batch(step, micro_batch, data)))?);
        }
        losses.push(engine.eval_batch(MICRO_BATCHES, |micro_batch| Ok(batch(100, micro_batch, data)))?);
        engine.save_checkpoint(to, None, json!(null))?;
        Ok(losses)
    };
    threads::run(world, run).unwrap().swap_remove(0).unwrap()
}

fn statistics(dir: &Path, step: usize) -> Vec<u8> {
    std::fs::read(dir.join(format!("global_step{step}/buffers.safetensors"))).unwrap()
}

#[test]
fn running_statistics_are_those_of_one_rank_and_any_number_of_ranks_continues_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let dir = |name: &str| folder.path().join(name);
    let (one, whole) = (dir("one"), dir("whole"));
    let first = train((1, None), None, &one, 0..2);
    let expected = train((1, None), Some(&one), &whole, 2..4);
    for (at, (ranks, section)) in [
        (2, json!({})),
        (6, json!({"partition": "uniform"})),
        (2, json!({"schedule": "interleaved", "chunks": 3})),
        (2, json!({"schedule": "zbv", "chunks": 2})),
    ]
    .into_iter()
    .enumerate()
    {
        let [saved, on_one, here] = ["saved", "on one", "here"].map(|name| dir(&format!("{name} {at}")));
        let pipeline = (ranks, Some(section));
        assert_eq!(train(pipeline.clone(), None, &saved, 0..2), first, "{pipeline:?}");
        assert!(statistics(&saved, 2) == statistics(&one, 2), "{pipeline:?}");
        assert_eq!(train((1, None), Some(&saved), &on_one, 2..4), expected, "{pipeline:?}");
        assert_eq!(train((3, Some(json!({}))), Some(&saved), &here, 2..4), expected, "{pipeline:?}");
        assert!([on_one, here].iter().all(|dir| statistics(dir, 4) == statistics(&whole, 4)), "{pipeline:?}");
    }
}

#[test]
fn two_pipelines_have_the_statistics_of_two_ranks_without_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let [plain, piped] = ["plain", "piped"].map(|name| folder.path().join(name));
    let expected = train((2, None), None, &plain, 0..3);
    assert_eq!(train((4, Some(json!({"stages": 2}))), None, &piped, 0..3)[..3], expected[..3]);
    assert!(statistics(&plain, 3) == statistics(&piped, 3));
}

#[test]
fn statistics_that_two_layers_share_are_refused() {
    let run = |comm| {
        let shared = module().layer("layer.0.norm", |vb: VarBuilder<'_>| {
            vb.get(WIDTH, "running_mean")?;
            Linear::new(3, 3, vb.pp("own"))
        });
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        builder.initialize_pipeline(shared, config(MICRO_BATCHES, 0)).map(drop)
    };
    let error = run(Arc::new(SoloCommunicator::default()) as Arc<dyn Communicator>).unwrap_err();
    insta::assert_snapshot!(error, @"cannot train in a pipeline: layers 0 and 6 share buffer layer.0.norm.running_mean, but a buffer is kept only by the rank of its stage; put the shared buffer into one layer, or give each layer a separate buffer");
}
