// Blocks of threads on one processor.
//
// A block's threads run one after the other as plain calls on one fiber. A thread that comes to a barrier or a shuffle keeps its
// fiber and parks; the next threads go on with another. When none is left to begin, the barriers that all their threads reached
// are opened, and the parked threads go on, in an order that the seed draws:
//
//     fiber 1:  t0 ...... barrier |             | t0 ... end
//     fiber 2:                    t1 .. barrier |            | t1 ... end
//     block:                                    opens the barrier
//
// A thread that ended counts for no barrier, as on the hardware since Volta. Where no barrier can open, the kernel would hang:
// that is an error with its name. Blocks run one after the other, in an order that the seed draws too.

#include "mock.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

// What kernels read: see host/kernel.h.
extern "C" {
mock::Dim mock_threadIdx, mock_blockIdx, mock_blockDim, mock_gridDim;
void *mock_dynamic_shared;
}

namespace mock {
namespace {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 256 << 10;

// ---- switching stacks

#ifdef __x86_64__
using Context = void *;  // the stack's pointer; what the ABI preserves lies on the stack

extern "C" void mock_switch(void **from, void *to);
asm(R"(
.text
.type mock_switch, @function
mock_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size mock_switch, . - mock_switch
)");

void prepare(Context &context, char *stack, void (*entry)()) {
    // As if `entry` had been called, with its return address at the end of the stack.
    auto **top = reinterpret_cast<void **>(stack + STACK);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context = top;
}

void switch_to(Context &from, Context &to) { mock_switch(&from, to); }
#else
using Context = ucontext_t;

void prepare(Context &context, char *stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}

void switch_to(Context &from, Context &to) { swapcontext(&from, &to); }
#endif

// ---- a block

enum class State : uint8_t { Fresh, Running, AtBlockBarrier, AtWarpBarrier, Woken, Done };

struct Fiber {
    Context context;
};

struct Thread {
    State state;
    Fiber *fiber;                          // where it parked
    unsigned mask;                         // of the lanes that its warp's barrier is for
    alignas(16) unsigned char given[16];   // what a shuffle hands to the others
};

struct Launch {
    const mock_cuda_kernel *kernel;
    void **arguments;
    std::vector<unsigned> order;     // of the threads of a block
    std::vector<Thread> threads;     // of the block that runs
    size_t begun;                    // threads of `order` that are not fresh
    size_t parked;
    std::vector<unsigned> woken;     // parked threads whose barrier is open
    unsigned current;
    Fiber *active;
    std::vector<Fiber *> idle;
    Context home;
    uint64_t drawn;                  // how often `draw` was called, in all launches
};

Launch launch;

uint64_t draw() {
    uint64_t z = seed() * 0xD1342543DE82EF95 + ++launch.drawn * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

template <class T>
void shuffle(std::vector<T> &values) {
    if (seed() == 0) return;
    for (size_t i = values.size(); i > 1; i--) std::swap(values[i - 1], values[draw() % i]);
}

void become(unsigned thread) {
    auto &d = mock_blockDim;
    launch.current = thread;
    launch.threads[thread].state = State::Running;
    mock_threadIdx = {thread % d.x, thread / d.x % d.y, thread / d.x / d.y};
}

// A fiber: runs threads that have not begun, one after the other. Where one parks, this comes back when it is woken.
void run_fresh_threads() {
    for (;;) {
        while (launch.begun < launch.order.size()) {
            unsigned thread = launch.order[launch.begun++];
            become(thread);
            launch.kernel->run(launch.arguments);
            launch.threads[thread].state = State::Done;
        }
        Fiber *self = launch.active;
        launch.idle.push_back(self);
        switch_to(self->context, launch.home);
    }
}

Fiber *free_fiber() {
    if (!launch.idle.empty()) {
        Fiber *fiber = launch.idle.back();
        launch.idle.pop_back();
        return fiber;
    }
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) die("no stack for a thread of %s", launch.kernel->name);
    mprotect(stack, 4096, PROT_NONE);  // what overflows faults
    auto *fiber = new Fiber;
    prepare(fiber->context, static_cast<char *>(stack), run_fresh_threads);
    return fiber;
}

void go_on(Fiber *fiber) {
    launch.active = fiber;
    switch_to(launch.home, fiber->context);
}

void park(State state) {
    Thread &thread = launch.threads[launch.current];
    thread.state = state;
    thread.fiber = launch.active;
    launch.parked++;
    switch_to(thread.fiber->context, launch.home);
}

void wake(std::vector<unsigned> threads) {
    shuffle(threads);
    launch.parked -= threads.size();
    for (unsigned t : threads) launch.threads[t].state = State::Woken;
    // The last is taken first.
    launch.woken.insert(launch.woken.end(), threads.rbegin(), threads.rend());
}

// Opens the barrier of a thread's warp if all lanes of its mask came to it or have ended.
bool open_warp(unsigned thread) {
    unsigned first = thread / WARP * WARP, mask = launch.threads[thread].mask;
    std::vector<unsigned> there;
    for (unsigned t = first; t < std::min<size_t>(first + WARP, launch.threads.size()); t++) {
        auto &other = launch.threads[t];
        if (!(mask >> (t - first) & 1) || other.state == State::Done) continue;
        if (other.state != State::AtWarpBarrier) return false;
        if (other.mask != mask) die("%s: lanes of one warp wait with masks %x and %x", launch.kernel->name, mask, other.mask);
        there.push_back(t);
    }
    wake(std::move(there));
    return true;
}

// After all threads began and none can go on.
void open_barriers() {
    std::vector<unsigned> at_block;
    for (unsigned t = 0; t < launch.threads.size(); t++) {
        if (launch.threads[t].state == State::AtWarpBarrier && open_warp(t)) return;
        if (launch.threads[t].state == State::AtBlockBarrier) at_block.push_back(t);
    }
    if (at_block.size() != launch.parked)
        die("%s hangs: %zu threads of a block wait for all, %zu for lanes of their warp that do not come", launch.kernel->name,
            at_block.size(), launch.parked - at_block.size());
    wake(std::move(at_block));
}

void run_block() {
    launch.threads.assign(launch.order.size(), Thread{State::Fresh, nullptr, 0, {}});
    launch.begun = launch.parked = 0;
    for (;;) {
        if (!launch.woken.empty()) {
            unsigned thread = launch.woken.back();
            launch.woken.pop_back();
            become(thread);
            go_on(launch.threads[thread].fiber);
        } else if (launch.begun < launch.order.size()) {
            go_on(free_fiber());
        } else if (launch.parked > 0) {
            open_barriers();
            continue;
        } else {
            return;
        }
        // A warp's barrier opens as soon as it can: so few fibers suffice.
        if (launch.threads[launch.current].state == State::AtWarpBarrier) open_warp(launch.current);
    }
}

}  // namespace

void run_kernel(const mock_cuda_kernel &kernel, Dim grid, Dim block, size_t shared_bytes, void **arguments) {
    launch.kernel = &kernel;
    launch.arguments = arguments;
    launch.order.resize(size_t(block.x) * block.y * block.z);
    for (size_t i = 0; i < launch.order.size(); i++) launch.order[i] = i;
    shuffle(launch.order);
    mock_blockDim = block;
    mock_gridDim = grid;
    std::vector<unsigned char> shared(shared_bytes + 16, 0xFF);
    mock_dynamic_shared = shared.data() + (-uintptr_t(shared.data()) & 15);
    size_t blocks = size_t(grid.x) * grid.y * grid.z;
    size_t first = seed() == 0 ? 0 : draw() % blocks;
    for (size_t i = 0; i < blocks; i++) {
        size_t b = (first + i) % blocks;
        mock_blockIdx = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
        memset(shared.data(), 0xFF, shared.size());
        run_block();
    }
}

}  // namespace mock

