//! The direction of a gradient check: every element of a parameter moves up or down by one step, pseudorandomly.
//!
//! The signs depend on the check's seed, the parameter's name and the element's index, so with one seed they are the
//! same at all stages, on all ranks and in every run. The step is the same for all elements of a parameter: a fraction
//! of the root mean square of its values or, if these are close to zero, of a size that is typical of the parameter's
//! shape. In 16 bits, both moves are rounded to representable values, and it is the difference between the rounded
//! values that counts.

use crate::kernels::parallel;
use crate::kernels::simd::vectorized;
use crate::precision::{Flat, FlatMut, FlatRef, sum_of_squares};
use crate::util::{fnv1a, mix};
use candle_core::{DType, Shape};
use half::{bf16, f16};
use std::ops::Range;

/// The number of elements that one task works on.
const CHUNK: usize = 1 << 15;
/// The number of signs in one random number. Each chunk begins with a new random number.
const SIGNS_PER_NUMBER: usize = 64;

/// The direction of one parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct PerturbationDirection {
    seed: u64,
    /// The length of the move of each element.
    pub step: f32,
    /// The range of elements that are not moved.
    unmoved: (usize, usize),
}

/// A gradient along a direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DirectionalGradient {
    /// The product of the gradient and half of the difference between the two moves.
    pub product: f64,
    /// The sum of the squares of the product's terms: the variance of the product, if signs are random.
    pub squares: f64,
}

impl PerturbationDirection {
    /// Creates the direction of the parameter `name` with these values. Each seed gives a different direction.
    /// `relative` is the step relative to the root mean square of the values.
    pub fn new((name, seed): (&str, u64), shape: &Shape, values: FlatRef<'_>, relative: f64) -> Self {
        let mean_square = sum_of_squares(values) / values.len().max(1) as f64;
        let (size, typical) = (mean_square.sqrt(), typical_size(shape));
        // Parameters that are initially zero, such as a bias or LoRA's B, are moved too.
        let size = if size > typical / 32.0 { size } else { typical };
        Self { seed: mix(fnv1a(name.as_bytes()) ^ seed), step: (relative * size) as f32, unmoved: (0, 0) }
    }

    /// Returns the same direction with these elements left unmoved.
    pub fn without(self, unmoved: Range<usize>) -> Self {
        Self { unmoved: (unmoved.start, unmoved.end), ..self }
    }

    /// Moves `values` up (`sign` 1) or down (-1) along the direction.
    pub fn shift(&self, values: FlatMut<'_>, sign: f32) {
        match values {
            FlatMut::F32(values) => self.shift_each(values, |value, by| value + by, sign),
            FlatMut::BF16(values) => self.shift_each(values, |value, by| bf16::from_f32(value.to_f32() + by), sign),
            FlatMut::F16(values) => self.shift_each(values, |value, by| f16::from_f32(value.to_f32() + by), sign),
        }
    }

    fn shift_each<T: Copy + Send + Sync>(&self, values: &mut [T], add: impl Fn(T, f32) -> T + Sync, sign: f32) {
        parallel::for_each_part(
            values.len().div_ceil(CHUNK),
            parallel::ParallelChunks::new(values, CHUNK),
            |number, part: &mut [T]| {
                let first = number * CHUNK;
                vectorized!(for (block, values) in part.chunks_mut(SIGNS_PER_NUMBER).enumerate() {
                    let moves = self.moves_from(first + block * SIGNS_PER_NUMBER);
                    for (value, by) in values.iter_mut().zip(moves) {
                        *value = add(*value, sign * by);
                    }
                });
            },
        );
    }

    /// Returns the gradient along the direction. `values` are the unmoved values of the parameter, if they are known.
    pub fn along(&self, gradient: FlatRef<'_>, values: Option<FlatRef<'_>>) -> DirectionalGradient {
        let chunks = gradient.len().div_ceil(CHUNK);
        let part = |number: usize| {
            let range = number * CHUNK..gradient.len().min((number + 1) * CHUNK);
            self.part_along(range, gradient, values)
        };
        parallel::map(chunks, part).into_iter().fold(DirectionalGradient::default(), |sum, part| DirectionalGradient {
            product: sum.product + part.product,
            squares: sum.squares + part.squares,
        })
    }

