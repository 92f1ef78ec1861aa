//! Exponential and activation functions of one f32, computed with a few multiplications and additions. Loops over them
//! vectorize, unlike calls to the C library's functions for each element.
//!
//! These functions use no fused multiply-add and no table: every machine and every vector width produces the same bits.

use std::f64::consts::{LN_2, LOG2_E};

/// ln(2) in two parts. The first has so few significant bits that its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding 1.5 x 2^23 rounds to an integer, which is then in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Adding this number also rounds to an integer n, but the low bits are then the exponent field of 2^n.
const ROUND_TO_EXPONENT: f32 = ROUND + 127.0;

/// sqrt(2 / pi), in GELU's tanh approximation.
pub(crate) const GELU_SCALE: f32 = 0.797_884_6;
/// The coefficient of the cube in GELU's tanh approximation.
pub(crate) const GELU_CUBIC: f32 = 0.044_715;

/// Returns exp(x), within 2 units in the last place. The result is 0 or infinity outside f32's range, and NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Below the lower bound, the result is 0; above the upper bound, it is infinite. NaN passes both comparisons.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x * LOG2_E as f32 + ROUND;
    let y = exp_of_rest(x, shifted - ROUND);
    // 2^n as two factors, because 2^n itself may be outside f32's normal numbers.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    y * power(n >> 1) * power(n.wrapping_sub(n >> 1))
}

/// Returns [`exp`] for x <= 0, within 2 units in the last place. A result below f32's normal numbers may be 0.
#[inline(always)]
pub fn exp_below_0(x: f32) -> f32 {
    // At this bound, n is -127, and the power with the exponent field 0 is 0. NaN passes through.
    let x = if x < -127.0 * LN_2 as f32 { -127.0 * LN_2 as f32 } else { x };
    let shifted = x * LOG2_E as f32 + ROUND_TO_EXPONENT;
    exp_of_rest(x, shifted - ROUND_TO_EXPONENT) * power_of_2(shifted)
}

/// Returns exp(x - n ln(2)), where n is the integer nearest to x / ln(2).
#[inline(always)]
fn exp_of_rest(x: f32, n: f32) -> f32 {
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // 1 + r + r^2 p(r) with |r| <= ln(2) / 2, p a minimax polynomial (Cephes).
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    p * (r * r) + r + 1.0
}

/// Returns 2^n, given n + [`ROUND_TO_EXPONENT`]: 0 at n = -127, infinity at n = 128.
#[inline(always)]
fn power_of_2(shifted: f32) -> f32 {
    f32::from_bits(shifted.to_bits() << 23)
}

/// The bound to which arguments of the hyperbolic tangent are clamped. Beyond it, the function differs from 1 or -1 by
/// less than 3e-7.
pub(crate) const TANH_BOUND: f32 = 7.905_311;
/// tanh(x) is x p(x^2) / q(x^2): the coefficients of p ([`TANH_ABOVE`]) and of q ([`TANH_BELOW`]), highest
/// power first (Eigen's).
pub(crate) const TANH_ABOVE: [f32; 7] =
    [-2.760_768_5e-16, 2.000_188e-13, -8.604_672e-11, 5.122_297e-8, 1.485_722_4e-5, 6.372_619_3e-4, 4.893_524_6e-3];
pub(crate) const TANH_BELOW: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];

/// Returns tanh(x), with a relative error of at most 6e-7.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let x = clamp_to(x, TANH_BOUND);
    let x2 = x * x;
    x * polynomial(&TANH_ABOVE, x2) / polynomial(&TANH_BELOW, x2)
}

/// Clamps x to the range from -bound to bound. NaN passes through.
#[inline(always)]
fn clamp_to(x: f32, bound: f32) -> f32 {
    let x = if x < -bound { -bound } else { x };
    if x > bound { bound } else { x }
}

/// Evaluates the polynomial with these coefficients, highest power first.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    let mut sum = coefficients[0];
    for c in &coefficients[1..] {
        sum = sum * x + c;
    }
    sum
}

/// Returns exact GELU, x Phi(x) (Hendrycks and Gimpel 2016), to within 3e-7 (1 + |x|). Phi is the normal
/// distribution function.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * normal(x)
}

/// Returns the derivative of [`gelu`], to within 4e-7.
#[inline(always)]
pub fn gelu_slope(x: f32) -> f32 {
    // exp(-x^2 / 2) / sqrt(2 pi).
    let density = 0.398_942_3 * exp_below_0(-0.5 * (x * x));
    normal(x) + clamp_to(x, 1e15) * density
}

/// Returns the normal distribution function at x: (1 + erf(x / sqrt(2))) / 2, to within 2e-7.
#[inline(always)]
pub(crate) fn normal(x: f32) -> f32 {
    0.5 + 0.5 * erf(x * std::f32::consts::FRAC_1_SQRT_2)
}

