//! Reductions over one row, in a fixed order that vectorizes: first in running vectors of sixteen lanes, then over the
//! lanes in pairs.

/// The number of lanes of a vector.
const LANES: usize = 16;
/// The number of independent vectors of running sums.
const VECTORS: usize = 4;

/// Returns the sum of `f(a[i], b[i])`.
#[inline(always)]
pub(crate) fn reduce<A: Copy, B: Copy>(a: &[A], b: &[B], f: impl Fn(A, B) -> f32) -> f32 {
    assert_eq!(a.len(), b.len());
    let [mut s0, mut s1, mut s2, mut s3] = [[0f32; LANES]; VECTORS];
    let (mut a, mut b) = (a.chunks_exact(VECTORS * LANES), b.chunks_exact(VECTORS * LANES));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        add_lanes(&mut s0, &a[..LANES], &b[..LANES], &f);
        add_lanes(&mut s1, &a[LANES..2 * LANES], &b[LANES..2 * LANES], &f);
        add_lanes(&mut s2, &a[2 * LANES..3 * LANES], &b[2 * LANES..3 * LANES], &f);
        add_lanes(&mut s3, &a[3 * LANES..], &b[3 * LANES..], &f);
    }
    let (mut a, mut b) = (a.remainder().chunks_exact(LANES), b.remainder().chunks_exact(LANES));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        add_lanes(&mut s0, a, b, &f);
    }
    add_lanes(&mut s1, a.remainder(), b.remainder(), &f);
    for lane in 0..LANES {
        s0[lane] = (s0[lane] + s1[lane]) + (s2[lane] + s3[lane]);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            s0[i] += s0[i + width];
        }
        width /= 2;
    }
    s0[0]
}

/// Returns the largest number of a row. NaN is ignored.
#[inline(always)]
pub(crate) fn maximum(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut groups = row.chunks_exact(LANES);
    for group in groups.by_ref() {
        lanes.iter_mut().zip(group).for_each(|(lane, x)| *lane = if *x > *lane { *x } else { *lane });
    }
    groups.remainder().iter().chain(&lanes.clone()).fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max })
}

/// Adds one term to each of the first lanes.
#[inline(always)]
fn add_lanes<A: Copy, B: Copy>(lanes: &mut [f32; LANES], a: &[A], b: &[B], f: &impl Fn(A, B) -> f32) {
    for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
        *lane += f(*a, *b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reduction_takes_every_element_of_any_length() {
        for n in [0, 1, 15, 16, 17, 33, 63, 64, 127, 1000] {
            let row: Vec<f32> = (0..n).map(|i| (i % 13) as f32).collect();
            let want: f32 = row.iter().map(|x| x * 2.0).sum();
            assert_eq!(reduce(&row, &vec![2.0; n], |a, b| a * b), want);
        }
    }
}
