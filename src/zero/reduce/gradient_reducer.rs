//! Moves gradients from the backward pass that computes them to this rank's share.
//!
//! ```text
//!   arrived -> [held to the end of the pass: stage 1] -> bucket -> reduce -> [leaves the GPU] -> becomes the gradient
//!                                                                                                of this share, or is
//!                                                                                                added to it
//! ```
//!
//! A large gradient is reduced separately: on the host, in the buffer that its layer wrote, unless its dtype must
//! change, because a parameter's pieces are already in that buffer one after the other. Small gradients are packed
//! together. From stage 2 on, a gradient is dropped as soon as it is reduced, while the backward pass continues. At
//! stage 1, every rank holds its full gradient until the backward pass is over, as ZeRO defines this stage. At stage 0,
//! the full sum is kept.
//!
//! A parameter whose gradient may be missing on some ranks (`ignore_unused_parameters`, the experts of a leaf unit), or
//! may arrive in a different order on each rank (the experts of a layer without a grouped product), waits until this
//! rank's backward pass is over: Candle offers no earlier point at which it is known that a gradient will not come.
//! Then all such gradients are reduced in a fixed order, with zeros for missing ones, so that ranks on which different
//! gradients are missing still issue the same collectives.
//!
//! With `zero_quantized_gradients`, a rank sends its gradients as int4, in blocks that depend only on the parameter and
//! the number of ranks. Sums are always computed in f32, and at stage 0 they are transferred exactly. With
//! `compress_between_hosts_only`, only the sum of a host's ranks is quantized, or rounded to
//! `communication_data_type`.
//!
//! Except in `no_sync`, every stage reduces in every micro step, even if it could wait for the accumulation boundary:
//! the result is a sum over micro steps of sums over ranks. Only in this way do all stages add the same numbers in the
//! same order, and produce the same bits.

use super::bucket_queue::{BucketQueues, IN_FLIGHT};
use crate::comm::{InterHostFormat, WireFormat};
use crate::config::{Config, GradientOp};
use crate::error::Result;
use crate::layout::Placement;
use crate::memory::{MemoryKind, MemoryLedgerEntry, MemoryTier, TrackedBuffer};
use crate::param::{Param, ParamId};
use crate::precision::{ElementBuffer, IntFormat};
use crate::timeline;
use crate::zero::gather::coalesced_layout::CoalescedLayout;
use crate::zero::share::sub_group::{GradientShare, SubGroupPosition};
use crate::zero::step_executor::StepExecutor;
use crate::zero::transfer::device_copy::CopyPayloadKind;
use crate::zero::transfer::pending_collective::CollectiveOp;
use candle_core::DType;
use std::collections::{BTreeMap, VecDeque};

/// The settings of gradient reduction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReducePlan {
    /// Whether each rank receives only its shards.
    pub scatter: bool,
    /// Whether full gradients are held until the backward pass is over.
    pub hold: bool,
    /// Whether buckets are transferred while the backward pass runs.
    pub overlap: bool,
    /// The factor by which gradients are multiplied before the reduction.
    pub(super) prescale: f32,
    /// The factor by which sums are multiplied after the reduction.
    postscale: f32,
    /// The dtype to which gradients and their sums are rounded before a transfer.
    pub dtype: DType,
    /// The wire format of the gradients after that rounding.
    pub wire: WireFormat,
    /// The dtype in which gradients are accumulated.
    pub accumulate: DType,
}

impl ReducePlan {
    /// Creates the plan of `config`. `dtype` is the model's.
    pub fn new(config: &Config, placement: Placement, world_size: usize, dtype: DType) -> Self {
        let world = world_size as f64;
        let predivide = config.gradient_predivide_factor;
        let (prescale, postscale) = match config.gradient_allreduce_op {
            GradientOp::Sum => (1.0, 1.0),
            // A `gradient_predivide_factor` of 1 means that gradients are divided only once. The division comes before
            // the reduction, so that 16-bit sums do not overflow.
            GradientOp::Mean if config.prescale_gradients || predivide == 1.0 => (1.0 / world, 1.0),
            GradientOp::Mean => (1.0 / predivide, predivide / world),
        };
        let (transfer_dtype, wire) = transfer_format(config, dtype);
        Self {
            scatter: placement.optim.is_sharded() && config.zero.reduce_scatter,
            hold: placement.optim.is_sharded() && !placement.grads.is_sharded(),
            overlap: config.zero.overlap_comm,
            prescale: prescale as f32,
            postscale: postscale as f32,
            dtype: transfer_dtype,
            wire,
            accumulate: config.grad_accum_dtype.unwrap_or(dtype),
        }
    }
}

