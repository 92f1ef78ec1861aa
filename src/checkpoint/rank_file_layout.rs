//! The position of each element of each state in the files: pure arithmetic over the manifest's parameters.
//!
//! ```text
//!   rank_00001_of_00004.safetensors
//!     header      8 + header bytes, a multiple of 4096
//!     fp32        this rank's shard of every parameter, in order, without padding
//!     exp_avg     the same
//!     exp_avg_sq  the same
//! ```
//!
//! A parameter that does not have all states (with Muon, matrices have one state and other parameters two) has no
//! elements in the sections of the states that it lacks.
//!
//! A factored state has its own number of elements, which are divided among the files like those of a parameter.
//!
//! A rank saves the same elements at every stage, so the files of a checkpoint do not depend on the stage.
//!
//! In a pipeline, the files of the ranks at its first position come first, then those of the second, and so on. A file
//! has only the parameters of its position, each divided among the files of that position.
//!
//! With expert parallelism, the parameters of an expert are in the files of the ranks that hold the expert.

use crate::layout::ShardCut;
use std::collections::BTreeMap;
use std::ops::Range;

/// The number of bytes per checksum.
pub(super) const BLOCK: usize = 1 << 20;

/// The alignment of the data in the file, in bytes.
pub(super) const PAGE: usize = 4096;

/// The layout of the files.
#[derive(Debug, Clone)]
pub(super) struct RankFileLayout {
    pub world_size: usize,
    /// The number of ranks along the pipeline; 1 without a pipeline.
    pub pipeline_ranks: usize,
    /// The position in the pipeline of the ranks that save each parameter.
    pub positions: Vec<usize>,
    /// The division of each parameter into shards.
    pub cuts: Vec<ShardCut>,
    /// For each state and parameter, whether the parameter has the state.
    pub states: Vec<Vec<bool>>,
    /// The number of elements of each state of each parameter, if it differs from that of the parameter.
    pub lens: BTreeMap<(usize, usize), usize>,
}

/// A part of a saved parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SavedPiece {
    /// The rank whose file contains it.
    pub rank: usize,
    /// The byte range in that file's data.
    pub bytes: Range<u64>,
    /// The range of elements of the parameter.
    pub elements: Range<usize>,
}

impl RankFileLayout {
    /// Returns the elements of a state of parameter `param` that the file of `rank` contains.
    pub fn shard(&self, state: usize, param: usize, rank: usize) -> Range<usize> {
        let pieces = self.world_size / self.pipeline_ranks;
        if self.states[state][param] && self.is_in(param, rank) {
            let state_cut = self.lens.get(&(state, param)).map(|len| ShardCut::anywhere(*len));
            state_cut.unwrap_or(self.cuts[param]).shard(pieces, rank % pieces)
        } else {
            0..0
        }
    }

    /// Returns whether the file of `rank` contains a part of parameter `param`, which may be empty.
    pub fn is_in(&self, param: usize, rank: usize) -> bool {
        self.positions[param] == rank / (self.world_size / self.pipeline_ranks)
    }

    /// Returns the number of data bytes in `rank`'s file.
    pub fn bytes(&self, rank: usize) -> u64 {
        self.ends(rank).last().unwrap_or(0)
    }

    /// Returns the end of every parameter's shard in the file of `rank`, for the first state, then for the second, and
    /// so on.
    fn ends(&self, rank: usize) -> impl Iterator<Item = u64> {
        let all = (0..self.states.len()).flat_map(|state| (0..self.cuts.len()).map(move |param| (state, param)));
        all.scan(0u64, move |at, (state, param)| {
            *at += self.shard(state, param, rank).len() as u64 * 4;
            Some(*at)
        })
    }
}

/// The start positions in the files of all ranks.
#[derive(Debug)]
pub(super) struct RankFileOffsets {
    layout: RankFileLayout,
    /// For each rank, the first byte of every parameter's shard, for the first state, then for the second, and so on.
    starts: Vec<Vec<u64>>,
}

impl RankFileOffsets {
    pub fn new(layout: RankFileLayout) -> Self {
        let starts = (0..layout.world_size).map(|rank| std::iter::once(0).chain(layout.ends(rank)).collect()).collect();
        Self { layout, starts }
    }

    /// Returns the pieces of elements `range` of a parameter, in order.
    pub fn pieces(&self, state: usize, param: usize, range: Range<usize>) -> impl Iterator<Item = SavedPiece> + '_ {
        (0..self.layout.world_size).filter_map(move |rank| {
            let shard = self.layout.shard(state, param, rank);
            let elements = shard.start.max(range.start)..shard.end.min(range.end);
            if elements.is_empty() {
                return None;
            }
            let first = self.starts[rank][state * self.layout.cuts.len() + param];
            let at = |element: usize| first + (element - shard.start) as u64 * 4;
            Some(SavedPiece { rank, bytes: at(elements.start)..at(elements.end), elements })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::ExpertPlacement;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_a_range_once_and_places_never_overlap(
            numels in prop::collection::vec((0usize..50, 1usize..9, 0usize..3), 1..8), pieces in 1usize..6,
            pipeline_ranks in 1usize..4,
            has in prop::collection::vec(prop::collection::vec(any::<bool>(), 8), 1..4),
            own_len in (0usize..4, 0usize..8, 0usize..60),
        ) {
            let states: Vec<Vec<bool>> = has.iter().map(|has| has[..numels.len()].to_vec()).collect();
            let cuts = numels.iter().map(|(numel, block, position)| {
                let size = if pieces % 2 == 0 { 2 } else { 1 };
                let expert = (position % 2 == 0).then(|| ExpertPlacement { position: numel % size, size });
                ShardCut { numel: *numel, block: *block, expert }
            }).collect();
            let positions = numels.iter().map(|(_, _, position)| position % pipeline_ranks).collect();
            let world_size = pieces * pipeline_ranks;
            let lens = BTreeMap::from([((own_len.0, own_len.1), own_len.2)]);
            let layout = RankFileLayout { world_size, pipeline_ranks, positions, cuts, states: states.clone(), lens: lens.clone() };
            let offsets = RankFileOffsets::new(layout.clone());
            let mut used: Vec<Vec<u8>> = (0..world_size).map(|rank| vec![0; layout.bytes(rank) as usize]).collect();
            for (state, has) in states.iter().enumerate() {
                for (param, (numel, ..)) in numels.iter().enumerate() {
                    let mut next = 0;
                    let numel = lens.get(&(state, param)).unwrap_or(numel);
                    for piece in offsets.pieces(state, param, 0..*numel) {
                        prop_assert_eq!(piece.elements.start, next);
                        prop_assert_eq!(piece.bytes.end - piece.bytes.start, piece.elements.len() as u64 * 4);
                        next = piece.elements.end;
                        used[piece.rank][piece.bytes.start as usize..piece.bytes.end as usize].iter_mut().for_each(|b| *b += 1);
                    }
                    prop_assert_eq!(next, if has[param] { *numel } else { 0 });
                }
            }
            prop_assert!(used.iter().flatten().all(|count| *count == 1));
        }
    }
}
