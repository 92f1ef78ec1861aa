//! The options of attention.

use super::Sequences;
use crate::kernels::attention::AttentionRule;
use candle_core::{Result, bail};

/// The options of attention: how scores become probabilities, and which keys a query sees. The default is causal
/// attention with the usual scale.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttentionOptions {
    /// The factor applied to the products of queries and keys; without it, 1 / sqrt(width of a head).
    pub scale: Option<f64>,
    /// The soft cap c of scores: they are mapped to c tanh(score / c) (Gemma 2).
    pub soft_cap: Option<f64>,
    /// The window: the query at position q sees the keys k with q - window < k <= q, that is, at most as many keys as
    /// the window is long, including the key at q. Without a window, the query sees all keys up to the one at q.
    pub window: Option<usize>,
    /// Whether a query also sees later positions: all positions of its sequence, or, with a window, the keys k with
    /// |q - k| < window (ModernBERT's local attention).
    pub bidirectional: bool,
}

impl AttentionOptions {
    /// Returns the attention rule for heads of `head` elements.
    pub(super) fn rule<'a>(&self, head: usize, sequences: Option<&'a Sequences>) -> Result<AttentionRule<'a>> {
        let is_positive = |x: Option<f64>| x.is_none_or(|x| x > 0.0 && x.is_finite());
        if !is_positive(self.scale) || !is_positive(self.soft_cap) || self.window == Some(0) {
            bail!("attention: scale, soft cap and window must be positive and finite; they are {self:?}")
        }
        let default = AttentionRule::causal(head);
        Ok(AttentionRule {
            scale: self.scale.map_or(default.scale, |scale| scale as f32),
            soft_cap: self.soft_cap.map(|cap| cap as f32),
            window: self.window,
            bidirectional: self.bidirectional,
            starts: sequences.map(Sequences::starts),
            sinks: None,
        })
    }
}
