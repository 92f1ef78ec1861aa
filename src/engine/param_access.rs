//! Access to single parameters by name: values, gradients and optimizer states, like DeepSpeed's `safe_get_*` and
//! `safe_set_*`, and parameters gathered outside a forward pass.

use super::{Engine, MicroStepPhase};
use crate::comm::agree::{agree, rank_failed};
use crate::error::{EngineError, ParamError, Result};
use crate::param::ParamId;
use crate::precision::Flat;
use crate::util::{fnv1a, suggest_names};
use crate::zero::share::state_access::ParamStateKind;
use candle_core::{DType, Device, Tensor};

impl<M> Engine<M> {
    /// Collective: returns the full values of parameter `name` at full precision (those of the master weights, if there
    /// are any), in f32 and the parameter's shape, at every stage and with any offload.
    ///
    /// # Errors
    /// [`ParamError::Unknown`]; [`EngineError::ArgumentsDiffer`] between ranks; a failed collective; a file that cannot
    /// be read.
    pub fn safe_get_full_fp32_param(&mut self, name: &str) -> Result<Tensor> {
        let param = self.agreed_param("safe_get_full_fp32_param", name, "", None)?;
        let full = self.attempt(|engine| engine.core.full_f32(param))?;
        self.shaped(param, full)
    }

    /// Collective: returns the full gradient of parameter `name`, in f32 and the parameter's shape, as the next
    /// [`step`](Self::step) would use it before clipping: reduced over ranks, summed over the micro steps of the
    /// accumulation so far, each divided by `gradient_accumulation_steps`, with the loss scale divided out.
    ///
    /// A gradient exists from the first backward pass of an accumulation to the step that updates the weights. The
    /// result is `None` at other times, for a frozen parameter, and while [`no_sync`](Self::no_sync) holds all
    /// gradients.
    ///
    /// # Errors
    /// The same as [`safe_get_full_fp32_param`](Self::safe_get_full_fp32_param).
    pub fn safe_get_full_grad(&mut self, name: &str) -> Result<Option<Tensor>> {
        let param = self.agreed_param("safe_get_full_grad", name, "", None)?;
        let full = self.attempt(|engine| engine.core.full_gradient(param))?;
        full.map(|full| self.unscaled(full)).map(|full| self.shaped(param, full)).transpose()
    }

    /// Collective: returns the full optimizer state `key` (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, ...) of
    /// parameter `name`, in f32 and the parameter's shape. A factored state (`exp_avg_sq_row` and `exp_avg_sq_col` of
    /// Adafactor, which cannot be set) has one dimension. Before the first update, a state is zero.
    ///
    /// # Errors
    /// The same as [`safe_get_full_fp32_param`](Self::safe_get_full_fp32_param); [`ParamError::UnknownState`], also for
    /// a frozen parameter, which has no states.
    pub fn safe_get_full_optimizer_state(&mut self, name: &str, key: &str) -> Result<Tensor> {
        let param = self.agreed_param("safe_get_full_optimizer_state", name, key, None)?;
        let state = self.readable_state_of(param, key)?;
        let full = self.attempt(|engine| engine.core.full_state(state, param))?;
        match state {
            ParamStateKind::Factored(_) => self.flat(full),
            _ => self.shaped(param, full),
        }
    }

    /// Collective: sets the values of parameter `name` everywhere: master weights, shards and full tensors. Optimizer
    /// states are unchanged. All ranks must give the same `value`, in the parameter's shape and any dtype.
    ///
    /// # Errors
    /// The same as [`safe_get_full_fp32_param`](Self::safe_get_full_fp32_param); [`ParamError::ValueShape`];
    /// [`EngineError::OutOfOrder`] between forward and backward, because the graph contains the old values;
    /// [`EngineError::LocalSteps`] if ranks take local steps; the error of a failed background save. Except after a
    /// failed collective or file access, nothing has changed.
    pub fn safe_set_full_fp32_param(&mut self, name: &str, value: &Tensor) -> Result<()> {
        const CALL: &str = "safe_set_full_fp32_param";
        self.not_on_islands(CALL)?;
        let values = self.values_of(CALL, value)?;
        let param = self.agreed_param(CALL, name, "", Some((value, &values)))?;
        self.check_shape(param, value)?;
        self.wait_for_checkpoint()?;
        self.settled(|engine| {
            engine.core.set_state(ParamStateKind::Weights, param, &values)?;
            engine.core.refresh()
        })
    }

