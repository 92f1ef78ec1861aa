// Layer normalization and root-mean-square normalization of rows, computed as in src/kernels/norm.rs on the host. A
// block computes a row, with sums in the order of row_reductions.cuh. Sums over rows are in the order of
// column_sums.cuh.
//
// Parameters have the rows' format or are f32. `one` is added to the weight.
#include "column_sums.cuh"
#include "element_types.cuh"
#include "row_reductions.cuh"

template <class T>
__device__ __forceinline__ float parameter(const void *values, int is_f32, size_t i) {
    return is_f32 ? ((const float *)values)[i] : widen(((const T *)values)[i]);
}

// y = (x - mean) * factor * weight + bias, with factor = 1 / sqrt(variance + eps). Without `means`, the mean is 0 and
// there is no bias.
template <bool centered, class T>
__device__ __forceinline__ void forward(size_t width, const T *x, const void *weight, int weight_is_f32, const void *bias,
                                        int bias_is_f32, float one, float eps, T *y, float *means, float *factors) {
    x += blockIdx.x * width, y += blockIdx.x * width;
    float mean = 0.0f, square = 0.0f;
    if (centered) {
        FOR_ROW(i, width) mean += widen(x[i]);
        mean = reduce_block(mean, Add()) / width;
    }
    FOR_ROW(i, width) {
        float v = widen(x[i]) - mean;
        square += v * v;
    }
    float factor = 1.0f / sqrtf(reduce_block(square, Add()) / width + eps);
    FOR_ROW(i, width) {
        float v = (widen(x[i]) - mean) * factor * (parameter<T>(weight, weight_is_f32, i) + one);
        put(y + i, centered ? v + parameter<T>(bias, bias_is_f32, i) : v);
    }
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
    x += blockIdx.x * width, dy += blockIdx.x * width, dx += blockIdx.x * width;
    float mean = means ? means[blockIdx.x] : 0.0f, factor = factors[blockIdx.x];
    float sum = 0.0f, along = 0.0f;
    FOR_ROW(i, width) {
        float h = (widen(x[i]) - mean) * factor, d = widen(dy[i]) * (parameter<T>(weight, weight_is_f32, i) + one);
        sum += d;
        along += d * h;
    }
    sum = means ? reduce_block(sum, Add()) / width : 0.0f;
    along = reduce_block(along, Add()) / width;
    FOR_ROW(i, width) {
        float h = (widen(x[i]) - mean) * factor, d = widen(dy[i]) * (parameter<T>(weight, weight_is_f32, i) + one);
        float v = factor * (d - sum - h * along);
        put(dx + i, add ? v + widen(dx[i]) : v);
    }
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