    fn part_along(
        &self,
        range: Range<usize>,
        gradient: FlatRef<'_>,
        values: Option<FlatRef<'_>>,
    ) -> DirectionalGradient {
        let dtype = values.map_or(DType::F32, |values| values.dtype());
        let start = range.start;
        let [mut wide_gradient, mut wide_values] = [Flat::zeros(DType::F32, 0), Flat::zeros(DType::F32, 0)];
        let gradient = widened(gradient.slice(range.clone()), &mut wide_gradient);
        let values = values.map(|values| widened(values.slice(range), &mut wide_values));
        match (values, dtype) {
            (None, _) => self.sums(start, gradient, gradient, |_, by| f64::from(by)),
            (Some(values), DType::BF16) => self.sums(start, gradient, values, |value, by| {
                half_difference(value, by, |moved| bf16::from_f32(moved).to_f32())
            }),
            (Some(values), DType::F16) => self.sums(start, gradient, values, |value, by| {
                half_difference(value, by, |moved| f16::from_f32(moved).to_f32())
            }),
            (Some(values), _) => {
                self.sums(start, gradient, values, |value, by| half_difference(value, by, |moved| moved))
            }
        }
    }

    /// Returns the sums over the elements that begin at `start`. `half` returns half of the difference between the
    /// moved values.
    fn sums(
        &self,
        start: usize,
        gradient: &[f32],
        values: &[f32],
        half: impl Fn(f32, f32) -> f64,
    ) -> DirectionalGradient {
        // Each lane has its own sums, so that the loop is vectorized.
        const LANES: usize = 8;
        let [mut products, mut squares] = [[0.0; LANES]; 2];
        vectorized!({
            let blocks = gradient.chunks(SIGNS_PER_NUMBER).zip(values.chunks(SIGNS_PER_NUMBER));
            for (block, (gradient, values)) in blocks.enumerate() {
                let moves = self.moves_from(start + block * SIGNS_PER_NUMBER);
                let lanes = moves.chunks(LANES).zip(gradient.chunks(LANES)).zip(values.chunks(LANES));
                for ((moves, gradient), values) in lanes {
                    for (lane, ((by, gradient), value)) in moves.iter().zip(gradient).zip(values).enumerate() {
                        let term = f64::from(*gradient) * half(*value, *by);
                        products[lane] += term;
                        squares[lane] += term * term;
                    }
                }
            }
        });
        DirectionalGradient { product: products.iter().sum(), squares: squares.iter().sum() }
    }

