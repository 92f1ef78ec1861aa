// The cross entropy of rows of logits, each against one target, and its gradient. A block computes a row in f32. Sums
// are in the order of row_reductions.cuh, and a mean is computed by 256 threads in f64.
#include "element_types.cuh"
#include "row_reductions.cuh"

// The target of an ignored row.
#define IGNORED 0xFFFFFFFFu

// Returns cap * tanh(logit / cap) if the cap is above 0.
__device__ __forceinline__ float bound(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

struct Softmax {
    float max, total, at_target;

    __device__ __forceinline__ float loss() const { return logf(total) + (max - at_target); }
};

// Every thread gets the result.
template <class T>
__device__ __forceinline__ Softmax softmax(size_t classes, const T *x, unsigned target, float cap) {
    Softmax of = {-INFINITY, 0.0f, bound(widen(x[target]), cap)};
    FOR_ROW(i, classes) of.max = fmaxf(of.max, bound(widen(x[i]), cap));
    of.max = reduce_block(of.max, Larger());
    FOR_ROW(i, classes) of.total += expf(bound(widen(x[i]), cap) - of.max);
    of.total = reduce_block(of.total, Add());
    return of;
}

// losses[row] = -log softmax(row)[target] times `sign`, and 0 for ignored rows.
#define LOSSES(t, T)                                                                                           \
    extern "C" __global__ void losses_##t(                                                                     \
        size_t classes, const T *logits, const unsigned *targets, float cap, float sign, float *losses) {      \
        unsigned target = targets[blockIdx.x];                                                                 \
        if (target == IGNORED) {                                                                               \
            if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;                                                   \
            return;                                                                                            \
        }                                                                                                      \
        Softmax of = softmax(classes, logits + blockIdx.x * classes, target, cap);                             \
        if (threadIdx.x == 0) losses[blockIdx.x] = sign * of.loss();                                           \
    }
FOR_FORMATS(LOSSES)

// Computes the same losses, and d = (softmax - 1 at the target) * the slope of the cap * the row's scale / divisor.
// If `logits` is null, d contains the logits. The row's scale is scales[row * stride], or 1 without scales.
template <class T>
__device__ __forceinline__ void gradient(size_t classes, const T *logits, const unsigned *targets, float cap, const float *scales,
                                         size_t stride, float divisor, T *d, float *losses) {
    unsigned target = targets[blockIdx.x];
    d += blockIdx.x * classes;
    const T *x = logits ? logits + blockIdx.x * classes : d;
    if (target == IGNORED) {
        FOR_ROW(i, classes) put(d + i, 0.0f);
        if (threadIdx.x == 0 && losses) losses[blockIdx.x] = 0.0f;
        return;
    }
    // The last step of softmax is a barrier. No thread reads another thread's elements after it.
    Softmax of = softmax(classes, x, target, cap);
    float factor = (scales ? scales[blockIdx.x * stride] : 1.0f) / divisor / of.total;
    FOR_ROW(i, classes) {
        float v = bound(widen(x[i]), cap), e = expf(v - of.max) - (i == target ? of.total : 0.0f);
        if (cap > 0.0f) e *= 1.0f - (v / cap) * (v / cap);
        put(d + i, e * factor);
    }
    if (threadIdx.x == 0 && losses) losses[blockIdx.x] = of.loss();
}

#define GRADIENT(t, T)                                                                                         \
    extern "C" __global__ void gradient_##t(size_t classes, const T *logits, const unsigned *targets, float cap, \
                                            const float *scales, size_t stride, float divisor, T *d, float *losses) { \
        gradient<T>(classes, logits, targets, cap, scales, stride, divisor, d, losses);                        \
    }
FOR_FORMATS(GRADIENT)

// sum = the sum of the losses / divisor, by one block.
extern "C" __global__ void mean_of_losses(size_t count, const float *losses, double divisor, float *mean) {
    double sum = 0.0;
    FOR_ROW(i, count) sum += losses[i];
    sum = reduce_block(sum, Add());
    if (threadIdx.x == 0) *mean = (float)(sum / divisor);
}

// dst = src * scale / divisor, rounded once. The scale is in memory.
#define SCALED_BY(d, D, s, S)                                                                                  \
    extern "C" __global__ void scaled_by_##d##_##s(size_t count, D *dst, const S *src, const float *scale, float divisor) { \
        float factor = *scale / divisor;                                                                       \
        FOR_EACH(i, count) put(dst + i, widen(src[i]) * factor);                                               \
    }
FOR_PAIRS(SCALED_BY)
