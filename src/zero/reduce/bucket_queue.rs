//! Batches of parameters that share a collective, and a limit on the number of pending batches.
//!
//! A large parameter gets its own collective: nothing is packed. Small parameters are collected until the next one
//! would exceed the maximum number of elements of a bucket.

use crate::layout::{BucketFill, PACKED_BELOW};
use crate::param::Param;
use std::collections::VecDeque;

/// The number of pending batches before the oldest is waited for: one is transferred while the next one fills.
pub(in crate::zero) const IN_FLIGHT: usize = 2;

/// A queue that collects items of type `I` into batches, and keeps pending batches as `T`.
struct BucketQueue<I, T> {
    rule: BucketFill,
    batch: Vec<I>,
    in_flight: VecDeque<T>,
}

impl<I, T> BucketQueue<I, T> {
    /// Creates a queue of batches of at most `limit` elements, unless a single parameter is larger.
    pub fn new(limit: usize) -> Self {
        Self { rule: BucketFill::new(limit), batch: Vec::new(), in_flight: VecDeque::new() }
    }

    /// Adds the item of a parameter of `numel` elements. Returns the batch that must leave now, if any.
    pub fn push(&mut self, item: I, numel: usize) -> Option<Vec<I>> {
        if numel >= PACKED_BELOW {
            return Some(vec![item]);
        }
        let full = self.rule.push(numel).then(|| std::mem::take(&mut self.batch));
        self.batch.push(item);
        full
    }

    /// Ends the collection: returns the items that have not left.
    pub fn take_rest(&mut self) -> Option<Vec<I>> {
        self.rule.reset();
        (!self.batch.is_empty()).then(|| std::mem::take(&mut self.batch))
    }

    /// Adds a pending batch.
    pub fn push_pending(&mut self, batch: T) {
        self.in_flight.push_back(batch);
    }

    /// Returns the oldest pending batch, which must be waited for, if more than `max_pending` are pending.
    pub fn due(&mut self, max_pending: usize) -> Option<T> {
        if self.in_flight.len() > max_pending { self.in_flight.pop_front() } else { None }
    }
}

/// The batches of parameters that are on all ranks and, separately, those of experts that are divided among ranks:
/// which experts' items arrive, and when, differs between ranks that hold different experts.
pub(in crate::zero) struct BucketQueues<I, T> {
    on_all_ranks: BucketQueue<I, T>,
    of_experts: BucketQueue<I, T>,
}

impl<I, T> BucketQueues<I, T> {
    /// Creates queues of batches of at most `limit` elements, unless a single parameter is larger.
    pub fn new(limit: usize) -> Self {
        Self { on_all_ranks: BucketQueue::new(limit), of_experts: BucketQueue::new(limit) }
    }

    fn queue_of(&mut self, param: &Param) -> &mut BucketQueue<I, T> {
        if param.expert.is_some() { &mut self.of_experts } else { &mut self.on_all_ranks }
    }

    /// Adds the item of a parameter. Returns the batch that must leave now, if any.
    pub fn push(&mut self, item: I, param: &Param) -> Option<Vec<I>> {
        self.queue_of(param).push(item, param.numel)
    }

    /// Ends the collection: returns the batches that have not left.
    pub fn take_rest(&mut self) -> impl Iterator<Item = Vec<I>> + use<I, T> {
        [self.on_all_ranks.take_rest(), self.of_experts.take_rest()].into_iter().flatten()
    }

    /// Adds a pending batch to which `param` belongs.
    pub fn push_pending(&mut self, batch: T, param: &Param) {
        self.queue_of(param).push_pending(batch);
    }

    /// Returns the oldest pending batch of a queue in which more than `max_pending` are pending; it must be waited for.
    pub fn due(&mut self, max_pending: usize) -> Option<T> {
        self.on_all_ranks.due(max_pending).or_else(|| self.of_experts.due(max_pending))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_parameters_leave_at_once_and_small_ones_together() {
        let mut buckets = BucketQueue::<char, ()>::new(100);
        assert_eq!(buckets.push('a', 60), None);
        assert_eq!(buckets.push('b', PACKED_BELOW), Some(vec!['b']));
        assert_eq!(buckets.push('c', 40), None);
        assert_eq!(buckets.push('d', 1), Some(vec!['a', 'c']));
        assert_eq!(buckets.take_rest(), Some(vec!['d']));
        assert_eq!(buckets.take_rest(), None);
    }

    #[test]
    fn the_oldest_batch_is_waited_for_first() {
        let mut buckets = BucketQueue::<(), u8>::new(1);
        (1..=3).for_each(|batch| buckets.push_pending(batch));
        assert_eq!([buckets.due(2), buckets.due(2), buckets.due(0), buckets.due(0)], [Some(1), None, Some(2), Some(3)]);
    }
}
