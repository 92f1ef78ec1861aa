// Sums of columns over many rows, for the gradients of parameters that all rows share, in two steps without atomics:
//
//   rows of a chunk, by a block for 32 columns -> a part [chunks, width] -> column_sums.cu adds the parts in order
//
// In a block, thread (column, lane) adds rows lane, lane + 8, ...; then the lanes' sums are added in order.
#pragma once

#define COLUMNS 32
#define LANES 8

// Writes the sum of `term`(row, column) over a block's rows to the chunk's part.
template <class Term>
__device__ __forceinline__ void sum_rows(size_t rows, size_t width, size_t per_chunk, float *parts, Term term) {
    __shared__ float sums[LANES][COLUMNS];
    size_t column = (size_t)blockIdx.x * COLUMNS + threadIdx.x;
    size_t first = blockIdx.y * per_chunk, end = first + per_chunk < rows ? first + per_chunk : rows;
    float sum = 0.0f;
    if (column < width)
        for (size_t row = first + threadIdx.y; row < end; row += LANES) sum += term(row, column);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
        for (int lane = 1; lane < LANES; lane++) sum += sums[lane][threadIdx.x];
        parts[blockIdx.y * width + column] = sum;
    }
    __syncthreads();
}
