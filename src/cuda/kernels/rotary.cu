// Rotary positions. Element i of a head's first half and element i of its second half form a pair, which is rotated by
// the angle of their row's position. cos and sin are [positions, half]. The backward pass rotates by -1 times the angle.
#include "element_types.cuh"

// Row r is at position positions[r], or at first + r % time if there are no positions.
#define TURN(t, T)                                                                                             \
    extern "C" __global__ void turn_##t(size_t pairs, size_t half, size_t width, size_t time, size_t first,    \
                                        const unsigned *positions, const float *cos, const float *sin, float direction, \
                                        const T *x, T *y) {                                                    \
        FOR_EACH(i, pairs) {                                                                                   \
            size_t row = i / (width / 2), rest = i % (width / 2), pair = rest % half;                          \
            size_t a = row * width + rest / half * 2 * half + pair, b = a + half;                              \
            size_t angle = (positions ? positions[row] : first + row % time) * half + pair;                    \
            float c = cos[angle], s = sin[angle] * direction, one = widen(x[a]), other = widen(x[b]);          \
            put(y + a, one * c - other * s);                                                                   \
            put(y + b, other * c + one * s);                                                                   \
        }                                                                                                      \
    }
FOR_FORMATS(TURN)
