//! From scores to probabilities and to the scores' gradients, a vector of queries at a time.

use super::heads::{BAND, BLOCK, Shape, TILE};
use crate::kernels::vector::Vector;

/// The running softmax of a block of queries, in units of powers of 2.
pub(super) struct Softmax {
    /// The largest scaled score so far.
    pub max: [f32; BLOCK],
    /// The sum of 2^(score - max).
    pub sum: [f32; BLOCK],
    /// The factor by which the last tile's new maximum shrinks earlier sums.
    pub shrink: [f32; BLOCK],
}

impl Softmax {
    pub(super) fn new() -> Self {
        Self { max: [f32::NEG_INFINITY; BLOCK], sum: [0.0; BLOCK], shrink: [0.0; BLOCK] }
    }
}

/// Keys that are taken at a time, each with its own maximum and sum so that they need not wait for one another.
const KEYS: usize = 4;

/// The keys of a tile as a vector of queries sees them: all queries see the keys before `all`, the later ones see those
/// before `some`, and none see those before `none`, which are in use all the same.
struct Seen {
    all: usize,
    some: usize,
    none: usize,
}

impl Seen {
    /// For the queries from `query` on.
    #[inline(always)]
    fn of<V: Vector>(s: Shape, query: usize) -> Self {
        const { assert!(V::LANES.is_multiple_of(KEYS) && BAND.is_multiple_of(V::LANES)) };
        match s.diagonal {
            true => Self { all: query, some: query + V::LANES, none: query / BAND * BAND + BAND },
            false => Self { all: s.keys, some: s.keys, none: s.keys },
        }
    }
}

/// Panics unless a shape stays within a tile.
fn check(tile: &[f32], s: Shape) {
    assert!(tile.len() >= TILE && s.keys <= BLOCK && s.queries <= BLOCK && (!s.diagonal || s.keys == s.queries));
    assert!(s.keys.is_multiple_of(BAND) && s.queries.is_multiple_of(BAND));
}

/// Takes a tile of scores to probabilities relative to the running maximum; `scale` takes scores to powers of 2.
///
/// # Safety
/// The processor has the instructions.
pub(super) unsafe fn softmax<V: Vector>(tile: &mut [f32], s: Shape, scale: f32, state: &mut Softmax) {
    check(tile, s);
    // SAFETY: as the caller promises; keys and queries lie within the tile and the state.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for query in (0..s.queries).step_by(V::LANES) {
                    softmax_of::<V>(tile.as_mut_ptr().add(query), Seen::of::<V>(s, query), scale, state, query);
                }
            },
        )
    }
}

#[inline(always)]
unsafe fn softmax_of<V: Vector>(tile: *mut f32, seen: Seen, scale: f32, state: &mut Softmax, query: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        let (scale, lowest) = (V::splat(scale), V::splat(f32::NEG_INFINITY));
        let at = |key: usize| tile.add(key * BLOCK);
        // A nan is passed over.
        let mut largest = [lowest; KEYS];
        for key in (0..seen.all).step_by(KEYS) {
            for (i, max) in largest.iter_mut().enumerate() {
                *max = V::load(at(key + i)).max(*max);
            }
        }
        for key in (seen.all..seen.some).step_by(KEYS) {
            for (i, max) in largest.iter_mut().enumerate() {
                *max = V::load(at(key + i)).keep_from_lane(key + i - seen.all, lowest).max(*max);
            }
        }
        let [a, b, c, d] = largest;
        let before = V::load(state.max[query..].as_ptr());
        let max = before.max(a.max(b).max(c.max(d)).mul(scale));
        let shrink = before.sub(max).exp2();
        let mut sums = [V::zero(); KEYS];
        for key in (0..seen.all).step_by(KEYS) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let p = V::load(at(key + i)).mul_sub(scale, max).exp2();
                *sum = sum.add(p);
                p.store(at(key + i));
            }
        }
        for key in (seen.all..seen.some).step_by(KEYS) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let p = V::load(at(key + i)).mul_sub(scale, max).exp2().keep_from_lane(key + i - seen.all, V::zero());
                *sum = sum.add(p);
                p.store(at(key + i));
            }
        }
        (seen.some..seen.none).for_each(|key| V::zero().store(at(key)));
        let [a, b, c, d] = sums;
        let sum = V::load(state.sum[query..].as_ptr()).mul_add(shrink, a.add(b).add(c.add(d)));
        max.store(state.max[query..].as_mut_ptr());
        shrink.store(state.shrink[query..].as_mut_ptr());
        sum.store(state.sum[query..].as_mut_ptr());
    }
}

/// What a block of queries knows of its rows.
pub(super) struct Known {
    /// The log-sum-exp, in powers of 2.
    pub lse: [f32; BLOCK],
    /// The sum over keys of probabilities times their gradients.
    pub along: [f32; BLOCK],
}

/// Takes a tile of scores to probabilities p, and their gradients g to the scores' gradients p (g - along).
///
/// # Safety
/// The processor has the instructions.
pub(super) unsafe fn score_gradients<V: Vector>(p: &mut [f32], g: &mut [f32], s: Shape, scale: f32, known: &Known) {
    check(p, s);
    check(g, s);
    // SAFETY: as the caller promises; keys and queries lie within the tiles and the blocks.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                let scale = V::splat(scale);
                for query in (0..s.queries).step_by(V::LANES) {
                    let seen = Seen::of::<V>(s, query);
                    let [lse, along] = [&known.lse, &known.along].map(|x| V::load(x[query..].as_ptr()));
                    let p_at = p.as_mut_ptr().add(query);
                    let g_at = g.as_mut_ptr().add(query);
                    for key in 0..seen.all {
                        let (p_at, g_at) = (p_at.add(key * BLOCK), g_at.add(key * BLOCK));
                        let p = V::load(p_at).mul_sub(scale, lse).exp2();
                        p.store(p_at);
                        p.mul(V::load(g_at).sub(along)).store(g_at);
                    }
                    for key in seen.all..seen.some {
                        let (p_at, g_at) = (p_at.add(key * BLOCK), g_at.add(key * BLOCK));
                        let (p, g) = (V::load(p_at).mul_sub(scale, lse).exp2(), V::load(g_at).sub(along));
                        p.keep_from_lane(key - seen.all, V::zero()).store(p_at);
                        p.mul(g).keep_from_lane(key - seen.all, V::zero()).store(g_at);
                    }
                    for key in seen.some..seen.none {
                        V::zero().store(p_at.add(key * BLOCK));
                        V::zero().store(g_at.add(key * BLOCK));
                    }
                }
            },
        )
    }
}
