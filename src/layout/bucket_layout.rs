//! The grouping of gradients into buckets, and the position of each shard in a bucket.
//!
//! A bucket is laid out rank by rank, so that a reduce-scatter gives each rank the shards that it owns as one
//! contiguous chunk:
//!
//! ```text
//!   parameters A (5 elements) and B (3), two ranks
//!   | A[0..3] B[0..2] | A[3..5] . B[2..3] . |      (. is padding)
//!     chunk of rank 0    chunk of rank 1
//! ```

use super::shard::ShardCut;
use super::shard_mesh::ShardMesh;

/// The number of elements at or above which a parameter gets its own collective, whatever the bucket size. The full
/// parameter already contains its shards rank by rank, so nothing needs to be packed, and a larger message would not be
/// faster.
pub const PACKED_BELOW: usize = 1 << 16;

/// A rule that decides when a bucket is full: a gradient that would make it larger than the limit starts a new one. A
/// gradient larger than the limit gets its own bucket. This is DeepSpeed's rule for `reduce_bucket_size`.
#[derive(Debug, Clone)]
pub struct BucketFill {
    limit: usize,
    elements: usize,
}

impl BucketFill {
    /// Creates a rule for buckets of at most `limit` elements, unless a single gradient is larger.
    pub fn new(limit: usize) -> Self {
        Self { limit, elements: 0 }
    }

    /// Accounts for a gradient of `numel` elements. Returns true if the bucket must be sent before the gradient is
    /// added.
    pub fn push(&mut self, numel: usize) -> bool {
        let flush = self.elements > 0 && self.elements.saturating_add(numel) > self.limit;
        self.elements = if flush { numel } else { self.elements + numel };
        flush
    }

    /// Starts a new bucket after the previous one has been sent.
    pub fn reset(&mut self) {
        self.elements = 0;
    }
}

/// Returns the offset of each parameter's shard within a chunk, a multiple of `alignment`, and the chunk's length.
pub fn chunk_offsets(params: &[ShardCut], mesh: ShardMesh, alignment: usize) -> (Vec<usize>, usize) {
    let mut end = 0usize;
    let offsets = params
        .iter()
        .map(|cut| {
            let start = end.next_multiple_of(alignment);
            end = start + mesh.shard_len(*cut);
            start
        })
        .collect();
    (offsets, end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bucket_exceeds_its_limit_only_for_a_single_gradient(numels in prop::collection::vec(1usize..40, 1..50), limit in 1usize..60) {
            let mut rule = BucketFill::new(limit);
            let mut buckets: Vec<Vec<usize>> = vec![vec![]];
            for n in &numels {
                if rule.push(*n) {
                    buckets.push(vec![]);
                }
                buckets.last_mut().unwrap_or_else(|| unreachable!()).push(*n);
            }
            prop_assert_eq!(buckets.concat(), numels);
            for bucket in buckets {
                prop_assert!(bucket.len() == 1 || bucket.iter().sum::<usize>() <= limit);
            }
        }

        #[test]
        fn shards_tile_a_chunk(numels in prop::collection::vec(0usize..40, 0..20), world in 1usize..9, alignment in 1usize..9) {
            let cuts: Vec<ShardCut> = numels.iter().map(|n| ShardCut::anywhere(*n)).collect();
            let (offsets, len) = chunk_offsets(&cuts, ShardMesh::among_all(world), alignment);
            let mut next = 0;
            for (offset, cut) in offsets.iter().zip(&cuts) {
                prop_assert!(*offset >= next && *offset < next + alignment && offset % alignment == 0);
                next = offset + cut.shard_len(world);
            }
            prop_assert_eq!(len, next);
        }
    }
}
