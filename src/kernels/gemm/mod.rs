//! Matrix products with what follows them fused in.
//!
//! Sums are kept in f32 and rounded once, when they are stored. An element of the result has the same bits whatever
//! the number of rows around it and whatever the number of threads.
//!
//! Each level of SIMD has a method of its own, and [`Method::of`] is the one place that says which. With AVX-512
//! operands are packed into the order in which a register-blocked microkernel reads them, bf16 operands stay in bf16
//! and are multiplied in pairs (`vdpbf16ps`, which takes denormal operands and results as 0). With AVX2 kernels of the
//! `gemm` crate compute the sums, and plain loops anywhere else.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod column_sums;
mod epilogue;
mod matrix;
mod portable;
mod scratch;
mod tiles;

pub use column_sums::column_sums;
pub use epilogue::{Activation, Epilogue};
pub use matrix::{Matrix, MatrixMut};

use crate::kernels::count;
use crate::kernels::element::Element;
use crate::kernels::simd::{Level, level};
use epilogue::Sink;

/// `c = epilogue(a b)`, for `a` of `[m, k]` and `b` of `[k, n]`.
///
/// # Panics
/// If the shapes do not fit each other.
pub fn gemm<E: Element, C: Element>(
    c: MatrixMut<'_, C>,
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    epilogue: Epilogue<'_, C>,
) {
    count::add([a.rows(), a.cols(), b.cols()]);
    gemm_by(Method::of::<E>(level()), c, a, b, epilogue);
}

/// A way to compute the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Arithmetic),
}

impl Method {
    /// The path of a level, for operands of a dtype.
    fn of<E: Element>(level: Level) -> Self {
        match level {
            Level::Portable => Self::Portable,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Self::Avx512(avx512::Arithmetic::of::<E>()),
        }
    }
}

fn gemm_by<E: Element, C: Element>(
    method: Method,
    c: MatrixMut<'_, C>,
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    epilogue: Epilogue<'_, C>,
) {
    assert_eq!(a.cols(), b.rows(), "inner dimensions differ");
    assert_eq!((c.rows(), c.cols()), (a.rows(), b.cols()), "result has another shape");
    let sink = Sink::new(c, epilogue);
    if a.rows() == 0 || b.cols() == 0 {
        return;
    }
    match method {
        Method::Portable => portable::gemm(&sink, a, b),
        #[cfg(target_arch = "x86_64")]
        Method::Avx2 => avx2::gemm(&sink, a, b),
        #[cfg(target_arch = "x86_64")]
        Method::Avx512(arithmetic) => avx512::gemm(arithmetic, &sink, a, b),
    }
}

#[cfg(test)]
mod tests;
