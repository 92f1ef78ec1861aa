//! The options of normalization layers.

/// The options of an [`RmsNorm`](super::RmsNorm). The default is Llama's norm with an eps of 1e-5.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormOptions {
    /// The number added to the mean square.
    pub eps: f64,
    /// Whether the factor is 1 + weight rather than weight, as in Gemma's norms. The weight of a new layer then starts
    /// at 0.
    pub plus_one: bool,
    /// Whether x `[.., heads * width]` is normalized head by head, with one weight `[width]` for all heads, as in the
    /// norms of queries and keys.
    pub by_head: bool,
}

impl Default for RmsNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, plus_one: false, by_head: false }
    }
}

/// The options of a [`LayerNorm`](super::LayerNorm). The default is GPT-2's norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormOptions {
    /// The number added to the variance.
    pub eps: f64,
    /// Whether the factor is 1 + weight rather than weight, as in Nemotron's norms. The weight of a new layer then
    /// starts at 0.
    pub plus_one: bool,
    /// Whether there is a bias.
    pub bias: bool,
}

impl Default for LayerNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, plus_one: false, bias: true }
    }
}