/// Returns the dtype to which gradients of a model of `dtype` are rounded before a transfer, and their wire format.
fn transfer_format(config: &Config, dtype: DType) -> (DType, WireFormat) {
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
    // Within a host, the chosen dtype is used only if it has more precision than the model's.
    let within_host = chosen.filter(|chosen| *chosen == DType::F32).unwrap_or(dtype);
    (within_host, code.map_or(WireFormat::Exact, WireFormat::BetweenHosts))
}

/// The executor of the decisions of [`GradientReducer`]: the engine's core, or a rehearsal that only counts.
pub(crate) trait GradientBackend: StepExecutor {
    /// A gradient as computed by the backward pass.
    type Grad;
    /// Returns the size in bytes of a gradient.
    fn bytes(grad: &Self::Grad) -> usize;
    /// Returns the memory tier of a gradient.
    fn tier_of(grad: &Self::Grad) -> MemoryTier;
    /// Creates a gradient of zeros.
    fn zeros(&self, param: &Param) -> Self::Grad;
    /// Returns the sum of two gradients of one parameter.
    fn sum(a: Self::Grad, b: Self::Grad) -> Result<Self::Grad>;
    /// Packs gradients according to a layout, piece by piece, for their collective. Each gradient is dropped once it
    /// has been copied.
    fn pack(
        &self,
        plan: &ReducePlan,
        layout: &CoalescedLayout,
        grads: Vec<ArrivedGradient<Self::Grad>>,
    ) -> Result<Self::Buffer>;
}

/// The gradients of the current micro step.
pub(crate) struct GradientReducer<C: GradientBackend> {
    plan: ReducePlan,
    buckets: BucketQueues<ArrivedGradient<C::Grad>, PendingReduction<C>>,
    /// The sums that are being transferred to the share, the oldest first.
    leaving: VecDeque<(CoalescedLayout, C::PendingCopy)>,
    held: Vec<ArrivedGradient<C::Grad>>,
    /// Whether each parameter's gradient may be missing on some ranks. A missing gradient counts as zeros.
    optional: Vec<bool>,
    /// The gradients of `optional` parameters that have arrived, kept until the backward pass ends.
    waiting: BTreeMap<ParamId, ArrivedGradient<C::Grad>>,
    /// Whether each parameter's gradient has arrived in the first accumulation; `None` once that has been checked.
    seen: Option<Vec<bool>>,
}

/// Returns whether a backward pass must produce a gradient of this parameter. Parameters without elements need no
/// gradient.
pub(super) fn is_expected(param: &Param) -> bool {
    param.is_trained() && param.numel > 0
}

/// A gradient that has arrived, and its entry in the ledger.
pub(crate) struct ArrivedGradient<G> {
    pub(super) param: ParamId,
    pub grad: G,
    pub held: MemoryLedgerEntry,
}

/// A pending bucket.
struct PendingReduction<C: GradientBackend> {
    layout: CoalescedLayout,
    pending: C::Pending,
    held: MemoryLedgerEntry,
}

impl<C: GradientBackend> GradientReducer<C> {
    /// Creates a reducer. `optional` states for each parameter whether its gradient may be missing on some ranks.
    pub fn new(plan: ReducePlan, bucket_size: usize, optional: Vec<bool>) -> Self {
        let seen = Some(vec![false; optional.len()]);
        let (buckets, held, waiting) = (BucketQueues::new(bucket_size), Vec::new(), BTreeMap::new());
        Self { plan, buckets, leaving: VecDeque::new(), held, optional, waiting, seen }
    }

