//! The outer step of local steps: the change in an island's weights since the last exchange, and the step on the mean
//! change of all islands (DiLoCo, arXiv 2311.08105).
//!
//! ```text
//!   begin     outer weights = weights                                          the same on all islands
//!   change    outer weights - weights of this rank's pieces                     the pseudo-gradient
//!   mean      of all islands, weighted by their samples                         `engine/islands.rs`
//!   update    SGD on the outer weights; weights = alpha weights + (1 - alpha) outer weights -> publish
//! ```
//!
//! The outer states are shards like those of the optimizer: each rank exchanges its pieces with the ranks that have the
//! same pieces on other islands.

use super::weight_publisher::WeightPublisher;
use crate::comm::WireFormat;
use crate::config::IslandWireDtype;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedgerEntry};
use crate::optim::{Optimizer, StepContext};
use crate::param::{Param, ParamId};
use crate::precision::{Flat, FlatMut, FlatRef, IntFormat};
use crate::tensor::residency;
use crate::zero::rank_core::RankCore;
use crate::zero::share::share_plan::{OUTER_CHANGE, OUTER_MOMENTUM, OUTER_WEIGHTS};
use crate::zero::share::state_access::{ParamStateKind, pieces};
use candle_core::DType;
use std::hash::Hasher;
use std::ops::Range;
use twox_hash::XxHash3_64;

/// Returns the dtype of the buffer in which islands send their changes, and its encoding.
pub(crate) fn encoding(wire: IslandWireDtype) -> (DType, WireFormat) {
    match wire {
        IslandWireDtype::F32 => (DType::F32, WireFormat::Exact),
        IslandWireDtype::Bf16 => (DType::BF16, WireFormat::Exact),
        IslandWireDtype::Int8 => (DType::F32, WireFormat::Blocks(IntFormat::Int8)),
        IslandWireDtype::Int4 => (DType::F32, WireFormat::Blocks(IntFormat::Int4)),
    }
}

/// The mean change of all islands.
pub(crate) enum MeanChange {
    /// The change of this rank's pieces, as it was received.
    Received(Vec<f32>),
    /// The change is among this rank's states, for all elements that the rank owns.
    Stored,
}

impl RankCore {
    /// Returns the trained parameters, in order of registration.
    pub fn trained_params(&self) -> impl Iterator<Item = (ParamId, &Param)> {
        self.params.iter().enumerate().filter(|(_, param)| param.is_trained())
    }

    /// Begins local steps: the outer weights become those of the model, and the momentum zero.
    pub fn begin_local_steps(&self) -> Result<()> {
        self.for_each_owned_part(|param, part| {
            let weights = self.state_values(ParamStateKind::Weights, param, part.clone())?;
            self.set_values(self.outer(OUTER_WEIGHTS), param, part, weights)
        })?;
        self.clear_outer_momentum()
    }

    /// Sets the momentum of the outer optimizer, if it has one, to zero.
    pub fn clear_outer_momentum(&self) -> Result<()> {
        if !self.has_outer(OUTER_MOMENTUM) {
            return Ok(());
        }
        self.for_each_owned_part(|param, part| {
            let zeros = Flat::zeros(DType::F32, part.len());
            self.write_state(self.outer(OUTER_MOMENTUM), param, part, |_| Ok(zeros.clone()))
        })
    }

    /// Collective among the ranks of an island: sets the weights of `params` to their outer weights.
    pub fn take_outer_weights(&self, params: &[ParamId]) -> Result<()> {
        let mut publisher = WeightPublisher::new(self.zero.allgather_bucket_size);
        for param in params {
            for part in pieces(&self.owned_range(*param)) {
                let weights = self.state_values(self.outer(OUTER_WEIGHTS), *param, part.clone())?;
                self.set_values(ParamStateKind::Weights, *param, part, weights)?;
            }
            publisher.push(self, *param)?;
        }
        publisher.finish(self)
    }

    /// Calls `work` with every part of the trained parameters that this rank owns, in pieces that begin at offsets at
    /// which file access may begin.
    fn for_each_owned_part(&self, mut work: impl FnMut(ParamId, Range<usize>) -> Result<()>) -> Result<()> {
        self.trained_params()
            .try_for_each(|(param, _)| pieces(&self.owned_range(param)).try_for_each(|part| work(param, part)))
    }

    /// Returns the outer optimizer's state that is called `name`.
    pub fn outer(&self, name: &str) -> ParamStateKind {
        let at = self.share_plan.outer_states.iter().position(|state| *state == name);
        ParamStateKind::Outer(at.expect("a state that local steps need"))
    }

    fn has_outer(&self, name: &str) -> bool {
        self.share_plan.outer_states.contains(&name)
    }

