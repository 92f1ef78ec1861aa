// Blocks of threads on one processor.
//
// A block's threads run one after the other as plain calls on one fiber. A thread that reaches a barrier or a shuffle
// keeps its fiber and parks, and the next threads continue on another fiber. When all threads have started, the
// barriers that all their threads have reached are opened, and the parked threads continue, in an order that depends on
// the seed:
//
//     fiber 1:  t0 ...... barrier |             | t0 ... end
//     fiber 2:                    t1 .. barrier |            | t1 ... end
//     block:                                    opens the barrier
//
// Threads that have ended do not count for barriers, as on the hardware since Volta. If no barrier can open, the kernel
// would hang, so this is an error that names the kernel. Blocks run one after the other, in an order that also depends
// on the seed.

#include "mock.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

// The variables that kernels read. See host/kernel.h.
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
using Context = void *;  // the stack pointer; the registers that the ABI preserves are on the stack

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
    // The state as if `entry` had been called, with its return address at the end of the stack.
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

constexpr size_t LARGEST_SHUFFLE = 16;

struct Thread {
    Fiber *fiber;   // the fiber on which it is parked
    unsigned mask;  // the lanes of its warp's barrier
    unsigned round; // the number of its shuffles
    // The values for other threads, in even and odd rounds: no thread enters a round before all have read the values of
    // the round before last.
    alignas(16) unsigned char given[2][LARGEST_SHUFFLE];
};

struct Launch {
    const mock_cuda_kernel *kernel;
    void **arguments;
    std::vector<unsigned> order;     // of a block's threads
    std::vector<State> states;       // of the running block
    std::vector<Thread> threads;
    std::vector<uint8_t> at_warp;    // number of lanes of each warp at its barrier
    std::vector<unsigned> living;    // lanes of each warp that have not ended, as bits
    size_t begun;                    // threads of `order` that have started
    size_t parked;
    std::vector<unsigned> woken;     // parked threads whose barrier is open; the last one runs first
    unsigned current;
    Fiber *active;
    std::vector<Fiber *> idle;
    Context home;
    uint64_t drawn;                  // number of calls of `draw`, in all launches
};

Launch launch;

uint64_t draw() {
    uint64_t z = seed() * 0xD1342543DE82EF95 + ++launch.drawn * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

void shuffle(std::vector<unsigned> &values, size_t from = 0) {
    if (seed() == 0) return;
    for (size_t i = values.size() - from; i > 1; i--) std::swap(values[from + i - 1], values[from + draw() % i]);
}

void become(unsigned thread) {
    auto &d = mock_blockDim;
    launch.current = thread;
    launch.states[thread] = State::Running;
    mock_threadIdx = d.y == 1 && d.z == 1 ? Dim{thread, 0, 0} : Dim{thread % d.x, thread / d.x % d.y, thread / d.x / d.y};
}

// Runs threads that have not started, one after the other, on a fiber. If one parks, this continues when it is woken.
void run_fresh_threads();

Fiber *free_fiber() {
    if (!launch.idle.empty()) {
        Fiber *fiber = launch.idle.back();
        launch.idle.pop_back();
        return fiber;
    }
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) die("no stack for a thread of %s", launch.kernel->name);
    mprotect(stack, 4096, PROT_NONE);  // a stack overflow faults
    auto *fiber = new Fiber;
    prepare(fiber->context, static_cast<char *>(stack), run_fresh_threads);
    return fiber;
}

// Returns the next context to run: a woken thread, a fiber for fresh ones, or the block.
Context &next() {
    if (!launch.woken.empty()) {
        unsigned thread = launch.woken.back();
        launch.woken.pop_back();
        become(thread);
        launch.active = launch.threads[thread].fiber;
        return launch.active->context;
    }
    if (launch.begun < launch.order.size()) {
        launch.active = free_fiber();
        return launch.active->context;
    }
    launch.active = nullptr;
    return launch.home;
}

void run_fresh_threads() {
    for (;;) {
        while (launch.begun < launch.order.size()) {
            unsigned thread = launch.order[launch.begun++];
            launch.threads[thread].round = 0;
            become(thread);
            launch.kernel->run(launch.arguments);
            launch.states[thread] = State::Done;
            launch.living[thread / WARP] &= ~(1u << thread % WARP);
        }
        Fiber *self = launch.active;
        launch.idle.push_back(self);
        switch_to(self->context, next());
    }
}

// Opens the barrier of a thread's warp if all lanes of its mask have reached it or have ended.
bool open_warp(unsigned thread) {
    unsigned first = thread / WARP * WARP, mask = launch.threads[thread].mask, came = 0;
    unsigned lanes = std::min<size_t>(WARP, launch.threads.size() - first);
    for (unsigned lane = 0; lane < lanes; lane++) {
        State state = launch.states[first + lane];
        if (!(mask >> lane & 1) || state == State::Done) continue;
        if (state != State::AtWarpBarrier) return false;
        if (unsigned other = launch.threads[first + lane].mask; other != mask)
            die("%s: lanes of one warp wait with masks %x and %x", launch.kernel->name, mask, other);
        came |= 1u << lane;
    }
    size_t from = launch.woken.size();
    for (unsigned lane = lanes; lane-- > 0;) {
        if (!(came >> lane & 1)) continue;
        launch.states[first + lane] = State::Woken;
        launch.woken.push_back(first + lane);
    }
    shuffle(launch.woken, from);
    launch.parked -= launch.woken.size() - from;
    launch.at_warp[thread / WARP] -= launch.woken.size() - from;
    return true;
}

