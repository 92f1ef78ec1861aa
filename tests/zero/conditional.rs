//! Models that a step uses only in part: heads that take turns, layers that are dropped, an early exit, and ranks that
//! take different paths. A missing gradient is an error in the first step, or zeros on request.

use crate::support::tiny::config;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::{Communicator, threads};
use candle_zero::error::{EngineError, Error};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Mutex};

const WIDTH: usize = 6;

/// A trunk of units and two heads.
struct Branches {
    trunk: Vec<Unit<Linear>>,
    heads: [Linear; 2],
}

/// The parts of the model that one micro step uses.
#[derive(Clone, Copy)]
struct Route {
    layers: [bool; 3],
    heads: [bool; 2],
}

const ALL: Route = Route { layers: [true; 3], heads: [true; 2] };

impl Branches {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let layer = |i: usize| unit(vb.pp(format!("layer.{i}")), |vb| linear(WIDTH, WIDTH, vb));
        let head = |i: usize| linear(WIDTH, 3, vb.pp(format!("head.{i}")));
        Ok(Self { trunk: (0..3).map(layer).collect::<Result<_>>()?, heads: [head(0)?, head(1)?] })
    }

    fn loss(&self, x: &Tensor, path: Route) -> Result<Tensor> {
        let mut x = x.clone();
        for (layer, _) in self.trunk.iter().zip(path.layers).filter(|(_, used)| *used) {
            x = layer.forward(&x)?.tanh()?;
        }
        let heads = self.heads.iter().zip(path.heads).filter(|(_, used)| *used);
        let losses: Vec<Tensor> = heads.map(|(head, _)| head.forward(&x)?.sqr()?.mean_all()).collect::<Result<_>>()?;
        Tensor::stack(&losses, 0)?.sum_all()
    }

    /// Returns the same loss as `loss`, but unused parameters have gradients of zero, because the outputs of unused
    /// parts, multiplied by zeros, are added.
    fn loss_with_zeros(&self, x: &Tensor, path: Route) -> Result<Tensor> {
        let mut zeros = vec![];
        let mut x = x.clone();
        for (layer, used) in self.trunk.iter().zip(path.layers) {
            let y = layer.forward(&x)?.tanh()?;
            if used {
                x = y;
            } else {
                zeros.push(y.mul(&y.zeros_like()?)?.sum_all()?);
            }
        }
        let of_head = |(head, used): (&Linear, bool)| {
            let loss = head.forward(&x)?.sqr()?.mean_all()?;
            // Candle itself skips multiplications by the constant zero.
            loss.mul(&Tensor::new(if used { 1f32 } else { 0.0 }, x.device())?)
        };
        let losses: Vec<Tensor> = self.heads.iter().zip(path.heads).map(of_head).collect::<Result<_>>()?;
        let loss = Tensor::stack(&losses, 0)?.sum_all()?;
        zeros.iter().try_fold(loss, |loss, zero| loss + zero)
    }
}

fn input(sample: usize) -> Tensor {
    let values = (0..4 * WIDTH).map(|i| ((i * 7 + sample * 11) % 13) as f32 / 6.0 - 1.0);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((4, WIDTH)).unwrap()
}

fn engine(comm: Arc<dyn Communicator>, config: &Value) -> candle_zero::Result<Engine<Branches>> {
    Engine::builder().communicator(comm).initialize(Branches::new, config.clone())
}

/// Runs one micro step, and returns the bits of the loss.
fn micro_step(engine: &mut Engine<Branches>, sample: usize, path: Route) -> candle_zero::Result<u32> {
    let loss = engine.forward(|model| model.loss(&input(sample), path))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok(loss.to_scalar::<f32>()?.to_bits())
}

