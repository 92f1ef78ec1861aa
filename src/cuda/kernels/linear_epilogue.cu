// The epilogue of a linear layer's product in one pass: residual + f(product + bias).
#include "activations.cuh"
#include "element_types.cuh"

// `before` has products in rows of `width`. With a function f, product + bias replaces the products, and the function of
// these rounded values plus the residual is written to `y`. Without a function, product + bias + residual replaces the
// products. Function numbers: 0: none, 1: gelu_tanh, 2: gelu, 3: silu, 4: relu_squared.
#define FOLLOW(t, T)                                                                                           \
    extern "C" __global__ void follow_##t(size_t count, size_t width, T *before, const T *bias, int function,  \
                                          const T *residual, T *y) {                                           \
        FOR_EACH(i, count) {                                                                                   \
            float v = widen(before[i]);                                                                        \
            if (bias) v += widen(bias[i % width]);                                                             \
            if (function) {                                                                                    \
                put(before + i, v);                                                                            \
                v = widen(before[i]);                                                                          \
                v = function == 1   ? GeluTanh::value(v)                                                       \
                    : function == 2 ? Gelu::value(v)                                                           \
                    : function == 3 ? Silu::value(v)                                                           \
                                    : ReluSquared::value(v);                                                   \
            }                                                                                                  \
            if (residual) v += widen(residual[i]);                                                             \
            put((function ? y : before) + i, v);                                                               \
        }                                                                                                      \
    }
FOR_FORMATS(FOLLOW)
