//! Rotary position embedding (Su et al. 2021): pairs of a head's elements are rotated by position * frequency.

use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::f32_access::{as_f32, narrow, vectorized};
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::util::counted;

/// The number of rows that one task rotates.
const ROWS_PER_TASK: usize = 32;

/// The elements that form a pair, among the rotated elements of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RotaryPairs {
    /// Element i of the first half and element i of the second half, as in most of Hugging Face's models.
    Halves,
    /// Elements 2i and 2i + 1, as in GLM and Cohere.
    Adjacent,
}

/// The layout of a head: its size, and the elements that form pairs. If there are fewer frequencies than pairs, only
/// the first elements of a head are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotaryLayout {
    /// The number of elements of a head, which is even.
    pub head: usize,
    /// The elements that form a pair.
    pub pairs: RotaryPairs,
}

impl RotaryLayout {
    /// Returns the layout of a head all of whose elements are rotated. Element i of the first half forms a pair with
    /// element i of the second half.
    pub fn of_complete_heads(pairs: usize) -> Self {
        Self { head: 2 * pairs, pairs: RotaryPairs::Halves }
    }
}

/// The cosines and sines of the angles of every position, computed in f64 and rounded to f32.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    layout: RotaryLayout,
    /// The number of rotated pairs in a head.
    pairs: usize,
    time: usize,
    /// The cosines `[time, pairs]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryTable {
    /// Computes the angles of positions 0 to time - 1, with as many pairs per head as there are frequencies. The
    /// cosines and sines of position t are multiplied by `factor(t)`.
    ///
    /// Panics if a head has fewer elements than the pairs need, or an odd number of elements.
    pub fn new(time: usize, layout: RotaryLayout, frequencies: &[f64], factor: impl Fn(usize) -> f64) -> Self {
        let pairs = frequencies.len();
        assert!(
            2 * pairs <= layout.head && layout.head.is_multiple_of(2),
            "{} {} not fit into a head of {}",
            counted(pairs, "pair"),
            if pairs == 1 { "does" } else { "do" },
            counted(layout.head, "element")
        );
        let [cos, sin] = [f64::cos, f64::sin].map(|f| {
            let mut table = Vec::with_capacity(time * pairs);
            for t in 0..time {
                let factor = factor(t);
                table.extend(frequencies.iter().map(|frequency| (factor * f(t as f64 * frequency)) as f32));
            }
            table
        });
        Self { layout, pairs, time, cos, sin }
    }

    /// Returns the number of positions.
    pub fn positions(&self) -> usize {
        self.time
    }

    /// Returns the layout of a head, the number of its pairs that are rotated, and the cosines and sines of the angles,
    /// `[time, pairs]`.
    #[cfg(feature = "cuda")]
    pub fn tables(&self) -> (RotaryLayout, usize, [&[f32]; 2]) {
        (self.layout, self.pairs, [&self.cos, &self.sin])
    }

    /// Rotates x into y, for rows `[rows, heads * head]`. Row r is at position `position_of(r)`.
    ///
    /// Panics if the lengths differ or are not a multiple of `width`, if `width` is not a multiple of the size of a
    /// head, or if the table does not cover a position.
    pub fn forward<E: Element>(&self, x: &[E], position_of: impl Fn(usize) -> usize + Sync, width: usize, y: &mut [E]) {
        self.rotate(x, position_of, width, y, 1.0);
    }

    /// Rotates dy back into dx: the gradient of [`RotaryTable::forward`]'s input. Panics under the same conditions.
    pub fn backward<E: Element>(
        &self,
        dy: &[E],
        position_of: impl Fn(usize) -> usize + Sync,
        width: usize,
        dx: &mut [E],
    ) {
        self.rotate(dy, position_of, width, dx, -1.0);
    }

    fn rotate<E: Element>(
        &self,
        x: &[E],
        position_of: impl Fn(usize) -> usize + Sync,
        width: usize,
        y: &mut [E],
        direction: f32,
    ) {
        let head = self.layout.head;
        assert_eq!(x.len(), y.len(), "the slice lengths of a rotation differ");
        if x.is_empty() {
            return;
        }
        assert!(
            width > 0 && width.is_multiple_of(head),
            "rows of {} cannot be divided into heads of {head}",
            counted(width, "element")
        );
        assert!(
            x.len().is_multiple_of(width),
            "{} cannot be divided into rows of {width}",
            counted(x.len(), "element")
        );
        let task = ROWS_PER_TASK * width;
        for_each_part(x.len().div_ceil(task), ParallelChunks::new(y, task), |i, y| {
            let x = &x[i * task..][..y.len()];
            let mut scratch = [(); 2].map(|()| vec![0f32; if E::KIND == ElementDtype::F32 { 0 } else { width }]);
            vectorized!({
                for (r, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
                    let t = position_of(i * ROWS_PER_TASK + r);
                    assert!(
                        t < self.time,
                        "position {t} is outside the table, which has {}",
                        counted(self.time, "position")
                    );
                    let angles = [&self.cos, &self.sin].map(|table| &table[t * self.pairs..][..self.pairs]);
                    if E::KIND == ElementDtype::F32 {
                        self.rotate_row(bytemuck::cast_slice(x), angles, direction, bytemuck::cast_slice_mut(y));
                        continue;
                    }
                    let [x_scratch, y_scratch] = &mut scratch;
                    self.rotate_row(as_f32(x, x_scratch), angles, direction, y_scratch);
                    narrow(y_scratch, y);
                }
            });
        });
    }

    /// Rotates the heads of a row.
    #[inline(always)]
    fn rotate_row(&self, x: &[f32], angles: [&[f32]; 2], direction: f32, y: &mut [f32]) {
        let (head, rotated) = (self.layout.head, 2 * self.pairs);
        for (x, y) in x.chunks_exact(head).zip(y.chunks_exact_mut(head)) {
            let ((x, rest), (y, y_rest)) = (x.split_at(rotated), y.split_at_mut(rotated));
            match self.layout.pairs {
                RotaryPairs::Halves => rotate_halves(x, angles, direction, y),
                RotaryPairs::Adjacent => rotate_adjacent(x, angles, direction, y),
            }
            y_rest.copy_from_slice(rest);
        }
    }
}

