//! The rule that defines which keys a query sees and how scores become probabilities, and the tiles that follow from
//! it.

use super::shape::{AttentionShape, BAND, BLOCK, LOG2_E};

/// A rule that defines how scores become probabilities, and which keys a query sees.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRule<'a> {
    /// The factor by which the products of queries and keys are multiplied.
    pub scale: f32,
    /// The c in c * tanh(score / c), which limits scaled scores.
    pub soft_cap: Option<f32>,
    /// The window: a query sees only the keys whose distance from it is less than this number.
    pub window: Option<usize>,
    /// Whether a query also sees the positions after its own.
    pub bidirectional: bool,
    /// The starts of the sequences in each row of positions, the first at 0. Without them, a row is one sequence.
    pub starts: Option<&'a [Vec<usize>]>,
    /// The score of each query head's sink: a key without a value, which every query sees.
    pub sinks: Option<&'a [f32]>,
}

/// The parameters of [`AttentionRule::soft_cap`] that convert a product x to a score as a base-2 exponent:
/// outer * tanh(inner * x).
#[derive(Debug, Clone, Copy)]
pub struct SoftCap {
    /// The factor by which the product is multiplied.
    pub inner: f32,
    /// The factor by which the hyperbolic tangent is multiplied.
    pub outer: f32,
}

/// A sequence of `len` positions, starting at position `first`, counted over all rows of positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSpan {
    /// The index of the first position.
    pub first: usize,
    /// The number of positions.
    pub len: usize,
}

impl SequenceSpan {
    /// Returns the sizes of this sequence only.
    pub(super) fn sizes(&self, h: &AttentionShape) -> AttentionShape {
        AttentionShape { batch: 1, time: self.len, ..*h }
    }
}

/// A head of the sequence that starts at position `first`, counted over all rows of positions.
#[derive(Debug, Clone, Copy)]
pub(super) struct SequenceHead {
    pub first: usize,
    pub head: usize,
}

/// The used part of a tile. The numbers of keys and queries are multiples of [`BAND`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileShape {
    pub keys: usize,
    pub queries: usize,
    /// Whether query i sees only keys 0 to i. Otherwise, it sees all keys.
    pub diagonal: bool,
    /// A further bound on the visible keys.
    pub edge: Option<TileMaskEdge>,
}

/// A further bound on the keys that the queries of a tile see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileMaskEdge {
    /// The offset of the first visible key: query i sees keys from i + this value upward.
    pub from: isize,
    /// The offset of the first key that is no longer visible: query i sees keys before i + this value.
    pub to: isize,
    /// The number of existing keys.
    pub keys: usize,
}

