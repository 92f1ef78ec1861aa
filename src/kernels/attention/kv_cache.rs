//! Attention of some new positions over all positions so far, whose keys and values are in a cache.
//!
//! A few queries read the complete cache once, so the operation is limited by memory bandwidth, not by arithmetic. Keys
//! and values are therefore stored by head, in the order in which they are read, and are used in place in their dtype.
//! Values are stored one position after the other. Keys are stored in blocks of [`BLOCK`] positions, in which the same
//! elements of successive keys are adjacent, so that a vector of scores needs no horizontal sum. The sums of each query
//! are in f32, in an order that depends neither on the number of threads nor on the number of new positions.

use super::rule::AttentionRule;
use super::scratch::{AttentionScratch, SCRATCH};
use super::shape::AttentionShape;
use super::strided::{HeadRows, HeadRowsMut, MultiHeadRows, MultiHeadRowsMut};
use crate::kernels::element::Element;
use crate::kernels::f32_access::{get, put, vectorized, widen};
use crate::kernels::mac_count;
use crate::kernels::math::{exp, tanh};
use crate::kernels::parallel::{for_each_part, for_each_part_here};
use crate::kernels::row_reduce::{maximum, reduce};
use crate::util::counted;

/// The number of queries whose scores are computed with a key while it is in the processor's cache.
const QUERIES: usize = 8;
/// The number of positions whose scores are computed together.
const BLOCK: usize = 16;
/// The number of independent sums into which the products of a score are divided.
const CHAINS: usize = 4;
/// The number of positions whose values are summed while they are in the processor's cache.
const POSITIONS: usize = 64;
/// The number of columns of the values that are summed in registers.
const COLUMNS: usize = 32;
/// The number of multiplications that take less time than waking another thread.
const MIN_PARALLEL_MULTIPLICATIONS: usize = 1 << 18;

/// Returns the smallest capacity with room for `positions` positions.
pub fn capacity_for(positions: usize) -> usize {
    positions.next_multiple_of(BLOCK)
}

/// Keys `[batch, kv_heads, capacity / BLOCK, head, BLOCK]` and values `[batch, kv_heads, capacity, head]`. The new
/// positions are the last ones in the cache. For each head, the keys and values of the first `n` positions are in the
/// first `capacity_for(n) * head` elements.
#[derive(Debug, Clone, Copy)]
pub struct KvCacheView<'a, E> {
    /// The keys.
    pub keys: &'a [E],
    /// The values.
    pub values: &'a [E],
    /// The number of positions for which there is room: a result of [`capacity_for`].
    pub capacity: usize,
    /// The number of positions before the new ones.
    pub past_len: usize,
}

/// Writes the keys of `h.time` new positions after the `past_len` cached ones.
///
/// Panics if `to` has no room for them, as does [`store_values`].
pub fn store_keys<E: Element>(h: &AttentionShape, rows: MultiHeadRows<'_, E>, past_len: usize, to: &mut [E]) {
    for_each_head(h, rows, to, |t, row, to| {
        let position = past_len + t;
        let block = &mut to[position / BLOCK * BLOCK * h.head..][..BLOCK * h.head];
        for (to, x) in block.chunks_exact_mut(BLOCK).zip(row) {
            to[position % BLOCK] = *x;
        }
    });
}

/// Writes the values of the new positions.
pub fn store_values<E: Element>(h: &AttentionShape, rows: MultiHeadRows<'_, E>, past_len: usize, to: &mut [E]) {
    for_each_head(h, rows, to, |t, row, to| to[(past_len + t) * h.head..][..h.head].copy_from_slice(row));
}

