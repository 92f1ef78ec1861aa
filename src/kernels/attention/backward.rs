//! The gradients of queries, and of the keys and values of a key head, to which every query head of its group
//! contributes.
//!
//! With probabilities p and their gradients g = dout v^T, the scores' gradients are d = p (g - sum over keys of p g),
//! where that sum is the row sum of dout * out. Then dq = d k scale, dk = d^T q scale and dv = p^T dout. With a soft
//! cap c, a score's gradient is also multiplied by the cap's derivative, 1 - (score / c)^2.
//!
//! A query head sums its part of dk and dv from zero, and the parts are added in order: by [`key_head`], which computes
//! a full group, or by [`add_parts`] after tasks that each ran [`query_head`]. Both produce the same bits.

use super::forward::HeadBufferLayout;
use super::pack;
use super::rule::{AttentionRule, SequenceHead};
use super::score_products::{ScoreTiles, gather, scatter, scores};
use super::scratch::AttentionScratch;
use super::shape::{AttentionShape, BAND, BLOCK, LOG2_E, TILE};
use super::softmax::{BackwardRowStatistics, bound, score_gradients};
use super::strided::{HeadRows, HeadRowsMut, MultiHeadRows};
use super::tile_product::ProductInit;
use crate::kernels::element::Element;
use crate::kernels::vector::{PackElementsToWords, SimdVector};
use std::iter::repeat_n;
use std::ops::Range;

/// The inputs of the forward pass, its result, and the result's gradient.
#[derive(Clone, Copy)]
pub(super) struct BackwardInputs<'a, E> {
    pub q: MultiHeadRows<'a, E>,
    pub k: MultiHeadRows<'a, E>,
    pub v: MultiHeadRows<'a, E>,
    /// The result, as dense rows of all heads.
    pub out: &'a [E],
    /// The log-sum-exp, `[batch, time, heads]`.
    pub lse: &'a [f32],
    /// The result's gradient, in the layout of `out`.
    pub dout: &'a [E],
}

/// Returns the number of elements of a part: the sums of dk followed by those of dv, before they are scaled and
/// rounded.
pub(super) fn part_len<T: ScoreTiles>(h: &AttentionShape) -> usize {
    let layout = HeadBufferLayout::new::<T>(h);
    2 * layout.time * layout.width
}

/// Computes all gradients that belong to one key head of a sequence of `h.time` positions. The rows of `dq` hold the
/// group's heads side by side.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn key_head<T: ScoreTiles + PackElementsToWords<E>, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    seq_head: SequenceHead,
    inputs: &BackwardInputs<'_, E>,
    mut dq: HeadRowsMut<'_, E>,
    gradients: [HeadRowsMut<'_, E>; 2],
    scratch: &mut AttentionScratch,
) {
    let part = part_len::<T>(h);
    let member_len = if h.group() > 1 { part } else { 0 };
    let lengths =
        [part, member_len, keys_length::<T>(h), BLOCKS * BLOCK * HeadBufferLayout::new::<T>(h).width + 3 * TILE];
    let [sums, member_sums, keys, blocks] = scratch.pieces(lengths);
    // SAFETY: as the caller promises.
    unsafe {
        let keys = PackedKeyHead::pack::<T, E>(h, seq_head, inputs, keys);
        for member in 0..h.group() {
            let (head, columns) = (seq_head.head * h.group() + member, member * h.head..(member + 1) * h.head);
            let to = if member == 0 { &mut *sums } else { &mut *member_sums };
            query_gradients::<T, E>(
                (h, rule),
                SequenceHead { head, ..seq_head },
                inputs,
                &keys,
                (&mut dq, columns),
                to,
                blocks,
            );
            if member > 0 {
                add::<T::V>(sums, member_sums);
            }
        }
        write::<T, E>((h, rule), sums, gradients);
    }
}

/// Computes the gradients of one head's queries, and its part of dk and dv.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn query_head<T: ScoreTiles + PackElementsToWords<E>, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    seq_head: SequenceHead,
    inputs: &BackwardInputs<'_, E>,
    mut dq: HeadRowsMut<'_, E>,
    part: &mut [f32],
    scratch: &mut AttentionScratch,
) {
    let lengths = [keys_length::<T>(h), BLOCKS * BLOCK * HeadBufferLayout::new::<T>(h).width + 3 * TILE];
    let [keys, blocks] = scratch.pieces(lengths);
    // SAFETY: as the caller promises.
    unsafe {
        let keys =
            PackedKeyHead::pack::<T, E>(h, SequenceHead { head: seq_head.head / h.group(), ..seq_head }, inputs, keys);
        query_gradients::<T, E>((h, rule), seq_head, inputs, &keys, (&mut dq, 0..h.head), part, blocks);
    }
}

