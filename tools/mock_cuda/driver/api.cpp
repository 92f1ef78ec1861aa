// The driver functions that cudarc, candle and candle-zero call. For all others, see stubs.py.

#include "mock.h"

#include <cuda.h>
#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <set>

using namespace mock;

// ---- the types behind handles

struct CUctx_st {
    int device;
    int retained = 0;
};

struct CUstream_st {
    StreamRef stream;
};

struct CUevent_st {
    int device;
    Moment recorded;
    std::shared_ptr<double> time;  // execution time in milliseconds; negative before the event has run
};

struct CUfunc_st {
    CUctx_st *context;
    const mock_cuda_kernel *kernel;
    size_t max_dynamic_shared = 48 << 10;
};

struct CUmod_st {
    CUctx_st *context;
    const mock_cuda_kernel *kernels;
    std::map<std::string, CUfunc_st> functions = {};
};

namespace {

bool initialized = false;
thread_local CUctx_st *current = nullptr;
std::set<void *> handles;  // of existing streams, events, modules and functions

CUctx_st &context_of(int device) {
    static auto *contexts = new std::map<int, CUctx_st>;
    return contexts->try_emplace(device, CUctx_st{device}).first->second;
}

double now() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char *format, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

// Returns the driver's error code and prints the reason to standard error: hardware gives no reasons.
CUresult refuse(CUresult code, const std::string &why) {
    fprintf(stderr, "mock_cuda: %s\n", why.c_str());
    return code;
}

// The state that every call needs: the lock and, in most cases, a context of the calling thread.
struct Call {
    std::lock_guard<std::mutex> lock{mutex()};
    CUresult result = CUDA_SUCCESS;