    /// Returns the ledger entry for an exchange with a buffer of `bytes` bytes.
    pub fn hold_exchange(&self, bytes: usize) -> MemoryLedgerEntry {
        self.ledger.hold(MemoryKind::Buckets, bytes)
    }

    /// Returns the difference between the outer weights and the weights of this rank's pieces of `params`, times
    /// `weight`, in a buffer with room for `capacity` elements.
    pub fn change_since_exchange(&self, params: &[ParamId], weight: f32, capacity: usize) -> Result<Vec<f32>> {
        let mut change = Vec::with_capacity(capacity);
        for param in params {
            let (owned, piece) = (self.owned_range(*param), self.piece_of(*param, self.comm.rank()));
            for part in pieces(&owned) {
                let overlap = part.start.max(piece.start)..part.end.min(piece.end);
                if overlap.is_empty() {
                    continue;
                }
                let outer = self.state_values(self.outer(OUTER_WEIGHTS), *param, part.clone())?;
                let weights = self.state_values(ParamStateKind::Weights, *param, part.clone())?;
                let range = overlap.start - part.start..overlap.end - part.start;
                let pairs = outer[range.clone()].iter().zip(&weights[range]);
                change.extend(pairs.map(|(outer, current)| (outer - current) * weight));
            }
        }
        Ok(change)
    }

    /// Returns a hash of the outer weights of this rank's pieces of `params`. Outer weights are equal on all islands.
    pub fn outer_weights_hash(&self, params: &[ParamId]) -> Result<u64> {
        let mut hash = XxHash3_64::new();
        for param in params {
            let (owned, piece) = (self.owned_range(*param), self.piece_of(*param, self.comm.rank()));
            for part in pieces(&owned) {
                let overlap = part.start.max(piece.start)..part.end.min(piece.end);
                if !overlap.is_empty() {
                    let outer = self.state_values(self.outer(OUTER_WEIGHTS), *param, part.clone())?;
                    for value in &outer[overlap.start - part.start..overlap.end - part.start] {
                        hash.write(&value.to_le_bytes());
                    }
                }
            }
        }
        Ok(hash.finish())
    }

    /// Collective among the ranks of an island: takes the outer step on the mean change of `params`, and sets the
    /// weights to `alpha` times the weights plus `1 - alpha` times the new outer weights.
    pub fn outer_step(&self, params: &[ParamId], change: MeanChange, outer: &dyn Optimizer, alpha: f32) -> Result<()> {
        let mut changes = match change {
            MeanChange::Received(change) => Some(self.changes_of_pieces(params, change)?),
            MeanChange::Stored => None,
        };
        let mut publisher = WeightPublisher::new(self.zero.allgather_bucket_size);
        for param in params {
            for part in pieces(&self.owned_range(*param)) {
                let change = match &changes {
                    Some(changes) => changes.for_part(self, *param, &part),
                    None => self.state_values(self.outer(OUTER_CHANGE), *param, part.clone())?,
                };
                self.outer_step_of(*param, part, &change, outer, alpha)?;
            }
            changes.iter_mut().for_each(|changes| changes.advance(self, *param));
            publisher.push(self, *param)?;
        }
        publisher.finish(self)
    }

    /// Collective among the ranks of an island: keeps the mean change of `params`, as it was received, among the
    /// states.
    pub fn store_change(&self, params: &[ParamId], change: Vec<f32>) -> Result<()> {
        let mut changes = self.changes_of_pieces(params, change)?;
        for param in params {
            for part in pieces(&self.owned_range(*param)) {
                let values = changes.for_part(self, *param, &part);
                self.set_values(self.outer(OUTER_CHANGE), *param, part, values)?;
            }
            changes.advance(self, *param);
        }
        Ok(())
    }

    /// Takes the outer step of a part of a parameter.
    fn outer_step_of(
        &self,
        param: ParamId,
        part: Range<usize>,
        change: &[f32],
        optimizer: &dyn Optimizer,
        alpha: f32,
    ) -> Result<()> {
        let mut outer = self.state_values(self.outer(OUTER_WEIGHTS), param, part.clone())?;
        let mut momentum = match self.has_outer(OUTER_MOMENTUM) {
            true => Some(self.state_values(self.outer(OUTER_MOMENTUM), param, part.clone())?),
            false => None,
        };
        let mut state: Vec<&mut [f32]> = momentum.iter_mut().map(Vec::as_mut_slice).collect();
        // The momentum begins with zeros, so the first step needs no special rule.
        let ctx = StepContext::new(optimizer.lr(), 2);
        optimizer.update(&ctx, &mut outer, FlatRef::F32(change), &mut state, None);
        let mut weights = outer.clone();
        if alpha > 0.0 {
            let current = self.state_values(ParamStateKind::Weights, param, part.clone())?;
            weights.iter_mut().zip(current).for_each(|(new, current)| *new = alpha * current + (1.0 - alpha) * *new);
        }
        self.set_values(ParamStateKind::Weights, param, part.clone(), weights)?;
        if let Some(momentum) = momentum {
            self.set_values(self.outer(OUTER_MOMENTUM), param, part.clone(), momentum)?;
        }
        self.set_values(self.outer(OUTER_WEIGHTS), param, part, outer)
    }

