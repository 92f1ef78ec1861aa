// Layer normalization and root-mean-square normalization of rows, computed as in src/kernels/norm.rs on the host. A
// block computes a row, with sums in the order of row_reductions.cuh. Sums over rows are in the order of
// column_sums.cuh.
//
// Parameters have the rows' format or are f32. `one` is added to the weight.
#include "column_sums.cuh"
#include "vectorized_access.cuh"
#include "row_reductions.cuh"

// A parameter with a number for each column.
template <class T>
struct Parameter {
    RowElements<const float> wide;
    RowElements<const T> own;
    int is_f32;

    template <int N>
    __device__ __forceinline__ Parameter(const void *values, int is_f32, const RowPacks<N> &packs)
        : wide((const float *)values, packs), own((const T *)values, packs), is_f32(is_f32) {}

    template <int N, class P>
    __device__ __forceinline__ Floats<N> read(const P &pack) const {
        return is_f32 ? wide.template read<N>(pack) : own.template read<N>(pack);
    }
};

// y = (x - mean) * factor * weight + bias, with factor = 1 / sqrt(variance + eps). Without `means`, the mean is 0 and
// there is no bias.
template <bool centered, class T>
__device__ __forceinline__ void forward(size_t width, const T *x, const void *weight, int weight_is_f32, const void *bias,
                                        int bias_is_f32, float one, float eps, T *y, float *means, float *factors) {
    constexpr int N = ROW_PACK;
    const RowPacks<N> packs(blockIdx.x, width);
    const RowElements<const T> row(x + blockIdx.x * width, packs);
    const RowElements<T> result(y + blockIdx.x * width, packs);
    const Parameter<T> weights(weight, weight_is_f32, packs), biases(bias, bias_is_f32, packs);
    float mean = 0.0f, square = 0.0f;
    if (centered) {
        packs.each([&](const auto &pack) {
            Floats<N> v = row.template read<N>(pack);
            FOR_PACK(k, N, pack) mean += v.at[k];
        });
        mean = reduce_block(mean, Add()) / width;
    }
    packs.each([&](const auto &pack) {
        Floats<N> v = row.template read<N>(pack);
        FOR_PACK(k, N, pack) {
            float d = v.at[k] - mean;
            square += d * d;
        }
    });
    float factor = 1.0f / sqrtf(reduce_block(square, Add()) / width + eps);
    packs.each([&](const auto &pack) {
        Floats<N> v = row.template read<N>(pack), w = weights.template read<N>(pack);
        v = apply<N>([=](float v, float w) { return (v - mean) * factor * (w + one); }, v, w);
        if (centered) v = apply<N>([](float v, float b) { return v + b; }, v, biases.template read<N>(pack));
        result.write(pack, v);
    });
    if (threadIdx.x == 0) {
        if (centered) means[blockIdx.x] = mean;
        factors[blockIdx.x] = factor;
    }
}

#define FORWARD(t, T)                                                                                          \
    extern "C" __global__ void layer_norm_##t(size_t width, const T *x, const void *weight, int weight_is_f32, \
                                              const void *bias, int bias_is_f32, float eps, T *y, float *means, float *factors) { \
        forward<true, T>(width, x, weight, weight_is_f32, bias, bias_is_f32, 0.0f, eps, y, means, factors);    \
    }                                                                                                          \
    extern "C" __global__ void rms_norm_##t(size_t width, const T *x, const void *weight, int weight_is_f32, float one, \
                                            float eps, T *y, float *factors) {                                 \
        forward<false, T>(width, x, weight, weight_is_f32, nullptr, 0, one, eps, y, nullptr, factors);         \
    }
FOR_FORMATS(FORWARD)

// With h the normalized row and d = dy * weight: dx = factor * (d - mean(d) - h * mean(d * h)), or dx += this value.
template <class T>
__device__ __forceinline__ void input_gradient(size_t width, const T *x, const void *weight, int weight_is_f32, float one,
                                               const float *means, const float *factors, const T *dy, T *dx, int add) {
    constexpr int N = ROW_PACK;
    const RowPacks<N> packs(blockIdx.x, width);
    const RowElements<const T> row(x + blockIdx.x * width, packs), slopes(dy + blockIdx.x * width, packs);
    const RowElements<T> result(dx + blockIdx.x * width, packs);
    const Parameter<T> weights(weight, weight_is_f32, packs);
    float mean = means ? means[blockIdx.x] : 0.0f, factor = factors[blockIdx.x];
    float sum = 0.0f, along = 0.0f;
    auto normalized = [=](float x) { return (x - mean) * factor; };
    auto weighted = [=](float dy, float w) { return dy * (w + one); };
    packs.each([&](const auto &pack) {
        Floats<N> h = apply<N>(normalized, row.template read<N>(pack));
        Floats<N> d = apply<N>(weighted, slopes.template read<N>(pack), weights.template read<N>(pack));
        FOR_PACK(k, N, pack) {
            sum += d.at[k];
            along += d.at[k] * h.at[k];
        }
    });
    sum = means ? reduce_block(sum, Add()) / width : 0.0f;
    along = reduce_block(along, Add()) / width;
    packs.each([&](const auto &pack) {
        Floats<N> h = apply<N>(normalized, row.template read<N>(pack));
        Floats<N> d = apply<N>(weighted, slopes.template read<N>(pack), weights.template read<N>(pack));
        Floats<N> v = apply<N>([=](float d, float h) { return factor * (d - sum - h * along); }, d, h);
        if (add) v = apply<N>([](float v, float before) { return v + before; }, v, result.template read<N>(pack));
        result.write(pack, v);
    });
}

#define INPUT_GRADIENT(t, T)                                                                                   \
    extern "C" __global__ void norm_input_gradient_##t(size_t width, const T *x, const void *weight, int weight_is_f32, float one, \
                                                       const float *means, const float *factors, const T *dy, T *dx, int add) { \
        input_gradient<T>(width, x, weight, weight_is_f32, one, means, factors, dy, dx, add);                  \
    }
FOR_FORMATS(INPUT_GRADIENT)

// Parts of the weight's gradient, which are sums of dy * h, and, with `means`, of the bias's gradient, which are sums
// of dy.
#define PARAMETER_GRADIENTS(t, T)                                                                              \
    extern "C" __global__ void norm_parameter_gradients_##t(size_t rows, size_t width, size_t per_chunk, const T *x, \
                                                            const float *means, const float *factors, const T *dy, \
                                                            float *weight_parts, float *bias_parts) {          \
        sum_rows(rows, width, per_chunk, weight_parts, [=](size_t row, size_t i) {                             \
            float mean = means ? means[row] : 0.0f;                                                            \
            return widen(dy[row * width + i]) * ((widen(x[row * width + i]) - mean) * factors[row]);           \
        });                                                                                                    \
        if (bias_parts)                                                                                        \
            sum_rows(rows, width, per_chunk, bias_parts, [=](size_t row, size_t i) { return widen(dy[row * width + i]); }); \
    }
FOR_FORMATS(PARAMETER_GRADIENTS)