    explicit Call(const char *name, bool needs_context = true) {
        prepare_for_faults();
        if (!initialized) result = refuse(CUDA_ERROR_NOT_INITIALIZED, text("%s before cuInit", name));
        else if (needs_context && !current) result = refuse(CUDA_ERROR_INVALID_CONTEXT, text("%s without a current context", name));
        if (running) die("%s calls %s", running, name);
    }
};

#define CALL(...)                          \
    Call call(__func__ __VA_OPT__(,) __VA_ARGS__);\
    if (call.result != CUDA_SUCCESS) return call.result

// Returns null if the handle is not an existing stream.
StreamRef stream_of(CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return legacy_stream(current->device);
    if (handle == CU_STREAM_PER_THREAD) return thread_stream(current->device);
    if (!handles.count(handle)) return nullptr;
    return handle->stream;
}

#define STREAM(name, handle)                                                                                        \
    StreamRef name = stream_of(handle);                                                                             \
    if (!name) return refuse(CUDA_ERROR_INVALID_HANDLE, text("%s: this is not a stream", __func__));                \
    if (device_of(name) != current->device)                                                                         \
    return refuse(CUDA_ERROR_INVALID_HANDLE, text("%s: a stream of device %d, and device %d is current", __func__, \
                                                  device_of(name), current->device))

#define LIVING(handle, what)                                                                                    \
    if (!handles.count(handle)) return refuse(CUDA_ERROR_INVALID_HANDLE, text("%s: this is not a live " what, __func__))

// Checks device memory at the start of a copy or a fill.
CUresult check_device(const char *name, Pointer p, size_t bytes) {
    if (bytes > 0 && mock::device_of(p) < 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, text("%s: %#llx is not device memory", name, (unsigned long long)p));
    return CUDA_SUCCESS;
}

#define DEVICE_MEMORY(p, bytes) \
    if (CUresult r = check_device(__func__, p, bytes); r != CUDA_SUCCESS) return r

CUresult check_host(const char *name, const void *p, size_t bytes) {
    if (bytes > 0 && mock::device_of(Pointer(p)) >= 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, text("%s: %p is device memory instead of host memory", name, p));
    return CUDA_SUCCESS;
}

#define HOST_MEMORY(p, bytes) \
    if (CUresult r = check_host(__func__, p, bytes); r != CUDA_SUCCESS) return r

CUresult copy_to_device(const StreamRef &stream, Pointer to, const void *from, size_t bytes) {
    if (bytes == 0) return CUDA_SUCCESS;
    std::string name = text("a copy of %zu bytes to the device", bytes);
    if (is_pinned(from, bytes)) {
        enqueue(stream, {name, [=] { memcpy(for_kernels(to), from, bytes); }});
    } else {
        // Pageable memory is read before the call returns.
        auto staged = std::make_shared<std::vector<char>>(static_cast<const char *>(from), static_cast<const char *>(from) + bytes);
        enqueue(stream, {name, [=] { memcpy(for_kernels(to), staged->data(), bytes); }});
    }
    return CUDA_SUCCESS;
}

CUresult copy_to_host(const StreamRef &stream, void *to, Pointer from, size_t bytes) {
    if (bytes == 0) return CUDA_SUCCESS;
    auto done = enqueue(stream, {text("a copy of %zu bytes to the host", bytes), [=] { memcpy(to, for_kernels(from), bytes); }});
    // For pageable memory, the call returns after the copy.
    if (!is_pinned(to, bytes)) run_until(done);
    return CUDA_SUCCESS;
}

void copy_on_device(const StreamRef &stream, Pointer to, Pointer from, size_t bytes) {
    if (bytes == 0) return;
    enqueue(stream, {text("a copy of %zu bytes on the device", bytes),
                     [=] { memmove(for_kernels(to), for_kernels(from), bytes); }});
}

void fill(const StreamRef &stream, Pointer to, unsigned char value, size_t bytes) {
    if (bytes == 0) return;
    enqueue(stream, {text("a fill of %zu bytes", bytes), [=] { memset(for_kernels(to), value, bytes); }});
}

CUresult allocate_for(CUdeviceptr *p, size_t bytes) {
    if (bytes == 0) return refuse(CUDA_ERROR_INVALID_VALUE, "an allocation of no bytes");
    *p = allocate(current->device, bytes);
    return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// If MOCK_CUDA_REPORT names a file, a line for each used device is appended to it at the end.
struct Report {
    ~Report() {
        const char *path = getenv("MOCK_CUDA_REPORT");
        FILE *file = initialized && path ? fopen(path, "a") : nullptr;
        if (!file) return;
        for (int d = 0; d < device_count(); d++)
            if (peak_bytes(d) > 0) fprintf(file, "device %d: %zu bytes live, %zu at most\n", d, live_bytes(d), peak_bytes(d));
        fclose(file);
    }
} report;

}  // namespace

extern "C" {

// ---- the driver and its devices

CUresult cuInit(unsigned) {
    std::lock_guard lock(mutex());
    initialized = true;
    return device_count() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    CALL(false);
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL(false);
    if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CALL(false);
    snprintf(name, length, "stand-in %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CALL(false);
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = char(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice) {
    CALL(false);
    *bytes = device_capacity();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    CALL(false);
    static const std::map<int, int> values = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7FFFFFFF},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
    };
    auto it = values.find(attribute);
    if (it == values.end()) die("cuDeviceGetAttribute: no value is known for attribute %d", int(attribute));
    *value = it->second;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    static const std::map<int, const char *> names = {
        {CUDA_SUCCESS, "CUDA_SUCCESS"},
        {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
        {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY"},
    };
    auto it = names.find(error);
    if (it == names.end()) return CUDA_ERROR_INVALID_VALUE;
    *name = it->second;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **string) { return cuGetErrorName(error, string); }

// ---- contexts: only the primary context of each device

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL(false);
    auto &c = context_of(device);
    c.retained++;
    *context = &c;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL(false);
    auto &c = context_of(device);
    if (c.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    c.retained--;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    CALL(false);
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    CALL(false);
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    CALL();
    *device = current->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
    CALL();
    run_all(current->device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CALL();
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

// ---- streams and events

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int) {
    CALL();
    *handle = new CUstream_st{make_stream(current->device, !(flags & CU_STREAM_NON_BLOCKING))};
    handles.insert(*handle);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

CUresult cuStreamDestroy_v2(CUstream handle) {
    CALL();
    LIVING(handle, "stream");
    handles.erase(handle);
    delete handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    CALL();
    STREAM(stream, handle);
    run_until(tail(stream));
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
    CALL();
    STREAM(stream, handle);
    Moment end = tail(stream);
    if (end.reached()) return CUDA_SUCCESS;
    advance(end);  // so that a caller that polls repeatedly reaches the end
    return CUDA_ERROR_NOT_READY;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    CALL();
    STREAM(stream, handle);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
    CALL();
    STREAM(stream, handle);
    LIVING(event, "event");
    enqueue(stream, {"a wait for an event", [] {}, {event->recorded}});
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    CALL();
    STREAM(stream, handle);
    enqueue(stream, {"a function of the host in a stream", [=] { function(data); }});
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned) {
    CALL();
    *event = new CUevent_st{current->device, {}, nullptr};
    handles.insert(*event);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    CALL();
    LIVING(event, "event");
    handles.erase(event);
    delete event;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    LIVING(event, "event");
    if (event->device != current->device)
        return refuse(CUDA_ERROR_INVALID_HANDLE, text("an event of device %d in a stream of device %d", event->device, current->device));
    auto time = std::make_shared<double>(-1);
    event->time = time;
    event->recorded = enqueue(stream, {"an event", [=] { *time = now(); }});
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    CALL();
    LIVING(event, "event");
    if (event->recorded.reached()) return CUDA_SUCCESS;
    advance(event->recorded);
    return CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    CALL();
    LIVING(event, "event");
    run_until(event->recorded);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    CALL();
    LIVING(start, "event");
    LIVING(end, "event");
    if (!start->time || !end->time) return CUDA_ERROR_INVALID_HANDLE;
    if (*start->time < 0 || *end->time < 0) return CUDA_ERROR_NOT_READY;
    *milliseconds = float(*end->time - *start->time);
    return CUDA_SUCCESS;
}

// ---- memory

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t bytes) {
    CALL();
    return allocate_for(p, bytes);
}

CUresult cuMemAllocAsync(CUdeviceptr *p, size_t bytes, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    return allocate_for(p, bytes);
}

CUresult cuMemFree_v2(CUdeviceptr p) {
    CALL();
    if (p == 0) return CUDA_SUCCESS;
    if (!is_start(p)) die("cuMemFree: %#llx is not an allocation, or was already freed", (unsigned long long)p);
    run_all(mock::device_of(p));
    count_free(p);
    release(p);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr p, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    if (p == 0) return CUDA_SUCCESS;
    if (!count_free(p)) die("cuMemFreeAsync: %#llx is not an allocation, or was already freed", (unsigned long long)p);
    enqueue(stream, {"a release of memory", [=] { release(p); }});
    return CUDA_SUCCESS;
}

// The pool of a device is the device itself. Free memory is never kept, so there is nothing to keep or to trim.

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    CALL();
    *pool = (CUmemoryPool)(intptr_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    CALL();
    if (!pool || !value || attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) die("cuMemPoolSetAttribute: attribute %d is not known", attribute);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
    CALL();
    if (!pool) die("cuMemPoolTrimTo: no pool");
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    CALL();
    *total = device_capacity();
    *free = device_capacity() - live_bytes(current->device);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **p, size_t bytes, unsigned) {
    CALL();
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    *p = allocate_pinned(bytes);
    return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *p) {
    CALL();
    for (int d = 0; d < device_count(); d++) run_all(d);
    return free_pinned(p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned) {
    CALL();
    HOST_MEMORY(p, bytes);
    return register_pinned(p, bytes) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void *p) {
    CALL();
    for (int d = 0; d < device_count(); d++) run_all(d);
    return unregister_pinned(p) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    DEVICE_MEMORY(to, bytes);
    HOST_MEMORY(from, bytes);
    return copy_to_device(stream, to, from, bytes);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    CALL();
    DEVICE_MEMORY(to, bytes);
    HOST_MEMORY(from, bytes);
    auto stream = legacy_stream(current->device);
    CUresult result = copy_to_device(stream, to, from, bytes);
    run_until(tail(stream));
    return result;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    DEVICE_MEMORY(from, bytes);
    HOST_MEMORY(to, bytes);
    return copy_to_host(stream, to, from, bytes);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    CALL();
    DEVICE_MEMORY(from, bytes);
    HOST_MEMORY(to, bytes);
    auto stream = legacy_stream(current->device);
    CUresult result = copy_to_host(stream, to, from, bytes);
    run_until(tail(stream));
    return result;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    DEVICE_MEMORY(to, bytes);
    DEVICE_MEMORY(from, bytes);
    copy_on_device(stream, to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr); }

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream handle) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, handle);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream handle) {
    CALL();
    STREAM(stream, handle);
    DEVICE_MEMORY(to, bytes);
    fill(stream, to, value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) { return cuMemsetD8Async(to, value, bytes, nullptr); }

// ---- modules and kernels

// The image is the output of the mock nvcc: the path of the library with the kernels.
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CALL();
    static const std::string mark = "// mock_cuda kernels: ";
    std::string first = static_cast<const char *>(image);
    first = first.substr(0, first.find('\n'));
    if (first.compare(0, mark.size(), mark) != 0)
        return refuse(CUDA_ERROR_INVALID_PTX, "cuModuleLoadData: this module is not from the stand-in for nvcc: " + first);
    std::string path = first.substr(mark.size());
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) die("cuModuleLoadData: %s", dlerror());
    auto *kernels = static_cast<const mock_cuda_kernel *>(dlsym(library, "mock_cuda_kernels"));
    if (!kernels) die("%s has no kernels", path.c_str());
    *module = new CUmod_st{current, kernels};
    handles.insert(*module);
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    CALL();
    LIVING(module, "module");
    run_all(module->context->device);
    for (auto &[name, function] : module->functions) handles.erase(&function);
    handles.erase(module);
    delete module;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    CALL();
    LIVING(module, "module");
    auto *kernel = module->kernels;
    while (kernel->name && strcmp(kernel->name, name) != 0) kernel++;
    if (!kernel->name) return refuse(CUDA_ERROR_NOT_FOUND, text("there is no kernel %s", name));
    *function = &module->functions.try_emplace(name, CUfunc_st{module->context, kernel}).first->second;
    handles.insert(*function);
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    CALL();
    LIVING(function, "function");
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || value > 227 << 10) return CUDA_ERROR_INVALID_VALUE;
        function->max_dynamic_shared = value;
    }
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared_bytes, CUstream handle, void **parameters, void **extra) {
    CALL();
    STREAM(stream, handle);
    LIVING(function, "function");
    const mock_cuda_kernel *kernel = function->kernel;
    std::string name = text("kernel %s", kernel->name);
    auto invalid = [&](const std::string &what) { return refuse(CUDA_ERROR_INVALID_VALUE, name + ": " + what); };
    if (function->context != current)
        return refuse(CUDA_ERROR_INVALID_HANDLE, name + ": it was loaded for another device than the current one");
    if (extra) die("%s: arguments in a buffer are not supported", name.c_str());
    if (gx == 0 || gy == 0 || gz == 0 || gx > 0x7FFFFFFF || gy > 65535 || gz > 65535)
        return invalid(text("a grid of %u x %u x %u blocks", gx, gy, gz));
    if (bx == 0 || by == 0 || bz == 0 || bz > 64 || size_t(bx) * by * bz > 1024)
        return invalid(text("a block of %u x %u x %u threads", bx, by, bz));
    if (shared_bytes > function->max_dynamic_shared) return invalid(text("%u bytes of shared memory", shared_bytes));

    // Arguments are read now. The memory behind pointers is read when the kernel runs.
    auto values = std::make_shared<std::vector<std::vector<char>>>();
    for (int i = 0; i < kernel->arguments; i++) {
        auto *value = static_cast<const char *>(parameters[i]);
        values->emplace_back(value, value + kernel->sizes[i]);
        if (!kernel->are_pointers[i]) continue;
        Pointer p;
        memcpy(&p, value, sizeof p);
        int device = mock::device_of(p);
        if (device >= 0 && device != current->device)
            return invalid(text("argument %d is memory of device %d, and device %d is current", i, device, current->device));
        if (device < 0 && p != 0 && !is_pinned(reinterpret_cast<void *>(p), 1))
            die("%s: argument %d is memory of the host that is not pinned", name.c_str(), i);
        p = Pointer(for_kernels(p));
        memcpy(values->back().data(), &p, sizeof p);
    }
    enqueue(stream, {name, [=] {
                         std::vector<void *> arguments;
                         for (auto &value : *values) arguments.push_back(value.data());
                         run_kernel(*kernel, {gx, gy, gz}, {bx, by, bz}, shared_bytes, arguments.data());
                     }});
    return CUDA_SUCCESS;
}

