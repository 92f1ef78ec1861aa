//! An engine's metrics: counters, rates, memory, traffic and times.

use super::Engine;
use crate::comm::{CommReport, Communicator};
use crate::config::Config;
use crate::memory::MemoryReport;
use crate::offload::OffloadReport;
use crate::optim::Momentum;
use crate::profiler::StepTimings;
use candle_core::{DType, Device};

impl<M> Engine<M> {
    /// Returns the number of samples that all ranks together have processed, including those of skipped steps.
    pub fn global_samples(&self) -> u64 {
        self.global_samples
    }

    /// Returns whether the next [`step`](Self::step) updates the weights. As in DeepSpeed, the result is about the next
    /// step even if a step has just ended. To find out after a step whether it has ended an accumulation, call
    /// [`is_between_accumulations`](Self::is_between_accumulations).
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        self.accumulation.micro_steps + 1 >= self.config.batch.gradient_accumulation_steps as u64
    }

    /// Returns whether no accumulation is in progress: the last [`step`](Self::step) ended one, and no backward pass
    /// has run since. This is the right time for an evaluation or a checkpoint.
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

    /// Returns the number of optimizer steps so far, including skipped ones.
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Returns the number of micro steps so far.
    pub fn micro_steps(&self) -> u64 {
        self.micro_steps
    }

    /// Returns the number of optimizer steps that were skipped because a gradient or a loss was not finite.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Returns whether the last optimizer step changed the weights.
    pub fn was_step_applied(&self) -> bool {
        self.was_applied
    }

    /// Returns the learning rates of the next optimizer step, one per parameter group: first the groups given to the
    /// [builder](super::EngineBuilder::parameter_groups) that have parameters, in their order, then the group of all
    /// other parameters. With Muon, each group counts as two: its matrices and its other parameters. With the 8-bit
    /// optimizers, each group also counts as two: its parameters with 8-bit moments and its smaller ones.
    #[doc(alias = "get_lr")]
    pub fn lr(&self) -> Vec<f64> {
        self.trainer.lr()
    }

    /// Returns the momentum of each parameter group in the next optimizer step, in the order of [`lr`](Self::lr).
    #[doc(alias = "get_mom")]
    pub fn momentum(&self) -> Vec<Momentum> {
        self.trainer.momentum()
    }

    /// Returns the global L2 norm of the last optimizer step's gradients, before clipping and with the loss scale
    /// divided out. It is infinite after an overflow, and `None` before the first step.
    #[doc(alias = "get_global_grad_norm")]
    pub fn global_grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }

    /// Returns the same as [`lr`](Self::lr), under DeepSpeed's name.
    pub fn get_lr(&self) -> Vec<f64> {
        self.lr()
    }

    /// Returns the same as [`momentum`](Self::momentum), under DeepSpeed's name.
    pub fn get_mom(&self) -> Vec<Momentum> {
        self.momentum()
    }

    /// Returns the same as [`global_grad_norm`](Self::global_grad_norm), under DeepSpeed's name.
    pub fn get_global_grad_norm(&self) -> Option<f64> {
        self.global_grad_norm()
    }

    /// Returns the loss scale of the next backward pass; 1 without fp16.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// Returns the bytes of model state that this rank holds, together with the bytes that the ZeRO formula predicts.
    pub fn memory_report(&self) -> MemoryReport {
        self.core.memory_report()
    }

    /// Returns statistics of this rank's file access so far; zeros if nothing is offloaded to files.
    pub fn offload_report(&self) -> OffloadReport {
        self.core.offload_report().unwrap_or_default()
    }

    /// Returns statistics of this rank's collectives so far.
    pub fn comm_report(&self) -> CommReport {
        let report = self.core.comm().report();
        match self.core.experts() {
            Some(experts) => report.with(&experts.group.report()).with(&experts.holders.report()),
            None => report,
        }
    }

    /// Returns the times of the last optimizer step.
    pub fn timings(&self) -> StepTimings {
        self.clock.last
    }

    /// Returns this rank, counted from 0. With an island server, the ranks of all slots are counted.
    pub fn rank(&self) -> usize {
        self.islands.as_ref().map_or_else(|| self.job().rank(), |islands| islands.ranks.rank())
    }

    /// Returns this rank among those of the job, counted from 0. With an island server, each island is a separate job,
    /// so each island has a rank 0: use this number to choose the rank that prints, logs or writes files.
    pub fn job_rank(&self) -> usize {
        self.job().rank()
    }

    /// Returns the number of ranks. With an island server, the ranks of all slots are counted, including empty slots.
    pub fn world_size(&self) -> usize {
        self.islands.as_ref().map_or_else(|| self.job().size(), |islands| islands.ranks.world_size())
    }

    /// Returns all ranks of the job: those of all islands or, with an island server, those of this island.
    pub(super) fn job(&self) -> &dyn Communicator {
        self.islands.as_ref().map_or(self.core.comm(), |islands| &**islands.ranks.job())
    }

    /// Returns the resolved configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the device that the model computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the model's dtype.
    pub fn dtype(&self) -> DType {
        self.core.dtype()
    }

    /// Returns the model. Its parameters may be used only inside [`forward`](Self::forward), [`eval`](Self::eval) and
    /// [`gathered`](Self::gathered).
    pub fn model(&self) -> &M {
        &self.model
    }
}