extern "C" {
void mock_syncthreads() { mock::park(mock::State::AtBlockBarrier); }

void mock_syncwarp(unsigned mask) {
    mock::launch.threads[mock::launch.current].mask = mask;
    mock::park(mock::State::AtWarpBarrier);
}

// Gives `value` to the lanes of `mask` and takes that of `lane`, all lanes at once.
void mock_shuffle(unsigned mask, void *value, size_t bytes, unsigned lane) {
    using namespace mock;
    unsigned self = launch.current, from = self / WARP * WARP + lane;
    memcpy(launch.threads[self].given, value, bytes);
    mock_syncwarp(mask);
    if (from >= launch.threads.size() || !(mask >> lane & 1) || launch.threads[from].state == State::Done)
        die("%s: thread %u reads what lane %u of its warp gives, which takes no part", launch.kernel->name, self, lane);
    memcpy(value, launch.threads[from].given, bytes);
    mock_syncwarp(mask);
}

// The lanes of `mask`, as bits, whose `predicate` holds.
unsigned mock_ballot(unsigned mask, int predicate) {
    using namespace mock;
    unsigned self = launch.current, first = self / WARP * WARP, bits = 0;
    memcpy(launch.threads[self].given, &predicate, sizeof predicate);
    mock_syncwarp(mask);
    for (unsigned lane = 0; lane < WARP && first + lane < launch.threads.size(); lane++) {
        int other = 0;
        if (mask >> lane & 1 && launch.threads[first + lane].state != State::Done)
            memcpy(&other, launch.threads[first + lane].given, sizeof other);
        bits |= unsigned(other != 0) << lane;
    }
    mock_syncwarp(mask);
    return bits;
}

unsigned mock_lane() { return mock::launch.current % mock::WARP; }
}
