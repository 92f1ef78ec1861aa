//! Attention with a cache, compared with attention over all positions at once, and the inputs that the cache refuses.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_zero::nn::{
    AttentionOptions, KeyValueCache, Rotary, attention, causal_attention, fused_attention, grouped_attention,
};

fn numbers(batch: usize, time: usize, width: usize, seed: usize) -> Tensor {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0;
    let values = (0..batch * time * width).map(number);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((batch, time, width)).unwrap()
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let (a, b) = (a.to_dtype(DType::F32).unwrap(), b.to_dtype(DType::F32).unwrap());
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

/// Returns the results for positions that arrive in pieces of these lengths.
fn in_pieces(pieces: &[usize], mut piece: impl FnMut(usize, usize) -> Result<Tensor>) -> Tensor {
    let mut from = 0;
    let mut results = Vec::new();
    for time in pieces {
        results.push(piece(from, *time).unwrap());
        from += time;
    }
    Tensor::cat(&results, 1).unwrap()
}

#[test]
fn pieces_of_fused_heads_give_what_all_positions_give_at_once() {
    for (dtype, accuracy) in [(DType::F32, 4e-6), (DType::BF16, 4e-2), (DType::F16, 4e-3)] {
        let qkv = numbers(2, 90, 3 * 40, 1).to_dtype(dtype).unwrap();
        let mut cache = KeyValueCache::new(90);
        let got = in_pieces(&[20, 1, 1, 60, 8], |from, time| cache.causal_attention(&qkv.narrow(1, from, time)?, 5));
        assert_eq!(got.dtype(), dtype);
        let want = causal_attention(&qkv, 5).unwrap();
        assert!(difference(&got, &want) <= accuracy, "{dtype:?}: {}", difference(&got, &want));
        assert_eq!(cache.len(), 90);
        let first = |x: &Tensor| x.narrow(1, 0, 20).unwrap();
        assert_eq!(difference(&first(&got), &first(&want)), 0.0, "the first piece has the same bits");
    }
}

#[test]
fn pieces_of_grouped_and_rotated_heads_give_what_all_positions_give_at_once() {
    let (q, k, v) = (numbers(1, 50, 48, 1), numbers(1, 50, 16, 2), numbers(1, 50, 16, 3));
    let rotary = Rotary::new(8, 50, 10_000.0).unwrap();
    let (turned, turned_k) = (rotary.forward(&q).unwrap(), rotary.forward(&k).unwrap());
    let want = grouped_attention(&turned, &turned_k, &v, 6, 2).unwrap();
    let mut cache = KeyValueCache::new(64);
    let got = in_pieces(&[1, 9, 1, 30, 9], |from, time| {
        let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, from, time));
        let (q, k) = (rotary.forward_from(&q?, from)?, rotary.forward_from(&k?, from)?);
        cache.grouped_attention(&q, &k, &v?, 6, 2)
    });
    assert!(difference(&got, &want) <= 4e-6, "{}", difference(&got, &want));
}

#[test]
fn pieces_with_windows_and_bound_scores_give_what_all_positions_give_at_once() {
    let attend = AttentionOptions { scale: Some(0.3), soft_cap: Some(2.0), window: Some(12), bidirectional: false };
    let (q, k, v) = (numbers(2, 50, 48, 1), numbers(2, 50, 16, 2), numbers(2, 50, 16, 3));
    let want = attention(&q, &k, &v, 6, 2, &attend, None).unwrap();
    let mut cache = KeyValueCache::new(50);
    let got = in_pieces(&[20, 1, 20, 9], |from, time| {
        let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, from, time));
        cache.attention(&q?, &k?, &v?, 6, 2, &attend)
    });
    assert!(difference(&got, &want) <= 4e-6, "{}", difference(&got, &want));
    assert!(difference(&got, &grouped_attention(&q, &k, &v, 6, 2).unwrap()) > 0.1);
    let want = fused_attention(&q, 2, &attend, None).unwrap();
    let mut cache = KeyValueCache::new(50);
    let got = in_pieces(&[1, 48, 1], |from, time| cache.fused_attention(&q.narrow(1, from, time)?, 2, &attend));
    assert!(difference(&got, &want) <= 4e-6, "{}", difference(&got, &want));
}

