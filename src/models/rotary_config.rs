//! The rotary positions of a block.

use crate::nn::frequencies::{self, Llama3RopeScaling};
use candle_core::Result;

/// How positions turn queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryConfig {
    /// Base of the wavelengths.
    pub theta: f64,
    /// How the frequencies that follow from it are slowed.
    pub scaling: RotaryScaling,
}

/// How rotary frequencies are slowed, for contexts longer than those of the first training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// All by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Slow ones more than fast ones.
    Llama3(Llama3RopeScaling),
}

impl Default for RotaryConfig {
    /// theta 10000, not slowed.
    fn default() -> Self {
        Self { theta: 1e4, scaling: RotaryScaling::None }
    }
}

impl RotaryConfig {
    /// The frequencies of the pairs of a head of `head` elements, in radians a position.
    ///
    /// # Errors
    /// An odd head, numbers that are not above 0.
    pub fn frequencies(&self, head: usize) -> Result<Vec<f64>> {
        let plain = frequencies::default(head, self.theta)?;
        match &self.scaling {
            RotaryScaling::None => Ok(plain),
            RotaryScaling::Linear { factor } => frequencies::linear(&plain, *factor),
            RotaryScaling::Llama3(scaling) => frequencies::llama3(&plain, scaling),
        }
    }
}
