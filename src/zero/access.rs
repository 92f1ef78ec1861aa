//! One parameter's values, gradient and optimizer states, whole or this rank's part, read and set by the user.

use super::core::Core;
use super::share::{State, pieces};
use crate::error::Result;
use crate::param::ParamId;
use crate::precision::Flat;
use crate::util::lock;
use candle_core::DType;
use std::ops::Range;

impl Core {
    /// This rank's part of a state, in f32.
    pub fn own_state(&self, state: State, param: ParamId) -> Result<Flat> {
        let owned = self.owned(param);
        let mut own = Flat::with_capacity(DType::F32, owned.len());
        for piece in pieces(&owned) {
            self.read_state(state, param, piece, |values| own.extend_cast(values))?;
        }
        Ok(own)
    }

    /// This rank's part of a gradient as it was accumulated, in f32; nothing where none has been reduced.
    pub fn own_gradient(&self, param: ParamId) -> Result<Option<Flat>> {
        let (group, slot) = self.place_of(param);
        let group = &mut lock(&self.groups)[group];
        let Some(grads) = group.take_grads(slot, self)? else { return Ok(None) };
        let mut own = Flat::with_capacity(DType::F32, 0);
        own.extend_cast(grads.slice(0..group.slots[slot].owned.len()));
        group.put_grads(slot, grads, self);
        Ok(Some(own))
    }

    /// Collective: a whole optimizer state, in f32.
    pub fn whole_state(&self, state: State, param: ParamId) -> Result<Flat> {
        self.gather_whole(param, self.own_state(state, param)?)
    }

    /// Collective: a whole gradient, in f32.
    pub fn whole_gradient(&self, param: ParamId) -> Result<Option<Flat>> {
        self.own_gradient(param)?.map(|own| self.gather_whole(param, own)).transpose()
    }

    /// Sets a state on every rank that has a part of it; weights also where they are whole or in 16 bits.
    pub fn set_state(&self, state: State, param: ParamId, whole: &[f32]) -> Result<()> {
        let part = |range: Range<usize>| Ok(Flat::F32(whole[range].to_vec()));
        self.write_state(state, param, self.owned(param), part)?;
        if state == State::Weights {
            self.write_whole(param, part)?;
        }
        Ok(())
    }

    /// Sets a gradient that has been reduced; false where there is none.
    pub fn set_gradient(&self, param: ParamId, whole: &[f32]) -> Result<bool> {
        let (group, slot) = self.place_of(param);
        let group = &mut lock(&self.groups)[group];
        let Some(mut grads) = group.take_grads(slot, self)? else { return Ok(false) };
        let owned = group.slots[slot].owned.clone();
        grads.slice_mut(0..owned.len()).copy_cast(Flat::F32(whole[owned].to_vec()).as_ref());
        group.put_grads(slot, grads, self);
        Ok(true)
    }

    /// Collective where parameters are sharded: runs `run` while parameters are whole that are not so already. The inner
    /// error is that of `run`, after which ranks are still in step.
    pub fn with_gathered<T>(
        &self,
        params: &[ParamId],
        run: impl FnOnce() -> candle_core::Result<T>,
    ) -> Result<Result<T>> {
        let run = || run().map_err(|e| self.explain(e));
        if !self.shards_params() {
            return Ok(run());
        }
        let gathered = lock(&self.gather).gather_params(self, params)?;
        let result = run();
        lock(&self.gather).release_params(self, &gathered)?;
        Ok(result)
    }

    /// Releases all gathered parameters, also the persistent ones, until they are needed.
    pub fn empty_cache(&self) -> Result<()> {
        if self.shards_params() { lock(&self.gather).release_everything(self) } else { Ok(()) }
    }
}
