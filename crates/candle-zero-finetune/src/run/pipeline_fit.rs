//! A run in a pipeline: settings that it excludes, and the division among ranks that fits into memory.

use super::memory_fit::USABLE_MEMORY;
use super::options::{Options, PipelineStages, option_use_error};
use crate::error::{FinetuneError, Result};
use candle_core::DType;
use candle_zero::config::RunValues;
use candle_zero::estimate::{MeasuredStep, PipelineEstimate, PipelineRankEstimate, Shapes};
use candle_zero::models::{ActivationBytesOptions, DecoderConfig, decoder_pipeline};
use candle_zero::util::{counted, format_bytes};
use serde_json::{Value, json};

/// Returns the number of ranks along the pipeline that the options or the configuration request, if it is above 1, and
/// completes the configuration's `pipeline` section. Values of the wrong type are reported when the configuration is
/// resolved.
///
/// # Errors
/// Options and configuration that contradict each other; a number that does not divide the number of ranks; settings
/// that cannot be combined with a pipeline.
pub(super) fn requested_stages(options: &Options, config: &mut Value, world: usize) -> Result<Option<usize>> {
    let in_file = config.pointer("/pipeline/stages").filter(|stages| stages.is_number());
    if let (Some(PipelineStages::Number(requested)), Some(found)) = (options.pipeline, in_file)
        && found.as_u64() != Some(requested as u64)
    {
        let problem = format!(
            "is {requested}, but the DeepSpeed configuration has pipeline.stages: {found}; give only one of them, or \
             \"auto\" there"
        );
        return Err(option_use_error("--pipeline", problem));
    }
    let section = config.get("pipeline").unwrap_or(&Value::Null);
    if config.is_object() && (section.is_null() || section.is_object()) {
        match options.pipeline {
            Some(PipelineStages::Number(requested)) => set_stages(config, requested),
            Some(PipelineStages::Auto) if in_file.is_none() => set_stages(config, world),
            _ => {}
        }
    }
    let Some(section) = config.get("pipeline").filter(|section| section.is_object()) else { return Ok(None) };
    let stages = match section.get("stages") {
        Some(Value::Number(stages)) => stages.as_u64().and_then(|stages| usize::try_from(stages).ok()),
        Some(Value::String(text)) if text != "auto" => None,
        _ => Some(world),
    };
    match stages {
        None | Some(0) => Ok(None),
        Some(1) => {
            // With one stage, there is no pipeline.
            config.as_object_mut().map(|config| config.remove("pipeline"));
            Ok(None)
        }
        Some(stages) if !world.is_multiple_of(stages) => {
            let problem = format!(
                "{stages}, which does not divide {}; give a number that does, or a different number of ranks",
                counted(world, "rank")
            );
            Err(match options.pipeline {
                Some(_) => option_use_error("--pipeline", format!("is {problem}")),
                None => option_use_error("--ds_config", format!("has pipeline.stages: {problem}")),
            })
        }
        Some(stages) => {
            check_combination(options, config)?;
            Ok(Some(stages))
        }
    }
}

/// Sets the number of ranks along the pipeline in a configuration whose `pipeline` section is an object, null or
/// missing.
fn set_stages(config: &mut Value, stages: usize) {
    config["pipeline"]["stages"] = json!(stages);
}

/// Returns an error for settings that cannot be combined with a pipeline.
fn check_combination(options: &Options, config: &Value) -> Result<()> {
    let refuse = |problem: String| {
        Err(match options.pipeline {
            Some(_) => option_use_error("--pipeline", problem),
            None => option_use_error("--ds_config", format!("has a pipeline section, and a pipeline {problem}")),
        })
    };
    if let Some(problem) = options.pipeline_obstacle() {
        return refuse(problem.into());
    }
    let is_set = |path: &str| config.pointer(path).is_some_and(|value| !value.is_null());
    if is_set("/local_steps") {
        return refuse("cannot be combined with local_steps; remove one of the two".into());
    }
    if config.pointer("/zero_optimization/offload_param/device").is_some_and(|device| device != "none") {
        return refuse(
            "keeps all parameters of its stages in memory; remove zero_optimization.offload_param from the configuration"
                .into(),
        );
    }
    match config.pointer("/zero_optimization/stage").and_then(Value::as_u64) {
        Some(stage @ 2..) => refuse(format!(
            "shards neither gradients nor parameters, but zero_optimization.stage is {stage}; set it to 0 or 1"
        )),
        _ => Ok(()),
    }
}