/// Calls `write` with each new position, its vector and the memory of its head.
fn for_each_head<E: Element>(
    h: &AttentionShape,
    rows: MultiHeadRows<'_, E>,
    to: &mut [E],
    write: impl Fn(usize, &[E], &mut [E]),
) {
    let head_len = to.len() / (h.batch * h.kv_heads).max(1);
    for (i, to) in to.chunks_exact_mut(head_len.max(1)).enumerate() {
        let from = rows.head(h, i / h.kv_heads, i % h.kv_heads);
        (0..h.time).for_each(|t| write(t, from.row(t), to));
    }
}

/// Computes out = softmax(scale q k^T, over the keys that `rule` lets a query see) v for the `h.time` new positions,
/// whose keys and values are in the cache.
///
/// `q` and `out` are as in [`forward()`](super::forward()). Panics if the slices do not match the sizes, or if the rule
/// defines the starts of sequences or lets queries see later positions.
pub fn forward_cached<E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    q: MultiHeadRows<'_, E>,
    cached: KvCacheView<'_, E>,
    out: &mut [E],
) {
    assert!(!rule.bidirectional && rule.starts.is_none(), "{rule:?} cannot be used with a cache");
    rule.check_sinks(h);
    h.check(out.len(), h.batch * h.heads * h.time);
    assert!(
        cached.capacity.is_multiple_of(BLOCK) && cached.past_len + h.time <= cached.capacity,
        "{} cached and {} exceed the cache's capacity of {}, or it is not a multiple of {BLOCK}",
        cached.past_len,
        counted(h.time, "new position"),
        cached.capacity
    );
    if out.is_empty() {
        return;
    }
    let head_len = cached.capacity * h.head;
    for len in [cached.keys.len(), cached.values.len()] {
        assert_eq!(
            len,
            h.batch * h.kv_heads * head_len,
            "{h:?}: wrong number of elements of a cache for {} positions",
            cached.capacity
        );
    }
    let visible = |t: usize| (cached.past_len + t + 1).min(rule.window.unwrap_or(usize::MAX));
    let multiplications = 2 * h.head * h.batch * h.heads * (0..h.time).map(visible).sum::<usize>();
    mac_count::add([multiplications]);
    let task = |task: usize, out: HeadRowsMut<'_, E>| {
        let (batch, kv_head) = (task / h.kv_heads, task % h.kv_heads);
        let [keys, values] = [cached.keys, cached.values].map(|data| &data[task * head_len..][..head_len]);
        let q = |head| q.head(h, batch, kv_head * h.group() + head);
        let sinks = rule.sinks.map(|sinks| &sinks[kv_head * h.group()..][..h.group()]);
        SCRATCH.with_borrow_mut(|scratch| {
            one_key_head((h, rule), sinks, q, ([keys, values], cached.past_len), out, scratch);
        });
    };
    let tasks = h.batch * h.kv_heads;
    let out = MultiHeadRowsMut::new(out, h.heads * h.head).by_head(h.batch, h.time, h.kv_heads, h.group() * h.head);
    if multiplications <= MIN_PARALLEL_MULTIPLICATIONS {
        for_each_part_here(tasks, out, task)
    } else {
        for_each_part(tasks, out, task)
    }
}

