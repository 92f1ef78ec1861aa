//! The division of sharded state among the ranks of a job: among all of them, or within groups that each hold a full
//! copy (MiCS).
//!
//! ```text
//!   a parameter of 10 elements, 4 ranks, groups of 2
//!   pieces, one per rank         0 [0 1 2]   1 [3 4 5]   2 [6 7 8]   3 [9 . .]
//!   shards, one per position     0 [0 1 2       3 4 5]   1 [6 7 8       9 . .]
//!
//!            group 0           group 1
//!   rank     0       1         2       3
//!   shard    0       1         0       1
//!   piece    0       2         1       3
//! ```
//!
//! The data-parallel world consists of all ranks: batches, means and sums extend over it. A rank holds the shard that
//! corresponds to its position in its group. All ranks with the same position in their groups hold the same shard, and
//! each of them is responsible for one piece of the shard: it sums the piece's squares for the gradient norm and saves
//! the piece. The pieces are the shards of a job without groups, so the same numbers are added up in the same order.
//! Without groups, a shard is a piece.
//!
//! With expert parallelism, the parameters of an expert are divided among the ranks that hold it, as if there were no
//! others ([`ShardMesh::of`]).

use super::shard::ShardCut;
use crate::util::counted;
use std::ops::Range;

/// The division of sharded state among the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardMesh {
    world_size: usize,
    shards: usize,
}

impl ShardMesh {
    /// Divides state among all ranks: nothing is stored twice.
    pub fn among_all(world_size: usize) -> Self {
        Self { world_size, shards: world_size }
    }

    /// Divides state within each group of `shards` neighbouring ranks.
    ///
    /// # Panics
    /// Panics if the groups would not have the same number of ranks.
    pub fn in_groups(world_size: usize, shards: usize) -> Self {
        assert!(
            shards > 0 && world_size.is_multiple_of(shards),
            "{} cannot be divided into groups of {shards}",
            counted(world_size, "rank")
        );
        Self { world_size, shards }
    }

    /// Returns the total number of ranks.
    pub fn world_size(self) -> usize {
        self.world_size
    }

    /// Returns the number of ranks in a group: the number of shards that a parameter is cut into.
    pub fn shards(self) -> usize {
        self.shards
    }

    /// Returns the number of groups, which is the number of ranks that hold the same shard.
    pub fn copies(self) -> usize {
        self.world_size / self.shards
    }

    /// Returns the mesh that divides state into pieces.
    #[must_use]
    pub fn pieces(self) -> Self {
        Self::among_all(self.world_size)
    }

    /// Returns the mesh of the ranks that hold a parameter: this one, or that of an expert's ranks.
    #[must_use]
    pub fn of(self, cut: ShardCut) -> Self {
        cut.expert.map_or(self, |expert| Self::among_all(self.world_size / expert.size))
    }

    /// Returns the index of `rank` among the ranks that hold a parameter. `rank` must be one of them.
    pub fn number_of(self, cut: ShardCut, rank: usize) -> usize {
        cut.expert.map_or(rank, |expert| rank / expert.size)
    }

    /// Returns the shard that `rank` holds.
    pub fn shard_of(self, rank: usize) -> usize {
        rank % self.shards
    }

    /// Returns the piece of its shard for which `rank` is responsible.
    pub fn piece_of(self, rank: usize) -> usize {
        self.shard_of(rank) * self.copies() + rank / self.shards
    }

    /// Returns the pieces of a shard.
    pub fn pieces_of(self, shard: usize) -> Range<usize> {
        shard * self.copies()..(shard + 1) * self.copies()
    }

    /// Returns the number of elements of every shard of a parameter, including padding. For this and the next two
    /// methods, `self` must be the mesh of the ranks that hold the parameter.
    pub fn shard_len(self, cut: ShardCut) -> usize {
        cut.among_holders().shard_len(self.world_size) * self.copies()
    }

    /// Returns the elements of a shard, without padding: the last shards may have fewer elements than the others, or
    /// none.
    pub fn shard(self, cut: ShardCut, shard: usize) -> Range<usize> {
        let (pieces, cut) = (self.pieces_of(shard), cut.among_holders());
        cut.shard(self.world_size, pieces.start).start..cut.shard(self.world_size, pieces.end - 1).end
    }

    /// Returns the elements of a piece, without padding: the last pieces may have fewer elements than the others, or
    /// none.
    pub fn piece(self, cut: ShardCut, piece: usize) -> Range<usize> {
        cut.among_holders().shard(self.world_size, piece)
    }

    /// Sorts one value per rank into the order of the ranks' pieces.
    pub fn by_piece<T>(self, values: Vec<T>) -> Vec<T> {
        let mut all: Vec<(usize, T)> = values.into_iter().enumerate().collect();
        all.sort_by_key(|(rank, _)| self.piece_of(*rank));
        all.into_iter().map(|(_, value)| value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn four_ranks_in_groups_of_two() {
        let mesh = ShardMesh::in_groups(4, 2);
        let cut = ShardCut::anywhere(10);
        let positions: Vec<_> = (0..4).map(|rank| (mesh.shard_of(rank), mesh.piece_of(rank))).collect();
        assert_eq!(positions, [(0, 0), (1, 2), (0, 1), (1, 3)]);
        assert_eq!([0, 1].map(|shard| mesh.shard(cut, shard)), [0..6, 6..10]);
        assert_eq!([0, 1, 2, 3].map(|piece| mesh.piece(cut, piece)), [0..3, 3..6, 6..9, 9..10]);
        assert_eq!(mesh.by_piece(vec![0, 1, 2, 3]), [0, 2, 1, 3]);
    }

    proptest! {
        #[test]
        fn each_group_has_all_and_each_piece_one_rank_that_holds_it(
            numel in 0usize..2000, block in 1usize..40, shards in 1usize..9, copies in 1usize..5,
        ) {
            let (mesh, cut) = (ShardMesh::in_groups(shards * copies, shards), ShardCut { block, ..ShardCut::anywhere(numel) });
            prop_assert_eq!((mesh.shards(), mesh.copies()), (shards, copies));
            let mut next = 0;
            for shard in 0..shards {
                let range = mesh.shard(cut, shard);
                prop_assert!(range.start == next && range.len() <= mesh.shard_len(cut));
                prop_assert!(range.start.is_multiple_of(block) || range.start == numel);
                next = range.end;
            }
            prop_assert_eq!(next, numel);
            let mut pieces: Vec<usize> = (0..shards * copies).map(|rank| mesh.piece_of(rank)).collect();
            for (rank, piece) in pieces.iter().enumerate() {
                let (piece_range, shard_range) = (mesh.piece(cut, *piece), mesh.shard(cut, mesh.shard_of(rank)));
                prop_assert!(shard_range.start <= piece_range.start && piece_range.end <= shard_range.end);
                prop_assert!(mesh.pieces_of(mesh.shard_of(rank)).contains(piece));
            }
            prop_assert_eq!(mesh.by_piece(pieces.clone()), (0..shards * copies).collect::<Vec<_>>());
            pieces.sort_unstable();
            prop_assert_eq!(pieces, (0..shards * copies).collect::<Vec<_>>());
            let all = ShardMesh::among_all(shards * copies);
            prop_assert_eq!(all.shard_len(cut), cut.shard_len(shards * copies));
            prop_assert_eq!(all.shard(cut, shards), all.piece(cut, shards));
        }
    }
}
