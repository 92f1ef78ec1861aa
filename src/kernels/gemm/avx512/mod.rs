//! The product on processors with AVX-512.
//!
//! Everything is laid out in *words* of 32 bits along the inner dimension: one f32, or two neighbouring bf16. A step of
//! the microkernel multiplies one word of each of its rows of `a` with one word of each of its columns of `b`.
//! bf16 without the bf16 instructions, and f16, are widened to f32 when they are packed.

mod blocked;
mod finish;
mod kernel;
mod pack;
mod panels;

use super::epilogue::Sink;
use super::matrix::Matrix;
use crate::kernels::element::{Element, Kind};

/// The content of a word, which decides how words are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetic {
    /// One f32.
    Single,
    /// Two bf16; needs AVX512_BF16.
    Pairs,
}

impl Arithmetic {
    /// The fastest that a processor with AVX-512, as this one, has for operands of a dtype.
    pub(super) fn of<E: Element>() -> Self {
        if E::KIND == Kind::BF16 && is_x86_feature_detected!("avx512bf16") { Self::Pairs } else { Self::Single }
    }
}

/// `c = epilogue(a b)`, by an arithmetic that [`Arithmetic::of`] has found for `E`, or by `Single`.
pub(super) fn gemm<E: Element, C: Element>(
    arithmetic: Arithmetic,
    sink: &Sink<'_, C>,
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
) {
    match arithmetic {
        Arithmetic::Single => blocked::gemm::<pack::Single, E, C>(sink, a, b),
        Arithmetic::Pairs => {
            assert_eq!(E::KIND, Kind::BF16, "pairs are of bf16");
            blocked::gemm::<pack::Pairs, E, C>(sink, a, b);
        }
    }
}
