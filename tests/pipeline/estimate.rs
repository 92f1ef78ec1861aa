//! The estimate of a pipeline counts the bytes that each of its ranks will hold.

use crate::models::{batch, gpt2, llama};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::config::RunValues;
use candle_zero::estimate::{PipelineEstimate, Shapes};
use candle_zero::memory::{MemoryKind, MemoryReport, MemoryRow};
use candle_zero::models::{DecoderConfig, decoder_pipeline};
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns, for each kind of state, the number of bytes that it occupies between steps, and the maximum.
fn bytes(report: &MemoryReport) -> Vec<(MemoryKind, [usize; 2])> {
    let of = |row: &MemoryRow| (row.kind, [row.host.held, row.host.peak]);
    // The estimate does not include state that depends on the size of a micro batch.
    let is_estimated = |kind: MemoryKind| !matches!(kind, MemoryKind::StageActivations | MemoryKind::StageMessages);
    report.rows.iter().map(of).filter(|(kind, [held, peak])| held + peak > 0 && is_estimated(*kind)).collect()
}

/// Returns the result of [`bytes`] for the estimate of a rank. Unless `exact` is set, the peaks of gradients and
/// buckets are upper bounds: they are checked, and replaced with those of the engine.
fn estimated(report: &MemoryReport, engine: &MemoryReport, exact: bool) -> Vec<(MemoryKind, [usize; 2])> {
    let mut all = bytes(report);
    for ((kind, [_, peak]), (_, [_, engine_peak])) in all.iter_mut().zip(bytes(engine)) {
        if !exact && matches!(kind, MemoryKind::Buckets | MemoryKind::Gradients) {
            assert!(*peak >= engine_peak, "{kind:?}: {peak} {engine_peak}");
            *peak = engine_peak;
        }
    }
    all
}

/// Trains `model` on all ranks for two steps, and returns their memory reports, sorted by the ranks' positions in their
/// pipelines.
fn train(model: &DecoderConfig, world_size: usize, config: &Value, frozen: &'static str) -> Vec<MemoryReport> {
    let run = |comm: Arc<dyn Communicator>| -> candle_zero::Result<(usize, MemoryReport)> {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let builder = builder.trainable(move |name, _| !name.contains(frozen));
        let mut engine = builder.initialize_pipeline(decoder_pipeline(model)?, config.clone())?;
        for step in 0..2 {
            engine.train_batch(|micro_batch| Ok(batch(step, micro_batch)))?;
        }
        Ok((engine.position().0, engine.memory_report()))
    };
    let mut reports: Vec<_> = threads::run(world_size, run).unwrap().into_iter().map(Result::unwrap).collect();
    reports.sort_by_key(|(position, _)| *position);
    reports.into_iter().map(|(_, report)| report).collect()
}

#[test]
fn the_memory_of_each_rank_is_that_of_the_engine() {
    for (model, world_size, stage, dtype, pipeline, frozen) in [
        (gpt2(0.0), 2, 0, "f32", json!({}), "no parameter"),
        (gpt2(0.0), 4, 1, "f32", json!({"stages": 2}), "no parameter"),
        (gpt2(0.0), 4, 1, "bf16", json!({"schedule": "zero_bubble"}), "no parameter"),
        (llama(false), 3, 0, "f32", json!({"partition": "uniform"}), "no parameter"),
        (llama(false), 2, 1, "bf16", json!({"schedule": "interleaved", "chunks": 2}), "no parameter"),
        (llama(true), 2, 1, "f32", json!({"schedule": "zbv", "chunks": 2}), "no parameter"),
        (llama(false), 2, 0, "f32", json!({}), "mlp"),
    ] {
        let mut config = json!({
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": stage},
            "pipeline": pipeline,
        });
        if dtype == "bf16" {
            config["bf16"] = json!({"enabled": true});
        }
        // Without `exact`, the estimate is only an upper bound: the gradient of a tied weight is accumulated after
        // the others, and the gradients of one chunk, or of a divided backward pass, are fewer than those of all the
        // rank's layers.
        let exact = !model.tie_word_embeddings && pipeline.get("schedule").is_none();
        let context = format!("{world_size} ranks, {config}, frozen: {frozen}");
        let prepare = |shapes: Shapes| shapes.trainable(|name, _| !name.contains(frozen));
        let run = RunValues::default();
        let module = decoder_pipeline(&model).unwrap();
        let estimate = PipelineEstimate::new(&module, config.clone(), world_size, &run, prepare).unwrap();
        let engines = train(&model, world_size, &config, frozen);
        assert_eq!(engines.len(), estimate.ranks.len() * estimate.pipelines, "{context}");
        let expected = estimate.ranks.iter().flat_map(|rank| std::iter::repeat_n(rank, estimate.pipelines));
        for (at, (rank, engine)) in expected.zip(&engines).enumerate() {
            assert_eq!(estimated(&rank.memory, engine, exact), bytes(engine), "rank {at} of {context}");
            assert_eq!(rank.parameters, engine.parameters, "rank {at} of {context}");
        }
        let layers: usize = estimate.ranks.iter().flat_map(|rank| &rank.layers).map(ExactSizeIterator::len).sum();
        assert_eq!((layers, estimate.layers), (module.len(), module.len()), "{context}");
    }
}
