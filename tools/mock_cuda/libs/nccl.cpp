// A mock of NCCL: collectives among threads and processes of one machine, in the order of each communicator.
//
//     the stream reaches a collective -> this rank's elements go to its mailbox -> all ranks' have arrived
//     -> the rank computes its result from the mailboxes -> the stream continues
//
// Mailboxes are unnamed memory, which other processes open through this process's descriptors, so nothing is left when
// a process ends. A rank has two mailboxes and alternates between them: a rank that starts collective k + 1 has
// finished k, which it could do only after all peers had finished k - 1.
//
// For a nonblocking communicator (ncclConfig_t), a call behaves as NCCL's may: the collective is on the stream only
// after ncclCommGetAsyncError has reported that nothing is in progress, and no other call is accepted before.
//
// If ranks make different calls, none of them continues, as with NCCL, and a message reports it. ncclCommAbort ends the
// wait. A peer that has died or aborted is an asynchronous error. Sums are computed in an order that differs from
// element to element, as in a ring, and are rounded to the elements' type after each addition: no program may depend on
// them.

#include "../driver/mock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, F16, F32, F64, BF16, TYPES };
enum Reduction { SUM, PROD, MAX, MIN, AVG, REDUCTIONS };
enum Kind : uint64_t { ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL };

constexpr int MOST_RANKS = 64;
constexpr auto SAID_AFTER = std::chrono::seconds(1);
// How long a collective may wait for the host before it starts on its own, as on a GPU.
constexpr auto LATENCY = std::chrono::milliseconds(1);

size_t size_of(Type type) {
    static const size_t sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

const char *name_of(uint64_t kind) {
    static const char *names[] = {"nothing", "an all-reduce", "a reduce", "a reduce-scatter", "an all-gather", "a broadcast", "an all-to-all"};
    return kind <= ALL_TO_ALL ? names[kind] : "something";
}

// The current call of a rank, which is the same on all ranks.
struct Call {
    uint64_t kind = 0, type = 0, reduction = 0, root = 0, count = 0;
    bool operator==(const Call &) const = default;
};

// The state of a rank that its peers can see.
struct Seat {
    std::atomic<int> pid, joined, aborted, left;
    int mailboxes[2], messages[MOST_RANKS];      // descriptors; messages to each peer
    std::atomic<uint64_t> arrived;               // number of collectives that it has started
    Call calls[2];                               // the last two calls
    std::atomic<uint64_t> sent[MOST_RANKS];      // number of messages to each peer
    std::atomic<uint64_t> taken[MOST_RANKS];     // number of messages from each peer
    uint64_t bytes[MOST_RANKS];                  // size of the last message to each peer
};

struct Table {
    std::atomic<int> size;
    Seat seats[MOST_RANKS];
};

struct Id {  // 128 bytes, like NCCL's
    uint64_t magic;
    int pid, descriptor;
    char rest[112];
};
static_assert(sizeof(Id) == 128);

struct Config {  // the start of ncclConfig_t
    size_t size;
    unsigned magic, version;
    int blocking;
};
constexpr uint64_t MAGIC = 0x6D6F636B6E63636C;

// The complete memory behind a descriptor of this or another process.
struct Shared {
    int descriptor = -1;

    static Shared fresh() {
        int fd = memfd_create("mock_nccl", MFD_CLOEXEC);
        if (fd < 0) mock::die("nccl: cannot share memory: %s", strerror(errno));
        return {fd};
    }

    static Shared of(int pid, int descriptor) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
        return {open(path, O_RDWR | O_CLOEXEC)};
    }

    void write(const void *from, size_t bytes) const {
        if (ftruncate(descriptor, off_t(bytes)) != 0) mock::die("nccl: cannot share %zu bytes: %s", bytes, strerror(errno));
        for (size_t at = 0; at < bytes;) {
            ssize_t n = pwrite(descriptor, static_cast<const char *>(from) + at, bytes - at, off_t(at));
            if (n <= 0) mock::die("nccl: cannot share %zu bytes: %s", bytes, strerror(errno));
            at += size_t(n);
        }
    }

    bool read(void *to, size_t bytes, size_t from) const {
        for (size_t at = 0; at < bytes;) {
            ssize_t n = pread(descriptor, static_cast<char *>(to) + at, bytes - at, off_t(from + at));
            if (n <= 0) return false;
            at += size_t(n);
        }
        return true;
    }
};