    /// Collective: sets an existing gradient (see [`safe_get_full_grad`](Self::safe_get_full_grad)). The next backward
    /// pass of the accumulation adds to this gradient. All ranks must give the same `value`.
    ///
    /// # Errors
    /// [`EngineError::GradientAbsent`]; otherwise the same as
    /// [`safe_set_full_fp32_param`](Self::safe_set_full_fp32_param), except [`EngineError::LocalSteps`] and the error
    /// of a background save.
    pub fn safe_set_full_grad(&mut self, name: &str, value: &Tensor) -> Result<()> {
        const CALL: &str = "safe_set_full_grad";
        let mut values = self.values_of(CALL, value)?;
        let param = self.agreed_param(CALL, name, "", Some((value, &values)))?;
        self.check_shape(param, value)?;
        self.scale(&mut values);
        let exists = self.attempt(|engine| engine.core.set_gradient(param, &values))?;
        check_gradient_exists(exists, name)
    }

    /// Collective: sets the optimizer state `key` of parameter `name`. All ranks must give the same `value`.
    ///
    /// # Errors
    /// [`ParamError::UnknownState`]; [`ParamError::ReadOnlyState`]; otherwise the same as
    /// [`safe_set_full_fp32_param`](Self::safe_set_full_fp32_param), except [`EngineError::LocalSteps`].
    pub fn safe_set_full_optimizer_state(&mut self, name: &str, value: &Tensor, key: &str) -> Result<()> {
        const CALL: &str = "safe_set_full_optimizer_state";
        let values = self.values_of(CALL, value)?;
        let param = self.agreed_param(CALL, name, key, Some((value, &values)))?;
        let state = self.state_of(param, key)?;
        self.check_shape(param, value)?;
        self.wait_for_checkpoint()?;
        self.settled(|engine| engine.core.set_state(state, param, &values))
    }

    /// Returns this rank's part of parameter `name`, flattened, in f32: its shard if optimizer states are sharded, the
    /// full parameter at stage 0. Like the other `safe_get_local_*` methods, it is not collective.
    ///
    /// # Errors
    /// [`ParamError::Unknown`]; a file that cannot be read.
    pub fn safe_get_local_fp32_param(&mut self, name: &str) -> Result<Tensor> {
        let param = self.param(name)?;
        let local = self.attempt(|engine| engine.core.own_state(ParamStateKind::Weights, param))?;
        self.flat(local)
    }

    /// Returns this rank's part of the result of [`safe_get_full_grad`](Self::safe_get_full_grad).
    ///
    /// # Errors
    /// The same as [`safe_get_local_fp32_param`](Self::safe_get_local_fp32_param).
    pub fn safe_get_local_grad(&mut self, name: &str) -> Result<Option<Tensor>> {
        let param = self.param(name)?;
        let local = self.attempt(|engine| engine.core.own_gradient(param))?;
        local.map(|local| self.unscaled(local)).map(|local| self.flat(local)).transpose()
    }

    /// Returns this rank's part of the result of
    /// [`safe_get_full_optimizer_state`](Self::safe_get_full_optimizer_state).
    ///
    /// # Errors
    /// The same as [`safe_get_local_fp32_param`](Self::safe_get_local_fp32_param); [`ParamError::UnknownState`].
    pub fn safe_get_local_optimizer_state(&mut self, name: &str, key: &str) -> Result<Tensor> {
        let param = self.param(name)?;
        let state = self.readable_state_of(param, key)?;
        let local = self.attempt(|engine| engine.core.own_state(state, param))?;
        self.flat(local)
    }

    /// Collective: sets this rank's part of the values of parameter `name` everywhere: master weights, shards and the
    /// full tensors of all ranks. Each rank gives its own part, in one dimension and any dtype, with the length of the
    /// result of [`safe_get_local_fp32_param`](Self::safe_get_local_fp32_param).
    ///
    /// # Errors
    /// [`EngineError::NotSharded`] at stage 0; [`ParamError::Unknown`]; [`EngineError::ArgumentsDiffer`];
    /// [`ParamError::LocalShape`], and [`EngineError::FailedOnOtherRank`] on the ranks whose value is right;
    /// [`EngineError::OutOfOrder`] between forward and backward; [`EngineError::LocalSteps`] if ranks take local steps;
    /// the error of a failed background save. In all these cases, nothing has changed. Also fails if a collective or a
    /// file access fails.
    pub fn safe_set_local_fp32_param(&mut self, name: &str, value: &Tensor) -> Result<()> {
        const CALL: &str = "safe_set_local_fp32_param";
        self.not_on_islands(CALL)?;
        self.check_sharded(CALL, "safe_set_full_fp32_param")?;
        self.not_between_passes(CALL)?;
        let param = self.agreed_param(CALL, name, "", None)?;
        let local = self.own_values_of(CALL, param, value);
        let local = self.agreed(CALL, local)?;
        self.wait_for_checkpoint()?;
        self.settled(|engine| {
            let full = engine.core.assemble_full(param, local)?;
            engine.core.set_state(ParamStateKind::Weights, param, &full)?;
            engine.core.refresh()
        })
    }

