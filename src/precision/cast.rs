//! Casts between flat buffers of different dtypes, and arithmetic across them in f32.

use super::{FlatMut, FlatRef};
use crate::kernels;
use half::slice::HalfFloatSliceExt;

/// Copies `src` into `dst` of equal length, rounding to nearest even where the format narrows.
pub fn copy(dst: FlatMut<'_>, src: FlatRef<'_>) {
    match (dst, src) {
        (FlatMut::F32(d), FlatRef::F32(s)) => d.copy_from_slice(s),
        (FlatMut::BF16(d), FlatRef::BF16(s)) => d.copy_from_slice(s),
        (FlatMut::F16(d), FlatRef::F16(s)) => d.copy_from_slice(s),
        (FlatMut::F32(d), FlatRef::BF16(s)) => s.convert_to_f32_slice(d),
        (FlatMut::F32(d), FlatRef::F16(s)) => s.convert_to_f32_slice(d),
        (FlatMut::BF16(d), FlatRef::F32(s)) => d.convert_from_f32_slice(s),
        (FlatMut::F16(d), FlatRef::F32(s)) => d.convert_from_f32_slice(s),
        (FlatMut::BF16(d), FlatRef::F16(s)) => {
            d.iter_mut().zip(s).for_each(|(d, s)| *d = half::bf16::from_f32(s.to_f32()));
        }
        (FlatMut::F16(d), FlatRef::BF16(s)) => {
            d.iter_mut().zip(s).for_each(|(d, s)| *d = half::f16::from_f32(s.to_f32()));
        }
    }
}

/// `dst[i] = f(dst[i], src[i])`, computed in f32 and rounded once. In pieces that stay in the first-level cache.
pub(super) fn combine(mut dst: FlatMut<'_>, src: FlatRef<'_>, f: impl Fn(f32, f32) -> f32) {
    const PIECE: usize = 1024;
    assert_eq!(dst.len(), src.len(), "arithmetic on flat buffers of different length");
    if let (FlatMut::F32(d), FlatRef::F32(s)) = (&mut dst, src) {
        d.iter_mut().zip(s).for_each(|(d, s)| *d = f(*d, *s));
        return;
    }
    let (mut a, mut b) = ([0f32; PIECE], [0f32; PIECE]);
    for start in (0..dst.len()).step_by(PIECE) {
        let range = start..(start + PIECE).min(dst.len());
        let n = range.len();
        let mut part = dst.reborrow().slice(range.clone());
        copy(FlatMut::F32(&mut a[..n]), part.as_ref());
        copy(FlatMut::F32(&mut b[..n]), src.slice(range));
        a[..n].iter_mut().zip(&b[..n]).for_each(|(a, b)| *a = f(*a, *b));
        part.reborrow().copy_cast(FlatRef::F32(&a[..n]));
    }
}

/// `dst[i] *= factor`, computed in f32 and rounded once.
pub(super) fn scale(dst: FlatMut<'_>, factor: f32) {
    match dst {
        FlatMut::F32(d) => kernels::add::scale_into(d, factor),
        FlatMut::BF16(d) => kernels::add::scale_into(d, factor),
        FlatMut::F16(d) => kernels::add::scale_into(d, factor),
    }
}

#[cfg(test)]
mod tests {
    use crate::precision::{Flat, FlatRef};
    use candle_core::DType;

    #[test]
    fn sums_across_dtypes_are_rounded_once() {
        let n = 2500;
        let x: Vec<f32> = (0..n).map(|i| 1.0 + i as f32 * 0.37).collect();
        for dst in [DType::F32, DType::BF16, DType::F16] {
            for src in [DType::F32, DType::BF16, DType::F16] {
                let (mut d, s) = (Flat::from_f32(x.clone(), dst), Flat::from_f32(x.clone(), src));
                let before = d.clone();
                d.as_mut().add_scaled(s.as_ref(), 0.5);
                let exact: Vec<f32> = (0..n).map(|i| before.as_ref().get(i) + s.as_ref().get(i) * 0.5).collect();
                assert_eq!(d, Flat::from_f32(exact, dst), "{dst:?} += {src:?}");
                d.as_mut().copy_scaled(s.as_ref(), 2.0);
                let exact: Vec<f32> = (0..n).map(|i| s.as_ref().get(i) * 2.0).collect();
                assert_eq!(d, Flat::from_f32(exact, dst), "{dst:?} = {src:?}");
            }
        }
        let mut d = Flat::zeros(DType::BF16, 1);
        d.as_mut().copy_cast(FlatRef::F32(&[1.003_907]));
        assert_eq!(d.as_ref().get(0), 1.0078125, "just above half a step rounds up");
    }
}