    /// Declares that the gradients of these parameters may arrive in different orders on different ranks, or on some
    /// ranks not at all: from now on, they wait until the backward pass ends.
    pub fn make_optional(&mut self, params: impl IntoIterator<Item = ParamId>) {
        params.into_iter().for_each(|param| self.optional[param] = true);
    }

    /// Accepts a parameter's gradient, which is complete unless the parameter is optional.
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

    /// Ends the backward pass: reduces the remaining gradients, and waits for all pending reductions.
    pub fn end_backward(&mut self, core: &C) -> Result<()> {
        for arrived in std::mem::take(&mut self.held) {
            self.collect(core, arrived)?;
        }
        for (id, param) in core.params().iter().enumerate().rev() {
            if self.optional[id] && is_expected(param) && core.holds(id) {
                let arrived = self.waiting.remove(&id);
                let arrived = arrived.unwrap_or_else(|| self.enter(core, id, core.zeros(param)));
                self.collect(core, arrived)?;
            }
        }
        for bucket in self.buckets.take_rest() {
            self.reduce(core, bucket)?;
        }
        self.finish(core, 0)
    }

    /// Returns whether each parameter's gradient has arrived since the start; `None` on later calls.
    pub fn take_seen(&mut self) -> Option<Vec<bool>> {
        self.seen.take()
    }

    fn enter(&self, core: &C, param: ParamId, grad: C::Grad) -> ArrivedGradient<C::Grad> {
        let kind = if self.plan.hold { MemoryKind::Gradients } else { MemoryKind::Buckets };
        let held = core.ledger().hold_in(C::tier_of(&grad), kind, C::bytes(&grad));
        ArrivedGradient { param, grad, held }
    }

    /// Holds a gradient until the backward pass ends. A parameter that is used inside and outside a recomputing unit
    /// has a gradient from each use. The number of uses may differ between ranks too, so the sum is reduced.
    fn wait_for_others(&mut self, ArrivedGradient { param, grad, held }: ArrivedGradient<C::Grad>) -> Result<()> {
        let arrived = match self.waiting.remove(&param) {
            Some(first) => ArrivedGradient { grad: C::sum(first.grad, grad)?, ..first },
            None => ArrivedGradient { param, grad, held },
        };
        self.waiting.insert(param, arrived);
        Ok(())
    }

    fn collect(&mut self, core: &C, arrived: ArrivedGradient<C::Grad>) -> Result<()> {
        let param = &core.params()[arrived.param];
        match self.buckets.push(arrived, param) {
            Some(bucket) => self.reduce(core, bucket),
            None => Ok(()),
        }
    }

    /// Begins the reduction of a bucket, or of one large gradient.
    fn reduce(&mut self, core: &C, bucket: Vec<ArrivedGradient<C::Grad>>) -> Result<()> {
        let ReducePlan { scatter, wire, overlap, .. } = self.plan;
        let params = bucket.iter().map(|arrived| arrived.param).collect();
        let layout = CoalescedLayout::new(params, core.params(), core.mesh().pieces(), wire);
        let _span = timeline::span(timeline::EventCategory::Reduce, "pack").with_subject(|| core.names(&layout.params));
        // On a GPU, a bucket exists in addition to the gradients from which it is packed. On the host, a large gradient
        // becomes the bucket.
        let packed = layout.chunk * layout.mesh.world_size() * self.plan.dtype.size_in_bytes();
        let is_copied = C::Buffer::is_device(core.model_location());
        let packing = is_copied.then(|| core.ledger().hold_in(core.tier(), MemoryKind::Buckets, packed));
        let buffer = core.pack(&self.plan, &layout, bucket)?;
        drop(packing);
        let subject = timeline::set_subject(|| core.names(&layout.params));
        let held = core.hold(MemoryKind::Buckets, &buffer);
        let pending = match scatter {
            true => core.reduce(wire, buffer, &layout.params)?,
            false => core.launch(CollectiveOp::AllReduce, wire, buffer, &layout.params)?,
        };
        drop(subject);
        let first = &core.params()[layout.params[0]];
        self.buckets.push_pending(PendingReduction { layout, pending, held }, first);
        self.finish(core, if overlap { IN_FLIGHT - 1 } else { 0 })
    }

