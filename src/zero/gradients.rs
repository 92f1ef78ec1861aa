//! Gradients: from the backward that makes them to this rank's share.
//!
//! ```text
//!   arrived -> [held until backward ends: stage 1] -> bucket -> reduce -> becomes, or is added to, the share
//! ```
//!
//! A large gradient travels alone, in the buffer that its layer wrote: a parameter's shards lie in it rank by rank
//! already. Small ones are packed together. From stage 2 on a gradient is gone as soon as it is reduced, while backward
//! goes on. At stage 1 every rank holds its whole gradient until backward is over, as ZeRO defines it. At stage 0 the
//! whole sum is kept.
//!
//! With `zero_quantized_gradients` what a rank sends of its gradients is int4, in blocks that depend on the parameter and
//! the number of ranks alone; sums are formed in f32, as always, and at stage 0 travel exact.
//!
//! Every stage reduces in every micro step, also where it could wait for the accumulation boundary: a sum over micro
//! steps of sums over ranks. Only so do all stages add the same numbers in the same order, and give the same bits.

use super::core::Core;
use super::sub_group::{GradShare, Slot};
use crate::comm::{Pending, Wire};
use crate::config::{Config, GradientOp};
use crate::error::{EngineError, Result};
use crate::graph::Grad;
use crate::layout::{BucketRule, PACKED_BELOW, Placement, chunk_offsets, shard_len, shard_range};
use crate::memory::{Held, Kind, Tracked};
use crate::param::{ParamId, lock};
use crate::precision::{Flat, Ints};
use crate::timeline;
use candle_core::DType;
use std::collections::VecDeque;

/// Reductions under way before the oldest is waited for: one travels while the next bucket fills.
pub(crate) const IN_FLIGHT: usize = 2;

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
    before: f32,
    /// Factor after it.
    after: f32,
    /// What gradients and their sums are rounded to before they travel.
    pub dtype: DType,
    /// How the gradients then travel.
    pub wire: Wire,
    /// What they are accumulated in.
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
        Self {
            scatter: placement.optim.is_sharded() && config.zero.reduce_scatter,
            hold: placement.optim.is_sharded() && !placement.grads.is_sharded(),
            overlap: config.zero.overlap_comm,
            before: before as f32,
            after: after as f32,
            dtype: config.communication_data_type.unwrap_or(dtype),
            wire: if config.zero.quantized_gradients { Wire::Blocks(Ints::Int4) } else { Wire::Exact },
            accumulate: config.grad_accum_dtype.unwrap_or(dtype),
        }
    }
}

/// Gradients of the micro step under way.
pub(crate) struct Gradients {
    plan: ReducePlan,
    rule: BucketRule,
    bucket: Vec<Arrived>,
    held: Vec<Arrived>,
    in_flight: VecDeque<Reduction>,
    /// Parameters whose gradient has arrived in the first backward; `None` once that has been checked.
    arrived: Option<Vec<bool>>,
}

/// A gradient that has arrived, and its entry in the ledger.
struct Arrived {
    param: ParamId,
    grad: Grad,
    held: Held,
}

/// A bucket under way.
struct Reduction {
    params: Vec<ParamId>,
    pending: Pending<Flat>,
    held: Held,
}

impl Gradients {
    pub fn new(plan: ReducePlan, bucket_size: usize, num_params: usize) -> Self {
        Self {
            plan,
            rule: BucketRule::new(bucket_size),
            bucket: Vec::new(),
            held: Vec::new(),
            in_flight: VecDeque::new(),
            arrived: Some(vec![false; num_params]),
        }
    }

    /// A parameter's gradient is complete.
    pub fn arrive(&mut self, core: &Core, param: ParamId, grad: Grad) -> Result<()> {
        if let Some(arrived) = &mut self.arrived {
            arrived[param] = true;
        }
        let kind = if self.plan.hold { Kind::Gradients } else { Kind::Buckets };
        let held = core.ledger.hold(kind, grad.len() * grad.dtype().size_in_bytes());
        let arrived = Arrived { param, grad, held };
        if self.plan.hold {
            self.held.push(arrived);
            return Ok(());
        }
        self.collect(core, arrived)
    }

