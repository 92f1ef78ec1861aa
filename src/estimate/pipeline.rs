//! The estimate of a pipeline, in which each rank holds different layers.

use super::{Estimate, EstimateOptions, MeasuredStep, Shapes};
use crate::config::{Config, ConfigSource, RunValues};
use crate::engine::PipelineDivision;
use crate::error::{EngineError, Result};
use crate::layout::MeshAxis;
use crate::memory::MemoryReport;
use crate::param::WeightSource;
use crate::pipeline::{PipelineModule, PipelineSchedule, SimulatedPipelineTimes, StageCost};
use serde::Serialize;
use std::ops::Range;

/// The estimated needs of the ranks of a pipeline.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PipelineEstimate {
    /// The ranks along the pipeline.
    pub ranks: Vec<PipelineRankEstimate>,
    /// The number of pipelines, which train on different micro batches.
    pub pipelines: usize,
    /// The number of layers of the model.
    pub layers: usize,
    /// The configuration, resolved for the ranks that train the same stages on different micro batches.
    #[serde(skip)]
    pub config: Config,
    #[serde(skip)]
    schedule: PipelineSchedule,
    /// The share of each stage in the time of the complete model.
    shares: Vec<f64>,
}

/// The estimated needs of a rank along a pipeline.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PipelineRankEstimate {
    /// The layers of each of the rank's stages.
    pub layers: Vec<Range<usize>>,
    /// The number of elements of the rank's parameters, including those of a copy of a tied embedding.
    pub parameters: usize,
    /// The number of elements that the rank trains.
    pub trained: usize,
    /// The model state, as [`PipelineEngine::memory_report`](crate::engine::PipelineEngine::memory_report) will count
    /// it. Held bytes are exact. With a tied embedding, several chunks or divided backward passes, the peaks of
    /// gradients and buckets are upper bounds.
    pub memory: MemoryReport,
    /// The maximum number of activations that the rank holds at the same time, counting one for each micro batch and
    /// stage.
    pub held_activations: usize,
}

impl PipelineEstimate {
    /// Estimates the pipelines of a job with `world_size` ranks, divided as
    /// [`initialize_pipeline`](crate::EngineBuilder::initialize_pipeline) would divide them. `prepare` changes the
    /// shapes of each rank, for example with [`Shapes::trainable`] or [`Shapes::quantized`]. Instead of measured times
    /// (`pipeline.partition` `time`), the numbers of parameters determine the stages.
    ///
    /// # Errors
    /// The errors of the configuration; numbers of ranks, chunks, layers and micro batches that are incompatible; ZeRO
    /// stage 2 or 3; the errors of [`Estimate::with`].
    pub fn new<B>(
        module: &PipelineModule<B>,
        source: impl Into<ConfigSource>,
        world_size: usize,
        run: &RunValues,
        prepare: impl Fn(Shapes) -> Shapes,
    ) -> Result<Self> {
        let source = source.into();
        let section = source.pipeline(run)?;
        let mesh = PipelineDivision::mesh(&section, world_size)?;
        let [ranks, pipelines] = [MeshAxis::Pipeline, MeshAxis::Data].map(|axis| mesh.len(axis));
        let division = PipelineDivision::new(module, &section, ranks, (WeightSource::Random { seed: 0 }, None), None)?;
        let config = Config::load_for(source, pipelines, run)?;
        PipelineDivision::check_stage(config.zero.stage)?;
        let micro_batches = config.batch.gradient_accumulation_steps;
        let schedule = PipelineSchedule::new(section.schedule, ranks, section.chunks, micro_batches)
            .map_err(|error| EngineError::Pipeline { why: error.to_string() })?;
        let mut stage_config = config.clone();
        stage_config.pipeline.stages = None;
        let rank_estimate = |rank: usize| {
            let name = format!("rank {rank}");
            let shapes = prepare(Shapes::of(&name, |vb| division.build(module, rank, vb))?);
            let shapes = match division.copied(rank) {
                Some(copy) => shapes.freeze(copy),
                None => shapes,
            };
            let estimate = Estimate::with(&shapes, &stage_config, EstimateOptions::default())?;
            Ok(PipelineRankEstimate {
                layers: schedule.stages_of(rank).into_iter().map(|stage| division.cuts.layers_of(stage)).collect(),
                parameters: shapes.num_parameters(),
                trained: shapes.num_trained(),
                memory: estimate.memory,
                held_activations: schedule.held_activations(rank),
            })
        };
        let ranks = (0..ranks).map(rank_estimate).collect::<Result<_>>()?;
        let shares = shares(module, &division);
        Ok(Self { ranks, pipelines, layers: module.len(), config, schedule, shares })
    }

    /// Predicts a step, given the step of one rank that accumulates the gradients of the same micro batches, and the
    /// seconds that a message between two ranks takes. Forward passes, gradients of inputs and gradients of weights are
    /// assumed to take the same time. The time of a stage is assumed to be proportional to the number of its
    /// parameters, without embeddings.
    pub fn step(&self, measured: &MeasuredStep, message_s: f64) -> SimulatedPipelineTimes {
        let op_seconds = measured.step_s() / (3 * self.schedule.micro_batches()) as f64;
        let cost = |share: &f64| {
            let seconds = share * op_seconds;
            StageCost { forward: seconds, backward_input: seconds, backward_weight: seconds }
        };
        let costs: Vec<StageCost> = self.shares.iter().map(cost).collect();
        self.schedule.simulate(&costs, message_s)
    }

    /// Returns the schedule of a step.
    pub fn schedule(&self) -> PipelineSchedule {
        self.schedule
    }
}

/// Returns the share of each stage in the elements of the model, without embeddings, of which only rows are read.
fn shares<B>(module: &PipelineModule<B>, division: &PipelineDivision) -> Vec<f64> {
    let elements = |layer: usize| match module.kind(layer).to_lowercase().contains("embedding") {
        true => 0,
        false => division.elements[layer],
    };
    let stages = 0..division.cuts.stages();
    let stage_elements = |stage: usize| division.cuts.layers_of(stage).map(elements).sum::<usize>() as f64;
    let sums: Vec<f64> = stages.map(stage_elements).collect();
    let total: f64 = sums.iter().sum();
    sums.iter().map(|sum| if total == 0.0 { 1.0 / sums.len() as f64 } else { sum / total }).collect()
}
