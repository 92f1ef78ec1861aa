// Kernels for the tests of the mock: each needs one thing that a device has and a host lacks.

#include <cuda_fp16.h>

extern "C" __global__ void add_one(float *values, size_t count) {
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) values[i] += 1;
}

// The sum of a block's values by a tree reduction in shared memory.
extern "C" __global__ void sum_of_block(const float *values, float *sums) {
    __shared__ float part[256];
    part[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

// Like sum_of_block, but by shuffles, with shared memory whose size the launch gives.
extern "C" __global__ void sum_by_shuffles(const float *values, float *sums) {
    extern __shared__ float of_warp[];
    float value = values[blockIdx.x * blockDim.x + threadIdx.x];
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, lanes);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (unsigned w = 0; w < blockDim.x / 32; w++) sum += of_warp[w];
        sums[blockIdx.x] = sum;
    }
}

// Threads read what others wrote, without a barrier in between: correct only in one order of the threads.
extern "C" __global__ void forgotten_barrier(const float *values, float *reversed) {
    __shared__ float shared[256];
    shared[threadIdx.x] = values[threadIdx.x];
    reversed[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// Half of a warp's lanes wait for the whole warp, the others for the whole block.
extern "C" __global__ void waits_for_ever(float *values) {
    if (threadIdx.x % 2 == 0) __syncwarp();
    else __syncthreads();
    values[threadIdx.x] = 1;
}

// Adds one to the value whose address the host wrote to a table. The address is either converted from a
// global-memory address first, or used unchanged.
extern "C" __global__ void add_one_by_table(const size_t *table, size_t is_global) {
    *(float *)(is_global ? __cvta_global_to_generic(*table) : (void *)*table) += 1;
}
