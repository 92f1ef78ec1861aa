// The cross entropy of rows of logits, each against one target, and its gradient. A block computes a row in f32. Sums
// are in the order of row_reductions.cuh, and a mean is computed by 256 threads in f64.
#include "vectorized_access.cuh"
#include "row_reductions.cuh"

// The target of an ignored row.
#define IGNORED 0xFFFFFFFFu

// Returns cap * tanh(logit / cap) if the cap is above 0.
__device__ __forceinline__ float bound(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

// Returns exp(x) for x of at most 0, by the hardware's power of 2.
__device__ __forceinline__ float exp_below(float x) { return exp2f(x * 1.44269504f); }

// The largest of some logits, and the sum of exp(logit - max) over them.
struct ExpSum {
    float max, total;

    // Returns the factor by which a sum changes if the maximum does.
    static __device__ __forceinline__ float rescale(float before, float max) { return before == max ? 1.0f : exp_below(before - max); }
};

// Returns the value of the lane whose number differs by the bits of `lanes`.
__device__ __forceinline__ ExpSum other_lane(ExpSum v, int lanes) {
    return {__shfl_xor_sync(0xFFFFFFFF, v.max, lanes), __shfl_xor_sync(0xFFFFFFFF, v.total, lanes)};
}

struct Combine {
    __device__ __forceinline__ ExpSum operator()(ExpSum a, ExpSum b) const {
        float max = fmaxf(a.max, b.max);
        return {max, a.total * ExpSum::rescale(a.max, max) + b.total * ExpSum::rescale(b.max, max)};
    }
};

struct Softmax {
    ExpSum of;
    float at_target;

    __device__ __forceinline__ float loss() const { return logf(of.total) + (of.max - at_target); }
};

// Computes the softmax of a row's logits in one pass. Every thread gets the result.
template <int N, class T>
__device__ __forceinline__ Softmax softmax(const RowPacks<N> &packs, const T *x, unsigned target, float cap) {
    const RowElements<const T> row(x, packs);
    const float at_target = bound(widen(x[target]), cap);
    ExpSum own = {-INFINITY, 0.0f};
    packs.each([&](const auto &pack) {
        Floats<N> v = apply<N>([=](float x) { return bound(x, cap); }, row.template read<N>(pack));
        float max = own.max;
        FOR_PACK(k, N, pack) max = fmaxf(max, v.at[k]);
        own = {max, own.total * ExpSum::rescale(own.max, max)};
        FOR_PACK(k, N, pack) own.total += exp_below(v.at[k] - max);
    });
    return {reduce_block(own, Combine()), at_target};
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
        const RowPacks<ROW_PACK> packs(blockIdx.x, classes);                                                   \
        Softmax result = softmax(packs, logits + blockIdx.x * classes, target, cap);                           \
        if (threadIdx.x == 0) losses[blockIdx.x] = sign * result.loss();                                       \
    }
FOR_FORMATS(LOSSES)

// Computes the same losses, and d = (softmax - 1 at the target) * the slope of the cap * the row's scale / divisor.
// If `logits` is null, d contains the logits. The row's scale is scales[row * stride], or 1 without scales.
template <class T>
__device__ __forceinline__ void gradient(size_t classes, const T *logits, const unsigned *targets, float cap, const float *scales,
                                         size_t stride, float divisor, T *d, float *losses) {
    unsigned target = targets[blockIdx.x];
    constexpr int N = ROW_PACK;
    d += blockIdx.x * classes;
    const T *x = logits ? logits + blockIdx.x * classes : d;
    const RowPacks<N> packs(blockIdx.x, classes);
    const RowElements<const T> row(x, packs);
    const RowElements<T> result(d, packs);
    if (target == IGNORED) {
        packs.each([&](const auto &pack) { result.write(pack, Floats<N>{}); });
        if (threadIdx.x == 0 && losses) losses[blockIdx.x] = 0.0f;
        return;
    }
    // The last step of softmax is a barrier. No thread reads another thread's elements after it.
    const Softmax softmax_of_row = softmax(packs, x, target, cap);
    const ExpSum of = softmax_of_row.of;
    float factor = (scales ? scales[blockIdx.x * stride] : 1.0f) / divisor / of.total;
    packs.each([&](const auto &pack) {
        Floats<N> values = row.template read<N>(pack);
#pragma unroll
        for (int k = 0; k < N; k++) {
            float v = bound(values.at[k], cap), e = exp_below(v - of.max) - (packs.index(pack, k) == target ? of.total : 0.0f);
            if (cap > 0.0f) e *= 1.0f - (v / cap) * (v / cap);
            values.at[k] = e * factor;
        }
        result.write(pack, values);
    });
    if (threadIdx.x == 0 && losses) losses[blockIdx.x] = softmax_of_row.loss();
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
        map(count, [=](float v) { return v * factor; }, dst, src);                                             \
    }
FOR_PAIRS(SCALED_BY)
