//! Products of tiles. Small blocks of sums are held in registers, the left factor's words are broadcast, and the right
//! factor is read a vector at a time.

use super::shape::BAND;
#[cfg(target_arch = "aarch64")]
use crate::kernels::vector::Neon;
#[cfg(target_arch = "x86_64")]
use crate::kernels::vector::{Avx2, Avx512, Bf16PairWords};
use crate::kernels::vector::{F32Words, PackedWords, PortableVector, SimdVector};

/// The strip products for a type of words. The sums of each product fit into the registers of a SIMD level.
pub(super) trait StripProducts: PackedWords {
    /// The products with 1, 2, ... vectors of columns.
    const STRIPS: &'static [StripProduct];
}

// With 32 registers: 24 for the sums, 3 or 4 for a row of the right factor, 1 for a word of the left one.
#[cfg(target_arch = "x86_64")]
impl StripProducts for F32Words<Avx512> {
    const STRIPS: &'static [StripProduct] =
        &[strip::<Self, 8, 1>, strip::<Self, 8, 2>, strip::<Self, 8, 3>, strip::<Self, 6, 4>];
}

#[cfg(target_arch = "x86_64")]
impl StripProducts for Bf16PairWords {
    const STRIPS: &'static [StripProduct] =
        &[strip::<Self, 8, 1>, strip::<Self, 8, 2>, strip::<Self, 8, 3>, strip::<Self, 6, 4>];
}

#[cfg(target_arch = "aarch64")]
impl StripProducts for F32Words<Neon> {
    const STRIPS: &'static [StripProduct] =
        &[strip::<Self, 8, 1>, strip::<Self, 8, 2>, strip::<Self, 8, 3>, strip::<Self, 6, 4>];
}

// With 16 registers: 12 for the sums, 2 for a row of the right factor, 1 for a word of the left one.
#[cfg(target_arch = "x86_64")]
impl StripProducts for F32Words<Avx2> {
    const STRIPS: &'static [StripProduct] = &[strip::<Self, 8, 1>, strip::<Self, 6, 2>];
}

// With 16 registers: 4 for the sums, 1 for a row of the right factor, 1 for a word of the left one, and 1 for a
// product, because products are not fused with sums.
impl StripProducts for F32Words<PortableVector> {
    const STRIPS: &'static [StripProduct] = &[strip::<Self, 4, 1>];
}

/// The left factor of a product. Element (i, d) is the word at `i * row + d * step`.
#[derive(Clone, Copy)]
pub(super) struct LeftFactor<'a> {
    pub words: &'a [f32],
    pub row: usize,
    pub step: usize,
}

/// The initial value to which a product is added.
#[derive(Clone, Copy)]
pub(super) enum ProductInit<'a> {
    /// Zero: the result is overwritten.
    Zero,
    /// The current result.
    Sums,
    /// The current result, with each row multiplied by its factor.
    Times(&'a [f32]),
}

impl ProductInit<'_> {
    /// Returns the initial value for a result without its first rows.
    pub(super) fn skip_rows(self, row: usize) -> Self {
        match self {
            Self::Times(factors) => Self::Times(&factors[row..]),
            other => other,
        }
    }
}

/// Computes c = initial value + a b.
///
/// The sizes are the numbers of rows, of columns, and of words along the summed dimension. The first two are multiples
/// of [`BAND`]. `c` and `b` are (words, distance between rows in words).
///
/// # Safety
/// The processor must have the instructions of `T`.
///
/// # Panics
/// Panics if a slice is too short.
pub(super) unsafe fn product<T: StripProducts>(
    (c, c_stride): (&mut [f32], usize),
    start: ProductInit<'_>,
    a: LeftFactor<'_>,
    (b, b_stride): (&[f32], usize),
    [rows, columns, depth]: [usize; 3],
) {
    assert!(rows > 0 && rows.is_multiple_of(BAND) && columns > 0 && columns.is_multiple_of(BAND) && depth > 0);
    assert!((rows - 1) * c_stride + columns <= c.len(), "the result is too short");
    assert!((rows - 1) * a.row + (depth - 1) * a.step < a.words.len(), "the left factor is too short");
    assert!((depth - 1) * b_stride + columns <= b.len(), "the right factor is too short");
    if let ProductInit::Times(factors) = start {
        assert!(rows <= factors.len(), "each row needs a factor");
    }
    let mut column = 0;
    while column < columns {
        // The columns are divided into as few strips as the widest one allows, of nearly equal width.
        let remaining = (columns - column) / T::V::LANES;
        let vectors = remaining.div_ceil(remaining.div_ceil(T::STRIPS.len()));
        let (c, b) = (c[column..].as_mut_ptr(), b[column..].as_ptr());
        // SAFETY: the sizes were checked, and the strip ends within the columns.
        unsafe { T::STRIPS[vectors - 1]((c, c_stride), start, &a, (b, b_stride), [rows, depth]) };
        column += vectors * T::V::LANES;
    }
}

