// The gradients of attention's inputs. With weights p = 2^(score - log-sum-exp) and their gradients g = dout values^T,
// the scores' gradients are d = p * (g - along), where `along` is a query's sum of p * g, which equals the dot product
// of its result and the result's gradient.
//
//     along      a warp for each (position, head)
//     queries    own: queries and their dout.    over keys and values:    dq = scale * sum of d * keys
//     keys       own: keys and values.           over queries and dout:   dk = scale * sum of d * queries, dv = sum of p * dout;
//                                                the query heads of the key head's group one after the other
//
// Each row of each gradient is written by one warp, which sums over the other rows in order, so results have the same
// bits in every run.
#pragma once

#include "attention.cuh"

// along[row][head] = sum of out * dout
template <class E>
__device__ __forceinline__ void attention_along(const AttentionSizes &s, const E *out, const E *dout, float *along) {
    size_t vector = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (vector >= (size_t)s.rows * s.heads) return;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % 32; i < s.head; i += 32)
        sum = fmaf(widen(out[vector * s.head + i]), widen(dout[vector * s.head + i]), sum);
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    if (threadIdx.x % 32 == 0) along[vector] = sum;
}

template <class G>
struct BackwardMemory {
    using E = typename G::E;
    static constexpr int OWN = G::OWN * G::ROW, OTHERS = G::OTHERS * G::ROW;
    static constexpr int SCORES = STRIP * G::SCORES, WEIGHTS = G::IN_PLACE ? 0 : STRIP * G::WEIGHTS;
    static constexpr int BYTES = sizeof(E) * (2 * OWN + 2 * OTHERS + 2 * G::WARPS * WEIGHTS) +
                                 sizeof(float) * (2 * G::WARPS * SCORES + 2 * G::OTHERS);

    Line *memory;
    float *first_products;

    __device__ __forceinline__ explicit BackwardMemory(Line *memory_)
        : memory(memory_), first_products((float *)(others(1) + OTHERS) + 2 * (threadIdx.x / 32) * SCORES) {}

    // Index 0: operands of the scores, and the scores' gradients d. Index 1: operands of the weights' gradients, and the
    // weights p.
    __device__ __forceinline__ E *own(int i) const { return (E *)memory + i * OWN; }
    __device__ __forceinline__ E *others(int i) const { return own(2) + i * OTHERS; }
    __device__ __forceinline__ float *products(int i) const { return first_products + i * SCORES; }
    __device__ __forceinline__ E *weights(int i) const {
        return G::IN_PLACE ? (E *)products(i) : after_products() + (2 * (threadIdx.x / 32) + i) * WEIGHTS;
    }
    // The statistics of the other rows, if they are queries.
    __device__ __forceinline__ float *lse() const { return (float *)(after_products() + 2 * G::WARPS * WEIGHTS); }
    __device__ __forceinline__ float *along() const { return lse() + G::OTHERS; }

private:
    __device__ __forceinline__ E *after_products() const {
        return (E *)((float *)(others(1) + OTHERS) + 2 * G::WARPS * SCORES);
    }
};

// Converts products to d in weights(0) and p in weights(1).
template <class G, class Known>
__device__ __forceinline__ void score_gradients(const BackwardMemory<G> &of, const Scores &as, Known known) {
    int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int j = 0; j < G::OTHERS / 2; j++) {
        int column = lane % 2 + 2 * j, place = lane / 2 * G::SCORES + column;
        float score = as.of(of.products(0)[place]), gradient = of.products(1)[place], lse, along;
        bool seen = known(column, lse, along);
        float p = seen ? exp2f(fmaf(score, as.factor, -lse)) : 0.0f;
        float d = seen ? p * (gradient - along) * as.slope(score) : 0.0f;
        put(of.weights(0) + lane / 2 * G::WEIGHTS + column, d);
        put(of.weights(1) + lane / 2 * G::WEIGHTS + column, p);
    }
}

