//! The sizes of an attention operation and of its tiles.

/// The number of queries, and of keys, in a tile.
pub(super) const BLOCK: usize = 64;
/// The number of keys or queries in a band, which is the number of lanes of the widest vectors. Tiles on the diagonal
/// are split into bands.
pub(super) const BAND: usize = 16;
/// The number of words in a tile of scores.
pub(super) const TILE: usize = BLOCK * BLOCK;
/// log2(e). Scores are also scaled by it, so that probabilities are powers of 2.
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The sizes of an attention operation.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    /// The number of rows of positions. Each contains one or more sequences.
    pub batch: usize,
    /// The number of positions in a row.
    pub time: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads, which divides `heads`. Query head h uses key head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// The number of elements in one head's vector.
    pub head: usize,
}

impl AttentionShape {
    /// Returns the number of query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Panics unless the slices fit the sizes.
    pub(super) fn check(&self, out: usize, lse: usize) {
        assert!(self.kv_heads > 0 && self.head > 0 && self.heads.is_multiple_of(self.kv_heads), "{self:?}");
        assert_eq!(
            out,
            self.batch * self.time * self.heads * self.head,
            "{self:?}: wrong number of elements of the result"
        );
        assert_eq!(lse, self.batch * self.heads * self.time, "{self:?}: wrong number of rows of log-sum-exp");
    }
}