#[inline(always)]
fn rotate_halves(x: &[f32], [cos, sin]: [&[f32]; 2], direction: f32, y: &mut [f32]) {
    let half = cos.len();
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

#[inline(always)]
fn rotate_adjacent(x: &[f32], [cos, sin]: [&[f32]; 2], direction: f32, y: &mut [f32]) {
    let (x, y) = (x.as_chunks::<2>().0, y.as_chunks_mut::<2>().0);
    for ((y, [a, b]), (cos, sin)) in y.iter_mut().zip(x).zip(cos.iter().zip(sin)) {
        *y = [a * cos - b * (sin * direction), b * cos + a * (sin * direction)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::f32_access::{get, put};
    use half::{bf16, f16};

    fn pairs_turn_by_their_angle_and_back<E: Element>(accuracy: f32) {
        use RotaryPairs::{Adjacent, Halves};
        let cases = [
            ([2, 37, 3, 64], 32, Halves),
            ([1, 70, 1, 10], 5, Halves),
            ([3, 1, 2, 2], 1, Halves),
            ([2, 37, 3, 64], 32, Adjacent),
            ([1, 40, 2, 12], 3, Halves),
            ([1, 40, 2, 12], 5, Adjacent),
        ];
        for ([batch, time, heads, head], half, pairs) in cases {
            let width = heads * head;
            let x: Vec<E> = (0..batch * time * width).map(|i| put((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
            let (mut y, mut back) = (vec![E::default(); x.len()], vec![E::default(); x.len()]);
            let frequency = |i: usize| 10_000f64.powf(-2.0 * i as f64 / head as f64);
            let frequencies: Vec<f64> = (0..half).map(frequency).collect();
            // The backward pass multiplies by the factor again, so it restores the elements only if the factor is 1.
            let factor = |t: usize| 1.0 + 0.25 * t as f64;
            let layout = RotaryLayout { head, pairs };
            let position = |row: usize| 3 + row % time;
            RotaryTable::new(time + 3, layout, &frequencies, factor).forward(&x, position, width, &mut back);
            let rotary = RotaryTable::new(time + 3, layout, &frequencies, |_| 1.0);
            rotary.forward(&x, position, width, &mut y);
            for index in 0..x.len() {
                let (t, i) = (position(index / width), index % head);
                let start = index - i;
                let wide = |i: usize| f64::from(get(x[start + i]));
                let rotated = |pair: usize, [first, second]: [usize; 2]| {
                    let (sin, cos) = (t as f64 * frequency(pair)).sin_cos();
                    let (a, b) = (wide(first), wide(second));
                    if i == first { a * cos - b * sin } else { b * cos + a * sin }
                };
                let (want, scale) = match pairs {
                    _ if i >= 2 * half => (wide(i), 1.0),
                    Halves => (rotated(i % half, [i % half, i % half + half]), factor(t)),
                    Adjacent => (rotated(i / 2, [i / 2 * 2, i / 2 * 2 + 1]), factor(t)),
                };
                assert!((f64::from(get(y[index])) - want).abs() <= f64::from(accuracy), "{index}");
                // The products are rounded, so the bound grows with them.
                assert!(
                    (f64::from(get(back[index])) - scale * want).abs() <= 2.0 * scale * f64::from(accuracy),
                    "{index}"
                );
            }
            rotary.backward(&y, position, width, &mut back);
            for (back, x) in back.iter().zip(&x) {
                assert!((get(*back) - get(*x)).abs() <= 3.0 * accuracy);
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