/// Returns the error function of x, with a relative error of at most 5e-7: x p(x^2) / q(x^2) with Eigen's coefficients.
/// For |x| of at least 4, it is 1 or -1 in f32.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let x = clamp_to(x, 4.0);
    let x2 = x * x;
    let numerator =
        [-2.726_142_3e-10, 2.770_681_4e-8, -2.101_024e-6, -5.692_506_4e-5, -7.349_906e-4, -2.954_6e-3, -1.609_603_3e-2];
    let denominator = [-1.456_607_2e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2];
    let y = x * polynomial(&numerator, x2) / polynomial(&denominator, x2);
    let y = if x <= -4.0 { -1.0 } else { y };
    if x >= 4.0 { 1.0 } else { y }
}

/// Returns 1 / (1 + exp(-x)).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns x * sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    gated_by_odds(x, silu_odds(x))
}

/// Computes the first step of [`silu`]. [`gated_by_odds`] is the second.
#[inline(always)]
pub(crate) fn silu_odds(x: f32) -> f32 {
    exponent_of_odds(silu_exponent(x), INFINITE)
}

/// Returns the derivative of [`silu`].
#[inline(always)]
pub fn silu_slope(x: f32) -> f32 {
    slope_of_gated(x, odds(exponent_of_odds(silu_exponent(x), FINITE)), 1.0)
}

/// Returns max(x, 0)^2.
#[inline(always)]
pub fn relu_squared(x: f32) -> f32 {
    let positive = positive_part(x);
    positive * positive
}

/// Returns the derivative of [`relu_squared`].
#[inline(always)]
pub fn relu_squared_slope(x: f32) -> f32 {
    2.0 * positive_part(x)
}

/// Returns max(x, 0). NaN passes through.
#[inline(always)]
pub(crate) fn positive_part(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// Returns 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh approximation of GELU (Hendrycks and Gimpel 2016).
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    gated_by_odds(x, gelu_tanh_odds(x))
}

/// Computes the first step of [`gelu_tanh`]. [`gated_by_odds`] is the second.
#[inline(always)]
pub(crate) fn gelu_tanh_odds(x: f32) -> f32 {
    exponent_of_odds(gelu_exponent(x), INFINITE)
}

/// Returns x / (1 + 2^t), for a t within the bounds of [`exponent_of_odds`].
#[inline(always)]
pub(crate) fn gated_by_odds(x: f32, t: f32) -> f32 {
    x / (1.0 + odds(t))
}

/// Returns the derivative of [`gelu_tanh`].
#[inline(always)]
pub fn gelu_tanh_slope(x: f32) -> f32 {
    // Beyond these bounds, the derivative is 0 or 1. Within them, the square below is finite. NaN passes through.
    let x = if x < -100.0 { -100.0 } else { x };
    let x = if x > 100.0 { 100.0 } else { x };
    let inner = 2.0 * GELU_SCALE + 6.0 * GELU_SCALE * GELU_CUBIC * (x * x);
    slope_of_gated(x, odds(exponent_of_odds(gelu_exponent(x), FINITE)), inner)
}

/// Returns the derivative of x / (1 + exp(-u)) for a function u of x, given odds = exp(-u), which are at most
/// 2^[`FINITE`], and the derivative of u.
#[inline(always)]
fn slope_of_gated(x: f32, odds: f32, inner: f32) -> f32 {
    let gate = 1.0 / (1.0 + odds);
    gate + x * gate * (odds * gate) * inner
}

/// Returns -x log2(e).
#[inline(always)]
fn silu_exponent(x: f32) -> f32 {
    x * -LOG2_E as f32
}

/// Returns -2 u log2(e) for the tanh's argument u: (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)). This needs one exponential
/// and avoids cancellation where the tanh is near -1.
#[inline(always)]
fn gelu_exponent(x: f32) -> f32 {
    const LINEAR: f32 = (-2.0 * LOG2_E * GELU_SCALE as f64) as f32;
    const CUBIC: f32 = (-2.0 * LOG2_E * GELU_SCALE as f64 * GELU_CUBIC as f64) as f32;
    x * (LINEAR + CUBIC * (x * x))
}

/// Upper bounds for [`exponent_of_odds`]. With the first, odds of 2^127.5 or more are infinite. With the second, the
/// odds are so small that their products stay finite.
const INFINITE: f32 = 128.0;
const FINITE: f32 = 99.0;

