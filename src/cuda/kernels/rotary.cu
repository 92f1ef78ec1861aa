// Rotary positions. The first 2 * half elements of a head form pairs: elements i and half + i, or 2i and 2i + 1 if pairs
// are adjacent. Each pair is rotated by the angle of its row's position; the other elements are copied. cos and sin are
// [positions, half]. The backward pass rotates by -1 times the angle.
#include "vectorized_access.cuh"

template <class T>
struct Turn {
    size_t half, head, width, time, first;
    bool adjacent;
    const unsigned *positions;
    const float *cos, *sin;
    float direction;
    const T *x;
    T *y;

    // Row r is at position positions[r], or at first + r % time if there are no positions.
    __device__ __forceinline__ size_t position(size_t row) const { return positions ? positions[row] : first + row % time; }

    // Rotates pairs i, ..., i + N - 1, which are in the same part of a head.
    template <int N>
    __device__ __forceinline__ void pairs(size_t i) const {
        size_t row = i / (width / 2), rest = i % (width / 2), pair = rest % (head / 2);
        bool is_turned = pair < half, is_adjacent = adjacent || !is_turned;
        size_t a = row * width + rest / (head / 2) * head + (is_adjacent ? 2 * pair : pair);
        size_t b = is_adjacent ? a + N : a + half;
        Floats<N> low = load<N>(x + a), high = load<N>(x + b);
        if (is_turned) {
            size_t angle = position(row) * half + pair;
            Floats<N> c = load<N>(cos + angle), s = load<N>(sin + angle);
            if (is_adjacent) {
#pragma unroll
                for (int k = 0; k < N; k++) turn(at(low, high, 2 * k), at(low, high, 2 * k + 1), c.at[k], s.at[k]);
            } else {
#pragma unroll
                for (int k = 0; k < N; k++) turn(low.at[k], high.at[k], c.at[k], s.at[k]);
            }
        }
        store(y + a, low);
        store(y + b, high);
    }

private:
    template <int N>
    static __device__ __forceinline__ float &at(Floats<N> &low, Floats<N> &high, int k) {
        return k < N ? low.at[k] : high.at[k - N];
    }

    __device__ __forceinline__ void turn(float &a, float &b, float c, float s) const {
        float one = a, other = b;
        s *= direction;
        a = one * c - other * s;
        b = other * c + one * s;
    }
};

#define TURN(t, T)                                                                                             \
    extern "C" __global__ void turn_##t(size_t pairs, size_t half, size_t head, size_t adjacent, size_t width, \
                                        size_t time, size_t first, const unsigned *positions, const float *cos, \
                                        const float *sin, float direction, const T *x, T *y) {                 \
        constexpr int N = PACK<T>;                                                                             \
        Turn<T> of = {half, head, width, time, first, adjacent != 0, positions, cos, sin, direction, x, y};    \
        bool packed = half % N == 0 && head % (2 * N) == 0 && are_packed(cos, sin) && are_packed(x, y);        \
        for_each_pack<N>(pairs, packed, [=](size_t i, auto size) { of.template pairs<decltype(size)::N>(i); }); \
    }
FOR_FORMATS(TURN)
