//! Evaluation and inference in a pipeline: forward passes through all stages, without a graph.

use super::division::StageLayers;
use super::p2p::{BoundaryMessageKind, BoundaryTensor, check_boundary, check_output};
use super::pipeline_engine::PipelineEngine;
use crate::error::Result;
use crate::pipeline::InferenceState;
use candle_core::Tensor;

impl<B> PipelineEngine<B> {
    /// Evaluates `micro_batches` micro batches without training: dropout is off, and no activations are kept. `next`
    /// returns micro batch i, the same on all ranks of a pipeline. Returns the mean loss over micro batches and
    /// pipelines, on every rank. Collective.
    ///
    /// # Errors
    /// The error of `next` or of a layer; a loss that does not have exactly one element; a stage's output whose dtype
    /// or number of dimensions the next stage cannot receive; a failed collective.
    pub fn eval_batch(&mut self, micro_batches: usize, next: impl FnMut(usize) -> Result<B>) -> Result<f64> {
        self.engine.check_in_step()?;
        let sum = self.sum_of_losses(micro_batches, next);
        let sum = self.engine.in_step(sum)?;
        self.engine.mean_of_last_stage(sum / micro_batches.max(1) as f64)
    }

    /// Evaluates micro batches as [`eval_batch`](Self::eval_batch) does, and returns the sum of their losses over all
    /// pipelines, on every rank. Collective.
    ///
    /// # Errors
    /// The same as [`eval_batch`](Self::eval_batch).
    pub fn eval_sum(&mut self, micro_batches: usize, next: impl FnMut(usize) -> Result<B>) -> Result<f64> {
        self.engine.check_in_step()?;
        let sum = self.sum_of_losses(micro_batches, next);
        let sum = self.engine.in_step(sum)?;
        self.engine.sum_of_last_stage(sum)
    }

    /// Runs `micro_batches` micro batches through all stages without training: dropout is off, no loss is computed, and
    /// no activations are kept. `next` returns micro batch i, the same on all ranks of a pipeline. Returns the last
    /// layer's output ([`PipelineLayer::infer`](crate::pipeline::PipelineLayer::infer)) for each micro batch, on every
    /// rank of the pipeline. Collective along the pipeline.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::linear;
    /// use candle_zero::Engine;
    /// use candle_zero::pipeline::PipelineModule;
    ///
    /// // Inference needs no targets.
    /// let module = PipelineModule::new(|x: &Tensor| Ok(x.clone()), |y, _| y.sqr()?.mean_all());
    /// let module = module.layer("fc1", |vb| linear(4, 16, vb)).layer("fc2", |vb| linear(16, 3, vb));
    /// let config = r#"{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}"#;
    /// let mut engine = Engine::builder().initialize_pipeline(module, config)?;
    /// let outputs = engine.infer_batch(2, |_| Ok(Tensor::ones((2, 4), DType::F32, &Device::Cpu)?))?;
    /// assert_eq!([outputs[0].dims(), outputs[1].dims()], [[2, 3]; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The error of `next` or of a layer; a stage's output whose dtype or number of dimensions the next stage or, for
    /// the last stage, other ranks cannot receive; a failed collective.
    pub fn infer_batch(&mut self, micro_batches: usize, next: impl FnMut(usize) -> Result<B>) -> Result<Vec<Tensor>> {
        self.engine.check_in_step()?;
        let outputs = self.outputs_on_all_ranks(micro_batches, next);
        self.engine.in_step(outputs)
    }

    /// Does the same as [`infer_batch`](Self::infer_batch), but returns the outputs only on the rank of the last stage,
    /// and `None` on the others. The last layer's outputs may have any dtype and any number of dimensions.
    ///
    /// # Errors
    /// The same as [`infer_batch`](Self::infer_batch), except the error for the last stage's output.
    pub fn infer_batch_on_last_stage(
        &mut self,
        micro_batches: usize,
        next: impl FnMut(usize) -> Result<B>,
    ) -> Result<Option<Vec<Tensor>>> {
        self.engine.check_in_step()?;
        let outputs = self.outputs(micro_batches, next);
        let outputs = self.engine.in_step(outputs)?;
        Ok((self.rank == self.last_rank()).then_some(outputs))
    }

    /// Returns the rank of the last stage.
    pub(super) fn last_rank(&self) -> usize {
        self.schedule.rank_of(self.schedule.stages() - 1)
    }

