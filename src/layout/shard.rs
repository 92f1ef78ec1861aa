//! Cuts one parameter into shards, and collects shards into sub-groups.
//!
//! ```text
//!   parameter of 10 elements, 4 ranks: shard length ceil(10 / 4) = 3
//!   rank 0 [0 1 2]   rank 1 [3 4 5]   rank 2 [6 7 8]   rank 3 [9 . .]     (. is padding)
//! ```
//!
//! This is DeepSpeed's stage-3 layout. candle-zero uses it at every stage, so that the same rank owns the same
//! elements, whatever is sharded.

use std::ops::Range;

/// Returns the number of elements that each rank holds of a parameter of `numel` elements, including padding.
pub fn shard_len(numel: usize, world_size: usize) -> usize {
    numel.div_ceil(world_size)
}

/// Returns the elements of a parameter that `rank` owns, without padding: the last ranks may own fewer than
/// [`shard_len`] elements, or none.
pub fn shard_range(numel: usize, world_size: usize, rank: usize) -> Range<usize> {
    let len = shard_len(numel, world_size);
    (rank * len).min(numel)..((rank + 1) * len).min(numel)
}

/// The cut of a parameter into shards: between any two elements, or between blocks that are not divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardCut {
    /// The number of elements of the parameter.
    pub numel: usize,
    /// The number of elements that must be on the same rank: 1, or the length of the blocks in which a state is coded.
    pub block: usize,
}

impl ShardCut {
    /// Creates a cut between any two of `numel` elements.
    pub fn anywhere(numel: usize) -> Self {
        Self { numel, block: 1 }
    }

    /// Returns the number of elements that each rank holds, including padding: a number of complete blocks.
    pub fn shard_len(self, world_size: usize) -> usize {
        shard_len(self.numel.div_ceil(self.block), world_size) * self.block
    }

    /// Returns the elements that `rank` owns, without padding: the last ranks may own fewer than
    /// [`shard_len`](Self::shard_len) elements, or none.
    pub fn shard(self, world_size: usize, rank: usize) -> Range<usize> {
        let blocks = shard_range(self.numel.div_ceil(self.block), world_size, rank);
        (blocks.start * self.block).min(self.numel)..(blocks.end * self.block).min(self.numel)
    }
}

/// A rule that collects parameters into groups in order: the parameter that brings a group's total size up to the limit
/// closes the group. This is DeepSpeed's rule for `sub_group_size`.
#[derive(Debug, Clone)]
pub struct SubGroupFill {
    limit: usize,
    elements: usize,
}

impl SubGroupFill {
    /// Creates a rule for groups of about `limit` elements.
    pub fn new(limit: usize) -> Self {
        Self { limit, elements: 0 }
    }

    /// Adds a parameter with `len` elements in a rank's share. Returns true if it closes its group.
    pub fn push(&mut self, len: usize) -> bool {
        self.elements = self.elements.saturating_add(len);
        let closes = self.elements >= self.limit;
        if closes {
            self.elements = 0;
        }
        closes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_cover_a_parameter_without_overlap(numel in 0usize..10_000, world in 1usize..70) {
            let mut next = 0;
            for rank in 0..world {
                let range = shard_range(numel, world, rank);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() <= shard_len(numel, world));
                next = range.end;
            }
            prop_assert_eq!(next, numel);
        }

        #[test]
        fn a_block_lies_on_one_rank(numel in 0usize..10_000, world in 1usize..9, block in 1usize..300) {
            let cut = ShardCut { numel, block };
            let mut next = 0;
            for rank in 0..world {
                let shard = cut.shard(world, rank);
                prop_assert_eq!(shard.start, next);
                prop_assert!(shard.start.is_multiple_of(block) || shard.start == numel);
                prop_assert!(shard.len() <= cut.shard_len(world));
                next = shard.end;
            }
            prop_assert_eq!(next, numel);
            prop_assert_eq!(ShardCut::anywhere(numel).shard_len(world), shard_len(numel, world));
        }

        #[test]
        fn a_sub_group_reaches_its_limit_with_its_last_parameter(lens in prop::collection::vec(0usize..50, 0..60), limit in 1usize..200) {
            let mut groups = SubGroupFill::new(limit);
            let mut sum = 0;
            for len in lens {
                sum += len;
                let closed = groups.push(len);
                prop_assert_eq!(closed, sum >= limit);
                if closed {
                    prop_assert!(sum - len < limit);
                    sum = 0;
                }
            }
        }
    }
}
