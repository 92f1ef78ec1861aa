//! The core's part in `no_sync` and `zero_grad`: gradients that are kept unreduced, reduced later, or dropped.

use crate::error::Result;
use crate::graph::Grad;
use crate::param::ParamId;
use crate::util::lock;
use crate::zero::rank_core::RankCore;
use crate::zero::share::sub_group::GradientShare;

impl RankCore {
    /// Sets whether, from now on, gradients are kept by the rank that computed them, or reduced.
    pub fn hold_unreduced(&self, holds: bool) {
        lock(&self.unreduced).is_holding = holds;
    }

    /// Returns whether gradients are kept by the rank that computed them.
    pub(in crate::zero) fn holds_unreduced(&self) -> bool {
        lock(&self.unreduced).is_holding
    }

    /// Returns the gradient to reduce now that `grad` has arrived, or `None` if it is kept.
    pub(in crate::zero) fn to_reduce(&self, param: ParamId, grad: Grad) -> candle_core::Result<Option<Grad>> {
        let dtype = lock(&self.gradients).accumulate_dtype();
        lock(&self.unreduced).add(param, grad, dtype, &self.ledger)
    }

    /// Records that a backward pass whose gradients are kept has ended.
    pub(in crate::zero) fn keep_unreduced(&self) {
        lock(&self.unreduced).has_pending = true;
    }

    /// Hands over the gradient sums that are still kept: in a backward pass, those of the parameters that it has not
    /// reached.
    pub(in crate::zero) fn release_unreduced(&self) -> Result<()> {
        let mut unreduced = lock(&self.unreduced);
        unreduced.has_pending = false;
        let sums = std::mem::take(&mut unreduced.sums);
        drop(unreduced);
        let mut gradients = lock(&self.gradients);
        sums.into_iter().try_for_each(|(param, sum)| gradients.arrive(self, param, Grad::Own(sum.into_buffer())))
    }

    /// Collective: reduces the kept gradients, if there are any.
    pub fn reduce_unreduced(&self) -> Result<()> {
        if !lock(&self.unreduced).has_pending {
            return Ok(());
        }
        self.release_unreduced()?;
        lock(&self.gradients).end_backward(self)
    }

    /// Drops all gradients.
    pub fn zero_grad(&self) -> Result<()> {
        let mut unreduced = lock(&self.unreduced);
        unreduced.sums.clear();
        unreduced.has_pending = false;
        drop(unreduced);
        for group in lock(&self.groups).iter_mut() {
            for grads in &mut group.grads {
                // A pending write must end first, because the gradient's extent in the file will soon be written again.
                if let GradientShare::File { writing: Some(writing), .. } =
                    std::mem::replace(grads, GradientShare::Absent)
                {
                    writing.written()?;
                }
            }
        }
        Ok(())
    }
}
