// A mock of cuRAND: uniform and normal numbers on a generator's stream. The numbers of a seed differ from NVIDIA's.

#include "../driver/mock.h"

#include <cmath>

namespace {

enum Status { SUCCESS = 0, LENGTH_NOT_MULTIPLE = 105 };

struct Generator {
    void *stream = nullptr;
    uint64_t seed = 0, offset = 0;
};

// Returns number `i` of a seed: splitmix64, uniform in (0, 1].
double uniform(uint64_t seed, uint64_t i) {
    uint64_t z = seed * 0xD1342543DE82EF95 + (i + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return double(((z ^ (z >> 31)) >> 11) + 1) * 0x1p-53;
}

// Returns number `i` of a series of pairs (Box and Muller).
double normal(uint64_t seed, uint64_t i) {
    double radius = std::sqrt(-2 * std::log(uniform(seed, i & ~1ull)));
    double angle = 2 * M_PI * uniform(seed, i | 1);
    return radius * (i & 1 ? std::sin(angle) : std::cos(angle));
}

template <class T>
struct Numbers {
    Generator from;
    T *to;
    size_t count;
    double mean, deviation;
    double (*number)(uint64_t, uint64_t);

    static void run(void *state) {
        auto &n = *static_cast<Numbers *>(state);
        for (size_t i = 0; i < n.count; i++)
            n.to[i] = T(n.mean + n.deviation * n.number(n.from.seed, n.from.offset + i));
    }
    static void drop(void *state) { delete static_cast<Numbers *>(state); }
};

template <class T>
Status generate(const char *name, Generator *g, T *to, size_t count, double mean, double deviation,
                double (*number)(uint64_t, uint64_t)) {
    auto *start = static_cast<T *>(mock_cuda_pointer(name, to));
    auto *state = new Numbers<T>{*g, start, count, mean, deviation, number};
    mock_cuda_enqueue(g->stream, name, Numbers<T>::run, Numbers<T>::drop, state);
    g->offset += count;
    return SUCCESS;
}

template <class T>
Status generate_normal(const char *name, Generator *g, T *to, size_t count, T mean, T deviation) {
    // cuRAND generates normal numbers in pairs.
    if (count % 2 != 0) return LENGTH_NOT_MULTIPLE;
    return generate(name, g, to, count, mean, deviation, normal);
}

}  // namespace

extern "C" {

Status curandCreateGenerator(Generator **generator, int) {
    *generator = new Generator;
    return SUCCESS;
}

Status curandDestroyGenerator(Generator *generator) {
    delete generator;
    return SUCCESS;
}

Status curandSetStream(Generator *generator, void *stream) {
    generator->stream = stream;
    return SUCCESS;
}

Status curandSetPseudoRandomGeneratorSeed(Generator *generator, unsigned long long seed) {
    generator->seed = seed;
    generator->offset = 0;
    return SUCCESS;
}

Status curandSetGeneratorOffset(Generator *generator, unsigned long long offset) {
    generator->offset = offset;
    return SUCCESS;
}

Status curandGenerateUniform(Generator *g, float *to, size_t count) {
    return generate("curandGenerateUniform", g, to, count, 0, 1, uniform);
}

Status curandGenerateUniformDouble(Generator *g, double *to, size_t count) {
    return generate("curandGenerateUniformDouble", g, to, count, 0, 1, uniform);
}

Status curandGenerateNormal(Generator *g, float *to, size_t count, float mean, float deviation) {
    return generate_normal("curandGenerateNormal", g, to, count, mean, deviation);
}

Status curandGenerateNormalDouble(Generator *g, double *to, size_t count, double mean, double deviation) {
    return generate_normal("curandGenerateNormalDouble", g, to, count, mean, deviation);
}
}
