//! The rows of mixtures of experts: the sum of the experts' results for each row, and the addition of a gated shared
//! expert.

use crate::kernels::element::Element;
use crate::kernels::f32_access::{as_f32, map, narrow, update, vectorized};
use crate::kernels::math;
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::row_reduce::reduce;

/// The number of elements that one task computes.
const ELEMENTS_PER_TASK: usize = 1 << 14;

fn rows_per_task(width: usize) -> usize {
    (ELEMENTS_PER_TASK / width.max(1)).max(1)
}

/// The slots that belong to each row: the positions at which the results of the row's experts are stored.
#[derive(Debug, Clone, Copy)]
pub struct RowSlots<'a> {
    /// The slots of all rows, row by row.
    pub slots: &'a [u32],
    /// The start of each row in `slots`, and the end of the last row.
    pub starts: &'a [u32],
}

impl RowSlots<'_> {
    fn rows(&self) -> usize {
        self.starts.len() - 1
    }

    fn of(&self, row: usize) -> &[u32] {
        &self.slots[self.starts[row] as usize..self.starts[row + 1] as usize]
    }
}

/// Sums each row's slots, and writes the sum to `out` or, with `accumulate`, adds it to `out`. The slots of `y`,
/// multiplied by `weights` (one number per slot) if they are given, are added in the row's order, starting from 0, in
/// f32. A row's sum is rounded once.
pub fn sum_slots<E: Element>(
    rows: RowSlots<'_>,
    y: &[E],
    width: usize,
    weights: Option<&[f32]>,
    out: &mut [E],
    accumulate: bool,
) {
    assert_eq!(out.len(), rows.rows() * width, "the result has a different number of rows");
    assert_eq!(y.len(), rows.slots.len() * width, "the number of slots differs");
    let per_task = rows_per_task(width);
    for_each_part(rows.rows().div_ceil(per_task), ParallelChunks::new(out, per_task * width), |task, out| {
        let mut sum = vec![0f32; width];
        for (row, out) in (task * per_task..).zip(out.chunks_exact_mut(width.max(1))) {
            sum.fill(0.0);
            for slot in rows.of(row) {
                let weight = weights.map_or(1.0, |weights| weights[*slot as usize]);
                let y = &y[*slot as usize * width..][..width];
                vectorized!(update(
                    &mut sum,
                    [y],
                    #[inline(always)]
                    |sum, [y]| sum + weight * y,
                ));
            }
            if accumulate {
                vectorized!(update(
                    out,
                    [&sum[..]],
                    #[inline(always)]
                    |out, [sum]| out + sum,
                ));
            } else {
                E::narrow(&sum, out);
            }
        }
    });
}

/// Computes the gradients of [`sum_slots`] from that of its result, `dout`: `dy[slot] = weights[slot] * dout[row]`,
/// and `dweights[slot]` is the sum of `y[slot] * dout[row]` over the columns. `row_of` is the row of each slot.
pub fn sum_slots_backward<E: Element>(
    row_of: &[u32],
    (y, dout): (&[E], &[E]),
    width: usize,
    weights: &[f32],
    dy: Option<&mut [E]>,
    dweights: Option<&mut [f32]>,
) {
    let per_task = rows_per_task(width);
    let parts = (
        dy.map(|dy| ParallelChunks::new(dy, per_task * width)),
        dweights.map(|dweights| ParallelChunks::new(dweights, per_task)),
    );
    for_each_part(row_of.len().div_ceil(per_task), parts, |task, (mut dy, mut dweights)| {
        let mut scratch = vec![0f32; 3 * width];
        let [y_scratch, dout_scratch, product] = thirds(&mut scratch, width);
        let slots = task * per_task..row_of.len().min((task + 1) * per_task);
        for (i, slot) in slots.enumerate() {
            let weight = weights[slot];
            let dout = &dout[row_of[slot] as usize * width..][..width];
            vectorized!({
                let dout = as_f32(dout, dout_scratch);
                if let Some(dweights) = &mut dweights {
                    dweights[i] = reduce(
                        as_f32(&y[slot * width..][..width], y_scratch),
                        dout,
                        #[inline(always)]
                        |y, dout| y * dout,
                    );
                }
                if let Some(dy) = &mut dy {
                    product.iter_mut().zip(dout).for_each(|(product, dout)| *product = weight * dout);
                    narrow(product, &mut dy[i * width..][..width]);
                }
            });
        }
    });
}

fn thirds(scratch: &mut [f32], width: usize) -> [&mut [f32]; 3] {
    let (a, rest) = scratch.split_at_mut(width);
    let (b, c) = rest.split_at_mut(width);
    [a, b, c]
}

/// Computes y = base + sigmoid(gate) * x for rows of `width` elements with one gate each, rounded once.
pub fn add_gated<E: Element>(base: &[E], gates: &[f32], x: &[E], width: usize, y: &mut [E]) {
    assert_eq!([base.len(), x.len(), gates.len() * width], [y.len(); 3], "the numbers of rows differ");
    let per_task = rows_per_task(width);
    for_each_part(gates.len().div_ceil(per_task), ParallelChunks::new(y, per_task * width), |task, y| {
        for (row, y) in (task * per_task..).zip(y.chunks_exact_mut(width.max(1))) {
            let (factor, range) = (math::sigmoid(gates[row]), row * width..(row + 1) * width);
            vectorized!(map(
                [&base[range.clone()], &x[range]],
                y,
                #[inline(always)]
                |[base, x]| base + factor * x,
            ));
        }
    });
}

/// Computes the gradients of [`add_gated`] with respect to the gates and to `x`, from that of its result, `dy`.
pub fn add_gated_backward<E: Element>(
    gates: &[f32],
    (x, dy): (&[E], &[E]),
    width: usize,
    dgates: &mut [f32],
    dx: &mut [E],
) {
    let per_task = rows_per_task(width);
    let parts = (ParallelChunks::new(dgates, per_task), ParallelChunks::new(dx, per_task * width));
    for_each_part(gates.len().div_ceil(per_task), parts, |task, (dgates, dx)| {
        let mut scratch = vec![0f32; 3 * width];
        let [x_scratch, dy_scratch, product] = thirds(&mut scratch, width);
        let rows = dgates.iter_mut().zip(dx.chunks_exact_mut(width.max(1)));
        for (row, (dgate, dx)) in (task * per_task..).zip(rows) {
            let (factor, range) = (math::sigmoid(gates[row]), row * width..(row + 1) * width);
            vectorized!({
                let (x, dy) = (as_f32(&x[range.clone()], x_scratch), as_f32(&dy[range.clone()], dy_scratch));
                let sum = reduce(
                    x,
                    dy,
                    #[inline(always)]
                    |x, dy| x * dy,
                );
                *dgate = sum * (factor * (1.0 - factor));
                product.iter_mut().zip(dy).for_each(|(product, dy)| *product = factor * dy);
                narrow(product, dx);
            });
        }
    });
}
