// Optimizer steps with the same bits as in src/optim/{adam,lion,adagrad,sgd}.rs on the host: products, sums, quotients
// and roots are rounded individually, in the order of those files. One launch computes the steps of many arrays.
#include "vectorized_access.cuh"

// The constants of a step, in the order of src/cuda/optimizer.rs, and the update of an element p and its states s with
// the gradient g.
struct Adam {
    static constexpr int STATES = 2;
    float grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, l2, decay, step_size, root_scale, eps;

    __device__ __forceinline__ void operator()(float &p, float g, float (&s)[2]) const {
        g = g * grad_scale + l2 * p;
        s[0] = beta1 * s[0] + one_minus_beta1 * g;
        s[1] = beta2 * s[1] + one_minus_beta2 * (g * g);
        float decayed = p - decay * p;
        p = decayed - step_size * (s[0] / (sqrtf(s[1]) * root_scale + eps));
    }
};

struct Lion {
    static constexpr int STATES = 1;
    float grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, keep, lr;

    __device__ __forceinline__ void operator()(float &p, float g, float (&s)[2]) const {
        g = g * grad_scale;
        float direction = beta1 * s[0] + one_minus_beta1 * g;
        p = keep * p - copysignf(lr, direction);
        s[0] = beta2 * s[0] + one_minus_beta2 * g;
    }
};

struct Adagrad {
    static constexpr int STATES = 1;
    float grad_scale, l2, lr, eps;

    __device__ __forceinline__ void operator()(float &p, float g, float (&s)[2]) const {
        g = g * grad_scale + l2 * p;
        s[0] += g * g;
        p -= lr * (g / (sqrtf(s[0]) + eps));
    }
};

struct Sgd {
    static constexpr int STATES = 0;
    float lr, scale, l2;

    __device__ __forceinline__ void operator()(float &p, float g, float (&)[2]) const {
        p -= lr * (g * scale + l2 * p);
    }
};

struct SgdMomentum {
    static constexpr int STATES = 1;
    float lr, scale, l2, keep, take, of_grad, of_buffer;

    __device__ __forceinline__ void operator()(float &p, float g, float (&s)[2]) const {
        g = g * scale + l2 * p;
        s[0] = keep * s[0] + take * g;
        p -= lr * (of_grad * g + of_buffer * s[0]);
    }
};

template <class T>
using Four = Pack<T, 4>;

template <class T>
__device__ __forceinline__ bool in_fours(const T *p) {
    return (uintptr_t)p % sizeof(Four<T>) == 0;
}

template <class T>
__device__ __forceinline__ Four<T> &four(T *p, size_t i) {
    return ((Four<T> *)p)[i];
}

template <class T>
__device__ __forceinline__ const Four<T> &four(const T *p, size_t i) {
    return ((const Four<T> *)p)[i];
}

// The step of one parameter. Steps are in the order of their chunks, and each has at least one chunk.
struct Step {
    // The addresses of the step's arrays in global memory, or 0 for a missing array.
    uint64_t param, grad, first, second, half;
    uint64_t count;
    // The index of the step's first chunk among those of all steps.
    uint64_t first_chunk;
};

template <class T>
__device__ __forceinline__ T *at(uint64_t address, size_t start) {
    return address ? (T *)__cvta_global_to_generic(address) + start : nullptr;
}

// Updates `count` elements of param, states and half. Missing arrays are null. If all arrays are aligned to four
// elements, elements are processed in fours, otherwise one by one.
template <class Rule, class G, class H>
__device__ __forceinline__ void step(unsigned count, float *param, const G *grad, float *first, float *second, H *half, Rule rule) {
    bool aligned = in_fours(param) && in_fours(grad) && in_fours(first) && in_fours(second) && in_fours(half);
    unsigned fours = aligned ? count / 4 : 0;
    for (unsigned i = threadIdx.x; i < fours; i += blockDim.x) {
        Four<float> p = four(param, i), s0, s1;
        Four<G> g = four(grad, i);
        if (Rule::STATES > 0) s0 = four(first, i);
        if (Rule::STATES > 1) s1 = four(second, i);
        Four<H> h;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float s[2];
            if (Rule::STATES > 0) s[0] = s0.at[k];
            if (Rule::STATES > 1) s[1] = s1.at[k];
            rule(p.at[k], widen(g.at[k]), s);
            if (Rule::STATES > 0) s0.at[k] = s[0];
            if (Rule::STATES > 1) s1.at[k] = s[1];
            put(h.at + k, p.at[k]);
        }
        four(param, i) = p;
        if (Rule::STATES > 0) four(first, i) = s0;
        if (Rule::STATES > 1) four(second, i) = s1;
        if (half) four(half, i) = h;
    }
    for (unsigned i = 4 * fours + threadIdx.x; i < count; i += blockDim.x) {
        float p = param[i], s[2];
        if (Rule::STATES > 0) s[0] = first[i];
        if (Rule::STATES > 1) s[1] = second[i];
        rule(p, widen(grad[i]), s);
        param[i] = p;
        if (Rule::STATES > 0) first[i] = s[0];
        if (Rule::STATES > 1) second[i] = s[1];
        if (half) put(half + i, p);
    }
}

