//! Dropout whose mask is a function of a seed and of an element's position. Nothing is stored for the backward pass,
//! and the mask depends neither on the number of threads nor on how a slice is split across calls.
//!
//! The random numbers come from Philox4x32-10 (Salmon et al. 2011): ten rounds of multiplications turn a counter into
//! four 32-bit words. No state is carried from one counter to the next, so many counters are computed together in
//! vectors.

use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::f32_access::{get, narrow, put, vectorized, widen};
use crate::kernels::parallel::{ParallelChunks, for_each_part};

/// The number of counters that are computed together.
const LANES: usize = 16;
/// The number of words that these counters yield.
const GROUP: usize = 4 * LANES;
/// The number of elements that one task computes: a multiple of [`GROUP`].
const CHUNK: usize = 1 << 13;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The increment of the key from round to round.
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Computes y = x / (1 - p) for kept elements, and 0 with probability p.
///
/// Whether element i is kept depends only on (seed, offset + i). The input's gradient is the same function of the
/// result's gradient.
///
/// Panics if the lengths differ or p is not in [0, 1).
pub fn dropout<E: Element>(x: &[E], p: f32, seed: u64, offset: u64, y: &mut [E]) {
    assert_eq!(x.len(), y.len(), "the slice lengths of dropout differ");
    assert!((0.0..1.0).contains(&p), "the dropout probability {p} is not in [0, 1)");
    // An element is dropped if its random word is below p * 2^32.
    let (bound, scale) = ((f64::from(p) * 4_294_967_296.0) as u32, 1.0 / (1.0 - p));
    for_each_part(x.len().div_ceil(CHUNK), ParallelChunks::new(y, CHUNK), |i, y| {
        let x = &x[i * CHUNK..][..y.len()];
        vectorized!(drop_some(x, (bound, scale), seed, offset.wrapping_add((i * CHUNK) as u64), y));
    });
}

#[inline(always)]
fn drop_some<E: Element>(x: &[E], (bound, scale): (u32, f32), seed: u64, offset: u64, y: &mut [E]) {
    let mut done = 0;
    while done < x.len() {
        let position = offset.wrapping_add(done as u64);
        let (group, skip) = (position / GROUP as u64, (position % GROUP as u64) as usize);
        let words = group_words(seed, group);
        let n = (GROUP - skip).min(x.len() - done);
        let (x, y) = (&x[done..][..n], &mut y[done..][..n]);
        // A full group is handled separately, so that the compiler knows its length.
        match (x.first_chunk::<GROUP>(), y.first_chunk_mut::<GROUP>()) {
            (Some(x), Some(y)) => keep(x, &words, bound, scale, y),
            _ => keep(x, &words[skip..], bound, scale, y),
        }
        done += n;
    }
}

/// Computes y for at most one group: x scaled where the word reaches the bound, and 0 elsewhere.
#[inline(always)]
fn keep<E: Element>(x: &[E], words: &[u32], bound: u32, scale: f32, y: &mut [E]) {
    if E::KIND != ElementDtype::F16 {
        for ((y, x), word) in y.iter_mut().zip(x).zip(words) {
            let scaled = get(*x) * scale;
            *y = put(if *word < bound { 0.0 } else { scaled });
        }
        return;
    }
    let mut scratch = [0f32; GROUP];
    let scratch = &mut scratch[..x.len()];
    widen(x, scratch);
    for (x, word) in scratch.iter_mut().zip(words) {
        let scaled = *x * scale;
        *x = if *word < bound { 0.0 } else { scaled };
    }
    narrow(scratch, y);
}

/// Returns the words of positions `64 * group` to `64 * group + 63`. Word i of counter `16 * group + lane` belongs to
/// position `64 * group + 16 * i + lane`.
#[inline(always)]
fn group_words(seed: u64, group: u64) -> [u32; GROUP] {
    let first = group.wrapping_mul(LANES as u64);
    // The first counter is a multiple of the number of lanes.
    let counters: [u32; LANES] = std::array::from_fn(
        #[inline(always)]
        |lane| first as u32 | lane as u32,
    );
    let counters = [counters, [(first >> 32) as u32; LANES], [0; LANES], [0; LANES]];
    let words = philox(counters, [seed as u32, (seed >> 32) as u32]);
    let mut out = [0; GROUP];
    for (out, words) in out.chunks_exact_mut(LANES).zip(&words) {
        out.copy_from_slice(words);
    }
    out
}

/// Computes Philox4x32-10 of sixteen counters, word by word.
#[inline(always)]
fn philox(mut c: [[u32; LANES]; 4], mut key: [u32; 2]) -> [[u32; LANES]; 4] {
    for _ in 0..ROUNDS {
        let mut next = [[0; LANES]; 4];
        for lane in 0..LANES {
            let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0][lane]);
            let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2][lane]);
            next[0][lane] = (b >> 32) as u32 ^ c[1][lane] ^ key[0];
            next[1][lane] = b as u32;
            next[2][lane] = (a >> 32) as u32 ^ c[3][lane] ^ key[1];
            next[3][lane] = a as u32;
        }
        c = next;
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn the_generator_gives_the_published_vectors() {
        // Random123's kat_vectors, philox4x32 with 10 rounds.
        let vectors = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in vectors {
            assert_eq!(philox(counter.map(|c| [c; LANES]), key), want.map(|w| [w; LANES]));
        }
    }

    #[test]
    fn an_elements_fate_depends_on_its_position_only() {
        let n = CHUNK + 1000;
        let x: Vec<f32> = (0..n).map(|i| i as f32 + 1.0).collect();
        let mut whole = vec![0.0; n];
        dropout(&x, 0.3, 7, 5, &mut whole);
        for (start, len) in [(0, 1), (1, 64), (59, 300), (60, 129), (CHUNK - 3, 700)] {
            let mut part = vec![0.0; len];
            dropout(&x[start..][..len], 0.3, 7, 5 + start as u64, &mut part);
            assert_eq!(part, whole[start..][..len]);
        }
        let mut other = vec![0.0; n];
        dropout(&x, 0.3, 8, 5, &mut other);
        assert_ne!(whole, other);
    }

    fn the_share_of_p_is_dropped_and_the_rest_grows<E: Element>() {
        let n = 200_000;
        let (x, mut y): (Vec<E>, _) = (vec![put(1.5); n], vec![E::default(); n]);
        for p in [0.0, 0.1, 0.5, 0.9] {
            dropout(&x, p, 1 << 40, 3, &mut y);
            let kept: E = put(1.5 * (1.0 / (1.0 - p)));
            let dropped = y.iter().filter(|y| get(**y) == 0.0).count();
            assert!(y.iter().all(|y| get(*y) == 0.0 || get(*y) == get(kept)));
            let (share, deviation) = (dropped as f32 / n as f32, (p * (1.0 - p) / n as f32).sqrt());
            assert!((share - p).abs() <= 4.0 * deviation, "{share} of {p}");
        }
    }

    #[test]
    fn the_share_of_p_is_dropped_and_the_rest_grows_in_every_dtype() {
        the_share_of_p_is_dropped_and_the_rest_grows::<f32>();
        the_share_of_p_is_dropped_and_the_rest_grows::<bf16>();
        the_share_of_p_is_dropped_and_the_rest_grows::<f16>();
    }
}