template <class G>
__device__ __forceinline__ void attention_backward_queries(const AttentionSizes &s, const uint32_t *tiles, const typename G::E *q,
                                                           const typename G::E *k, const typename G::E *v,
                                                           const typename G::E *dout, const float *lse, const float *along,
                                                           typename G::E *dq, Line *memory) {
    using E = typename G::E;
    BackwardMemory<G> of(memory);
    Place at = place_of(s, tiles, gridDim.x - 1 - blockIdx.x, G::OWN);
    int head = blockIdx.y, n = min(G::OWN, at.len - at.start);
    uint32_t column = head * s.head, kv_column = head / (s.heads / s.kv_heads) * s.head;
    size_t own_row = at.first + at.start;
    uint32_t width = s.heads * s.head;
    load_rows<G::OWN, G::WIDTH, G::ROW, G::THREADS>(of.own(0), q + own_row * s.q_stride + column, s.q_stride, n, s);
    load_rows<G::OWN, G::WIDTH, G::ROW, G::THREADS>(of.own(1), dout + own_row * width + column, width, n, s);

    int warp = threadIdx.x / 32, strip = at.start + warp * STRIP, query = strip + threadIdx.x % 32 / 2;
    Range of_strip = keys_of(s, at.len, strip, STRIP);
    Scores as(s);
    float of_lse = 0.0f, of_along = 0.0f;
    if (query < at.len) {
        of_lse = lse[(size_t)(at.first + query) * s.heads + head];
        of_along = along[(size_t)(at.first + query) * s.heads + head];
    }
    typename G::Sums sums;
    G::zero(sums);

    Range range = keys_of(s, at.len, at.start, n);
    for (int first = range.from / G::OTHERS * G::OTHERS; first < range.to; first += G::OTHERS) {
        int there = min(G::OTHERS, at.len - first);
        size_t row = at.first + first;
        __syncthreads();
        load_rows<G::OTHERS, G::WIDTH, G::ROW, G::THREADS>(of.others(0), k + row * s.k_stride + kv_column, s.k_stride, there, s);
        load_rows<G::OTHERS, G::WIDTH, G::ROW, G::THREADS>(of.others(1), v + row * s.v_stride + kv_column, s.v_stride, there, s);
        __syncthreads();
        if (strip >= at.len || !overlap(of_strip, {first, first + there})) continue;

#pragma unroll 1
        for (int i = 0; i < 2; i++) G::products(of.products(i), of.own(i) + warp * STRIP * G::ROW, of.others(i));
        __syncwarp();
        score_gradients<G>(of, as, [&](int column, float &lse, float &along) {
            lse = of_lse, along = of_along;
            return sees(s, at.len, query, first + column);
        });
        __syncwarp();
        G::add(sums, of.weights(0), of.others(0));
        __syncwarp();
    }
    if (strip >= at.len) return;
    G::scale(sums, s.scale, of.products(0));
    E *to = dq + (size_t)(at.first + strip) * s.dq_stride + column;
    G::write(sums, to, s.dq_stride, at.len - strip, s, of.products(0));
}