void park(State state) {
    unsigned thread = launch.current;
    launch.states[thread] = state;
    launch.threads[thread].fiber = launch.active;
    launch.parked++;
    if (state == State::AtWarpBarrier) {
        // It opens as early as possible, so that few fibers suffice.
        unsigned came = ++launch.at_warp[thread / WARP], mask = launch.threads[thread].mask;
        if (came >= unsigned(__builtin_popcount(mask & launch.living[thread / WARP]))) open_warp(thread);
    }
    Fiber *self = launch.active;
    Context &to = next();
    if (launch.active != self) switch_to(self->context, to);
}

// Called when all threads have started and none can continue.
void open_barriers() {
    size_t at_block = 0;
    for (unsigned t = 0; t < launch.threads.size(); t++) {
        if (launch.states[t] == State::AtWarpBarrier && open_warp(t)) return;
        at_block += launch.states[t] == State::AtBlockBarrier;
    }
    if (at_block != launch.parked)
        die("%s hangs: %zu threads of a block wait for all the others, and %zu wait for lanes of their warp that do not "
            "arrive",
            launch.kernel->name, at_block, launch.parked - at_block);
    for (unsigned t = launch.threads.size(); t-- > 0;) {
        if (launch.states[t] != State::AtBlockBarrier) continue;
        launch.states[t] = State::Woken;
        launch.woken.push_back(t);
    }
    shuffle(launch.woken);
    launch.parked = 0;
}

void run_block() {
    std::fill(launch.states.begin(), launch.states.end(), State::Fresh);
    launch.begun = launch.parked = 0;
    for (size_t w = 0; w < launch.living.size(); w++) {
        size_t lanes = std::min<size_t>(WARP, launch.threads.size() - w * WARP);
        launch.living[w] = unsigned((uint64_t(1) << lanes) - 1);
    }
    for (;;) {
        if (Context &to = next(); &to != &launch.home) switch_to(launch.home, to);
        else if (launch.parked > 0) open_barriers();
        else return;
    }
}

}  // namespace

void run_kernel(const mock_cuda_kernel &kernel, Dim grid, Dim block, size_t shared_bytes, void **arguments) {
    launch.kernel = &kernel;
    launch.arguments = arguments;
    launch.order.resize(size_t(block.x) * block.y * block.z);
    for (size_t i = 0; i < launch.order.size(); i++) launch.order[i] = i;
    shuffle(launch.order);
    launch.states.resize(launch.order.size());
    launch.threads.resize(launch.order.size());
    launch.at_warp.assign((launch.order.size() + WARP - 1) / WARP, 0);
    launch.living.resize(launch.at_warp.size());
    mock_blockDim = block;
    mock_gridDim = grid;
    // The address as on a GPU for a block without other shared memory.
    constexpr uintptr_t alignment = 128;
    std::vector<unsigned char> shared(shared_bytes + alignment, 0xFF);
    mock_dynamic_shared = shared.data() + (-uintptr_t(shared.data()) & (alignment - 1));
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

// Gives `value` to the lanes of `mask` and returns that of `lane`, for all lanes at once.
void mock_shuffle(unsigned mask, void *value, size_t bytes, unsigned lane) {
    using namespace mock;
    unsigned self = launch.current, from = self / WARP * WARP + lane;
    unsigned round = ++launch.threads[self].round;
    memcpy(launch.threads[self].given[round & 1], value, bytes);
    mock_syncwarp(mask);
    if (from >= launch.threads.size() || !(mask >> lane & 1) || launch.threads[from].round < round)
        die("%s: thread %u reads from lane %u of its warp, which takes no part", launch.kernel->name, self, lane);
    memcpy(value, launch.threads[from].given[round & 1], bytes);
}

// Returns the lanes of `mask` whose `predicate` holds, as bits.
unsigned mock_ballot(unsigned mask, int predicate) {
    using namespace mock;
    unsigned self = launch.current, first = self / WARP * WARP, bits = 0;
    unsigned round = ++launch.threads[self].round;
    memcpy(launch.threads[self].given[round & 1], &predicate, sizeof predicate);
    mock_syncwarp(mask);
    for (unsigned lane = 0; lane < WARP && first + lane < launch.threads.size(); lane++) {
        const Thread &other = launch.threads[first + lane];
        int of_other = 0;
        if (mask >> lane & 1 && other.round >= round) memcpy(&of_other, other.given[round & 1], sizeof of_other);
        bits |= unsigned(of_other != 0) << lane;
    }
    return bits;
}

unsigned mock_lane() { return mock::launch.current % mock::WARP; }
}