// Each block processes the chunk with its index.
template <class G, class H, class Rule>
__device__ __forceinline__ void steps(size_t arrays, const uint64_t *table, size_t elements_per_chunk, Rule rule) {
    // Find the last step whose first chunk is not after this block's chunk.
    const Step *all = (const Step *)table;
    size_t chunk = blockIdx.x, low = 0, high = arrays;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (all[middle].first_chunk <= chunk) low = middle;
        else high = middle;
    }
    Step own = all[low];
    size_t start = (chunk - own.first_chunk) * elements_per_chunk, rest = own.count - start;
    unsigned count = rest < elements_per_chunk ? rest : elements_per_chunk;
    step(count, at<float>(own.param, start), at<const G>(own.grad, start), at<float>(own.first, start), at<float>(own.second, start),
         at<H>(own.half, start), rule);
}

#define STEPS(g, G, h, H)                                                                                      \
    extern "C" __global__ void adam_##g##_##h(                                                                 \
        size_t arrays, const uint64_t *table, size_t elements_per_chunk, float grad_scale, float beta1, float beta2, \
        float one_minus_beta1, float one_minus_beta2, float l2, float decay, float step_size, float root_scale, float eps) { \
        Adam rule = {grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, l2, decay, step_size, root_scale, eps}; \
        steps<G, H>(arrays, table, elements_per_chunk, rule);                                                  \
    }                                                                                                          \
    extern "C" __global__ void lion_##g##_##h(                                                                 \
        size_t arrays, const uint64_t *table, size_t elements_per_chunk, float grad_scale, float beta1, float beta2, \
        float one_minus_beta1, float one_minus_beta2, float keep, float lr) {                                  \
        Lion rule = {grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, keep, lr};                    \
        steps<G, H>(arrays, table, elements_per_chunk, rule);                                                  \
    }                                                                                                          \
    extern "C" __global__ void adagrad_##g##_##h(                                                              \
        size_t arrays, const uint64_t *table, size_t elements_per_chunk, float grad_scale, float l2, float lr, float eps) { \
        Adagrad rule = {grad_scale, l2, lr, eps};                                                              \
        steps<G, H>(arrays, table, elements_per_chunk, rule);                                                  \
    }                                                                                                          \
    extern "C" __global__ void sgd_##g##_##h(                                                                  \
        size_t arrays, const uint64_t *table, size_t elements_per_chunk, float lr, float scale, float l2) {    \
        Sgd rule = {lr, scale, l2};                                                                            \
        steps<G, H>(arrays, table, elements_per_chunk, rule);                                                  \
    }                                                                                                          \
    extern "C" __global__ void sgd_momentum_##g##_##h(                                                         \
        size_t arrays, const uint64_t *table, size_t elements_per_chunk, float lr, float scale, float l2, float keep, \
        float take, float of_grad, float of_buffer) {                                                          \
        SgdMomentum rule = {lr, scale, l2, keep, take, of_grad, of_buffer};                                    \
        steps<G, H>(arrays, table, elements_per_chunk, rule);                                                  \
    }

STEPS(f32, float, bf16, __nv_bfloat16)
STEPS(f32, float, f16, __half)
STEPS(bf16, __nv_bfloat16, bf16, __nv_bfloat16)
STEPS(bf16, __nv_bfloat16, f16, __half)
STEPS(f16, __half, bf16, __nv_bfloat16)
STEPS(f16, __half, f16, __half)
