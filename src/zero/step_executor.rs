//! The interface through which the decisions of a training step act on a rank.
//!
//! Decisions are written once, for any [`StepExecutor`]. They are carried out by the engine's core, or by the rehearsal
//! of an estimate, which has sizes in place of values and counts transferred bytes. The work that either does with
//! values of gradients and states is defined next to the decisions, as the traits `GradientBackend` (in
//! `reduce/gradient_reducer.rs`) and `StepBackend` (in `step/state_sweep.rs`).

use super::share::share_storage::{BufferLocationOf, ShareStorage};
use super::share::sub_group::SubGroup;
use super::step::pipeline_vote::PipelineVote;
use super::transfer::device_copy::CopyPayloadKind;
use super::transfer::pending_collective::CollectiveOp;
use crate::comm::WireFormat;
use crate::config::ZeroConfig;
use crate::error::Result;
use crate::layout::{Placement, ShardMesh};
use crate::memory::{MemoryKind, MemoryLedgerEntry, MemoryReport, MemoryTier, ModelBytes, StateBytes};
use crate::offload::WindowSettings;
use crate::param::{Param, ParamId};
use crate::precision::{ElementBuffer, WeightPacking};
use candle_core::DType;
use std::ops::Range;
use std::sync::MutexGuard;

/// The constants of a rank while it trains.
pub(crate) struct RankInfo<'a> {
    pub rank: usize,
    pub mesh: ShardMesh,
    /// The number of ranks in a group that keeps a second copy of gathered parameters; 1 if no group keeps one.
    pub second_group: usize,
    pub params: &'a [Param],
    pub zero: &'a ZeroConfig,
    /// The model's dtype.
    pub dtype: DType,
    /// The memory tier of whole parameters.
    pub tier: MemoryTier,
}

/// A rank that trains, or a rehearsal of such a rank.
pub(crate) trait StepExecutor: ShareStorage {
    /// A pending collective.
    type Pending;
    /// A pending copy of a buffer between the host and the GPU on which the model computes.
    type PendingCopy;

    fn info(&self) -> RankInfo<'_>;
    /// Returns whether the model is only being evaluated.
    fn is_evaluating(&self) -> bool;
    /// Returns this rank's share.
    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup<Self>>>;
    /// Returns the sub-group and slot of a parameter.
    fn slot_of(&self, param: ParamId) -> (usize, usize);
    /// Returns how a sweep divides files into windows.
    fn windows(&self) -> WindowSettings;
    /// Begins a collective on data of `params` among the ranks that hold them.
    fn launch(
        &self,
        collective: CollectiveOp,
        wire: WireFormat,
        buffer: Self::Buffer,
        params: &[ParamId],
    ) -> Result<Self::Pending>;
    /// Waits for a collective's result, which is in the memory of its argument.
    fn wait(&self, pending: Self::Pending) -> Result<Self::Buffer>;
    /// Begins to move a buffer to the host or a GPU, unless it is already there. On a GPU, the buffer gets room for
    /// `capacity` elements.
    fn send(
        &self,
        kind: CopyPayloadKind,
        buffer: Self::Buffer,
        to: &BufferLocationOf<Self>,
        capacity: usize,
    ) -> Result<Self::PendingCopy>;
    /// Waits until a buffer has arrived.
    fn wait_for_copy(&self, copy: Self::PendingCopy) -> Result<Self::Buffer>;
    /// Gathers a few numbers from every rank, in rank order.
    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>>;
    /// Returns the vote of all pipeline stages together; without a pipeline, this rank's `vote`.
    fn vote_of_all_stages(&self, vote: PipelineVote) -> Result<PipelineVote>;
    /// Appends elements `range` of a whole parameter to a buffer.
    fn copy(&self, param: &Param, range: Range<usize>, to: &mut Self::Buffer) -> Result<()>;
    /// Puts a whole parameter into its tensor.
    fn put(&self, param: &Param, values: Self::Buffer) -> Result<()>;

    fn rank(&self) -> usize {
        self.info().rank
    }

    fn mesh(&self) -> ShardMesh {
        self.info().mesh
    }

    /// Returns the total number of ranks, over which means and sums are computed.
    fn world_size(&self) -> usize {
        self.mesh().world_size()
    }

    /// Returns the mesh of the ranks that hold `params`, which are all on the same ranks: the mesh of all ranks, or of
    /// those that hold an expert.
    fn mesh_of(&self, params: &[ParamId]) -> ShardMesh {
        params.first().map_or(self.mesh(), |param| self.mesh().of(self.params()[*param].cut()))
    }

    /// Returns this rank's number among the ranks that hold `params`.
    fn rank_among(&self, params: &[ParamId]) -> usize {
        params.first().map_or(self.rank(), |param| self.mesh().number_of(self.params()[*param].cut(), self.rank()))
    }

    /// Returns whether this rank holds a part of a parameter, even an empty one: false for experts on other ranks.
    fn holds(&self, param: ParamId) -> bool {
        self.params()[param].cut().is_on(self.rank())
    }