// ---- for the mocks of NVIDIA's other libraries

void mock_cuda_enqueue(void *handle, const char *name, void (*run)(void *), void (*drop)(void *), void *state) {
    Call call(name);
    if (call.result != CUDA_SUCCESS) die("%s without a current context", name);
    StreamRef stream = stream_of(static_cast<CUstream>(handle));
    if (!stream || device_of(stream) != current->device) die("%s: its stream is not of the current device", name);
    std::shared_ptr<void> kept(state, drop);
    enqueue(stream, {name, [=] { run(kept.get()); }});
}

void mock_cuda_enqueue_when(void *handle, const char *name, bool (*ready)(void *), void (*run)(void *), void (*drop)(void *),
                            void *state) {
    Call call(name);
    if (call.result != CUDA_SUCCESS) die("%s without a current context", name);
    StreamRef stream = stream_of(static_cast<CUstream>(handle));
    if (!stream || device_of(stream) != current->device) die("%s: its stream is not of the current device", name);
    std::shared_ptr<void> kept(state, drop);
    enqueue(stream, {name, [=] { run(kept.get()); }, {}, [=] { return ready(kept.get()); }});
}

void mock_cuda_progress() {
    std::lock_guard lock(mutex());
    prepare_for_faults();
    progress();
}

int mock_cuda_current_device() { return current ? current->device : -1; }

void *mock_cuda_pointer(const char *name, const void *p) {
    if (!current || mock::device_of(Pointer(p)) != current->device)
        die("%s: %p is not memory of the current device", name, p);
    return for_kernels(Pointer(p));
}

}  // extern "C"
