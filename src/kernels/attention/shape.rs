//! The sizes of an attention and of its tiles.

/// Queries and keys of a tile.
pub(super) const BLOCK: usize = 64;
/// Tiles on the diagonal are cut into bands of this many keys or queries, one vector of f32.
pub(super) const BAND: usize = 16;
/// Words of a tile of scores.
pub(super) const TILE: usize = BLOCK * BLOCK;
/// log2(e): scores are scaled by it too, so that probabilities are powers of 2.
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The sizes of an attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    /// Rows of positions, each a sequence or several.
    pub batch: usize,
    /// Positions of a row.
    pub time: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. Query head h uses key head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Elements of one head's vector.
    pub head: usize,
}

impl AttentionShape {
    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Panics unless the slices fit the sizes.
    pub(super) fn check(&self, out: usize, lse: usize) {
        assert!(self.kv_heads > 0 && self.head > 0 && self.heads.is_multiple_of(self.kv_heads), "{self:?}");
        assert_eq!(out, self.batch * self.time * self.heads * self.head, "{self:?}: elements of the result");
        assert_eq!(lse, self.batch * self.heads * self.time, "{self:?}: rows of log-sum-exp");
    }
}