/// Computes the results of all queries of one key head, a few at a time. `q` returns the queries of a head of the
/// group, and `sinks` are the scores of the group's sinks.
fn one_key_head<'a, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    sinks: Option<&[f32]>,
    q: impl Fn(usize) -> HeadRows<'a, E>,
    ([keys, values], past_len): ([&[E]; 2], usize),
    mut out: HeadRowsMut<'_, E>,
    scratch: &mut AttentionScratch,
) {
    let (head, group, scale) = (h.head, h.group(), rule.scale);
    let width = head.next_multiple_of(BLOCK);
    for first in (0..h.time * group).step_by(QUERIES) {
        let n = QUERIES.min(h.time * group - first);
        // A row is a query. Rows are ordered by position, and then by head of the group.
        let position_and_head = |row: usize| ((first + row) / group, (first + row) % group);
        let key_end = |row: usize| past_len + position_and_head(row).0 + 1;
        let key_start = |row: usize| rule.window.map_or(0, |window| key_end(row).saturating_sub(window));
        let (min_key, end_key) = (key_start(0), key_end(n - 1));
        let stride = end_key.next_multiple_of(BLOCK);
        let [queries, sums, scores] = scratch.pieces([n * width, n * width, n * stride]);
        vectorized!({
            for (row, query) in queries.chunks_exact_mut(width).enumerate() {
                let (t, head) = position_and_head(row);
                for (wide, x) in query.iter_mut().zip(q(head).row(t)) {
                    *wide = get(*x) * scale;
                }
            }
            for (block, keys) in keys.chunks_exact(BLOCK * head).enumerate().take(stride / BLOCK).skip(min_key / BLOCK)
            {
                for (row, query) in queries.chunks_exact(width).enumerate() {
                    let scores = &mut scores[row * stride + block * BLOCK..][..BLOCK];
                    scores.copy_from_slice(&products(&query[..head], keys));
                }
            }
            let mut factors = [0f32; QUERIES];
            for (row, (scores, factor)) in scores.chunks_exact_mut(stride).zip(&mut factors).enumerate() {
                let scores = &mut scores[key_start(row)..key_end(row)];
                if let Some(cap) = rule.soft_cap {
                    for score in scores.iter_mut() {
                        *score = cap * tanh(*score / cap);
                    }
                }
                let sink = sinks.map(|sinks| sinks[position_and_head(row).1]);
                let max = sink.map_or(maximum(scores), |sink| maximum(scores).max(sink));
                for score in scores.iter_mut() {
                    *score = exp(*score - max);
                }
                let total = reduce(
                    scores,
                    scores,
                    #[inline(always)]
                    |x, _| x,
                );
                *factor = 1.0 / sink.map_or(total, |sink| total + exp(sink - max));
            }
            sums.fill(0.0);
            for start in (min_key / POSITIONS * POSITIONS..end_key).step_by(POSITIONS) {
                for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
                    let begin = key_start(row).max(start);
                    let end = key_end(row).min(start + POSITIONS).max(begin);
                    gather(&scores[row * stride..][begin..end], &values[begin * head..], &mut sums[..head]);
                }
            }
            for (row, (sums, factor)) in sums.chunks_exact(width).zip(factors).enumerate() {
                let (t, group_head) = position_and_head(row);
                for (y, sum) in out.row(t)[group_head * head..][..head].iter_mut().zip(sums) {
                    *y = put(sum * factor);
                }
            }
        });
    }
}

/// Returns the products of a query with the keys of a block.
#[inline(always)]
fn products<E: Element>(query: &[f32], keys: &[E]) -> [f32; BLOCK] {
    let [mut s0, mut s1, mut s2, mut s3] = [[0f32; BLOCK]; CHAINS];
    // Keys are widened in a separate loop, because the compiler does not vectorize the conversion of a few elements at
    // a time.
    let mut wide = [0f32; CHAINS * BLOCK];
    let (mut q, mut k) = (query.chunks_exact(CHAINS), keys.chunks_exact(CHAINS * BLOCK));
    for (q, k) in q.by_ref().zip(k.by_ref()) {
        widen(k, &mut wide);
        add_products(&mut s0, q[0], &wide[..BLOCK]);
        add_products(&mut s1, q[1], &wide[BLOCK..2 * BLOCK]);
        add_products(&mut s2, q[2], &wide[2 * BLOCK..3 * BLOCK]);
        add_products(&mut s3, q[3], &wide[3 * BLOCK..]);
    }
    for (q, k) in q.remainder().iter().zip(k.remainder().chunks_exact(BLOCK)) {
        widen(k, &mut wide[..BLOCK]);
        add_products(&mut s0, *q, &wide[..BLOCK]);
    }
    let mut totals = [0f32; BLOCK];
    for (i, total) in totals.iter_mut().enumerate() {
        *total = (s0[i] + s1[i]) + (s2[i] + s3[i]);
    }
    totals
}

