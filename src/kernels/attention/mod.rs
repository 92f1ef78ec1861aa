//! Causal attention with grouped heads: softmax(q k^T / sqrt(head), causal) v, and its gradients.
//!
//! Each head is computed in square tiles of [`heads::BLOCK`] keys and queries with a running softmax, so that nothing
//! quadratic in time is ever held, and no tile above the diagonal is touched. Backward recomputes the probabilities
//! from the log-sum-exp that forward keeps. A task is one (batch, head) in forward and one (batch, key head), or a
//! query head of it, in backward; the order of sums is the same in each case, so results have the same bits for any
//! number of threads.
//!
//! Everything is written once, over the vectors of a level of SIMD and the words that its products take
//! ([`tiles::Tiles`]); [`Method::of`] says which one a level takes. bf16 elements are multiplied in pairs where a
//! processor's AVX512_BF16 is fast, everything else in f32, to which elements are widened when they are packed.

mod backward;
mod cached;
mod forward;
mod heads;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod product;
mod scratch;
mod softmax;
mod strided;
mod tiles;

pub use cached::{Cached, capacity_for, forward_cached, keep_keys, keep_values};
pub use heads::Heads;
pub use strided::{Rows, RowsMut};

use crate::kernels::count;
use crate::kernels::element::Element;
use crate::kernels::par::{Chunks, Parts, for_each, for_each_part};
use crate::kernels::simd::level;
use crate::kernels::vector::{Method, OfElements, with_words_of};
use backward::Given;
use scratch::SCRATCH;
use tiles::Tiles;

/// out = softmax(q k^T / sqrt(head), causal) v.
///
/// `q` has `heads` heads side by side in each row, `k` and `v` have `kv_heads`; row b * time + t is position t of
/// sequence b. `out` has dense rows of `heads * head` elements. `lse` `[batch, heads, time]` receives the log-sum-exp
/// of each query's scaled scores, which [`backward()`] needs.
///
/// Panics if the slices do not fit the sizes.
pub fn forward<E: Element>(h: &Heads, q: Rows<'_, E>, k: Rows<'_, E>, v: Rows<'_, E>, out: &mut [E], lse: &mut [f32]) {
    // Scores, and their sum of values.
    count::add([2, h.pairs(), h.head]);
    forward_on(Method::of::<E>(level()), h, [q, k, v], out, lse);
}

/// The gradients of [`forward()`]'s inputs, overwriting `dq`, `dk` and `dv`.
///
/// `out` and `lse` are what forward computed, `dout` the gradient of `out`. A key head's gradients are summed over its
/// group of query heads in f32: each head by itself, then the heads in order, rounded once.
///
/// Panics if the slices do not fit the sizes.
#[expect(clippy::too_many_arguments, reason = "three inputs, their three gradients, and what links them")]
pub fn backward<E: Element>(
    h: &Heads,
    q: Rows<'_, E>,
    k: Rows<'_, E>,
    v: Rows<'_, E>,
    out: &[E],
    lse: &[f32],
    dout: &[E],
    dq: RowsMut<'_, E>,
    dk: RowsMut<'_, E>,
    dv: RowsMut<'_, E>,
) {
    let given = Given { q, k, v, out, lse, dout };
    // Scores once more, the probabilities' gradients, and the three results.
    count::add([5, h.pairs(), h.head]);
    let whole = whole_groups(h, rayon::current_num_threads());
    backward_on(Method::of::<E>(level()), h, &given, whole, [dq, dk, dv]);
}

fn forward_on<E: Element>(path: Method, h: &Heads, [q, k, v]: [Rows<'_, E>; 3], out: &mut [E], lse: &mut [f32]) {
    h.check(out.len(), lse.len());
    if out.is_empty() {
        return;
    }
    let tasks = h.batch * h.heads;
    let out = RowsMut::new(out, h.heads * h.head).by_head(h.batch, h.time, h.heads, h.head);
    for_each_part(tasks, (out, Chunks::new(lse, h.time)), |task, (out, lse)| {
        let (batch, head) = (task / h.heads, task % h.heads);
        let q = q.head(h, batch, head);
        let [k, v] = [k, v].map(|rows| rows.head(h, batch, head / h.group()));
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the processor has the level of the path.
            with_words_of!(path, T => unsafe { forward::one_head::<T, E>(h, [q, k, v], out, lse, scratch) });
        });
    });
}

/// How many of all sequences' key heads backward computes in one task each. The query heads of the others, the last
/// ones, are tasks of their own: where there are few key heads for the threads, some threads would have one less.
fn whole_groups(h: &Heads, threads: usize) -> usize {
    let all = h.batch * h.kv_heads;
    if h.group() > 1 && all < 4 * threads { all / threads * threads } else { all }
}

fn backward_on<E: Element>(
    path: Method,
    h: &Heads,
    given: &Given<'_, E>,
    whole: usize,
    gradients: [RowsMut<'_, E>; 3],
) {
    h.check(given.out.len(), given.lse.len());
    h.check(given.dout.len(), given.lse.len());
    if !given.out.is_empty() {
        with_words_of!(path, T => backward_with::<T, E>(h, given, whole, gradients));
    }
}

/// Backward with tiles whose instructions the processor has.
fn backward_with<T: Tiles + OfElements<E>, E: Element>(
    h: &Heads,
    given: &Given<'_, E>,
    whole: usize,
    [dq, dk, dv]: [RowsMut<'_, E>; 3],
) {
    let (all, group) = (h.batch * h.kv_heads, h.group());
    let dq = dq.by_head(h.batch, h.time, h.heads, h.head);
    let [dk, dv] = [dk, dv].map(|rows| rows.by_head(h.batch, h.time, h.kv_heads, h.head));
    let part = backward::part::<T>(h);
    let mut parts: Vec<f32> = crate::kernels::buffer((all - whole) * group * part);
    let each_part = Chunks::new(&mut parts, part);
    for_each(whole + (all - whole) * group, |task| {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the processor has the instructions; the groups before `whole` and the heads of the others are
            // taken once each.
            unsafe {
                if task < whole {
                    let place = (task / h.kv_heads, task % h.kv_heads);
                    let (dq, gradients) = (dq.take_some(task * group, group), [dk.take(task), dv.take(task)]);
                    backward::key_head::<T, E>(h, place, given, dq, gradients, scratch);
                } else {
                    let head = whole * group + (task - whole);
                    let place = (head / h.heads, head % h.heads);
                    let (dq, part) = (dq.take(head), each_part.take(task - whole));
                    backward::query_head::<T, E>(h, place, given, dq, part, scratch);
                }
            }
        });
    });
    for_each_part(all - whole, Chunks::new(&mut parts, group * part), |i, parts| {
        // SAFETY: the processor has the instructions; these groups are taken once.
        unsafe { backward::add_parts::<T, E>(h, parts, [dk.take(whole + i), dv.take(whole + i)]) }
    });
}

#[cfg(test)]
mod tests;
