// Memory of the devices, stricter than a GPU's.
//
// Each device has two address ranges, which are reserved and initially not readable:
//
//     host range      |  A  |guard|  B  |guard| ...     returned by cuMemAlloc; never readable
//     kernel range    |  A  |guard|  B  |guard| ...     the same offsets; readable while the allocation exists
//
// A host that dereferences a device pointer faults, and so does a kernel that leaves its allocation or accesses it
// after its release. Allocations end at the end of a page, and no address is used twice. Fresh memory has 0xFF in each
// byte, which is NaN in every float.

#include "mock.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <sys/mman.h>
#include <unistd.h>

namespace mock {

thread_local const char *running = nullptr;

std::mutex &mutex() {
    static auto *mutex = new std::mutex;
    return *mutex;
}

void die(const char *format, ...) {
    fputs("mock_cuda: ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    if (*end) die("%s is \"%s\", which is not a number", name, text);
    return value;
}

int device_count() {
    static int count = int(setting("MOCK_CUDA_DEVICES", 4));
    return count;
}

size_t device_capacity() {
    static size_t capacity = setting("MOCK_CUDA_MEMORY", size_t(4) << 30);
    return capacity;
}

uint64_t seed() {
    static uint64_t seed = setting("MOCK_CUDA_SEED", 0);
    return seed;
}

namespace {

constexpr size_t SPAN = size_t(1) << 39;
constexpr size_t ALIGNMENT = 256, PAGE = 4096;

struct Allocation {
    size_t bytes;
    bool counted, mapped;
    uint64_t number;
};

struct Device {
    size_t used_span = PAGE;  // used part of its range
    size_t live = 0, peak = 0;
};

struct Memory {
    uintptr_t base = 0;
    std::vector<Device> devices;
    std::map<Pointer, Allocation> allocations;
    std::map<uintptr_t, std::pair<size_t, bool>> pinned;  // bytes, and whether it was allocated here
    uint64_t allocated = 0;
    struct sigaction before = {};

    size_t offset() const { return SPAN * devices.size(); }
};

Memory &memory();

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

uintptr_t first_page(Pointer start) { return (start + memory().offset()) / PAGE * PAGE; }

size_t mapped_bytes(Pointer start, const Allocation &a) {
    return round_up(start + memory().offset() + a.bytes, PAGE) - first_page(start);
}

// Makes pages permanently inaccessible. When they are mapped again, they merge with the reserved pages around them. A
// process can have 65530 mappings, and pages that are only protected would remain separate mappings.
void close_for_ever(void *pages, size_t bytes) {
    void *closed = mmap(pages, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (closed == MAP_FAILED) die("cannot close %zu bytes: %s", bytes, strerror(errno));
}

// Prints the allocation at or before `p`, for the message of a fault.
void say_whose(Pointer p) {
    auto &all = memory().allocations;
    auto next = all.upper_bound(p);
    if (next == all.begin()) {
        fprintf(stderr, "which was never allocated\n");
        return;
    }
    auto &[start, a] = *std::prev(next);
    const char *state = a.mapped ? a.counted ? "live" : "freed by the host" : "freed";
    fprintf(stderr, "byte %zu of allocation %llu, which has %zu bytes and is %s\n", size_t(p - start),
            (unsigned long long)a.number, a.bytes, state);
}

void on_fault(int signal, siginfo_t *info, void *context) {
    auto &m = memory();
    uintptr_t p = uintptr_t(info->si_addr);
    if (p >= m.base && p < m.base + 2 * m.offset()) {
        bool hosts = p < m.base + m.offset();
        if (running)
            fprintf(stderr, "mock_cuda: %s touches %s ", running,
                    hosts ? "a device address that it did not get as an argument:" : "memory that is not its own:");
        else
            fprintf(stderr, "mock_cuda: the host touches device memory: ");
        say_whose(hosts ? p : p - m.offset());
        abort();
    }
    // Not in device memory: the fault is handled as before.
    if (m.before.sa_flags & SA_SIGINFO)
        m.before.sa_sigaction(signal, info, context);
    else {
        sigaction(SIGSEGV, &m.before, nullptr);
    }
}

Memory &memory() {
    static auto *memory = [] {
        auto *m = new Memory;
        m->devices.resize(device_count());
        size_t all = 2 * SPAN * m->devices.size();
        void *base = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) die("cannot reserve %zu bytes of addresses: %s", all, strerror(errno));
        m->base = uintptr_t(base);
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &m->before);
        return m;
    }();
    return *memory;
}

}  // namespace

