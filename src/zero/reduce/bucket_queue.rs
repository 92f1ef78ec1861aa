//! Which parameters travel together, and how many batches of them are under way.
//!
//! A large parameter travels alone: nothing is packed. Small ones are collected until they would be more elements than
//! a bucket may have.

use crate::layout::{BucketFill, PACKED_BELOW};
use std::collections::VecDeque;

/// Batches under way before the oldest is waited for: one travels while the next one fills.
pub(in crate::zero) const IN_FLIGHT: usize = 2;

/// Collects items of type `I` into batches, and keeps those that travel, as `T`.
pub(in crate::zero) struct BucketQueue<I, T> {
    rule: BucketFill,
    batch: Vec<I>,
    in_flight: VecDeque<T>,
}

impl<I, T> BucketQueue<I, T> {
    /// A queue of batches of at most `limit` elements, where parameters allow.
    pub fn new(limit: usize) -> Self {
        Self { rule: BucketFill::new(limit), batch: Vec::new(), in_flight: VecDeque::new() }
    }

    /// Adds the item of a parameter of `numel` elements; gives the batch that has to leave now.
    pub fn push(&mut self, item: I, numel: usize) -> Option<Vec<I>> {
        if numel >= PACKED_BELOW {
            return Some(vec![item]);
        }
        let full = self.rule.push(numel).then(|| std::mem::take(&mut self.batch));
        self.batch.push(item);
        full
    }

    /// There are no more items: gives those that have not left.
    pub fn rest(&mut self) -> Option<Vec<I>> {
        self.rule.reset();
        (!self.batch.is_empty()).then(|| std::mem::take(&mut self.batch))
    }

    /// A batch is under way.
    pub fn launched(&mut self, batch: T) {
        self.in_flight.push_back(batch);
    }

    /// The oldest under way, if there are more than `left`: it has to be waited for.
    pub fn due(&mut self, left: usize) -> Option<T> {
        if self.in_flight.len() > left { self.in_flight.pop_front() } else { None }
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
        assert_eq!(buckets.rest(), Some(vec!['d']));
        assert_eq!(buckets.rest(), None);
    }

    #[test]
    fn the_oldest_batch_is_waited_for_first() {
        let mut buckets = BucketQueue::<(), u8>::new(1);
        (1..=3).for_each(|batch| buckets.launched(batch));
        assert_eq!([buckets.due(2), buckets.due(2), buckets.due(0), buckets.due(0)], [Some(1), None, Some(2), Some(3)]);
    }
}
