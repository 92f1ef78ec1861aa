//! Access to one parameter's values, gradient and optimizer states, either in full or only this rank's part of them,
//! for the user to read and set.

use super::state_access::{ParamStateKind, pieces};
#[cfg(feature = "cuda")]
use crate::cuda::memory_pool;
use crate::error::Result;
use crate::param::ParamId;
use crate::precision::{Flat, FlatRef};
use crate::util::lock;
use crate::zero::rank_core::RankCore;
use crate::zero::step_executor::StepExecutor;
use candle_core::DType;
use std::ops::Range;

impl RankCore {
    /// Returns this rank's part of a state, in f32.
    pub fn own_state(&self, state: ParamStateKind, param: ParamId) -> Result<Flat> {
        let owned = self.held_range(state, param);
        if self.params[param].packing().is_some() {
            // The values are unpacked in one call, because each of several calls would read all words again.
            return self.own_values(state, param, owned);
        }
        let mut part = Flat::with_capacity(DType::F32, owned.len());
        for piece in pieces(&owned) {
            self.read_state(state, param, piece, |values| part.extend_cast(values))?;
        }
        Ok(part)
    }

    /// Returns this rank's part of a gradient as it was accumulated, in f32, or `None` if none has been reduced.
    pub fn own_gradient(&self, param: ParamId) -> Result<Option<Flat>> {
        let (group, slot) = self.slot_of(param);
        let group = &mut lock(&self.groups)[group];
        let Some(grads) = group.take_grads(slot, self)? else { return Ok(None) };
        let mut part = Flat::with_capacity(DType::F32, 0);
        grads.buffer().read(0..group.slots[slot].owned.len(), |values| part.extend_cast(values))?;
        group.put_grads(slot, grads, self);
        Ok(Some(part))
    }

    /// Gathers a complete state, in f32. Collective except for a factored state, which every rank has in full.
    pub fn full_state(&self, state: ParamStateKind, param: ParamId) -> Result<Flat> {
        if let ParamStateKind::Factored(_) = state {
            return self.own_state(state, param);
        }
        self.gather_whole(param, self.own_state(state, param)?)
    }

    /// Collective: gathers a complete gradient, in f32. Returns `None` if none has been reduced.
    pub fn full_gradient(&self, param: ParamId) -> Result<Option<Flat>> {
        let part = self.own_gradient(param)?;
        let exists = self.exists_on_holders(param, part.is_some())?;
        let part = exists.then(|| part.unwrap_or_else(|| Flat::F32(Vec::new())));
        part.map(|part| self.gather_whole(param, part)).transpose()
    }

    /// Sets a state on every rank that has a part of it. Weights are also written to their full or 16-bit copies, if
    /// these exist.
    pub fn set_state(&self, state: ParamStateKind, param: ParamId, values: &[f32]) -> Result<()> {
        let part = |range: Range<usize>| Ok(Flat::F32(values[range].to_vec()));
        self.write_state(state, param, self.owned_range(param), part)?;
        if state == ParamStateKind::Weights {
            self.write_all_elements(param, part)?;
        }
        Ok(())
    }

    /// Sets this rank's part of an optimizer state.
    pub fn set_own_moment(&self, moment: ParamStateKind, param: ParamId, values: &[f32]) -> Result<()> {
        let owned = self.owned_range(param);
        let start = owned.start;
        let part = |range: Range<usize>| Ok(Flat::F32(values[range.start - start..range.end - start].to_vec()));
        self.write_state(moment, param, owned, part)
    }

    /// Sets a gradient that has been reduced. Returns false if there is none. Collective for experts that are divided
    /// among ranks.
    pub fn set_gradient(&self, param: ParamId, values: &[f32]) -> Result<bool> {
        let is_set = self.set_own_gradient(param, &values[self.owned_range(param)])?;
        self.exists_on_holders(param, is_set)
    }

    /// Returns on all ranks whether something `exists` on the ranks that hold a parameter. Collective for experts that
    /// are divided among ranks, because a rank cannot see what exists on the holders of another rank's experts.
    fn exists_on_holders(&self, param: ParamId, exists: bool) -> Result<bool> {
        if self.params[param].expert.is_none() {
            return Ok(exists);
        }
        let flags = self.comm.gather_f64(vec![f64::from(u8::from(exists && self.holds(param)))]).wait()?;
        Ok(flags.iter().any(|flag| flag[0] != 0.0))
    }

    /// Sets this rank's part of a gradient that has been reduced. Returns false if this rank holds the parameter, but
    /// there is no such gradient.
    pub fn set_own_gradient(&self, param: ParamId, values: &[f32]) -> Result<bool> {
        if !self.holds(param) {
            return Ok(true);
        }
        let (group, slot) = self.slot_of(param);
        let group = &mut lock(&self.groups)[group];
        let Some(mut grads) = group.take_grads(slot, self)? else { return Ok(false) };
        grads.buffer_mut().write(0..values.len(), FlatRef::F32(values))?;
        group.put_grads(slot, grads, self);
        Ok(true)
    }

    /// Collective: assembles the complete values of a parameter from the parts of all ranks.
    pub fn assemble_full(&self, param: ParamId, part: Vec<f32>) -> Result<Vec<f32>> {
        Ok(f32_values(self.gather_whole(param, Flat::F32(part))?))
    }

    /// Collective: returns the values of a parameter that one rank passes. The other ranks pass `None`.
    pub fn broadcast_full(&self, param: ParamId, values: Option<Vec<f32>>) -> Result<Vec<f32>> {
        // A negative zero added to any number gives that number, including a zero with its sign.
        let values = values.unwrap_or_else(|| vec![-0.0; self.params[param].numel]);
        Ok(f32_values(self.comm.all_reduce(Flat::F32(values), self.tag(&[param])).wait()?))
    }

    /// Collective if parameters are sharded: gathers the parameters that are not yet in memory, calls `run`, and
    /// releases them again. The inner error is that of `run` or of the search for writes to parameters; after it, ranks
    /// are still in step.
    pub fn with_gathered<T>(
        &self,
        params: &[ParamId],
        run: impl FnOnce() -> candle_core::Result<T>,
    ) -> Result<Result<T>> {
        let run = || {
            self.look_for_writes()?;
            let result = run().map_err(|e| self.explain(e))?;
            self.look_for_writes().map(|()| result)
        };
        if !self.shards_params() {
            return Ok(run());
        }
        let gathered = lock(&self.gather).gather_params(self, params)?;
        let result = run();
        lock(&self.gather).release_params(self, &gathered)?;
        Ok(result)
    }

    /// Releases all gathered parameters, including the persistent ones, until they are needed.
    pub fn empty_cache(&self) -> Result<()> {
        if self.shards_params() {
            lock(&self.gather).release_everything(self)?;
        }
        #[cfg(feature = "cuda")]
        self.model_location.gpu().map_or(Ok(()), memory_pool::trim)?;
        Ok(())
    }
}

/// Returns the values of a buffer that is f32.
pub(super) fn f32_values(values: Flat) -> Vec<f32> {
    let Flat::F32(values) = values else { unreachable!("these collectives carry f32") };
    values
}
