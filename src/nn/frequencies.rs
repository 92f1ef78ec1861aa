//! The frequencies of rotary positions, following the rules of Hugging Face's configurations.
//!
//! From one position to the next, pair i of a head is rotated by frequency i, in radians. A turn is a full rotation, so
//! that in a context of n positions, frequency f makes n f / (2 pi) turns.

use crate::error::ModelError;
use crate::nn::refuse;
use crate::util::counted;
use candle_core::Result;
use std::f64::consts::TAU;

/// Returns the standard frequencies, theta^(-2 i / head) for the pairs i of a head of `head` elements (rope type
/// "default").
///
/// # Errors
/// A head size that is odd or 0, or a theta that is not a finite number above 0.
pub fn default(head: usize, theta: f64) -> Result<Vec<f64>> {
    if head == 0 || !head.is_multiple_of(2) {
        candle_core::bail!(
            "rotary: heads have {}; an even number is needed because they are rotated in pairs",
            counted(head, "element")
        )
    }
    require("rope_theta", theta)?;
    Ok((0..head / 2).map(|i| theta.powf(-((2 * i) as f64) / head as f64)).collect())
}

/// Returns the frequencies divided by a factor, as if positions were closer together (rope type "linear").
///
/// # Errors
/// A factor that is not a finite number above 0.
pub fn linear(frequencies: &[f64], factor: f64) -> Result<Vec<f64>> {
    require("factor", factor)?;
    Ok(frequencies.iter().map(|frequency| frequency / factor).collect())
}

/// The parameters of rope type "llama3".
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3RopeScaling {
    /// The divisor of the lowest frequencies.
    pub factor: f64,
    /// The low threshold: frequencies that make fewer turns in the original context are divided by `factor`.
    pub low_freq_factor: f64,
    /// The high threshold: frequencies that make more turns in the original context are unchanged. Those between the
    /// thresholds are interpolated.
    pub high_freq_factor: f64,
    /// The context length in tokens before it was extended.
    pub original_max_position_embeddings: usize,
}

/// Returns the frequencies with the low ones reduced and the high ones unchanged (rope type "llama3", used by Llama 3.1
/// and later).
///
/// # Errors
/// Numbers that are not finite or not above 0, or a high factor that is not above the low one.
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
        let smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        frequency * (smooth + (1.0 - smooth) / factor)
    };
    Ok(frequencies.iter().map(scaled).collect())
}

/// The parameters of rope type "yarn" (Peng et al. 2023, arXiv 2309.00071).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnRopeScaling {
    /// The divisor of the lowest frequencies.
    pub factor: f64,
    /// The number of turns in the original context above which frequencies are unchanged. It is 32 by default.
    pub beta_fast: f64,
    /// The number of turns in the original context below which frequencies are divided by the factor. It is 1 by
    /// default.
    pub beta_slow: f64,
    /// Whether the bounds between which frequencies are interpolated are rounded to whole pairs (the default).
    pub truncate: bool,
    /// The context length in tokens before it was extended.
    pub original_max_position_embeddings: usize,
}

