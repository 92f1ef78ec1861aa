//! Rotary position embedding (Su et al. 2021) in Hugging Face's convention: element i of a head's first half and
//! element i of its second half form a pair, which is rotated by position * frequency i.

use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::f32_access::{as_f32, narrow, vectorized};
use crate::kernels::parallel::{ParallelChunks, for_each_part};

/// The number of rows that one task rotates.
const ROWS_PER_TASK: usize = 32;

/// The cosines and sines of the angles of every position, computed in f64 and rounded to f32.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    /// The number of pairs of a head.
    half: usize,
    time: usize,
    /// The cosines `[time, half]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryTable {
    /// Computes the angles of positions 0 to time - 1. A head has as many pairs as there are frequencies.
    pub fn new(time: usize, frequencies: &[f64]) -> Self {
        let half = frequencies.len();
        let angles = || (0..time).flat_map(|t| frequencies.iter().map(move |f| t as f64 * f));
        let [cos, sin] = [f64::cos, f64::sin].map(|f| angles().map(|angle| f(angle) as f32).collect());
        Self { half, time, cos, sin }
    }

    /// Returns the number of pairs of a head, and the cosines and sines of the angles, `[time, pairs]`.
    #[cfg(feature = "cuda")]
    pub fn tables(&self) -> (usize, [&[f32]; 2]) {
        (self.half, [&self.cos, &self.sin])
    }

    /// Rotates x into y, for rows `[rows, heads * head]`. Row r is at position `at(r)`.
    ///
    /// Panics if the lengths differ or are not a multiple of `width`, if the size of a head does not divide `width`, or
    /// if the table does not cover a position.
    pub fn forward<E: Element>(&self, x: &[E], at: impl Fn(usize) -> usize + Sync, width: usize, y: &mut [E]) {
        self.rotate(x, at, width, y, 1.0);
    }

    /// Rotates dy back into dx: the gradient of [`RotaryTable::forward`]'s input. Panics under the same conditions.
    pub fn backward<E: Element>(&self, dy: &[E], at: impl Fn(usize) -> usize + Sync, width: usize, dx: &mut [E]) {
        self.rotate(dy, at, width, dx, -1.0);
    }

    fn rotate<E: Element>(
        &self,
        x: &[E],
        at: impl Fn(usize) -> usize + Sync,
        width: usize,
        y: &mut [E],
        direction: f32,
    ) {
        let head = 2 * self.half;
        assert_eq!(x.len(), y.len(), "the slice lengths of a rotation differ");
        if x.is_empty() {
            return;
        }
        assert!(
            width > 0 && width.is_multiple_of(head),
            "rows of {width} elements cannot be divided into heads of {head}"
        );
        assert!(x.len().is_multiple_of(width), "{} elements cannot be divided into rows of {width}", x.len());
        let task = ROWS_PER_TASK * width;
        for_each_part(x.len().div_ceil(task), ParallelChunks::new(y, task), |i, y| {
            let x = &x[i * task..][..y.len()];
            let mut room = [(); 2].map(|()| vec![0f32; if E::KIND == ElementDtype::F32 { 0 } else { width }]);
            vectorized!({
                for (r, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
                    let t = at(i * ROWS_PER_TASK + r);
                    assert!(t < self.time, "position {t} is outside the table, which has {} positions", self.time);
                    let angles = [&self.cos, &self.sin].map(|table| &table[t * self.half..][..self.half]);
                    if E::KIND == ElementDtype::F32 {
                        turn_row(bytemuck::cast_slice(x), angles, direction, bytemuck::cast_slice_mut(y));
                        continue;
                    }
                    let [x_room, y_room] = &mut room;
                    turn_row(as_f32(x, x_room), angles, direction, y_room);
                    narrow(y_room, y);
                }
            });
        });
    }
}

#[inline(always)]
fn turn_row(x: &[f32], [cos, sin]: [&[f32]; 2], direction: f32, y: &mut [f32]) {
    let half = cos.len();
    for (x, y) in x.chunks_exact(2 * half).zip(y.chunks_exact_mut(2 * half)) {
        let (y_first, y_second) = y.split_at_mut(half);
        let (first, second) = x.split_at(half);
        // One loop for each half, so that the compiler has fewer slices to prove disjoint.
        for (((y, a), b), (cos, sin)) in y_first.iter_mut().zip(first).zip(second).zip(cos.iter().zip(sin)) {
            *y = a * cos - b * (sin * direction);
        }
        for (((y, a), b), (cos, sin)) in y_second.iter_mut().zip(first).zip(second).zip(cos.iter().zip(sin)) {
            *y = b * cos + a * (sin * direction);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::f32_access::{get, put};
    use half::{bf16, f16};

    fn pairs_turn_by_their_angle_and_back<E: Element>(accuracy: f32) {
        for (batch, time, heads, head) in [(2, 37, 3, 64), (1, 70, 1, 10), (3, 1, 2, 2)] {
            let width = heads * head;
            let x: Vec<E> = (0..batch * time * width).map(|i| put((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
            let (mut y, mut back) = (vec![E::default(); x.len()], vec![E::default(); x.len()]);
            let frequency = |i: usize| 10_000f64.powf(-2.0 * i as f64 / head as f64);
            let rotary = RotaryTable::new(time + 3, &(0..head / 2).map(frequency).collect::<Vec<_>>());
            let position = |row: usize| 3 + row % time;
            rotary.forward(&x, position, width, &mut y);
            rotary.backward(&y, position, width, &mut back);
            for at in 0..x.len() {
                let (t, i) = (position(at / width), at % head);
                let pair = i % (head / 2);
                let angle = t as f64 * frequency(pair);
                let first = at - i + pair;
                let (a, b) = (f64::from(get(x[first])), f64::from(get(x[first + head / 2])));
                let (cos, sin) = (angle.cos(), angle.sin());
                let want = if i == pair { a * cos - b * sin } else { b * cos + a * sin };
                assert!((f64::from(get(y[at])) - want).abs() <= f64::from(accuracy), "{at}");
                assert!((get(back[at]) - get(x[at])).abs() <= 3.0 * accuracy, "{at}");
            }
        }
    }

    #[test]
    fn pairs_turn_by_their_angle_and_back_in_every_dtype() {
        pairs_turn_by_their_angle_and_back::<f32>(3e-7);
        pairs_turn_by_their_angle_and_back::<bf16>(4e-3);
        pairs_turn_by_their_angle_and_back::<f16>(5e-4);
    }
}
