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

// 16-bit elements in pairs: one access for two of a lane's elements. Each of a chunk's threads reads the words lane,
// lane + 16, ..., and thus elements of other lanes, which exchange them.
template <class T>
struct Pairs {
    static constexpr unsigned WORDS = AHEAD / 2;
    uint32_t words[WORDS];

    __device__ __forceinline__ void load(const T *elements, unsigned lane) {
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) words[k] = ((const uint32_t *)elements)[k * LANES + lane];
    }

    static __device__ __forceinline__ double half_of(uint32_t word, unsigned lane) {
        uint16_t bits = word >> (lane % 2 * 16);
        return widen(*(const T *)&bits);
    }

    // Adds the squares of elements lane, lane + 16, ... in this order.
    __device__ __forceinline__ double add_to(double sum, unsigned lane) const {
        const unsigned mask = 0xFFFFu << (threadIdx.x & LANES);
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) {
            double first = half_of(__shfl_sync(mask, words[k], lane / 2, LANES), lane);
            double second = half_of(__shfl_sync(mask, words[k], LANES / 2 + lane / 2, LANES), lane);
            sum = fma(first, first, sum);
            sum = fma(second, second, sum);
        }
        return sum;
    }
};

// A lane's elements, one per access.
template <class T>
struct Single {
    float elements[AHEAD];

    __device__ __forceinline__ void load(const T *from, unsigned lane) {
#pragma unroll
        for (unsigned k = 0; k < AHEAD; k++) elements[k] = widen(from[k * LANES + lane]);
    }

    __device__ __forceinline__ double add_to(double sum, unsigned) const {
#pragma unroll
        for (unsigned k = 0; k < AHEAD; k++) sum = fma((double)elements[k], (double)elements[k], sum);
        return sum;
    }
};

// Returns the sum of the squares of elements lane, lane + 16, lane + 32, ...
template <class Tile, class T>
__device__ __forceinline__ double lane_sum_in(const T *elements, unsigned count, unsigned lane) {
    constexpr unsigned TILE = LANES * AHEAD;
    double sum = 0.0;
    unsigned start = 0;
    if (count >= TILE) {
        Tile next;
        next.load(elements, lane);
        for (; count - start >= TILE; start += TILE) {
            Tile now = next;
            if (count - start >= 2 * TILE) next.load(elements + start + TILE, lane);
            sum = now.add_to(sum, lane);
        }
    }
    for (unsigned i = start + lane; i < count; i += LANES) {
        double x = widen(elements[i]);
        sum = fma(x, x, sum);
    }
    return sum;
}

template <class T>
__device__ __forceinline__ double lane_sum(const T *elements, unsigned count, unsigned lane) {
    if constexpr (sizeof(T) == 2)
        if ((uintptr_t)elements % 4 == 0) return lane_sum_in<Pairs<T>>(elements, count, lane);
    return lane_sum_in<Single<T>>(elements, count, lane);
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
