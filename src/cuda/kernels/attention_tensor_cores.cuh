// Products of 16-bit elements for attention, computed by tensor cores with sums in f32. The mapping of a fragment's
// elements to lanes is unspecified, so scores and sums go through shared memory whenever rows matter.
#pragma once

#include "attention.cuh"

#include <mma.h>

// Heads of up to WIDTH_ elements, in blocks of WARPS_ strips, with tiles of OTHERS_ other rows.
template <class E_, int WIDTH_, int WARPS_, int OTHERS_>
struct Cores {
    using E = E_;
    static constexpr int WIDTH = WIDTH_, WARPS = WARPS_, OTHERS = OTHERS_;
    static constexpr int OWN = WARPS * STRIP, THREADS = WARPS * 32;
    // The distance between rows in elements. The extra 16 bytes put eight rows in different banks.
    static constexpr int ROW = WIDTH + 8, SCORES = OTHERS + 4, WEIGHTS = OTHERS + 8;
    static constexpr bool IN_PLACE = false;

    using Left = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, E, nvcuda::wmma::row_major>;
    using Right = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, E, nvcuda::wmma::row_major>;
    using Transposed = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, E, nvcuda::wmma::col_major>;
    using Square = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

    struct Sums {
        Square of[WIDTH / 16];
    };

    static __device__ __forceinline__ void zero(Sums &sums) {
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) nvcuda::wmma::fill_fragment(sums.of[j], 0.0f);
    }

    // scores = own others^T
    static __device__ __forceinline__ void products(float *scores, const E *own, const E *others) {
        Square sums[OTHERS / 16];
#pragma unroll
        for (int j = 0; j < OTHERS / 16; j++) nvcuda::wmma::fill_fragment(sums[j], 0.0f);
        // The sums of wide heads use half of a lane's registers, so fewer other values are held at once.
#pragma unroll(WIDTH > 128 ? 1 : 2)
        for (int k = 0; k < WIDTH; k += 16) {
            Left a;
            nvcuda::wmma::load_matrix_sync(a, own + k, ROW);
#pragma unroll
            for (int j = 0; j < OTHERS / 16; j++) {
                Transposed b;
                nvcuda::wmma::load_matrix_sync(b, others + 16 * j * ROW + k, ROW);
                nvcuda::wmma::mma_sync(sums[j], a, b, sums[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < OTHERS / 16; j++)
            nvcuda::wmma::store_matrix_sync(scores + 16 * j, sums[j], SCORES, nvcuda::wmma::mem_row_major);
    }

    // sums += weights others
    static __device__ __forceinline__ void add(Sums &sums, const E *weights, const E *others) {
#pragma unroll 1
        for (int k = 0; k < OTHERS; k += 16) {
            Left a;
            nvcuda::wmma::load_matrix_sync(a, weights + k, WEIGHTS);
#pragma unroll
            for (int j = 0; j < WIDTH / 16; j++) {
                Right b;
                nvcuda::wmma::load_matrix_sync(b, others + k * ROW + 16 * j, ROW);
                nvcuda::wmma::mma_sync(sums.of[j], a, b, sums.of[j]);
            }
        }
    }

    // Multiplies each row by the factor in its two lanes. `scores` are overwritten.
    static __device__ __forceinline__ void scale(Sums &sums, float factor, float *scores) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < 8; c++) scores[lane / 2 * SCORES + lane % 2 + 2 * c] = factor;
        __syncwarp();
        Square factors;
        nvcuda::wmma::load_matrix_sync(factors, scores, SCORES, nvcuda::wmma::mem_row_major);
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++)
#pragma unroll
            for (int i = 0; i < factors.num_elements; i++) sums.of[j].x[i] *= factors.x[i];
        __syncwarp();
    }

    // Writes the first `n` rows and s.head columns. `scores` are overwritten.
    static __device__ __forceinline__ void write(const Sums &sums, E *to, uint32_t stride, int n, const AttentionSizes &s,
                                                 float *scores) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) {
            nvcuda::wmma::store_matrix_sync(scores, sums.of[j], SCORES, nvcuda::wmma::mem_row_major);
            __syncwarp();
            int column = 16 * j + lane % 16;
#pragma unroll
            for (int row = lane / 16; row < STRIP; row += 2)
                if (row < n && column < (int)s.head) put(to + (size_t)row * stride + column, scores[row * SCORES + lane % 16]);
            __syncwarp();
        }
    }
};

// Blocks and tiles that fit into 99 KiB of shared memory.
template <class E, int WIDTH>
using CoresForward = Cores<E, WIDTH, 4, WIDTH <= 128 ? 64 : 32>;
template <class E, int WIDTH>
using CoresBackward = Cores<E, WIDTH, 4, WIDTH <= 128 ? 32 : 16>;
