//! The reports of an engine: counters, rates, memory, traffic and times.

use super::Engine;
use crate::comm::CommReport;
use crate::config::Config;
use crate::memory::MemoryReport;
use crate::offload::OffloadReport;
use crate::optim::Momentum;
use crate::profiler::StepTimings;
use candle_core::{DType, Device};

impl<M> Engine<M> {
    /// Samples that all ranks together have trained on.
    pub fn global_samples(&self) -> u64 {
        self.global_samples
    }

    /// Whether the coming [`step`](Self::step) updates the weights.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        (self.micro_steps + 1).is_multiple_of(self.config.batch.gradient_accumulation_steps as u64)
    }

    /// Optimizer steps so far, skipped ones included.
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Micro steps so far.
    pub fn micro_steps(&self) -> u64 {
        self.micro_steps
    }

    /// Optimizer steps that were skipped because a gradient was not finite.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Whether the last optimizer step changed the weights.
    pub fn was_step_applied(&self) -> bool {
        self.was_applied
    }

    /// Learning rate of the coming optimizer step, one per parameter group: those that the
    /// [builder](super::EngineBuilder::parameter_groups) was given and that have parameters, in their order, then the
    /// group of all other parameters. With Muon each group counts as two, its matrices and its other parameters.
    pub fn get_lr(&self) -> Vec<f64> {
        self.trainer.lr()
    }

    /// Momentum of the coming optimizer step, one per parameter group, as [`get_lr`](Self::get_lr).
    pub fn get_mom(&self) -> Vec<Momentum> {
        self.trainer.momentum()
    }

    /// Global L2 norm of the last optimizer step's gradients, before clipping, loss scale divided out; infinite after
    /// an overflow, nothing before the first step.
    pub fn get_global_grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }

    /// The loss scale of the coming backward; 1 without fp16.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// Bytes of model state that this rank holds, beside the ZeRO formula.
    pub fn memory_report(&self) -> MemoryReport {
        self.core.memory_report()
    }

    /// File access of this rank so far; zeros where nothing is offloaded to files.
    pub fn offload_report(&self) -> OffloadReport {
        self.core.offload_report().unwrap_or_default()
    }

    /// Collectives of this rank so far.
    pub fn comm_report(&self) -> CommReport {
        self.core.comm().report()
    }

    /// How long the last optimizer step took.
    pub fn timings(&self) -> StepTimings {
        self.clock.last
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.core.comm().rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.core.comm().size()
    }

    /// The resolved configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where the model computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The model's dtype.
    pub fn dtype(&self) -> DType {
        self.core.dtype()
    }

    /// The model. Its parameters may be used only inside [`forward`](Self::forward) and [`eval`](Self::eval).
    pub fn model(&self) -> &M {
        &self.model
    }
}