/// The input of the division of a language model among the ranks of a pipeline: the model, and the available memory.
pub(super) struct PipelineFitInput<'a> {
    pub sizes: &'a DecoderConfig,
    /// A function that marks which parameters are trained, and how the others are held.
    pub prepare: &'a dyn Fn(Shapes) -> Shapes,
    /// The configuration with batch, optimizer and precision.
    pub config: &'a Value,
    /// The values for keys that are "auto".
    pub values: &'a RunValues,
    pub dtype: DType,
    pub trains_base: bool,
    /// Whether blocks are recomputed in the backward pass, or `None` to choose.
    pub recompute: Option<bool>,
    /// The number of ranks of the job.
    pub world: usize,
    /// The bytes that a rank may use.
    pub memory: u64,
}

/// A division of a model among ranks, with the memory that it needs.
#[derive(Debug, Clone)]
pub(super) struct PipelineFit {
    /// The complete configuration.
    pub config: Value,
    pub shape: PipelineShape,
    stage: u8,
    recompute: bool,
    micro_batch: usize,
    micro_batches: usize,
    /// The memory, in bytes, of the rank that needs the most.
    bytes: u64,
}

/// The ranks of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PipelineShape {
    /// The number of ranks along the pipeline.
    pub ranks: usize,
    /// The mean share of a step in which ranks wait, if messages take no time.
    pub waiting: f64,
}

impl PipelineShape {
    /// Returns the ranks of an estimated pipeline.
    pub fn of(estimate: &PipelineEstimate) -> Result<Self> {
        let step = estimate.step(&MeasuredStep::seconds(1.0)?, 0.0);
        Ok(Self { ranks: estimate.ranks.len(), waiting: step.bubble() })
    }
}