    /// Begins to gather the shards of all positions of the mesh.
    fn gather(&self, wire: WireFormat, shard: Self::Buffer, params: &[ParamId]) -> Result<Self::Pending> {
        let collective = match self.mesh_of(params) {
            mesh if mesh.copies() == 1 => CollectiveOp::AllGather,
            mesh => CollectiveOp::GatherWithin(mesh.shards()),
        };
        self.launch(collective, wire, shard, params)
    }

    /// Begins to sum all pieces of all ranks. Each rank receives the sums of its shard.
    fn reduce(&self, wire: WireFormat, pieces: Self::Buffer, params: &[ParamId]) -> Result<Self::Pending> {
        let collective = match self.mesh_of(params) {
            mesh if mesh.copies() == 1 => CollectiveOp::ReduceScatter,
            mesh => CollectiveOp::ReduceToGroups(mesh.shards()),
        };
        self.launch(collective, wire, pieces, params)
    }

    fn second_group(&self) -> usize {
        self.info().second_group
    }

    fn params(&self) -> &[Param] {
        self.info().params
    }

    fn zero(&self) -> &ZeroConfig {
        self.info().zero
    }

    fn placement(&self) -> Placement {
        self.zero().stage.placement()
    }

    fn dtype(&self) -> DType {
        self.info().dtype
    }

    fn tier(&self) -> MemoryTier {
        self.info().tier
    }

    /// Enters a buffer in the ledger. The entry lasts until the result is dropped.
    fn hold(&self, kind: MemoryKind, buffer: &Self::Buffer) -> MemoryLedgerEntry {
        self.ledger().hold_in(MemoryTier::at::<Self::Buffer>(&buffer.location()), kind, buffer.capacity_in_bytes())
    }

    /// Returns a readable name for parameters that share a collective.
    fn names(&self, params: &[ParamId]) -> String {
        match params {
            [] => String::new(),
            [param] => self.params()[*param].name.clone(),
            [first, rest @ ..] => format!("{} + {}", self.params()[*first].name, rest.len()),
        }
    }

    /// Returns the ledger's counts, together with those that the ZeRO formula gives, for gradients that are
    /// accumulated in `accumulate`.
    fn ledger_report(&self, accumulate: DType) -> MemoryReport {
        let RankInfo { mesh, params, zero, dtype, .. } = self.info();
        let mut bytes = ModelBytes::default();
        for group in self.groups().iter() {
            let state_bytes = |shard: usize, bytes_of: &dyn Fn(usize) -> usize| {
                let total = |experts: bool| {
                    let slots = group.slots.iter().map(|slot| slot.param).filter(|param| self.holds(*param));
                    let slots = slots.map(|param| &params[param]).filter(|param| param.expert.is_some() == experts);
                    slots.map(|param| bytes_of(param.numel)).sum()
                };
                StateBytes { full: total(false), experts: total(true), shard }
            };
            let elements_of = |size: usize| state_bytes(group.len * size, &|numel| numel * size);
            let add = |sum: &mut StateBytes, term: StateBytes| {
                let (full, experts) = (sum.full + term.full, sum.experts + term.experts);
                *sum = StateBytes { full, experts, shard: sum.shard + term.shard };
            };
            let packed =
                |packing: WeightPacking| state_bytes(group.len * size_of::<f32>(), &|numel| packing.packed_len(numel));
            let plain = || elements_of(group.class.weights.dtype(dtype).size_in_bytes());
            let weights = group.packed().map_or_else(plain, |(packing, _)| packed(packing));
            add(&mut bytes.params, weights);
            if group.class.is_trained() {
                add(&mut bytes.grads, elements_of(accumulate.size_in_bytes()));
                add(&mut bytes.master, elements_of(if group.master.is_some() { 4 } else { 0 }));
                for _ in &group.outer {
                    add(&mut bytes.outer, elements_of(DType::F32.size_in_bytes()));
                }
                bytes.factored +=
                    group.factored.iter().map(|states| states.buffer().len() * size_of::<f32>()).sum::<usize>();
                for format in group.moments.iter().map(|moment| moment.format) {
                    let shard = format.bytes(group.len);
                    let moment = match zero.stage.placement().optim.is_sharded() {
                        true => state_bytes(shard, &|numel| format.bytes(numel)),
                        // A partly filled block takes up the space of a full one.
                        false => StateBytes { full: shard, experts: 0, shard },
                    };
                    add(&mut bytes.moments, moment);
                }
            }
        }
        let elements = |frozen: bool| params.iter().filter(|p| !frozen || !p.is_trained()).map(|p| p.numel).sum();
        let expert_ranks = params.iter().find_map(|param| param.expert).map_or(1, |expert| expert.size);
        let holders = mesh.world_size() / expert_ranks;
        MemoryReport::new(self.ledger(), zero.stage, (mesh, holders), (elements(false), elements(true)), bytes)
    }
}