// Computes the gradients of the keys, of the values, or of both.
template <class G, bool KEYS, bool VALUES>
__device__ __forceinline__ void attention_backward_keys(const AttentionSizes &s, const uint32_t *tiles, const typename G::E *q,
                                                        const typename G::E *k, const typename G::E *v,
                                                        const typename G::E *dout, const float *lse, const float *along,
                                                        typename G::E *dk, typename G::E *dv, Line *memory) {
    BackwardMemory<G> of(memory);
    Place at = place_of(s, tiles, blockIdx.x, G::OWN);
    int kv_head = blockIdx.y, group = s.heads / s.kv_heads, n = min(G::OWN, at.len - at.start);
    uint32_t kv_column = kv_head * s.head;
    size_t own_row = at.first + at.start;
    uint32_t width = s.heads * s.head;
    load_rows<G::OWN, G::WIDTH, G::ROW, G::THREADS>(of.own(0), k + own_row * s.k_stride + kv_column, s.k_stride, n, s);
    load_rows<G::OWN, G::WIDTH, G::ROW, G::THREADS>(of.own(1), v + own_row * s.v_stride + kv_column, s.v_stride, n, s);

    int warp = threadIdx.x / 32, strip = at.start + warp * STRIP, key = strip + threadIdx.x % 32 / 2;
    Range of_strip = queries_of(s, at.len, strip, STRIP);
    Scores as(s);
    constexpr int OF_VALUES = KEYS ? 1 : 0;
    typename G::Sums sums[KEYS + VALUES];
#pragma unroll
    for (auto &each : sums) G::zero(each);

    Range range = queries_of(s, at.len, at.start, n);
#pragma unroll 1
    for (int member = 0; member < group; member++) {
        int head = kv_head * group + member;
        uint32_t column = head * s.head;
#pragma unroll 1
        for (int first = range.from / G::OTHERS * G::OTHERS; first < range.to; first += G::OTHERS) {
            int there = min(G::OTHERS, at.len - first);
            size_t row = at.first + first;
            __syncthreads();
            load_rows<G::OTHERS, G::WIDTH, G::ROW, G::THREADS>(of.others(0), q + row * s.q_stride + column, s.q_stride, there, s);
            load_rows<G::OTHERS, G::WIDTH, G::ROW, G::THREADS>(of.others(1), dout + row * width + column, width, there, s);
            for (int i = threadIdx.x; i < there; i += G::THREADS) {
                of.lse()[i] = lse[(row + i) * s.heads + head];
                of.along()[i] = along[(row + i) * s.heads + head];
            }
            __syncthreads();
            if (strip >= at.len || !overlap(of_strip, {first, first + there})) continue;

            // The gradients of values do not need the gradients of weights. Without KEYS, d is not used.
#pragma unroll 1
            for (int i = 0; i < 1 + KEYS; i++) G::products(of.products(i), of.own(i) + warp * STRIP * G::ROW, of.others(i));
            __syncwarp();
            score_gradients<G>(of, as, [&](int column, float &lse, float &along) {
                bool seen = sees(s, at.len, first + column, key);
                lse = seen ? of.lse()[column] : 0.0f, along = seen ? of.along()[column] : 0.0f;
                return seen;
            });
            __syncwarp();
            if (KEYS) G::add(sums[0], of.weights(0), of.others(0));
            if (VALUES) G::add(sums[OF_VALUES], of.weights(1), of.others(1));
            __syncwarp();
        }
    }
    if (strip >= at.len) return;
    int rows = at.len - strip;
    size_t row = at.first + strip;
    if (KEYS) {
        G::scale(sums[0], s.scale, of.products(0));
        G::write(sums[0], dk + row * s.dk_stride + kv_column, s.dk_stride, rows, s, of.products(0));
    }
    if (VALUES) G::write(sums[OF_VALUES], dv + row * s.dv_stride + kv_column, s.dv_stride, rows, s, of.products(0));
}

// Computes both gradients. If heads are so wide that a lane's registers hold only one of the sums, plane 0 computes the
// keys' gradients and plane 1 the values'.
template <class G>
__device__ __forceinline__ void attention_backward_keys_and_values(const AttentionSizes &s, const uint32_t *tiles,
                                                                   const typename G::E *q, const typename G::E *k,
                                                                   const typename G::E *v, const typename G::E *dout,
                                                                   const float *lse, const float *along, typename G::E *dk,
                                                                   typename G::E *dv, Line *memory) {
    if constexpr (G::WIDTH <= 128)
        attention_backward_keys<G, true, true>(s, tiles, q, k, v, dout, lse, along, dk, dv, memory);
    else if (blockIdx.z == 0)
        attention_backward_keys<G, true, false>(s, tiles, q, k, v, dout, lse, along, dk, dv, memory);
    else
        attention_backward_keys<G, false, true>(s, tiles, q, k, v, dout, lse, along, dk, dv, memory);
}
