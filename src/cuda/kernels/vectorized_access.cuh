// Packs: neighbouring elements that a thread reads and writes together, in accesses of 16 bytes. Kernels that access one
// 16-bit element at a time reach only about a third of the memory bandwidth of an H200.
//
// Pointers that are not aligned to 16 bytes are accessed element by element. Which thread processes which element of a
// row, and in which order, does not depend on the alignment.
#pragma once

#include "element_types.cuh"

// The elements of a pack, as stored.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};

// The elements of a pack, in f32.
template <int N>
struct Floats {
    float at[N];
};

// The number of elements of a pack: 16 bytes of the smallest of the formats.
template <class... T>
constexpr int PACK = ((sizeof(T) == 2) || ...) ? 8 : 4;

// The number of elements of a pack in kernels that sum rows. It is the same for all formats, and so is the order of sums.
constexpr int ROW_PACK = 8;

// Returns whether packs can be accessed at these addresses. Null pointers do not matter.
template <class... T>
__device__ __forceinline__ bool are_packed(const T *...p) {
    return ((uintptr_t)p | ...) % 16 == 0;
}

template <int N, class T>
__device__ __forceinline__ Floats<N> load(const T *from) {
    Pack<T, N> pack = *(const Pack<T, N> *)from;
    Floats<N> values;
#pragma unroll
    for (int k = 0; k < N; k++) values.at[k] = widen(pack.at[k]);
    return values;
}

template <int N, class T>
__device__ __forceinline__ void store(T *to, const Floats<N> &values) {
    Pack<T, N> pack;
#pragma unroll
    for (int k = 0; k < N; k++) put(pack.at + k, values.at[k]);
    *(Pack<T, N> *)to = pack;
}

// Returns f of the corresponding elements.
template <int N, class F, class... V>
__device__ __forceinline__ Floats<N> apply(F f, const V &...values) {
    Floats<N> results;
#pragma unroll
    for (int k = 0; k < N; k++) results.at[k] = f(values.at[k]...);
    return results;
}

// Calls body(i, size) for the elements i, ..., i + size - 1 of `count` elements, with any number of threads. The size is
// a type with a constant `N`, which is 1 for all elements that are not in packs.
template <int SIZE>
struct Size {
    static constexpr int N = SIZE;
};

template <int N, class Body>
__device__ __forceinline__ void for_each_pack(size_t count, bool packed, Body body) {
    size_t packs = packed ? count / N : 0;
    FOR_EACH(i, packs) body(i * N, Size<N>());
    FOR_EACH(i, count - packs * N) body(packs * N + i, Size<1>());
}

// out[i] = f(in[i]...), rounded once. `out` may be one of the inputs.
template <class F, class D, class... S>
__device__ __forceinline__ void map(size_t count, F f, D *out, const S *...in) {
    for_each_pack<PACK<D, S...>>(count, are_packed(out, in...), [=](size_t i, auto size) {
        constexpr int N = decltype(size)::N;
        store(out + i, apply<N>(f, load<N>(in + i)...));
    });
}

// A pack in a row. Elements from, ..., until - 1 belong to the row, and `start` is the index of the pack's first element
// in the row, plus the row's shift.
template <int N>
struct WholePack {
    size_t start;
    static constexpr bool is_whole = true;
    static constexpr int from = 0, until = N;
};

struct PartOfPack {
    size_t start;
    int from, until;
    static constexpr bool is_whole = false;
};

// The packs of a row of a matrix. Rows follow each other without gaps, so a pack that is aligned in a matrix may begin
// before its row: the first pack of a row contains `shift` elements of the row before.
template <int N>
struct RowPacks {
    size_t width;
    unsigned shift;

    __device__ __forceinline__ RowPacks(size_t row, size_t width) : width(width), shift(row * width % N) {}

    // Calls `body` for the packs of this thread, where the threads of a block share the row.
    template <class Body>
    __device__ __forceinline__ void each(Body body) const {
        size_t end = width + shift;
        for (size_t start = (size_t)threadIdx.x * N; start < end; start += (size_t)blockDim.x * N) {
            if (start >= shift && end - start >= N) body(WholePack<N>{start});
            else body(PartOfPack{start, start < shift ? (int)(shift - start) : 0, end - start < N ? (int)(end - start) : N});
        }
    }

    // Returns the index in the row of an element of a pack.
    template <class P>
    __device__ __forceinline__ size_t index(const P &pack, int k) const { return pack.start + k - shift; }
};

// The elements of a row, or one number for each of its columns.
template <class T>
struct RowElements {
    T *elements;
    bool packed;

    template <int N>
    __device__ __forceinline__ RowElements(T *row, const RowPacks<N> &packs)
        : elements(row - packs.shift), packed(are_packed(elements)) {}

    // Returns zeros for elements outside the row.
    template <int N, class P>
    __device__ __forceinline__ Floats<N> read(const P &pack) const {
        if (P::is_whole && packed) return load<N>(elements + pack.start);
        Floats<N> values;
#pragma unroll
        for (int k = 0; k < N; k++)
            values.at[k] = k >= pack.from && k < pack.until ? widen(elements[pack.start + k]) : 0.0f;
        return values;
    }

    template <int N, class P>
    __device__ __forceinline__ void write(const P &pack, const Floats<N> &values) const {
        if (P::is_whole && packed) return store(elements + pack.start, values);
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k >= pack.from && k < pack.until) put(elements + pack.start + k, values.at[k]);
    }
};

// Iterates over the elements of a pack that belong to its row.
#define FOR_PACK(k, N, pack)                                                                                   \
    _Pragma("unroll") for (int k = 0; k < (N); k++) if (k >= (pack).from && k < (pack).until)