// Returns whether a process is running. A process that has ended may still exist until its parent waits for it.
bool is_alive(int pid) {
    if (pid == getpid()) return true;
    char path[64], state = 'X';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (FILE *file = fopen(path, "r")) {
        if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
        fclose(file);
    }
    return state != 'Z' && state != 'X';
}

struct Comm {
    Table *table;
    int rank, size, device;
    Shared mailboxes[MOST_RANKS][2];
    Shared from[MOST_RANKS], to[MOST_RANKS];  // messages
    uint64_t issued = 0;
    std::atomic<int> pending{0};
    std::atomic<bool> aborted{false};
    bool blocking = true;
    std::atomic<int> joined{SUCCESS};              // IN_PROGRESS while peers join concurrently with the host
    std::vector<std::function<void()>> put_off;   // calls that are not on their streams yet
    int asked = 0;                                // how often the host has asked for them

    Seat &seat(int r) const { return table->seats[r]; }

    bool has_lost_a_peer() const {
        for (int r = 0; r < size; r++) {
            Seat &s = seat(r);
            if (s.aborted && r != rank) return true;
            if (!s.left && !is_alive(s.pid)) return true;
        }
        return false;
    }
};
using CommRef = std::shared_ptr<Comm>;

struct Handle {  // the program's handle
    CommRef comm;
};

float widen(const void *p, Type type, size_t i) {
    switch (type) {
        case F16: return __half2float(static_cast<const __half *>(p)[i]);
        case BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
        default: return static_cast<const float *>(p)[i];
    }
}

void put(void *p, Type type, size_t i, float v) {
    switch (type) {
        case F16: static_cast<__half *>(p)[i] = __float2half(v); break;
        case BF16: static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16(v); break;
        default: static_cast<float *>(p)[i] = v;
    }
}

template <class T>
T joined(T a, T b, uint64_t how) {
    switch (how) {
        case PROD: return T(a * b);
        case MAX: return std::max(a, b);
        case MIN: return std::min(a, b);
        default: return T(a + b);
    }
}

// Reduces element `i` of all parts, from rank `first` on around the ring.
template <class T>
void reduce_as(T *to, const std::vector<const void *> &parts, size_t count, uint64_t how, size_t ranks) {
    for (size_t i = 0; i < count; i++) {
        size_t first = i % ranks;
        T value = static_cast<const T *>(parts[first])[i];
        for (size_t r = 1; r < ranks; r++) value = joined(value, static_cast<const T *>(parts[(first + r) % ranks])[i], how);
        to[i] = how == AVG ? T(value / T(ranks)) : value;
    }
}

void reduce(void *to, const std::vector<const void *> &parts, size_t count, Type type, uint64_t how) {
    size_t ranks = parts.size();
    switch (type) {
        case INT8: return reduce_as(static_cast<int8_t *>(to), parts, count, how, ranks);
        case UINT8: return reduce_as(static_cast<uint8_t *>(to), parts, count, how, ranks);
        case INT32: return reduce_as(static_cast<int32_t *>(to), parts, count, how, ranks);
        case UINT32: return reduce_as(static_cast<uint32_t *>(to), parts, count, how, ranks);
        case INT64: return reduce_as(static_cast<int64_t *>(to), parts, count, how, ranks);
        case UINT64: return reduce_as(static_cast<uint64_t *>(to), parts, count, how, ranks);
        case F64: return reduce_as(static_cast<double *>(to), parts, count, how, ranks);
        default: break;
    }
    for (size_t i = 0; i < count; i++) {
        size_t first = i % ranks;
        float value = widen(parts[first], type, i);
        for (size_t r = 1; r < ranks; r++) {
            value = joined(value, widen(parts[(first + r) % ranks], type, i), how);
            put(to, type, i, value);
            value = widen(to, type, i);
        }
        put(to, type, i, how == AVG ? value / float(ranks) : value);
    }
}

// Returns the number of elements that a rank sends in a call.
size_t given(const Call &call, int rank, int size) {
    switch (call.kind) {
        case REDUCE_SCATTER: case ALL_TO_ALL: return call.count * size;
        case BROADCAST: return uint64_t(rank) == call.root ? call.count : 0;
        default: return call.count;
    }
}

// A collective in a stream.
struct Collective {
    CommRef comm;
    Call call;
    const void *send;
    void *receive;
    uint64_t number;
    bool begun = false, said = false;
    std::chrono::steady_clock::time_point since = {};

