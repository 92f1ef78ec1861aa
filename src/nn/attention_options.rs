//! The options of attention.

use super::Sequences;
use crate::kernels::attention::AttentionRule;
use candle_core::{Result, bail};

/// How scores become probabilities, and which keys a query sees. Default: causal attention of the usual scale.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys; 1 / sqrt(width of a head) otherwise.
    pub scale: Option<f64>,
    /// Scores are bound to c tanh(score / c) for this c (Gemma 2).
    pub soft_cap: Option<f64>,
    /// The query at position q sees the keys k with q - window < k <= q, as many as the window, its own included.
    /// Otherwise all up to its own.
    pub window: Option<usize>,
    /// A query sees all positions of its sequence, also those behind it. There is no window then.
    pub bidirectional: bool,
}

impl AttentionOptions {
    /// For heads of `head` elements.
    pub(super) fn rule<'a>(&self, head: usize, sequences: Option<&'a Sequences>) -> Result<AttentionRule<'a>> {
        let above_0 = |x: Option<f64>| x.is_none_or(|x| x > 0.0 && x.is_finite());
        if !above_0(self.scale) || !above_0(self.soft_cap) || self.window == Some(0) {
            bail!("attention: scale, soft cap and window must be above 0; they are {self:?}")
        }
        if self.bidirectional && self.window.is_some() {
            bail!("attention: a window goes back from a query's position, and bidirectional attention looks both ways")
        }
        let usual = AttentionRule::causal(head);
        Ok(AttentionRule {
            scale: self.scale.map_or(usual.scale, |scale| scale as f32),
            soft_cap: self.soft_cap.map(|cap| cap as f32),
            window: self.window,
            bidirectional: self.bidirectional,
            starts: sequences.map(Sequences::starts),
        })
    }
}
