//! Reads and writes this rank's share of the model's state by parameter, in any storage.

use super::packed_weight_shards;
use super::state_storage::StateStorage;
use super::sub_group::{SubGroup, SubGroupPosition};
use crate::error::Result;
use crate::offload::{FileIo, OffloadStore, STEP};
use crate::optim::GroupedOptimizer;
use crate::param::Param;
use crate::precision::{Flat, FlatRef, WeightPacking};
use crate::tensor::host_slice::with_host_slice;
use crate::tensor::residency;
use crate::util::lock;
use crate::zero::rank_core::RankCore;
use candle_core::DType;
use std::ops::Range;

/// The name of the state that every parameter has: its weights at full precision.
pub(crate) const WEIGHTS: &str = "fp32";

/// The number of elements that are transferred at a time: a multiple of [`STEP`].
pub(crate) const PIECE: usize = 512 * STEP;

/// A kind of state: the parameters at full precision, or an optimizer state by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParamStateKind {
    /// The master weights, or the parameters themselves if they are f32.
    Weights,
    /// An optimizer state of the parameter.
    Moment(usize),
    /// A factored state of the parameter, by index, which has its own length.
    Factored(usize),
    /// A state of the outer optimizer, by index.
    Outer(usize),
}

impl ParamStateKind {
    /// Returns the state that checkpoints call `name`, for a parameter with these states of the optimizer and of the
    /// outer optimizer.
    pub fn named(name: &str, states: OptimStateNames) -> Option<Self> {
        let index_in = |names: &[&str]| names.iter().position(|state| *state == name);
        if name == WEIGHTS {
            return Some(Self::Weights);
        }
        let moment = index_in(states.moments).map(Self::Moment);
        let factored = || index_in(states.factored).map(Self::Factored);
        moment.or_else(factored).or_else(|| index_in(states.outer).map(Self::Outer))
    }

    /// Returns the storage of a sub-group's state; `None` if the state is in the parameters' tensors, or factored.
    pub(in crate::zero) fn storage<'a>(
        &self,
        group: &'a mut SubGroup<RankCore>,
    ) -> Option<&'a mut StateStorage<RankCore>> {
        match self {
            Self::Weights => group.master.as_mut().or(group.weights.as_mut()),
            Self::Moment(i) => group.moments.get_mut(*i).map(|moment| &mut moment.storage),
            Self::Factored(_) => None,
            Self::Outer(i) => group.outer.get_mut(*i),
        }
    }
}

/// The names of a parameter's states besides its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OptimStateNames {
    /// The states of the optimizer.
    pub moments: &'static [&'static str],
    /// The factored states of the optimizer.
    pub factored: &'static [&'static str],
    /// The states of the outer optimizer, if ranks take local steps.
    pub outer: &'static [&'static str],
}

impl OptimStateNames {
    pub fn iter(self) -> impl Iterator<Item = &'static str> {
        self.moments.iter().chain(self.factored).chain(self.outer).copied()
    }
}

