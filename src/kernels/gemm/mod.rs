//! Matrix products with fused epilogues.
//!
//! Sums are kept in f32 and rounded once, when they are stored. An element of the result has the same bits for any
//! number of other rows and for any number of threads.
//!
//! Operands are packed into the order in which a register-blocked microkernel reads them. The product is generic over a
//! [`GemmArithmetic`](arithmetic::GemmArithmetic), which defines the vectors and how a word of `a` is multiplied by
//! those of `b`. [`SimdMethod::of`] selects one for a SIMD level. On processors whose AVX512_BF16 instructions are
//! faster than those for f32, bf16 operands stay in bf16 and are multiplied in pairs (`vdpbf16ps`, which treats
//! denormal operands and results as 0).

mod arithmetic;
mod blocked;
mod column_sums;
mod epilogue;
mod exchanged;
mod few_rows;
mod grouped;
mod matrix;
mod microkernel;
mod pack;
mod panels;
mod scratch;
mod task_grid;
mod tile_epilogue;
mod unpacked;

pub use column_sums::column_sums;
pub use epilogue::{Activation, Epilogue};
pub use grouped::Product;
pub use matrix::{Matrix, MatrixMut};

use crate::kernels::element::Element;
use crate::kernels::mac_count;
use crate::kernels::simd::level;
use crate::kernels::vector::{SimdMethod, with_words_of};
use epilogue::EpilogueOutput;

/// Computes `c = epilogue(a b)`, for `a` of `[m, k]` and `b` of `[k, n]`.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn gemm<E: Element, C: Element>(
    c: MatrixMut<'_, C>,
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    epilogue: Epilogue<'_, C>,
) {
    mac_count::add([a.rows(), a.cols(), b.cols()]);
    gemm_by(SimdMethod::of::<E>(level()), c, a, b, epilogue);
}

fn gemm_by<E: Element, C: Element>(
    method: SimdMethod,
    c: MatrixMut<'_, C>,
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    epilogue: Epilogue<'_, C>,
) {
    assert_eq!(a.cols(), b.rows(), "inner dimensions differ");
    assert_eq!((c.rows(), c.cols()), (a.rows(), b.cols()), "the result has a different shape");
    let output = EpilogueOutput::new(c, epilogue);
    if a.rows() == 0 || b.cols() == 0 {
        return;
    }
    with_words_of!(method, W => blocked::gemm::<W, E, C>(&output, a, b));
}

/// Computes several products in one pass: their tasks are divided among the threads together, so that products of
/// unequal sizes leave no thread idle. Each result has the bits of [`gemm`].
///
/// # Panics
/// Panics if the shapes of a product do not match.
pub fn gemm_grouped<E: Element, C: Element>(products: Vec<Product<'_, E, C>>) {
    for Product { a, b, .. } in &products {
        mac_count::add([a.rows(), a.cols(), b.cols()]);
    }
    gemm_grouped_by(SimdMethod::of::<E>(level()), products);
}

fn gemm_grouped_by<E: Element, C: Element>(method: SimdMethod, products: Vec<Product<'_, E, C>>) {
    let products: Vec<_> = products.into_iter().filter_map(Product::check).collect();
    with_words_of!(method, W => grouped::gemm::<W, E, C>(&products));
}

#[cfg(test)]
mod tests;
