//! Gradients: from the backward that makes them to this rank's share.
//!
//! ```text
//!   arrived -> [held until backward ends: stage 1] -> bucket -> reduce -> [leaves the GPU] -> becomes, or is added to, the share
//! ```
//!
//! A large gradient travels alone, in the buffer that its layer wrote: a parameter's pieces lie in it one after the other
//! already. Small ones are packed together. From stage 2 on a gradient is gone as soon as it is reduced, while backward
//! goes on. At stage 1 every rank holds its whole gradient until backward is over, as ZeRO defines it. At stage 0 the
//! whole sum is kept.
//!
//! A parameter that ranks may miss (`ignore_unused_parameters`, the experts of a leaf unit) waits until this rank's
//! backward is over: Candle gives no earlier point at which it is known that a gradient will not come. Then all of them
//! travel in one order, with zeros for what has not come, so that ranks which missed different ones still issue the
//! same collectives.
//!
//! With `zero_quantized_gradients` what a rank sends of its gradients is int4, in blocks that depend on the parameter
//! and the number of ranks alone; sums are formed in f32, as always, and at stage 0 travel exact. With
//! `compress_between_hosts_only` what is coded, or rounded to `communication_data_type`, is the sum of a host's ranks.
//!
//! Every stage reduces in every micro step, also where it could wait for the accumulation boundary: a sum over micro
//! steps of sums over ranks. Only so do all stages add the same numbers in the same order, and give the same bits.

use super::bucket_queue::{BucketQueue, IN_FLIGHT};
use crate::comm::{InterHostFormat, WireFormat};
use crate::config::{Config, GradientOp};
use crate::error::Result;
use crate::layout::Placement;
use crate::memory::{LedgerEntry, MemoryKind, MemoryTier, TrackedBuffer};
use crate::param::{Param, ParamId};
use crate::precision::{ElementBuffer, IntFormat};
use crate::timeline;
use crate::zero::gather::coalesced_layout::CoalescedLayout;
use crate::zero::rank_backend::RankBackend;
use crate::zero::share::sub_group::{GradientShare, SubGroupSlot};
use crate::zero::transfer::device_copy::CopyKind;
use crate::zero::transfer::pending_collective::CollectiveOp;
use candle_core::DType;
use std::collections::{BTreeMap, VecDeque};

/// How gradients are reduced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReducePlan {
    /// Each rank receives only its shards.
    pub scatter: bool,
    /// Whole gradients stay until backward is over.
    pub hold: bool,
    /// Buckets travel while backward runs.
    pub overlap: bool,
    /// Factor before the reduction.
    pub(super) before: f32,
    /// Factor after it.
    after: f32,
    /// The dtype to which gradients and their sums are rounded before they travel.
    pub dtype: DType,
    /// How the gradients then travel.
    pub wire: WireFormat,
    /// The dtype in which they are accumulated.
    pub accumulate: DType,
}

impl ReducePlan {
    /// `dtype` is the model's.
    pub fn new(config: &Config, placement: Placement, world_size: usize, dtype: DType) -> Self {
        let world = world_size as f64;
        let predivide = config.gradient_predivide_factor;
        let (before, after) = match config.gradient_allreduce_op {
            GradientOp::Sum => (1.0, 1.0),
            // A factor of 1 means: all of it at once. Before the reduction, so that 16-bit sums do not overflow.
            GradientOp::Mean if config.prescale_gradients || predivide == 1.0 => (1.0 / world, 1.0),
            GradientOp::Mean => (1.0 / predivide, predivide / world),
        };
        let (travels, wire) = travels(config, dtype);
        Self {
            scatter: placement.optim.is_sharded() && config.zero.reduce_scatter,
            hold: placement.optim.is_sharded() && !placement.grads.is_sharded(),
            overlap: config.zero.overlap_comm,
            before: before as f32,
            after: after as f32,
            dtype: travels,
            wire,
            accumulate: config.grad_accum_dtype.unwrap_or(dtype),
        }
    }
}