    void begin() {
        begun = true;
        since = std::chrono::steady_clock::now();
        Seat &own = comm->seat(comm->rank);
        size_t bytes = given(call, comm->rank, comm->size) * size_of(Type(call.type));
        comm->mailboxes[comm->rank][number % 2].write(send, bytes);
        own.calls[number % 2] = call;
        own.arrived.store(number + 1, std::memory_order_release);
    }

    bool ready() {
        if (comm->aborted) return true;
        if (!begun) begin();
        for (int r = 0; r < comm->size; r++) {
            Seat &peer = comm->seat(r);
            if (peer.arrived.load(std::memory_order_acquire) <= number) return false;
            const Call &theirs = peer.calls[number % 2];
            if (theirs == call) continue;
            if (!said && std::chrono::steady_clock::now() - since > SAID_AFTER) {
                said = true;
                fprintf(stderr, "mock_cuda: nccl: rank %d is in %s of %llu elements, rank %d in %s of %llu: both wait "
                        "forever\n",
                        comm->rank, name_of(call.kind), (unsigned long long)call.count, r, name_of(theirs.kind),
                        (unsigned long long)theirs.count);
            }
            return false;
        }
        return true;
    }

    void run() {
        if (comm->aborted) return;
        auto type = Type(call.type);
        size_t size = size_of(type), count = call.count, ranks = comm->size;
        auto read = [&](size_t r, void *to, size_t elements, size_t from) {
            if (!comm->mailboxes[r][number % 2].read(to, elements * size, from * size))
                mock::die("nccl: the elements of rank %zu cannot be read: %s", r, strerror(errno));
        };
        auto *to = static_cast<char *>(receive);
        auto sum = [&](size_t from) {
            std::vector<std::vector<char>> parts(ranks, std::vector<char>(count * size));
            std::vector<const void *> starts;
            for (size_t r = 0; r < ranks; r++) {
                read(r, parts[r].data(), count, from);
                starts.push_back(parts[r].data());
            }
            reduce(to, starts, count, type, call.reduction);
        };
        switch (call.kind) {
            case ALL_REDUCE: sum(0); break;
            case REDUCE: if (uint64_t(comm->rank) == call.root) sum(0); break;
            case REDUCE_SCATTER: sum(comm->rank * count); break;
            case ALL_GATHER: for (size_t r = 0; r < ranks; r++) read(r, to + r * count * size, count, 0); break;
            case ALL_TO_ALL: for (size_t r = 0; r < ranks; r++) read(r, to + r * count * size, count, comm->rank * count); break;
            case BROADCAST: read(call.root, to, count, 0); break;
        }
    }
};

// The messages of one group in a stream, which all progress concurrently.
struct Message {
    bool is_send;
    int peer;
    void *memory;
    size_t bytes;
    bool done = false;
};

struct Messages {
    CommRef comm;
    std::vector<Message> all;

    void advance(Message &m) {
        Seat &own = comm->seat(comm->rank), &peer = comm->seat(m.peer);
        if (m.is_send) {
            uint64_t sent = own.sent[m.peer];
            if (peer.taken[comm->rank].load(std::memory_order_acquire) != sent) return;
            comm->to[m.peer].write(m.memory, m.bytes);
            own.bytes[m.peer] = m.bytes;
            own.sent[m.peer].store(sent + 1, std::memory_order_release);
        } else {
            uint64_t taken = own.taken[m.peer];
            if (peer.sent[comm->rank].load(std::memory_order_acquire) == taken) return;
            if (peer.bytes[comm->rank] != m.bytes)
                mock::die("nccl: rank %d receives %zu bytes from rank %d, which sends %llu", comm->rank, m.bytes, m.peer,
                          (unsigned long long)peer.bytes[comm->rank]);
            if (!comm->from[m.peer].read(m.memory, m.bytes, 0))
                mock::die("nccl: a message from rank %d cannot be read", m.peer);
            own.taken[m.peer].store(taken + 1, std::memory_order_release);
        }
        m.done = true;
    }

    bool ready() {
        if (comm->aborted) return true;
        // Messages between two ranks in one direction arrive in order.
        for (size_t i = 0; i < all.size(); i++) {
            auto same = [&](const Message &m) { return !m.done && m.peer == all[i].peer && m.is_send == all[i].is_send; };
            if (!all[i].done && std::none_of(all.begin(), all.begin() + long(i), same)) advance(all[i]);
        }
        return std::all_of(all.begin(), all.end(), [](const Message &m) { return m.done; });
    }
};

