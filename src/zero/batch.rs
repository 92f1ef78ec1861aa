//! Which parameters travel together, and how many batches of them are under way.
//!
//! A large parameter travels alone: nothing is packed. Small ones are collected until they would be more elements than
//! a bucket may have.

use crate::layout::{BucketRule, PACKED_BELOW};
use std::collections::VecDeque;

/// Batches under way before the oldest is waited for: one travels while the next one fills.
pub(super) const IN_FLIGHT: usize = 2;

/// Collects items of type `I` into batches, and keeps those that travel, as `T`.
pub(super) struct Batcher<I, T> {
    rule: BucketRule,
    batch: Vec<I>,
    in_flight: VecDeque<T>,
}

impl<I, T> Batcher<I, T> {
    /// A batcher with batches of at most `limit` elements, where parameters allow.
    pub fn new(limit: usize) -> Self {
        Self { rule: BucketRule::new(limit), batch: Vec::new(), in_flight: VecDeque::new() }
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
        let mut batcher = Batcher::<char, ()>::new(100);
        assert_eq!(batcher.push('a', 60), None);
        assert_eq!(batcher.push('b', PACKED_BELOW), Some(vec!['b']));
        assert_eq!(batcher.push('c', 40), None);
        assert_eq!(batcher.push('d', 1), Some(vec!['a', 'c']));
        assert_eq!(batcher.rest(), Some(vec!['d']));
        assert_eq!(batcher.rest(), None);
    }

    #[test]
    fn the_oldest_batch_is_waited_for_first() {
        let mut batcher = Batcher::<(), u8>::new(1);
        (1..=3).for_each(|batch| batcher.launched(batch));
        assert_eq!([batcher.due(2), batcher.due(2), batcher.due(0), batcher.due(0)], [Some(1), None, Some(2), Some(3)]);
    }
}
