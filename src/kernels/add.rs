//! Addition and scaling of slices, at memory speed.

use crate::kernels::element::Element;
use crate::kernels::f32_access::{update, vectorized};
use crate::kernels::parallel::{ParallelChunks, for_each_part};

/// The number of elements that one task computes.
const CHUNK: usize = 1 << 16;

/// Computes dst += src, and rounds each sum once.
///
/// Panics if the lengths differ.
pub fn add_into<E: Element>(dst: &mut [E], src: &[E]) {
    assert_eq!(dst.len(), src.len(), "the slice lengths of a sum differ");
    for_each_part(src.len().div_ceil(CHUNK), ParallelChunks::new(dst, CHUNK), |i, dst| {
        let src = &src[i * CHUNK..][..dst.len()];
        vectorized!(update(
            dst,
            [src],
            #[inline(always)]
            |d, [s]| d + s
        ));
    });
}

/// Computes dst *= factor, and rounds each product once.
pub fn scale_into<E: Element>(dst: &mut [E], factor: f32) {
    for_each_part(dst.len().div_ceil(CHUNK), ParallelChunks::new(dst, CHUNK), |_, dst| {
        vectorized!(update(
            dst,
            [&[] as &[E]; 0],
            #[inline(always)]
            |d, []| d * factor
        ));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::f32_access::{get, put};
    use half::{bf16, f16};

    fn sums_and_multiples_are_rounded_once<E: Element>() {
        let n = CHUNK + 77;
        let a: Vec<E> = (0..n).map(|i| put(i as f32 * 0.37 - 100.0)).collect();
        let b: Vec<E> = (0..n).map(|i| put(3.0 - i as f32 * 0.011)).collect();
        let (mut sum, mut multiple) = (a.clone(), a.clone());
        add_into(&mut sum, &b);
        scale_into(&mut multiple, 1.7);
        for i in 0..n {
            let want: [E; 2] = [put(get(a[i]) + get(b[i])), put(get(a[i]) * 1.7)];
            assert_eq!([get(sum[i]), get(multiple[i])], want.map(get));
        }
    }

    #[test]
    fn sums_and_multiples_are_rounded_once_in_every_dtype() {
        sums_and_multiples_are_rounded_once::<f32>();
        sums_and_multiples_are_rounded_once::<bf16>();
        sums_and_multiples_are_rounded_once::<f16>();
    }
}