// Lets collectives that no host waits for continue after a while.
void keep_going() {
    static std::atomic<bool> begun{false};
    if (begun.exchange(true)) return;
    std::thread([] {
        for (;;) {
            std::this_thread::sleep_for(LATENCY);
            mock_cuda_progress();
        }
    }).detach();
}

struct Group {
    int depth = 0;
    std::vector<std::pair<void *, std::shared_ptr<Messages>>> messages;  // by stream
    std::vector<CommRef> joining;
    std::vector<Handle **> handles;
};
thread_local Group group;
thread_local const char *last_error = "";

Result refuse(Result result, const char *why) {
    last_error = why;
    return result;
}

template <class T>
void enqueue(void *stream, const char *name, std::shared_ptr<T> what) {
    using Ref = std::shared_ptr<T>;
    auto now = [stream, name, what] {
        what->comm->pending++;
        mock_cuda_enqueue_when(
            stream, name, [](void *state) { return (*static_cast<Ref *>(state))->ready(); },
            [](void *state) {
                auto &what = **static_cast<Ref *>(state);
                if constexpr (requires { what.run(); }) what.run();
                what.comm->pending--;
            },
            [](void *state) { delete static_cast<Ref *>(state); }, new Ref(what));
        keep_going();
    };
    if (what->comm->blocking) now();
    else what->comm->put_off.push_back(now);
}

// Returns whether a communicator accepts a call.
Result taken(const Comm &comm) {
    if (comm.joined == SUCCESS && comm.put_off.empty()) return SUCCESS;
    return refuse(INVALID_USAGE, "a call before ncclCommGetAsyncError has reported that the last one is done");
}

Result collective(const char *name, const void *send, void *receive, Call call, Handle *handle, void *stream) {
    if (!handle || !handle->comm) return refuse(INVALID_ARGUMENT, "the communicator is null");
    auto &comm = *handle->comm;
    if (call.type >= TYPES || call.reduction >= REDUCTIONS || call.root >= uint64_t(comm.size))
        return refuse(INVALID_ARGUMENT, "an unknown type, operation or root");
    if (mock_cuda_current_device() != comm.device) return refuse(INVALID_USAGE, "the current device is not the communicator's");
    if (Result r = taken(comm); r != SUCCESS) return r;
    bool gives = given(call, comm.rank, comm.size) > 0, receives = call.count > 0 && (call.kind != REDUCE || call.root == uint64_t(comm.rank));
    auto what = std::make_shared<Collective>();
    what->comm = handle->comm;
    what->call = call;
    what->send = gives ? mock_cuda_pointer(name, send) : nullptr;
    what->receive = receives ? mock_cuda_pointer(name, receive) : nullptr;
    what->number = comm.issued++;
    enqueue(stream, name, what);
    return comm.blocking ? SUCCESS : IN_PROGRESS;
}

Result message(const char *name, bool is_send, const void *memory, size_t count, int type, int peer, Handle *handle, void *stream) {
    if (!handle || !handle->comm || type < 0 || type >= TYPES || peer < 0 || peer >= handle->comm->size)
        return refuse(INVALID_ARGUMENT, "an unknown communicator, type or rank");
    if (mock_cuda_current_device() != handle->comm->device)
        return refuse(INVALID_USAGE, "the current device is not the communicator's");
    if (Result r = taken(*handle->comm); r != SUCCESS) return r;
    void *at = count ? mock_cuda_pointer(name, memory) : nullptr;
    Message m = {is_send, peer, at, count * size_of(Type(type))};
    auto &open = group.messages;
    auto mine = std::find_if(open.begin(), open.end(), [&](auto &g) { return g.first == stream && g.second->comm == handle->comm; });
    if (mine == open.end()) mine = open.insert(open.end(), {stream, std::make_shared<Messages>(Messages{handle->comm, {}})});
    mine->second->all.push_back(m);
    if (group.depth == 0) {
        auto all = std::move(group.messages);
        group.messages.clear();
        for (auto &[s, messages] : all) enqueue(s, name, messages);
        if (!handle->comm->blocking) return IN_PROGRESS;
    }
    return SUCCESS;
}

