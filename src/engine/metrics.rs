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

    /// Whether the coming [`step`](Self::step) updates the weights, as in DeepSpeed: asked after a step, it is about the
    /// next one already. Whether a step has ended an accumulation is said by
    /// [`is_between_accumulations`](Self::is_between_accumulations) after it.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        self.accumulation.micro_steps + 1 >= self.config.batch.gradient_accumulation_steps as u64
    }

    /// Whether no accumulation is under way: the last [`step`](Self::step) ended one, and no backward has come since.
    /// The place for an evaluation or a checkpoint.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::Module;
    /// # use candle_zero::Engine;
    /// # let config = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    /// #     "optimizer": {"type": "AdamW"}}"#;
    /// # let folder = tempfile::tempdir()?;
    /// # let mut engine = Engine::initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
    /// # let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
    /// for _micro_batch in 0..8 {
    ///     let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
    ///     engine.backward(&loss)?;
    ///     engine.step()?;
    ///     if engine.is_between_accumulations() {
    ///         engine.save_checkpoint(folder.path(), None, candle_zero::serde_json::Value::Null)?;
    ///     }
    /// }
    /// assert_eq!(engine.global_steps(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn is_between_accumulations(&self) -> bool {
        self.accumulation.micro_steps == 0 && !self.has_gradients_of_micro_step()
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
