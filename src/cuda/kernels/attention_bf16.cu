// Attention for bf16: products on tensor cores, sums and softmax in f32. GPUs with a compute capability below 8.0 lack
// the formats and the shared memory, so no kernels are compiled for them.
#if __CUDA_ARCH__ >= 800
#include "attention_tensor_cores.cuh"
#include "attention_kernels.cuh"

__device__ __forceinline__ Line *shared_lines() {
    extern __shared__ Line memory[];
    return memory;
}

#define FORWARD(WIDTH) CoresForward<__nv_bfloat16, WIDTH>
#define BACKWARD(WIDTH) CoresBackward<__nv_bfloat16, WIDTH>
ATTENTION_KERNELS(bf16, __nv_bfloat16)
#endif
