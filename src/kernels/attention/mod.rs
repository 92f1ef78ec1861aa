//! Attention with grouped heads: softmax(scale q k^T, over the keys that a query sees) v, and its gradients.
//!
//! An [`AttentionRule`] defines which keys a query sees. Attention is computed separately for each of the sequences
//! that are packed into a row: tiles begin where a sequence begins, so the results of a packed sequence have the same
//! bits as those of an unpacked one. Each head of a sequence is computed in square tiles of [`shape::BLOCK`] keys and
//! queries with a running softmax. Memory is therefore never quadratic in the length, and tiles in which no query sees
//! a key are skipped. The backward pass recomputes the probabilities from the log-sum-exp that the forward pass keeps.
//! A task is one (sequence, head) in the forward pass, and one (sequence, key head) or one of its query heads in the
//! backward pass. The order of sums is the same in each case, so results have the same bits for any number of threads.
//!
//! A head can have a sink: a key without a value, whose score is a parameter. The sink takes part in the softmax, so
//! the probabilities of the other keys add up to less than 1. The running softmax begins with the sink.
//!
//! The code is generic over the vectors of a SIMD level and the words that its products use
//! ([`score_products::ScoreTiles`]). [`SimdMethod::of`] selects them for a level. bf16 elements are multiplied in pairs
//! on processors with fast AVX512_BF16 instructions. All other elements are widened to f32 when they are packed.

mod backward;
#[cfg(target_arch = "x86_64")]
mod bf16_pairs;
mod forward;
mod kv_cache;
mod pack;
mod rule;
mod score_products;
mod scratch;
mod shape;
mod softmax;
mod strided;
mod tile_product;

pub use kv_cache::{KvCacheView, capacity_for, forward_cached, store_keys, store_values};
pub use rule::{AttentionRule, SequenceSpan};
pub use shape::AttentionShape;
pub use strided::{MultiHeadRows, MultiHeadRowsMut};

use crate::kernels::element::Element;
use crate::kernels::f32_access::get;
use crate::kernels::mac_count;
use crate::kernels::parallel::{DisjointParts, ParallelChunks, for_each, for_each_part};
use crate::kernels::simd::level;
use crate::kernels::vector::{PackElementsToWords, SimdMethod, with_words_of};
use backward::BackwardInputs;
use rule::SequenceHead;
use score_products::ScoreTiles;
use scratch::SCRATCH;

