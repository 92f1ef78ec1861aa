//! The microkernels: a few rows of `a` times a panel of `b`, the sums in registers.

use std::arch::x86_64::*;

/// Rows of the largest tile of sums.
pub(super) const ROWS: usize = 8;
/// Columns of a vector.
pub(super) const LANES: usize = 16;
/// Vectors of the largest tile of sums: 24 registers for the sums, 3 for a row of `b`, 1 for an element of `a`.
pub(super) const VECTORS: usize = 3;
/// Columns of the largest tile of sums.
pub(super) const COLS: usize = VECTORS * LANES;

/// Words of `a`: that of row `i` at step `s` lies at `first + i * row + s * step`, strides in words.
#[derive(Clone, Copy)]
pub(super) struct Words {
    pub(super) first: *const u32,
    pub(super) row: usize,
    pub(super) step: usize,
}

/// `sums = a b`, or `sums += a b` with `add`: for `steps` steps, the words of `a` as described there, those of `b`
/// packed in order, and rows of sums `stride` apart.
pub(super) type Kernel = unsafe fn(steps: usize, a: Words, b: *const u32, sums: *mut f32, stride: usize, add: bool);

/// The two arithmetics differ in one instruction.
macro_rules! microkernel {
    ($name:ident, $features:literal, $multiply_add:expr) => {
        /// # Safety
        /// The processor has the features; `a`, `b` and `sums` hold the rows, columns and steps that this reads and
        /// writes; vectors of `b` are aligned.
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize, const V: usize>(
            steps: usize,
            a: Words,
            b: *const u32,
            sums: *mut f32,
            stride: usize,
            add: bool,
        ) {
            let mut acc = [[_mm512_setzero_ps(); V]; R];
            let (mut a, row, step) = (a.first, a.row, a.step);
            let mut b = b;
            for _ in 0..steps {
                let mut columns = [_mm512_setzero_si512(); V];
                for (v, column) in columns.iter_mut().enumerate() {
                    // SAFETY: `b` holds V vectors for each step.
                    *column = unsafe { _mm512_load_si512(b.add(v * LANES).cast()) };
                }
                for (i, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: `a` holds a word for each row and step.
                    let word = _mm512_set1_epi32(unsafe { a.add(i * row).cast::<i32>().read_unaligned() });
                    for (acc, &column) in acc.iter_mut().zip(&columns) {
                        *acc = $multiply_add(*acc, word, column);
                    }
                }
                // Past the end after the last step, where nothing is read.
                a = a.wrapping_add(step);
                b = b.wrapping_add(V * LANES);
            }
            for (i, acc) in acc.iter().enumerate() {
                for (v, &acc) in acc.iter().enumerate() {
                    // SAFETY: `sums` holds V vectors for each row.
                    unsafe {
                        let to = sums.add(i * stride + v * LANES);
                        let sum = if add { _mm512_add_ps(_mm512_loadu_ps(to), acc) } else { acc };
                        _mm512_storeu_ps(to, sum);
                    }
                }
            }
        }
    };
}

microkernel!(single, "avx512f,avx512bw,avx512dq,avx512vl", |acc, a, b| {
    _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc)
});
microkernel!(pairs, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", |acc, a: __m512i, b: __m512i| {
    // SAFETY: two types of the same 64 bytes.
    _mm512_dpbf16_ps(acc, unsafe { std::mem::transmute::<__m512i, __m512bh>(a) }, unsafe {
        std::mem::transmute::<__m512i, __m512bh>(b)
    })
});

/// The kernels for every power of two rows and every number of vectors, see [`select`].
pub(super) type Kernels = [Kernel; 4 * VECTORS];

macro_rules! table {
    ($name:ident) => {
        [
            $name::<1, 1>,
            $name::<1, 2>,
            $name::<1, 3>,
            $name::<2, 1>,
            $name::<2, 2>,
            $name::<2, 3>,
            $name::<4, 1>,
            $name::<4, 2>,
            $name::<4, 3>,
            $name::<8, 1>,
            $name::<8, 2>,
            $name::<8, 3>,
        ]
    };
}

pub(super) static SINGLE: Kernels = table!(single);
pub(super) static PAIRS: Kernels = table!(pairs);

/// How many of `rows` rows one kernel does: a power of two.
#[inline(always)]
pub(super) fn rows(rows: usize) -> usize {
    1 << rows.min(ROWS).ilog2()
}

/// The kernel of a table for this many rows, a power of two, and vectors.
#[inline(always)]
pub(super) fn select(kernels: &Kernels, rows: usize, vectors: usize) -> Kernel {
    kernels[rows.ilog2() as usize * VECTORS + vectors - 1]
}
