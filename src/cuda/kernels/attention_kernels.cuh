// Defines the attention kernels for elements of one format, E, with the name `f`, and for heads of up to a given width.
// The .cu file defines FORWARD and BACKWARD, the types that compute products, and shared_lines().
#pragma once

#include "attention_backward.cuh"
#include "attention_forward.cuh"

#define ATTENTION_KERNELS_OF(f, E, WIDTH)                                                                                     \
    extern "C" __global__ void __launch_bounds__(FORWARD(WIDTH)::THREADS, 2) attention_forward_##f##_##WIDTH(                 \
        AttentionSizes s, const uint32_t *tiles, const E *q, const E *k, const E *v, E *out, float *lse) {                    \
        attention_forward<FORWARD(WIDTH)>(s, tiles, q, k, v, out, lse, shared_lines());                                       \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(BACKWARD(WIDTH)::THREADS, 2) attention_backward_queries_##f##_##WIDTH(       \
        AttentionSizes s, const uint32_t *tiles, const E *q, const E *k, const E *v, const E *dout, const float *lse,         \
        const float *along, E *dq) {                                                                                          \
        attention_backward_queries<BACKWARD(WIDTH)>(s, tiles, q, k, v, dout, lse, along, dq, shared_lines());                 \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(BACKWARD(WIDTH)::THREADS, 2) attention_backward_keys_##f##_##WIDTH(          \
        AttentionSizes s, const uint32_t *tiles, const E *q, const E *k, const E *v, const E *dout, const float *lse,         \
        const float *along, E *dk, E *dv) {                                                                                   \
        attention_backward_keys_and_values<BACKWARD(WIDTH)>(s, tiles, q, k, v, dout, lse, along, dk, dv, shared_lines());     \
    }

// Writes the numbers of own rows, other rows and bytes of the forward and backward kernels for a width.
template <class Forward, class Backward>
__device__ void write_launches(uint32_t *to) {
    const uint32_t all[] = {Forward::OWN,  Forward::OTHERS,  ForwardMemory<Forward>::BYTES,
                            Backward::OWN, Backward::OTHERS, BackwardMemory<Backward>::BYTES};
    for (int i = 0; i < 6; i++) to[i] = all[i];
}

#define ATTENTION_KERNELS(f, E)                                                                                               \
    ATTENTION_KERNELS_OF(f, E, 32)                                                                                            \
    ATTENTION_KERNELS_OF(f, E, 64)                                                                                            \
    ATTENTION_KERNELS_OF(f, E, 96)                                                                                            \
    ATTENTION_KERNELS_OF(f, E, 128)                                                                                           \
    ATTENTION_KERNELS_OF(f, E, 256)                                                                                           \
    extern "C" __global__ void attention_along_##f(AttentionSizes s, const E *out, const E *dout, float *along) {             \
        attention_along(s, out, dout, along);                                                                                 \
    }                                                                                                                         \
    /* Writes the figures that a test compares with AttentionTileSizes. */                                                    \
    extern "C" __global__ void attention_launches_##f(uint32_t *to) {                                                         \
        write_launches<FORWARD(32), BACKWARD(32)>(to);                                                                        \
        write_launches<FORWARD(64), BACKWARD(64)>(to + 6);                                                                    \
        write_launches<FORWARD(96), BACKWARD(96)>(to + 12);                                                                   \
        write_launches<FORWARD(128), BACKWARD(128)>(to + 18);                                                                 \
        write_launches<FORWARD(256), BACKWARD(256)>(to + 24);                                                                 \
    }