    /// Returns the sum of the losses of micro batches on the rank of the last stage, and 0 on the others.
    fn sum_of_losses(&mut self, micro_batches: usize, mut next: impl FnMut(usize) -> Result<B>) -> Result<f64> {
        let mut sum = 0.0;
        for micro_batch in 0..micro_batches {
            let batch = next(micro_batch)?;
            let apply = |_: usize, layers: &StageLayers<B>, x: Tensor| {
                layers.iter().try_fold(x, |x, layer| layer.forward(&x, &batch))
            };
            if let Some(output) = self.pass_through(micro_batch, &batch, apply)? {
                let module = &self.module;
                let loss = self.engine.evaluate_stage(|_| module.loss(&output, &batch))?;
                sum += self.engine.loss_value(&loss)?;
            }
        }
        self.boundaries.finish()?;
        Ok(sum)
    }

    /// Returns the last layer's output for each micro batch.
    fn outputs_on_all_ranks(
        &mut self,
        micro_batches: usize,
        next: impl FnMut(usize) -> Result<B>,
    ) -> Result<Vec<Tensor>> {
        let mut outputs = self.outputs(micro_batches, next)?;
        let (own_rank, last_rank) = (self.rank, self.last_rank());
        if own_rank != last_rank {
            let receive = |micro_batch| {
                Ok(self.boundaries.receive(BoundaryMessageKind::Output, (0, micro_batch), last_rank)?.tensor)
            };
            return (0..micro_batches).map(receive).collect();
        }
        outputs.iter().try_for_each(check_output)?;
        for (micro_batch, tensor) in outputs.iter_mut().enumerate() {
            let message = BoundaryTensor { tensor: tensor.clone(), next_draw: 0, memory: None };
            for rank in (0..self.schedule.ranks()).filter(|rank| *rank != own_rank) {
                self.boundaries.send(BoundaryMessageKind::Output, (0, micro_batch), rank, &message)?;
            }
        }
        self.boundaries.finish()?;
        Ok(outputs)
    }

    /// Returns the last layer's output for each micro batch on the rank of the last stage, and nothing on the others.
    fn outputs(&mut self, micro_batches: usize, mut next: impl FnMut(usize) -> Result<B>) -> Result<Vec<Tensor>> {
        let mut outputs = Vec::new();
        for micro_batch in 0..micro_batches {
            let batch = next(micro_batch)?;
            let apply = |_: usize, layers: &StageLayers<B>, x: Tensor| {
                layers.iter().try_fold(x, |x, layer| layer.infer(&x, &batch, &mut InferenceState::default()))
            };
            outputs.extend(self.pass_through(micro_batch, &batch, apply)?);
        }
        self.boundaries.finish()?;
        Ok(outputs)
    }

    /// Runs a micro batch through this rank's stages, and passes the output of each stage on. `apply` computes the
    /// output of a stage from its input. Returns the output of the last stage on the rank that has it.
    pub(super) fn pass_through(
        &mut self,
        micro_batch: usize,
        batch: &B,
        mut apply: impl FnMut(usize, &StageLayers<B>, Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let (schedule, mut local_output) = (self.schedule, None);
        for stage in schedule.stages_of(self.rank) {
            let key = (stage, micro_batch);
            let x = match stage.checked_sub(1).map(|previous| schedule.rank_of(previous)) {
                None => self.module.input(batch)?,
                Some(rank) if rank == self.rank => local_output.take().expect("the previous stage has run"),
                Some(rank) => self.boundaries.receive(BoundaryMessageKind::Activation, key, rank)?.tensor,
            };
            let output = self.engine.evaluate_stage(|layers| apply(stage, &layers.stages[&stage], x))?;
            if stage + 1 == schedule.stages() {
                return Ok(Some(output));
            }
            check_boundary(stage, &output)?;
            let message = BoundaryTensor { tensor: output, next_draw: 0, memory: None };
            match schedule.rank_of(stage + 1) {
                rank if rank == self.rank => local_output = Some(message.tensor),
                rank => {
                    self.boundaries.send(BoundaryMessageKind::Activation, (stage + 1, micro_batch), rank, &message)?
                }
            }
            // The first stages would otherwise run ahead, and keep the activations of all micro batches.
            self.boundaries.finish_until(2 * schedule.ranks())?;
        }
        Ok(None)
    }
}
