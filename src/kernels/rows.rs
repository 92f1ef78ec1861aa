//! Reductions over one row, in a fixed order that vectorizes: running lanes, four vectors of them, then the lanes pairwise.

const VECTOR: usize = 16;
const LANES: usize = 4 * VECTOR;

/// Sum of `f(a[i], b[i])`.
#[inline(always)]
pub(crate) fn reduce<A: Copy, B: Copy>(a: &[A], b: &[B], f: impl Fn(A, B) -> f32) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lanes = [0f32; LANES];
    let (mut a, mut b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f(*a, *b);
        }
    }
    let (mut a, mut b) = (a.remainder().chunks_exact(VECTOR), b.remainder().chunks_exact(VECTOR));
    for (i, (a, b)) in a.by_ref().zip(b.by_ref()).enumerate() {
        for ((lane, a), b) in lanes[i * VECTOR..][..VECTOR].iter_mut().zip(a).zip(b) {
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
