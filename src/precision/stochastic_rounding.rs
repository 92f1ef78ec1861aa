//! Stochastic rounding to bfloat16: numbers are rounded up or down at random, so that the mean of many roundings is the
//! number itself.
//!
//! With rounding to nearest, an update far smaller than half a bf16 step is always lost. With stochastic rounding,
//! it is sometimes kept. The random bits are a function of a key and of the element's position, and never depend on
//! rank, stage or thread.

use crate::kernels::simd::{SimdLoop, level};
use crate::util::{fnv1a, mix};
use half::bf16;

/// The source of the random bits of one buffer in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoundingDice {
    key: u64,
}

impl RoundingDice {
    /// Creates a separate source for every combination of `seed`, `name`, `state` (an index) and `step`.
    pub fn new(seed: u64, name: &str, state: u64, step: u64) -> Self {
        let key = mix(seed ^ fnv1a(name.as_bytes()));
        Self { key: mix(mix(key.wrapping_add(state)).wrapping_add(step)) }
    }

    /// Returns sixteen random bits for an element, in the low half of the result.
    #[inline(always)]
    fn roll(self, element: u64) -> u32 {
        // This is a finalizer, in which every output bit depends on every input bit.
        let mut x =
            (element as u32).wrapping_mul(0x9e37_79b9) ^ self.key as u32 ^ ((element >> 32) as u32).rotate_left(16);
        x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
        x = (x ^ (x >> 15) ^ (self.key >> 32) as u32).wrapping_mul(0xd35a_2d97);
        (x ^ (x >> 15)) >> 16
    }

    /// Rounds `src` stochastically to bf16. `src` starts with element `first` of its parameter.
    pub fn round(self, src: &[f32], dst: &mut [bf16], first: usize) {
        assert_eq!(src.len(), dst.len(), "src and dst must have the same length");
        level().run(StochasticRound { dice: self, src, dst, first: first as u64 });
    }
}

struct StochasticRound<'a> {
    dice: RoundingDice,
    src: &'a [f32],
    dst: &'a mut [bf16],
    first: u64,
}

impl SimdLoop for StochasticRound<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { dice, src, dst, first } = self;
        for (i, (x, y)) in src.iter().zip(dst).enumerate() {
            let bits = x.to_bits();
            let rounded = (bits.wrapping_add(dice.roll(first + i as u64)) >> 16) as u16;
            // Infinities stay infinities, and NaNs stay NaNs.
            let special = (bits >> 16) as u16 | u16::from(bits & 0x007f_ffff != 0) << 6;
            *y = bf16::from_bits(if bits & 0x7f80_0000 == 0x7f80_0000 { special } else { rounded });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::InstructionSet;

    fn rounded(x: &[f32], dice: RoundingDice) -> Vec<bf16> {
        let mut y = vec![bf16::ZERO; x.len()];
        dice.round(x, &mut y, 0);
        y
    }

    #[test]
    fn the_mean_of_many_roundings_is_the_number() {
        for x in [1.0 + 1.0 / 1024.0, -3.001, 0.1, 1e-30] {
            let sum: f64 = rounded(&vec![x; 100_000], RoundingDice::new(1, "w", 0, 1)).iter().map(|y| y.to_f64()).sum();
            let step = f64::from(x.abs()) / 128.0;
            // The standard deviation of the mean is below half a step divided by the square root of the number of
            // roundings.
            assert!((sum / 1e5 - f64::from(x)).abs() < 4.0 * 0.5 * step / 1e5f64.sqrt(), "{x}: {}", sum / 1e5);
        }
    }

    #[test]
    fn a_number_becomes_one_of_its_neighbours_and_a_bf16_stays() {
        let exact: Vec<f32> = (0..=u16::MAX).map(|x| bf16::from_bits(x).to_f32()).filter(|x| !x.is_nan()).collect();
        let same = rounded(&exact, RoundingDice::new(2, "w", 0, 1));
        assert!(exact.iter().zip(&same).all(|(x, y)| x.to_bits() == y.to_f32().to_bits()));
        assert!(
            rounded(&[f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)], RoundingDice::new(2, "w", 0, 1))
                .iter()
                .all(|x| x.is_nan())
        );
        let between: Vec<f32> = (0..10_000).map(|i| 1.0 + i as f32 / 9_999.0).collect();
        let neighbours = rounded(&between, RoundingDice::new(3, "w", 0, 1));
        assert!(between.iter().zip(&neighbours).all(|(x, y)| (x - y.to_f32()).abs() < 1.0 / 128.0));
    }

    #[test]
    fn chances_depend_on_seed_name_state_step_and_element_alone() {
        let x = vec![1.001f32; 5000];
        let whole = rounded(&x, RoundingDice::new(1, "w", 0, 1));
        let mut part = vec![bf16::ZERO; 1234];
        RoundingDice::new(1, "w", 0, 1).round(&x[777..777 + 1234], &mut part, 777);
        assert_eq!(part, whole[777..777 + 1234]);
        for other in [
            RoundingDice::new(2, "w", 0, 1),
            RoundingDice::new(1, "v", 0, 1),
            RoundingDice::new(1, "w", 1, 1),
            RoundingDice::new(1, "w", 0, 2),
        ] {
            assert_ne!(rounded(&x, other), whole);
        }
        for level in InstructionSet::available() {
            let mut dst = vec![bf16::ZERO; x.len()];
            level.run(StochasticRound { dice: RoundingDice::new(1, "w", 0, 1), src: &x, dst: &mut dst, first: 0 });
            assert_eq!(dst, whole, "{level:?}");
        }
    }
}