/// Adds the parts of a group's query heads, which start `stride` elements apart, and writes dk and dv of their key
/// head.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn add_parts<T: ScoreTiles, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    (parts, stride): (&mut [f32], usize),
    gradients: [HeadRowsMut<'_, E>; 2],
) {
    let len = part_len::<T>(h);
    let (sums, others) = parts.split_at_mut(stride);
    let sums = &mut sums[..len];
    // SAFETY: as the caller promises.
    unsafe {
        others.chunks_exact(stride).for_each(|other| add::<T::V>(sums, &other[..len]));
        write::<T, E>((h, rule), sums, gradients);
    }
}

/// # Safety
/// The processor must have the instructions of `V`.
unsafe fn add<V: SimdVector>(sums: &mut [f32], others: &[f32]) {
    // SAFETY: as the caller promises; only full vectors are accessed.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for (sum, other) in sums.chunks_exact_mut(V::LANES).zip(others.chunks_exact(V::LANES)) {
                    V::load(sum.as_ptr()).add(V::load(other.as_ptr())).store(sum.as_mut_ptr());
                }
            },
        )
    }
}

/// # Safety
/// The processor must have the instructions of `T`.
unsafe fn write<T: ScoreTiles, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    sums: &[f32],
    [mut dk, mut dv]: [HeadRowsMut<'_, E>; 2],
) {
    let width = HeadBufferLayout::new::<T>(h).width;
    let (dk_sums, dv_sums) = sums.split_at(sums.len() / 2);
    // SAFETY: as the caller promises.
    unsafe {
        pack::write::<T::V, E>((dk_sums, width), repeat_n(rule.scale, h.time), &mut dk, (0, 0..h.head));
        pack::write::<T::V, E>((dv_sums, width), repeat_n(1.0, h.time), &mut dv, (0, 0..h.head));
    }
}

/// The packed keys and values of a key head.
struct PackedKeyHead<'a> {
    keys: &'a [f32],
    /// The keys as words across the rows.
    across: &'a [f32],
    values: &'a [f32],
}

fn keys_length<T: ScoreTiles>(h: &AttentionShape) -> usize {
    let layout = HeadBufferLayout::new::<T>(h);
    (1 + T::DEPTH) * layout.time * layout.words
}

impl<'a> PackedKeyHead<'a> {
    /// # Safety
    /// The processor must have the instructions of `T`.
    unsafe fn pack<T: ScoreTiles + PackElementsToWords<E>, E: Element>(
        h: &AttentionShape,
        seq_head: SequenceHead,
        inputs: &BackwardInputs<'_, E>,
        memory: &'a mut [f32],
    ) -> Self {
        let HeadBufferLayout { words, width, time, .. } = HeadBufferLayout::new::<T>(h);
        let [k, v] = [inputs.k, inputs.v].map(|rows| rows.head_rows(seq_head.first, seq_head.head, h.head));
        let (keys, rest) = memory.split_at_mut(time * words);
        let (values, across) = rest.split_at_mut(time * words);
        // SAFETY: as the caller promises.
        unsafe {
            pack::by_rows::<T, E>(k, 0..h.time, words, keys);
            pack::by_rows::<T, E>(v, 0..h.time, words, values);
            if T::DEPTH > 1 {
                pack::by_columns::<T, E>(k, 0..h.time, width, across);
            }
        }
        // With one number per word, both directions have the same words.
        Self { keys, across: if T::DEPTH > 1 { across } else { keys }, values }
    }
}

/// The number of blocks of queries that are held at a time: the queries and the result's gradients, each in two
/// layouts, and the sums of dq.
const BLOCKS: usize = 5;