    /// Sets elements `range` of a parameter's state, which this rank owns. If the state is the weights and this rank
    /// holds the full tensor, also sets the same elements of the tensor.
    fn set_values(&self, state: ParamStateKind, param: ParamId, range: Range<usize>, values: Vec<f32>) -> Result<()> {
        if state == ParamStateKind::Weights && !self.shards(param) {
            residency::with_values(&self.params[param].tensor, |weights| {
                weights.slice_mut(range.clone()).copy_cast(FlatRef::F32(&values));
            })?;
        }
        let values = Flat::from(values);
        self.write_state(state, param, range, |_| Ok(values.clone()))
    }

    /// Returns elements `range` of a parameter's state, in f32. The range must be one of the [`pieces`] of the
    /// owned elements.
    fn state_values(&self, state: ParamStateKind, param: ParamId, range: Range<usize>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; range.len()];
        self.read_state(state, param, range, |read| FlatMut::F32(&mut values).copy_cast(read))?;
        Ok(values)
    }

    /// Returns the elements of a parameter for which a rank is responsible.
    fn piece_of(&self, param: ParamId, rank: usize) -> Range<usize> {
        let mesh = self.share_plan.mesh;
        mesh.piece(self.params[param].cut(), mesh.piece_of(rank))
    }

    /// Returns the number of elements of `params` for which a rank is responsible.
    pub fn pieces_len(&self, params: &[ParamId], rank: usize) -> usize {
        params.iter().map(|param| self.piece_of(*param, rank).len()).sum()
    }

    /// Collective among the ranks of an island if several of them hold the same elements: returns the changes of all
    /// pieces that this rank holds, given the changes of this rank's pieces.
    fn changes_of_pieces(&self, params: &[ParamId], mut change: Vec<f32>) -> Result<PieceChanges> {
        let mesh = self.share_plan.mesh;
        if self.placement.optim.is_sharded() && mesh.copies() == 1 {
            let rank = self.comm.rank();
            let stride = change.len();
            return Ok(PieceChanges { stride, all: Flat::from(change), next: vec![(rank, 0)], _held: None });
        }
        let ranks = 0..self.comm.size();
        let stride = ranks.clone().map(|rank| self.pieces_len(params, rank)).max().unwrap_or(0);
        change.resize(stride, 0.0);
        let _held = Some(self.hold_exchange(stride * ranks.len() * DType::F32.size_in_bytes()));
        let all = self.comm.all_gather(Flat::from(change), self.tag(params)).wait()?;
        Ok(PieceChanges { stride, all, next: ranks.map(|rank| (rank, 0)).collect(), _held })
    }
}

/// The changes of the pieces of some ranks, one rank after the other, each in the order of the parameters.
struct PieceChanges {
    /// The number of elements from the beginning of one rank's pieces to the beginning of the next rank's.
    stride: usize,
    all: Flat,
    /// The ranks, and the number of elements of each that have been taken.
    next: Vec<(usize, usize)>,
    /// The ledger's entry, unless the changes are only this rank's, for which the caller holds an entry.
    _held: Option<MemoryLedgerEntry>,
}

impl PieceChanges {
    /// Returns the changes of elements `part` of the next parameter.
    fn for_part(&self, core: &RankCore, param: ParamId, part: &Range<usize>) -> Vec<f32> {
        let mut changes = vec![0.0; part.len()];
        for (index, (rank, taken)) in self.next.iter().enumerate() {
            let piece = core.piece_of(param, *rank);
            let overlap = piece.start.max(part.start)..piece.end.min(part.end);
            if overlap.is_empty() {
                continue;
            }
            let first = index * self.stride + *taken;
            let values = self.all.slice(first + overlap.start - piece.start..first + overlap.end - piece.start);
            FlatMut::F32(&mut changes[overlap.start - part.start..overlap.end - part.start]).copy_cast(values);
        }
        changes
    }

    /// Continues with the parameter after `param`.
    fn advance(&mut self, core: &RankCore, param: ParamId) {
        self.next.iter_mut().for_each(|(rank, taken)| *taken += core.piece_of(param, *rank).len());
    }
}