impl PipelineFitInput<'_> {
    /// Returns the fastest division that fits, with one of these numbers of ranks along the pipeline, which are tried
    /// in this order. The inner `Err` contains the division that needs the least memory.
    pub fn choose(&self, stages: &[usize]) -> Result<std::result::Result<PipelineFit, PipelineFit>> {
        let max_bytes = (self.memory as f64 * USABLE_MEMORY) as u64;
        let mut smallest: Option<PipelineFit> = None;
        let is_allowed = |recompute: &bool| self.recompute.is_none_or(|requested| requested == *recompute);
        for recompute in [false, true].into_iter().filter(is_allowed) {
            for stages in stages {
                let zero: &[u8] = if self.world > *stages { &[0, 1] } else { &[0] };
                for stage in zero {
                    let fit = self.needs(*stages, *stage, recompute)?;
                    if fit.bytes <= max_bytes {
                        return Ok(Ok(fit));
                    }
                    if smallest.as_ref().is_none_or(|smallest| fit.bytes < smallest.bytes) {
                        smallest = Some(fit);
                    }
                }
            }
        }
        Ok(Err(smallest.expect("at least one division has been tried")))
    }

    /// Returns a division with its memory.
    fn needs(&self, stages: usize, stage: u8, recompute: bool) -> Result<PipelineFit> {
        let mut config = self.config.clone();
        set_stages(&mut config, stages);
        config["zero_optimization"] = json!({ "stage": stage });
        if recompute {
            config["activation_checkpointing"] = json!({ "every_unit": true });
        }
        let estimate = self.estimate(&config)?;
        let batch = estimate.config.batch;
        let tokens = batch.train_micro_batch_size_per_gpu.saturating_mul(self.sizes.ctx);
        let of_rank = |rank: &PipelineRankEstimate| {
            let states: usize = rank.memory.rows.iter().map(|row| row.host.peak + row.pinned.peak).sum();
            states.saturating_add(self.activations(rank, tokens, recompute)) as u64
        };
        Ok(PipelineFit {
            bytes: estimate.ranks.iter().map(of_rank).max().unwrap_or(0),
            shape: PipelineShape::of(&estimate)?,
            micro_batch: batch.train_micro_batch_size_per_gpu,
            micro_batches: batch.gradient_accumulation_steps,
            config,
            stage,
            recompute,
        })
    }

    /// Estimates a pipeline with a complete configuration, and thereby checks that the pipeline is possible.
    ///
    /// # Errors
    /// Errors of [`PipelineEstimate::new`].
    pub fn estimate(&self, config: &Value) -> Result<PipelineEstimate> {
        let module = decoder_pipeline(self.sizes)?;
        PipelineEstimate::new(&module, config.clone(), self.world, self.values, self.prepare)
    }

    /// Returns the activation bytes of a rank: those that its layers keep for each micro batch in progress, and,
    /// counted once, those that exist only during a pass.
    fn activations(&self, rank: &PipelineRankEstimate, tokens: usize, recompute: bool) -> usize {
        let element = self.dtype.size_in_bytes();
        let of_blocks = |blocks: usize, recompute| {
            let sizes = DecoderConfig {
                blocks: self.sizes.blocks[..blocks.min(self.sizes.blocks.len())].to_vec(),
                ..self.sizes.clone()
            };
            sizes.activation_bytes(ActivationBytesOptions { tokens, element, recompute, trains_base: self.trains_base })
        };
        let blocks = rank.layers.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let (transient, all) = (of_blocks(0, recompute), of_blocks(blocks, recompute));
        let boundary = tokens.saturating_mul(self.sizes.hidden_size).saturating_mul(element);
        // The first block after a frozen embedding is not recomputed.
        let first = if recompute && !self.trains_base { of_blocks(1, false) - of_blocks(0, false) } else { 0 };
        let held = (all - transient).saturating_add(first).saturating_add(boundary.saturating_mul(2));
        held.saturating_mul(rank.held_activations).saturating_add(transient)
    }

    /// Returns the bytes that the busiest host receives in a step if the ranks are on `hosts` hosts.
    pub fn bytes_between_hosts(&self, hosts: usize) -> u64 {
        let rows = self.config["train_batch_size"].as_u64().unwrap_or(0);
        let element = self.dtype.size_in_bytes() as u64;
        let row = (self.sizes.ctx as u64) * (self.sizes.hidden_size as u64) * element;
        // A host in the middle receives activations from one side and gradients from the other.
        let directions = if hosts > 2 { 2 } else { 1 };
        // The last stage also receives the gradients of the rows of a tied embedding.
        let embedding_gradients = u64::from(self.trains_base && self.sizes.tie_word_embeddings && hosts == 2);
        rows.saturating_mul(row).saturating_mul(directions + embedding_gradients)
    }
}

impl PipelineFit {
    /// Returns a readable description of the division.
    pub fn words(&self) -> String {
        let Self { shape, stage, micro_batches, micro_batch, .. } = *self;
        let recompute = if self.recompute { ", blocks recomputed in the backward pass" } else { "" };
        let batches = if micro_batches == 1 { "micro batch" } else { "micro batches" };
        format!(
            "a pipeline of {}, stage {stage}, {micro_batches} {batches} of {}{recompute}",
            counted(shape.ranks, "rank"),
            counted(micro_batch, "row"),
        )
    }

    /// Returns a readable description of the division, its memory and its waiting.
    pub fn explained(&self, memory: u64) -> String {
        format!(
            "{}: at most {} of {} per rank; ranks wait for {:.0} % of a step",
            self.words(),
            format_bytes(self.bytes),
            format_bytes(memory),
            100.0 * self.shape.waiting
        )
    }

    /// Returns the error for a division that does not fit.
    pub fn refused(&self, memory: u64) -> candle_zero::Error {
        let needed = format_bytes((self.bytes as f64 / USABLE_MEMORY).ceil() as u64);
        FinetuneError::PipelineTooLarge { ranks: self.shape.ranks, needed, available: format_bytes(memory) }.into()
    }
}
