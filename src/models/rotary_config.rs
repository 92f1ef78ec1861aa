//! The rotary positions of a block.

use super::config_checks::invalid_field;
use crate::nn::frequencies::{self, Llama3RopeScaling, YarnRopeScaling};
use crate::nn::{Rotary, RotaryLayout, RotaryPairs};
use crate::util::counted;
use candle_core::Result;
use std::sync::Arc;

/// The settings of a block's rotary positions, which rotate queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryConfig {
    /// The base of the wavelengths.
    pub theta: f64,
    /// The scaling of the frequencies that follow from the base.
    pub scaling: RotaryScaling,
    /// The fraction of a head's elements that is rotated, beginning with the first element.
    pub partial_rotary_factor: f64,
    /// The growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
}

/// The scaling that reduces rotary frequencies, for contexts longer than those of the original training.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// No scaling.
    None,
    /// All frequencies are divided by the same factor.
    Linear {
        /// The divisor of the frequencies.
        factor: f64,
    },
    /// Low frequencies are reduced, and high ones are unchanged. The bounds between them are given as numbers of turns
    /// (full rotations) in the original context.
    Llama3(Llama3RopeScaling),
    /// Low frequencies are reduced, and high ones are unchanged. Attention scores grow.
    Yarn(YarnScaling),
    /// The base grows with the length of inputs that are longer than `original`.
    Dynamic {
        /// The factor by which the context is extended.
        factor: f64,
        /// The context length in tokens before it was extended.
        original: usize,
    },
    /// Each frequency has its own divisor. Attention scores grow.
    LongRope(Arc<LongRopeScaling>),
}

/// The parameters of [`RotaryScaling::Yarn`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// The parameters of the frequencies.
    pub frequencies: YarnRopeScaling,
    /// The factor by which both rotated queries and rotated keys are multiplied.
    pub attention_factor: f64,
}

/// The parameters of [`RotaryScaling::LongRope`].
#[derive(Debug, Clone, PartialEq)]
pub struct LongRopeScaling {
    /// The divisors of the frequencies, for inputs of at most `original` positions.
    pub short: Vec<f64>,
    /// The divisors of the frequencies, for longer inputs.
    pub long: Vec<f64>,
    /// The context length in tokens before it was extended.
    pub original: usize,
    /// The factor by which both rotated queries and rotated keys are multiplied.
    pub attention_factor: f64,
}

/// The growth of queries with their position: those at position t are multiplied by 1 + beta ln(1 + floor(t /
/// original)) (Ministral 3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// The factor of the logarithm.
    pub beta: f64,
    /// The context length in tokens before it was extended.
    pub original: usize,
}

impl QueryGrowth {
    /// Returns the factor at a position.
    pub fn at(&self, position: usize) -> f64 {
        1.0 + self.beta * ((position / self.original.max(1)) as f64).ln_1p()
    }
}

impl Default for RotaryConfig {
    /// Returns theta 10000 without scaling, for complete heads.
    fn default() -> Self {
        Self { theta: 1e4, scaling: RotaryScaling::None, partial_rotary_factor: 1.0, query_growth: None }
    }
}

impl RotaryConfig {
    /// Returns the frequencies of the pairs that are rotated in a head of `head` elements, for an input of `length`
    /// positions, in radians per position.
    ///
    /// # Errors
    /// An odd number of elements, a number that is not above 0, or factors that do not match the pairs.
    pub fn frequencies(&self, head: usize, length: usize) -> Result<Vec<f64>> {
        let width = self.width(head);
        match &self.scaling {
            RotaryScaling::None => frequencies::default(width, self.theta),
            RotaryScaling::Linear { factor } => frequencies::linear(&frequencies::default(width, self.theta)?, *factor),
            RotaryScaling::Llama3(scaling) => frequencies::llama3(&frequencies::default(width, self.theta)?, scaling),
            RotaryScaling::Yarn(scaling) => frequencies::yarn(width, self.theta, &scaling.frequencies),
            RotaryScaling::Dynamic { factor, original } => {
                frequencies::dynamic(width, self.theta, *factor, *original, length)
            }
            RotaryScaling::LongRope(scaling) => frequencies::longrope(width, self.theta, scaling.factors(length)),
        }
    }

    /// Returns the factor by which both rotated queries and rotated keys are multiplied.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RotaryScaling::Yarn(scaling) => scaling.attention_factor,
            RotaryScaling::LongRope(scaling) => scaling.attention_factor,
            _ => 1.0,
        }
    }

    /// Returns the number of rotated elements in a head of `head` elements.
    pub fn width(&self, head: usize) -> usize {
        (head as f64 * self.partial_rotary_factor) as usize
    }

    /// Returns whether the frequencies depend on the length of the input.
    fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RotaryScaling::Dynamic { .. } | RotaryScaling::LongRope(_))
    }

    /// Checks the numbers for heads of `head` elements and inputs of up to `ctx` positions.
    pub(super) fn check(&self, head: usize, ctx: usize) -> crate::Result<()> {
        let width = self.width(head);
        if !(self.partial_rotary_factor > 0.0 && self.partial_rotary_factor <= 1.0)
            || width < 2
            || !width.is_multiple_of(2)
        {
            let elements = counted(head, "element");
            let allowed = format!("at most 1, and must rotate an even number, at least 2, of the {elements} in a head");
            return Err(invalid_field("partial_rotary_factor", self.partial_rotary_factor, &allowed));
        }
        let positive = |key, value: f64| match value > 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(invalid_field(key, value, "a positive finite number")),
        };
        positive("attention_factor", self.attention_factor())?;
        if let Some(growth) = self.query_growth {
            positive("llama_4_scaling_beta", growth.beta)?;
        }
        match &self.scaling {
            RotaryScaling::LongRope(scaling) => {
                let lists = [("short_factor", &scaling.short), ("long_factor", &scaling.long)];
                if let Some((key, list)) = lists.into_iter().find(|(_, list)| list.len() != width / 2) {
                    let found = format!("a list of length {}", list.len());
                    let allowed = format!("a list of length {}, the number of rotated pairs in a head", width / 2);
                    return Err(invalid_field(key, found, &allowed));
                }
            }
            RotaryScaling::Dynamic { .. } if width == 2 => {
                return Err(invalid_field(
                    "head_dim",
                    head,
                    "so large that more than 2 elements of each head are rotated, because the rope type is dynamic",
                ));
            }
            _ => (),
        }
        self.frequencies(head, 1)?;
        self.frequencies(head, ctx)?;
        Ok(())
    }

    /// Builds the rotations of queries and of keys for positions below `ctx`.
    pub(super) fn rotations(&self, head: usize, pairs: RotaryPairs, ctx: usize) -> Result<[Rotary; 2]> {
        let layout = RotaryLayout { head, pairs };
        let factor = self.attention_factor();
        let build = |growth: Option<QueryGrowth>| {
            let factor = move |position| factor * growth.map_or(1.0, |growth| growth.at(position));
            match self.depends_on_length() {
                false => Rotary::with(ctx, layout, self.frequencies(head, ctx)?, factor),
                true => {
                    let config = self.clone();
                    Rotary::by_length(ctx, layout, Arc::new(move |length| config.frequencies(head, length)), factor)
                }
            }
        };
        let keys = build(None)?;
        let queries = match self.query_growth {
            None => keys.clone(),
            growth => build(growth)?,
        };
        Ok([queries, keys])
    }
}

impl LongRopeScaling {
    /// Returns the divisors of the frequencies of an input of `length` positions.
    fn factors(&self, length: usize) -> &[f64] {
        if length > self.original { &self.long } else { &self.short }
    }
}