/// Computes the gradients of one head's queries, and sums its part of dk and dv from zero.
///
/// # Safety
/// The processor must have the instructions of `T`.
unsafe fn query_gradients<T: ScoreTiles + PackElementsToWords<E>, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    seq_head: SequenceHead,
    inputs: &BackwardInputs<'_, E>,
    PackedKeyHead { keys, across, values }: &PackedKeyHead<'_>,
    (dq, dq_columns): (&mut HeadRowsMut<'_, E>, Range<usize>),
    part: &mut [f32],
    memory: &mut [f32],
) {
    let HeadBufferLayout { words, width, columns, depth, time } = HeadBufferLayout::new::<T>(h);
    let (dk_sums, dv_sums) = part.split_at_mut(time * width);
    let (tiles, blocks) = memory.split_at_mut(3 * TILE);
    let (p, tiles) = tiles.split_at_mut(TILE);
    let (g, g_keys) = tiles.split_at_mut(TILE);
    let (dq_sums, blocks) = blocks.split_at_mut(BLOCK * width);
    let (q_block, dout_block) = blocks.split_at_mut(2 * BLOCK * width);
    let q = inputs.q.head_rows(seq_head.first, seq_head.head, h.head);
    let [out, dout] = [inputs.out, inputs.dout]
        .map(|data| MultiHeadRows::new(data, h.heads * h.head).head_rows(seq_head.first, seq_head.head, h.head));
    let lse = MultiHeadRows::new(inputs.lse, h.heads).head_rows(seq_head.first, seq_head.head, 1);
    let (scale, cap) = rule.to_powers();
    dk_sums.fill(0.0);
    dv_sums.fill(0.0);
    for start in (0..h.time).step_by(BLOCK) {
        let n = BLOCK.min(h.time - start);
        let padded = n.next_multiple_of(BAND);
        // Queries that only pad the block have probability 0.
        let mut statistics = BackwardRowStatistics { lse: [f32::INFINITY; BLOCK], dout_dot_out: [0.0; BLOCK] };
        statistics.lse.iter_mut().zip(start..start + n).for_each(|(value, t)| *value = lse.row(t)[0] * LOG2_E);
        // SAFETY: as the caller promises.
        unsafe {
            pack::dots::<T::V, E>([out, dout], start..start + n, &mut statistics.dout_dot_out);
            let (q_transposed, q_across) = pack_block::<T, E>(q, start..start + n, (words, width, padded), q_block);
            let (dout_transposed, dout_across) =
                pack_block::<T, E>(dout, start..start + n, (words, width, padded), dout_block);
            let mut is_first = true;
            for (first, s) in rule.tiles(h.time, start, n) {
                scores::<T>(p, (&keys[first * words..], words), q_transposed, depth, s);
                scores::<T>(g, (&values[first * words..], words), dout_transposed, depth, s);
                if let Some(cap) = cap {
                    bound::<T::V>(p, s, cap);
                }
                score_gradients::<T::V>(p, g, s, (scale, cap), &statistics);
                T::to_words(p, g, g_keys, s);
                let g_keys: &[f32] = if T::DEPTH > 1 { g_keys } else { g };
                scatter::<T>((&mut dv_sums[first * width..], width), p, dout_across, columns, s);
                scatter::<T>((&mut dk_sums[first * width..], width), g, q_across, columns, s);
                let init = if is_first { ProductInit::Zero } else { ProductInit::Sums };
                gather::<T>((dq_sums, width), init, g_keys, &across[first * words..], columns, s);
                is_first = false;
            }
            pack::write::<T::V, E>((dq_sums, width), repeat_n(rule.scale, n), dq, (start, dq_columns.clone()));
        }
    }
}

/// Packs a block of rows (queries or gradients of the result) in two layouts: transposed, and as words across the rows.
///
/// # Safety
/// The processor must have the instructions of `T`.
unsafe fn pack_block<'a, T: ScoreTiles + PackElementsToWords<E>, E: Element>(
    src: HeadRows<'_, E>,
    rows: Range<usize>,
    (words, width, padded): (usize, usize, usize),
    memory: &'a mut [f32],
) -> (&'a [f32], &'a [f32]) {
    let (transposed, across) = memory.split_at_mut(BLOCK * width);
    let across = &mut across[..padded * words];
    // SAFETY: as the caller promises.
    unsafe {
        pack::transposed::<T, E>(src, rows.clone(), words, padded, transposed);
        pack::by_columns::<T, E>(src, rows, width, across);
    }
    (transposed, across)
}