impl RankCore {
    /// Returns the names of a parameter's optimizer states.
    pub fn moments(&self, param: &Param, trainer: &GroupedOptimizer) -> &'static [&'static str] {
        if param.is_trained() { trainer.state_names(param.group) } else { &[] }
    }

    /// Returns the names of a parameter's states besides its weights.
    pub fn state_names(&self, param: &Param, trainer: &GroupedOptimizer) -> OptimStateNames {
        let outer = if param.is_trained() { self.share_plan.outer_states } else { &[] };
        OptimStateNames { moments: self.moments(param, trainer), factored: self.factored_names(param, trainer), outer }
    }

    /// Returns the names of a parameter's factored states.
    pub fn factored_names(&self, param: &Param, trainer: &GroupedOptimizer) -> &'static [&'static str] {
        if param.is_trained() { trainer.factored_names(param.group) } else { &[] }
    }

    /// Returns the elements of a state of parameter `param` that this rank holds. It holds all of a factored state.
    pub fn held_range(&self, state: ParamStateKind, param: usize) -> Range<usize> {
        match state {
            ParamStateKind::Factored(number) => 0..self.factored_range(param, number).len(),
            _ => self.owned_range(param),
        }
    }

    /// Returns the position of a factored state among those of its parameter.
    pub(super) fn factored_range(&self, param: usize, number: usize) -> Range<usize> {
        let lens = self.factored_lens(&self.params[param]);
        let start = lens[..number].iter().sum();
        start..start + lens[number]
    }

    /// Returns the names of all states besides weights.
    pub fn all_state_names(&self, trainer: &GroupedOptimizer) -> Vec<&'static str> {
        let mut all = trainer.all_state_names();
        all.extend(self.share_plan.outer_states);
        all
    }

    /// Returns the elements of parameter `param` whose optimizer state this rank holds.
    pub fn owned_range(&self, param: usize) -> Range<usize> {
        let (group, slot) = self.slot_of(param);
        lock(&self.groups)[group].slots[slot].owned.clone()
    }

    /// Returns the lengths of the factored states that a parameter has while it is trained.
    pub fn factored_lens(&self, param: &Param) -> Vec<usize> {
        let factored = self.share_plan.grouping.factored(param.role);
        factored.map(|factored| factored.factored_lens(param.shape.dims())).unwrap_or_default()
    }

    /// Passes elements `range` of a parameter's state to `take`, which should only copy them, because state in memory
    /// is locked while `take` runs. The range must be part of the elements that this rank owns, and must begin where
    /// one of their [`pieces`] begins.
    pub fn read_state(
        &self,
        state: ParamStateKind,
        param: usize,
        range: Range<usize>,
        take: impl FnOnce(FlatRef<'_>),
    ) -> Result<()> {
        if range.is_empty() {
            // The tensor of an expert on other ranks is absent.
            take(FlatRef::F32(&[]));
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        let delayed = self.wait_for_update()?;
        let mut groups = lock(&self.groups);
        let (number, slot) = self.slot_of(param);
        let group = &mut groups[number];
        if let ParamStateKind::Factored(state) = state {
            let all = self.factored_range(param, state);
            return group.factored[slot].buffer().read(all.start + range.start..all.start + range.end, take);
        }
        if let Some((packing, storage)) = group.packed() {
            let (slot, words) = (&group.slots[slot], self.words(storage, &group.slots[slot])?);
            // These are the values that the model computes with, in complete units, from the unit in which the range
            // begins.
            let start = (range.start - slot.owned.start) / packing.unit() * packing.unit();
            let end = range.end - slot.owned.start;
            let mut values = Flat::zeros(self.dtype, end - start);
            packed_weight_shards::unpack(packing, words.as_ref(), start, values.as_mut());
            take(values.slice(values.len() - range.len()..values.len()));
            return Ok(());
        }
        let position = group.slots[slot].place(&range);
        if let ParamStateKind::Moment(i) = state
            && let Some(moment) = group.moments.get_mut(i).filter(|moment| moment.format.map().is_some())
        {
            return moment.read(position, self.io(), take);
        }
        #[cfg(feature = "cuda")]
        if state == ParamStateKind::Weights
            && group.master.is_none()
            && let Some(weights) = delayed.weights(number)
        {
            return weights.read(position, take);
        }
        match state.storage(group) {
            Some(StateStorage::Memory(share)) => share.buffer().read(position, take)?,
            Some(StateStorage::File(extent)) => {
                let values = Flat::zeros(extent.dtype(), range.len());
                let transfer = self.files().io.read(values, vec![extent.piece(position, 0)]);
                drop(groups);
                take(transfer.wait()?.as_ref());
            }
            None => with_host_slice(&self.params[param].tensor, range, take)?,
        }
        Ok(())
    }

    /// Sets elements `range` of a parameter's state. Setting weights also sets the 16-bit shards. The range must be
    /// part of the elements that this rank owns. `values` returns the values of a range of the parameter's elements.
    /// Does nothing if the state is stored in the parameter's tensor.
    pub fn write_state(
        &self,
        state: ParamStateKind,
        param: usize,
        range: Range<usize>,
        mut values: impl FnMut(Range<usize>) -> Result<Flat>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        drop(self.wait_for_update()?);
        let (group, slot) = self.slot_of(param);
        if let ParamStateKind::Factored(number) = state {
            let all = self.factored_range(param, number);
            let position = all.start + range.start..all.start + range.end;
            return lock(&self.groups)[group].factored[slot].buffer_mut().write(position, values(range)?.as_ref());
        }
        if state.storage(&mut lock(&self.groups)[group]).is_none() {
            // The state is in the parameter's tensor, so nothing has to be read for it.
            return Ok(());
        }
        if let Some(packing) = self.params[param].packing() {
            return self.write_packed(packing, (group, slot), range, values);
        }
        for part in pieces(&range) {
            let values = values(part.clone())?;
            let mut groups = lock(&self.groups);
            let group = &mut groups[group];
            let position = group.slots[slot].place(&part);
            let SubGroup { weights, master, moments, outer, .. } = group;
            match state {
                ParamStateKind::Weights => {
                    for storage in weights.iter_mut().chain(master) {
                        self.set(storage, position.clone(), values.as_ref())?;
                    }
                }
                ParamStateKind::Moment(i) => {
                    if let Some(moment) = moments.get_mut(i) {
                        moment.write(position, values.as_ref(), self.io())?;
                    }
                }
                ParamStateKind::Factored(_) => unreachable!("written above"),
                ParamStateKind::Outer(i) => {
                    if let Some(storage) = outer.get_mut(i) {
                        self.set(storage, position, values.as_ref())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Packs the elements `range`, which are all that this rank owns of a parameter. If the elements already have these
    /// values, nothing changes, because packing unpacked values again may give different codes.
    fn write_packed(
        &self,
        packing: WeightPacking,
        (group, slot): (usize, usize),
        range: Range<usize>,
        mut values: impl FnMut(Range<usize>) -> Result<Flat>,
    ) -> Result<()> {
        let mut new = Flat::with_capacity(DType::F32, range.len());
        for part in pieces(&range) {
            new.extend_cast(values(part)?.as_ref());
        }
        let mut groups = lock(&self.groups);
        let SubGroup { slots, weights, .. } = &mut groups[group];
        let (slot, Some(storage)) = (&slots[slot], weights) else { return Ok(()) };
        assert_eq!(slot.owned, range, "packed weights are set completely");
        let mut old = Flat::zeros(DType::F32, range.len());
        packed_weight_shards::unpack(packing, self.words(storage, slot)?.as_ref(), 0, old.as_mut());
        // Values are compared in the model's dtype: a checkpoint of a lower stage has the values that the model
        // computes with.
        let in_model_dtype = |values: &Flat| {
            let mut cast = Flat::with_capacity(self.dtype, values.len());
            cast.extend_cast(values.as_ref());
            cast
        };
        if in_model_dtype(&old) == in_model_dtype(&new) {
            return Ok(());
        }
        let mut words = Flat::zeros(DType::F32, slot.len);
        let bytes = packing.packed_len(new.len());
        packing.pack(new.as_ref(), &mut words.as_bytes_mut()[..bytes]);
        self.set(storage, slot.padded(), words.as_ref())
    }

    /// Returns the words of this rank's share of a parameter, if they are packed.
    pub(super) fn own_words(&self, param: usize) -> Result<Option<Flat>> {
        let (group, slot) = self.slot_of(param);
        let group = &lock(&self.groups)[group];
        group.packed().map(|(_, storage)| self.words(storage, &group.slots[slot])).transpose()
    }

    /// Returns the words of a packed share.
    fn words(&self, storage: &StateStorage<RankCore>, slot: &SubGroupPosition) -> Result<Flat> {
        match storage {
            StateStorage::Memory(share) => share.buffer().read(slot.padded(), |words| words.to_flat()),
            StateStorage::File(extent) => {
                self.files().io.read(Flat::zeros(DType::F32, slot.len), vec![extent.piece(slot.padded(), 0)]).wait()
            }
        }
    }

    /// Sets elements of a state's storage.
    pub(in crate::zero) fn set(
        &self,
        storage: &mut StateStorage<RankCore>,
        position: Range<usize>,
        values: FlatRef<'_>,
    ) -> Result<()> {
        match storage {
            StateStorage::Memory(share) => share.buffer_mut().write(position, values),
            StateStorage::File(extent) => {
                let mut copy = Flat::with_capacity(extent.dtype(), values.len());
                copy.extend_cast(values);
                self.files().io.write(copy, vec![extent.piece(position, 0)]).written()
            }
        }
    }

    /// Sets all elements of a parameter whose tensor always holds it in full. Does nothing for other parameters.
    pub fn write_all_elements(&self, param: usize, mut values: impl FnMut(Range<usize>) -> Result<Flat>) -> Result<()> {
        let Some(param) = self.params.get(param).filter(|_| self.keeps_all_elements(param)) else { return Ok(()) };
        if let Some(packing) = param.packing() {
            let mut new = Flat::with_capacity(self.dtype, param.numel);
            for part in pieces(&(0..param.numel)) {
                new.extend_cast(values(part)?.as_ref());
            }
            return Ok(residency::with_values(&param.tensor, |current| {
                if *current != new {
                    let mut wide = Flat::with_capacity(DType::F32, param.numel);
                    wide.extend_cast(new.as_ref());
                    *current = packed_weight_shards::rounded(packing, wide.as_ref(), self.dtype);
                }
            })?);
        }
        residency::with_values(&param.tensor, |current| {
            pieces(&(0..param.numel)).try_for_each(|part| {
                current.slice_mut(part.clone()).copy_cast(values(part)?.as_ref());
                Ok(())
            })
        })?
    }

    /// Returns the file access, if there are files.
    pub(in crate::zero) fn io(&self) -> Option<&FileIo> {
        self.offload.as_ref().map(|offload| &*offload.io)
    }

    fn files(&self) -> &OffloadStore {
        self.offload.as_deref().expect("there is an offload store if states are in files")
    }
}

/// Divides `range` into pieces of at most [`PIECE`] elements that begin at offsets at which file access can begin.
pub(crate) fn pieces(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start..end).step_by(PIECE).map(move |at| at..end.min(at + PIECE))
}