/// Returns the frequencies for heads of which `width` elements are rotated, with the low ones reduced and the high ones
/// unchanged (rope type "yarn").
///
/// # Errors
/// A width that is odd or 0, or numbers that are not finite or not above 0.
pub fn yarn(width: usize, theta: f64, scaling: &YarnRopeScaling) -> Result<Vec<f64>> {
    let YarnRopeScaling { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings } = *scaling;
    let (plain, original) = (default(width, theta)?, original_max_position_embeddings as f64);
    require("factor", factor)?;
    require("beta_fast", beta_fast)?;
    require("beta_slow", beta_slow)?;
    require("original_max_position_embeddings", original)?;
    // Returns the index of the pair that makes this number of turns in the original context; it may be fractional.
    let pair_of = |turns: f64| width as f64 * (original / (TAU * turns)).ln() / (2.0 * theta.ln());
    let (low, high) = match (pair_of(beta_fast), pair_of(beta_slow)) {
        (low, high) if truncate => (low.floor(), high.ceil()),
        bounds => bounds,
    };
    let (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
    let high = if low == high { high + 0.001 } else { high };
    let scaled = |(pair, frequency): (usize, &f64)| {
        let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        frequency / factor * ramp + frequency * (1.0 - ramp)
    };
    Ok(plain.iter().enumerate().map(scaled).collect())
}

/// Returns the frequencies for an input of `length` positions (rope type "dynamic", NTK-aware scaling): the base, which
/// is otherwise `theta`, grows with the length once the length exceeds `max_position_embeddings`.
///
/// # Errors
/// A width that is odd or at most 2, or numbers that are not finite or not above 0.
pub fn dynamic(
    width: usize,
    theta: f64,
    factor: f64,
    max_position_embeddings: usize,
    length: usize,
) -> Result<Vec<f64>> {
    require("factor", factor)?;
    require("max_position_embeddings", max_position_embeddings as f64)?;
    if width <= 2 {
        return Err(config("head_dim", width as f64, "above 2 with rope type dynamic".into()));
    }
    let relative = length.max(max_position_embeddings) as f64 / max_position_embeddings as f64;
    let growth = factor * relative - (factor - 1.0);
    default(width, theta * growth.powf(width as f64 / (width as f64 - 2.0)))
}

/// Returns the standard frequencies, each divided by a separate factor (rope type "longrope", arXiv 2402.13753).
///
/// # Errors
/// The errors of [`default`]; a number of factors that differs from the number of pairs; a factor that is not a finite
/// number above 0.
pub fn longrope(width: usize, theta: f64, factors: &[f64]) -> Result<Vec<f64>> {
    let plain = default(width, theta)?;
    if factors.len() != plain.len() {
        let allowed = format!("{}, the number of rotated pairs in a head", plain.len());
        return Err(config("the number of factors of longrope", factors.len() as f64, allowed));
    }
    factors.iter().try_for_each(|factor| require("a factor of longrope", *factor))?;
    Ok(plain.iter().zip(factors).map(|(frequency, factor)| frequency / factor).collect())
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
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let scaling = YarnRopeScaling {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            original_max_position_embeddings: 4096,
        };
        let plain = default(128, 1e4).unwrap();
        let ratios = |scaling: &YarnRopeScaling| -> Vec<f64> {
            yarn(128, 1e4, scaling).unwrap().iter().zip(&plain).map(|(yarn, plain)| yarn / plain).collect()
        };
        let (rounded, exact) = (ratios(&scaling), ratios(&YarnRopeScaling { truncate: false, ..scaling }));
        // The bounds are 64 ln(4096 / (64 pi)) / ln(1e4) = 20.94 and 64 ln(4096 / (2 pi)) / ln(1e4) = 45.03.
        assert!(rounded[..=20].iter().all(|ratio| *ratio == 1.0) && rounded[21] < 1.0);
        assert!(rounded[46..].iter().all(|ratio| (ratio - 0.25).abs() < 1e-12) && rounded[45] > 0.2501);
        assert!((rounded[33] - (1.0 - 0.75 * 13.0 / 26.0)).abs() < 1e-12);
        assert!((exact[33] - (1.0 - 0.75 * (33.0 - 20.9444) / (45.0258 - 20.9444))).abs() < 1e-4, "{}", exact[33]);
    }

    #[test]
    fn dynamic_frequencies_change_only_beyond_the_original_context() {
        let plain = default(16, 1e4).unwrap();
        assert_eq!(dynamic(16, 1e4, 4.0, 24, 7).unwrap(), plain);
        assert_eq!(dynamic(16, 1e4, 4.0, 24, 24).unwrap(), plain);
        let longer = dynamic(16, 1e4, 4.0, 24, 48).unwrap();
        // 4 * 48 / 24 - 3 = 5
        let base = 1e4 * 5f64.powf(16.0 / 14.0);
        for (i, frequency) in longer.iter().enumerate() {
            assert!((frequency - base.powf(-(i as f64) / 8.0)).abs() < 1e-12);
        }
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
        insta::assert_snapshot!(text(dynamic(2, 1e4, 4.0, 24, 48)), @"model configuration: head_dim is 2, but must be above 2 with rope type dynamic");
        insta::assert_snapshot!(text(longrope(8, 1e4, &[1.0; 3])), @"model configuration: the number of factors of longrope is 3, but must be 4, the number of rotated pairs in a head");
        insta::assert_snapshot!(text(longrope(2, 1e4, &[0.0])), @"model configuration: a factor of longrope is 0, but must be a number above 0");
    }
}
