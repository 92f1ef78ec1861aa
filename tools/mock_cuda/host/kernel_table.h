// How a compiled .cu file tells the driver which kernels it has.
#pragma once

#include <cstddef>

extern "C" {
struct mock_cuda_kernel {
    const char *name;
    int arguments;
    const size_t *sizes;         // bytes of each argument
    const bool *are_pointers;    // which of them are pointers
    void (*run)(void **);        // calls the kernel's function for the thread that threadIdx names
};
}
