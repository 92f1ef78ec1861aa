//! Conversion of scores to probabilities and to the scores' gradients, a vector of queries at a time.

use super::rule::{SoftCap, TileMaskEdge, TileShape};
use super::shape::{BAND, BLOCK, LOG2_E, TILE};
use crate::kernels::vector::{SimdVector, tanh};

/// The running softmax of a block of queries, computed with powers of 2.
pub(super) struct OnlineSoftmax {
    /// The largest scaled score so far.
    pub max: [f32; BLOCK],
    /// The sum of 2^(score - max).
    pub sum: [f32; BLOCK],
    /// The factor by which the last tile's new maximum scales earlier sums.
    pub shrink: [f32; BLOCK],
}

impl OnlineSoftmax {
    /// Returns the state before any key, or after the sink if there is one.
    pub(super) fn new(sink: Option<f32>) -> Self {
        // The maximum starts at a finite number, so that nothing becomes NaN before a query has seen a key.
        let (max, sum) = sink.map_or((f32::MIN, 0.0), |score| (score * LOG2_E, 1.0));
        Self { max: [max; BLOCK], sum: [sum; BLOCK], shrink: [0.0; BLOCK] }
    }
}

/// The number of keys that are processed at a time. Each has a separate maximum and sum, so they are independent.
const KEYS: usize = 4;

/// The keys of a tile as seen by a vector of queries. All queries see the keys before `all_end`. Some see those from
/// `all_end` to `some_end`. No query sees those from `some_end` to `none_end`, which products with the tile still read.
struct VisibleKeys {
    all_end: usize,
    some_end: usize,
    none_end: usize,
}

impl VisibleKeys {
    /// Returns the keys for a vector of queries that starts at `query`. At an edge, any key may be hidden from any
    /// query.
    #[inline(always)]
    fn of<V: SimdVector>(s: TileShape, query: usize) -> Self {
        const { assert!(V::LANES.is_multiple_of(KEYS) && BAND.is_multiple_of(V::LANES)) };
        let none_end = if s.diagonal { query / BAND * BAND + BAND } else { s.keys };
        match (s.edge, s.diagonal) {
            (Some(_), true) => Self { all_end: 0, some_end: query + V::LANES, none_end },
            (Some(_), false) => Self { all_end: 0, some_end: s.keys, none_end },
            (None, true) => Self { all_end: query, some_end: query + V::LANES, none_end },
            (None, false) => Self { all_end: s.keys, some_end: s.keys, none_end },
        }
    }
}

/// A mask over the queries of a vector that see a key.
trait TileMask: Copy {
    /// Keeps the lanes of `x` whose queries see key number `key` of the tile, and takes the other lanes from `other`.
    ///
    /// # Safety
    /// The call must be inside `V::with`.
    unsafe fn keep<V: SimdVector>(self, x: V, key: usize, other: V) -> V;
}

/// The diagonal, for the queries that start at this index.
#[derive(Clone, Copy)]
struct CausalMask(usize);

impl TileMask for CausalMask {
    #[inline(always)]
    unsafe fn keep<V: SimdVector>(self, x: V, key: usize, other: V) -> V {
        // SAFETY: as the caller promises.
        unsafe { x.blend_from_lane(key.saturating_sub(self.0), other) }
    }
}

/// The diagonal, if there is one, and an edge.
#[derive(Clone, Copy)]
struct WindowMask {
    query: usize,
    diagonal: bool,
    edge: TileMaskEdge,
}

impl TileMask for WindowMask {
    #[inline(always)]
    unsafe fn keep<V: SimdVector>(self, x: V, key: usize, other: V) -> V {
        if key >= self.edge.keys {
            return other;
        }
        // The queries from lane `start` up to, but not including, lane `end` see the key.
        let lane =
            |offset: isize| (key as isize + 1 - self.query as isize - offset).clamp(0, V::LANES as isize) as usize;
        let (start, end) = (lane(self.edge.to), lane(self.edge.from));
        // SAFETY: as the caller promises.
        unsafe {
            let visible = other.blend_from_lane(end, x);
            let visible = if start > 0 { visible.blend_from_lane(start, other) } else { visible };
            if self.diagonal { CausalMask(self.query).keep(visible, key, other) } else { visible }
        }
    }
}

