//! Works on the values of gradients: sums them, and packs them into buckets for their collectives.

use super::gradient_reducer::{ArrivedGradient, GradientBackend, ReducePlan};
use crate::error::Result;
use crate::graph::{Grad, GradSlot as Sum};
use crate::layout::PACKED_BELOW;
use crate::memory::MemoryTier;
use crate::param::{Param, ParamId};
use crate::precision::Flat;
use crate::tensor::flat_buffer::FlatBuffer;
use crate::zero::gather::coalesced_layout::CoalescedLayout;
#[cfg(feature = "cuda")]
use crate::zero::gpu::gradient_pack::{self, GradientPackFormat};
use crate::zero::rank_core::RankCore;
use std::ops::Range;

impl GradientBackend for RankCore {
    type Grad = Grad;

    fn bytes(grad: &Grad) -> usize {
        grad.len() * grad.dtype().size_in_bytes()
    }

    fn tier_of(grad: &Grad) -> MemoryTier {
        match grad {
            Grad::Own(_) => MemoryTier::Host,
            Grad::OnDevice(tensor) | Grad::Shared(tensor) => MemoryTier::of(tensor.device()),
        }
    }

    fn zeros(&self, param: &Param) -> Grad {
        Grad::Own(Flat::zeros(param.tensor.dtype(), param.numel))
    }

    fn sum(a: Grad, b: Grad) -> Result<Grad> {
        if a.dtype() != b.dtype() {
            // One of them may already be a sum over micro steps that were not reduced.
            let mut sum = a.into_own()?;
            let all = 0..sum.len();
            b.view(|values| sum.slice_mut(all).add_scaled(values, 1.0))?;
            return Ok(Grad::Own(sum));
        }
        let sum = Sum::default();
        sum.add(a)?;
        sum.add(b)?;
        Ok(sum.take().expect("two gradients have a sum"))
    }

    fn pack(
        &self,
        plan: &ReducePlan,
        layout: &CoalescedLayout,
        mut grads: Vec<ArrivedGradient<Grad>>,
    ) -> Result<FlatBuffer> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.model_location.gpu() {
            let (format, len) = (
                GradientPackFormat { dtype: plan.dtype, factor: plan.prescale },
                layout.chunk * layout.mesh.world_size(),
            );
            let packed = match grads.pop_if(|arrived| arrived.grad.len() >= PACKED_BELOW) {
                Some(large) => gradient_pack::prepare(gpu, format, len, large.grad)?,
                None => {
                    let grads = grads.into_iter().zip(&layout.offsets);
                    let grads =
                        grads.map(|(arrived, offset)| (arrived.grad, self.pieces(arrived.param, layout, *offset)));
                    gradient_pack::pack(gpu, format, len, grads)?
                }
            };
            return Ok(FlatBuffer::Device(packed));
        }
        let packed = match grads.pop_if(|arrived| arrived.grad.len() >= PACKED_BELOW) {
            Some(large) => prepare(plan, layout.chunk * layout.mesh.world_size(), large)?,
            None => self.pack_small(plan, layout, grads)?,
        };
        Ok(packed.into())
    }
}

/// Prepares one gradient with its padding, in the gradient's own buffer if it has one.
fn prepare(plan: &ReducePlan, padded: usize, ArrivedGradient { grad, .. }: ArrivedGradient<Grad>) -> Result<Flat> {
    match grad {
        Grad::Own(mut flat) if flat.dtype() == plan.dtype => {
            // Reserves exactly this much: spare capacity in a large gradient would be wasted.
            flat.reserve_exact(padded - flat.len());
            flat.extend_zeros(padded - flat.len());
            if plan.prescale != 1.0 {
                flat.as_mut().scale(plan.prescale);
            }
            Ok(flat)
        }
        other => Ok(other.view(|values| {
            let mut flat = Flat::zeros(plan.dtype, padded);
            flat.slice_mut(0..values.len()).copy_scaled(values, plan.prescale);
            flat
        })?),
    }
}

impl RankCore {
    fn pack_small(
        &self,
        plan: &ReducePlan,
        layout: &CoalescedLayout,
        grads: Vec<ArrivedGradient<Grad>>,
    ) -> Result<Flat> {
        let mut flat = Flat::zeros(plan.dtype, layout.chunk * layout.mesh.world_size());
        for (ArrivedGradient { param, grad, held }, offset) in grads.into_iter().zip(&layout.offsets) {
            grad.view(|values| {
                for (start, piece) in self.pieces(param, layout, *offset) {
                    let part = flat.slice_mut(start..start + piece.len());
                    part.copy_scaled(values.slice(piece), plan.prescale);
                }
            })?;
            drop((grad, held));
        }
        Ok(flat)
    }

    /// Returns the pieces of a parameter with this offset in a layout's chunks, and the offset of each in the bucket.
    fn pieces(
        &self,
        param: ParamId,
        layout: &CoalescedLayout,
        offset: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (mesh, cut, chunk) = (layout.mesh, self.params[param].cut(), layout.chunk);
        (0..mesh.world_size()).map(move |number| (number * chunk + offset, mesh.piece(cut, number)))
    }
}