    /// Backward is over: the rest travels, and everything under way is waited for.
    ///
    /// # Errors
    /// [`EngineError::NoGradient`] after the first backward if it left parameters out.
    pub fn end_backward(&mut self, core: &Core) -> Result<()> {
        if let Some(arrived) = self.arrived.take() {
            let params = arrived.iter().zip(&core.params);
            // Nothing can be learned where there are no elements.
            let missing = params.filter(|(arrived, p)| !**arrived && p.numel > 0);
            let missing: Vec<&str> = missing.map(|(_, p)| p.name.as_str()).collect();
            if !missing.is_empty() {
                return Err(
                    EngineError::NoGradient { count: missing.len(), names: crate::param::list(&missing) }.into()
                );
            }
        }
        for arrived in std::mem::take(&mut self.held) {
            self.collect(core, arrived)?;
        }
        self.flush(core)?;
        self.finish(core, 0)
    }

    fn collect(&mut self, core: &Core, arrived: Arrived) -> Result<()> {
        if arrived.grad.len() >= PACKED_BELOW {
            return self.launch_alone(core, arrived);
        }
        if self.rule.push(arrived.grad.len()) {
            self.launch_bucket(core)?;
        }
        self.bucket.push(arrived);
        Ok(())
    }

    fn flush(&mut self, core: &Core) -> Result<()> {
        self.rule.reset();
        if self.bucket.is_empty() { Ok(()) } else { self.launch_bucket(core) }
    }

    /// Begins the reduction of one gradient, in its own buffer where nobody else sees it.
    fn launch_alone(&mut self, core: &Core, Arrived { param, grad, held }: Arrived) -> Result<()> {
        let _span = timeline::span(timeline::Kind::Reduce, "pack").of(|| core.names(&[param]));
        let padded = core.padded(param);
        let flat = match grad {
            Grad::Own(mut flat) if flat.dtype() == self.plan.dtype => {
                // Exact: spare room of a large gradient would be waste.
                flat.reserve_exact(padded - flat.len());
                flat.extend_zeros(padded - flat.len());
                if self.plan.before != 1.0 {
                    flat.as_mut().scale(self.plan.before);
                }
                flat
            }
            other => other.view(|values| {
                let mut flat = Flat::zeros(self.plan.dtype, padded);
                flat.slice_mut(0..values.len()).copy_scaled(values, self.plan.before);
                flat
            })?,
        };
        drop(held);
        self.reduce(core, vec![param], flat)
    }

    /// Packs the bucket, rank by rank, and begins its reduction. Gradients are dropped as they are packed.
    fn launch_bucket(&mut self, core: &Core) -> Result<()> {
        let world = core.comm.size();
        let items = std::mem::take(&mut self.bucket);
        let params: Vec<ParamId> = items.iter().map(|i| i.param).collect();
        let _span = timeline::span(timeline::Kind::Reduce, "pack").of(|| core.names(&params));
        let (offsets, chunk) = self.chunk_offsets(core, &params);
        let mut flat = Flat::zeros(self.plan.dtype, chunk * world);
        for (Arrived { param, grad, held }, offset) in items.into_iter().zip(offsets) {
            grad.view(|values| {
                for r in 0..world {
                    let shard = shard_range(core.params[param].numel, world, r);
                    let start = r * chunk + offset;
                    let part = flat.slice_mut(start..start + shard.len());
                    part.copy_scaled(values.slice(shard), self.plan.before);
                }
            })?;
            drop((grad, held));
        }
        self.reduce(core, params, flat)
    }

