//! The random numbers of a sweep: one stream for each purpose, determined by the seed.

use crate::util::mix;
use std::f64::consts::TAU;

/// The purpose of random numbers. Each purpose and number has a separate stream, so that a decision does not depend on
/// how many numbers earlier decisions have drawn.
#[derive(Debug, Clone, Copy)]
pub(super) enum RandomPurpose {
    /// The parameters of the trial with this number.
    Trial(usize),
    /// The order in which a finite space is searched.
    Order,
    /// The choices for the branch with this number.
    Branch(usize),
}

/// A stream of random numbers (SplitMix64).
#[derive(Debug, Clone)]
pub(super) struct RandomStream(u64);

impl RandomStream {
    pub fn new(seed: u64, purpose: RandomPurpose) -> Self {
        let (kind, number) = match purpose {
            RandomPurpose::Trial(number) => (1, number),
            RandomPurpose::Order => (2, 0),
            RandomPurpose::Branch(number) => (3, number),
        };
        Self(mix(mix(seed ^ mix(kind)) ^ mix(number as u64)))
    }

    pub fn next(&mut self) -> u64 {
        let drawn = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        drawn
    }

    /// Returns a number from 0 up to, but not including, 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number below `count`, which is at least 1.
    pub fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(count)) >> 64) as u64
    }

    /// Returns a number from the standard normal distribution.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_evenly_and_streams_differ() {
        let mut stream = RandomStream::new(1, RandomPurpose::Trial(1));
        let mean = (0..4000).map(|_| stream.unit()).sum::<f64>() / 4000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        let normal: Vec<f64> = (0..4000).map(|_| stream.normal()).collect();
        let mean = normal.iter().sum::<f64>() / 4000.0;
        let variance = normal.iter().map(|x| x * x).sum::<f64>() / 4000.0;
        assert!(mean.abs() < 0.06 && (variance - 1.0).abs() < 0.1, "{mean} {variance}");
        assert!((0..1000).all(|_| stream.below(3) < 3));
        let first = |purpose| RandomStream::new(1, purpose).next();
        assert_ne!(first(RandomPurpose::Trial(1)), first(RandomPurpose::Trial(2)));
        assert_ne!(first(RandomPurpose::Trial(1)), first(RandomPurpose::Branch(1)));
    }
}