/// A product with some vectors of columns: result, initial value, left and right factor, number of rows, and number of
/// words along the summed dimension. The left factor is a reference because a copy would be read as vectors
/// directly after its fields have been written, and such a read waits for all earlier stores.
pub(super) type StripProduct =
    unsafe fn((*mut f32, usize), start: ProductInit<'_>, a: &LeftFactor<'_>, b: (*const f32, usize), size: [usize; 2]);

/// Computes a strip of `N` vectors, up to `R` rows at a time.
///
/// # Safety
/// Everything that the sizes describe must be within the factors and the result, and the processor must have the
/// instructions of `W`.
pub(super) unsafe fn strip<W: PackedWords, const R: usize, const N: usize>(
    (c, c_stride): (*mut f32, usize),
    start: ProductInit<'_>,
    a: &LeftFactor<'_>,
    b: (*const f32, usize),
    [rows, depth]: [usize; 2],
) {
    const { assert!(R == 4 || R == 6 || R == 8) };
    // SAFETY: as the caller promises; row + the rows of a block <= rows, which is a multiple of 16.
    unsafe {
        W::V::with(
            #[inline(always)]
            || {
                let first = a.words.as_ptr();
                let mut row = 0;
                while row < rows {
                    let (c, a) = ((c.add(row * c_stride), c_stride), (first.add(row * a.row), a.row, a.step));
                    let factors = match start {
                        ProductInit::Times(factors) => factors.as_ptr().add(row),
                        _ => std::ptr::null(),
                    };
                    let add = !matches!(start, ProductInit::Zero);
                    // The remainder after blocks of six rows, if there is one, is 4 or 8.
                    if R == 6 && matches!(rows - row, 4 | 8) {
                        block::<W, 4, N>(c, add, factors, a, b, depth);
                        row += 4;
                    } else {
                        block::<W, R, N>(c, add, factors, a, b, depth);
                        row += R;
                    }
                }
            },
        )
    }
}

/// Computes `R` rows and `N` vectors of columns. If the product is added to the result, the result's rows are first
/// multiplied by their factors, unless the pointer to these is null.
#[inline(always)]
unsafe fn block<W: PackedWords, const R: usize, const N: usize>(
    (c, c_stride): (*mut f32, usize),
    add: bool,
    factors: *const f32,
    (a, row, step): (*const f32, usize, usize),
    (b, b_stride): (*const f32, usize),
    depth: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut sums = [[W::V::zero(); N]; R];
        if add {
            for (i, sums) in sums.iter_mut().enumerate() {
                for (j, sum) in sums.iter_mut().enumerate() {
                    *sum = W::V::load(c.add(i * c_stride + j * W::V::LANES));
                }
            }
            if !factors.is_null() {
                for (i, sums) in sums.iter_mut().enumerate() {
                    let factor = W::V::splat(*factors.add(i));
                    sums.iter_mut().for_each(|sum| *sum = sum.mul(factor));
                }
            }
        }
        for d in 0..depth {
            let mut right = [W::V::zero(); N];
            for (j, right) in right.iter_mut().enumerate() {
                *right = W::V::load(b.add(d * b_stride + j * W::V::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                W::add_products(sums, a.add(i * row + d * step), &right);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                sum.store(c.add(i * c_stride + j * W::V::LANES));
            }
        }
    }
}