#[test]
fn memory_doubles_up_to_the_limit_and_is_what_the_sizes_say() {
    let qkv = numbers(1, 40, 3 * 8, 1);
    let bytes = |positions: usize| 2 * positions * 8 * 4;
    let mut cache = KeyValueCache::new(40);
    assert_eq!(cache.size_in_bytes(), 0);
    // Space is reserved for multiples of sixteen positions.
    for (time, positions) in [(3, 16), (1, 16), (12, 16), (1, 32), (5, 32), (18, 48)] {
        cache.causal_attention(&qkv.narrow(1, 0, time).unwrap(), 2).unwrap();
        assert_eq!(cache.size_in_bytes(), bytes(positions), "{} positions", cache.len());
    }
    let mut cache = KeyValueCache::new(40);
    cache.reserve(30);
    cache.causal_attention(&qkv.narrow(1, 0, 1).unwrap(), 2).unwrap();
    assert_eq!(cache.size_in_bytes(), bytes(32));
}

#[test]
fn positions_that_were_forgotten_may_come_again_otherwise() {
    let (qkv, other) = (numbers(1, 12, 3 * 8, 1), numbers(1, 12, 3 * 8, 2));
    let mut cache = KeyValueCache::new(12);
    cache.causal_attention(&qkv, 2).unwrap();
    cache.truncate(7);
    let got = cache.causal_attention(&other.narrow(1, 7, 5).unwrap(), 2).unwrap();
    let whole = Tensor::cat(&[qkv.narrow(1, 0, 7).unwrap(), other.narrow(1, 7, 5).unwrap()], 1).unwrap();
    let want = causal_attention(&whole, 2).unwrap().narrow(1, 7, 5).unwrap();
    assert!(difference(&got, &want) <= 4e-6);
    // An empty cache accepts any sizes.
    cache.truncate(0);
    cache.causal_attention(&numbers(2, 3, 3 * 6, 1), 1).unwrap();
    assert_eq!(cache.len(), 3);
}

#[test]
fn what_a_cache_cannot_take_up_is_refused_and_changes_nothing() {
    let qkv = numbers(1, 8, 3 * 8, 1);
    let mut cache = KeyValueCache::new(8);
    cache.causal_attention(&qkv.narrow(1, 0, 6).unwrap(), 2).unwrap();
    // This is only the first line of the error, because a backtrace may follow.
    let text = |cache: &mut KeyValueCache, qkv: &Tensor, heads| {
        cache.causal_attention(qkv, heads).unwrap_err().to_string().lines().next().unwrap_or_default().to_string()
    };
    insta::assert_snapshot!(text(&mut cache, &qkv.narrow(1, 0, 3).unwrap(), 2), @"attention with a cache: 3 positions after 6 exceed the cache's limit of 8");
    insta::assert_snapshot!(text(&mut cache, &qkv.narrow(1, 0, 1).unwrap(), 1), @"attention with a cache: it holds 1 x 2 key heads of 4 elements in F32, but the new input has 1 x 1 key head of 8 elements in F32; each layer and each text needs its own cache");
    insta::assert_snapshot!(text(&mut cache, &qkv.narrow(1, 0, 1).unwrap().to_dtype(DType::BF16).unwrap(), 2), @"attention with a cache: it holds 1 x 2 key heads of 4 elements in F32, but the new input has 1 x 2 key heads of 4 elements in BF16; each layer and each text needs its own cache");
    let recorded = Var::from_tensor(&qkv.narrow(1, 6, 1).unwrap()).unwrap();
    insta::assert_snapshot!(text(&mut cache, &recorded, 2), @"attention with a cache has no backward pass, but a graph of its input is being recorded; detach the input, or train with causal_attention or grouped_attention");
    let got = cache.causal_attention(&recorded.detach(), 2).unwrap();
    let want = causal_attention(&qkv, 2).unwrap().narrow(1, 6, 1).unwrap();
    assert!(difference(&got, &want) <= 4e-6);
}
