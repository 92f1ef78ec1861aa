// Reductions over a row that the threads of a block share: across lanes by shuffles, then over warps in order. The
// order depends only on the number of threads, so a row has the same bits in every run. Blocks have full warps.
#pragma once

struct Add {
    template <class N>
    __device__ __forceinline__ N operator()(N a, N b) const { return a + b; }
};

// NaN is ignored.
struct Larger {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class N>
__device__ __forceinline__ N other_lane(N v, int lanes) {
    return __shfl_xor_sync(0xFFFFFFFF, v, lanes);
}

// Every thread gets the result, and all of them must call this.
template <class N, class Op>
__device__ __forceinline__ N reduce_block(N v, Op op) {
    __shared__ N parts[32];
    for (int lanes = 16; lanes > 0; lanes /= 2) v = op(v, other_lane(v, lanes));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = parts[0];
    for (int warp = 1; warp < blockDim.x / 32; warp++) v = op(v, parts[warp]);
    // The next reduction must not write to the parts before all threads have read them.
    __syncthreads();
    return v;
}

// Iterates over the elements of a row.
#define FOR_ROW(i, width) for (size_t i = threadIdx.x; i < (width); i += blockDim.x)