#[inline(always)]
fn add_products(sums: &mut [f32; BLOCK], q: f32, keys: &[f32]) {
    for (sum, k) in sums.iter_mut().zip(keys) {
        *sum += q * k;
    }
}

/// Computes sums += weighted values of some positions, which follow one another in memory.
#[inline(always)]
fn gather<E: Element>(weights: &[f32], values: &[E], sums: &mut [f32]) {
    let head = sums.len();
    let mut blocks = sums.chunks_exact_mut(COLUMNS);
    for (block, sums) in blocks.by_ref().enumerate() {
        // Even and odd positions have independent sums.
        let [mut even, mut odd] = [[0f32; COLUMNS]; 2];
        let (mut pairs, mut rows) = (weights.chunks_exact(2), values.chunks_exact(2 * head));
        for (weights, values) in pairs.by_ref().zip(rows.by_ref()) {
            add_values(&mut even, weights[0], &values[block * COLUMNS..][..COLUMNS]);
            add_values(&mut odd, weights[1], &values[head + block * COLUMNS..][..COLUMNS]);
        }
        if let [weight] = *pairs.remainder() {
            let last = &values[(weights.len() - 1) * head..];
            add_values(&mut even, weight, &last[block * COLUMNS..][..COLUMNS]);
        }
        for ((sum, even), odd) in sums.iter_mut().zip(even).zip(odd) {
            *sum += even + odd;
        }
    }
    let sums = blocks.into_remainder();
    let start = head - sums.len();
    for (weight, values) in weights.iter().zip(values.chunks_exact(head)) {
        for (sum, value) in sums.iter_mut().zip(&values[start..]) {
            *sum += weight * get(*value);
        }
    }
}

