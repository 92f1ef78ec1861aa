// Tensor cores with the interface of CUDA's C++ (nvcuda::wmma), for products of 16 x 16 x 16 with sums in f32.
//
// A fragment of a factor has the complete matrix in each lane. Sums are distributed over the lanes, eight to each, in
// an order that is specific to this file and that kernels must not rely on. A lane reads memory before it waits for the
// other lanes of its warp, so that a missing barrier is detected, and all lanes must have the same address. Fresh sums
// are NaN.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <limits>

#include "kernel.h"

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int m, int n, int k, class T, class Layout = void>
class fragment;

template <class T, class Layout>
struct MockFactor {
    float all[16][16];
};
template <class T, class Layout>
class fragment<matrix_a, 16, 16, 16, T, Layout> : public MockFactor<T, Layout> {};
template <class T, class Layout>
class fragment<matrix_b, 16, 16, 16, T, Layout> : public MockFactor<T, Layout> {};

template <>
class fragment<accumulator, 16, 16, 16, float> {
public:
    static constexpr int num_elements = 8;
    float x[num_elements];
    fragment() { std::fill(x, x + num_elements, std::numeric_limits<float>::quiet_NaN()); }
};
using MockSums = fragment<accumulator, 16, 16, 16, float>;

// The row and the column of a lane's element `i`.
struct MockElement {
    unsigned row, column;
    explicit MockElement(int i) {
        unsigned place = (mock_lane() * 8 + unsigned(i)) * 37 % 256;
        row = place / 16;
        column = place % 16;
    }
};

// Waits for all lanes, which must reach the same point with the same address.
inline void mock_together(const char *what, const void *p, unsigned stride, unsigned multiple) {
    const void *first = __shfl_sync(0xFFFFFFFF, p, 0);
    const char *wrong = first != p ? "lanes of a warp give different addresses"
        : uintptr_t(p) % 32 != 0   ? "the address is not a multiple of 32 bytes"
        : stride % multiple != 0 || stride < 16 ? "the stride is too short, or not a multiple of 16 bytes"
                                   : nullptr;
    if (wrong == nullptr) return;
    fprintf(stderr, "mock_cuda: %s: %s\n", what, wrong);
    abort();
}

template <class T, class Layout>
void mock_load(MockFactor<T, Layout> &to, const T *from, unsigned stride) {
    for (unsigned r = 0; r < 16; r++)
        for (unsigned c = 0; c < 16; c++)
            to.all[r][c] = float(from[std::is_same_v<Layout, row_major> ? r * stride + c : c * stride + r]);
    mock_together("load_matrix_sync", from, stride, 16 / sizeof(T));
}

template <class T, class Layout>
void load_matrix_sync(fragment<matrix_a, 16, 16, 16, T, Layout> &to, const T *from, unsigned stride) {
    mock_load<T, Layout>(to, from, stride);
}

template <class T, class Layout>
void load_matrix_sync(fragment<matrix_b, 16, 16, 16, T, Layout> &to, const T *from, unsigned stride) {
    mock_load<T, Layout>(to, from, stride);
}

inline void load_matrix_sync(MockSums &to, const float *from, unsigned stride, layout_t layout) {
    for (int i = 0; i < to.num_elements; i++) {
        MockElement e(i);
        to.x[i] = from[layout == mem_row_major ? e.row * stride + e.column : e.column * stride + e.row];
    }
    mock_together("load_matrix_sync", from, stride, 4);
}

inline void store_matrix_sync(float *to, const MockSums &from, unsigned stride, layout_t layout) {
    mock_together("store_matrix_sync", to, stride, 4);
    for (int i = 0; i < from.num_elements; i++) {
        MockElement e(i);
        to[layout == mem_row_major ? e.row * stride + e.column : e.column * stride + e.row] = from.x[i];
    }
}

inline void fill_fragment(MockSums &to, float value) { std::fill(to.x, to.x + to.num_elements, value); }

template <class T, class LayoutA, class LayoutB>
void mma_sync(MockSums &to, const fragment<matrix_a, 16, 16, 16, T, LayoutA> &a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB> &b, const MockSums &c) {
    __syncwarp();
    for (int i = 0; i < to.num_elements; i++) {
        MockElement e(i);
        float sum = c.x[i];
        for (int k = 0; k < 16; k++) sum += a.all[e.row][k] * b.all[k][e.column];
        to.x[i] = sum;
    }
}

}  // namespace nvcuda::wmma
