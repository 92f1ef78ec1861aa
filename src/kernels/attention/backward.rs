//! One key head's backward: the gradients of its keys and values, and of the queries of its group.
//!
//! With probabilities p and their gradients g = dout v^T: the scores' gradients are d = p (g - sum over keys of p g),
//! where that sum is the row sum of dout * out; and dq = d k / sqrt(head), dk = d^T q / sqrt(head), dv = p^T dout.

use super::forward::{Layout, scaled};
use super::strided::{HeadMut, HeadRows, Rows};
use super::tiles::{Shape, TILE, Tiles, gather, scatter, scores};
use super::{BAND, BLOCK, Heads, LOG2_E, Scratch};
use crate::kernels::element::Element;
use crate::kernels::rows;
use crate::kernels::wide::{get, vectorized};

/// The result of forward, and its gradient.
pub(super) struct Result<'a, E> {
    /// Dense rows of all heads.
    pub out: &'a [E],
    /// `[batch, heads, time]`.
    pub lse: &'a [f32],
    /// As `out`.
    pub dout: &'a [E],
}

/// Computes the gradients that belong to one key head; `dq`'s rows hold its group's heads side by side.
#[expect(clippy::too_many_arguments, reason = "inputs, gradients and where in them")]
pub(super) fn one_key_head<T: Tiles, E: Element>(
    tiles: T,
    h: &Heads,
    (batch, kv_head): (usize, usize),
    q: Rows<'_, E>,
    [k, v]: [HeadRows<'_, E>; 2],
    result: &Result<'_, E>,
    [mut dq, mut dk, mut dv]: [HeadMut<'_, E>; 3],
    scratch: &mut Scratch,
) {
    let Layout { words, width, columns, depth, time } = Layout::new::<T>(h);
    let (all, block) = (time * words, BLOCK * words);
    let lengths = [all, all, all, time * width, time * width, TILE, TILE, TILE, BLOCK * width, 6 * block];
    let [keys, keys_paired, values, dk_sums, dv_sums, p, g, g_keys, dq_sums, blocks] = scratch.pieces(lengths);
    let (q_blocks, dout_blocks) = blocks.split_at_mut(3 * block);
    tiles.pack_rows(k, 0, h.time, words, keys);
    let keys: &[f32] = keys;
    let keys_paired = tiles.pair_columns(keys, words, keys_paired);
    tiles.pack_rows(v, 0, h.time, words, values);
    dk_sums.fill(0.0);
    dv_sums.fill(0.0);
    let [out, dout] = [result.out, result.dout].map(|data| Rows::new(data, h.heads * h.head));
    for member in 0..h.group() {
        let head = kv_head * h.group() + member;
        let [q, out, dout] = [q, out, dout].map(|rows| rows.head(h, batch, head));
        let lse = &result.lse[(batch * h.heads + head) * h.time..][..h.time];
        for start in (0..h.time).step_by(BLOCK) {
            let n = BLOCK.min(h.time - start);
            let padded = n.next_multiple_of(BAND);
            let (q_transposed, q_paired) = pack_block(tiles, q, (start, n), words, q_blocks);
            let (dout_transposed, dout_paired) = pack_block(tiles, dout, (start, n), words, dout_blocks);
            // Queries that only fill up the block have probabilities 0.
            let (mut lse_2, mut along) = ([f32::INFINITY; BLOCK], [0.0; BLOCK]);
            for i in 0..n {
                lse_2[i] = lse[start + i] * LOG2_E;
                along[i] = dot(out.row(start + i), dout.row(start + i));
            }
            for first in (0..=start).step_by(BLOCK) {
                let s = Shape::at(first, start, padded);
                scores(tiles, p, (&keys[first * words..], words), q_transposed, depth, s);
                scores(tiles, g, (&values[first * words..], words), dout_transposed, depth, s);
                tiles.probabilities(p, s, h.scale() * LOG2_E, &lse_2);
                tiles.score_gradients(p, g, g_keys, s, &along);
                let g_keys: &[f32] = if T::PAIR > 1 { g_keys } else { g };
                scatter(tiles, (&mut dv_sums[first * width..], width), p, dout_paired, columns, s);
                scatter(tiles, (&mut dk_sums[first * width..], width), g, q_paired, columns, s);
                gather(tiles, (dq_sums, width), first > 0, g_keys, &keys_paired[first * words..], columns, s);
            }
            for (i, row) in dq_sums.chunks_exact(width).take(n).enumerate() {
                scaled(row, h.scale(), &mut dq.row(start + i)[member * h.head..][..h.head]);
            }
        }
    }
    for t in 0..h.time {
        scaled(&dk_sums[t * width..], h.scale(), dk.row(t));
        scaled(&dv_sums[t * width..], 1.0, dv.row(t));
    }
}

/// Packs a block of queries transposed, and paired along the queries.
fn pack_block<'a, T: Tiles, E: Element>(
    tiles: T,
    source: HeadRows<'_, E>,
    (start, n): (usize, usize),
    words: usize,
    buffer: &'a mut [f32],
) -> (&'a [f32], &'a [f32]) {
    let (rows, rest) = buffer.split_at_mut(BLOCK * words);
    let (transposed, paired) = rest.split_at_mut(BLOCK * words);
    let rows = &mut rows[..n.next_multiple_of(BAND) * words];
    tiles.pack_rows(source, start, n, words, rows);
    tiles.transpose(rows, words, transposed);
    (transposed, tiles.pair_columns(rows, words, paired))
}

fn dot<E: Element>(a: &[E], b: &[E]) -> f32 {
    vectorized!({
        rows::reduce(
            a,
            b,
            #[inline(always)]
            |a, b| get(a) * get(b),
        )
    })
}
