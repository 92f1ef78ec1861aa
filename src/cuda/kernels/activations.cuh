// GELU, its tanh approximation, SiLU and the square of ReLU of one f32, and their slopes, with the formulas of src/kernels/math.rs.
#pragma once

// x / (1 + exp(-u)) for a function u of x, and its slope from the slope of u. Below u = -68 the slope is
// negligible, so u is clamped there and products of exponentials stay finite. The comparisons are written so that NaN
// propagates.
__device__ __forceinline__ float gated_by(float x, float u) { return x / (1.0f + expf(-u)); }

__device__ __forceinline__ float slope_of_gated(float x, float u, float inner) {
    u = u < -68.0f ? -68.0f : u;
    float odds = expf(-u), gate = 1.0f / (1.0f + odds);
    return gate + x * gate * (odds * gate) * inner;
}

struct Silu {
    static __device__ __forceinline__ float value(float x) { return gated_by(x, x); }
    static __device__ __forceinline__ float slope(float x) { return slope_of_gated(x, x, 1.0f); }
};

// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)).
struct GeluTanh {
    static constexpr float scale = 0.7978846f, cubic = 0.044715f;

    static __device__ __forceinline__ float twice_inner(float x) { return x * (2.0f * scale + 2.0f * scale * cubic * (x * x)); }
    static __device__ __forceinline__ float value(float x) { return gated_by(x, twice_inner(x)); }
    static __device__ __forceinline__ float slope(float x) {
        x = x < -100.0f ? -100.0f : x;
        x = x > 100.0f ? 100.0f : x;
        return slope_of_gated(x, twice_inner(x), 2.0f * scale + 6.0f * scale * cubic * (x * x));
    }
};

struct Gelu {
    // The cumulative distribution function of the standard normal distribution at x.
    static __device__ __forceinline__ float below(float x) { return 0.5f + 0.5f * erff(x * 0.70710678f); }
    static __device__ __forceinline__ float value(float x) { return x * below(x); }
    static __device__ __forceinline__ float slope(float x) {
        float bounded = x < -1e15f ? -1e15f : x;
        bounded = bounded > 1e15f ? 1e15f : bounded;
        return below(x) + bounded * (0.3989423f * expf(-0.5f * (x * x)));
    }
};

struct ReluSquared {
    static __device__ __forceinline__ float above(float x) { return x < 0.0f ? 0.0f : x; }
    static __device__ __forceinline__ float value(float x) { return above(x) * above(x); }
    static __device__ __forceinline__ float slope(float x) { return 2.0f * above(x); }
};

// Defines a kernel for each function.
#define FOR_FUNCTIONS(MAKE, ...)                                                                               \
    MAKE(gelu_tanh, GeluTanh, __VA_ARGS__)                                                                     \
    MAKE(gelu, Gelu, __VA_ARGS__)                                                                              \
    MAKE(silu, Silu, __VA_ARGS__)                                                                              \
    MAKE(relu_squared, ReluSquared, __VA_ARGS__)
