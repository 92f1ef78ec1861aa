//! The storage dtypes of the kernels: every kernel reads elements of one dtype, computes in f32, and rounds once.

use super::half_conversion::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use super::simd::vectorized;
use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

/// A storage dtype.
pub trait Element: Copy + Default + Send + Sync + bytemuck::Pod + 'static {
    /// The [`ElementDtype`] of this type.
    const KIND: ElementDtype;

    /// Widens `src` into `dst` of the same length. In a loop that is compiled for a SIMD level, use
    /// [`f32_access::widen`](super::f32_access::widen).
    fn widen(src: &[Self], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len(), "the slice lengths differ");
        vectorized!(widen(src, dst));
    }

    /// Rounds `src` to nearest even into `dst`, which has the same length. In a loop that is compiled for a SIMD level,
    /// use [`f32_access::narrow`](super::f32_access::narrow).
    fn narrow(src: &[f32], dst: &mut [Self]) {
        assert_eq!(src.len(), dst.len(), "the slice lengths differ");
        vectorized!(narrow(src, dst));
    }
}

/// The storage dtypes by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementDtype {
    F32,
    BF16,
    F16,
}

impl Element for f32 {
    const KIND: ElementDtype = ElementDtype::F32;
}

impl Element for bf16 {
    const KIND: ElementDtype = ElementDtype::BF16;
}

impl Element for f16 {
    const KIND: ElementDtype = ElementDtype::F16;
}

/// Does the same as [`Element::widen`], as part of a loop.
#[inline(always)]
pub(super) fn widen<E: Element>(src: &[E], dst: &mut [f32]) {
    match E::KIND {
        ElementDtype::F32 => dst.copy_from_slice(cast_slice(src)),
        ElementDtype::BF16 => widen_bf16(cast_slice(src), dst),
        ElementDtype::F16 => widen_f16(cast_slice(src), dst),
    }
}

/// Does the same as [`Element::narrow`], as part of a loop.
#[inline(always)]
pub(super) fn narrow<E: Element>(src: &[f32], dst: &mut [E]) {
    match E::KIND {
        ElementDtype::F32 => dst.copy_from_slice(cast_slice(src)),
        ElementDtype::BF16 => narrow_bf16(src, cast_slice_mut(dst)),
        ElementDtype::F16 => narrow_f16(src, cast_slice_mut(dst)),
    }
}
