// What the parts of the stand-in for NVIDIA's driver share.
//
//   host's calls (api.cpp)  ->  queues of operations (streams.cpp)  ->  kernels in fibers (blocks.cpp)
//                                                                   ->  copies, fills, frees (memory.cpp)
//
// One lock, `mutex()`, guards everything; each call of the API takes it. Operations run under it, on the thread that waits.
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

// Prints what is wrong with the program, and aborts.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- settings, from the environment

int device_count();          // MOCK_CUDA_DEVICES, 4 without
size_t device_capacity();    // MOCK_CUDA_MEMORY, bytes of each device, 4 GiB without
uint64_t seed();             // MOCK_CUDA_SEED, 0 without: streams run as late as they can

// ---- memory.cpp

using Pointer = uint64_t;  // as the host has it: an address that nobody may touch

// 0 where the device's capacity does not suffice.
Pointer allocate(int device, size_t bytes);
// The count of live bytes falls at the call, `release` takes the memory away when the stream comes to it.
bool count_free(Pointer start);
void release(Pointer start);
// The device that `p` belongs to, -1 if to none.
int device_of(Pointer p);
bool is_start(Pointer p);
// Where kernels and copies find the memory of `p`, which other values pass through unchanged.
void *for_kernels(Pointer p);
size_t live_bytes(int device);
size_t peak_bytes(int device);

void *allocate_pinned(size_t bytes);
bool free_pinned(void *start);
bool register_pinned(void *start, size_t bytes);
bool unregister_pinned(void *start);
bool is_pinned(const void *p, size_t bytes);

// For the calling thread, once.
void prepare_for_faults();
// The operation that the calling thread runs now, for the text of a fault.
extern thread_local const char *running;

// ---- streams.cpp

struct Stream;
using StreamRef = std::shared_ptr<Stream>;

struct Moment {  // a place in a stream's queue
    StreamRef stream;
    uint64_t ticket = 0;
    bool reached() const;
};

struct Operation {
    std::string name;
    std::function<void()> run;
    std::vector<Moment> after = {};
    // Asked when everything before it is done; it runs when this is true: a collective begins, and waits for its peers.
    std::function<bool()> ready = {};
};

StreamRef make_stream(int device, bool waits_for_legacy);
StreamRef legacy_stream(int device);
StreamRef thread_stream(int device);
int device_of(const StreamRef &stream);
Moment enqueue(const StreamRef &stream, Operation operation);
Moment tail(const StreamRef &stream);
// Runs one operation, if `moment` is not reached: one that it needs, or as the seed draws it. False where all that could run
// wait for their peers.
bool advance(const Moment &moment);
// Lets other threads take the lock while it waits for peers.
void run_until(const Moment &moment);
void run_all(int device);
// Runs what waits for peers, and all before it, as far as they let it.
void progress();

// ---- blocks.cpp

struct Dim {
    unsigned x, y, z;
};

// `arguments` are as the kernel takes them, with pointers that kernels may follow.
void run_kernel(const mock_cuda_kernel &kernel, Dim grid, Dim block, size_t shared_bytes, void **arguments);

}  // namespace mock

// What the stand-ins for NVIDIA's other libraries use of this one.
extern "C" {
// Adds an operation to a stream, given as the driver's handle. `name` and what `run` captures are kept until it ran.
void mock_cuda_enqueue(void *stream, const char *name, void (*run)(void *), void (*drop)(void *), void *state);
// The same for one that runs when `ready` says so, which is asked when everything before it is done. `ready` and `run` are
// called under the lock.
void mock_cuda_enqueue_when(void *stream, const char *name, bool (*ready)(void *), void (*run)(void *), void (*drop)(void *),
                            void *state);
// Runs what is before the last such operations and these themselves, as far as peers let them: a GPU does so by itself.
void mock_cuda_progress();
// The device of the calling thread's context, -1 without one.
int mock_cuda_current_device();
// As `mock::for_kernels`. Aborts with `name` where `p` is no live device memory of the stream's device.
void *mock_cuda_pointer(const char *name, const void *p);
}
