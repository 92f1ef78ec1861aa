// Lookup of a table's rows, and the gradient of the table. The gradient of each row that was looked up is summed by
// separate threads, in f32 and in the order of the row's positions, without atomics.
#include "vectorized_access.cuh"

#define NO_ROW 0xFFFFFFFFu

// Row i of y = the table's row ids[i], or zeros for NO_ROW.
#define LOOK_UP(d, D, s, S)                                                                                    \
    extern "C" __global__ void look_up_##d##_##s(                                                              \
        size_t count, size_t width, const unsigned *ids, const S *table, D *y) {                               \
        bool packed = width % PACK<D, S> == 0 && are_packed(table, y);                                         \
        for_each_pack<PACK<D, S>>(count, packed, [=](size_t i, auto size) {                                    \
            unsigned id = ids[i / width];                                                                      \
            constexpr int N = decltype(size)::N;                                                               \
            store(y + i, id == NO_ROW ? Floats<N>{} : load<N>(table + id * width + i % width));                \
        });                                                                                                    \
    }
FOR_PAIRS(LOOK_UP)

// Row ids[r] of grad += the sum of the rows positions[starts[r]], ..., positions[starts[r + 1] - 1] of dy, rounded
// once. The threads of the blocks (r, 0), (r, 1), ... share the row's columns, N at a time.
template <int N, class D, class S>
__device__ __forceinline__ void add_rows(size_t width, const unsigned *ids, const unsigned *starts, const unsigned *positions,
                                         const S *dy, D *grad) {
    unsigned begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    grad += ids[blockIdx.x] * width;
    for (size_t column = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * N; column < width;
         column += (size_t)gridDim.y * blockDim.x * N) {
        auto add = [](float a, float b) { return a + b; };
        Floats<N> sum{};
        for (unsigned i = begin; i < end; i++) sum = apply<N>(add, sum, load<N>(dy + positions[i] * width + column));
        store(grad + column, apply<N>(add, load<N>(grad + column), sum));
    }
}

#define ADD_ROWS(d, D, s, S)                                                                                   \
    extern "C" __global__ void add_rows_##d##_##s(size_t width, const unsigned *ids, const unsigned *starts,   \
                                                  const unsigned *positions, const S *dy, D *grad) {           \
        if (width % PACK<D, S> == 0 && are_packed(dy, grad))                                                   \
            add_rows<PACK<D, S>>(width, ids, starts, positions, dy, grad);                                     \
        else add_rows<1>(width, ids, starts, positions, dy, grad);                                             \
    }
FOR_PAIRS(ADD_ROWS)
