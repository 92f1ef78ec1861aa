//! Exponential and activation functions of one f32 as a few multiplications and additions: loops over them vectorize, a
//! call of the C library's functions per element does not.
//!
//! No fused multiply-add and no table: every machine and every vector width gives the same bits.

/// log2(e).
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln(2) in two parts: the first has so few digits that its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding 1.5 x 2^23 rounds to an integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;

/// sqrt(2 / pi), of GELU's approximation.
pub(crate) const GELU_SCALE: f32 = 0.797_884_6;
/// The weight of the cube in GELU's approximation.
pub(crate) const GELU_CUBIC: f32 = 0.044_715;

/// exp(x), within 2 units in the last place; 0 and infinity where the result leaves f32's range, nan for nan.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Below, the result is 0.
    exp_from(-104.0, x)
}

/// exp of the larger of `low` and x, where `low` is not less than -104.
#[inline(always)]
fn exp_from(low: f32, x: f32) -> f32 {
    // Above the upper bound the result is infinite. Written so that nan passes both.
    let x = if x < low { low } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // x = n ln(2) + r with |r| <= ln(2) / 2.
    let rounded = x * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // exp(r) = 1 + r + r^2 p(r), a minimax polynomial (Cephes).
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    // 2^n in two factors, because 2^n alone may lie outside of f32's normal numbers.
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    y * power(n >> 1) * power(n.wrapping_sub(n >> 1))
}

/// x sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + odds(-x))
}

/// The derivative of [`silu`].
#[inline(always)]
pub fn silu_slope(x: f32) -> f32 {
    slope_of_gated(x, odds(-x), 1.0)
}

/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GELU by its tanh approximation (Hendrycks and Gimpel 2016).
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    x / (1.0 + gelu_odds(x))
}

/// The derivative of [`gelu_tanh`].
#[inline(always)]
pub fn gelu_tanh_slope(x: f32) -> f32 {
    // Beyond, the slope is 0 or 1, and the square below stays finite. Nan passes.
    let x = if x < -100.0 { -100.0 } else { x };
    let x = if x > 100.0 { 100.0 } else { x };
    slope_of_gated(x, gelu_odds(x), 2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x))
}

/// The derivative of x / (1 + exp(-u)) for a function u of x, given odds = exp(-u) and the derivative of u.
#[inline(always)]
fn slope_of_gated(x: f32, odds: f32, inner: f32) -> f32 {
    // Finite, so that the products below are; the slope is 0 there. Nan passes.
    let odds = if odds > 1e30 { 1e30 } else { odds };
    let gate = 1.0 / (1.0 + odds);
    gate + x * gate * (odds * gate) * inner
}

/// exp(-2 u) for the tanh's argument u: (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)). One exponential, and no cancellation
/// where the tanh comes near to -1.
#[inline(always)]
fn gelu_odds(x: f32) -> f32 {
    odds(-2.0 * GELU_SCALE * (x + GELU_CUBIC * x * x * x))
}

/// exp(x) to be added to 1. Where it would be a denormal number, with which processors compute slowly, it is not, and
/// adds nothing all the same.
#[inline(always)]
fn odds(x: f32) -> f32 {
    exp_from(-80.0, x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in representable numbers; both are positive.
    fn ulps(a: f32, b: f32) -> u32 {
        a.to_bits().abs_diff(b.to_bits())
    }

    #[test]
    fn the_exponential_is_within_two_units_in_the_last_place_everywhere() {
        let mut worst = 0;
        // Every 1009th of all numbers between -104 and 89.
        for bits in (0..=u32::MAX).step_by(1009) {
            let x = f32::from_bits(bits);
            if (-104.0..=89.0).contains(&x) {
                worst = worst.max(ulps(exp(x), f64::from(x).exp() as f32));
            }
        }
        assert!((1..=2).contains(&worst), "{worst}");
    }

    #[test]
    fn the_exponentials_edges_are_those_of_the_true_function() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!((exp(-104.0), exp(-1e30), exp(89.0), exp(1e30)), (0.0, 0.0, f32::INFINITY, f32::INFINITY));
        assert!(exp(-103.0) > 0.0 && exp(88.7) < f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn activations_and_slopes_are_those_of_the_formulas_in_f64() {
        let (scale, cubic) = (f64::from(GELU_SCALE), f64::from(GELU_CUBIC));
        for i in -3000..=3000 {
            let x = i as f32 / 200.0;
            let wide = f64::from(x);
            let check = |got: (f32, f32), want: (f64, f64)| {
                let error = |got: f32, want: f64| (f64::from(got) - want).abs();
                let accuracy = 1e-6 * (1.0 + wide * wide) * want.0.abs();
                assert!(error(got.0, want.0) <= accuracy.max(1e-30), "{x}: {} {}", got.0, want.0);
                assert!(error(got.1, want.1) <= 3e-7, "{x}: {} {}", got.1, want.1);
            };
            // (1 + tanh u) / 2 without its cancellation far to the left.
            let gate = 1.0 / (1.0 + (-2.0 * scale * (wide + cubic * wide.powi(3))).exp());
            let inner = scale * (1.0 + 3.0 * cubic * wide * wide);
            let slope = gate + 2.0 * wide * gate * (1.0 - gate) * inner;
            check((gelu_tanh(x), gelu_tanh_slope(x)), (wide * gate, slope));
            let gate = 1.0 / (1.0 + (-wide).exp());
            check((silu(x), silu_slope(x)), (wide * gate, gate + wide * gate * (1.0 - gate)));
        }
    }

    #[test]
    fn far_out_activations_are_0_or_the_identity() {
        for x in [110.0, 1e4, 1e18] {
            assert_eq!((gelu_tanh(x), gelu_tanh_slope(x)), (x, 1.0));
            assert_eq!((silu(x), silu_slope(x)), (x, 1.0));
            assert_eq!((gelu_tanh(-x), silu(-x)), (0.0, 0.0));
            assert!(gelu_tanh_slope(-x).abs() < 1e-11 && silu_slope(-x).abs() < 1e-11);
        }
    }
}
