//! The activations that each rank of a pipeline holds are in the ledger, and are no more than the schedule's rule
//! allows.

use super::models::{self, gpt2};
use super::same_bits::{WIDTH, batch, config, module};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::config::RunValues;
use candle_zero::estimate::PipelineEstimate;
use candle_zero::memory::{HeldBytes, MemoryKind};
use candle_zero::models::decoder_pipeline;
use candle_zero::pipeline::{PipelinePass, PipelineSchedule, PipelineScheduleKind, uniform_cuts};
use serde_json::json;
use std::sync::Arc;

/// The number of bytes of a tensor that crosses a boundary between stages: 4 samples in f32.
const CROSSING: usize = 4 * WIDTH * 4;
const MICRO_BATCHES: usize = 12;

/// Returns the number of bytes of a stage's input and output, and the number of bytes that the gradients of its weights
/// need once the gradient of its input is known. The model has `layers` layers: residual ones, an activation, and the
/// head.
fn bytes_of_stage(stage: usize, stages: usize, layers: usize) -> [usize; 2] {
    let input = if stage == 0 { 0 } else { CROSSING };
    // The last stage's output is the loss.
    let output = if stage + 1 == stages { 4 } else { CROSSING };
    let deferred = |layer: usize| match layers - layer {
        // The head has 3 outputs. Its bias already has a gradient.
        1 => CROSSING + 4 * 3 * 4 + 3 * 4,
        2 => 0,
        // These are the linear layer's input, the gradient of its output, and the gradients of its bias and of the
        // norm's two parameters.
        _ => 2 * CROSSING + 3 * WIDTH * 4,
    };
    [input + output, uniform_cuts(layers, stages).unwrap().layers_of(stage).map(deferred).sum()]
}

/// Returns the largest number of bytes that a rank holds if it runs the operations of `schedule`.
fn peak(schedule: PipelineSchedule, rank: usize, layers: usize) -> usize {
    let (mut held, mut most) = (0, 0);
    for op in schedule.operations(rank) {
        let [boundary, deferred] = bytes_of_stage(op.stage, schedule.stages(), layers);
        match op.pass {
            PipelinePass::Forward => held += boundary,
            PipelinePass::Backward => held -= boundary,
            PipelinePass::BackwardInput => {
                most = most.max(held + deferred);
                held = held + deferred - boundary;
            }
            PipelinePass::BackwardWeight => held -= deferred,
        }
        most = most.max(held);
    }
    assert_eq!(held, 0);
    most
}

#[test]
fn a_rank_holds_the_activations_of_as_many_micro_batches_as_the_schedule_says() {
    let layers = module().len();
    let shapes = [
        (PipelineScheduleKind::OneForwardOneBackward, vec![1]),
        (PipelineScheduleKind::Interleaved, vec![2]),
        (PipelineScheduleKind::ZeroBubble, vec![1, 2]),
        (PipelineScheduleKind::ZeroBubbleV, vec![2]),
    ];
    let all = shapes.into_iter().flat_map(|(kind, chunks)| chunks.into_iter().map(move |chunks| (kind, chunks)));
    for (ranks, (kind, chunks)) in (2..5).flat_map(|ranks| all.clone().map(move |shape| (ranks, shape))) {
        let mut config = config(MICRO_BATCHES, 0);
        config["pipeline"] = json!({"schedule": kind.name(), "chunks": chunks, "partition": "uniform"});
        let run = |comm: Arc<dyn Communicator>| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize_pipeline(module(), config.clone())?;
            engine.train_batch(|micro_batch| Ok(batch(0, micro_batch, 0)))?;
            engine.eval_batch(MICRO_BATCHES, |micro_batch| Ok(batch(0, micro_batch, 0)))?;
            let report = engine.memory_report();
            Ok([MemoryKind::StageActivations, MemoryKind::StageMessages].map(|kind| report.row(kind).bytes))
        };
        let estimate = PipelineEstimate::new(&module(), config.clone(), ranks, &RunValues::default(), |shapes| shapes);
        let estimate = estimate.unwrap();
        let schedule = estimate.schedule();
        let counts: Vec<usize> = estimate.ranks.iter().map(|rank| rank.held_activations).collect();
        for (rank, found) in threads::run(ranks, run).unwrap().into_iter().enumerate() {
            let [activations, messages] = found.unwrap();
            let context = format!("rank {rank} of {ranks}, {kind:?} with {chunks} chunks");
            assert_eq!(activations, HeldBytes { held: 0, peak: peak(schedule, rank, layers) }, "{context}");
            // The rule allows this many activations, each with everything that a stage keeps for a micro batch.
            let stages = schedule.stages_of(rank).into_iter();
            let stage_bytes = stages.map(|stage| bytes_of_stage(stage, schedule.stages(), layers));
            let each =
                stage_bytes.map(|[boundary, deferred]| boundary + if kind.divides_backward() { deferred } else { 0 });
            assert!(activations.peak <= counts[rank] * each.max().unwrap(), "{context}: {activations:?}");
            if kind == PipelineScheduleKind::OneForwardOneBackward {
                assert_eq!(counts[rank], ranks - rank, "{context}");
            }
            // The number of messages in transit does not depend on the number of micro batches. The messages are
            // activations that this rank holds, gradients of the activations that the previous rank holds, and messages
            // that have arrived early.
            let (previous, next) = (counts[(rank + ranks - 1) % ranks], counts[(rank + 1) % ranks]);
            assert_eq!(messages.held, 0, "{context}");
            assert!(messages.peak <= (2 * counts[rank] + previous + next + 2) * CROSSING, "{context}: {messages:?}");
        }
    }
}

#[test]
fn the_parts_of_a_tied_weights_gradient_are_counted() {
    // GPT-2's embedding has 40 rows of 16 elements; an activation has 24 tokens.
    let (weight, activation) = (40 * 16 * 4, 24 * 16 * 4);
    for ranks in 2..5 {
        let run = |comm: Arc<dyn Communicator>| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let module = decoder_pipeline(&gpt2(0.0))?;
            let mut engine = builder.initialize_pipeline(module, models::config(MICRO_BATCHES))?;
            engine.train_batch(|micro_batch| Ok(models::batch(0, micro_batch)))?;
            Ok(engine.memory_report().row(MemoryKind::StageMessages).bytes)
        };
        let last = threads::run(ranks, run).unwrap().pop().unwrap().unwrap();
        assert!(last.peak > weight && last.peak <= (ranks + 1) * weight + 8 * activation, "{ranks}: {last:?}");
        assert_eq!(last.held, 0);
    }
}
