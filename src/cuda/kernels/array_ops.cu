// Casts between flat buffers and arithmetic across them, with the same bits as src/precision/cast.rs on the host.
#include "element_types.cuh"

// dst[i] = src[i] * factor
#define COPY_SCALED(d, D, s, S)                                                                                \
    extern "C" __global__ void copy_scaled_##d##_##s(size_t count, D *dst, const S *src, float factor) {       \
        FOR_EACH(i, count) put(dst + i, widen(src[i]) * factor);                                               \
    }
FOR_PAIRS(COPY_SCALED)

// dst[i] += src[i] * factor
#define ADD_SCALED(d, D, s, S)                                                                                 \
    extern "C" __global__ void add_scaled_##d##_##s(size_t count, D *dst, const S *src, float factor) {        \
        FOR_EACH(i, count) put(dst + i, widen(dst[i]) + widen(src[i]) * factor);                               \
    }
FOR_PAIRS(ADD_SCALED)

// values[i] *= factor
#define SCALE(t, T)                                                                                            \
    extern "C" __global__ void scale_##t(size_t count, T *values, float factor) {                              \
        FOR_EACH(i, count) put(values + i, widen(values[i]) * factor);                                         \
    }
FOR_FORMATS(SCALE)
