//! A small generator of random numbers: SplitMix64.

use candle_zero::util::{fnv1a, mix};

/// A generator of random numbers.
pub struct Random(u64);

impl Random {
    /// Creates the generator for case `case` of a run.
    pub fn of_case(seed: u64, target: &str, case: u64) -> Self {
        Self(mix(fnv1a(target.as_bytes()) ^ mix(seed)) ^ mix(case))
    }

    /// Returns the next number.
    #[allow(clippy::should_implement_trait, reason = "an iterator over random numbers would have no end")]
    pub fn next(&mut self) -> u64 {
        let number = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        number
    }

    /// Returns a number below `end`, or 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % (end.max(1) as u64)) as usize
    }

    /// Returns one of the values in `values`.
    pub fn one<'a, T: ?Sized>(&mut self, values: &[&'a T]) -> &'a T {
        values[self.below(values.len())]
    }
}