    /// Sets this rank's part of an existing gradient: see [`safe_get_local_grad`](Self::safe_get_local_grad). Not
    /// collective.
    ///
    /// # Errors
    /// [`EngineError::NotSharded`] at stage 0; [`ParamError::Unknown`]; [`ParamError::LocalShape`];
    /// [`EngineError::GradientAbsent`]; [`EngineError::OutOfOrder`] between forward and backward; a file that cannot be
    /// read or written.
    pub fn safe_set_local_grad(&mut self, name: &str, value: &Tensor) -> Result<()> {
        const CALL: &str = "safe_set_local_grad";
        self.check_sharded(CALL, "safe_set_full_grad")?;
        let param = self.param(name)?;
        let mut local = self.own_values_of(CALL, param, value)?;
        self.scale(&mut local);
        let exists = self.attempt(|engine| engine.core.set_own_gradient(param, &local))?;
        check_gradient_exists(exists, name)
    }

    /// Sets this rank's part of the optimizer state `key` of parameter `name`: see
    /// [`safe_get_local_optimizer_state`](Self::safe_get_local_optimizer_state). Collective only while a background
    /// save is in progress, because the call waits for that save.
    ///
    /// # Errors
    /// [`ParamError::UnknownState`]; [`ParamError::ReadOnlyState`]; the error of a failed background save; otherwise
    /// the same as [`safe_set_local_grad`](Self::safe_set_local_grad), except [`EngineError::GradientAbsent`].
    pub fn safe_set_local_optimizer_state(&mut self, name: &str, value: &Tensor, key: &str) -> Result<()> {
        const CALL: &str = "safe_set_local_optimizer_state";
        self.check_sharded(CALL, "safe_set_full_optimizer_state")?;
        let param = self.param(name)?;
        let state = self.state_of(param, key)?;
        let local = self.own_values_of(CALL, param, value)?;
        self.wait_for_checkpoint()?;
        self.attempt(|engine| engine.core.set_own_moment(state, param, &local))
    }

    /// Runs `run` while the parameters `names` are gathered, so that the parameters of [`model`](Self::model) can be
    /// read outside a forward pass (DeepSpeed's `GatheredParameters`, for reading; [`gathered_mut`](Self::gathered_mut)
    /// changes them). The gathered parameters have the model's dtype. Collective at stage 3; at other stages, every
    /// rank always has all full parameters. With expert parallelism, only the ranks that hold an expert have its
    /// parameters.
    ///
    /// ```
    /// # use candle_zero::Engine;
    /// # let config = r#"{"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}"#;
    /// # let mut engine = Engine::initialize(|vb| candle_nn::linear(4, 3, vb), config)?;
    /// let largest = engine.gathered(&["weight"], |model| model.weight().abs()?.max_all()?.to_scalar::<f32>())?;
    /// assert!(largest > 0.0);
    /// # Ok::<(), candle_zero::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ParamError::Unknown`]; [`EngineError::ArgumentsDiffer`] between ranks; the error of `run`, after which the
    /// engine can continue; a failed collective.
    pub fn gathered<T>(&mut self, names: &[&str], run: impl FnOnce(&M) -> candle_core::Result<T>) -> Result<T> {
        if self.core.shards_params() {
            self.same_on_all_ranks("gathered", &[hash(names.join("\n").as_bytes())])?;
        }
        let mut params = names.iter().map(|name| self.param(name)).collect::<Result<Vec<_>>>()?;
        params.sort_unstable();
        params.dedup();
        self.attempt(|engine| engine.core.with_gathered(&params, || run(&engine.model)))?
    }