/// Returns each rank's losses and the exported model of a run whose micro step `m` takes the path `path(m, rank)`.
fn run(
    world: usize,
    config: &Value,
    more: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
    path: impl Fn(usize, usize) -> Route + Sync,
    with_zeros: bool,
) -> (Vec<Vec<u32>>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let mut engine = more(Engine::builder().communicator(comm)).initialize(Branches::new, config.clone())?;
        let mut losses = vec![];
        for micro in 0..5 * engine.config().batch.gradient_accumulation_steps {
            let (x, path) = (input(micro * world + rank), path(micro, rank));
            let loss = engine
                .forward(|model| if with_zeros { model.loss_with_zeros(&x, path) } else { model.loss(&x, path) })?;
            engine.backward(&loss)?;
            engine.step()?;
            losses.push(loss.to_scalar::<f32>()?.to_bits());
        }
        engine.export_safetensors(&file)?;
        Ok(losses)
    });
    let losses = ranks.unwrap().into_iter().map(|losses| losses.unwrap()).collect();
    (losses, std::fs::read(&file).unwrap())
}

fn gathering() -> Value {
    json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 40})
}

fn ignoring() -> Value {
    let mut zero = gathering();
    zero["ignore_unused_parameters"] = json!(true);
    zero
}

#[test]
fn heads_may_take_turns_within_an_accumulation() {
    let path = |micro: usize, _| Route { heads: [micro.is_multiple_of(2), micro % 2 == 1], ..ALL };
    let reference = run(2, &config(0, 2, json!({}), json!({})), |b| b, path, false);
    for stage in 1..4 {
        assert_eq!(run(2, &config(stage, 2, gathering(), json!({})), |b| b, path, false), reference, "stage {stage}");
    }
}

#[test]
fn a_run_that_skips_a_unit_goes_on_from_its_checkpoint() {
    let skipping = Route { layers: [true, false, true], heads: [true, false] };
    for stage in 0..4 {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let config = config(stage, 1, gathering(), json!({}));
        let run = |resumes: bool| {
            let ranks = threads::run(2, |comm| {
                let mut engine = engine(comm.clone(), &config)?;
                if resumes {
                    engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?.unwrap();
                } else {
                    micro_step(&mut engine, 0, ALL)?;
                    micro_step(&mut engine, 1, skipping)?;
                    engine.save_checkpoint(folder.path(), None, json!({}))?;
                }
                (0..3).map(|sample| micro_step(&mut engine, sample, skipping)).collect::<candle_zero::Result<Vec<_>>>()
            });
            ranks.unwrap().into_iter().map(|losses| losses.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(false), run(true), "stage {stage}");
    }
}

#[test]
fn a_loaded_model_without_its_progress_is_judged_anew() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = config(3, 1, json!({}), json!({}));
    let save = |folder: &Path| -> candle_zero::Result<()> {
        let mut engine = Engine::initialize(Branches::new, config.clone())?;
        micro_step(&mut engine, 0, ALL)?;
        engine.save_checkpoint(folder, None, json!({})).map(drop)
    };
    save(folder.path()).unwrap();
    let mut engine = Engine::initialize(Branches::new, config.clone()).unwrap();
    let options = LoadOptions { load_module_only: true, ..LoadOptions::default() };
    engine.load_checkpoint(folder.path(), None, &options).unwrap().unwrap();
    let error = micro_step(&mut engine, 1, Route { heads: [true, false], ..ALL }).unwrap_err();
    assert!(matches!(error, Error::Engine(EngineError::NoGradient { count: 2, .. })), "{error}");
}

#[test]
fn what_no_micro_step_reaches_is_an_error_of_the_first_step_that_names_it_and_the_key() {
    for stage in 0..4 {
        let config = config(stage, 2, gathering(), json!({}));
        let ranks = threads::run(2, |comm| {
            let mut engine = engine(comm, &config)?;
            let path = Route { heads: [true, false], ..ALL };
            micro_step(&mut engine, 0, path)?;
            Ok(micro_step(&mut engine, 1, path).unwrap_err().to_string())
        });
        for text in ranks.unwrap() {
            let text = text.unwrap();
            assert!(
                text.starts_with("2 trainable parameters received no gradient in the first optimizer step"),
                "{text}"
            );
            assert!(text.contains("head.1.weight, head.1.bias") && text.contains("ignore_unused_parameters"), "{text}");
        }
    }
}

/// Returns a path that depends only on the micro step: the dropped layers and the used heads are the same on all ranks.
fn dropped(micro: usize, _: usize) -> Route {
    let kept = |layer: usize| !(micro + layer).is_multiple_of(3);
    Route { layers: [0, 1, 2].map(kept), heads: [true, micro >= 6] }
}

