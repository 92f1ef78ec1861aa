// Blocks of integers with a scale, encoded and decoded with the same bytes and bits as in
// src/precision/block_quantization.rs on the host (except that every NaN becomes the same NaN), and sums of such blocks
// over ranks, as in src/comm/shm/quantized.rs. A warp processes a block.
//
// Elements are split into parts of equal length, one for each rank. A part's blocks are counted from its start, and its
// bytes start at a multiple of 4, so that every scale does too.
#include "element_types.cuh"

constexpr unsigned BLOCK = 128, WARP = 32, PER_LANE = BLOCK / WARP;
// The bytes of a scale.
constexpr unsigned SCALE = 4;
constexpr float LEAST_NORMAL = 1.17549435e-38f;
// Adding this number leaves an integer of small magnitude, rounded to nearest even, in the low bits.
constexpr float TO_INTEGER = 12582912.0f;

struct Int8 {
    static constexpr float LARGEST = 127.0f;
    static constexpr unsigned PER_BYTE = 1, RECORD = SCALE + BLOCK;
};

// A byte has an element of the first half of a block in its low bits, and one of the second half in its high bits.
struct Int4 {
    static constexpr float LARGEST = 7.0f;
    static constexpr unsigned PER_BYTE = 2, RECORD = SCALE + BLOCK / 2;
};

// A lane's share of a block of `count` elements. Elements 0 and 1 are in the block's first half, and element k + 2
// shares a byte with element k.
struct Lane {
    unsigned lane, count, half;

    __device__ __forceinline__ explicit Lane(unsigned count)
        : lane(threadIdx.x % WARP), count(count), half((count + 1) / 2) {}
    // The byte of elements k and k + 2, if there are two in a byte.
    __device__ __forceinline__ unsigned byte(unsigned k) const { return lane + k % 2 * WARP; }
    __device__ __forceinline__ unsigned element(unsigned k) const { return byte(k) + k / 2 * half; }
    __device__ __forceinline__ bool has(unsigned k) const { return byte(k) < half && element(k) < count; }
};