    /// Waits for the oldest reductions until at most `max_pending` are pending, and adds their sums to this rank's
    /// share. If the share is on another device, at most `max_pending` sums are still being copied to it afterwards.
    fn finish(&mut self, core: &C, max_pending: usize) -> Result<()> {
        while let Some(PendingReduction { layout, pending, held }) = self.buckets.due(max_pending) {
            let sum = core.wait(pending)?;
            drop(held);
            if C::Buffer::is_device(&sum.location()) == C::Buffer::is_device(core.share_location()) {
                self.accumulate(core, &layout, sum)?;
                continue;
            }
            let len = sum.len();
            self.leaving.push_back((layout, core.send(CopyPayloadKind::Gradients, sum, core.share_location(), len)?));
        }
        while self.leaving.len() > max_pending {
            let Some((layout, sum)) = self.leaving.pop_front() else { break };
            self.accumulate(core, &layout, core.wait_for_copy(sum)?)?;
        }
        Ok(())
    }

    fn accumulate(
        &self,
        core: &C,
        CoalescedLayout { params, offsets, chunk, .. }: &CoalescedLayout,
        mut sum: C::Buffer,
    ) -> Result<()> {
        let _subject = timeline::set_subject(|| core.names(params));
        let _span = timeline::span(timeline::EventCategory::Reduce, "accumulate").with_subject(|| core.names(params));
        let ReducePlan { scatter, postscale, accumulate, .. } = self.plan;
        let mesh = core.mesh_of(params);
        // These are the pieces that this rank keeps, and then their offsets in the received buffer.
        let pieces = match core.placement().optim.is_sharded() {
            true => mesh.pieces_of(mesh.shard_of(core.rank_among(params))),
            false => 0..mesh.world_size(),
        };
        let first = if scatter { pieces.start } else { 0 };
        let chunks: Vec<(usize, usize)> = pieces.map(|piece| (piece, (piece - first) * chunk)).collect();
        let mut groups = core.groups();
        for (param, offset) in params.iter().zip(offsets) {
            let (group, slot) = core.slot_of(*param);
            let group = &mut groups[group];
            let SubGroupPosition { owned, len, .. } = group.slots[slot].clone();
            let existing = group.take_grads(slot, core)?;
            let fits = sum.dtype() == accumulate && chunks[0].1 == 0 && sum.len() >= len;
            if existing.is_none() && params.len() == 1 && fits {
                // A large parameter's pieces are stored one after the other, as in its share.
                sum.truncate(len);
                // A GPU's memory cannot be freed in part: both buffers exist for a short time.
                let bucket = C::Buffer::is_device(&sum.location()).then(|| core.hold(MemoryKind::Buckets, &sum));
                sum.shrink_to_fit()?;
                if postscale != 1.0 {
                    sum.scale(postscale)?;
                }
                group.put_grads(slot, TrackedBuffer::new(core.ledger(), MemoryKind::Gradients, sum), core);
                drop(bucket);
                return Ok(());
            }
            let mut grads = match existing {
                Some(grads) => grads,
                None => group.zeroed_grads(slot, core, accumulate)?,
            };
            for (piece, start) in &chunks {
                let piece = mesh.piece(core.params()[*param].cut(), *piece);
                let source = start + offset;
                // A tail piece may be empty and begin at the end of the parameter.
                let target = piece.start - owned.start;
                grads.buffer_mut().add_scaled(target, &sum, source..source + piece.len(), postscale)?;
            }
            group.put_grads(slot, grads, core);
        }
        Ok(())
    }

    /// Drops all gradients after an optimizer step.
    pub fn clear(&self, core: &C) {
        core.groups().iter_mut().for_each(|group| group.grads.fill_with(|| GradientShare::Absent));
    }

    /// Returns the dtype in which gradients are accumulated.
    pub fn accumulate_dtype(&self) -> DType {
        self.plan.accumulate
    }
}
