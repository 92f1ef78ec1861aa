//! Initial values that depend only on the seed, the parameter's name and the element, and not on rank, world size,
//! stage or thread. A rank can therefore create its share without creating the full parameter.

use crate::util::{fnv1a, mix};
use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rayon::prelude::*;
use std::ops::Range;

/// Returns elements `range` of the parameter `name` with shape `shape`, in f32.
///
/// The distributions are those of `candle_nn::Init`; the random numbers come from a counter-based generator
/// (SplitMix64's finalizer over seed, name and element).
pub fn init_values(seed: u64, name: &str, shape: &Shape, init: Init, range: Range<usize>) -> Vec<f32> {
    let key = mix(seed ^ fnv1a(name.as_bytes()));
    let uniform = |lo: f64, up: f64| fill(range.clone(), move |i| lo + (up - lo) * unit(mix(key.wrapping_add(i))));
    let normal = |mean: f64, std: f64| fill(range.clone(), move |i| mean + std * gauss(key, i));
    match init {
        Init::Const(value) => vec![value as f32; range.len()],
        Init::Uniform { lo, up } => uniform(lo, up),
        Init::Randn { mean, stdev } => normal(mean, stdev),
        Init::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => uniform(-std * 3f64.sqrt(), std * 3f64.sqrt()),
                NormalOrUniform::Normal => normal(0.0, std),
            }
        }
    }
}

fn fill(range: Range<usize>, value: impl Fn(u64) -> f64 + Sync) -> Vec<f32> {
    let start = range.start;
    let mut out = vec![0f32; range.len()];
    out.par_chunks_mut(1 << 14).enumerate().for_each(|(c, chunk)| {
        for (j, x) in chunk.iter_mut().enumerate() {
            *x = value((start + (c << 14) + j) as u64) as f32;
        }
    });
    out
}

/// Returns the standard normal number of element `i` (Box-Muller).
fn gauss(key: u64, i: u64) -> f64 {
    let (a, b) = (mix(key.wrapping_add(2 * i)), mix(key.wrapping_add(2 * i + 1)));
    // 1 - unit is in (0, 1], so the logarithm is finite.
    (-2.0 * (1.0 - unit(a)).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos()
}

/// Returns a number in [0, 1) with 53 random bits.
fn unit(x: u64) -> f64 {
    (x >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const NORMAL: Init = Init::Randn { mean: 1.0, stdev: 2.0 };

    #[test]
    fn a_part_has_the_values_of_the_whole() {
        let shape = Shape::from((70, 1000));
        for init in [NORMAL, Init::Uniform { lo: -1.0, up: 3.0 }, candle_nn::init::DEFAULT_KAIMING_NORMAL] {
            let whole = init_values(7, "h.0.weight", &shape, init, 0..70_000);
            assert_eq!(init_values(7, "h.0.weight", &shape, init, 33..69_999), whole[33..69_999]);
        }
    }

    #[test]
    fn values_have_the_distribution_that_was_asked_for() {
        let shape = Shape::from(100_000);
        let x = init_values(1, "w", &shape, NORMAL, 0..100_000);
        let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / 1e5;
        let var = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / 1e5;
        assert!((mean - 1.0).abs() < 0.03 && (var.sqrt() - 2.0).abs() < 0.03, "{mean} {var}");
        let x = init_values(1, "w", &shape, Init::Uniform { lo: -1.0, up: 3.0 }, 0..100_000);
        let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / 1e5;
        assert!((mean - 1.0).abs() < 0.03 && x.iter().all(|v| (-1.0..3.0).contains(v)));
    }

    #[test]
    fn names_and_seeds_give_different_values() {
        let shape = Shape::from(8);
        let values = |seed, name| init_values(seed, name, &shape, NORMAL, 0..8);
        assert_ne!(values(1, "a"), values(1, "b"));
        assert_ne!(values(1, "a"), values(2, "a"));
        assert_eq!(values(1, "a"), values(1, "a"));
    }
}