/// Panics if a shape exceeds a tile.
fn check(tile: &[f32], s: TileShape) {
    assert!(tile.len() >= TILE && s.keys <= BLOCK && s.queries <= BLOCK && (!s.diagonal || s.keys == s.queries));
    assert!(s.keys.is_multiple_of(BAND) && s.queries.is_multiple_of(BAND));
}

/// Applies a cap to a tile of products and writes their scores as base-2 exponents.
///
/// # Safety
/// The processor must have the instructions of `V`.
pub(super) unsafe fn bound<V: SimdVector>(tile: &mut [f32], s: TileShape, cap: SoftCap) {
    check(tile, s);
    // SAFETY: as the caller promises; keys and queries are within the tile.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                let (inner, outer) = (V::splat(cap.inner), V::splat(cap.outer));
                for query in (0..s.queries).step_by(V::LANES) {
                    let tile = tile.as_mut_ptr().add(query);
                    for key in 0..VisibleKeys::of::<V>(s, query).some_end {
                        let at = tile.add(key * BLOCK);
                        tanh(V::load(at).mul(inner)).mul(outer).store(at);
                    }
                }
            },
        )
    }
}

/// Converts a tile of scores to probabilities relative to the running maximum. `scale` converts scores to base-2
/// exponents.
///
/// # Safety
/// The processor must have the instructions of `V`.
pub(super) unsafe fn softmax<V: SimdVector>(tile: &mut [f32], s: TileShape, scale: f32, state: &mut OnlineSoftmax) {
    check(tile, s);
    // SAFETY: as the caller promises; keys and queries are within the tile and the state.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for query in (0..s.queries).step_by(V::LANES) {
                    let (tile, visible) = (tile.as_mut_ptr().add(query), VisibleKeys::of::<V>(s, query));
                    match s.edge {
                        None => softmax_of::<V>(tile, visible, CausalMask(query), scale, state, query),
                        Some(edge) => {
                            let bounds = WindowMask { query, diagonal: s.diagonal, edge };
                            softmax_of::<V>(tile, visible, bounds, scale, state, query);
                        }
                    }
                }
            },
        )
    }
}

#[inline(always)]
unsafe fn softmax_of<V: SimdVector>(
    tile: *mut f32,
    visible: VisibleKeys,
    mask: impl TileMask,
    scale: f32,
    state: &mut OnlineSoftmax,
    query: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let (scale, lowest) = (V::splat(scale), V::splat(f32::NEG_INFINITY));
        let at = |key: usize| tile.add(key * BLOCK);
        // NaN is ignored.
        let mut largest = [lowest; KEYS];
        for key in (0..visible.all_end).step_by(KEYS) {
            for (i, max) in largest.iter_mut().enumerate() {
                *max = V::load(at(key + i)).max(*max);
            }
        }
        for key in (visible.all_end..visible.some_end).step_by(KEYS) {
            for (i, max) in largest.iter_mut().enumerate() {
                *max = mask.keep(V::load(at(key + i)), key + i, lowest).max(*max);
            }
        }
        let [a, b, c, d] = largest;
        let old_max = V::load(state.max[query..].as_ptr());
        let max = old_max.max(a.max(b).max(c.max(d)).mul(scale));
        let shrink = old_max.sub(max).exp2();
        let mut sums = [V::zero(); KEYS];
        for key in (0..visible.all_end).step_by(KEYS) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let p = V::load(at(key + i)).mul_sub(scale, max).exp2();
                *sum = sum.add(p);
                p.store(at(key + i));
            }
        }
        for key in (visible.all_end..visible.some_end).step_by(KEYS) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let p = mask.keep(V::load(at(key + i)).mul_sub(scale, max).exp2(), key + i, V::zero());
                *sum = sum.add(p);
                p.store(at(key + i));
            }
        }
        (visible.some_end..visible.none_end).for_each(|key| V::zero().store(at(key)));
        let [a, b, c, d] = sums;
        let sum = V::load(state.sum[query..].as_ptr()).mul_add(shrink, a.add(b).add(c.add(d)));
        max.store(state.max[query..].as_mut_ptr());
        shrink.store(state.shrink[query..].as_mut_ptr());
        sum.store(state.sum[query..].as_mut_ptr());
    }
}

