// Activation functions and their gated forms, computed element by element in f32 and rounded once.
#include "activations.cuh"
#include "vectorized_access.cuh"

// y = f(x)
#define FORWARD(name, F, t, T)                                                                                 \
    extern "C" __global__ void name##_##t(size_t count, const T *x, T *y) {                                    \
        map(count, [](float x) { return F::value(x); }, y, x);                                                 \
    }

// dx = dy * f'(x)
#define BACKWARD(name, F, t, T)                                                                                \
    extern "C" __global__ void name##_backward_##t(size_t count, const T *x, const T *dy, T *dx) {             \
        map(count, [](float x, float dy) { return dy * F::slope(x); }, dx, x, dy);                             \
    }

// y = f(gate) * up
#define GATED(name, F, t, T)                                                                                   \
    extern "C" __global__ void name##_gated_##t(size_t count, const T *gate, const T *up, T *y) {              \
        map(count, [](float gate, float up) { return F::value(gate) * up; }, y, gate, up);                     \
    }

// dgate = dy * up * f'(gate), dup = dy * f(gate)
#define GATED_BACKWARD(name, F, t, T)                                                                          \
    extern "C" __global__ void name##_gated_backward_##t(                                                      \
        size_t count, const T *gate, const T *up, const T *dy, T *dgate, T *dup) {                             \
        for_each_pack<PACK<T>>(count, are_packed(gate, up, dy, dgate, dup), [=](size_t i, auto size) {         \
            constexpr int N = decltype(size)::N;                                                                        \
            Floats<N> x = load<N>(gate + i), u = load<N>(up + i), d = load<N>(dy + i);                         \
            store(dgate + i, apply<N>([](float d, float u, float x) { return d * u * F::slope(x); }, d, u, x)); \
            store(dup + i, apply<N>([](float d, float x) { return d * F::value(x); }, d, x));                  \
        });                                                                                                    \
    }

#define ALL(t, T)                                                                                              \
    FOR_FUNCTIONS(FORWARD, t, T)                                                                               \
    FOR_FUNCTIONS(BACKWARD, t, T)                                                                              \
    FOR_FUNCTIONS(GATED, t, T)                                                                                 \
    FOR_FUNCTIONS(GATED_BACKWARD, t, T)
FOR_FORMATS(ALL)