#[inline(always)]
fn add_values<E: Element>(sums: &mut [f32; COLUMNS], weight: f32, values: &[E]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += weight * get(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn numbers<E: Element>(n: usize, seed: usize) -> Vec<E> {
        (0..n).map(|i| put(((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0)).collect()
    }

    /// Returns the results of all positions from a cache that is filled in pieces of these lengths, and the result of
    /// one forward pass. One element of each row is not part of any head.
    fn in_pieces<E: Element>(
        (all, rule): (&AttentionShape, &AttentionRule<'_>),
        pieces: &[usize],
        qkv: &[E],
    ) -> [Vec<E>; 2] {
        let (q_width, kv_width) = (all.heads * all.head, all.kv_heads * all.head);
        let stride = qkv.len() / (all.batch * all.time);
        let part = |from: &[E], column: usize, row_stride| -> Vec<E> {
            from.chunks_exact(row_stride).flat_map(|row| [&row[column..], &row[..column]].concat()).collect()
        };
        let columns = [0, q_width, q_width + kv_width];
        let mut at_once = vec![E::default(); all.batch * all.time * q_width];
        let mut lse = vec![0f32; all.batch * all.heads * all.time];
        let parts = columns.map(|column| MultiHeadRows::new(&qkv[column..], stride));
        super::super::forward(all, rule, parts, &mut at_once, &mut lse);

        let capacity = capacity_for(all.time) + BLOCK;
        let [mut keys, mut values] = [1, 2].map(|seed| numbers::<E>(all.batch * capacity * kv_width, seed));
        let mut out = vec![E::default(); at_once.len()];
        let mut past_len = 0;
        for &time in pieces {
            let h = AttentionShape { time, ..*all };
            // The rows of these positions in every sequence.
            let rows = |sequence: &[E]| sequence[past_len * stride..][..time * stride].to_vec();
            let piece: Vec<E> = qkv.chunks_exact(all.time * stride).flat_map(rows).collect();
            let [q, k, v] = columns.map(|column| part(&piece, column, stride));
            store_keys(&h, MultiHeadRows::new(&k, stride), past_len, &mut keys);
            store_values(&h, MultiHeadRows::new(&v, stride), past_len, &mut values);
            let mut y = vec![E::default(); all.batch * time * q_width];
            let cached = KvCacheView { keys: &keys, values: &values, capacity, past_len };
            forward_cached((&h, rule), MultiHeadRows::new(&q, stride), cached, &mut y);
            for (out, y) in out.chunks_exact_mut(all.time * q_width).zip(y.chunks_exact(time * q_width)) {
                out[past_len * q_width..][..time * q_width].copy_from_slice(y);
            }
            past_len += time;
        }
        [out, at_once]
    }

    fn sizes() -> impl Iterator<Item = (AttentionShape, Vec<usize>)> {
        [
            ([1, 1, 1, 1, 1], vec![1]),
            ([1, 150, 2, 2, 64], vec![100, 1, 1, 40, 8]),
            ([2, 70, 6, 2, 10], vec![1, 64, 3, 2]),
            ([1, 90, 8, 1, 80], vec![89, 1]),
            ([3, 20, 4, 2, 33], vec![5, 5, 10]),
        ]
        .into_iter()
        .map(|([batch, time, heads, kv_heads, head], pieces)| {
            (AttentionShape { batch, time, heads, kv_heads, head }, pieces)
        })
    }

    fn qkv<E: Element>(h: &AttentionShape) -> Vec<E> {
        numbers(h.batch * h.time * ((h.heads + 2 * h.kv_heads) * h.head + 1), 3)
    }

    /// Returns the usual rule, and rules with a cap and with windows smaller and larger than a block.
    fn rules(h: &AttentionShape) -> [AttentionRule<'static>; 4] {
        let usual = AttentionRule::causal(h.head);
        let window = |window| AttentionRule { window: Some(window), ..usual };
        [usual, window(1), window(17), AttentionRule { scale: 0.3, soft_cap: Some(1.5), ..window(70) }]
    }

    fn pieces_give_what_forward_gives<E: Element>(accuracy: f32) {
        for (h, pieces) in sizes() {
            for rule in rules(&h) {
                let [got, want] = in_pieces::<E>((&h, &rule), &pieces, &qkv(&h));
                for (got, want) in got.into_iter().zip(want) {
                    assert!((get(got) - get(want)).abs() <= accuracy, "{h:?} {rule:?}: {} {}", get(got), get(want));
                }
            }
        }
    }

    #[test]
    fn positions_that_come_in_pieces_give_what_forward_gives_at_once() {
        pieces_give_what_forward_gives::<f32>(1e-5);
        pieces_give_what_forward_gives::<bf16>(4e-2);
        pieces_give_what_forward_gives::<f16>(4e-3);
    }

    #[test]
    fn neither_the_pieces_nor_the_threads_change_a_bit() {
        for (h, pieces) in sizes() {
            let qkv = qkv::<bf16>(&h);
            for rule in rules(&h) {
                let [at_once, _] = in_pieces((&h, &rule), &[h.time], &qkv);
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                    let [got, _] = pool.install(|| in_pieces((&h, &rule), &pieces, &qkv));
                    assert!(got == at_once, "{h:?} {rule:?}");
                }
            }
        }
    }

    #[test]
    fn nan_stays_in_the_rows_that_see_it() {
        let h = AttentionShape { batch: 1, time: 12, heads: 2, kv_heads: 1, head: 8 };
        for column in [16, 24] {
            let mut qkv = qkv::<f32>(&h);
            qkv[7 * 33 + column] = f32::NAN;
            let [got, _] = in_pieces((&h, &AttentionRule::causal(8)), &[12], &qkv);
            let (before, after) = got.split_at(7 * 16);
            assert!(before.iter().all(|x| x.is_finite()), "{column}");
            assert!(after.chunks_exact(8).all(|head| head[0].is_nan()), "{column}");
        }
    }
}
