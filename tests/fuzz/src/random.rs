//! A small generator of random numbers: SplitMix64.

/// A generator of random numbers.
pub struct Random(u64);

impl Random {
    /// Creates the generator of case `case` of a run.
    pub fn of_case(seed: u64, target: &str, case: u64) -> Self {
        let name = target.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut random = Self(name);
        random.0 = random.next() ^ case.wrapping_mul(0xd134_2543_de82_ef95);
        random
    }

    /// Returns the next number.
    #[allow(clippy::should_implement_trait, reason = "an iterator over random numbers would have no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`, or 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % (end.max(1) as u64)) as usize
    }

    /// Returns one of some values.
    pub fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}
