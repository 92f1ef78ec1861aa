// Streams: queues whose operations run only when a host waits for them, or for an operation that was ordered after
// them.
//
// With seed 0, they run as late as possible: only the operations that the awaited moment needs. With another seed, a
// random stream that can continue is selected each time. A program with missing synchronization between two streams
// gets a different result for some seed.

#include "mock.h"

#include <algorithm>
#include <deque>
#include <map>
#include <unistd.h>

namespace mock {

struct Stream {
    int device;
    bool waits_for_legacy, is_legacy;
    std::deque<Operation> queue;
    uint64_t added = 0, done = 0;
};

bool Moment::reached() const { return !stream || stream->done >= ticket; }

namespace {

struct Streams {
    std::vector<StreamRef> all;
    std::map<int, StreamRef> legacy;
    uint64_t state = seed() * 0x9E3779B97F4A7C15;
};

Streams &streams() {
    static auto *streams = new Streams;
    return *streams;
}

uint64_t draw() {  // splitmix64
    uint64_t z = (streams().state += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

// Returns the moment that the first operation of a stream waits for, if any.
const Moment *obstacle(const Stream &stream) {
    auto &after = stream.queue.front().after;
    auto it = std::find_if(after.begin(), after.end(), [](const Moment &m) { return !m.reached(); });
    return it == after.end() ? nullptr : &*it;
}

bool is_ready(Stream &stream) { return !stream.queue.front().ready || stream.queue.front().ready(); }

void run_first(Stream &stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    running = operation.name.c_str();
    operation.run();
    running = nullptr;
    ++stream.done;
}

// Returns the stream whose first operation the awaited one needs.
Stream &needed(Stream *stream) {
    while (const Moment *m = obstacle(*stream)) stream = m->stream.get();
    return *stream;
}

StreamRef remember(Stream stream) {
    // Finished streams of finished threads are removed.
    auto &all = streams().all;
    std::erase_if(all, [](const StreamRef &s) { return s.use_count() == 1 && s->queue.empty(); });
    return all.emplace_back(std::make_shared<Stream>(std::move(stream)));
}

}  // namespace

StreamRef make_stream(int device, bool waits_for_legacy) {
    return remember({.device = device, .waits_for_legacy = waits_for_legacy, .is_legacy = false, .queue = {}});
}

StreamRef legacy_stream(int device) {
    auto &stream = streams().legacy[device];
    if (!stream) stream = remember({.device = device, .waits_for_legacy = false, .is_legacy = true, .queue = {}});
    return stream;
}

StreamRef thread_stream(int device) {
    static thread_local std::map<int, StreamRef> mine;
    auto &stream = mine[device];
    if (!stream) stream = make_stream(device, true);
    return stream;
}

int device_of(const StreamRef &stream) { return stream->device; }

Moment tail(const StreamRef &stream) { return {stream, stream->added}; }

Moment enqueue(const StreamRef &stream, Operation operation) {
    // The legacy stream and streams created without CU_STREAM_NON_BLOCKING wait for each other.
    if (stream->is_legacy) {
        for (auto &s : streams().all)
            if (s->waits_for_legacy && s->device == stream->device) operation.after.push_back(tail(s));
    } else if (stream->waits_for_legacy) {
        operation.after.push_back(tail(legacy_stream(stream->device)));
    }
    std::erase_if(operation.after, [](const Moment &m) { return m.reached(); });
    stream->queue.push_back(std::move(operation));
    return {stream, ++stream->added};
}

bool advance(const Moment &moment) {
    if (running) die("%s calls the driver", running);
    if (moment.reached()) return true;
    Stream *next = &needed(moment.stream.get());
    if (seed() != 0) {
        std::vector<Stream *> ready;
        for (auto &s : streams().all)
            if (!s->queue.empty() && !obstacle(*s) && is_ready(*s)) ready.push_back(s.get());
        if (ready.empty()) return false;
        next = ready[draw() % ready.size()];
    } else if (!is_ready(*next)) {
        return false;
    }
    run_first(*next);
    return true;
}

void run_until(const Moment &moment) {
    while (!moment.reached()) {
        if (advance(moment)) continue;
        mutex().unlock();
        usleep(50);
        mutex().lock();
    }
}

void progress() {
    // All operations that wait for peers, at any position in their stream. Others may arrive meanwhile.
    std::vector<Moment> ends;
    for (auto &s : streams().all)
        for (size_t i = s->queue.size(); i-- > 0;)
            if (s->queue[i].ready) {
                ends.push_back({s, s->done + i + 1});
                break;
            }
    for (auto &end : ends)
        while (!end.reached() && advance(end)) {}
}

void run_all(int device) {
    auto all = streams().all;
    for (auto &s : all)
        if (s->device == device) run_until(tail(s));
}

}  // namespace mock
