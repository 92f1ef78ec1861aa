// Sums of squares in f64 with the same bits as in src/precision/grad_norm.rs on the host: element i of a chunk is added
// to lane i % 16, and then the lanes are added in order. A square of f32 is exact in f64, so a fused sum is rounded like
// the host's.
#include "element_types.cuh"

constexpr unsigned LANES = 16;
// The number of a lane's elements that are prefetched while as many earlier ones are added.
constexpr unsigned AHEAD = 32;

// An array. Arrays are in the order of their chunks, and each has at least one chunk.
struct Array {
    // The address of its elements in global memory.
    uint64_t address;
    uint64_t count;
    // 0: f32, 1: bf16, 2: f16.
    uint64_t format;
    // The index of its first chunk among those of all arrays.
    uint64_t first;
};

template <class T>
__device__ __forceinline__ void load(float (&to)[AHEAD], const T *lane) {
#pragma unroll
    for (unsigned k = 0; k < AHEAD; k++) to[k] = widen(lane[k * LANES]);
}

// Returns the sum of the squares of elements lane, lane + 16, lane + 32, ...
template <class T>
__device__ __forceinline__ double lane_sum(const T *elements, unsigned count, unsigned lane) {
    constexpr unsigned TILE = LANES * AHEAD;
    double sum = 0.0;
    unsigned start = 0;
    if (count >= TILE) {
        float next[AHEAD];
        load(next, elements + lane);
        for (; count - start >= TILE; start += TILE) {
            float now[AHEAD];
#pragma unroll
            for (unsigned k = 0; k < AHEAD; k++) now[k] = next[k];
            if (count - start >= 2 * TILE) load(next, elements + start + TILE + lane);
#pragma unroll
            for (unsigned k = 0; k < AHEAD; k++) sum = fma((double)now[k], (double)now[k], sum);
        }
    }
    for (unsigned i = start + lane; i < count; i += LANES) {
        double x = widen(elements[i]);
        sum = fma(x, x, sum);
    }
    return sum;
}

// sums[c] = the sum of chunk c. 16 threads process a chunk, and a warp two chunks.
extern "C" __global__ void sums_of_squares(size_t arrays, const uint64_t *table, size_t chunks, size_t elements_per_chunk,
                                           double *sums) {
    size_t chunk = (size_t)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    unsigned lane = threadIdx.x % LANES;
    double sum = 0.0;
    if (chunk < chunks) {
        // Find the last array whose first chunk is not after this chunk.
        const Array *of = (const Array *)table;
        size_t low = 0, high = arrays;
        while (high - low > 1) {
            size_t middle = (low + high) / 2;
            if (of[middle].first <= chunk) low = middle;
            else high = middle;
        }
        size_t start = (chunk - of[low].first) * elements_per_chunk, rest = of[low].count - start;
        unsigned count = rest < elements_per_chunk ? rest : elements_per_chunk;
        const void *elements = __cvta_global_to_generic(of[low].address);
        if (of[low].format == 0) sum = lane_sum((const float *)elements + start, count, lane);
        else if (of[low].format == 1) sum = lane_sum((const __nv_bfloat16 *)elements + start, count, lane);
        else sum = lane_sum((const __half *)elements + start, count, lane);
    }
    double total = 0.0;
    for (unsigned l = 0; l < LANES; l++) total += __shfl_sync(0xffffffff, sum, l, LANES);
    if (chunk < chunks && lane == 0) sums[chunk] = total;
}
