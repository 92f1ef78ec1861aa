//! Reductions over one row of f32, in a fixed order that vectorizes: sixteen running lanes, then the lanes pairwise.

use crate::nn::exp::exp;

const LANES: usize = 16;

/// Sum of `f(a[i], b[i])`.
#[inline(always)]
fn reduce(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lanes = [0f32; LANES];
    let (mut a, mut b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f(*a, *b);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a.remainder()).zip(b.remainder()) {
        *lane += f(*a, *b);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of a row.
pub(crate) fn sum(a: &[f32]) -> f32 {
    reduce(a, a, |a, _| a)
}

/// Sum of products of two rows.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    reduce(a, b, |a, b| a * b)
}

/// The largest number of a row; nan is passed over.
fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let larger = |lane: &mut f32, x: &f32| *lane = if *x > *lane { *x } else { *lane };
    let mut groups = row.chunks_exact(LANES);
    for group in groups.by_ref() {
        lanes.iter_mut().zip(group).for_each(|(lane, x)| larger(lane, x));
    }
    lanes.iter_mut().zip(groups.remainder()).for_each(|(lane, x)| larger(lane, x));
    lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces a row by exp(x - max) and returns (max, sum of the new row). Dividing by the sum gives the softmax.
///
/// The sum of a row of finite numbers lies in [1, length]. A row with nan, with +inf or of -inf only gives nan.
pub(crate) fn exp_row(row: &mut [f32]) -> (f32, f32) {
    let max = max(row);
    row.iter_mut().for_each(|x| *x = exp(*x - max));
    (max, sum(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_take_every_element_of_any_length() {
        for n in [0, 1, 15, 16, 17, 33, 1000] {
            let row: Vec<f32> = (0..n).map(|i| (i % 13) as f32).collect();
            let want: f32 = row.iter().sum();
            assert_eq!(sum(&row), want);
            assert_eq!(dot(&row, &vec![2.0; n]), 2.0 * want);
        }
    }

    #[test]
    fn rows_that_have_no_softmax_give_nan() {
        for row in [vec![1.0, f32::NAN], vec![1.0, f32::INFINITY], vec![f32::NEG_INFINITY; 2]] {
            assert!(exp_row(&mut row.clone()).1.is_nan(), "{row:?}");
        }
        assert_eq!(exp_row(&mut [3.0, f32::NEG_INFINITY]), (3.0, 1.0));
    }
}
