//! The global gradient norm: sums of squares, overflow checks, and the factor that combines clipping and loss scale.
//!
//! Squares are summed in f64, in which the square of any finite f32 is exact and no sum can overflow: a result that is
//! not finite comes from an element that is not finite. The order of summation depends only on the position in the
//! slice, so a slice produces the same bits on every machine and with any number of threads.

use super::{FlatRef, cast};
use crate::kernels::parallel;
use crate::kernels::simd::{SimdLoop, level};

/// The number of elements that one thread sums at a time.
pub(crate) const CHUNK: usize = 64 * 1024;

/// The number of elements that are widened together.
const BLOCK: usize = 1024;

/// The number of independent sums per chunk, enough to hide the latency of an addition.
pub(crate) const LANES: usize = 16;

/// The number that DeepSpeed adds to the norm before comparing the norm with the maximum.
const CLIP_EPSILON: f64 = 1e-6;

/// Returns the sum of the squares of all elements.
///
/// Element `i` is added to lane `i % 16` of chunk `i / 65536`. Lanes are added in order, then chunks in order. The
/// result is finite if and only if all elements are.
pub fn sum_of_squares(values: FlatRef<'_>) -> f64 {
    let chunks = values.len().div_ceil(CHUNK);
    let sums = parallel::map(chunks, |i| level().run(ChunkSum(chunk(values, i))));
    sums.iter().sum()
}

/// Returns whether any element is infinite or NaN.
pub fn has_non_finite(values: FlatRef<'_>) -> bool {
    let chunks = values.len().div_ceil(CHUNK);
    parallel::any(chunks, |i| level().run(ChunkHasNonFinite(chunk(values, i))))
}

/// Returns the divisor of gradients, at least 1, that reduces their L2 norm to at most `max_norm`.
///
/// `norm_unscaled` is the global norm divided by the loss scale. `max_norm` is `gradient_clipping`, and 0 disables
/// clipping. All stages use DeepSpeed's rule for stages 1 to 3: (norm + 1e-6) / max_norm if that is above 1.
fn clip_factor(norm_unscaled: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { ((norm_unscaled + CLIP_EPSILON) / max_norm).max(1.0) } else { 1.0 }
}

/// Returns the factor by which gradients are multiplied before the update. It combines loss scale and clipping.
///
/// `scaled_norm` is the global norm of the scaled gradients, `loss_scale` is the scale of their loss, and `clipping` is
/// `gradient_clipping`. The result is exactly 1 if neither applies.
pub fn gradient_multiplier(scaled_norm: f64, loss_scale: f64, clipping: f64) -> f64 {
    1.0 / (clip_factor(scaled_norm / loss_scale, clipping) * loss_scale)
}

fn chunk(values: FlatRef<'_>, i: usize) -> FlatRef<'_> {
    values.slice(i * CHUNK..values.len().min((i + 1) * CHUNK))
}

/// Adds the square of element `i` to lane `i % 16`. This function is inlined into a [`SimdLoop`].
#[inline(always)]
pub(crate) fn add_squares(lanes: &mut [f64; LANES], block: &[f32]) {
    let (groups, rest) = block.as_chunks::<LANES>();
    for group in groups {
        for lane in 0..LANES {
            lanes[lane] += f64::from(group[lane]) * f64::from(group[lane]);
        }
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, x)| *lane += f64::from(*x) * f64::from(*x));
}

struct ChunkSum<'a>(FlatRef<'a>);

impl SimdLoop for ChunkSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let mut widened = [0.0f32; BLOCK];
        for start in (0..self.0.len()).step_by(BLOCK) {
            let block = match self.0.slice(start..self.0.len().min(start + BLOCK)) {
                FlatRef::F32(block) => block,
                narrow => {
                    let block = &mut widened[..narrow.len()];
                    cast::widen(block, narrow);
                    block
                }
            };
            // Only the last block of a chunk has a remainder, so an element's lane depends only on its position.
            add_squares(&mut lanes, block);
        }
        lanes.iter().sum()
    }
}

struct ChunkHasNonFinite<'a>(FlatRef<'a>);

