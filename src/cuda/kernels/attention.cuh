// The common part of attention's kernels: sizes, the keys that a query sees, and the loading of rows into shared memory.
//
// A block has OWN rows (queries in forward and in the gradients of queries, keys in the gradients of keys and values)
// and iterates over the related OTHER rows, a tile at a time, in order. Each warp computes 16 own rows of its block:
//
//     own rows    warp 0 |----------------|         per tile: scores of 16 own rows x OTHERS others, then sums over the others
//                 warp 1 |----------------|         own, others: shared by the block, zero for missing rows and columns
//     others      |--tile--|--tile--|--tile--|      scores: a separate part of shared memory per warp, two lanes per row
//
// Tiles are counted from the start of each sequence, so that a sequence gives the same bits as when processed
// separately. A type parameter computes the products, in f32 (attention_f32.cuh) or on tensor cores
// (attention_tensor_cores.cuh). Both types have the same functions.
#pragma once

#include "element_types.cuh"

#include <float.h>

// The number of own rows of a warp.
constexpr int STRIP = 16;
constexpr unsigned ALL_LANES = 0xFFFFFFFF;

// src/cuda/attention/call.rs has the same struct.
struct AttentionSizes {
    uint32_t time;      // positions of each row of the batch
    uint32_t rows;      // positions of the complete batch
    uint32_t heads;     // number of query heads
    uint32_t kv_heads;
    uint32_t head;      // elements of a head
    uint32_t window;    // maximum number of keys that a query sees, including its own; `time` or more: all
    uint32_t both_ways; // whether a query sees its complete sequence
    uint32_t vectors;   // whether rows and heads start at multiples of 16 bytes
    uint32_t q_stride, k_stride, v_stride;    // elements from one position to the next
    uint32_t dq_stride, dk_stride, dv_stride;
    float scale;        // factor of the products
    float capped;       // not 0: scores have a soft cap
    float inner, outer; // with a cap, the score, as a base-2 exponent, is outer * tanh(inner * product)
    float to_powers;    // without a cap, the score is this factor times the product
};

// Memory of a block. Tensor core matrices start at multiples of 32 bytes.
struct alignas(128) Line {
    unsigned char bytes[128];
};

// The block's part of a sequence.
struct Place {
    uint32_t first; // index of the sequence's first position, counted over all rows
    int len;        // number of its positions
    int start;      // first own position
};

// A tile is {first, len, start}. Without tiles, each row of the batch is a sequence.
__device__ __forceinline__ Place place_of(const AttentionSizes &s, const uint32_t *tiles, uint32_t tile, int rows) {
    if (tiles != nullptr) {
        const uint32_t *of = tiles + 3 * (size_t)tile;
        return {of[0], (int)of[1], (int)of[2]};
    }
    uint32_t of_row = (s.time + rows - 1) / rows;
    return {tile / of_row * s.time, (int)s.time, (int)(tile % of_row) * rows};
}

__device__ __forceinline__ bool sees(const AttentionSizes &s, int len, int query, int key) {
    bool behind = key <= query && (uint32_t)(query - key) < s.window;
    return query < len && key < len && (s.both_ways || behind);
}

// The positions `from`, `from + 1`, ..., `to - 1`.
struct Range {
    int from, to;
};

// Returns the keys that are seen by at least one of the `n` queries from `start` on.
__device__ __forceinline__ Range keys_of(const AttentionSizes &s, int len, int start, int n) {
    if (s.both_ways) return {0, len};
    int to = start + n < len ? start + n : len;
    return {(uint32_t)start < s.window ? 0 : start + 1 - (int)s.window, to};
}

// Returns the queries that see at least one of the `n` keys from `start` on.
__device__ __forceinline__ Range queries_of(const AttentionSizes &s, int len, int start, int n) {
    if (s.both_ways) return {0, len};
    uint32_t left = (uint32_t)(len - start);
    return {start, s.window >= left ? len : min(len, start + n - 1 + (int)s.window)};
}

__device__ __forceinline__ bool overlap(Range a, Range b) { return a.from < b.to && b.from < a.to; }

// Loads `n` rows of a head, `stride` apart, into ROWS rows of WIDTH elements, ROW apart.
template <int ROWS, int WIDTH, int ROW, int THREADS, class E>
__device__ __forceinline__ void load_rows(E *to, const E *from, uint32_t stride, int n, const AttentionSizes &s) {
    constexpr int PIECE = 16 / sizeof(E), PIECES = WIDTH / PIECE;
    // The sums of wide heads use half of a lane's registers, so fewer loads are in flight at once.
    constexpr int AT_ONCE = WIDTH > 128 ? 1 : 4;
    if (s.vectors) {
#pragma unroll AT_ONCE
        for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
            int row = i / PIECES, column = i % PIECES * PIECE;
            uint4 values = make_uint4(0, 0, 0, 0);
            if (row < n && column < (int)s.head) values = *(const uint4 *)(from + (size_t)row * stride + column);
            *(uint4 *)(to + row * ROW + column) = values;
        }
    } else {
#pragma unroll AT_ONCE
        for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
            int row = i / WIDTH, column = i % WIDTH;
            bool there = row < n && column < (int)s.head;
            put(to + row * ROW + column, there ? widen(from[(size_t)row * stride + column]) : 0.0f);
        }
    }
}

// The conversion of a product to a score, which is a base-2 exponent. With a cap, `of` returns the score. Without one,
// it returns the product, and the score is `factor` times the product.
struct Scores {
    float factor;
    bool capped;
    float inner, outer;

    __device__ __forceinline__ explicit Scores(const AttentionSizes &s)
        : factor(s.capped != 0.0f ? 1.0f : s.to_powers), capped(s.capped != 0.0f), inner(s.inner), outer(s.outer) {}

    __device__ __forceinline__ float of(float product) const { return capped ? outer * tanhf(inner * product) : product; }

    // Returns the gradient of the product, up to the scale.
    __device__ __forceinline__ float slope(float score) const {
        float t = score / outer;
        return capped ? 1.0f - t * t : 1.0f;
    }
};
