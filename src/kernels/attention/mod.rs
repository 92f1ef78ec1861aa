//! Causal attention with grouped heads: softmax(q k^T / sqrt(head), causal) v, and its gradients.
//!
//! Each head is computed in square tiles of [`BLOCK`] keys and queries with a running softmax, so that nothing
//! quadratic in time is ever held, and no tile above the diagonal is touched. Backward recomputes the probabilities
//! from the log-sum-exp that forward keeps. A task is one (batch, head) in forward and one (batch, key head) in
//! backward; within a task the order is fixed, so results have the same bits for any number of threads.
//!
//! The tile operations exist three times, behind the trait [`tiles::Tiles`]: loops (portable, and with the vectors of
//! AVX2 the same bits), AVX-512 in f32, and AVX-512 with products of bf16 numbers for bf16 elements. [`Path::of`] says
//! which one a level of SIMD takes.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod backward;
mod cached;
mod forward;
mod heads;
mod portable;
mod scratch;
mod strided;
mod tiles;

pub use cached::{Cached, capacity_for, forward_cached, keep_keys, keep_values};
pub use heads::Heads;
pub use strided::{Rows, RowsMut};

use crate::kernels::count;
use crate::kernels::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::element::Kind;
use crate::kernels::par::{Chunks, for_each_part};
use crate::kernels::simd::{Level, level};
use heads::{BAND, BLOCK, LOG2_E};
use scratch::Scratch;
use std::cell::RefCell;

/// The ways to compute a tile.
#[derive(Debug, Clone, Copy)]
enum Path {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::F32Tiles),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512::Bf16Tiles),
}

impl Path {
    /// The path of a level, for elements `E`.
    fn of<E: Element>(level: Level) -> Self {
        #[cfg(target_arch = "x86_64")]
        if level == Level::Avx512 {
            if E::KIND == Kind::BF16
                && let Some(tiles) = avx512::Bf16Tiles::new()
            {
                return Self::Avx512Bf16(tiles);
            }
            if let Some(tiles) = avx512::F32Tiles::new() {
                return Self::Avx512(tiles);
            }
        }
        // Loops: they run at the level too.
        Self::Portable(portable::Portable)
    }
}

/// Runs `$body` with `$tiles` bound to the tile operations of `$path`.
macro_rules! with_tiles {
    ($path:expr, $tiles:ident => $body:expr) => {
        match $path {
            Path::Portable($tiles) => $body,
            #[cfg(target_arch = "x86_64")]
            Path::Avx512($tiles) => $body,
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Bf16($tiles) => $body,
        }
    };
}

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
    forward_on(Path::of::<E>(level()), h, [q, k, v], out, lse);
}

/// The gradients of [`forward()`]'s inputs, overwriting `dq`, `dk` and `dv`.
///
/// `out` and `lse` are what forward computed, `dout` the gradient of `out`. A key head's gradients are summed over its
/// group of query heads in f32, in order, and rounded once.
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
    let result = backward::Result { out, lse, dout };
    // Scores once more, the probabilities' gradients, and the three results.
    count::add([5, h.pairs(), h.head]);
    backward_on(Path::of::<E>(level()), h, [q, k, v], result, [dq, dk, dv]);
}

fn forward_on<E: Element>(path: Path, h: &Heads, [q, k, v]: [Rows<'_, E>; 3], out: &mut [E], lse: &mut [f32]) {
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
            with_tiles!(path, tiles => forward::one_head(tiles, h, [q, k, v], out, lse, scratch));
        });
    });
}

fn backward_on<E: Element>(
    path: Path,
    h: &Heads,
    [q, k, v]: [Rows<'_, E>; 3],
    result: backward::Result<'_, E>,
    [dq, dk, dv]: [RowsMut<'_, E>; 3],
) {
    h.check(result.out.len(), result.lse.len());
    h.check(result.dout.len(), result.lse.len());
    if result.out.is_empty() {
        return;
    }
    let dq = dq.by_head(h.batch, h.time, h.kv_heads, h.group() * h.head);
    let [dk, dv] = [dk, dv].map(|rows| rows.by_head(h.batch, h.time, h.kv_heads, h.head));
    for_each_part(h.batch * h.kv_heads, (dq, (dk, dv)), |task, (dq, (dk, dv))| {
        let (batch, kv_head) = (task / h.kv_heads, task % h.kv_heads);
        let inputs = [k, v].map(|rows| rows.head(h, batch, kv_head));
        SCRATCH.with_borrow_mut(|scratch| {
            with_tiles!(path, tiles => {
                backward::one_key_head(tiles, h, (batch, kv_head), q, inputs, &result, [dq, dk, dv], scratch)
            });
        });
    });
}

thread_local! {
    /// The working memory of a thread: kept, because its pages cost more to get than a small head to compute.
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::new()) };
}

#[cfg(test)]
mod tests;
