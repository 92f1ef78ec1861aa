//! How a buffer is split: what of it travels in one exchange, and who gives which part to whom.

use super::exchange::Exchange;
use crate::error::CommError;
use crate::precision::Flat;
use std::ops::Range;

/// Ranges of at most `step` elements that cover `len`; one empty range for an empty buffer, so that every collective
/// meets its peers at least once.
pub(super) fn pieces(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(step).max(1);
    (0..count).map(move |i| i * step..((i + 1) * step).min(len))
}

/// The ranks but `rank`, counted.
pub(super) fn others(world: usize, rank: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..world).filter(move |r| *r != rank).zip(0..)
}

/// The group of `ranks` neighbours that a rank belongs to.
pub(super) fn group(rank: usize, ranks: usize) -> Range<usize> {
    let first = rank / ranks * ranks;
    first..first + ranks
}

/// The shards of a group, of `len` elements each, out of those of all ranks.
pub(super) fn of_group(mut whole: Flat, group: Range<usize>, len: usize) -> Flat {
    let bytes = len * whole.dtype().size_in_bytes();
    whole.as_bytes_mut().copy_within(group.start * bytes..group.end * bytes, 0);
    whole.truncate(group.len() * len);
    whole
}

/// Publishes a piece of `bytes` for each peer, one after the other: `write` makes that of a rank.
pub(super) fn give_each(
    ex: &mut Exchange,
    bytes: usize,
    mut write: impl FnMut(usize, &mut [u8]),
) -> Result<(), CommError> {
    let (world, rank) = (ex.size(), ex.rank());
    ex.piece(bytes * (world - 1), |slot| {
        others(world, rank).for_each(|(r, place)| write(r, &mut slot[place * bytes..(place + 1) * bytes]));
    })
}

/// The bytes that the peers gave to this rank in [`give_each`], in rank order; `exact` bytes each as it is in memory.
pub(super) fn given(ex: &Exchange, bytes: usize, exact: usize) -> impl Iterator<Item = &[u8]> {
    let (world, rank) = (ex.size(), ex.rank());
    // Among the others, as rank r counts them.
    let place = move |r: usize| if rank < r { rank } else { rank - 1 };
    others(world, rank).map(move |(r, _)| ex.coded(r, place(r) * bytes, bytes, exact))
}
