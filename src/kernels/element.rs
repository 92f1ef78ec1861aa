//! The storage dtypes of the kernels: every kernel reads elements of one dtype, computes in f32, and rounds once.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A storage dtype.
pub trait Element: Copy + Default + Send + Sync + bytemuck::Pod + 'static {
    /// Which one.
    const KIND: Kind;

    /// Widens `src` into `dst` of the same length.
    fn widen(src: &[Self], dst: &mut [f32]);

    /// Rounds `src` into `dst` of the same length, to nearest even.
    fn narrow(src: &[f32], dst: &mut [Self]);
}

/// The storage dtypes by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    F32,
    BF16,
    F16,
}

impl Element for f32 {
    const KIND: Kind = Kind::F32;

    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
}

macro_rules! half_element {
    ($ty:ty, $kind:expr) => {
        impl Element for $ty {
            const KIND: Kind = $kind;

            fn widen(src: &[Self], dst: &mut [f32]) {
                src.convert_to_f32_slice(dst);
            }

            fn narrow(src: &[f32], dst: &mut [Self]) {
                dst.convert_from_f32_slice(src);
            }
        }
    };
}

half_element!(bf16, Kind::BF16);
half_element!(f16, Kind::F16);
