//! The microkernels: a few rows of `a` times a panel of `b`, with the sums in registers.

use super::arithmetic::GemmArithmetic;
#[cfg(target_arch = "aarch64")]
use crate::kernels::vector::Neon;
#[cfg(target_arch = "x86_64")]
use crate::kernels::vector::{Avx2, Avx512, Bf16PairWords};
use crate::kernels::vector::{F32Words, PortableVector, SimdVector};

/// The words of `a`. The word of row `i` at step `s` is at `first + i * row + s * step`, with strides in words.
#[derive(Clone, Copy)]
pub(super) struct StridedWords {
    pub(super) first: *const f32,
    pub(super) row: usize,
    pub(super) step: usize,
}

/// The initial value to which the products are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AccumulatorInit {
    /// Zero. The sums in memory are overwritten.
    Zero,
    /// Zero. The result is then added to the sums in memory.
    Add,
    /// The sums in memory, to which the products are added one by one, as if the sums had never left the registers.
    Continue,
}

/// A function that computes the sums of the product of two matrices over `steps` steps. The argument `a` describes
/// where the words of the left matrix are, `b` points to the words of the right matrix, which are packed in order, and
/// rows of sums are `stride` apart.
///
/// `a` is a reference because a copy of it would be read as one vector directly after its fields have been written. The
/// processor cannot forward such stores to the load, so each call would wait until the sums stored by the calls before
/// it are in the cache.
pub(super) type Microkernel =
    unsafe fn(steps: usize, a: &StridedWords, b: *const f32, sums: *mut f32, stride: usize, start: AccumulatorInit);

/// The microkernels of an arithmetic.
pub(super) trait Microkernels: GemmArithmetic {
    /// The kernels, indexed by the logarithm of their number of rows (a power of two), and then by the number of
    /// vectors, starting with 1.
    const KERNELS: &'static [&'static [Microkernel]];
}

macro_rules! kernels {
    ($arithmetic:ty, [$($rows:literal),*], $vectors:tt) => {
        impl Microkernels for $arithmetic {
            const KERNELS: &'static [&'static [Microkernel]] = &[$(kernels!(@of $rows, $vectors)),*];
        }
    };
    (@of $rows:literal, [$($vectors:literal),*]) => {
        &[$(kernel::<Self, $rows, $vectors>),*]
    };
}

