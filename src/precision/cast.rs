//! Casts between flat buffers of different dtypes.

use super::{FlatMut, FlatRef};
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
