//! The frequencies of rotary positions, following the rules of Hugging Face's configurations.
//!
//! From one position to the next, pair i of a head is rotated by frequency i, in radians.

use crate::error::ModelError;
use crate::nn::refuse;
use candle_core::Result;
use std::f64::consts::TAU;

/// Returns the standard frequencies, theta^(-2 i / head) for the pairs i of a head of `head` elements (rope type
/// "default").
///
/// # Errors
/// A head size that is odd or 0, or a theta that is not above 0.
pub fn default(head: usize, theta: f64) -> Result<Vec<f64>> {
    if head == 0 || !head.is_multiple_of(2) {
        candle_core::bail!(
            "rotary: heads have {head} elements; an even number is needed because they are rotated in pairs"
        )
    }
    require("rope_theta", theta)?;
    Ok((0..head / 2).map(|i| theta.powf(-((2 * i) as f64) / head as f64)).collect())
}

/// Returns frequencies that are slower by a factor, as if positions were closer together (rope type "linear").
///
/// # Errors
/// A factor that is not above 0.
pub fn linear(frequencies: &[f64], factor: f64) -> Result<Vec<f64>> {
    require("factor", factor)?;
    Ok(frequencies.iter().map(|frequency| frequency / factor).collect())
}

/// The parameters of rope type "llama3".
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3RopeScaling {
    /// The divisor of the slowest frequencies.
    pub factor: f64,
    /// The low threshold: frequencies with fewer turns in the original context count as slow.
    pub low_freq_factor: f64,
    /// The high threshold: frequencies with more turns in the original context are unchanged. Those between the
    /// thresholds are interpolated.
    pub high_freq_factor: f64,
    /// The context length in tokens before it was extended.
    pub original_max_position_embeddings: usize,
}

/// Returns the frequencies with the slow ones slowed down and the fast ones unchanged (rope type "llama3", used by
/// Llama 3.1 and later).
///
/// # Errors
/// Numbers that are not above 0, or a high factor that is not above the low one.
pub fn llama3(frequencies: &[f64], scaling: &Llama3RopeScaling) -> Result<Vec<f64>> {
    let Llama3RopeScaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } = *scaling;
    let original = original_max_position_embeddings as f64;
    require("factor", factor)?;
    require("low_freq_factor", low_freq_factor)?;
    require("original_max_position_embeddings", original)?;
    if !(high_freq_factor > low_freq_factor && high_freq_factor.is_finite()) {
        let allowed = format!("above low_freq_factor, {low_freq_factor}");
        return Err(config("high_freq_factor", high_freq_factor, allowed));
    }
    let scaled = |frequency: &f64| {
        let turns = original * frequency / TAU;
        let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        frequency * (kept + (1.0 - kept) / factor)
    };
    Ok(frequencies.iter().map(scaled).collect())
}

fn require(key: &'static str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() { Ok(()) } else { Err(config(key, value, "a number above 0".into())) }
}

fn config(key: &'static str, found: f64, allowed: String) -> candle_core::Error {
    refuse(ModelError::Config { key, found: found.to_string(), allowed }.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_those_of_transformers() {
        let plain = default(16, 500_000.0).unwrap();
        for (i, frequency) in plain.iter().enumerate() {
            assert!((frequency - 500_000f64.powf(-(i as f64) / 8.0)).abs() < 1e-15);
        }
        let scaling = Llama3RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let scaled = llama3(&plain, &scaling).unwrap();
        for (scaled, plain) in scaled.iter().zip(&plain) {
            // This follows Hugging Face's own arithmetic.
            let (wavelen, original) = (TAU / plain, 64.0);
            let smooth = (original / wavelen - 1.0) / 3.0;
            let want = match wavelen {
                long if long > original => plain / 8.0,
                short if short < original / 4.0 => *plain,
                _ => (1.0 - smooth) * plain / 8.0 + smooth * plain,
            };
            assert!((scaled - want).abs() <= 1e-15, "{plain}: {scaled} {want}");
        }
        let has = |low: f64, high: f64| scaled.iter().zip(&plain).any(|(s, p)| (low..=high).contains(&(s / p)));
        assert!(has(1.0, 1.0) && has(0.125, 0.125) && has(0.126, 0.999), "all three bands occur");
        assert_eq!(linear(&plain, 8.0).unwrap()[3], plain[3] / 8.0);
    }

    #[test]
    fn numbers_that_make_no_frequencies_are_refused() {
        let text = |result: Result<Vec<f64>>| result.unwrap_err().to_string().lines().next().unwrap().to_string();
        let scaling = Llama3RopeScaling {
            factor: 8.0,
            low_freq_factor: 4.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 32,
        };
        insta::assert_snapshot!(text(default(3, 1e4)), @"rotary: heads have 3 elements; an even number is needed because they are rotated in pairs");
        insta::assert_snapshot!(text(default(4, 0.0)), @"model configuration: rope_theta is 0, but must be a number above 0");
        insta::assert_snapshot!(text(linear(&[1.0], f64::NAN)), @"model configuration: factor is NaN, but must be a number above 0");
        insta::assert_snapshot!(text(llama3(&[1.0], &scaling)), @"model configuration: high_freq_factor is 4, but must be above low_freq_factor, 4");
    }
}
