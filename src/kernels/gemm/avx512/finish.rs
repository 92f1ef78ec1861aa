//! The epilogue of a tile of sums.

use super::kernel::{COLS, LANES};
use super::pack::{first, load, store};
use crate::kernels::element::{Element, Kind};
use crate::kernels::gemm::epilogue::Sink;
use std::arch::x86_64::*;

/// Where a tile lies in the result.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) col: usize,
    /// Number of columns, at most [`COLS`].
    pub(super) cols: usize,
}

impl<C: Element> Sink<'_, C> {
    /// Whether the sums are only to be stored or added, as they are, so that a microkernel can do it.
    pub(super) fn takes_sums(&self) -> bool {
        C::KIND == Kind::F32 && self.adds_nothing()
    }

    /// Whether nothing is done to the sums but to add what the result holds.
    fn adds_nothing(&self) -> bool {
        self.scale == 1.0 && self.bias.is_none() && self.residual.is_none() && self.activation.is_none()
    }
}

/// Finishes and stores a tile of sums, of which the rows begin `stride` apart. They are overwritten.
///
/// # Safety
/// The processor has the features of `Arithmetic`, and of `Pairs` with `native`; rows of sums are aligned
/// and can be read and written up to a multiple of 16 columns; the elements are the result's, and nobody else accesses
/// them meanwhile.
#[inline]
pub(super) unsafe fn finish<C: Element>(sink: &Sink<'_, C>, native: bool, place: Place, sums: *mut f32, stride: usize) {
    debug_assert!(place.cols <= COLS);
    // SAFETY: as the caller promises.
    unsafe { if native { finish_native(sink, place, sums, stride) } else { finish_plain(sink, place, sums, stride) } }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn finish_native<C: Element>(sink: &Sink<'_, C>, place: Place, sums: *mut f32, stride: usize) {
    // SAFETY: as the caller promises.
    unsafe { finish_tile::<C, true>(sink, place, sums, stride) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn finish_plain<C: Element>(sink: &Sink<'_, C>, place: Place, sums: *mut f32, stride: usize) {
    // SAFETY: as the caller promises.
    unsafe { finish_tile::<C, false>(sink, place, sums, stride) }
}

/// The tile is gone over once for each kind of work, not row by row: a row is too short for the processor to overlap
/// the long chain of an activation with that of the next.
#[inline(always)]
unsafe fn finish_tile<C: Element, const NATIVE: bool>(sink: &Sink<'_, C>, place: Place, sums: *mut f32, stride: usize) {
    let Place { row, rows, col, cols } = place;
    // SAFETY: every access is to sums up to a multiple of 16 columns, or to elements of the tile, in the result and in
    // matrices of its shape: whole vectors of them, or those that a mask selects.
    unsafe {
        if sink.adds_nothing() && !sink.accumulate {
            for i in 0..rows {
                for j in (0..cols).step_by(LANES) {
                    let x = _mm512_load_ps(sums.add(i * stride + j));
                    store::<C, NATIVE>(sink.result.at(row + i, col + j), first(cols - j), x);
                }
            }
            return;
        }
        if let Some(activation) = sink.activation {
            for i in 0..rows {
                for j in (0..cols).step_by(LANES) {
                    let (at, mask) = (col + j, first(cols - j));
                    let sum = sums.add(i * stride + j);
                    let x = round::<C, NATIVE>(before_activation(sink, at, mask, _mm512_load_ps(sum)));
                    if let Some(before) = &sink.before_activation {
                        store::<C, NATIVE>(before.at(row + i, at), mask, x);
                    }
                    _mm512_store_ps(sum, x);
                }
            }
            for i in 0..rows {
                activation.apply(std::slice::from_raw_parts_mut(sums.add(i * stride), cols.next_multiple_of(LANES)));
            }
        }
        for i in 0..rows {
            for j in (0..cols).step_by(LANES) {
                let (at, mask) = (col + j, first(cols - j));
                let mut x = _mm512_load_ps(sums.add(i * stride + j));
                if sink.activation.is_none() {
                    x = before_activation(sink, at, mask, x);
                }
                if let Some(residual) = &sink.residual {
                    x = _mm512_add_ps(x, load(residual.as_ptr().add((row + i) * residual.row_stride() + at), mask));
                }
                let to = sink.result.at(row + i, at);
                if sink.accumulate {
                    x = _mm512_add_ps(x, load(to, mask));
                }
                store::<C, NATIVE>(to, mask, x);
            }
        }
    }
}

/// Scale and bias for the columns from `col` that the mask selects.
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, and these are columns of the result.
#[inline(always)]
unsafe fn before_activation<C: Element>(sink: &Sink<'_, C>, col: usize, mask: __mmask16, sums: __m512) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe {
        let x = _mm512_mul_ps(sums, _mm512_set1_ps(sink.scale));
        match sink.bias {
            Some(bias) => _mm512_add_ps(x, load(bias.as_ptr().add(col), mask)),
            None => x,
        }
    }
}

/// The numbers that storing and loading gives.
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, and BF16 with `NATIVE`.
#[inline(always)]
unsafe fn round<C: Element, const NATIVE: bool>(x: __m512) -> __m512 {
    let mut rounded = [C::default(); LANES];
    // SAFETY: as the caller promises; there is room for all lanes.
    unsafe {
        store::<C, NATIVE>(rounded.as_mut_ptr(), !0, x);
        load(rounded.as_ptr(), !0)
    }
}