void prepare_for_faults() {
    // The stack that Rust provides for signal handlers is too small for printing.
    static thread_local bool done = false;
    if (std::exchange(done, true)) return;
    constexpr size_t STACK = 128 << 10;
    stack_t stack = {};
    stack.ss_sp = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stack.ss_size = STACK;
    if (stack.ss_sp != MAP_FAILED) sigaltstack(&stack, nullptr);
}

int device_of(Pointer p) {
    auto &m = memory();
    return p >= m.base && p < m.base + m.offset() ? int((p - m.base) / SPAN) : -1;
}

void *for_kernels(Pointer p) { return reinterpret_cast<void *>(device_of(p) < 0 ? p : p + memory().offset()); }

bool is_start(Pointer p) {
    auto a = memory().allocations.find(p);
    return a != memory().allocations.end() && a->second.counted;
}

Pointer allocate(int device, size_t bytes) {
    auto &m = memory();
    auto &d = m.devices[device];
    if (bytes > device_capacity() || d.live + bytes > device_capacity()) return 0;
    size_t pages = round_up(bytes, PAGE);
    if (d.used_span + pages + PAGE > SPAN) die("device %d has used all of its addresses", device);
    Pointer start = m.base + device * SPAN + d.used_span + pages - round_up(bytes, ALIGNMENT);
    d.used_span += pages + PAGE;
    Allocation a = {bytes, true, true, ++m.allocated};
    auto *page = reinterpret_cast<void *>(first_page(start));
    if (mprotect(page, mapped_bytes(start, a), PROT_READ | PROT_WRITE) != 0)
        die("%zu bytes for device %d: %s", bytes, device, strerror(errno));
    memset(page, 0xFF, mapped_bytes(start, a));
    m.allocations[start] = a;
    d.live += bytes;
    d.peak = std::max(d.peak, d.live);
    return start;
}

bool count_free(Pointer start) {
    auto a = memory().allocations.find(start);
    if (a == memory().allocations.end() || !a->second.counted) return false;
    a->second.counted = false;
    memory().devices[device_of(start)].live -= a->second.bytes;
    return true;
}

void release(Pointer start) {
    auto &a = memory().allocations.at(start);
    auto *page = reinterpret_cast<void *>(first_page(start));
    close_for_ever(page, mapped_bytes(start, a));
    a.mapped = false;
}

size_t live_bytes(int device) { return memory().devices[device].live; }
size_t peak_bytes(int device) { return memory().devices[device].peak; }

void *allocate_pinned(size_t bytes) {
    void *start = mmap(nullptr, round_up(bytes, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    memset(start, 0xFF, bytes);
    memory().pinned[uintptr_t(start)] = {bytes, true};
    return start;
}

// Its addresses are not reused, so accessing it is a fault.
bool free_pinned(void *start) {
    auto &pinned = memory().pinned;
    auto it = pinned.find(uintptr_t(start));
    if (it == pinned.end() || !it->second.second) return false;
    size_t bytes = round_up(it->second.first, PAGE);
    close_for_ever(start, bytes);
    pinned.erase(it);
    return true;
}

bool register_pinned(void *start, size_t bytes) {
    if (is_pinned(start, 1)) return false;
    return memory().pinned.emplace(uintptr_t(start), std::pair{bytes, false}).second;
}

bool unregister_pinned(void *start) {
    auto &pinned = memory().pinned;
    auto it = pinned.find(uintptr_t(start));
    if (it == pinned.end() || it->second.second) return false;
    pinned.erase(it);
    return true;
}

bool is_pinned(const void *p, size_t bytes) {
    auto &pinned = memory().pinned;
    auto next = pinned.upper_bound(uintptr_t(p));
    if (next == pinned.begin()) return false;
    auto &[start, what] = *std::prev(next);
    return uintptr_t(p) + bytes <= start + what.first;
}

}  // namespace mock

extern "C" {
// Returns the bytes that the program has on a device now, or had at most, as requested by the program.
size_t mock_cuda_live_bytes(int device) {
    std::lock_guard lock(mock::mutex());
    return mock::live_bytes(device);
}

size_t mock_cuda_peak_bytes(int device) {
    std::lock_guard lock(mock::mutex());
    return mock::peak_bytes(device);
}

// For kernels. See host/kernel.h.
void *mock_from_global(size_t address) {
    if (mock::device_of(address) < 0) mock::die("%s uses %#zx as an address of a device", mock::running, address);
    return mock::for_kernels(address);
}
}
