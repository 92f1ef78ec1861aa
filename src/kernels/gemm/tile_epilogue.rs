//! The epilogue of a tile of sums.

use super::epilogue::EpilogueOutput;
use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::vector::SimdVector;

/// Where a tile lies in the result.
#[derive(Clone, Copy)]
pub(super) struct TilePosition {
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) col: usize,
    pub(super) cols: usize,
}

impl<C: Element> EpilogueOutput<'_, C> {
    /// Whether the sums are only to be stored or added, as they are, so that a microkernel can do it.
    pub(super) fn takes_sums(&self) -> bool {
        C::KIND == ElementDtype::F32 && self.adds_nothing()
    }

    /// Whether nothing is done to the sums but to add what the result holds.
    fn adds_nothing(&self) -> bool {
        self.scale == 1.0 && self.bias.is_none() && self.residual.is_none() && self.activation.is_none()
    }
}

/// Finishes and stores a tile of sums, of which the rows begin `stride` apart. They are overwritten.
///
/// # Safety
/// The processor has the vectors' instructions; rows of sums can be read and written up to a multiple of a vector's
/// columns; the elements are the result's, and nobody else accesses them meanwhile.
pub(super) unsafe fn finish<V: SimdVector, C: Element>(
    sink: &EpilogueOutput<'_, C>,
    place: TilePosition,
    sums: *mut f32,
    stride: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        V::with(
            #[inline(always)]
            move || finish_tile::<V, C>(sink, place, sums, stride),
        )
    }
}

/// The tile is gone over once for each kind of work, not row by row: a row is too short for the processor to overlap
/// the long chain of an activation with that of the next.
#[inline(always)]
unsafe fn finish_tile<V: SimdVector, C: Element>(
    sink: &EpilogueOutput<'_, C>,
    place: TilePosition,
    sums: *mut f32,
    stride: usize,
) {
    let TilePosition { row, rows, col, cols } = place;
    // SAFETY: every access is to sums up to a multiple of a vector's columns, or to elements of the tile, in the result
    // and in matrices of its shape.
    unsafe {
        if sink.adds_nothing() && !sink.accumulate {
            for i in 0..rows {
                for j in (0..cols).step_by(V::LANES) {
                    V::load(sums.add(i * stride + j)).narrow(sink.result.at(row + i, col + j), cols - j);
                }
            }
            return;
        }
        if let Some(activation) = sink.activation {
            for i in 0..rows {
                for j in (0..cols).step_by(V::LANES) {
                    let (at, n) = (col + j, cols - j);
                    let sum = sums.add(i * stride + j);
                    let x = round::<V, C>(before_activation(sink, at, n, V::load(sum)));
                    if let Some(before) = &sink.before_activation {
                        x.narrow(before.at(row + i, at), n);
                    }
                    x.store(sum);
                }
            }
            for i in 0..rows {
                for j in (0..cols).step_by(V::LANES) {
                    activation.apply(std::slice::from_raw_parts_mut(sums.add(i * stride + j), V::LANES));
                }
            }
        }
        for i in 0..rows {
            for j in (0..cols).step_by(V::LANES) {
                let (at, n) = (col + j, cols - j);
                let mut x = V::load(sums.add(i * stride + j));
                if sink.activation.is_none() {
                    x = before_activation(sink, at, n, x);
                }
                if let Some(residual) = &sink.residual {
                    x = x.add(V::widen(residual.as_ptr().add((row + i) * residual.row_stride() + at), n));
                }
                let to = sink.result.at(row + i, at);
                if sink.accumulate {
                    x = x.add(V::widen(to.cast_const(), n));
                }
                x.narrow(to, n);
            }
        }
    }
}

/// Scale and bias for the `n` columns from `col`, at most a vector's.
///
/// # Safety
/// Inside of `V::with`, and these are columns of the result.
#[inline(always)]
unsafe fn before_activation<V: SimdVector, C: Element>(
    sink: &EpilogueOutput<'_, C>,
    col: usize,
    n: usize,
    sums: V,
) -> V {
    // SAFETY: as the caller promises.
    unsafe {
        let x = sums.mul(V::splat(sink.scale));
        match sink.bias {
            Some(bias) => x.add(V::widen(bias.as_ptr().add(col), n)),
            None => x,
        }
    }
}

/// The numbers that storing and loading gives.
///
/// # Safety
/// Inside of `V::with`.
#[inline(always)]
unsafe fn round<V: SimdVector, C: Element>(x: V) -> V {
    if C::KIND == ElementDtype::F32 {
        return x;
    }
    let mut rounded = [C::default(); crate::kernels::vector::MOST_LANES];
    // SAFETY: there is room for all lanes.
    unsafe {
        x.narrow(rounded.as_mut_ptr(), V::LANES);
        V::widen(rounded.as_ptr(), V::LANES)
    }
}
