//! Products of tiles: small blocks of sums in registers, with the left factor's words broadcast and the right factor's
//! taken a vector at a time. The loops exist twice, for words of one f32 and for words of two bf16 numbers.

use crate::kernels::attention::BAND;
use crate::kernels::attention::tiles::Left;
use std::arch::x86_64::*;

/// Panics unless a product stays within its slices.
pub(super) fn check_product(c: (usize, usize), a: Left<'_>, b: (usize, usize), [rows, columns, depth]: [usize; 3]) {
    assert!(rows > 0 && rows.is_multiple_of(BAND) && columns > 0 && columns.is_multiple_of(BAND) && depth > 0);
    assert!((rows - 1) * c.1 + columns <= c.0, "the result's rows");
    assert!((rows - 1) * a.row + (depth - 1) * a.step < a.words.len(), "the left factor's words");
    assert!((depth - 1) * b.1 + columns <= b.0, "the right factor's rows");
}

/// Defines `product` in a module, for an instruction that adds the product of two vectors of words to sums of f32.
macro_rules! define_product {
    ($name:ident, $features:literal, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        pub(super) mod $name {
            use super::*;

            /// A left factor without its bounds.
            #[derive(Clone, Copy)]
            struct Words {
                first: *const f32,
                row: usize,
                step: usize,
            }

            /// `ROWS` rows and `VECTORS` vectors of columns of c (+)= a b.
            ///
            /// # Safety
            ///
            /// All that it names lies within the factors and the result, and the machine has the instructions.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const ROWS: usize, const VECTORS: usize>(
                (c, c_stride): (*mut f32, usize),
                add: bool,
                a: Words,
                (b, b_stride): (*const f32, usize),
                depth: usize,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
                    if add {
                        for i in 0..ROWS {
                            for j in 0..VECTORS {
                                sums[i][j] = _mm512_loadu_ps(c.add(i * c_stride + j * BAND));
                            }
                        }
                    }
                    for d in 0..depth {
                        let mut right = [_mm512_setzero_ps(); VECTORS];
                        for j in 0..VECTORS {
                            right[j] = _mm512_loadu_ps(b.add(d * b_stride + j * BAND));
                        }
                        for i in 0..ROWS {
                            let $a = _mm512_set1_ps(*a.first.add(i * a.row + d * a.step));
                            for j in 0..VECTORS {
                                let ($sum, $b) = (sums[i][j], right[j]);
                                sums[i][j] = $step;
                            }
                        }
                    }
                    for i in 0..ROWS {
                        for j in 0..VECTORS {
                            _mm512_storeu_ps(c.add(i * c_stride + j * BAND), sums[i][j]);
                        }
                    }
                }
            }

            /// All rows, a multiple of [`BAND`], of `VECTORS` vectors of columns.
            ///
            /// # Safety
            ///
            /// As for `tile`.
            #[target_feature(enable = $features)]
            unsafe fn strip<const VECTORS: usize>(
                (c, c_stride): (*mut f32, usize),
                add: bool,
                a: Words,
                b: (*const f32, usize),
                rows: usize,
                depth: usize,
            ) {
                let mut i = 0;
                while i < rows {
                    // SAFETY: the caller's promise; i + the tile's rows <= rows.
                    unsafe {
                        let c = (c.add(i * c_stride), c_stride);
                        let a = Words { first: a.first.add(i * a.row), ..a };
                        // As many rows as registers hold the sums of; what remains of a multiple of 16 is 2 or 4.
                        i += match rows - i {
                            2 => {
                                tile::<2, VECTORS>(c, add, a, b, depth);
                                2
                            }
                            4 => {
                                tile::<4, VECTORS>(c, add, a, b, depth);
                                4
                            }
                            _ if VECTORS < 4 => {
                                tile::<8, VECTORS>(c, add, a, b, depth);
                                8
                            }
                            _ => {
                                tile::<6, VECTORS>(c, add, a, b, depth);
                                6
                            }
                        };
                    }
                }
            }

            /// c (+)= a b.
            ///
            /// # Safety
            ///
            /// The factors and the result have the rows, columns and depth, and the machine has the instructions.
            #[target_feature(enable = $features)]
            pub(in crate::kernels::attention) unsafe fn product(
                (c, c_stride): (&mut [f32], usize),
                add: bool,
                a: Left<'_>,
                (b, b_stride): (&[f32], usize),
                [rows, columns, depth]: [usize; 3],
            ) {
                let a = Words { first: a.words.as_ptr(), row: a.row, step: a.step };
                let (c, b) = (c.as_mut_ptr(), b.as_ptr());
                let mut column = 0;
                while column < columns {
                    // SAFETY: the caller's promise; column + the strip's columns <= columns.
                    unsafe {
                        let c = (c.add(column), c_stride);
                        let b = (b.add(column), b_stride);
                        // Five vectors are cheaper as three and two than as four and one.
                        let vectors = match (columns - column) / BAND {
                            1 => {
                                strip::<1>(c, add, a, b, rows, depth);
                                1
                            }
                            2 => {
                                strip::<2>(c, add, a, b, rows, depth);
                                2
                            }
                            3 | 5 => {
                                strip::<3>(c, add, a, b, rows, depth);
                                3
                            }
                            _ => {
                                strip::<4>(c, add, a, b, rows, depth);
                                4
                            }
                        };
                        column += vectors * BAND;
                    }
                }
            }
        }
    };
}

define_product!(in_f32, "avx512f", |sum, a, b| _mm512_fmadd_ps(a, b, sum));
define_product!(in_bf16, "avx512f,avx512bf16", |sum, a, b| {
    // Within the tile's unsafe block: both are 64 bytes of which every pattern is a value.
    let [a, b] = [a, b].map(|x| std::mem::transmute::<__m512, __m512bh>(x));
    _mm512_dpbf16_ps(sum, a, b)
});