/// The dtype to which gradients of a model of `dtype` are rounded before they travel, and how they then travel.
fn travels(config: &Config, dtype: DType) -> (DType, WireFormat) {
    let chosen = config.communication_data_type;
    let int4 = config.zero.quantized_gradients;
    if !config.zero.compress_between_hosts_only {
        return (chosen.unwrap_or(dtype), if int4 { WireFormat::Blocks(IntFormat::Int4) } else { WireFormat::Exact });
    }
    let code = match chosen {
        _ if int4 => Some(InterHostFormat::Blocks(IntFormat::Int4)),
        Some(DType::BF16) => Some(InterHostFormat::Bf16),
        Some(DType::F16) => Some(InterHostFormat::F16),
        _ => None,
    };
    // Only more digits than the model's are something for the inside of a host.
    let inside = chosen.filter(|chosen| *chosen == DType::F32).unwrap_or(dtype);
    (inside, code.map_or(WireFormat::Exact, WireFormat::BetweenHosts))
}

/// The executor of the decisions of [`GradientReducer`]: the engine's core, or a rehearsal that only counts.
pub(crate) trait GradientBackend: RankBackend {
    /// A gradient as backward has made it.
    type Grad;
    /// Its bytes.
    fn bytes(grad: &Self::Grad) -> usize;
    /// Where they are.
    fn tier_of(grad: &Self::Grad) -> MemoryTier;
    /// A gradient of zeros.
    fn zeros(&self, param: &Param) -> Self::Grad;
    /// The sum of two gradients of one parameter.
    fn sum(a: Self::Grad, b: Self::Grad) -> Result<Self::Grad>;
    /// Packs gradients by a layout, piece by piece, as they will travel. Each is dropped when it has been copied.
    fn pack(
        &self,
        plan: &ReducePlan,
        layout: &CoalescedLayout,
        grads: Vec<ArrivedGradient<Self::Grad>>,
    ) -> Result<Self::Buffer>;
}

/// Gradients of the micro step under way.
pub(crate) struct GradientReducer<C: GradientBackend> {
    plan: ReducePlan,
    buckets: BucketQueue<ArrivedGradient<C::Grad>, PendingReduction<C>>,
    /// Sums on their way to the share, the oldest first.
    leaving: VecDeque<(CoalescedLayout, C::PendingCopy)>,
    held: Vec<ArrivedGradient<C::Grad>>,
    /// Parameters that ranks may miss; what has not come counts as zeros.
    optional: Vec<bool>,
    /// Those whose gradient has come, until backward ends.
    waiting: BTreeMap<ParamId, ArrivedGradient<C::Grad>>,
    /// Parameters whose gradient has come in the first accumulation; `None` once that has been judged.
    seen: Option<Vec<bool>>,
}

/// Whether a backward has to give this parameter a gradient. Nothing can be learned where there are no elements.
pub(super) fn is_expected(param: &Param) -> bool {
    param.is_trained() && param.numel > 0
}

/// A gradient that has arrived, and its entry in the ledger.
pub(crate) struct ArrivedGradient<G> {
    pub(super) param: ParamId,
    pub grad: G,
    pub held: LedgerEntry,
}

/// A bucket under way.
struct PendingReduction<C: GradientBackend> {
    layout: CoalescedLayout,
    pending: C::Pending,
    held: LedgerEntry,
}

impl<C: GradientBackend> GradientReducer<C> {
    /// `optional`, for each parameter: ranks may miss it.
    pub fn new(plan: ReducePlan, bucket_size: usize, optional: Vec<bool>) -> Self {
        let seen = Some(vec![false; optional.len()]);
        let (buckets, held, waiting) = (BucketQueue::new(bucket_size), Vec::new(), BTreeMap::new());
        Self { plan, buckets, leaving: VecDeque::new(), held, optional, waiting, seen }
    }