    /// Collective: lets rank `modifier_rank` change the parameters `names` (DeepSpeed's `GatheredParameters` with a
    /// `modifier_rank`). On that rank, `run` gets their full values, in the order of `names`, at full precision in f32.
    /// The tensors that `run` leaves in its argument become the parameters' values on every rank, at every stage and
    /// with any offload. On other ranks, `run` is not called. Optimizer states are unchanged.
    ///
    /// ```
    /// # use candle_zero::Engine;
    /// # let config = r#"{"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}"#;
    /// # let mut engine = Engine::initialize(|vb| candle_nn::linear(4, 3, vb), config)?;
    /// engine.gathered_mut(&["weight", "bias"], 0, |values| {
    ///     values[0] = (&values[0] * 0.5)?;
    ///     values[1] = values[1].zeros_like()?;
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_zero::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ParamError::Unknown`]; [`EngineError::NoSuchRank`]; [`EngineError::ArgumentsDiffer`] between ranks; the error
    /// of `run`, or [`ParamError::ValueShape`], on the rank where it ran, and [`EngineError::FailedOnOtherRank`] on the
    /// others; [`EngineError::OutOfOrder`] between forward and backward; [`EngineError::LocalSteps`] if ranks take
    /// local steps; the error of a failed background save. In all these cases, nothing has changed, and the engine can
    /// continue. Also fails if a collective or a file access fails.
    pub fn gathered_mut(
        &mut self,
        names: &[&str],
        modifier_rank: usize,
        run: impl FnOnce(&mut [Tensor]) -> candle_core::Result<()>,
    ) -> Result<()> {
        const CALL: &str = "gathered_mut";
        self.not_on_islands(CALL)?;
        self.not_between_passes(CALL)?;
        self.same_on_all_ranks(CALL, &[hash(names.join("\n").as_bytes()), modifier_rank as f64])?;
        let params = names.iter().map(|name| self.param(name)).collect::<Result<Vec<_>>>()?;
        let ranks = self.world_size();
        if modifier_rank >= ranks {
            return Err(EngineError::NoSuchRank { call: CALL, rank: modifier_rank, ranks }.into());
        }
        self.wait_for_checkpoint()?;
        let modifies = self.rank() == modifier_rank;
        let mut full = Vec::new();
        for param in &params {
            let values = self.attempt(|engine| engine.core.full_f32(*param))?;
            full.extend(modifies.then_some(values));
        }
        let modified = if modifies { self.modified(&params, full, run) } else { Ok(Vec::new()) };
        let mut modified = self.agreed(CALL, modified)?.into_iter();
        for param in params {
            self.settled(|engine| {
                let full = engine.core.broadcast_full(param, modified.next())?;
                engine.core.set_state(ParamStateKind::Weights, param, &full)
            })?;
        }
        self.attempt(|engine| engine.core.refresh())
    }

    /// Releases all gathered parameters at stage 3, including those kept by `stage3_param_persistence_threshold`, until
    /// the next forward or backward pass needs them, like DeepSpeed's call of the same name: for example, to free
    /// memory for an evaluation elsewhere. At every stage, free memory is returned to the GPU's driver. All ranks must
    /// call this method at the same point.
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`] between forward and backward; a failed collective.
    pub fn empty_partition_cache(&mut self) -> Result<()> {
        self.not_between_passes("empty_partition_cache")?;
        self.attempt(|engine| engine.core.empty_cache())
    }

    /// Returns the index of parameter `name`.
    fn param(&self, name: &str) -> Result<ParamId> {
        self.not_stopped()?;
        let params = self.core.params();
        let found = params.iter().position(|param| param.name == name);
        found.ok_or_else(|| {
            let suggestion = suggest_names(name, params.iter().map(|param| param.name.as_str()));
            let suggestion = suggestion.unwrap_or_else(|| "no name is similar".into());
            ParamError::Unknown { name: name.into(), suggestion }.into()
        })
    }

    /// Collective: returns the index of parameter `name` if all ranks pass the same arguments and the same value.
    fn agreed_param(
        &mut self,
        call: &'static str,
        name: &str,
        key: &str,
        value: Option<(&Tensor, &[f32])>,
    ) -> Result<ParamId> {
        let (shape, values) = value.map_or((&[][..], &[][..]), |(tensor, values)| (tensor.dims(), values));
        let shape: Vec<u8> = shape.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let parts = [name.as_bytes(), key.as_bytes(), &shape, &bytes];
        self.same_on_all_ranks(call, &parts.map(hash))?;
        self.param(name)
    }

    /// Returns the values of parameters as `run` leaves them.
    fn modified(
        &self,
        params: &[ParamId],
        full: Vec<Flat>,
        run: impl FnOnce(&mut [Tensor]) -> candle_core::Result<()>,
    ) -> Result<Vec<Vec<f32>>> {
        let tensors = params.iter().zip(full).map(|(param, values)| self.shaped(*param, values));
        let mut tensors = tensors.collect::<Result<Vec<_>>>()?;
        run(&mut tensors)?;
        let values = params.iter().zip(&tensors).map(|(param, tensor)| {
            self.check_shape(*param, tensor)?;
            host_values(tensor)
        });
        values.collect()
    }

    /// Collective: returns this rank's result if the call has succeeded on every rank.
    fn agreed<T>(&mut self, call: &'static str, result: Result<T>) -> Result<T> {
        let elsewhere = |rank| EngineError::FailedOnOtherRank { call, why: rank_failed(rank) }.into();
        self.attempt(|engine| agree(engine.core.comm(), result, elsewhere))
    }

    /// Returns an error at stage 0, where parameters have no parts that could be set separately.
    fn check_sharded(&self, call: &'static str, full: &'static str) -> Result<()> {
        match self.config.zero.stage.placement().optim.is_sharded() {
            true => Ok(()),
            false => Err(EngineError::NotSharded { call, full }.into()),
        }
    }

    /// Returns the values for this rank's part of a parameter, in host memory.
    fn own_values_of(&self, call: &'static str, param: ParamId, value: &Tensor) -> Result<Vec<f32>> {
        let values = self.values_of(call, value)?;
        let len = self.core.owned_range(param).len();
        if value.dims() == [len] {
            return Ok(values);
        }
        let (name, rank) = (self.core.params()[param].name.clone(), self.rank());
        Err(ParamError::LocalShape { name, rank, found: value.dims().to_vec(), len }.into())
    }

    /// Returns a state, which may be factored.
    fn readable_state_of(&self, param: ParamId, key: &str) -> Result<ParamStateKind> {
        let factored = self.core.factored_names(&self.core.params()[param], &self.trainer);
        match factored.iter().position(|name| *name == key) {
            Some(number) => Ok(ParamStateKind::Factored(number)),
            None => self.state_of(param, key),
        }
    }

    fn state_of(&self, param: ParamId, key: &str) -> Result<ParamStateKind> {
        let param = &self.core.params()[param];
        let keys = self.core.moments(param, &self.trainer);
        let found = keys.iter().position(|name| *name == key).map(ParamStateKind::Moment);
        found.ok_or_else(|| {
            let readable = self.core.factored_names(param, &self.trainer);
            let (name, key) = (param.name.clone(), key.to_owned());
            if readable.contains(&key.as_str()) {
                return ParamError::ReadOnlyState { name, key }.into();
            }
            let all = [keys, readable].concat();
            let existing = if all.is_empty() { "none".into() } else { all.join(", ") };
            ParamError::UnknownState { name, key, existing }.into()
        })
    }

    /// Returns the values to be set, in host memory.
    fn values_of(&self, call: &'static str, value: &Tensor) -> Result<Vec<f32>> {
        self.not_between_passes(call)?;
        host_values(value)
    }

    /// Returns an error if a graph is waiting for its backward pass.
    fn not_between_passes(&self, call: &'static str) -> Result<()> {
        self.not_stopped()?;
        match self.phase {
            MicroStepPhase::AfterForward => {
                Err(EngineError::OutOfOrder { call, when: "between forward and backward" }.into())
            }
            _ => Ok(()),
        }
    }

    fn check_shape(&self, param: ParamId, value: &Tensor) -> Result<()> {
        let param = &self.core.params()[param];
        if param.shape.dims() == value.dims() {
            return Ok(());
        }
        let (name, found, expected) = (param.name.clone(), value.dims().to_vec(), param.shape.dims().to_vec());
        Err(ParamError::ValueShape { name, found, expected }.into())
    }

    /// Multiplies a gradient by the loss scale.
    fn scale(&self, grad: &mut [f32]) {
        let scale = self.scaler.scale() as f32;
        grad.iter_mut().for_each(|value| *value *= scale);
    }

    /// Returns a gradient with the loss scale divided out.
    fn unscaled(&self, mut grad: Flat) -> Flat {
        let scale = self.scaler.scale();
        if scale != 1.0 {
            grad.as_mut().scale((1.0 / scale) as f32);
        }
        grad
    }

    fn shaped(&self, param: ParamId, values: Flat) -> Result<Tensor> {
        Ok(self.flat(values)?.reshape(&self.core.params()[param].shape)?)
    }

    /// Returns f32 values as a one-dimensional tensor on the model's device.
    fn flat(&self, values: Flat) -> Result<Tensor> {
        let Flat::F32(values) = values else { unreachable!("states are read in f32") };
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &self.device)?)
    }
}

/// Returns an error if there was no gradient to set.
fn check_gradient_exists(exists: bool, name: &str) -> Result<()> {
    if exists { Ok(()) } else { Err(EngineError::GradientAbsent { name: name.into() }.into()) }
}

/// Returns the values of a tensor in f32.
fn host_values(value: &Tensor) -> Result<Vec<f32>> {
    Ok(value.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Returns a hash that a control message can carry exactly.
fn hash(bytes: &[u8]) -> f64 {
    f64::from(fnv1a(bytes) as u32)
}
