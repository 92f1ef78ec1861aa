// Column sums, such as the gradient of a bias. See column_sums.cuh.
#include "column_sums.cuh"
#include "element_types.cuh"

#define COLUMN_SUMS(t, T)                                                                                      \
    extern "C" __global__ void column_sums_##t(                                                                \
        size_t rows, size_t width, size_t per_chunk, const T *x, float *parts) {                               \
        sum_rows(rows, width, per_chunk, parts, [=](size_t row, size_t i) { return widen(x[row * width + i]); }); \
    }
FOR_FORMATS(COLUMN_SUMS)

// grad = the sum of the parts in order, or grad += that sum, rounded once.
#define SUM_PARTS(t, T)                                                                                        \
    extern "C" __global__ void sum_parts_##t(size_t width, size_t chunks, const float *parts, T *grad, int add) { \
        FOR_EACH(i, width) {                                                                                   \
            float sum = 0.0f;                                                                                  \
            for (size_t chunk = 0; chunk < chunks; chunk++) sum += parts[chunk * width + i];                   \
            put(grad + i, add ? widen(grad[i]) + sum : sum);                                                   \
        }                                                                                                      \
    }
FOR_FORMATS(SUM_PARTS)
