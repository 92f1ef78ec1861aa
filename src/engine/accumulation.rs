//! Gradient accumulation: its progress, micro steps without reduction, and settings that change between accumulations.

use super::{AccumulatedLoss, Engine, MicroStepPhase};
use crate::error::{EngineError, Result};
use crate::layout::ZeroStage;

impl<M> Engine<M> {
    /// Runs micro steps whose gradients are not reduced (DeepSpeed's `no_sync`). Inside `run`, each rank accumulates
    /// its own full gradients, in the dtype of `data_types.grad_accum_dtype`. The first backward pass after
    /// `no_sync` reduces this sum together with its own gradients; if there is none, the step that updates the weights
    /// reduces the sum. This saves one reduction per micro step in `run`, and costs memory for a full gradient, which
    /// [`memory_report`](Self::memory_report) counts. All ranks must call `no_sync` for the same micro steps.
    ///
    /// As in DeepSpeed, [`step`](Self::step) is refused inside `run`; call it after `no_sync`, or omit it. If it is
    /// omitted, the backward passes of several micro steps count as one micro step: each loss is divided by
    /// `gradient_accumulation_steps`, and the reported loss is the sum.
    ///
    /// The sum of gradients differs in its last bits from the sum without `no_sync`, because it is accumulated over
    /// micro steps first and over ranks last.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::Module;
    /// # use candle_zero::Engine;
    /// # let config = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    /// #     "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}"#;
    /// # let mut engine = Engine::initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
    /// # let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
    /// while engine.global_steps() == 0 {
    ///     let micro_step = |engine: &mut Engine<candle_nn::Linear>| {
    ///         let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
    ///         engine.backward(&loss)
    ///     };
    ///     if engine.is_gradient_accumulation_boundary() {
    ///         micro_step(&mut engine)?;
    ///     } else {
    ///         engine.no_sync(micro_step)?;
    ///     }
    ///     engine.step()?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`EngineError::NoSyncStage`] at stages 2 and 3; [`EngineError::NoSyncInside`] inside `no_sync`; the error of
    /// `run`.
    pub fn no_sync<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.not_stopped()?;
        let stage = self.config.zero.stage;
        if stage > ZeroStage::One {
            return Err(EngineError::NoSyncStage { stage: stage.number() }.into());
        }
        if self.accumulation.in_no_sync {
            return Err(EngineError::NoSyncInside.into());
        }
        self.set_no_sync(true);
        let result = run(self);
        self.set_no_sync(false);
        result
    }

    fn set_no_sync(&mut self, on: bool) {
        self.accumulation.in_no_sync = on;
        self.core.hold_unreduced(on);
    }

    /// Drops the gradients and losses of the current accumulation, including those held by [`no_sync`](Self::no_sync).
    /// All ranks must call this at the same point.
    ///
    /// As in DeepSpeed, the count of micro steps is unchanged: the next update comes when it would have come anyway. If
    /// this is called between backward and step, the micro step is treated as if it had not begun, and forward comes
    /// next; a loss whose backward pass has not run can still be used. [`step`](Self::step) drops the gradients after
    /// an update, so this call is not needed then.
    ///
    /// # Errors
    /// A file of offloaded gradients cannot be written; [`EngineError::Stopped`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.attempt(|engine| engine.core.zero_grad())?;
        self.losses = AccumulatedLoss::default();
        self.accumulation.holds_gradients = false;
        if matches!(self.phase, MicroStepPhase::AfterBackward | MicroStepPhase::AfterNoSyncBackward) {
            self.phase = MicroStepPhase::Ready;
        }
        Ok(())
    }

    /// Changes the number of samples per optimizer step over all ranks, from the next accumulation on. As in DeepSpeed,
    /// `gradient_accumulation_steps` becomes `train_batch_size / (micro batch x ranks)`. Collective.
    ///
    /// # Errors
    /// [`EngineError::BatchSize`] if that quotient is not an integer above 0; [`EngineError::MidAccumulation`] in the
    /// middle of an accumulation; [`EngineError::ArgumentsDiffer`] between ranks. In all these cases, nothing has
    /// changed.
    pub fn set_train_batch_size(&mut self, train_batch_size: usize) -> Result<()> {
        self.same_on_all_ranks("set_train_batch_size", &[train_batch_size as f64])?;
        self.between_steps("set_train_batch_size")?;
        let (micro_batch, ranks) = (self.config.batch.train_micro_batch_size_per_gpu, self.world_size());
        let samples_per_micro_step = micro_batch.saturating_mul(ranks);
        if train_batch_size == 0 || !train_batch_size.is_multiple_of(samples_per_micro_step) {
            return Err(EngineError::BatchSize { train_batch_size, micro_batch, ranks }.into());
        }
        self.config.batch.train_batch_size = train_batch_size;
        self.config.batch.gradient_accumulation_steps = train_batch_size / samples_per_micro_step;
        Ok(())
    }

    /// Changes the number of samples per rank and forward pass, from the next accumulation on. As in DeepSpeed,
    /// `train_batch_size` changes accordingly, and `gradient_accumulation_steps` stays the same. The caller must supply
    /// batches of the new size. Collective.
    ///
    /// # Errors
    /// [`EngineError::MicroBatchSize`] if it is 0 or too large; [`EngineError::MidAccumulation`] in the middle of an
    /// accumulation; [`EngineError::ArgumentsDiffer`] between ranks. In all these cases, nothing has changed.
    pub fn set_train_micro_batch_size(&mut self, micro_batch: usize) -> Result<()> {
        self.same_on_all_ranks("set_train_micro_batch_size", &[micro_batch as f64])?;
        self.between_steps("set_train_micro_batch_size")?;
        let (steps, ranks) = (self.config.batch.gradient_accumulation_steps, self.world_size());
        let train_batch_size = micro_batch.checked_mul(steps).and_then(|samples| samples.checked_mul(ranks));
        let Some(train_batch_size) = train_batch_size.filter(|samples| *samples > 0) else {
            return Err(EngineError::MicroBatchSize { micro_batch, steps, ranks }.into());
        };
        self.config.batch.train_micro_batch_size_per_gpu = micro_batch;
        self.config.batch.train_batch_size = train_batch_size;
        Ok(())
    }

    /// Sets the learning rate of all parameter groups. As in DeepSpeed and PyTorch, a schedule overwrites it after the
    /// next update; without a schedule, it holds until the next call. Checkpoints store it: a run that resumes from
    /// one, on any number of ranks, uses this rate instead of the one in its configuration, unless the rate is set
    /// again after the load. Collective.
    ///
    /// # Errors
    /// [`EngineError::LearningRate`] if it is negative or not finite; [`EngineError::ArgumentsDiffer`] between ranks.
    /// In both cases, nothing has changed.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        let groups = self.lr().len();
        self.set_lr_of("set_lr", &vec![lr; groups])
    }

    /// Sets the learning rate of each parameter group, in the order of [`get_lr`](Self::get_lr); otherwise the same as
    /// [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// The same as [`set_lr`](Self::set_lr); [`EngineError::LearningRates`] for a wrong number of rates.
    pub fn set_lr_of_groups(&mut self, lr: &[f64]) -> Result<()> {
        self.set_lr_of("set_lr_of_groups", lr)
    }

    fn set_lr_of(&mut self, call: &'static str, lr: &[f64]) -> Result<()> {
        self.same_on_all_ranks(call, lr)?;
        let groups = self.lr().len();
        if lr.len() != groups {
            return Err(EngineError::LearningRates { found: lr.len(), groups }.into());
        }
        if let Some(wrong) = lr.iter().find(|lr| !(0.0..f64::INFINITY).contains(*lr)) {
            return Err(EngineError::LearningRate { lr: *wrong }.into());
        }
        self.trainer.set_lr(lr);
        Ok(())
    }

    /// Collective: returns an error on all ranks unless all have passed the same numbers to `call`.
    pub(super) fn same_on_all_ranks(&mut self, call: &'static str, values: &[f64]) -> Result<()> {
        let bits: Vec<u8> = values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
        // Every rank sends two numbers, however many values its caller gave.
        let own = [values.len() as f64, f64::from(crate::util::fnv1a(&bits) as u32)];
        let all = self.attempt(|engine| engine.gather_f64(&own))?;
        match all.iter().position(|theirs| theirs[..] != own) {
            Some(other) => Err(EngineError::ArgumentsDiffer { call, rank: self.rank(), other }.into()),
            None => Ok(()),
        }
    }

    /// Returns whether there are gradients of a micro step that `step` has not ended yet, even if a forward pass has
    /// run since.
    pub(super) fn has_gradients_of_micro_step(&self) -> bool {
        self.accumulation.holds_gradients
            || matches!(self.phase, MicroStepPhase::AfterBackward | MicroStepPhase::AfterNoSyncBackward)
    }

    /// Returns an error in the middle of an accumulation, where `call` is not allowed.
    pub(super) fn between_steps(&self, call: &'static str) -> Result<()> {
        self.not_stopped()?;
        let accumulation_steps = self.config.batch.gradient_accumulation_steps as u64;
        match self.accumulation.micro_steps + u64::from(self.has_gradients_of_micro_step()) {
            0 => Ok(()),
            backwards => Err(EngineError::MidAccumulation { call, backwards, accumulation_steps }.into()),
        }
    }
}