    /// A parameter's gradient is complete.
    pub fn arrive(&mut self, core: &C, param: ParamId, grad: C::Grad) -> Result<()> {
        if let Some(seen) = &mut self.seen {
            seen[param] = true;
        }
        if self.optional[param] && !is_expected(&core.params()[param]) {
            return Ok(());
        }
        let arrived = self.enter(core, param, grad);
        if self.optional[param] {
            return self.wait_for_others(arrived);
        }
        if self.plan.hold {
            self.held.push(arrived);
            return Ok(());
        }
        self.collect(core, arrived)
    }

    /// Backward is over: the rest travels, and everything under way is waited for.
    pub fn end_backward(&mut self, core: &C) -> Result<()> {
        for arrived in std::mem::take(&mut self.held) {
            self.collect(core, arrived)?;
        }
        for (param, about) in core.params().iter().enumerate().rev() {
            if self.optional[param] && is_expected(about) {
                let arrived = self.waiting.remove(&param);
                let arrived = arrived.unwrap_or_else(|| self.enter(core, param, core.zeros(about)));
                self.collect(core, arrived)?;
            }
        }
        if let Some(bucket) = self.buckets.rest() {
            self.reduce(core, bucket)?;
        }
        self.finish(core, 0)
    }

    /// Whether each parameter's gradient has come since the start; `None` if that was asked before.
    pub fn take_seen(&mut self) -> Option<Vec<bool>> {
        self.seen.take()
    }

    fn enter(&self, core: &C, param: ParamId, grad: C::Grad) -> ArrivedGradient<C::Grad> {
        let kind = if self.plan.hold { MemoryKind::Gradients } else { MemoryKind::Buckets };
        let held = core.ledger().hold_in(C::tier_of(&grad), kind, C::bytes(&grad));
        ArrivedGradient { param, grad, held }
    }

    /// A parameter that is used inside of a recomputing unit and outside has a gradient from each; ranks may differ in
    /// that too, so the sum travels.
    fn wait_for_others(&mut self, ArrivedGradient { param, grad, held }: ArrivedGradient<C::Grad>) -> Result<()> {
        let arrived = match self.waiting.remove(&param) {
            Some(first) => ArrivedGradient { grad: C::sum(first.grad, grad)?, ..first },
            None => ArrivedGradient { param, grad, held },
        };
        self.waiting.insert(param, arrived);
        Ok(())
    }

    fn collect(&mut self, core: &C, arrived: ArrivedGradient<C::Grad>) -> Result<()> {
        let numel = core.params()[arrived.param].numel;
        match self.buckets.push(arrived, numel) {
            Some(bucket) => self.reduce(core, bucket),
            None => Ok(()),
        }
    }

    /// Begins the reduction of a bucket, or of one large gradient.
    fn reduce(&mut self, core: &C, bucket: Vec<ArrivedGradient<C::Grad>>) -> Result<()> {
        let ReducePlan { scatter, wire, overlap, .. } = self.plan;
        let params = bucket.iter().map(|arrived| arrived.param).collect();
        let layout = CoalescedLayout::new(params, core.params(), core.mesh().pieces(), wire);
        let _span = timeline::span(timeline::EventCategory::Reduce, "pack").of(|| core.names(&layout.params));
        // On a GPU a bucket lies beside the gradients that it is packed from; on the host a large gradient becomes it.
        let packed = layout.chunk * core.world_size() * self.plan.dtype.size_in_bytes();
        let is_copied = C::Buffer::is_device(core.model_place());
        let packing = is_copied.then(|| core.ledger().hold_in(core.tier(), MemoryKind::Buckets, packed));
        let buffer = core.pack(&self.plan, &layout, bucket)?;
        drop(packing);
        let about = timeline::about(|| core.names(&layout.params));
        let held = core.hold(MemoryKind::Buckets, &buffer);
        let pending = match scatter {
            true => core.reduce(wire, buffer, &layout.params)?,
            false => core.launch(CollectiveOp::AllReduce, wire, buffer, &layout.params)?,
        };
        drop(about);
        self.buckets.launched(PendingReduction { layout, pending, held });
        self.finish(core, if overlap { IN_FLIGHT - 1 } else { 0 })
    }

