//! The tile operations as plain loops in f32, for any machine: compiled for every level, and at each the same bits.

use super::strided::HeadRows;
use super::tiles::{Left, Shape, Softmax, Tiles};
use super::{BAND, BLOCK};
use crate::kernels::element::Element;
use crate::kernels::math::exp;
use crate::kernels::wide::{vectorized, widen};

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

/// ln(2).
const LN_2: f32 = std::f32::consts::LN_2;
/// Rows of the result that are summed at a time.
const ROWS: usize = 4;

/// Rows in f32, filled up with zeros: all the packing there is where a word is one f32.
pub(super) fn pack<E: Element>(src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]) {
    vectorized!({
        let (used, filling) = dst.split_at_mut(n * words);
        for (i, dst) in used.chunks_exact_mut(words).enumerate() {
            let src = src.row(first + i);
            let (dst, filling) = dst.split_at_mut(src.len());
            widen(src, dst);
            filling.fill(0.0);
        }
        filling.fill(0.0);
    });
}

impl Tiles for Portable {
    const PAIR: usize = 1;

    fn pack_rows<E: Element>(self, src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]) {
        pack(src, first, n, words, dst);
    }

    fn pair_columns<'a>(self, rows: &'a [f32], _: usize, _: &'a mut [f32]) -> &'a [f32] {
        rows
    }

    fn transpose(self, src: &[f32], words: usize, dst: &mut [f32]) {
        for (t, row) in src.chunks_exact(words).enumerate() {
            for (column, x) in dst.chunks_exact_mut(BLOCK).zip(row) {
                column[t] = *x;
            }
        }
    }

    fn product(
        self,
        (c, c_stride): (&mut [f32], usize),
        add: bool,
        a: Left<'_>,
        (b, b_stride): (&[f32], usize),
        [rows, columns, depth]: [usize; 3],
    ) {
        debug_assert!(rows.is_multiple_of(ROWS) && columns.is_multiple_of(BAND));
        vectorized!({
            for i in (0..rows).step_by(ROWS) {
                for j in (0..columns).step_by(BAND) {
                    let mut sums = [[0f32; BAND]; ROWS];
                    for d in 0..depth {
                        let b = &b[d * b_stride + j..][..BAND];
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let a = a.words[(i + r) * a.row + d * a.step];
                            for (sum, b) in sums.iter_mut().zip(b) {
                                *sum += a * b;
                            }
                        }
                    }
                    for (r, sums) in sums.iter().enumerate() {
                        let c = &mut c[(i + r) * c_stride + j..][..BAND];
                        for (c, sum) in c.iter_mut().zip(sums) {
                            *c = if add { *c + sum } else { *sum };
                        }
                    }
                }
            }
        });
    }

    fn softmax(self, tile: &mut [f32], s: Shape, scale: f32, softmax: &mut Softmax) {
        vectorized!({
            let mut max = softmax.max;
            for (key, scores) in tile.chunks_exact(BLOCK).take(s.keys).enumerate() {
                for i in s.first_query(key)..s.queries {
                    let score = scores[i] * scale;
                    max[i] = if score > max[i] { score } else { max[i] };
                }
            }
            for ((before, max), (shrink, sum)) in
                softmax.max.iter().zip(&max).zip(softmax.shrink.iter_mut().zip(&mut softmax.sum)).take(s.queries)
            {
                *shrink = exp((before - max) * LN_2);
                *sum *= *shrink;
            }
            softmax.max = max;
            for (key, scores) in tile.chunks_exact_mut(BLOCK).take(s.keys).enumerate() {
                let seen = s.first_query(key);
                scores[..seen].fill(0.0);
                for i in seen..s.queries {
                    scores[i] = exp((scores[i] * scale - max[i]) * LN_2);
                    softmax.sum[i] += scores[i];
                }
            }
        });
    }

    fn probabilities(self, tile: &mut [f32], s: Shape, scale: f32, lse: &[f32; BLOCK]) {
        vectorized!({
            for (key, scores) in tile.chunks_exact_mut(BLOCK).take(s.keys).enumerate() {
                let seen = s.first_query(key);
                scores[..seen].fill(0.0);
                for i in seen..s.queries {
                    scores[i] = exp((scores[i] * scale - lse[i]) * LN_2);
                }
            }
        });
    }

    fn score_gradients(self, p: &mut [f32], g: &mut [f32], _: &mut [f32], s: Shape, along: &[f32; BLOCK]) {
        vectorized!({
            for (key, (p, g)) in p.chunks_exact(BLOCK).zip(g.chunks_exact_mut(BLOCK)).take(s.keys).enumerate() {
                let seen = s.first_query(key);
                g[..seen].fill(0.0);
                for i in seen..s.queries {
                    g[i] = p[i] * (g[i] - along[i]);
                }
            }
        });
    }
}

impl Shape {
    /// The first query that sees a key.
    fn first_query(&self, key: usize) -> usize {
        if self.diagonal { key } else { 0 }
    }
}
