//! Cuts one parameter into shards, and collects shards into sub-groups.
//!
//! ```text
//!   parameter of 10 elements, 4 ranks: shard length ceil(10 / 4) = 3
//!   rank 0 [0 1 2]   rank 1 [3 4 5]   rank 2 [6 7 8]   rank 3 [9 . .]     (. is padding)
//! ```
//!
//! This is DeepSpeed's stage-3 layout. candle-zero uses it at every stage, so that the same rank owns the same
//! elements, whatever is sharded.

use crate::util::counted;
use std::cmp::Ordering;
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
    /// The number of elements that must be on the same rank: 1, or the length of the blocks in which a state is
    /// quantized.
    pub block: usize,
    /// The ranks that hold the parameter, if not all ranks hold it.
    pub expert: Option<ExpertPlacement>,
}

/// The ranks that hold the parameters of an expert: with expert parallelism, those with the expert's position along the
/// expert axis. The position along this axis changes fastest with the rank number, so the expert is on every `size`-th
/// rank.
///
/// ```text
///   4 ranks, 2 along the expert axis: ranks 0 1 2 3 have positions 0 1 0 1
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertPlacement {
    /// The position along the expert axis, counted from 0.
    pub position: usize,
    /// The number of ranks along the expert axis.
    pub size: usize,
}

impl ExpertPlacement {
    /// Returns the placement of expert `number` of a layer of `count` experts. Each position has `count / size`
    /// consecutive experts.
    ///
    /// # Panics
    /// Panics if `size` does not divide `count`, or if there is no such expert.
    pub fn of(number: usize, count: usize, size: usize) -> Self {
        assert!(
            size > 0 && count.is_multiple_of(size) && number < count,
            "expert {number} of {count} cannot be on {}",
            counted(size, "rank")
        );
        Self { position: number / (count / size), size }
    }

    /// Returns whether `rank` holds the expert.
    pub fn is_on(self, rank: usize) -> bool {
        rank % self.size == self.position
    }
}

impl ShardCut {
    /// Creates a cut between any two of `numel` elements.
    pub fn anywhere(numel: usize) -> Self {
        Self { numel, block: 1, expert: None }
    }

    /// Returns whether `rank` holds a part of the parameter, which may be empty.
    pub fn is_on(self, rank: usize) -> bool {
        self.expert.is_none_or(|expert| expert.is_on(rank))
    }

    /// Returns the same cut among the ranks that hold the parameter, numbered from 0.
    #[must_use]
    pub fn among_holders(self) -> Self {
        Self { expert: None, ..self }
    }

    /// Returns the number of elements that each rank with a part of the parameter holds, including padding: a number of
    /// complete blocks.
    pub fn shard_len(self, world_size: usize) -> usize {
        let holders = self.expert.map_or(world_size, |expert| world_size / expert.size);
        shard_len(self.numel.div_ceil(self.block), holders) * self.block
    }

    /// Returns the elements that `rank` owns, without padding: the last ranks may own fewer than
    /// [`shard_len`](Self::shard_len) elements, or none.
    pub fn shard(self, world_size: usize, rank: usize) -> Range<usize> {
        let Some(expert) = self.expert else {
            let blocks = shard_range(self.numel.div_ceil(self.block), world_size, rank);
            return (blocks.start * self.block).min(self.numel)..(blocks.end * self.block).min(self.numel);
        };
        let shard = self.among_holders().shard(world_size / expert.size, rank / expert.size);
        match (rank % expert.size).cmp(&expert.position) {
            Ordering::Less => shard.start..shard.start,
            Ordering::Equal => shard,
            Ordering::Greater => shard.end..shard.end,
        }
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
            let cut = ShardCut { block, ..ShardCut::anywhere(numel) };
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
        fn an_expert_lies_on_the_ranks_of_its_position(
            numel in 0usize..5000, block in 1usize..40, size in 1usize..6, copies in 1usize..5, each in 1usize..4,
            expert in 0usize..24,
        ) {
            let (count, world) = (size * each, size * copies);
            let placement = ExpertPlacement::of(expert % count, count, size);
            let cut = ShardCut { numel, block, expert: Some(placement) };
            let mut next = 0;
            for rank in 0..world {
                let shard = cut.shard(world, rank);
                prop_assert_eq!(shard.start, next);
                prop_assert!(shard.len() <= cut.shard_len(world));
                prop_assert!(cut.is_on(rank) || shard.is_empty());
                next = shard.end;
                if cut.is_on(rank) {
                    prop_assert_eq!(shard, cut.among_holders().shard(copies, rank / size));
                }
            }
            prop_assert_eq!(next, numel);
            prop_assert_eq!((0..world).filter(|rank| cut.is_on(*rank)).count(), copies);
            let is_same = |expert: &usize| ExpertPlacement::of(*expert, count, size) == placement;
            prop_assert_eq!((0..count).filter(is_same).count(), each);
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