#[test]
fn layers_may_be_dropped_from_the_first_step_on_where_unused_parameters_are_ignored() {
    for accumulation in [1, 2] {
        let plain = config(0, accumulation, json!({}), json!({}));
        let reference = run(2, &plain, |b| b, dropped, true);
        assert_eq!(run(2, &plain, EngineBuilder::ignore_unused_parameters, dropped, false), reference);
        for stage in 0..4 {
            let config = config(stage, accumulation, ignoring(), json!({}));
            let what = format!("stage {stage}, accumulation {accumulation}");
            assert_eq!(run(2, &config, |b| b, dropped, false), reference, "{what}");
            let mut recomputing = config.clone();
            recomputing["activation_checkpointing"] = json!({"number_checkpoints": 3});
            assert_eq!(run(2, &recomputing, |b| b, dropped, false), reference, "{what}, recomputing");
        }
    }
}

#[test]
fn ranks_may_miss_different_parameters_where_unused_parameters_are_ignored() {
    // Rank 0 trains the first head, and the other ranks train the second; in micro step 3, every rank trains both.
    let path = |micro: usize, rank: usize| Route { heads: [micro == 3 || rank == 0, micro == 3 || rank > 0], ..ALL };
    for (world, accumulation) in [(2, 1), (3, 2)] {
        let reference = run(world, &config(0, accumulation, json!({}), json!({})), |b| b, path, true);
        for stage in 0..4 {
            for more in
                [json!({}), json!({"overlap_comm": true, "reduce_bucket_size": 1}), json!({"reduce_scatter": false})]
            {
                let mut zero = ignoring();
                zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                let got = run(world, &config(stage, accumulation, zero.clone(), json!({})), |b| b, path, false);
                assert_eq!(got, reference, "stage {stage}, world {world}, {zero}");
            }
        }
    }
}

#[test]
fn a_gradient_that_never_comes_is_zeros() {
    // AdamW without decay does not change a parameter whose gradients are zeros.
    let optimizer = json!({"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}});
    let initial = {
        let engine = Engine::initialize(Branches::new, config(0, 1, json!({}), optimizer.clone()));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("initial");
        engine.unwrap().export_safetensors(&file).unwrap();
        candle_core::safetensors::load(&file, &Device::Cpu).unwrap()
    };
    for stage in 0..4 {
        let config = config(stage, 1, ignoring(), optimizer.clone());
        let (_, exported) = run(2, &config, |b| b, |_, _| Route { heads: [true, false], ..ALL }, false);
        let exported = candle_core::safetensors::load_buffer(&exported, &Device::Cpu).unwrap();
        for (name, value) in &exported {
            let difference = value.sub(&initial[name]).unwrap().abs().unwrap().max_all().unwrap();
            let difference = difference.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap();
            assert_eq!(difference == 0.0, name.starts_with("head.1"), "{name} at stage {stage}: {difference}");
        }
    }
}

/// A subscriber that records the messages of its thread.
struct MessageRecorder(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for MessageRecorder {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut record = |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            self.0.lock().unwrap().push(format!("{value:?}"));
        };
        event.record(&mut record);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn what_counts_as_zeros_is_said_once_by_rank_0_with_its_names() {
    let config = config(2, 2, ignoring(), json!({}));
    let ranks = threads::run(2, |comm| {
        let messages = Arc::new(Mutex::new(vec![]));
        tracing::subscriber::with_default(MessageRecorder(messages.clone()), || {
            let mut engine = engine(comm, &config)?;
            // Together, the micro steps and ranks of the first step reach all but the last layer.
            for micro in 0..6 {
                let head = engine.rank() == micro % 2;
                micro_step(&mut engine, micro, Route { layers: [true, true, false], heads: [head, !head] })?;
            }
            Ok(messages.lock().unwrap().iter().filter(|text| text.contains("no gradient")).cloned().collect::<Vec<_>>())
        })
    });
    let messages: Vec<Vec<String>> = ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
    assert_eq!((messages[0].len(), messages[1].len()), (1, 0), "{messages:?}");
    insta::assert_snapshot!(messages[0][0], @"2 parameters received no gradient in the first step (a missing gradient counts as zero): layer.2.weight, layer.2.bias");
}
