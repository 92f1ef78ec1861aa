// Activation functions and their gated forms, computed element by element in f32 and rounded once.
#include "activations.cuh"
#include "element_types.cuh"

// y = f(x)
#define FORWARD(name, F, t, T)                                                                                 \
    extern "C" __global__ void name##_##t(size_t count, const T *x, T *y) {                                    \
        FOR_EACH(i, count) put(y + i, F::value(widen(x[i])));                                                  \
    }

// dx = dy * f'(x)
#define BACKWARD(name, F, t, T)                                                                                \
    extern "C" __global__ void name##_backward_##t(size_t count, const T *x, const T *dy, T *dx) {             \
        FOR_EACH(i, count) put(dx + i, widen(dy[i]) * F::slope(widen(x[i])));                                  \
    }

// y = f(gate) * up
#define GATED(name, F, t, T)                                                                                   \
    extern "C" __global__ void name##_gated_##t(size_t count, const T *gate, const T *up, T *y) {              \
        FOR_EACH(i, count) put(y + i, F::value(widen(gate[i])) * widen(up[i]));                                \
    }

// dgate = dy * up * f'(gate), dup = dy * f(gate)
#define GATED_BACKWARD(name, F, t, T)                                                                          \
    extern "C" __global__ void name##_gated_backward_##t(                                                      \
        size_t count, const T *gate, const T *up, const T *dy, T *dgate, T *dup) {                             \
        FOR_EACH(i, count) {                                                                                   \
            float x = widen(gate[i]), d = widen(dy[i]);                                                        \
            put(dgate + i, d * widen(up[i]) * F::slope(x));                                                    \
            put(dup + i, d * F::value(x));                                                                     \
        }                                                                                                      \
    }

#define ALL(t, T)                                                                                              \
    FOR_FUNCTIONS(FORWARD, t, T)                                                                               \
    FOR_FUNCTIONS(BACKWARD, t, T)                                                                              \
    FOR_FUNCTIONS(GATED, t, T)                                                                                 \
    FOR_FUNCTIONS(GATED_BACKWARD, t, T)
FOR_FORMATS(ALL)
