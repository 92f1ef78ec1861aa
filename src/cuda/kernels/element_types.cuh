// The number formats of flat buffers. Arithmetic is in f32, rounded once to nearest even when it is stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }

__device__ __forceinline__ void put(float *to, float v) { *to = v; }
__device__ __forceinline__ void put(__nv_bfloat16 *to, float v) { *to = __float2bfloat16_rn(v); }
__device__ __forceinline__ void put(__half *to, float v) { *to = __float2half_rn(v); }

// Iterates over `count` elements with any number of threads.
#define FOR_EACH(i, count)                                                                                     \
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (size_t)gridDim.x * blockDim.x)

// Defines a kernel for each pair of formats.
#define FOR_PAIRS(MAKE)                                                                                        \
    MAKE(f32, float, f32, float)                                                                               \
    MAKE(f32, float, bf16, __nv_bfloat16)                                                                      \
    MAKE(f32, float, f16, __half)                                                                              \
    MAKE(bf16, __nv_bfloat16, f32, float)                                                                      \
    MAKE(bf16, __nv_bfloat16, bf16, __nv_bfloat16)                                                             \
    MAKE(bf16, __nv_bfloat16, f16, __half)                                                                     \
    MAKE(f16, __half, f32, float)                                                                              \
    MAKE(f16, __half, bf16, __nv_bfloat16)                                                                     \
    MAKE(f16, __half, f16, __half)

// Defines a kernel for each format.
#define FOR_FORMATS(MAKE)                                                                                      \
    MAKE(f32, float)                                                                                           \
    MAKE(bf16, __nv_bfloat16)                                                                                  \
    MAKE(f16, __half)