// Waits until all ranks have joined, and opens the shared memory.
Result meet(Comm &comm) {
    for (int r = 0; r < comm.size; r++)
        while (!comm.seat(r).joined.load(std::memory_order_acquire)) {
            if (comm.seat(comm.rank).aborted) return refuse(INVALID_USAGE, "the communicator was aborted");
            usleep(200);
        }
    for (int r = 0; r < comm.size; r++) {
        Seat &s = comm.seat(r);
        if (r != comm.rank)
            for (int i : {0, 1}) comm.mailboxes[r][i] = Shared::of(s.pid, s.mailboxes[i]);
        comm.from[r] = Shared::of(s.pid, s.messages[comm.rank]);
        if (comm.mailboxes[r][0].descriptor < 0 || comm.from[r].descriptor < 0)
            return refuse(SYSTEM_ERROR, "a rank has ended");
    }
    return SUCCESS;
}

void close_all(Comm &comm) {
    for (int r = 0; r < comm.size; r++) {
        for (auto shared : {comm.mailboxes[r][0], comm.mailboxes[r][1], comm.from[r], comm.to[r]})
            if (shared.descriptor >= 0) close(shared.descriptor);
        comm.mailboxes[r][0] = comm.mailboxes[r][1] = comm.from[r] = comm.to[r] = {};
    }
}

}  // namespace

extern "C" {

Result ncclGetVersion(int *version) {
    *version = 23000;
    return SUCCESS;
}

const char *ncclGetErrorString(Result result) {
    switch (result) {
        case SUCCESS: return "no error";
        case SYSTEM_ERROR: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE_ERROR: return "remote process exited or there was a network error";
        default: return "unknown result code";
    }
}

const char *ncclGetLastError(Handle *) { return last_error; }

Result ncclGetUniqueId(Id *id) {
    // Kept permanently, because other ranks may join late.
    Shared shared = Shared::fresh();
    if (ftruncate(shared.descriptor, sizeof(Table)) != 0) return refuse(SYSTEM_ERROR, "cannot share memory");
    *id = {MAGIC, getpid(), shared.descriptor, {}};
    return SUCCESS;
}

Result ncclGroupStart() {
    group.depth++;
    return SUCCESS;
}

Result ncclGroupEnd() {
    if (group.depth == 0) return refuse(INVALID_USAGE, "no group has begun");
    if (--group.depth > 0) return SUCCESS;
    Result result = SUCCESS;
    for (auto &comm : std::exchange(group.joining, {}))
        if (Result r = meet(*comm); r != SUCCESS) result = r;
    for (auto &[stream, messages] : std::exchange(group.messages, {})) {
        enqueue(stream, "messages of a group", messages);
        if (!messages->comm->blocking && result == SUCCESS) result = IN_PROGRESS;
    }
    return result;
}

Result ncclCommInitRankConfig(Handle **handle, int size, Id id, int rank, const Config *config) {
    if (config && (config->magic != 0xCAFEBEEF || config->size < sizeof(Config)))
        return refuse(INVALID_ARGUMENT, "an invalid configuration");
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size || id.magic != MAGIC)
        return refuse(INVALID_ARGUMENT, "an invalid size, rank or id");
    int device = mock_cuda_current_device();
    if (device < 0) return refuse(INVALID_USAGE, "no device is current");
    Shared shared = Shared::of(id.pid, id.descriptor);
    if (shared.descriptor < 0) return refuse(SYSTEM_ERROR, "the process that created the id has ended");
    void *at = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, shared.descriptor, 0);
    close(shared.descriptor);
    if (at == MAP_FAILED) return refuse(SYSTEM_ERROR, "cannot share memory");
    auto comm = std::make_shared<Comm>();
    comm->table = static_cast<Table *>(at);
    comm->rank = rank;
    comm->size = size;
    comm->device = device;
    Seat &seat = comm->seat(rank);
    if (seat.joined) return refuse(INVALID_USAGE, "the rank is taken");
    int unset = 0;
    if (!comm->table->size.compare_exchange_strong(unset, size) && unset != size)
        return refuse(INVALID_USAGE, "ranks differ in the number of ranks");
    for (int i : {0, 1}) seat.mailboxes[i] = (comm->mailboxes[rank][i] = Shared::fresh()).descriptor;
    for (int r = 0; r < size; r++) seat.messages[r] = (comm->to[r] = Shared::fresh()).descriptor;
    seat.pid = getpid();
    seat.joined.store(1, std::memory_order_release);
    *handle = new Handle{comm};
    if (config && config->blocking == 0) {
        comm->blocking = false;
        comm->joined = IN_PROGRESS;
        std::thread([comm] { comm->joined = meet(*comm); }).detach();
        return IN_PROGRESS;
    }
    if (group.depth > 0) {
        group.joining.push_back(comm);
        return SUCCESS;
    }
    return meet(*comm);
}

