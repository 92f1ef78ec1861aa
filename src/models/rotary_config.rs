//! The rotary positions of a block.

use crate::nn::frequencies::{self, Llama3RopeScaling};
use candle_core::Result;

/// The settings of a block's rotary positions, which rotate queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryConfig {
    /// The base of the wavelengths.
    pub theta: f64,
    /// The scaling of the frequencies that follow from the base.
    pub scaling: RotaryScaling,
}

/// The scaling that slows rotary frequencies, for contexts longer than those of the original training.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// No scaling.
    None,
    /// All frequencies are slowed by the same factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Slow frequencies are slowed more than fast ones.
    Llama3(Llama3RopeScaling),
}

impl Default for RotaryConfig {
    /// Returns theta 10000 without scaling.
    fn default() -> Self {
        Self { theta: 1e4, scaling: RotaryScaling::None }
    }
}

impl RotaryConfig {
    /// Returns the frequencies of the pairs in a head of `head` elements, in radians per position.
    ///
    /// # Errors
    /// An odd head size, or a number that is not above 0.
    pub fn frequencies(&self, head: usize) -> Result<Vec<f64>> {
        let plain = frequencies::default(head, self.theta)?;
        match &self.scaling {
            RotaryScaling::None => Ok(plain),
            RotaryScaling::Linear { factor } => frequencies::linear(&plain, *factor),
            RotaryScaling::Llama3(scaling) => frequencies::llama3(&plain, scaling),
        }
    }
}
