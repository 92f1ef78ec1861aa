// Included before each .cu file: CUDA's C++ for the host's compiler.
//
// NVIDIA's own headers provide the half-precision types and their arithmetic on the host. This file has the features
// that only a device has: threads and blocks (run by driver/blocks.cpp), shared memory, shuffles, atomics, and the
// intrinsics that kernels use. A product and a sum are rounded separately here (-ffp-contract=off), whereas nvcc fuses
// them by default.
#pragma once

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <algorithm>
#include <type_traits>
#include <utility>

#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "kernel_table.h"

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#ifndef MOCK_LIST_KERNELS  // otherwise __global__ stays, and marks kernels in the preprocessor's output
#define __global__
#endif
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __constant__ static
#define __launch_bounds__(...)
// Blocks run one after the other, so one copy is enough. The mock nvcc rewrites `extern __shared__`.
#define __shared__ static

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDA_ARCH__ 900

extern "C" {
extern dim3 mock_threadIdx, mock_blockIdx, mock_blockDim, mock_gridDim;
extern void *mock_dynamic_shared;
void mock_syncthreads();
void mock_syncwarp(unsigned mask);
void mock_shuffle(unsigned mask, void *value, size_t bytes, unsigned lane);
unsigned mock_ballot(unsigned mask, int predicate);
unsigned mock_lane();
void *mock_from_global(size_t address);
}

#define threadIdx mock_threadIdx
#define blockIdx mock_blockIdx
#define blockDim mock_blockDim
#define gridDim mock_gridDim
static constexpr int warpSize = 32;

// ---- barriers, shuffles, votes

inline void __syncthreads() { mock_syncthreads(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFF) { mock_syncwarp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T mock_from_lane(unsigned mask, T value, unsigned lane) {
    static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
    mock_shuffle(mask, &value, sizeof value, lane);
    return value;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    unsigned self = mock_lane();
    return mock_from_lane(mask, value, self / width * width + unsigned(lane) % width);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    unsigned self = mock_lane(), other = self ^ unsigned(lanes);
    return mock_from_lane(mask, value, other / width <= self / width ? other : self);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned self = mock_lane();
    return mock_from_lane(mask, value, self % width + by < unsigned(width) ? self + by : self);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned self = mock_lane();
    return mock_from_lane(mask, value, self % width >= by ? self - by : self);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) { return mock_ballot(mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return mock_ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return mock_ballot(mask, !predicate) == 0; }

// ---- addresses that a kernel reads from memory: the addresses in the host's view

inline void *__cvta_global_to_generic(size_t address) { return mock_from_global(address); }

// ---- atomics: no two threads run concurrently

template <class T>
T atomicAdd(T *p, std::type_identity_t<T> v) {
    T old = *p;
    *p = T(old + v);
    return old;
}

template <class T>
T atomicExch(T *p, std::type_identity_t<T> v) {
    return std::exchange(*p, v);
}

template <class T>
T atomicCAS(T *p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
    T old = *p;
    if (memcmp(&old, &expected, sizeof old) == 0) *p = v;
    return old;
}

template <class T>
T atomicMax(T *p, std::type_identity_t<T> v) {
    T old = *p;
    if (v > old) *p = v;
    return old;
}

template <class T>
T atomicMin(T *p, std::type_identity_t<T> v) {
    T old = *p;
    if (v < old) *p = v;
    return old;
}

template <class T>
T atomicOr(T *p, std::type_identity_t<T> v) {
    T old = *p;
    *p = old | v;
    return old;
}

// ---- intrinsics

using std::isinf;
using std::isnan;
using std::signbit;
using std::max;
using std::min;
inline size_t min(size_t a, unsigned b) { return a < b ? a : b; }

template <class To, class From>
To mock_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline float __uint_as_float(unsigned u) { return mock_bits<float>(u); }
inline float __int_as_float(int i) { return mock_bits<float>(i); }
inline unsigned __float_as_uint(float f) { return mock_bits<unsigned>(f); }
inline int __float_as_int(float f) { return mock_bits<int>(f); }
inline double __longlong_as_double(long long l) { return mock_bits<double>(l); }
inline long long __double_as_longlong(double d) { return mock_bits<long long>(d); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return a < 0 ? 0 : a > 1 ? 1 : a; }
inline float rsqrtf(float a) { return 1 / sqrtf(a); }
inline double rsqrt(double a) { return 1 / std::sqrt(a); }
inline float normcdff(float a) { return erfcf(-a * 0.70710678f) / 2; }
inline double normcdf(double a) { return erfc(-a * 0.70710678118654752) / 2; }
inline int __popc(unsigned u) { return __builtin_popcount(u); }
inline int __clz(int i) { return i ? __builtin_clz(unsigned(i)) : 32; }
inline int __ffs(int i) { return __builtin_ffs(i); }
template <class T>
T __ldg(const T *p) {
    return *p;
}

// Functions that NVIDIA's headers define only for devices: in f32, rounded once.
#define MOCK_OF_HALF(name, formula)                                                                            \
    inline __half name(__half a) { float x = __half2float(a); return __float2half(formula); }                  \
    inline __nv_bfloat16 name(__nv_bfloat16 a) { float x = __bfloat162float(a); return __float2bfloat16(formula); }
MOCK_OF_HALF(hsqrt, sqrtf(x))
MOCK_OF_HALF(hcos, cosf(x))
MOCK_OF_HALF(hsin, sinf(x))
MOCK_OF_HALF(hexp, expf(x))
MOCK_OF_HALF(hlog, logf(x))
MOCK_OF_HALF(hrcp, 1 / x)
MOCK_OF_HALF(hceil, ceilf(x))
MOCK_OF_HALF(hfloor, floorf(x))
MOCK_OF_HALF(hrint, rintf(x))
MOCK_OF_HALF(htrunc, truncf(x))

// Returns `c` plus the products of four pairs of signed bytes.
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> 8 * i)) * int8_t(b >> 8 * i);
    return c;
}

// Returns four differences of signed bytes, saturated.
inline int __vsubss4(int a, int b) {
    unsigned all = 0;
    for (int i = 0; i < 4; i++) {
        int d = std::clamp(int(int8_t(a >> 8 * i)) - int8_t(b >> 8 * i), -128, 127);
        all |= unsigned(uint8_t(d)) << 8 * i;
    }
    return int(all);
}

// ---- the table of a file's kernels, which the mock nvcc appends

template <class F, F *function>
struct MockKernel;

template <class... A, void (*function)(A...)>
struct MockKernel<void(A...), function> {
    static constexpr size_t sizes[sizeof...(A) + 1] = {sizeof(A)...};
    static constexpr bool are_pointers[sizeof...(A) + 1] = {std::is_pointer_v<A>...};

    template <size_t... I>
    static void call(void **arguments, std::index_sequence<I...>) {
        function(*static_cast<std::remove_const_t<A> *>(arguments[I])...);
    }
    static void run(void **arguments) { call(arguments, std::index_sequence_for<A...>()); }

    static constexpr mock_cuda_kernel entry(const char *name) { return {name, sizeof...(A), sizes, are_pointers, run}; }
};

#define MOCK_KERNEL(name) MockKernel<decltype(name), name>::entry(#name),