Result ncclCommInitRank(Handle **handle, int size, Id id, int rank) { return ncclCommInitRankConfig(handle, size, id, rank, nullptr); }

Result ncclCommCount(Handle *handle, int *count) {
    *count = handle->comm->size;
    return SUCCESS;
}

Result ncclCommUserRank(Handle *handle, int *rank) {
    *rank = handle->comm->rank;
    return SUCCESS;
}

Result ncclCommCuDevice(Handle *handle, int *device) {
    *device = handle->comm->device;
    return SUCCESS;
}

Result ncclCommGetAsyncError(Handle *handle, Result *error) {
    Comm &comm = *handle->comm;
    *error = Result(comm.joined.load());
    if (*error != SUCCESS) return SUCCESS;
    if (!comm.put_off.empty() && comm.asked++ == 0) {
        *error = IN_PROGRESS;
        return SUCCESS;
    }
    comm.asked = 0;
    for (auto &now : std::exchange(comm.put_off, {})) now();
    *error = comm.has_lost_a_peer() ? REMOTE_ERROR : SUCCESS;
    return SUCCESS;
}

// Collectives in progress end without a result.
Result ncclCommAbort(Handle *handle) {
    auto &comm = *handle->comm;
    comm.seat(comm.rank).aborted = 1;
    comm.aborted = true;
    delete handle;
    return SUCCESS;
}

Result ncclCommFinalize(Handle *) { return SUCCESS; }

// Waits for collectives in progress, like NCCL.
Result ncclCommDestroy(Handle *handle) {
    auto comm = handle->comm;
    while (comm->pending > 0 && !comm->aborted) {
        mock_cuda_progress();
        usleep(50);
    }
    comm->seat(comm->rank).left = 1;
    // Peers may still read this rank's data, so wait until all have left.
    std::thread([comm] {
        for (int r = 0; r < comm->size; r++) {
            Seat &s = comm->seat(r);
            while (!s.left && !s.aborted && is_alive(s.pid)) usleep(1000);
        }
        close_all(*comm);
    }).detach();
    delete handle;
    return SUCCESS;
}

Result ncclAllReduce(const void *send, void *receive, size_t count, uint64_t type, uint64_t op, Handle *comm, void *stream) {
    return collective("ncclAllReduce", send, receive, {ALL_REDUCE, uint32_t(type), uint32_t(op), 0, count}, comm, stream);
}

Result ncclReduce(const void *send, void *receive, size_t count, uint64_t type, uint64_t op, int root, Handle *comm, void *stream) {
    return collective("ncclReduce", send, receive, {REDUCE, uint32_t(type), uint32_t(op), uint64_t(root), count}, comm, stream);
}

Result ncclReduceScatter(const void *send, void *receive, size_t count, uint64_t type, uint64_t op, Handle *comm, void *stream) {
    return collective("ncclReduceScatter", send, receive, {REDUCE_SCATTER, uint32_t(type), uint32_t(op), 0, count}, comm, stream);
}

Result ncclAllGather(const void *send, void *receive, size_t count, uint64_t type, Handle *comm, void *stream) {
    return collective("ncclAllGather", send, receive, {ALL_GATHER, uint32_t(type), 0, 0, count}, comm, stream);
}

Result ncclBroadcast(const void *send, void *receive, size_t count, uint64_t type, int root, Handle *comm, void *stream) {
    return collective("ncclBroadcast", send, receive, {BROADCAST, uint32_t(type), 0, uint64_t(root), count}, comm, stream);
}

Result ncclAlltoAll(const void *send, void *receive, size_t count, uint64_t type, Handle *comm, void *stream) {
    return collective("ncclAlltoAll", send, receive, {ALL_TO_ALL, uint32_t(type), 0, 0, count}, comm, stream);
}

Result ncclSend(const void *send, size_t count, int type, int peer, Handle *comm, void *stream) {
    return message("ncclSend", true, send, count, type, peer, comm, stream);
}

Result ncclRecv(void *receive, size_t count, int type, int peer, Handle *comm, void *stream) {
    return message("ncclRecv", false, receive, count, type, peer, comm, stream);
}
}
