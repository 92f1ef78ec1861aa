//! The softmax of routers, and the choice of the largest numbers of a row.

use crate::kernels::f32_access::vectorized;
use crate::kernels::math::exp_below_0;
use crate::kernels::row_reduce::{maximum, reduce};

/// Replaces a row of logits with their softmax.
pub fn softmax(row: &mut [f32]) {
    vectorized!({
        let max = maximum(row);
        for x in row.iter_mut() {
            *x = exp_below_0(*x - max);
        }
        let total = reduce(
            row,
            row,
            #[inline(always)]
            |x, _| x,
        );
        for x in row.iter_mut() {
            *x /= total;
        }
    });
}

/// Writes the positions of the largest numbers of a row to `top`, the largest first. Among equal numbers, the one with
/// the lowest position comes first. NaN counts as the smallest number.
///
/// # Panics
/// Panics if the row has fewer numbers than `top`.
pub fn top(row: &[f32], top: &mut [u32]) {
    assert!(top.len() <= row.len(), "{} numbers are requested from a row of {}", top.len(), row.len());
    let precedes = |a: u32, b: u32| match (row[a as usize], row[b as usize]) {
        (x, y) if x.is_nan() || y.is_nan() => !x.is_nan() || (y.is_nan() && a < b),
        (x, y) => x > y || (x == y && a < b),
    };
    let mut count = 0;
    for candidate in 0..row.len() as u32 {
        if count == top.len() {
            if count == 0 || !precedes(candidate, top[count - 1]) {
                continue;
            }
            count -= 1;
        }
        let position = top[..count].partition_point(|other| precedes(*other, candidate));
        top.copy_within(position..count, position + 1);
        top[position] = candidate;
        count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_numbers_come_first_and_of_equal_ones_the_first() {
        let find = |row: &[f32], k: usize| {
            let mut found = vec![99; k];
            top(row, &mut found);
            found
        };
        assert_eq!(find(&[1.0, 5.0, 3.0, 4.0], 3), [1, 3, 2]);
        assert_eq!(find(&[2.0; 16], 3), [0, 1, 2]);
        assert_eq!(find(&[0.0, 1.0, 1.0, 0.0, 1.0], 4), [1, 2, 4, 0]);
        assert_eq!(find(&[-0.0, 0.0], 2), [0, 1], "both zeros are equal");
        assert_eq!(find(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], 3), [1, 0, 2]);
        assert_eq!(find(&[f32::NAN; 4], 2), [0, 1], "they are still different positions");
        assert_eq!(find(&[3.0], 0), [0u32; 0]);
        // Compared with a stable sort, for many rows with ties.
        for seed in 0..200u32 {
            let row: Vec<f32> = (0..13).map(|i: u32| ((i * 7 + seed * 31 + i * i * seed) % 6) as f32).collect();
            let mut order: Vec<u32> = (0..13).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
            for k in 0..=13 {
                assert_eq!(find(&row, k), order[..k], "{row:?}");
            }
        }
    }

    #[test]
    fn a_softmax_sums_to_one_and_large_logits_do_not_overflow() {
        let mut row = [1000.0, 999.0, -1000.0, 998.0];
        softmax(&mut row);
        let total = 1.0 + f64::exp(-1.0) + f64::exp(-2.0);
        for (x, want) in row.iter().zip([1.0, f64::exp(-1.0), 0.0, f64::exp(-2.0)]) {
            assert!((f64::from(*x) - want / total).abs() < 1e-7, "{row:?}");
        }
    }
}
