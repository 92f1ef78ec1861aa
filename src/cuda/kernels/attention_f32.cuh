// Products of f32 for attention. Each lane computes 4 rows of a warp's strip: every eighth column of the scores, and four
// consecutive columns out of every 32 of the sums.
#pragma once

#include "attention.cuh"

// Heads of up to WIDTH_ elements, in blocks of WARPS_ strips, with tiles of OTHERS_ other rows.
template <int WIDTH_, int WARPS_, int OTHERS_>
struct F32 {
    using E = float;
    static constexpr int WIDTH = WIDTH_, WARPS = WARPS_, OTHERS = OTHERS_;
    static constexpr int OWN = WARPS * STRIP, THREADS = WARPS * 32;
    // The distance between rows in elements. The four extra elements put eight rows in different banks.
    static constexpr int ROW = WIDTH + 4, SCORES = OTHERS + 4, WEIGHTS = SCORES;
    // The sums of wide heads use half of a lane's registers, so fewer other values are held at once.
    static constexpr bool WIDE = WIDTH > 128;
    static constexpr int AT_ONCE = WIDE ? 1 : 4;
    // Weights overwrite the scores.
    static constexpr bool IN_PLACE = true;

    // The sums of a strip: row lane / 8 + 4 i, column 32 j + 4 (lane % 8) + c.
    struct Sums {
        float of[4][WIDTH / 32][4];
    };

    static __device__ __forceinline__ void zero(Sums &sums) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < WIDTH / 32; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) sums.of[i][j][c] = 0.0f;
    }

    // scores = own others^T
    static __device__ __forceinline__ void products(float *scores, const float *own, const float *others) {
        int row = threadIdx.x % 32 / 8, column = threadIdx.x % 8;
        float sums[4][OTHERS / 8] = {};
#pragma unroll(WIDE ? 1 : 2)
        for (int k = 0; k < WIDTH; k += 4) {
            float4 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = *(const float4 *)(own + (row + 4 * i) * ROW + k);
#pragma unroll
            for (int j = 0; j < OTHERS / 8; j++) {
                float4 b = *(const float4 *)(others + (column + 8 * j) * ROW + k);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = fmaf(a[i].x, b.x, sums[i][j]);
                    sum = fmaf(a[i].y, b.y, sum);
                    sum = fmaf(a[i].z, b.z, sum);
                    sums[i][j] = fmaf(a[i].w, b.w, sum);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < OTHERS / 8; j++) scores[(row + 4 * i) * SCORES + column + 8 * j] = sums[i][j];
    }

    // sums += weights others
    static __device__ __forceinline__ void add(Sums &sums, const float *weights, const float *others) {
        int row = threadIdx.x % 32 / 8, column = threadIdx.x % 8 * 4;
#pragma unroll 1
        for (int k = 0; k < OTHERS; k += AT_ONCE) {
            float a[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = weights + (row + 4 * i) * WEIGHTS + k;
                if (AT_ONCE == 1) {
                    a[i][0] = *from;
                } else {
                    float4 of = *(const float4 *)from;
                    a[i][0] = of.x, a[i][1] = of.y, a[i][2] = of.z, a[i][3] = of.w;
                }
            }
#pragma unroll
            for (int l = 0; l < AT_ONCE; l++)
#pragma unroll
                for (int j = 0; j < WIDTH / 32; j++) {
                    float4 b = *(const float4 *)(others + (k + l) * ROW + 32 * j + column);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float *sum = sums.of[i][j];
                        sum[0] = fmaf(a[i][l], b.x, sum[0]);
                        sum[1] = fmaf(a[i][l], b.y, sum[1]);
                        sum[2] = fmaf(a[i][l], b.z, sum[2]);
                        sum[3] = fmaf(a[i][l], b.w, sum[3]);
                    }
                }
        }
    }

    // Multiplies each row by the factor in its two lanes.
    static __device__ __forceinline__ void scale(Sums &sums, float factor, float *) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float of_row = __shfl_sync(ALL_LANES, factor, 2 * (threadIdx.x % 32 / 8 + 4 * i));
#pragma unroll
            for (int j = 0; j < WIDTH / 32; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) sums.of[i][j][c] *= of_row;
        }
    }

    // Writes the first `n` rows and s.head columns.
    static __device__ __forceinline__ void write(const Sums &sums, float *to, uint32_t stride, int n, const AttentionSizes &s,
                                                 float *) {
        int row = threadIdx.x % 32 / 8, column = threadIdx.x % 8 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < WIDTH / 32; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    int r = row + 4 * i, at = 32 * j + column + c;
                    if (r < n && at < (int)s.head) to[(size_t)r * stride + at] = sums.of[i][j][c];
                }
    }
};

// Blocks and tiles that fit into 99 KiB of shared memory.
template <int WIDTH>
using F32Forward = F32<WIDTH, WIDTH <= 128 ? 4 : 2, WIDTH <= 128 ? 32 : 16>;
template <int WIDTH>
using F32Backward = F32<WIDTH, WIDTH <= 128 ? 4 : 2, WIDTH <= 96 ? 32 : WIDTH <= 128 ? 16 : 8>;