    /// Returns the signs of [`SIGNS_PER_NUMBER`] elements, starting at element `i`, which is a multiple of that number.
    fn signs_from(&self, i: usize) -> u64 {
        mix(self.seed.wrapping_add(((i / SIGNS_PER_NUMBER) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns the upward moves of [`SIGNS_PER_NUMBER`] elements, starting at element `i`, which is a multiple of that
    /// number.
    #[inline(always)]
    fn moves_from(&self, i: usize) -> [f32; SIGNS_PER_NUMBER] {
        let signs = self.signs_from(i);
        let mut moves = [0.0; SIGNS_PER_NUMBER];
        for (bit, by) in moves.iter_mut().enumerate() {
            let is_down = (signs >> bit & 1) as u32;
            *by = f32::from_bits(self.step.to_bits() ^ is_down << 31);
        }
        let (start, end) = self.unmoved;
        if start < i + SIGNS_PER_NUMBER && i < end {
            moves[start.saturating_sub(i)..(end - i).min(SIGNS_PER_NUMBER)].fill(0.0);
        }
        moves
    }
}

/// Returns half of the difference between a value moved up and the same value moved down, each rounded to the
/// parameter's dtype.
#[inline(always)]
fn half_difference(value: f32, by: f32, rounded: impl Fn(f32) -> f32) -> f64 {
    (f64::from(rounded(value + by)) - f64::from(rounded(value - by))) / 2.0
}

/// Returns the values in f32. `buffer`, which is empty, holds them if they have another dtype.
fn widened<'a>(values: FlatRef<'a>, buffer: &'a mut Flat) -> &'a [f32] {
    if let FlatRef::F32(values) = values {
        return values;
    }
    buffer.extend_cast(values);
    let FlatRef::F32(wide) = buffer.as_ref() else { unreachable!("the buffer is in f32") };
    wide
}

/// Returns the size that the values of a parameter of this shape usually have.
fn typical_size(shape: &Shape) -> f64 {
    match shape.dims() {
        [first, rest @ ..] if !rest.is_empty() => {
            0.5 / (shape.elem_count() as f64 / (*first).max(1) as f64).max(1.0).sqrt()
        }
        _ => 0.02,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direction(values: &Flat) -> PerturbationDirection {
        PerturbationDirection::new(("weight", 0), &Shape::from(values.len()), values.as_ref(), 1.0 / 16.0)
    }

    #[test]
    fn up_and_down_differ_by_what_the_product_counts_in_every_format() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let values: Vec<f32> = (0..70_000).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
            let values = Flat::from_f32(values, dtype);
            let direction = direction(&values);
            let moved = |sign| {
                let mut moved = values.clone();
                direction.shift(moved.as_mut(), sign);
                moved
            };
            let (up, down) = (moved(1.0), moved(-1.0));
            let gradient = Flat::F32((0..values.len()).map(|i| (i % 7) as f32).collect());
            let differences = (0..values.len()).map(|i| {
                let half = (f64::from(up.as_ref().get(i)) - f64::from(down.as_ref().get(i))) / 2.0;
                half * f64::from(gradient.as_ref().get(i))
            });
            let expected: f64 = differences.sum();
            let found = direction.along(gradient.as_ref(), Some(values.as_ref())).product;
            assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{dtype:?}: {found} {expected}");
        }
    }

    #[test]
    fn as_many_elements_go_up_as_down_and_neighbours_have_nothing_to_do_with_each_other() {
        let direction = direction(&Flat::F32(vec![1.0; 1 << 16]));
        let moves = (0..1 << 16).step_by(SIGNS_PER_NUMBER).flat_map(|i| direction.moves_from(i));
        let signs: Vec<f64> = moves.map(|by| f64::from(by.signum())).collect();
        let mean: f64 = signs.iter().sum::<f64>() / signs.len() as f64;
        assert!(mean.abs() < 0.02, "{mean}");
        for distance in [1, 64, 256] {
            let pairs = signs.iter().zip(&signs[distance..]).map(|(a, b)| a * b).sum::<f64>() / signs.len() as f64;
            assert!(pairs.abs() < 0.02, "{distance}: {pairs}");
        }
    }

    #[test]
    fn elements_that_are_left_out_are_not_moved_and_do_not_count() {
        let values = Flat::F32(vec![1.0; 300]);
        let gradient = Flat::F32(vec![1.0; 300]);
        for unmoved in [0..0, 0..300, 0..1, 63..65, 64..128, 70..250, 299..300] {
            let direction = direction(&values).without(unmoved.clone());
            let mut moved = values.clone();
            direction.shift(moved.as_mut(), 1.0);
            for i in 0..300 {
                assert_eq!(moved.as_ref().get(i) == 1.0, unmoved.contains(&i), "{unmoved:?}: {i}");
            }
            let squares = direction.along(gradient.as_ref(), None).squares;
            let expected = (300 - unmoved.len()) as f64 * f64::from(direction.step).powi(2);
            assert!((squares - expected).abs() <= 1e-9 * expected, "{unmoved:?}: {squares} {expected}");
        }
    }

    #[test]
    fn what_begins_with_zeros_is_moved() {
        let zeros = Flat::zeros(DType::F32, 64);
        assert!(direction(&zeros).step > 0.0);
        assert!(PerturbationDirection::new(("b", 0), &Shape::from((8, 8)), zeros.as_ref(), 1e-3).step > 0.0);
    }
}
