//! The exponential of f32 as a few multiplications and additions: loops over it vectorize, a call of the C library's
//! `expf` per element does not.
//!
//! No fused multiply-add and no table: every machine and every vector width gives the same bits.

/// log2(e).
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln(2) in two parts: the first has so few digits that its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding 1.5 x 2^23 rounds to an integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;

/// exp(x), within 2 units in the last place; 0 and infinity where the result leaves f32's range, nan for nan.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is 0 or infinite. Written so that nan passes both.
    let x = if x < -104.0 { -104.0 } else { x };
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

#[cfg(test)]
mod tests {
    use super::exp;

    /// Distance in representable numbers; both are positive.
    fn ulps(a: f32, b: f32) -> u32 {
        a.to_bits().abs_diff(b.to_bits())
    }

    #[test]
    fn it_is_within_two_units_in_the_last_place_everywhere() {
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
    fn the_edges_are_those_of_the_true_function() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!((exp(-104.0), exp(-1e30), exp(89.0), exp(1e30)), (0.0, 0.0, f32::INFINITY, f32::INFINITY));
        assert!(exp(-103.0) > 0.0 && exp(88.7) < f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
