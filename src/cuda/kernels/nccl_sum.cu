// The sum over ranks of received elements, in rank order in f32, rounded once, with the same bits as the sums of
// src/comm/shm/collectives.rs on the host.
#include "vectorized_access.cuh"

// to[i] = element i of rank 0 + that of rank 1 + ... This rank's elements are `own`. Its peers' elements are in
// `pieces`, in rank order and `stride` elements apart. `to` may be `own`.
#define SUM_IN_RANK_ORDER(name, T)                                                                             \
    extern "C" __global__ void sum_in_rank_order_##name(size_t count, T *to, const T *own, const T *pieces,    \
                                                        size_t stride, int rank, int ranks) {                  \
        bool packed = stride % PACK<T> == 0 && are_packed(to, own, pieces);                                    \
        for_each_pack<PACK<T>>(count, packed, [=](size_t i, auto size) {                                       \
            constexpr int N = decltype(size)::N;                                                               \
            Floats<N> sum = load<N>((rank == 0 ? own : pieces) + i);                                           \
            for (int r = 1; r < ranks; r++) {                                                                  \
                const T *part = r == rank ? own : pieces + (r < rank ? r : r - 1) * stride;                    \
                sum = apply<N>([](float sum, float v) { return sum + v; }, sum, load<N>(part + i));            \
            }                                                                                                  \
            store(to + i, sum);                                                                                \
        });                                                                                                    \
    }
FOR_FORMATS(SUM_IN_RANK_ORDER)
