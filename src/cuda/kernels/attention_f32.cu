// Attention for f32, with sums and products in f32.
#include "attention_f32.cuh"
#include "attention_kernels.cuh"

__device__ __forceinline__ Line *shared_lines() {
    extern __shared__ Line memory[];
    return memory;
}

#define FORWARD(WIDTH) F32Forward<WIDTH>
#define BACKWARD(WIDTH) F32Backward<WIDTH>
ATTENTION_KERNELS(f32, float)
