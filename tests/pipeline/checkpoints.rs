//! Checkpoints of pipelines load with any number of ranks and stages, with and without a pipeline, and training
//! continues with the same bits.

use super::models::{batch, builder, config, gpt2, llama};
use candle_zero::checkpoint::{Checkpoint, LoadOptions};
use candle_zero::comm::{Communicator, threads};
use candle_zero::models::{Decoder, DecoderBatch, DecoderConfig, decoder_pipeline};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const MICRO_BATCHES: usize = 4;
/// The number of steps before the checkpoint, and the total number of steps.
const SAVED: usize = 3;
const STEPS: usize = 6;

/// The ranks that train.
#[derive(Debug, Clone, Copy)]
enum Ranks {
    /// A pipeline: the number of ranks, and of chunks per rank.
    Pipeline(usize, usize),
    /// A pipeline whose layers are divided by measured time: the number of ranks.
    Timed(usize),
    /// No pipeline: the number of ranks, all with the same data, and the ZeRO stage.
    Plain(usize, u8),
}

/// Trains for these steps. Loads the checkpoint in `dir` first if `load` is set, and saves one at the end if `save` is
/// set. Returns the loss of each step on rank 0.
fn train(
    model: &DecoderConfig,
    ranks: Ranks,
    dir: &Path,
    load: bool,
    save: bool,
    steps: std::ops::Range<usize>,
) -> Vec<f64> {
    let options = |builder| builder;
    let (dir, state) = (dir.to_owned(), Value::Null);
    let pipeline = match ranks {
        Ranks::Pipeline(ranks, 1) => Some(json!({"stages": ranks})),
        Ranks::Pipeline(ranks, chunks) => Some(json!({"stages": ranks, "schedule": "interleaved", "chunks": chunks})),
        Ranks::Timed(ranks) => Some(json!({"stages": ranks, "partition": "time"})),
        Ranks::Plain(..) => None,
    };
    let results = match ranks {
        Ranks::Pipeline(ranks, _) | Ranks::Timed(ranks) => threads::run(ranks, |comm: Arc<dyn Communicator>| {
            let mut config = config(MICRO_BATCHES);
            config["pipeline"] = pipeline.clone().unwrap();
            let mut engine = builder(comm, options).initialize_pipeline(decoder_pipeline(model)?, config)?;
            if load {
                assert!(engine.load_checkpoint(&dir, None, &LoadOptions::default())?.is_some());
                assert_eq!(engine.global_steps() as usize, steps.start);
            }
            let mut losses = Vec::new();
            for step in steps.clone() {
                losses.push(engine.train_batch(|micro_batch| Ok(batch(step, micro_batch)))?);
            }
            if save {
                engine.save_checkpoint(&dir, None, state.clone())?;
            }
            Ok(losses)
        }),
        Ranks::Plain(ranks, stage) => threads::run(ranks, |comm: Arc<dyn Communicator>| {
            let mut config = config(MICRO_BATCHES);
            config["zero_optimization"]["stage"] = stage.into();
            let mut engine = builder(comm, options).initialize(|vb| Decoder::new(model, vb), config)?;
            if load {
                assert!(engine.load_checkpoint(&dir, None, &LoadOptions::default())?.is_some());
            }
            let mut losses = Vec::new();
            for step in steps.clone() {
                let mut sum = 0.0;
                for micro_batch in 0..MICRO_BATCHES {
                    let DecoderBatch { ids, targets, .. } = batch(step, micro_batch);
                    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                    sum += f64::from(loss.to_scalar::<f32>()?);
                    engine.backward(&loss)?;
                    engine.step()?;
                }
                losses.push(sum / MICRO_BATCHES as f64);
            }
            if save {
                engine.save_checkpoint(&dir, None, state.clone())?;
            }
            Ok(losses)
        }),
    };
    results.unwrap().into_iter().map(|result| result.unwrap()).next().unwrap()
}

#[test]
fn a_checkpoint_of_a_pipeline_continues_anywhere_and_one_of_anywhere_in_a_pipeline() {
    for model in [llama(false), gpt2(0.0)] {
        let folder = tempfile::tempdir().unwrap();
        let expected = train(&model, Ranks::Plain(1, 0), folder.path(), false, false, 0..STEPS);
        for from in [Ranks::Pipeline(4, 1), Ranks::Pipeline(2, 2), Ranks::Timed(3), Ranks::Plain(1, 0)] {
            let dir = folder.path().join(format!("{from:?}"));
            assert_eq!(train(&model, from, &dir, false, true, 0..SAVED), expected[..SAVED], "{from:?}");
            let checkpoint = Checkpoint::open(&dir, None).unwrap().unwrap();
            let manifest = checkpoint.manifest();
            let (names, mut sorted) = (&manifest.parameters, manifest.parameters.clone());
            sorted.dedup_by(|a, b| a.name == b.name);
            assert_eq!(names, &sorted, "each parameter is saved once");
            checkpoint.verify(|_| {}).unwrap();
            let others = [Ranks::Pipeline(2, 1), Ranks::Pipeline(4, 1), Ranks::Pipeline(2, 2), Ranks::Plain(1, 0)];
            for to in others.into_iter().chain([Ranks::Timed(2), Ranks::Timed(3)]) {
                let found = train(&model, to, &dir, true, false, SAVED..STEPS);
                assert_eq!(found, expected[SAVED..], "{from:?} to {to:?}");
            }
        }
    }
}

#[test]
fn a_job_that_changes_its_ranks_again_and_again_has_the_bits_of_one_that_changes_only_where_it_must() {
    // The three ranks at stage 3 repeat the same data and round the sum of their gradients, so their step has different
    // bits from a step of one rank. All other divisions save the same bits before that step, and compute the same bits
    // after it.
    let (four, two, three, one) =
        (Ranks::Pipeline(4, 1), Ranks::Pipeline(2, 1), Ranks::Plain(3, 3), Ranks::Plain(1, 0));
    let chunks = Ranks::Pipeline(2, 2);
    for model in [llama(false), gpt2(0.0)] {
        let folder = tempfile::tempdir().unwrap();
        let losses = |name: &str, ranks: [Ranks; 7]| -> Vec<f64> {
            let dir = folder.path().join(name);
            let step = |(at, ranks)| train(&model, ranks, &dir, at > 0, true, at..at + 1).remove(0);
            ranks.into_iter().enumerate().map(step).collect()
        };
        let expected = losses("reference", [one, one, three, one, one, three, one]);
        assert_eq!(losses("there and back", [four, two, three, one, two, three, four]), expected);
        assert_eq!(losses("with chunks", [two, chunks, three, four, chunks, three, one]), expected);
    }
}