/// The statistics of the rows of a block of queries.
pub(super) struct BackwardRowStatistics {
    /// The log-sum-exp to base 2.
    pub lse: [f32; BLOCK],
    /// The sum over keys of probabilities times their gradients.
    pub dout_dot_out: [f32; BLOCK],
}

/// Converts a tile of scores to probabilities p, and their gradients g to the scores' gradients p (g - dout_dot_out).
/// With a cap, `p` contains capped scores at first, and the scores' gradients are multiplied by the cap's derivative.
///
/// # Safety
/// The processor must have the instructions of `V`.
pub(super) unsafe fn score_gradients<V: SimdVector>(
    p: &mut [f32],
    g: &mut [f32],
    s: TileShape,
    (scale, cap): (f32, Option<SoftCap>),
    stats: &BackwardRowStatistics,
) {
    check(p, s);
    check(g, s);
    // SAFETY: as the caller promises; keys and queries are within the tiles and the blocks.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for query in (0..s.queries).step_by(V::LANES) {
                    let at = [p.as_mut_ptr().add(query), g.as_mut_ptr().add(query)];
                    let visible = VisibleKeys::of::<V>(s, query);
                    let stats = [&stats.lse, &stats.dout_dot_out].map(|x| V::load(x[query..].as_ptr()));
                    let bounds = s.edge.map(|edge| WindowMask { query, diagonal: s.diagonal, edge });
                    match (bounds, cap) {
                        (None, None) => gradients_of::<V>(at, visible, CausalMask(query), (scale, NoSoftCap), stats),
                        (None, Some(cap)) => gradients_of::<V>(at, visible, CausalMask(query), (scale, cap), stats),
                        (Some(bounds), None) => gradients_of::<V>(at, visible, bounds, (scale, NoSoftCap), stats),
                        (Some(bounds), Some(cap)) => gradients_of::<V>(at, visible, bounds, (scale, cap), stats),
                    }
                }
            },
        )
    }
}

/// The derivative of the function that produced the scores.
trait ScoreSlope: Copy {
    /// Converts a score's gradient to the gradient of the product that the score was computed from.
    ///
    /// # Safety
    /// The call must be inside `V::with`.
    unsafe fn through<V: SimdVector>(self, score: V, gradient: V) -> V;
}

#[derive(Clone, Copy)]
struct NoSoftCap;

impl ScoreSlope for NoSoftCap {
    #[inline(always)]
    unsafe fn through<V: SimdVector>(self, _: V, gradient: V) -> V {
        gradient
    }
}

impl ScoreSlope for SoftCap {
    #[inline(always)]
    unsafe fn through<V: SimdVector>(self, score: V, gradient: V) -> V {
        // SAFETY: as the caller promises.
        unsafe {
            let tanh = score.mul(V::splat(1.0 / self.outer));
            gradient.mul(V::splat(1.0).sub(tanh.mul(tanh)))
        }
    }
}

#[inline(always)]
unsafe fn gradients_of<V: SimdVector>(
    [p_at, g_at]: [*mut f32; 2],
    visible: VisibleKeys,
    mask: impl TileMask,
    (scale, slope): (f32, impl ScoreSlope),
    [lse, dout_dot_out]: [V; 2],
) {
    // SAFETY: as the caller promises.
    unsafe {
        let scale = V::splat(scale);
        for key in 0..visible.all_end {
            let (p_at, g_at) = (p_at.add(key * BLOCK), g_at.add(key * BLOCK));
            let score = V::load(p_at);
            let p = score.mul_sub(scale, lse).exp2();
            p.store(p_at);
            slope.through(score, p.mul(V::load(g_at).sub(dout_dot_out))).store(g_at);
        }
        for key in visible.all_end..visible.some_end {
            let (p_at, g_at) = (p_at.add(key * BLOCK), g_at.add(key * BLOCK));
            let score = V::load(p_at);
            let p = score.mul_sub(scale, lse).exp2();
            let g = slope.through(score, p.mul(V::load(g_at).sub(dout_dot_out)));
            mask.keep(p, key, V::zero()).store(p_at);
            mask.keep(g, key, V::zero()).store(g_at);
        }
        for key in visible.some_end..visible.none_end {
            V::zero().store(p_at.add(key * BLOCK));
            V::zero().store(g_at.add(key * BLOCK));
        }
    }
}
