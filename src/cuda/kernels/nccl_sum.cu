// The sum over ranks of received elements, in rank order in f32, rounded once, with the same bits as the sums of
// src/comm/shm/collectives.rs on the host.
#include "element_types.cuh"

// to[i] = element i of rank 0 + that of rank 1 + ... This rank's elements are `own`. Its peers' elements are in
// `pieces`, in rank order and `stride` elements apart. `to` may be `own`.
#define SUM_IN_RANK_ORDER(name, T)                                                                             \
    extern "C" __global__ void sum_in_rank_order_##name(size_t count, T *to, const T *own, const T *pieces,    \
                                                        size_t stride, int rank, int ranks) {                  \
        FOR_EACH(i, count) {                                                                                   \
            float sum = widen(rank == 0 ? own[i] : pieces[i]);                                                 \
            for (int r = 1; r < ranks; r++) {                                                                  \
                const T *part = r == rank ? own : pieces + (r < rank ? r : r - 1) * stride;                    \
                sum += widen(part[i]);                                                                         \
            }                                                                                                  \
            put(to + i, sum);                                                                                  \
        }                                                                                                      \
    }
FOR_FORMATS(SUM_IN_RANK_ORDER)
