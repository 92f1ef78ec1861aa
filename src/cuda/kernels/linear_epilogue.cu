// The epilogue of a linear layer's product in one pass: residual + f(product + bias).
#include "activations.cuh"
#include "vectorized_access.cuh"

struct Identity {
    static __device__ __forceinline__ float value(float x) { return x; }
};

// `before` has products in rows of `width`. With a function f, product + bias replaces the products, and the function of
// these rounded values plus the residual is written to `y`. Without a function, product + bias + residual replaces the
// products. Function numbers: 0: none, 1: gelu_tanh, 2: gelu, 3: silu, 4: relu_squared.
template <class F, bool has_function, class T>
__device__ __forceinline__ void follow(size_t count, size_t width, T *before, const T *bias, const T *residual, T *y) {
    bool packed = width % PACK<T> == 0 && are_packed(before, bias, residual, y);
    for_each_pack<PACK<T>>(count, packed, [=](size_t i, auto size) {
        constexpr int N = decltype(size)::N;
        Floats<N> v = load<N>(before + i);
        if (bias) v = apply<N>([](float v, float bias) { return v + bias; }, v, load<N>(bias + i % width));
        if (has_function) {
            store(before + i, v);
            v = apply<N>([](float v) {
                T rounded;
                put(&rounded, v);
                return F::value(widen(rounded));
            }, v);
        }
        if (residual) v = apply<N>([](float v, float residual) { return v + residual; }, v, load<N>(residual + i));
        store((has_function ? y : before) + i, v);
    });
}

#define FOLLOW(t, T)                                                                                           \
    extern "C" __global__ void follow_##t(size_t count, size_t width, T *before, const T *bias, int function,  \
                                          const T *residual, T *y) {                                           \
        switch (function) {                                                                                    \
        case 0: return follow<Identity, false>(count, width, before, bias, residual, y);                       \
        case 1: return follow<GeluTanh, true>(count, width, before, bias, residual, y);                        \
        case 2: return follow<Gelu, true>(count, width, before, bias, residual, y);                            \
        case 3: return follow<Silu, true>(count, width, before, bias, residual, y);                            \
        default: return follow<ReluSquared, true>(count, width, before, bias, residual, y);                    \
        }                                                                                                      \
    }
FOR_FORMATS(FOLLOW)
