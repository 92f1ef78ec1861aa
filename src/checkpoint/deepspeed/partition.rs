//! The position of a parameter in the data that the ranks saved: integer arithmetic only.
//!
//! ```text
//! stages 1, 2   one flat space per parameter group, cut into one part per rank
//!
//!               | wte           | wpe      | ln   | ... | padding |
//!               |   rank 0           |   rank 1                   |
//!
//! stage 3       each parameter is cut into one piece per rank, ceil(elements / ranks) long; a rank's pieces are
//!               concatenated
//!
//!      rank 0   | wte 0..a      | wpe 0..b      | ... |
//!      rank 1   | wte a..end, . | wpe b..end, . | ... |        . padding, which can have any value
//! ```

use crate::layout::shard_len;
use std::ops::Range;

/// A range of elements in one of several tensors.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorRange {
    pub tensor: usize,
    pub range: Range<usize>,
}

/// Returns the ranges in tensors of these lengths that form elements `range` of their concatenation.
pub(super) fn cut(lengths: &[usize], range: Range<usize>) -> Vec<TensorRange> {
    let mut pieces = vec![];
    let mut start = 0;
    for (tensor, length) in lengths.iter().enumerate() {
        let end = start + length;
        let (first, last) = (range.start.max(start), range.end.min(end));
        if first < last {
            pieces.push(TensorRange { tensor, range: first - start..last - start });
        }
        start = end;
    }
    pieces
}

/// Returns the ranks that hold elements `range` of a parameter with `elements` elements at stage 3, and the ranges
/// within the ranks' own elements.
pub(super) fn ranks_of(elements: usize, world_size: usize, range: Range<usize>) -> Vec<(usize, Range<usize>)> {
    let length = shard_len(elements, world_size);
    let mut pieces = vec![];
    let mut first = range.start;
    while first < range.end {
        let rank = first / length;
        let start = rank * length;
        let end = range.end.min(start + length);
        pieces.push((rank, first - start..end - start));
        first = end;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_parameter_straddles_ranks() {
        let expected = [TensorRange { tensor: 0, range: 8..10 }, TensorRange { tensor: 2, range: 0..3 }];
        assert_eq!(cut(&[10, 0, 5], 8..13), expected);
    }

    #[test]
    fn padding_belongs_to_no_range() {
        // 5 elements on 4 ranks: 2 on the first, 2 on the second, 1 and padding on the third, only padding on the last.
        assert_eq!(ranks_of(5, 4, 0..5), [(0, 0..2), (1, 0..2), (2, 0..1)]);
        assert_eq!(ranks_of(5, 4, 3..4), [(1, 1..2)]);
        assert_eq!(ranks_of(0, 4, 0..0), []);
    }

    proptest! {
        #[test]
        fn pieces_are_the_range(lengths in proptest::collection::vec(0..20usize, 0..6), a in 0..100usize, b in 0..100usize) {
            let all: Vec<_> = lengths.iter().enumerate().flat_map(|(t, l)| (0..*l).map(move |i| (t, i))).collect();
            let (a, b) = (a.min(b).min(all.len()), a.max(b).min(all.len()));
            let found: Vec<_> =
                cut(&lengths, a..b).into_iter().flat_map(|p| p.range.map(move |i| (p.tensor, i))).collect();
            prop_assert_eq!(found, &all[a..b]);
        }

        #[test]
        fn ranks_hold_each_element_once(elements in 0..200usize, world_size in 1..9usize, a in 0..200usize, b in 0..200usize) {
            let (a, b) = (a.min(b).min(elements), a.max(b).min(elements));
            let length = shard_len(elements, world_size);
            let found: Vec<_> = ranks_of(elements, world_size, a..b)
                .into_iter()
                .flat_map(|(rank, range)| range.map(move |i| rank * length + i))
                .collect();
            prop_assert_eq!(found, (a..b).collect::<Vec<_>>());
        }
    }
}
