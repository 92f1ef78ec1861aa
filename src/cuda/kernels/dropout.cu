// Dropout with the bits of src/kernels/dropout.rs: word i of Philox4x32-10's counter 16 * group + lane belongs to
// position 64 * group + 16 * i + lane.
#include "element_types.cuh"

__device__ __forceinline__ uint4 philox(uint64_t counter, uint64_t seed) {
    uint4 c = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * c.x, b = (uint64_t)0xCD9E8D57 * c.z;
        c = {(uint32_t)(b >> 32) ^ c.y ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c.w ^ key[1], (uint32_t)a};
        key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
    }
    return c;
}

// y = x * scale, or 0 if the word of position offset + i is below the bound. A thread handles the four positions of a
// counter. There are `counters` counters from the first position's group on.
#define DROPOUT(t, T)                                                                                          \
    extern "C" __global__ void dropout_##t(size_t counters, size_t count, const T *x, T *y, float scale, unsigned bound, \
                                           unsigned long long seed, unsigned long long offset) {               \
        FOR_EACH(n, counters) {                                                                                \
            uint64_t first = offset / 64 * 64 + n / 16 * 64 + n % 16;                                          \
            uint4 words = philox(first / 64 * 16 + n % 16, seed);                                              \
            uint32_t each[4] = {words.x, words.y, words.z, words.w};                                           \
            for (int i = 0; i < 4; i++) {                                                                      \
                /* For a position before the first, this wraps and exceeds count. */                           \
                uint64_t at = first + 16 * i - offset;                                                         \
                if (at < count) put(y + at, each[i] < bound ? 0.0f : widen(x[at]) * scale);                    \
            }                                                                                                  \
        }                                                                                                      \
    }
FOR_FORMATS(DROPOUT)