    fn reduce(&mut self, core: &Core, params: Vec<ParamId>, flat: Flat) -> Result<()> {
        let about = timeline::about(|| core.names(&params));
        let held = core.ledger.hold(Kind::Buckets, flat.capacity_in_bytes());
        let tag = core.tag(&params);
        let ReducePlan { scatter, wire, .. } = self.plan;
        let comm = &core.comm;
        let pending =
            if scatter { comm.reduce_scatter_as(wire, flat, tag) } else { comm.all_reduce_as(wire, flat, tag) };
        drop(about);
        self.in_flight.push_back(Reduction { params, pending, held });
        self.finish(core, if self.plan.overlap { IN_FLIGHT - 1 } else { 0 })
    }

    /// Waits for the oldest reductions until at most `left` are under way, and adds them to this rank's share.
    fn finish(&mut self, core: &Core, left: usize) -> Result<()> {
        while self.in_flight.len() > left {
            let Some(Reduction { params, pending, held }) = self.in_flight.pop_front() else { break };
            let sum = pending.wait()?;
            drop(held);
            self.accumulate(core, &params, sum)?;
        }
        Ok(())
    }

    fn accumulate(&self, core: &Core, params: &[ParamId], mut sum: Flat) -> Result<()> {
        let _about = timeline::about(|| core.names(params));
        let _span = timeline::span(timeline::Kind::Reduce, "accumulate").of(|| core.names(params));
        let (world, rank) = (core.comm.size(), core.comm.rank());
        let (offsets, chunk) = self.chunk_offsets(core, params);
        // The chunks that this rank keeps, and where they start in what it received.
        let chunks: Vec<(usize, usize)> = match (core.placement.optim.is_sharded(), self.plan.scatter) {
            (true, true) => vec![(rank, 0)],
            (true, false) => vec![(rank, rank * chunk)],
            (false, _) => (0..world).map(|r| (r, r * chunk)).collect(),
        };
        let mut groups = lock(&core.groups);
        for (param, offset) in params.iter().zip(offsets) {
            let (group, slot) = core.places[*param];
            let group = &mut groups[group];
            let Slot { owned, len, .. } = group.slots[slot].clone();
            let known = group.take_grads(slot, core)?;
            let fits = sum.dtype() == self.plan.accumulate && chunks[0].1 == 0 && sum.len() >= len;
            if known.is_none() && params.len() == 1 && fits {
                // A large parameter's pieces lie one after the other, as in its share.
                sum.truncate(len);
                sum.shrink_to_fit();
                if self.plan.after != 1.0 {
                    sum.as_mut().scale(self.plan.after);
                }
                group.put_grads(slot, Tracked::new(&core.ledger, Kind::Gradients, sum), core);
                return Ok(());
            }
            let mut grads = known.unwrap_or_else(|| group.zeroed_grads(slot, &core.ledger, self.plan.accumulate));
            for (r, start) in &chunks {
                let shard = shard_range(core.params[*param].numel, world, *r);
                let from = start + offset;
                // A tail shard may be empty and lie at the end of the parameter.
                let to = shard.start - owned.start;
                let source = sum.slice(from..from + shard.len());
                grads.slice_mut(to..to + shard.len()).add_scaled(source, self.plan.after);
            }
            group.put_grads(slot, grads, core);
        }
        Ok(())
    }

    /// Where each parameter's shard lies in a rank's chunk, and the chunk's length.
    fn chunk_offsets(&self, core: &Core, params: &[ParamId]) -> (Vec<usize>, usize) {
        let numels: Vec<usize> = params.iter().map(|p| core.params[*p].numel).collect();
        chunk_offsets(&numels, core.comm.size(), self.plan.wire.alignment())
    }

    /// After an optimizer step: no gradients.
    pub fn clear(&self, core: &Core) {
        lock(&core.groups).iter_mut().for_each(|group| group.grads.fill_with(|| GradShare::Absent));
    }

    /// What gradients are accumulated in.
    pub fn accumulate_dtype(&self) -> DType {
        self.plan.accumulate
    }
}

impl Core {
    /// Elements of a parameter's shards of all ranks, padding included.
    fn padded(&self, param: ParamId) -> usize {
        shard_len(self.params[param].numel, self.comm.size()) * self.comm.size()
    }
}