impl SimdLoop for ChunkHasNonFinite<'_> {
    type Output = bool;

    /// Checks for an exponent of all ones, which only infinities and NaN have. There is no early exit, because a plain
    /// OR over the complete chunk vectorizes.
    #[inline(always)]
    fn run(self) -> bool {
        match self.0 {
            FlatRef::F32(v) => v.iter().fold(false, |bad, x| bad | (x.to_bits() & 0x7f80_0000 == 0x7f80_0000)),
            FlatRef::BF16(v) => v.iter().fold(false, |bad, x| bad | (x.to_bits() & 0x7f80 == 0x7f80)),
            FlatRef::F16(v) => v.iter().fold(false, |bad, x| bad | (x.to_bits() & 0x7c00 == 0x7c00)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::kernels::simd::InstructionSet;
    use half::{bf16, f16};
    use serde_json::Value;

    /// Returns values of both signs over many magnitudes.
    fn values(len: usize) -> Vec<f32> {
        (0..len as u64).map(|i| ((i * 2741 + 877) % 2001) as f32 - 1000.0).map(|x| x * x * x / 1e6).collect()
    }

    #[test]
    fn the_sum_is_right_and_the_same_for_any_number_of_threads() {
        for len in [0, 1, 15, 17, BLOCK + 3, CHUNK - 1, CHUNK, 3 * CHUNK + 1041] {
            let values = values(len);
            let exact: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
            let sum_with = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| sum_of_squares(FlatRef::F32(&values)))
            };
            let sum = sum_with(1);
            assert!((sum - exact).abs() <= 1e-12 * exact, "{len}: {sum} instead of {exact}");
            assert_eq!(sum.to_bits(), sum_with(3).to_bits(), "{len}");
        }
    }

    #[test]
    fn every_level_sums_to_the_same_bits() {
        let values = values(CHUNK - 1000);
        let sums: Vec<_> =
            InstructionSet::available().map(|level| level.run(ChunkSum(FlatRef::F32(&values)))).collect();
        assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{sums:?}");
    }

    #[test]
    fn half_formats_are_summed_by_their_values() {
        let values = values(CHUNK + 1500);
        let bf: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        let hf: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
        let widened: Vec<f32> = bf.iter().map(|x| x.to_f32()).collect();
        assert_eq!(sum_of_squares(FlatRef::BF16(&bf)), sum_of_squares(FlatRef::F32(&widened)));
        let widened: Vec<f32> = hf.iter().map(|x| x.to_f32()).collect();
        assert_eq!(sum_of_squares(FlatRef::F16(&hf)), sum_of_squares(FlatRef::F32(&widened)));
    }

    #[test]
    fn the_largest_finite_values_do_not_overflow_the_sum() {
        assert!(sum_of_squares(FlatRef::F32(&vec![f32::MAX; CHUNK + 1])).is_finite());
    }

    #[test]
    fn one_bad_element_is_found_wherever_it_is() {
        for len in [1, 17, BLOCK + 1, CHUNK + 5] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, len / 2, len - 1] {
                    let mut values = values(len);
                    assert!(!has_non_finite(FlatRef::F32(&values)));
                    values[at] = bad;
                    assert!(has_non_finite(FlatRef::F32(&values)), "{bad} at {at} of {len}");
                    assert!(!sum_of_squares(FlatRef::F32(&values)).is_finite());
                    let bf: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                    assert!(has_non_finite(FlatRef::BF16(&bf)));
                }
            }
        }
    }

    #[test]
    fn clipping_is_off_at_zero_and_never_enlarges() {
        assert_eq!(clip_factor(100.0, 0.0), 1.0);
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(2.0, 1.0), 2.0 + 1e-6);
        assert_eq!(gradient_multiplier(3.0, 1.0, 0.0), 1.0);
        assert_eq!(gradient_multiplier(3.0, 1.0, 5.0), 1.0);
    }

    #[test]
    fn the_conformance_cases_hold() {
        let file: Value = serde_json::from_str(include_str!("../../tests/fixtures/conformance_data.json")).unwrap();
        let mut run = 0;
        for case in file.as_array().unwrap().iter().filter(|c| c["area"] == "grad-clip") {
            let (id, input, expect) = (case["id"].as_str().unwrap(), &case["input"], &case["expect"]);
            let number = |v: &Value| v.as_f64().unwrap();
            let floats = |v: &Value| v.as_array().unwrap().iter().map(|x| number(x) as f32).collect::<Vec<_>>();
            let close = |got: f64, want: f64| {
                let rtol = case["rtol"].as_f64().unwrap_or(0.0);
                assert!((got - want).abs() <= rtol * want.abs(), "{id}: {got} instead of {want}");
            };
            match id {
                "clip-03" | "clip-07" => {
                    let (norm, scale) = (number(&input["scaled_norm"]), number(&input["loss_scale"]));
                    let multiplier = gradient_multiplier(norm, scale, number(&input["gradient_clipping"]));
                    close(multiplier, number(&expect["gradient_multiplier"]));
                    close(norm / scale, number(&expect["reported_norm"]));
                }
                "clip-torch" => {
                    let grads = floats(&input["grads"]);
                    let norm = sum_of_squares(FlatRef::F32(&grads)).sqrt();
                    let multiplier = gradient_multiplier(norm, 1.0, number(&input["max_norm"]));
                    for (grad, after) in grads.iter().zip(floats(&expect["grads_after"])) {
                        close(f64::from(*grad) * multiplier, f64::from(after));
                    }
                }
                "norm-0" => {
                    let shards = input["gradient_shards_per_rank"].as_array().unwrap();
                    let sum: f64 = shards.iter().map(|s| sum_of_squares(FlatRef::F32(&floats(s)))).sum();
                    close(sum.sqrt(), number(&expect["global_norm"]));
                }
                other => panic!("no test for {other}"),
            }
            run += 1;
        }
        assert_eq!(run, 4);
    }
}