/// Computes out = softmax(scale q k^T, over the keys that `rule` lets a query see) v.
///
/// `q` has `heads` heads side by side in each row, and `k` and `v` have `kv_heads`. Row b * time + t is position t of
/// row b of the batch. `out` has dense rows of `heads * head` elements. `lse` `[batch, time, heads]` receives the
/// log-sum-exp of each query's scores, which [`backward()`] needs.
///
/// Panics if the slices or the rule do not match the sizes.
pub fn forward<E: Element>(
    h: &AttentionShape,
    rule: &AttentionRule<'_>,
    [q, k, v]: [MultiHeadRows<'_, E>; 3],
    out: &mut [E],
    lse: &mut [f32],
) {
    // Two products: the scores, and the sums of values weighted by the probabilities.
    mac_count::add([2, rule.pairs(h), h.head]);
    forward_on(SimdMethod::of::<E>(level()), (h, rule), [q, k, v], out, lse);
}

/// Computes the gradients of [`forward()`]'s inputs and overwrites `dq`, `dk` and `dv`.
///
/// `out` and `lse` are the results of the forward pass, and `dout` is the gradient of `out`. A key head's gradients are
/// summed in f32 within each query head of its group, then over these heads in order, and are rounded once.
///
/// Panics if the slices or the rule do not match the sizes.
pub fn backward<E: Element>(
    h: &AttentionShape,
    rule: &AttentionRule<'_>,
    [q, k, v]: [MultiHeadRows<'_, E>; 3],
    (out, lse, dout): (&[E], &[f32], &[E]),
    gradients: [MultiHeadRowsMut<'_, E>; 3],
) {
    let inputs = BackwardInputs { q, k, v, out, lse, dout };
    // Five products: the recomputed scores, the probabilities' gradients, and the three results.
    mac_count::add([5, rule.pairs(h), h.head]);
    let spans = rule.spans(h);
    let group_tasks = whole_group_task_count(h, spans.len(), rayon::current_num_threads());
    backward_on(SimdMethod::of::<E>(level()), (h, rule), &inputs, (&spans, group_tasks), gradients);
}

/// Computes the gradients of the sinks' scores and overwrites `sums`. The arguments are those of [`backward()`]; the
/// gradients of the other inputs depend on the sinks only through `lse`.
///
/// Panics if the slices do not match the sizes, or if the rule has no sinks.
pub fn sink_gradients<E: Element>(
    h: &AttentionShape,
    rule: &AttentionRule<'_>,
    (out, lse, dout): (&[E], &[f32], &[E]),
    sums: &mut [f32],
) {
    h.check(out.len(), lse.len());
    h.check(dout.len(), lse.len());
    rule.check_sinks(h);
    let Some(sinks) = rule.sinks else { panic!("{rule:?} has no sinks") };
    assert_eq!(sums.len(), h.heads, "there must be a gradient for each head");
    for_each_part(h.heads, ParallelChunks::new(sums, 1), |head, sum| {
        let mut total = 0f64;
        for row in 0..h.batch * h.time {
            let start = (row * h.heads + head) * h.head;
            let dot = out[start..start + h.head].iter().zip(&dout[start..start + h.head]);
            let dot = dot.map(|(y, dy)| f64::from(get(*y)) * f64::from(get(*dy))).sum::<f64>();
            // The sink's value is 0, so its probability's gradient is 0, from which the mean over all keys is
            // subtracted.
            total -= f64::from(sinks[head] - lse[row * h.heads + head]).exp() * dot;
        }
        sum[0] = total as f32;
    });
}

fn forward_on<E: Element>(
    path: SimdMethod,
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    [q, k, v]: [MultiHeadRows<'_, E>; 3],
    out: &mut [E],
    lse: &mut [f32],
) {
    h.check(out.len(), lse.len());
    rule.check_sinks(h);
    if out.is_empty() {
        return;
    }
    let spans = rule.spans(h);
    let out = MultiHeadRowsMut::new(out, h.heads * h.head).by_head(h.batch, h.time, h.heads, h.head);
    let lse = MultiHeadRowsMut::new(lse, h.heads).by_head(h.batch, h.time, h.heads, 1);
    for_each(spans.len() * h.heads, |task| {
        let (span, head) = (spans[task / h.heads], task % h.heads);
        let sizes = span.sizes(h);
        let q = q.head_rows(span.first, head, h.head);
        let [k, v] = [k, v].map(|rows| rows.head_rows(span.first, head / h.group(), h.head));
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the processor has the SIMD level of `path`; spans do not overlap, and each head of each span is
            // taken once.
            with_words_of!(path, T => unsafe {
                let (out, lse) = (out.take_heads(span, head, 1), lse.take_heads(span, head, 1));
                let sink = rule.sinks.map(|sinks| sinks[head]);
                forward::one_head::<T, E>((&sizes, rule), sink, [q, k, v], (out, lse), scratch)
            });
        });
    });
}

/// Returns the number of key heads (over all sequences) that the backward pass computes in one task each. For the last
/// key heads, each query head is a separate task: with few key heads per thread, some threads would otherwise have one
/// task fewer.
fn whole_group_task_count(h: &AttentionShape, sequences: usize, threads: usize) -> usize {
    let all = sequences * h.kv_heads;
    if h.group() > 1 && all < 4 * threads { all / threads * threads } else { all }
}

fn backward_on<E: Element>(
    path: SimdMethod,
    shape_and_rule: (&AttentionShape, &AttentionRule<'_>),
    inputs: &BackwardInputs<'_, E>,
    parts: (&[SequenceSpan], usize),
    gradients: [MultiHeadRowsMut<'_, E>; 3],
) {
    shape_and_rule.0.check(inputs.out.len(), inputs.lse.len());
    shape_and_rule.0.check(inputs.dout.len(), inputs.lse.len());
    if !inputs.out.is_empty() {
        with_words_of!(path, T => backward_with::<T, E>(shape_and_rule, inputs, parts, gradients));
    }
}

/// Computes the backward pass with tiles whose instructions the processor has.
fn backward_with<T: ScoreTiles + PackElementsToWords<E>, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    inputs: &BackwardInputs<'_, E>,
    (spans, group_tasks): (&[SequenceSpan], usize),
    [dq, dk, dv]: [MultiHeadRowsMut<'_, E>; 3],
) {
    let (all, group) = (spans.len() * h.kv_heads, h.group());
    let dq = dq.by_head(h.batch, h.time, h.heads, h.head);
    let [dk, dv] = [dk, dv].map(|rows| rows.by_head(h.batch, h.time, h.kv_heads, h.head));
    // Returns the sequence and the key head of a group.
    let sequence_and_head = |i: usize| (spans[i / h.kv_heads], i % h.kv_heads);
    let part = (group_tasks..all).map(|i| backward::part_len::<T>(&sequence_and_head(i).0.sizes(h))).max().unwrap_or(0);
    let mut parts: Vec<f32> = crate::kernels::buffer((all - group_tasks) * group * part);
    let each_part = ParallelChunks::new(&mut parts, part);
    for_each(group_tasks + (all - group_tasks) * group, |task| {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the processor has the instructions; spans do not overlap, and the groups before `group_tasks` and
            // the heads of the other groups are taken once each.
            unsafe {
                if task < group_tasks {
                    let (span, head) = sequence_and_head(task);
                    let gradients = [dk.take_heads(span, head, 1), dv.take_heads(span, head, 1)];
                    let dq = dq.take_heads(span, head * group, group);
                    let (sizes, seq_head) = (span.sizes(h), SequenceHead { first: span.first, head });
                    backward::key_head::<T, E>((&sizes, rule), seq_head, inputs, dq, gradients, scratch);
                } else {
                    let (span, kv_head) = sequence_and_head(group_tasks + (task - group_tasks) / group);
                    let head = kv_head * group + (task - group_tasks) % group;
                    let (dq, part) = (dq.take_heads(span, head, 1), each_part.take(task - group_tasks));
                    let (sizes, seq_head) = (span.sizes(h), SequenceHead { first: span.first, head });
                    let part = &mut part[..backward::part_len::<T>(&sizes)];
                    backward::query_head::<T, E>((&sizes, rule), seq_head, inputs, dq, part, scratch);
                }
            }
        });
    });
    for_each_part(all - group_tasks, ParallelChunks::new(&mut parts, group * part), |i, parts| {
        let (span, head) = sequence_and_head(group_tasks + i);
        // SAFETY: the processor has the instructions; these groups are taken once.
        unsafe {
            let gradients = [dk.take_heads(span, head, 1), dv.take_heads(span, head, 1)];
            backward::add_parts::<T, E>((&span.sizes(h), rule), (parts, part), gradients);
        }
    });
}

#[cfg(test)]
mod tests;
