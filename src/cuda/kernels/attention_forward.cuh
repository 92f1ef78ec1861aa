// Attention forward: softmax(scores) values with a running maximum, and the log-sum-exp of each query's scores.
//
//     own rows: queries
//     for each tile of keys and values that some of them see:
//         scores = queries keys^T                          (a warp, for its 16 queries)
//         weights = 2^(score - maximum so far); earlier sums shrink by 2^(old maximum - new maximum)
//         sums += weights values
//     result = sums / (sum of weights), log-sum-exp = maximum + log2(sum of weights), to base 2
#pragma once

#include "attention.cuh"

template <class G>
struct ForwardMemory {
    static constexpr int OWN = G::OWN * G::ROW, OTHERS = G::OTHERS * G::ROW;
    static constexpr int SCORES = STRIP * G::SCORES, WEIGHTS = G::IN_PLACE ? 0 : STRIP * G::WEIGHTS;
    static constexpr int BYTES =
        sizeof(typename G::E) * (OWN + 2 * OTHERS + G::WARPS * WEIGHTS) + sizeof(float) * G::WARPS * SCORES;

    typename G::E *own, *keys, *values, *weights;
    float *scores;

    __device__ __forceinline__ explicit ForwardMemory(Line *memory) {
        int warp = threadIdx.x / 32;
        own = (typename G::E *)memory;
        keys = own + OWN;
        values = keys + OTHERS;
        float *all = (float *)(values + OTHERS);
        scores = all + warp * SCORES;
        weights = G::IN_PLACE ? (typename G::E *)scores : (typename G::E *)(all + G::WARPS * SCORES) + warp * WEIGHTS;
    }
};

template <class G>
__device__ __forceinline__ void attention_forward(const AttentionSizes &s, const uint32_t *tiles, const typename G::E *q,
                                                  const typename G::E *k, const typename G::E *v, typename G::E *out,
                                                  float *lse, Line *memory) {
    ForwardMemory<G> of(memory);
    // The last tiles see the most keys, so they start first.
    Place at = place_of(s, tiles, gridDim.x - 1 - blockIdx.x, G::OWN);
    int head = blockIdx.y, kv_head = head / (s.heads / s.kv_heads), n = min(G::OWN, at.len - at.start);
    uint32_t kv_column = kv_head * s.head;
    size_t own_row = at.first + at.start;
    load_rows<G::OWN, G::WIDTH, G::ROW, G::THREADS>(of.own, q + own_row * s.q_stride + (size_t)head * s.head, s.q_stride, n, s);

    int strip = at.start + threadIdx.x / 32 * STRIP, lane = threadIdx.x % 32;
    const typename G::E *own = of.own + threadIdx.x / 32 * STRIP * G::ROW;
    int query = strip + lane / 2;
    Range of_strip = keys_of(s, at.len, strip, STRIP);
    Scores as(s);
    // The maximum starts at a finite number, so that nothing becomes NaN before a query has seen a key.
    float largest = -FLT_MAX, total = 0.0f;
    typename G::Sums sums;
    G::zero(sums);

    Range range = keys_of(s, at.len, at.start, n);
    for (int first = range.from / G::OTHERS * G::OTHERS; first < range.to; first += G::OTHERS) {
        int there = min(G::OTHERS, at.len - first);
        size_t row = at.first + first;
        __syncthreads();
        load_rows<G::OTHERS, G::WIDTH, G::ROW, G::THREADS>(of.keys, k + row * s.k_stride + kv_column, s.k_stride, there, s);
        load_rows<G::OTHERS, G::WIDTH, G::ROW, G::THREADS>(of.values, v + row * s.v_stride + kv_column, s.v_stride, there, s);
        __syncthreads();
        if (strip >= at.len || !overlap(of_strip, {first, first + there})) continue;

        G::products(of.scores, own, of.keys);
        __syncwarp();
        float scores[G::OTHERS / 2], highest = -INFINITY;
#pragma unroll
        for (int j = 0; j < G::OTHERS / 2; j++) {
            int column = lane % 2 + 2 * j;
            scores[j] = as.of(of.scores[lane / 2 * G::SCORES + column]);
            // NaN is ignored.
            if (sees(s, at.len, query, first + column)) highest = fmaxf(highest, scores[j] * as.factor);
        }
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        float before = largest;
        largest = fmaxf(largest, highest);
        float shrink = exp2f(before - largest), of_tile = 0.0f;
#pragma unroll
        for (int j = 0; j < G::OTHERS / 2; j++) {
            int column = lane % 2 + 2 * j;
            bool seen = sees(s, at.len, query, first + column);
            float weight = seen ? exp2f(fmaf(scores[j], as.factor, -largest)) : 0.0f;
            of_tile += weight;
            put(of.weights + lane / 2 * G::WEIGHTS + column, weight);
        }
        of_tile += __shfl_xor_sync(ALL_LANES, of_tile, 1);
        total = fmaf(total, shrink, of_tile);
        __syncwarp();
        if (__any_sync(ALL_LANES, shrink != 1.0f)) G::scale(sums, shrink, G::IN_PLACE ? nullptr : of.scores);
        G::add(sums, of.weights, of.values);
        __syncwarp();
    }
    if (strip >= at.len) return;
    G::scale(sums, 1.0f / total, of.scores);
    uint32_t width = s.heads * s.head;
    size_t first_row = at.first + strip;
    G::write(sums, out + first_row * width + (size_t)head * s.head, width, at.len - strip, s, of.scores);
    if (lane % 2 == 0 && query < at.len) lse[(size_t)(at.first + query) * s.heads + head] = largest + log2f(total);
}
