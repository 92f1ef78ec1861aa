//! Lookup of a table's rows by id, and the gradient of the table, which touches only the rows that were looked up.

use crate::kernels::element::Element;
use crate::kernels::f32_access::{add_to, update, vectorized};
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::util::counted;

/// The number of rows that one task looks up.
const ROWS_PER_TASK: usize = 128;
/// The number of table rows whose gradients one task sums.
const TABLE_ROWS_PER_TASK: usize = 64;

/// Copies the table's row `ids[i]` to row i of `out`, for rows of `width` elements.
///
/// Panics if an id is outside the table, or if the number of rows of `out` differs from the number of ids.
pub fn embedding<E: Element>(ids: &[u32], table: &[E], width: usize, out: &mut [E]) {
    assert_eq!(
        out.len(),
        ids.len() * width,
        "the number of elements does not match {} of {width}",
        counted(ids.len(), "row")
    );
    for_each_part(ids.len().div_ceil(ROWS_PER_TASK), ParallelChunks::new(out, ROWS_PER_TASK * width), |task, out| {
        let ids = &ids[task * ROWS_PER_TASK..];
        for (out, id) in out.chunks_exact_mut(width.max(1)).zip(ids) {
            out.copy_from_slice(&table[*id as usize * width..][..width]);
        }
    });
}

/// Adds the gradient of the table's rows to `grad` `[rows, width]`: the rows of `dy` at an id's positions are summed in
/// f32, in their order, and the sum is added and rounded once. Rows whose ids do not occur are not touched.
///
/// Panics if the number of rows of `dy` differs from the number of ids, or if an id is outside `grad`.
pub fn embedding_backward_into<E: Element>(ids: &[u32], dy: &[E], width: usize, grad: &mut [E]) {
    let order = by_id(ids, dy, width);
    let Some(&(largest, _)) = order.last() else { return };
    assert!(
        (largest as usize + 1) * width <= grad.len(),
        "id {largest} is outside the gradient of {} in rows of {width}",
        counted(grad.len(), "element")
    );
    let parts = ParallelChunks::new(grad, TABLE_ROWS_PER_TASK * width);
    for_each_part(largest as usize / TABLE_ROWS_PER_TASK + 1, parts, |task, grad| {
        let first = task * TABLE_ROWS_PER_TASK;
        let from = order.partition_point(|(id, _)| (*id as usize) < first);
        let until = order.partition_point(|(id, _)| (*id as usize) < first + TABLE_ROWS_PER_TASK);
        if from == until {
            return;
        }
        let mut sum = vec![0f32; width];
        for same in order[from..until].chunk_by(|a, b| a.0 == b.0) {
            sum_rows(same, dy, &mut sum);
            let grad = &mut grad[(same[0].0 as usize - first) * width..][..width];
            vectorized!(update(
                grad,
                [&sum[..]],
                #[inline(always)]
                |grad, [sum]| grad + sum
            ));
        }
    });
}

/// Returns the pair (id, position) of every row of `dy`, sorted by id and then by position, so that the entries of a
/// table row are adjacent.
fn by_id<E>(ids: &[u32], dy: &[E], width: usize) -> Vec<(u32, u32)> {
    assert_eq!(
        dy.len(),
        ids.len() * width,
        "the number of elements does not match {} of {width}",
        counted(ids.len(), "row")
    );
    let mut order: Vec<(u32, u32)> = ids.iter().copied().zip(0..).collect();
    order.sort_unstable();
    order
}

fn sum_rows<E: Element>(positions: &[(u32, u32)], dy: &[E], sum: &mut [f32]) {
    sum.fill(0.0);
    vectorized!({
        for (_, position) in positions {
            let dy = &dy[*position as usize * sum.len()..][..sum.len()];
            add_to(sum, dy);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::f32_access::{get, put};
    use half::{bf16, f16};

    fn rows_are_looked_up_and_their_gradients_summed<E: Element>() {
        let (rows, width) = (200, 5);
        let ids: Vec<u32> = (0..333).map(|i| i * i % 61 * 3).collect();
        let table: Vec<E> = (0..rows * width).map(|i| put(i as f32 * 0.25)).collect();
        let mut out = vec![E::default(); ids.len() * width];
        embedding(&ids, &table, width, &mut out);
        for (i, row) in out.chunks_exact(width).enumerate() {
            assert!(row.iter().zip(&table[ids[i] as usize * width..]).all(|(a, b)| get(*a) == get(*b)));
        }

        let mut want = vec![0f32; rows * width];
        for (i, dy) in out.chunks_exact(width).enumerate() {
            want[ids[i] as usize * width..][..width].iter_mut().zip(dy).for_each(|(w, x)| *w += get(*x));
        }
        let before: Vec<E> = (0..rows * width)
            .map(|i| if ids.contains(&((i / width) as u32)) { put(3.0) } else { put(f32::NAN) })
            .collect();
        let mut grad = before.clone();
        embedding_backward_into(&ids, &out, width, &mut grad);
        for (i, g) in grad.iter().enumerate() {
            let sum: E = put(3.0 + want[i]);
            assert!(if get(before[i]).is_nan() { get(*g).is_nan() } else { get(*g) == get(sum) }, "{i}");
        }
    }

    #[test]
    fn rows_are_looked_up_and_their_gradients_summed_in_every_dtype() {
        rows_are_looked_up_and_their_gradients_summed::<f32>();
        rows_are_looked_up_and_their_gradients_summed::<bf16>();
        rows_are_looked_up_and_their_gradients_summed::<f16>();
    }

    #[test]
    fn no_ids_touch_nothing() {
        let mut grad = [1f32; 4];
        embedding_backward_into(&[], &[], 2, &mut grad);
        embedding_backward_into::<f32>(&[], &[], 2, &mut []);
        assert_eq!(grad, [1.0; 4]);
    }
}