/// Returns t, limited to at most `high` and to values for which 2^t is not denormal. Processors compute slowly with
/// denormal numbers, and the value used instead adds nothing to 1 either.
#[inline(always)]
fn exponent_of_odds(t: f32, high: f32) -> f32 {
    // Written so that NaN passes both comparisons.
    let t = if t < -126.0 { -126.0 } else { t };
    if t > high { high } else { t }
}

/// Returns 2^t to be added to 1, for a t within the bounds of [`exponent_of_odds`]. It is accurate only to a few
/// units in the last place, because t itself is no more accurate.
#[inline(always)]
fn odds(t: f32) -> f32 {
    // t = n + f with |f| <= 1/2, exactly.
    let shifted = t + ROUND_TO_EXPONENT;
    let f = t - (shifted - ROUND_TO_EXPONENT);
    // 1 + ln(2) f + f^2 p(f), a minimax polynomial with an error of 1.05e-7, evaluated in pairs to shorten the
    // dependency chain.
    let f2 = f * f;
    let high = 1.330_026_4e-3 * f + 9.669_708e-3;
    let middle = 5.550_56e-2 * f + 0.240_222_81;
    let low = LN_2 as f32 * f + 1.0;
    ((high * f2 + middle) * f2 + low) * power_of_2(shifted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the distance between two positive numbers, counted in representable numbers.
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
    fn the_exponential_below_0_is_the_exponential_but_for_denormal_numbers() {
        for i in 0..=90_000 {
            let x = i as f32 * -1e-3;
            let (got, want) = (exp_below_0(x), exp(x));
            assert!(ulps(got, want) <= 2 || got == 0.0 && want < 1.2e-38, "{x}: {got} {want}");
        }
        assert_eq!((exp_below_0(0.0), exp_below_0(-1e30), exp_below_0(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(exp_below_0(f32::NAN).is_nan());
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
            // (1 + tanh u) / 2 without cancellation for very negative u.
            let gate = 1.0 / (1.0 + (-2.0 * scale * (wide + cubic * wide.powi(3))).exp());
            let inner = scale * (1.0 + 3.0 * cubic * wide * wide);
            let slope = gate + 2.0 * wide * gate * (1.0 - gate) * inner;
            check((gelu_tanh(x), gelu_tanh_slope(x)), (wide * gate, slope));
            let gate = 1.0 / (1.0 + (-wide).exp());
            check((silu(x), silu_slope(x)), (wide * gate, gate + wide * gate * (1.0 - gate)));
            let above = wide.max(0.0);
            check((relu_squared(x), relu_squared_slope(x)), (above * above, 2.0 * above));
        }
    }

    /// Computes the error function in f64 by its series.
    fn erf_in_f64(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn tanh_and_erf_are_within_their_bounds_of_the_true_functions() {
        let mut worst = (0f64, 0f64);
        for i in -400_000..=400_000 {
            let x = i as f32 / 40_000.0;
            let relative = |got: f32, want: f64| (f64::from(got) - want).abs() / want.abs().max(1e-30);
            worst.0 = worst.0.max(relative(tanh(x), f64::from(x).tanh()));
            if x.abs() <= 4.0 && i % 16 == 0 {
                worst.1 = worst.1.max(relative(erf(x), erf_in_f64(f64::from(x))));
            }
        }
        assert!(worst.0 > 0.0 && worst.0 <= 6e-7 && worst.1 > 0.0 && worst.1 <= 5e-7, "{worst:?}");
        assert_eq!((tanh(0.0), erf(0.0)), (0.0, 0.0));
        for x in [10.0, 1e20, f32::INFINITY] {
            assert!((tanh(x) - 1.0).abs() <= 6e-7 && (erf(x) - 1.0).abs() <= 4e-7);
            assert!((tanh(-x) + 1.0).abs() <= 6e-7 && (erf(-x) + 1.0).abs() <= 4e-7);
        }
        assert!(tanh(f32::NAN).is_nan() && erf(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_and_its_slope_are_those_of_the_formulas_in_f64() {
        for i in -1000..=1000 {
            let x = i as f32 / 200.0;
            let wide = f64::from(x);
            let cdf = 0.5 + 0.5 * erf_in_f64(wide * std::f64::consts::FRAC_1_SQRT_2);
            let slope = cdf + wide * (-0.5 * wide * wide).exp() / (2.0 * std::f64::consts::PI).sqrt();
            assert!((f64::from(gelu(x)) - wide * cdf).abs() <= 3e-7 * (1.0 + wide.abs()), "{x}");
            assert!((f64::from(gelu_slope(x)) - slope).abs() <= 4e-7, "{x}: {} {slope}", gelu_slope(x));
        }
        for x in [20f32, 1e4, 1e18] {
            assert_eq!((gelu(x), gelu(-x), gelu_slope(x), gelu_slope(-x)), (x, 0.0, 1.0, 0.0));
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
