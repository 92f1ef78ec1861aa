//! The options of root-mean-square normalization.

/// How an [`RmsNorm`](super::RmsNorm) computes. Default: as Llama's, with an eps of 1e-5.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormOptions {
    /// Added to the mean square.
    pub eps: f64,
    /// The factor is 1 + weight rather than weight, and the weight of a new layer starts at 0: Gemma's norms.
    pub plus_one: bool,
    /// x `[.., heads * width]` is normalized head by head, with one weight `[width]` for all: the norms of queries and
    /// keys.
    pub by_head: bool,
}

impl Default for RmsNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, plus_one: false, by_head: false }
    }
}
