// Lookup of a table's rows, and the gradient of the table. The gradient of each row that was looked up is summed by
// separate threads, in f32 and in the order of the row's positions, without atomics.
#include "element_types.cuh"

#define NO_ROW 0xFFFFFFFFu

// Row i of y = the table's row ids[i], or zeros for NO_ROW.
#define LOOK_UP(d, D, s, S)                                                                                    \
    extern "C" __global__ void look_up_##d##_##s(                                                              \
        size_t count, size_t width, const unsigned *ids, const S *table, D *y) {                               \
        FOR_EACH(i, count) {                                                                                   \
            unsigned id = ids[i / width];                                                                      \
            put(y + i, id == NO_ROW ? 0.0f : widen(table[id * width + i % width]));                            \
        }                                                                                                      \
    }
FOR_PAIRS(LOOK_UP)

// Row ids[r] of grad += the sum of the rows positions[starts[r]], ..., positions[starts[r + 1] - 1] of dy, rounded
// once.
#define ADD_ROWS(d, D, s, S)                                                                                   \
    extern "C" __global__ void add_rows_##d##_##s(size_t width, const unsigned *ids, const unsigned *starts,   \
                                                  const unsigned *positions, const S *dy, D *grad) {           \
        size_t column = (size_t)blockIdx.y * blockDim.x + threadIdx.x;                                         \
        if (column >= width) return;                                                                           \
        float sum = 0.0f;                                                                                      \
        for (unsigned i = starts[blockIdx.x]; i < starts[blockIdx.x + 1]; i++)                                 \
            sum += widen(dy[positions[i] * width + column]);                                                   \
        D *to = grad + ids[blockIdx.x] * width + column;                                                       \
        put(to, widen(*to) + sum);                                                                             \
    }
FOR_PAIRS(ADD_ROWS)
