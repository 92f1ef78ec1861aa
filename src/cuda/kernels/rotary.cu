// Rotary positions. The first 2 * half elements of a head form pairs: elements i and half + i, or 2i and 2i + 1 if pairs
// are adjacent. Each pair is rotated by the angle of its row's position; the other elements are copied. cos and sin are
// [positions, half]. The backward pass rotates by -1 times the angle.
#include "element_types.cuh"

// Row r is at position positions[r], or at first + r % time if there are no positions.
#define TURN(t, T)                                                                                             \
    extern "C" __global__ void turn_##t(size_t pairs, size_t half, size_t head, size_t adjacent, size_t width, \
                                        size_t time, size_t first, const unsigned *positions, const float *cos, \
                                        const float *sin, float direction, const T *x, T *y) {                 \
        FOR_EACH(i, pairs) {                                                                                   \
            size_t row = i / (width / 2), rest = i % (width / 2), pair = rest % (head / 2);                    \
            bool is_turned = pair < half, is_adjacent = adjacent || !is_turned;                                \
            size_t a = row * width + rest / (head / 2) * head + (is_adjacent ? 2 * pair : pair);               \
            size_t b = is_adjacent ? a + 1 : a + half;                                                         \
            if (!is_turned) {                                                                                  \
                y[a] = x[a];                                                                                   \
                y[b] = x[b];                                                                                   \
                continue;                                                                                      \
            }                                                                                                  \
            size_t angle = (positions ? positions[row] : first + row % time) * half + pair;                    \
            float c = cos[angle], s = sin[angle] * direction, one = widen(x[a]), other = widen(x[b]);          \
            put(y + a, one * c - other * s);                                                                   \
            put(y + b, other * c + one * s);                                                                   \
        }                                                                                                      \
    }
FOR_FORMATS(TURN)
