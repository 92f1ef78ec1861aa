//! The division of a buffer: the part sent in one exchange, and the part that each rank sends to every other rank.

use super::exchange::ShmExchange;
use crate::error::CommError;
use crate::precision::Flat;
use std::ops::Range;

/// Returns ranges of at most `step` elements that together cover `len` elements. For an empty buffer, returns one empty
/// range, so that the ranks of every collective meet at least once.
pub(in crate::comm) fn pieces(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(step).max(1);
    (0..count).map(move |i| i * step..((i + 1) * step).min(len))
}

/// Returns the ranks other than `rank`, each with its index among them.
pub(in crate::comm) fn others(world: usize, rank: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..world).filter(move |r| *r != rank).zip(0..)
}

/// Ranks that gather among themselves: every `step`-th rank from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) struct StridedRanks {
    first: usize,
    step: usize,
    count: usize,
}

impl StridedRanks {
    pub(in crate::comm) fn all(world: usize) -> Self {
        Self { first: 0, step: 1, count: world }
    }

    /// Returns the group of `ranks` consecutive ranks to which a rank belongs.
    pub(in crate::comm) fn neighbours(rank: usize, ranks: usize) -> Self {
        Self { first: rank / ranks * ranks, step: 1, count: ranks }
    }

    /// Returns the ranks that have the same position as `rank` in their groups of `ranks` consecutive ranks.
    pub(in crate::comm) fn across(rank: usize, ranks: usize, world: usize) -> Self {
        Self { first: rank % ranks, step: ranks, count: world / ranks }
    }

    /// Returns the number of ranks.
    pub(in crate::comm) fn len(self) -> usize {
        self.count
    }

    pub(in crate::comm) fn ranks(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |position| self.first + position * self.step)
    }

    /// Returns the position of `rank` among these ranks.
    pub(in crate::comm) fn position(self, rank: usize) -> usize {
        (rank - self.first) / self.step
    }
}

/// Extracts the shards of a group, of `len` elements each, from `gathered`, which contains the shards of all ranks.
pub(in crate::comm) fn extract_group(mut gathered: Flat, group: StridedRanks, len: usize) -> Flat {
    let bytes = len * gathered.dtype().size_in_bytes();
    for (position, rank) in group.ranks().enumerate() {
        gathered.as_bytes_mut().copy_within(rank * bytes..(rank + 1) * bytes, position * bytes);
    }
    gathered.truncate(group.len() * len);
    gathered
}

/// Sorts the chunks of `input`, one for each of `world` ranks, into rank order. On entry, the chunks of ranks with the
/// same position in groups of `ranks` consecutive ranks are adjacent.
pub(in crate::comm) fn sort_chunks_by_rank(input: &mut Flat, ranks: usize, world: usize) {
    let (copies, bytes) = (world / ranks, input.size_in_bytes() / world);
    if ranks == 1 || copies == 1 || bytes == 0 {
        return;
    }
    let chunk = |chunk: usize| chunk * bytes..(chunk + 1) * bytes;
    // The current position of each rank's chunk.
    let mut from: Vec<usize> = (0..world).map(|rank| rank % ranks * copies + rank / ranks).collect();
    let (all, mut first) = (input.as_bytes_mut(), vec![0; bytes]);
    for start in 0..world {
        if from[start] == start {
            continue;
        }
        // Follow a cycle: each chunk moves to the position that has become free.
        first.copy_from_slice(&all[chunk(start)]);
        let mut to = start;
        loop {
            let next = std::mem::replace(&mut from[to], to);
            if next == start {
                all[chunk(to)].copy_from_slice(&first);
                break;
            }
            all.copy_within(chunk(next), chunk(to).start);
            to = next;
        }
    }
}

/// Publishes one piece that contains `bytes` bytes for each peer, in rank order; `write` writes one peer's bytes.
pub(in crate::comm) fn send_to_peers(
    ex: &mut ShmExchange,
    bytes: usize,
    mut write: impl FnMut(usize, &mut [u8]),
) -> Result<(), CommError> {
    let (world, rank) = (ex.size(), ex.rank());
    ex.piece(bytes * (world - 1), |slot| {
        others(world, rank).for_each(|(r, index)| write(r, &mut slot[index * bytes..(index + 1) * bytes]));
    })
}

/// Returns the bytes that the peers gave to this rank in [`send_to_peers`], in rank order. Each part would
/// be `exact` bytes long if it were not encoded.
pub(in crate::comm) fn received_from_peers(
    ex: &ShmExchange,
    bytes: usize,
    exact: usize,
) -> impl Iterator<Item = &[u8]> {
    let (world, rank) = (ex.size(), ex.rank());
    // This rank's index among the others, as rank r counts them.
    let index_at = move |r: usize| if rank < r { rank } else { rank - 1 };
    others(world, rank).map(move |(r, _)| ex.coded(r, index_at(r) * bytes, bytes, exact))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_come_into_the_order_of_ranks() {
        for (ranks, copies, len) in [(1, 4, 3), (4, 1, 3), (2, 2, 1), (3, 2, 5), (2, 3, 4), (4, 3, 2), (2, 2, 0)] {
            let world = ranks * copies;
            let value = |chunk: usize, i: usize| (chunk * len + i) as f32;
            let mut flat = Flat::from((0..world * len).map(|i| i as f32).collect::<Vec<_>>());
            sort_chunks_by_rank(&mut flat, ranks, world);
            for rank in 0..world {
                let group = StridedRanks::across(rank, ranks, world);
                let chunk = rank % ranks * copies + group.position(rank);
                let expected: Vec<f32> = (0..len).map(|i| value(chunk, i)).collect();
                assert_eq!(
                    flat.slice(rank * len..(rank + 1) * len).to_flat(),
                    Flat::from(expected),
                    "{ranks} x {copies}"
                );
            }
        }
    }

    #[test]
    fn groups_and_what_lies_across_them_meet_in_one_rank() {
        for rank in 0..12 {
            let (group, across) = (StridedRanks::neighbours(rank, 3), StridedRanks::across(rank, 3, 12));
            assert_eq!((group.len(), across.len()), (3, 4));
            assert_eq!(group.ranks().filter(|r| across.ranks().any(|a| a == *r)).collect::<Vec<_>>(), [rank]);
            assert_eq!((group.position(rank), across.position(rank)), (rank % 3, rank / 3));
        }
    }
}
