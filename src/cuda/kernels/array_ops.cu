// Casts between flat buffers and arithmetic across them, with the same bits as src/precision/cast.rs on the host.
#include "vectorized_access.cuh"

// dst[i] = src[i] * factor
#define COPY_SCALED(d, D, s, S)                                                                                \
    extern "C" __global__ void copy_scaled_##d##_##s(size_t count, D *dst, const S *src, float factor) {       \
        map(count, [=](float v) { return v * factor; }, dst, src);                                             \
    }
FOR_PAIRS(COPY_SCALED)

// dst[i] += src[i] * factor
#define ADD_SCALED(d, D, s, S)                                                                                 \
    extern "C" __global__ void add_scaled_##d##_##s(size_t count, D *dst, const S *src, float factor) {        \
        map(count, [=](float a, float b) { return a + b * factor; }, dst, dst, src);                           \
    }
FOR_PAIRS(ADD_SCALED)

// values[i] *= factor
#define SCALE(t, T)                                                                                            \
    extern "C" __global__ void scale_##t(size_t count, T *values, float factor) {                              \
        map(count, [=](float v) { return v * factor; }, values, values);                                       \
    }
FOR_FORMATS(SCALE)
