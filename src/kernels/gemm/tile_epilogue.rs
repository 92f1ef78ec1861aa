//! The epilogue of a tile of sums.

use super::epilogue::EpilogueOutput;
use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::vector::SimdVector;

/// The position of a tile in the result.
#[derive(Clone, Copy)]
pub(super) struct TilePosition {
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) col: usize,
    pub(super) cols: usize,
}

impl<C: Element> EpilogueOutput<'_, C> {
    /// Returns whether the sums are only stored or added unchanged. A microkernel can then store them itself.
    pub(super) fn takes_sums(&self) -> bool {
        C::KIND == ElementDtype::F32 && self.adds_nothing()
    }

    /// Returns whether the sums are unchanged, except that the result's contents may be added.
    fn adds_nothing(&self) -> bool {
        self.scale == 1.0 && self.bias.is_none() && self.residual.is_none() && self.activation.is_none()
    }
}

/// Finishes and stores a tile of sums whose rows start `stride` apart. The sums may be overwritten.
///
/// # Safety
/// The processor must have the vectors' instructions; each row of sums must have room for full vectors; the elements
/// must exist in the result, and nothing else may access them during the call.
pub(super) unsafe fn finish<V: SimdVector, C: Element>(
    output: &EpilogueOutput<'_, C>,
    tile: TilePosition,
    sums: *mut f32,
    stride: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        V::with(
            #[inline(always)]
            move || finish_tile::<V, C>(output, tile, sums, stride),
        )
    }
}

/// Processes the tile once for each kind of operation, not row by row. A row has too few vectors for the processor to
/// overlap the long dependency chains of successive activations.
#[inline(always)]
unsafe fn finish_tile<V: SimdVector, C: Element>(
    output: &EpilogueOutput<'_, C>,
    tile: TilePosition,
    sums: *mut f32,
    stride: usize,
) {
    let TilePosition { row, rows, col, cols } = tile;
    // SAFETY: every access is to sums, up to a multiple of the number of lanes, or to elements of the tile, in the
    // result and in matrices of the same shape.
    unsafe {
        if output.adds_nothing() && !output.accumulate {
            for i in 0..rows {
                for j in (0..cols).step_by(V::LANES) {
                    V::load(sums.add(i * stride + j)).narrow(output.result.at(row + i, col + j), cols - j);
                }
            }
            return;
        }
        if let Some(activation) = output.activation {
            for i in 0..rows {
                for j in (0..cols).step_by(V::LANES) {
                    let (column, n) = (col + j, cols - j);
                    let sum = sums.add(i * stride + j);
                    let x = round::<V, C>(before_activation(output, column, n, V::load(sum)));
                    if let Some(before) = &output.activation_inputs {
                        x.narrow(before.at(row + i, column), n);
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
                let (column, n) = (col + j, cols - j);
                let mut x = V::load(sums.add(i * stride + j));
                if output.activation.is_none() {
                    x = before_activation(output, column, n, x);
                }
                if let Some(residual) = &output.residual {
                    x = x.add(V::widen(residual.as_ptr().add((row + i) * residual.row_stride() + column), n));
                }
                let to = output.result.at(row + i, column);
                if output.accumulate {
                    x = x.add(V::widen(to.cast_const(), n));
                }
                x.narrow(to, n);
            }
        }
    }
}

/// Applies scale and bias to the `n` columns (at most a full vector) that start at `col`.
///
/// # Safety
/// The call must be inside `V::with`, and the result must have these columns.
#[inline(always)]
unsafe fn before_activation<V: SimdVector, C: Element>(
    output: &EpilogueOutput<'_, C>,
    col: usize,
    n: usize,
    sums: V,
) -> V {
    // SAFETY: as the caller promises.
    unsafe {
        let x = sums.mul(V::splat(output.scale));
        match output.bias {
            Some(bias) => x.add(V::widen(bias.as_ptr().add(col), n)),
            None => x,
        }
    }
}

/// Returns the numbers that storing and loading would produce.
///
/// # Safety
/// The call must be inside `V::with`.
#[inline(always)]
unsafe fn round<V: SimdVector, C: Element>(x: V) -> V {
    if C::KIND == ElementDtype::F32 {
        return x;
    }
    let mut rounded = [C::default(); crate::kernels::vector::MAX_LANES];
    // SAFETY: there is room for all lanes.
    unsafe {
        x.narrow(rounded.as_mut_ptr(), V::LANES);
        V::widen(rounded.as_ptr(), V::LANES)
    }
}
