// The declarations that the parts of the mock driver share.
//
//   host's calls (api.cpp)  ->  queues of operations (streams.cpp)  ->  kernels in fibers (blocks.cpp)
//                                                                   ->  copies, fills, frees (memory.cpp)
//
// One lock, `mutex()`, guards everything, and each API call takes it. Operations run under it, on the waiting thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../host/kernel_table.h"

namespace mock {

std::mutex &mutex();

// Prints the program's error and aborts.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- settings, from the environment

int device_count();          // MOCK_CUDA_DEVICES, default 4
size_t device_capacity();    // MOCK_CUDA_MEMORY, bytes of each device, default 4 GiB
uint64_t seed();             // MOCK_CUDA_SEED, default 0: streams run as late as possible

// ---- memory.cpp

using Pointer = uint64_t;  // the host's view: an address that must not be accessed

// Returns 0 if the device's capacity is not sufficient.
Pointer allocate(int device, size_t bytes);
// The count of live bytes decreases at the call. `release` removes the memory when the stream reaches it.
bool count_free(Pointer start);
void release(Pointer start);
// Returns the device that `p` belongs to, or -1.
int device_of(Pointer p);
bool is_start(Pointer p);
// Returns the address at which kernels and copies find the memory of `p`. Other values are returned unchanged.
void *for_kernels(Pointer p);
size_t live_bytes(int device);
size_t peak_bytes(int device);

void *allocate_pinned(size_t bytes);
bool free_pinned(void *start);
bool register_pinned(void *start, size_t bytes);
bool unregister_pinned(void *start);
bool is_pinned(const void *p, size_t bytes);

// Prepares the calling thread, once.
void prepare_for_faults();
// The operation that the calling thread is running, for the message of a fault.
extern thread_local const char *running;

// ---- streams.cpp

struct Stream;
using StreamRef = std::shared_ptr<Stream>;

struct Moment {  // a position in a stream's queue
    StreamRef stream;
    uint64_t ticket = 0;
    bool reached() const;
};

struct Operation {
    std::string name;
    std::function<void()> run;
    std::vector<Moment> after = {};
    // Called when everything before the operation is complete. The operation runs when this returns true: a collective
    // starts and waits for its peers.
    std::function<bool()> ready = {};
};

StreamRef make_stream(int device, bool waits_for_legacy);
StreamRef legacy_stream(int device);
StreamRef thread_stream(int device);
int device_of(const StreamRef &stream);
Moment enqueue(const StreamRef &stream, Operation operation);
Moment tail(const StreamRef &stream);
// If `moment` is not reached, runs one operation that `moment` requires, or one selected by the seed. Returns false if
// all operations that could run wait for their peers.
bool advance(const Moment &moment);
// Waits until `moment` is reached. Lets other threads take the lock while operations wait for peers.
void run_until(const Moment &moment);
void run_all(int device);
// Runs the operations that wait for peers, and all operations before them, as far as the peers allow.
void progress();

// ---- blocks.cpp

struct Dim {
    unsigned x, y, z;
};

// `arguments` are the kernel's arguments, with pointers that kernels can dereference.
void run_kernel(const mock_cuda_kernel &kernel, Dim grid, Dim block, size_t shared_bytes, void **arguments);

}  // namespace mock

// The functions that the mocks of NVIDIA's other libraries use.
extern "C" {
// Adds an operation to a stream, given as the driver's handle. `name` and the captures of `run` are kept until it has
// run.
void mock_cuda_enqueue(void *stream, const char *name, void (*run)(void *), void (*drop)(void *), void *state);
// Does the same for an operation that runs when `ready` returns true. `ready` is called when everything before it is
// complete. `ready` and `run` are called under the lock.
void mock_cuda_enqueue_when(void *stream, const char *name, bool (*ready)(void *), void (*run)(void *), void (*drop)(void *),
                            void *state);
// Runs these operations and everything before them, as far as peers allow. A GPU does this on its own.
void mock_cuda_progress();
// Returns the device of the calling thread's context, or -1 without one.
int mock_cuda_current_device();
// Does the same as `mock::for_kernels`. Aborts with `name` if `p` is not live device memory of the stream's device.
void *mock_cuda_pointer(const char *name, const void *p);
}
