// The sum over ranks of elements that have come from them: in rank order in f32, rounded once, as src/comm/shm/collectives.rs
// sums on the host, with the same bits.
#include "element_types.cuh"

// to[i] = the element i of rank 0 + that of rank 1 + ...: this rank's are `own`, those of its peers lie in `pieces`, in rank
// order and `stride` elements apart. `to` may be `own`.
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
