//! Gradients of micro steps that are not reduced (`no_sync`): this rank's own full gradients, kept until a backward
//! pass reduces them.

use crate::graph::Grad;
use crate::memory::{MemoryKind, MemoryLedger, TrackedBuffer};
use crate::param::ParamId;
use crate::precision::Flat;
use candle_core::DType;
use std::collections::BTreeMap;

/// The sums of this rank's own gradients.
#[derive(Default)]
pub(in crate::zero) struct UnreducedGradients {
    /// Whether gradients of the current backward passes are kept.
    pub is_holding: bool,
    /// Whether a backward pass's gradients have been kept since the last reduction. It is the same on all ranks,
    /// regardless of which gradients arrived on this rank.
    pub has_pending: bool,
    pub sums: BTreeMap<ParamId, TrackedBuffer>,
}

impl UnreducedGradients {
    /// Adds a gradient to its sum. Keeps the sum, or returns it if gradients are reduced.
    pub fn add(
        &mut self,
        param: ParamId,
        grad: Grad,
        dtype: DType,
        ledger: &MemoryLedger,
    ) -> candle_core::Result<Option<Grad>> {
        let Some(mut sum) = self.sums.remove(&param) else {
            if !self.is_holding {
                return Ok(Some(grad));
            }
            let mut sum = Flat::with_capacity(dtype, grad.len());
            grad.view(|values| sum.extend_cast(values))?;
            self.sums.insert(param, TrackedBuffer::new(ledger, MemoryKind::Gradients, sum));
            return Ok(None);
        };
        grad.view(|values| {
            let all = 0..values.len();
            sum.slice_mut(all).add_scaled(values, 1.0);
        })?;
        if self.is_holding {
            self.sums.insert(param, sum);
            return Ok(None);
        }
        Ok(Some(Grad::Own(sum.into_buffer())))
    }
}