    /// Waits for the oldest reductions until at most `left` are under way, and adds them to this rank's share. Where that lies
    /// elsewhere, at most `left` are on their way to it then.
    fn finish(&mut self, core: &C, left: usize) -> Result<()> {
        while let Some(PendingReduction { layout, pending, held }) = self.buckets.due(left) {
            let sum = core.wait(pending)?;
            drop(held);
            if C::Buffer::is_device(&sum.place()) == C::Buffer::is_device(core.share_place()) {
                self.accumulate(core, &layout, sum)?;
                continue;
            }
            let len = sum.len();
            self.leaving.push_back((layout, core.send(CopyKind::Gradients, sum, core.share_place(), len)?));
        }
        while self.leaving.len() > left {
            let Some((layout, sum)) = self.leaving.pop_front() else { break };
            self.accumulate(core, &layout, core.arrived(sum)?)?;
        }
        Ok(())
    }

    fn accumulate(
        &self,
        core: &C,
        CoalescedLayout { params, offsets, chunk, .. }: &CoalescedLayout,
        mut sum: C::Buffer,
    ) -> Result<()> {
        let _about = timeline::about(|| core.names(params));
        let _span = timeline::span(timeline::EventCategory::Reduce, "accumulate").of(|| core.names(params));
        let ReducePlan { scatter, after, accumulate, .. } = self.plan;
        let mesh = core.mesh();
        // The pieces that this rank keeps, and where they start in what it received.
        let pieces = match core.placement().optim.is_sharded() {
            true => mesh.pieces_of(mesh.shard_of(core.rank())),
            false => 0..mesh.world_size(),
        };
        let first = if scatter { pieces.start } else { 0 };
        let chunks: Vec<(usize, usize)> = pieces.map(|piece| (piece, (piece - first) * chunk)).collect();
        let mut groups = core.groups();
        for (param, offset) in params.iter().zip(offsets) {
            let (group, slot) = core.place(*param);
            let group = &mut groups[group];
            let SubGroupSlot { owned, len, .. } = group.slots[slot].clone();
            let known = group.take_grads(slot, core)?;
            let fits = sum.dtype() == accumulate && chunks[0].1 == 0 && sum.len() >= len;
            if known.is_none() && params.len() == 1 && fits {
                // A large parameter's pieces lie one after the other, as in its share.
                sum.truncate(len);
                // A GPU's memory is not given back in part: for a moment both are there.
                let bucket = C::Buffer::is_device(&sum.place()).then(|| core.hold(MemoryKind::Buckets, &sum));
                sum.shrink_to_fit()?;
                if after != 1.0 {
                    sum.scale(after)?;
                }
                group.put_grads(slot, TrackedBuffer::new(core.ledger(), MemoryKind::Gradients, sum), core);
                drop(bucket);
                return Ok(());
            }
            let mut grads = match known {
                Some(grads) => grads,
                None => group.zeroed_grads(slot, core, accumulate)?,
            };
            for (piece, start) in &chunks {
                let piece = mesh.piece(core.params()[*param].cut(), *piece);
                let from = start + offset;
                // A tail piece may be empty and lie at the end of the parameter.
                let to = piece.start - owned.start;
                grads.buffer_mut().add_scaled(to, &sum, from..from + piece.len(), after)?;
            }
            group.put_grads(slot, grads, core);
        }
        Ok(())
    }

    /// After an optimizer step: no gradients.
    pub fn clear(&self, core: &C) {
        core.groups().iter_mut().for_each(|group| group.grads.fill_with(|| GradientShare::Absent));
    }

    /// The dtype in which gradients are accumulated.
    pub fn accumulate_dtype(&self) -> DType {
        self.plan.accumulate
    }
}