template <class T>
__device__ __forceinline__ void load(float (&x)[PER_LANE], const T *elements, const Lane &own) {
#pragma unroll
    for (unsigned k = 0; k < PER_LANE; k++) x[k] = own.has(k) ? widen(elements[own.element(k)]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store(T *elements, const float (&x)[PER_LANE], const Lane &own) {
#pragma unroll
    for (unsigned k = 0; k < PER_LANE; k++)
        if (own.has(k)) put(elements + own.element(k), x[k]);
}

// Returns the integer nearest to x * inverse in the low bits of the result. For a NaN, the result is 0, as on a CPU.
__device__ __forceinline__ unsigned code(float x, float inverse) {
    float shifted = x * inverse + TO_INTEGER;
    return shifted == shifted ? __float_as_uint(shifted) : 0;
}

template <class I>
__device__ __forceinline__ void encode(uint8_t *record, const float (&x)[PER_LANE], const Lane &own) {
    // Compared as integers, the bits of magnitudes have the order of the floats, and a NaN is larger than all of them.
    unsigned largest = 0;
#pragma unroll
    for (unsigned k = 0; k < PER_LANE; k++) {
        unsigned magnitude = __float_as_uint(x[k]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    for (unsigned lanes = WARP / 2; lanes > 0; lanes /= 2) {
        unsigned other = __shfl_xor_sync(0xffffffff, largest, lanes);
        largest = other > largest ? other : largest;
    }
    float step = __uint_as_float(largest) / I::LARGEST, inverse = 1.0f / step;
    // The CPU's default NaN replaces every NaN. A GPU's division returns a different one.
    if (largest > 0x7f800000) step = __uint_as_float(0x7fc00000);
    // Below this limit, the inverse might not be finite.
    if (step < LEAST_NORMAL) step = inverse = 0.0f;
    if (own.lane == 0) *(float *)record = step;
    uint8_t *codes = record + SCALE;
    if constexpr (I::PER_BYTE == 1) {
#pragma unroll
        for (unsigned k = 0; k < PER_LANE; k++)
            if (own.has(k)) codes[own.element(k)] = (uint8_t)code(x[k], inverse);
    } else {
#pragma unroll
        for (unsigned k = 0; k < 2; k++) {
            // After the last of an odd number of elements, the codes are zeros.
            unsigned high = own.has(k + 2) ? code(x[k + 2], inverse) << 4 : 0;
            if (own.has(k)) codes[own.byte(k)] = (uint8_t)((code(x[k], inverse) & 0xf) | high);
        }
    }
}

template <class I>
__device__ __forceinline__ void decode(float (&x)[PER_LANE], const uint8_t *record, const Lane &own) {
    float step = *(const float *)record;
    const uint8_t *codes = record + SCALE;
    if constexpr (I::PER_BYTE == 1) {
#pragma unroll
        for (unsigned k = 0; k < PER_LANE; k++) x[k] = own.has(k) ? (float)(int8_t)codes[own.element(k)] * step : 0.0f;
    } else {
#pragma unroll
        for (unsigned k = 0; k < 2; k++) {
            unsigned both = own.has(k) ? codes[own.byte(k)] : 0;
            x[k] = (float)((int8_t)(uint8_t)(both << 4) >> 4) * step;
            x[k + 2] = (float)((int8_t)(uint8_t)both >> 4) * step;
        }
    }
}

// Iterates over the blocks of `count` elements, a warp for each.
#define FOR_EACH_BLOCK(block, count)                                                                           \
    for (size_t block = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP; block * BLOCK < (count);       \
         block += (size_t)gridDim.x * blockDim.x / WARP)

__device__ __forceinline__ Lane lane_of(size_t block, size_t count) {
    size_t rest = count - block * BLOCK;
    return Lane(rest < BLOCK ? rest : BLOCK);
}

// Encodes to part `blockIdx.y` of the bytes. The source is the same part of the elements, or the next part if
// `blockIdx.y` is not below `without`, because part `without` is skipped. Parts are `bytes_apart` bytes and
// `elements_apart` elements apart.
template <class I, class T>
__device__ __forceinline__ void encode_part(size_t count, uint8_t *bytes, size_t bytes_apart, const T *elements,
                                            size_t elements_apart, size_t without) {
    const size_t part = blockIdx.y;
    bytes += part * bytes_apart;
    elements += (part + (part >= without)) * elements_apart;
    FOR_EACH_BLOCK(block, count) {
        const Lane own = lane_of(block, count);
        float x[PER_LANE];
        load(x, elements + block * BLOCK, own);
        encode<I>(bytes + block * I::RECORD, x, own);
    }
}

template <class I, class T>
__device__ __forceinline__ void decode_part(size_t count, T *elements, size_t elements_apart, const uint8_t *bytes,
                                            size_t bytes_apart) {
    const size_t part = blockIdx.y;
    bytes += part * bytes_apart;
    elements += part * elements_apart;
    FOR_EACH_BLOCK(block, count) {
        const Lane own = lane_of(block, count);
        float x[PER_LANE];
        decode<I>(x, bytes + block * I::RECORD, own);
        store(elements + block * BLOCK, x, own);
    }
}

// to[i] = element i of rank 0 + that of rank 1 + ... in f32, rounded once. This rank's element is `own[i]`, which is
// not quantized. Its peers' elements are decoded from blocks in rank order. `to` may be `own`.
template <class I, class T>
__device__ __forceinline__ void sum_parts(size_t count, T *to, const T *own, const uint8_t *bytes, size_t bytes_apart,
                                          int rank, int ranks) {
    FOR_EACH_BLOCK(block, count) {
        const Lane lane = lane_of(block, count);
        const uint8_t *peer = bytes + block * I::RECORD;
        float sum[PER_LANE];
        for (int r = 0; r < ranks; r++) {
            float x[PER_LANE];
            if (r == rank) {
                load(x, own + block * BLOCK, lane);
            } else {
                decode<I>(x, peer, lane);
                peer += bytes_apart;
            }
#pragma unroll
            for (unsigned k = 0; k < PER_LANE; k++) sum[k] = r == 0 ? x[k] : sum[k] + x[k];
        }
        store(to + block * BLOCK, sum, lane);
    }
}

#define FOR_INTS(i, I, t, T)                                                                                   \
    extern "C" __global__ void encode_##i##_##t(size_t count, uint8_t *bytes, size_t bytes_apart,              \
                                                const T *elements, size_t elements_apart, size_t without) {    \
        encode_part<I>(count, bytes, bytes_apart, elements, elements_apart, without);                          \
    }                                                                                                          \
    extern "C" __global__ void decode_##i##_##t(size_t count, T *elements, size_t elements_apart,              \
                                                const uint8_t *bytes, size_t bytes_apart) {                    \
        decode_part<I>(count, elements, elements_apart, bytes, bytes_apart);                                   \
    }                                                                                                          \
    extern "C" __global__ void sum_##i##_##t(size_t count, T *to, const T *own, const uint8_t *bytes,          \
                                             size_t bytes_apart, int rank, int ranks) {                        \
        sum_parts<I>(count, to, own, bytes, bytes_apart, rank, ranks);                                         \
    }
#define FOR_FORMAT(t, T)                                                                                       \
    FOR_INTS(int8, Int8, t, T)                                                                                 \
    FOR_INTS(int4, Int4, t, T)
FOR_FORMATS(FOR_FORMAT)
