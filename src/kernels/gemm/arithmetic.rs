//! The parts of a product that depend on the SIMD level: the words ([`PackedWords`]), and the number of sums that the
//! registers hold.
//!
//! A step of a microkernel multiplies one word of each of its rows of `a` by one word of each of its columns of `b`.

use crate::kernels::element::Element;
#[cfg(target_arch = "aarch64")]
use crate::kernels::vector::Neon;
#[cfg(target_arch = "x86_64")]
use crate::kernels::vector::{Avx2, Avx512, Bf16PairWords};
use crate::kernels::vector::{F32Words, PackElementsToWords, PackedWords, PortableVector, SimdVector};

/// Vectors of words, and their products.
///
/// # Safety
/// As for [`SimdVector`], the functions may be called only inside [`SimdVector::with`].
pub(super) trait GemmArithmetic: PackedWords {
    /// The number of rows of the largest tile of sums, a power of two.
    const ROWS: usize;
    /// The number of vectors of the largest tile of sums.
    const VECTORS: usize;
    /// The maximum number of words of `b` that a task packs, to read them repeatedly from its core's second-level
    /// cache.
    const WORDS_OF_B: usize;

    /// The number of columns of a vector.
    const LANES: usize = Self::V::LANES;
    /// The number of columns of the largest tile of sums.
    const COLS: usize = Self::VECTORS * Self::LANES;
}

/// An arithmetic whose words can hold packed elements of a dtype.
pub(super) trait ElementArithmetic<E: Element>: GemmArithmetic + PackElementsToWords<E> {}

impl<E: Element, A: GemmArithmetic + PackElementsToWords<E>> ElementArithmetic<E> for A {}

/// Implements the tile sizes for words of one f32, for one type of vectors.
macro_rules! single {
    ($vector:ty, $rows:literal rows, $vectors:literal vectors, $words_of_b:expr) => {
        impl GemmArithmetic for F32Words<$vector> {
            const ROWS: usize = $rows;
            const VECTORS: usize = $vectors;
            const WORDS_OF_B: usize = $words_of_b;
        }
    };
}

// Of 32 registers, 24 hold the sums, 3 a row of `b`, and 1 an element of `a`.
#[cfg(target_arch = "x86_64")]
single!(Avx512, 8 rows, 3 vectors, 1 << 17);
#[cfg(target_arch = "aarch64")]
single!(Neon, 8 rows, 3 vectors, 1 << 16);
// Of 16 registers, 12 hold the sums, 3 a row of `b`, and 1 an element of `a`.
#[cfg(target_arch = "x86_64")]
single!(Avx2, 4 rows, 3 vectors, 1 << 16);
// Of 16 registers, 8 hold the sums, 2 a row of `b`, 1 an element of `a`, and 1 a product, because products are not
// fused with sums.
single!(PortableVector, 4 rows, 2 vectors, 1 << 16);

#[cfg(target_arch = "x86_64")]
impl GemmArithmetic for Bf16PairWords {
    const ROWS: usize = 8;
    const VECTORS: usize = 3;
    const WORDS_OF_B: usize = 1 << 17;
}