kernels!(F32Words<PortableVector>, [1, 2, 4], [1, 2]);
#[cfg(target_arch = "x86_64")]
kernels!(F32Words<Avx2>, [1, 2, 4], [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
kernels!(F32Words<Avx512>, [1, 2, 4, 8], [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
kernels!(Bf16PairWords, [1, 2, 4, 8], [1, 2, 3]);
#[cfg(target_arch = "aarch64")]
kernels!(F32Words<Neon>, [1, 2, 4, 8], [1, 2, 3]);

/// Computes `R` rows and `N` vectors.
///
/// # Safety
/// The processor must have the arithmetic's instructions; `a`, `b` and `sums` must contain the rows, columns and steps
/// that this function reads and writes.
unsafe fn kernel<A: GemmArithmetic, const R: usize, const N: usize>(
    steps: usize,
    a: &StridedWords,
    b: *const f32,
    sums: *mut f32,
    stride: usize,
    start: AccumulatorInit,
) {
    // SAFETY: as the caller promises.
    unsafe {
        A::V::with(
            #[inline(always)]
            move || tile::<A, R, N>(steps, a, b, sums, stride, start),
        )
    }
}

#[inline(always)]
unsafe fn tile<A: GemmArithmetic, const R: usize, const N: usize>(
    steps: usize,
    a: &StridedWords,
    b: *const f32,
    sums: *mut f32,
    stride: usize,
    start: AccumulatorInit,
) {
    let StridedWords { first, row, step } = *a;
    // SAFETY: `a` holds a word for each row and step, `b` N vectors for each step, `sums` N vectors for each row.
    unsafe {
        let mut acc = load_sums::<A::V, R, N>(sums, stride, start == AccumulatorInit::Continue);
        // If the stride between steps is a constant, the compiler encodes most of an address in the instruction.
        match step {
            1 => add_steps::<A, R, N>(&mut acc, steps, StridedWords { first, row, step: 1 }, b),
            _ if step == A::ROWS => {
                add_steps::<A, R, N>(&mut acc, steps, StridedWords { first, row, step: A::ROWS }, b)
            }
            _ => add_steps::<A, R, N>(&mut acc, steps, *a, b),
        }
        if start == AccumulatorInit::Add {
            for (i, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = A::V::load(sums.add(i * stride + v * A::LANES)).add(*acc);
                }
            }
        }
        store_sums(acc, sums, stride);
    }
}

/// Returns the sums in memory if `keep` is set, or zeros.
///
/// # Safety
/// The call must be inside `V::with`; `sums` must have N vectors for each of R rows, which are `stride` apart.
#[inline(always)]
pub(super) unsafe fn load_sums<V: SimdVector, const R: usize, const N: usize>(
    sums: *const f32,
    stride: usize,
    keep: bool,
) -> [[V; N]; R] {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = [[V::zero(); N]; R];
        if keep {
            for (i, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = V::load(sums.add(i * stride + v * V::LANES));
                }
            }
        }
        acc
    }
}

/// Writes the sums.
///
/// # Safety
/// Same as for [`load_sums`].
#[inline(always)]
pub(super) unsafe fn store_sums<V: SimdVector, const R: usize, const N: usize>(
    acc: [[V; N]; R],
    sums: *mut f32,
    stride: usize,
) {
    for (i, acc) in acc.into_iter().enumerate() {
        for (v, acc) in acc.into_iter().enumerate() {
            // SAFETY: as the caller promises.
            unsafe { acc.store(sums.add(i * stride + v * V::LANES)) };
        }
    }
}

/// Adds the products of `steps` steps, four at a time, so that few other instructions are needed.
///
/// # Safety
/// Same as for [`kernel`]. The call must also be inside `A::V::with`.
#[inline(always)]
unsafe fn add_steps<A: GemmArithmetic, const R: usize, const N: usize>(
    acc: &mut [[A::V; N]; R],
    steps: usize,
    a: StridedWords,
    b: *const f32,
) {
    const UNROLLED: usize = 4;
    let StridedWords { first: mut a, row, step } = a;
    let mut b = b;
    // SAFETY: `a` has a word for each row and step, `b` N vectors for each step. Pointers are past the end after the
    // last step, and nothing is read there.
    unsafe {
        for _ in 0..steps / UNROLLED {
            for s in 0..UNROLLED {
                add_step::<A, R, N>(acc, a.wrapping_add(s * step), row, b.wrapping_add(s * N * A::LANES));
            }
            a = a.wrapping_add(UNROLLED * step);
            b = b.wrapping_add(UNROLLED * N * A::LANES);
        }
        for s in 0..steps % UNROLLED {
            add_step::<A, R, N>(acc, a.wrapping_add(s * step), row, b.wrapping_add(s * N * A::LANES));
        }
    }
}

/// Adds the products of a step.
///
/// # Safety
/// Same as for [`add_steps`].
#[inline(always)]
unsafe fn add_step<A: GemmArithmetic, const R: usize, const N: usize>(
    acc: &mut [[A::V; N]; R],
    a: *const f32,
    row: usize,
    b: *const f32,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut columns = [A::V::zero(); N];
        for (v, column) in columns.iter_mut().enumerate() {
            *column = A::V::load(b.add(v * A::LANES));
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            A::add_products(acc, a.add(i * row), &columns);
        }
    }
}

/// Returns how many of `rows` rows one kernel of an arithmetic computes: a power of two.
#[inline(always)]
pub(super) fn rows<A: GemmArithmetic>(rows: usize) -> usize {
    1 << rows.min(A::ROWS).ilog2()
}

/// Returns the kernel of an arithmetic for this number of rows (a power of two) and of vectors.
#[inline(always)]
pub(super) fn select<A: Microkernels>(rows: usize, vectors: usize) -> Microkernel {
    A::KERNELS[rows.ilog2() as usize][vectors - 1]
}