impl AttentionRule<'_> {
    /// Returns a rule with one sequence per row, in which a query sees all keys up to its own, and with the usual scale
    /// for heads of `head` elements.
    pub fn causal(head: usize) -> Self {
        let scale = 1.0 / (head as f32).sqrt();
        Self { scale, soft_cap: None, window: None, bidirectional: false, starts: None, sinks: None }
    }

    /// Checks that there is a sink for each query head, if there are sinks.
    ///
    /// Panics if their number is wrong.
    pub(super) fn check_sinks(&self, h: &AttentionShape) {
        assert!(self.sinks.is_none_or(|sinks| sinks.len() == h.heads), "{h:?}: wrong number of sinks");
    }

    /// Returns the factor that converts the numbers of a tile to base-2 exponents, and the cap that is applied before
    /// it, if any.
    pub fn to_powers(self) -> (f32, Option<SoftCap>) {
        match self.soft_cap {
            Some(cap) => (1.0, Some(SoftCap { inner: self.scale / cap, outer: cap * LOG2_E })),
            None => (self.scale * LOG2_E, None),
        }
    }

    /// Returns all sequences, in order.
    ///
    /// Panics if they do not match the sizes.
    pub fn spans(&self, h: &AttentionShape) -> Vec<SequenceSpan> {
        let Some(rows) = self.starts else {
            return (0..h.batch).map(|row| SequenceSpan { first: row * h.time, len: h.time }).collect();
        };
        assert_eq!(rows.len(), h.batch, "wrong number of rows of sequences");
        let row_spans = |(row, starts): (usize, &Vec<usize>)| {
            assert!(starts.first() == Some(&0), "the first sequence of a row must begin at 0: {starts:?}");
            let ends: Vec<usize> = starts.iter().skip(1).copied().chain([h.time]).collect();
            let span = move |(start, end): (&usize, usize)| {
                assert!(*start < end, "the sequence from {start} to {end} is empty");
                SequenceSpan { first: row * h.time + start, len: end - start }
            };
            starts.iter().zip(ends).map(span).collect::<Vec<_>>()
        };
        rows.iter().enumerate().flat_map(row_spans).collect()
    }

    /// Returns the number of pairs of a query and a key visible to it, over all heads.
    pub(super) fn pairs(&self, h: &AttentionShape) -> usize {
        if h.batch * h.time == 0 {
            return 0;
        }
        let span_pairs = |SequenceSpan { len, .. }| {
            let full = self.window.map_or(len, |window| window.min(len));
            let causal_pairs = full * (full + 1) / 2 + (len - full) * full;
            // In both directions, only the pairs of a query and the key at its own position are not mirrored.
            if self.bidirectional { 2 * causal_pairs - len } else { causal_pairs }
        };
        h.heads * self.spans(h).into_iter().map(span_pairs).sum::<usize>()
    }

    /// Returns the tiles with keys that are visible to the `n` queries from position `start` on, in a sequence of
    /// `time` positions: the first key and the shape of each tile.
    pub(super) fn tiles(
        &self,
        time: usize,
        start: usize,
        n: usize,
    ) -> impl Iterator<Item = (usize, TileShape)> + use<> {
        let (queries, window, bidirectional) = (n.next_multiple_of(BAND), self.window, self.bidirectional);
        let from = window.map_or(0, |window| (start + 1).saturating_sub(window));
        let to = match (bidirectional, window) {
            (true, Some(window)) => time.min((start + n - 1).saturating_add(window)),
            (true, None) => time,
            (false, _) => start + 1,
        };
        (from / BLOCK * BLOCK..to).step_by(BLOCK).map(move |first| {
            let diagonal = !bidirectional && first == start;
            let count = if diagonal { n } else { BLOCK.min(time - first) };
            let keys = count.next_multiple_of(BAND);
            // Query `start` + i sees the keys after `start` + i - window, and in both directions those before `start` +
            // i + window.
            let query_offset = start as isize - first as isize;
            let reach = window.map(|window| window.min(time) as isize);
            let from = reach.map_or(-(BLOCK as isize), |reach| query_offset + 1 - reach);
            let to = reach.filter(|_| bidirectional).map_or(BLOCK as isize, |reach| query_offset + reach);
            let edge = from + n as isize > 1 || to < count as isize || (!diagonal && count < keys);
            (first, TileShape { keys, queries, diagonal, edge: edge.then_some(TileMaskEdge { from, to, keys: count }) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(window: Option<usize>, bidirectional: bool) -> AttentionRule<'static> {
        AttentionRule { window, bidirectional, ..AttentionRule::causal(4) }
    }

    /// Returns whether the tiles let query `q` of a sequence see key `k`, and whether a tile contains the pair.
    fn in_tiles(rule: &AttentionRule<'_>, time: usize, q: usize, k: usize) -> (bool, bool) {
        let start = q / BLOCK * BLOCK;
        let mut found = (false, false);
        for (first, s) in rule.tiles(time, start, BLOCK.min(time - start)) {
            if (first..first + s.keys).contains(&k) {
                assert!(!found.1, "tiles do not overlap");
                let (i, j) = (q - start, k - first);
                let visible = |e: TileMaskEdge| i as isize + e.from..i as isize + e.to;
                let within = s.edge.is_none_or(|e| visible(e).contains(&(j as isize)) && j < e.keys);
                found = (within && (!s.diagonal || j <= i), true);
            }
        }
        found
    }

    #[test]
    fn tiles_let_a_query_see_what_the_rule_says() {
        for time in [1, 15, 64, 65, 200] {
            for window in
                [None, Some(1), Some(12), Some(64), Some(65), Some(70), Some(199), Some(200), Some(usize::MAX)]
            {
                for bidirectional in [false, true] {
                    let rule = rule(window, bidirectional);
                    for (q, k) in (0..time).flat_map(|q| (0..time).map(move |k| (q, k))) {
                        let sees = (bidirectional || k <= q) && usize::abs_diff(q, k) < window.unwrap_or(usize::MAX);
                        let label = format!("{window:?} of {time}, in both directions: {bidirectional}: {q} {k}");
                        assert_eq!(in_tiles(&rule, time, q, k).0, sees, "{label}");
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_of_which_no_query_sees_a_key_are_not_touched() {
        let tiles =
            |window, start| rule(window, false).tiles(1000, start, BLOCK).map(|tile| tile.0).collect::<Vec<_>>();
        assert_eq!(tiles(None, 192), [0, 64, 128, 192]);
        assert_eq!(tiles(Some(64), 192), [128, 192]);
        assert_eq!(tiles(Some(65), 192), [128, 192]);
        assert_eq!(tiles(Some(66), 192), [64, 128, 192]);
        assert_eq!(tiles(Some(1), 192), [192]);
        let both_ways =
            |window, start| rule(window, true).tiles(1000, start, BLOCK).map(|tile| tile.0).collect::<Vec<_>>();
        assert_eq!(both_ways(Some(1), 192), [192]);
        assert_eq!(both_ways(Some(2), 192), [128, 192, 256]);
        assert_eq!(both_ways(Some(66), 192), [64, 128, 192, 256, 320]);
        assert_eq!(both_ways(Some(2), 960), [896, 960]);
        assert_eq!(both_ways(Some(65), 0), [0, 64]);
    }

    #[test]
    fn a_window_that_hides_nothing_leaves_no_edges() {
        for start in (0..200).step_by(BLOCK) {
            let n = BLOCK.min(200 - start);
            let tiles = |window, bidirectional| rule(window, bidirectional).tiles(200, start, n).collect::<Vec<_>>();
            assert_eq!(tiles(Some(200), false), tiles(None, false));
            assert!(tiles(None, false).iter().all(|(_, shape)| shape.edge.is_none()));
            // The last block has keys that do not exist.
            let hides = |tiles: Vec<(usize, TileShape)>| {
                tiles.iter().map(|(first, shape)| (*first, shape.edge.is_some())).collect::<Vec<_>>()
            };
            assert_eq!(hides(tiles(Some(200), true)), hides(tiles(None, true)));
        }
    }

    #[test]
    fn pairs_are_those_that_are_seen() {
        let h = AttentionShape { batch: 2, time: 10, heads: 3, kv_heads: 1, head: 4 };
        let starts = [vec![0, 4], vec![0, 1, 9]];
        let packed = |rule| AttentionRule { starts: Some(&starts), ..rule };
        assert_eq!(rule(None, false).pairs(&h), 2 * 3 * 55);
        assert_eq!(rule(Some(3), false).pairs(&h), 2 * 3 * 27);
        assert_eq!(packed(rule(None, false)).pairs(&h), 3 * (10 + 21 + 1 + 36 + 1));
        assert_eq!(packed(rule(None, true)).pairs(&h), 3 * (16 + 36 + 1 + 64 + 1));
        assert_eq!(rule(Some(3), true).pairs(&h), 2 * 3 * 44);
        assert_eq!(rule(Some(1), true).pairs(&h), 2 * 3 * 10);
    }
}
