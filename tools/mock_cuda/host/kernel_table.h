// The table in which a compiled .cu file lists its kernels for the driver.
#pragma once

#include <cstddef>

extern "C" {
struct mock_cuda_kernel {
    const char *name;
    int arguments;
    const size_t *sizes;         // bytes of each argument
    const bool *are_pointers;    // whether each argument is a pointer
    void (*run)(void **);        // calls the kernel's function for the thread in threadIdx
};
}
