// A mock of cuBLAS: the matrix products that candle uses, on the handle's stream.
//
// Each element is a sum in f32 (f64 for doubles) in the order of k, rounded once to the result's type. Tensor cores
// round differently, and a program must not depend on that.

#include "../driver/mock.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstring>

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };  // cudaDataType

struct Handle {
    void *stream = nullptr;
};

struct Matrix {
    const void *start;
    Type type;
    long long leading, stride;
    bool transposed;  // relative to the layout in memory, which is column-major
};

struct Product {
    int m, n, k, batches;
    double alpha, beta;
    Matrix a, b, c;
};

float load(const void *p, Type type, size_t i) {
    switch (type) {
        case F16: return __half2float(static_cast<const __half *>(p)[i]);
        case BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
        default: return static_cast<const float *>(p)[i];
    }
}

template <class T>
T load_as(const void *p, Type type, size_t i) {
    if constexpr (std::is_same_v<T, double>) return static_cast<const double *>(p)[i];
    else return load(p, type, i);
}

template <class T>
void store(void *p, Type type, size_t i, T value) {
    switch (type) {
        case F64: static_cast<double *>(p)[i] = value; break;
        case F16: static_cast<__half *>(p)[i] = __float2half(value); break;
        case BF16: static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16(value); break;
        default: static_cast<float *>(p)[i] = value;
    }
}

// The columns of sums that are computed together, so that a row of the first factor is read once for them.
constexpr int COLUMNS = 4;

template <class T>
struct Rows {
    typedef T Vector __attribute__((vector_size(64)));
    static constexpr int COUNT = sizeof(Vector) / sizeof(T);
};

// Computes the sums of some rows and columns in registers, each in the order of k. Product and sum are rounded
// separately.
template <class T>
__attribute__((target_clones("avx512f", "avx2", "default"))) void add_products(T *sums, const T *a, const T *b, int k) {
    using Vector = typename Rows<T>::Vector;
    Vector all[COLUMNS] = {};
    for (int l = 0; l < k; l++) {
        Vector rows;
        memcpy(&rows, a + size_t(l) * Rows<T>::COUNT, sizeof rows);
        for (int j = 0; j < COLUMNS; j++) all[j] += rows * b[size_t(l) * COLUMNS + j];
    }
    memcpy(sums, all, sizeof all);
}

template <class T>
void run(const Product &p) {
    constexpr int ROWS = Rows<T>::COUNT;
    int strips = (p.m + ROWS - 1) / ROWS;
    // Each strip of rows is contiguous and padded with zeros after the last row, and so are the columns.
    std::vector<T> a(size_t(strips) * ROWS * p.k), b(size_t(COLUMNS) * p.k), sums(ROWS * COLUMNS);
    for (int batch = 0; batch < p.batches; batch++) {
        auto element = [&](const Matrix &x, int row, int column) {
            size_t at = x.transposed ? row * x.leading + column : column * x.leading + row;
            return load_as<T>(x.start, x.type, batch * x.stride + at);
        };
        for (int i = 0; i < p.m; i++)
            for (int l = 0; l < p.k; l++) a[(size_t(i / ROWS) * p.k + l) * ROWS + i % ROWS] = element(p.a, i, l);
        for (int first = 0; first < p.n; first += COLUMNS) {
            int columns = std::min(COLUMNS, p.n - first);
            std::fill(b.begin(), b.end(), T(0));
            for (int j = 0; j < columns; j++)
                for (int l = 0; l < p.k; l++) b[size_t(l) * COLUMNS + j] = element(p.b, l, first + j);
            for (int strip = 0; strip < strips; strip++) {
                add_products(sums.data(), a.data() + size_t(strip) * p.k * ROWS, b.data(), p.k);
                int rows = std::min(ROWS, p.m - strip * ROWS);
                for (int j = 0; j < columns; j++)
                    for (int r = 0; r < rows; r++) {
                        int i = strip * ROWS + r;
                        T value = T(p.alpha) * sums[j * ROWS + r];
                        // With a beta of zero, the result is not read, because its contents may be arbitrary.
                        if (p.beta != 0) value += T(p.beta) * element(p.c, i, first + j);
                        size_t at = batch * p.c.stride + (first + j) * p.c.leading + i;
                        store(const_cast<void *>(p.c.start), p.c.type, at, value);
                    }
            }
        }
    }
}

Status enqueue(Handle *handle, const char *name, Product p) {
    if (!handle) return NOT_INITIALIZED;
    if (p.m < 0 || p.n < 0 || p.k < 0 || p.batches < 0) return INVALID_VALUE;
    auto rows = [](const Matrix &x, int rows, int columns) { return x.transposed ? columns : rows; };
    if (p.a.leading < std::max(1, rows(p.a, p.m, p.k)) || p.b.leading < std::max(1, rows(p.b, p.k, p.n)) ||
        p.c.leading < std::max(1, p.m))
        return INVALID_VALUE;
    if (p.m == 0 || p.n == 0 || p.batches == 0) return SUCCESS;
    for (Matrix *x : {&p.a, &p.b, &p.c}) x->start = mock_cuda_pointer(name, x->start);
    mock_cuda_enqueue(
        handle->stream, name,
        [](void *state) {
            auto &p = *static_cast<Product *>(state);
            p.c.type == F64 ? run<double>(p) : run<float>(p);
        },
        [](void *state) { delete static_cast<Product *>(state); }, new Product(p));
    return SUCCESS;
}

}  // namespace

extern "C" {

Status cublasCreate_v2(Handle **handle) {
    *handle = new Handle;
    return SUCCESS;
}

Status cublasDestroy_v2(Handle *handle) {
    delete handle;
    return SUCCESS;
}

Status cublasSetStream_v2(Handle *handle, void *stream) {
    handle->stream = stream;
    return SUCCESS;
}

Status cublasGemmStridedBatchedEx(Handle *handle, int a_op, int b_op, int m, int n, int k, const void *alpha, const void *a,
                                  Type a_type, int lda, long long a_stride, const void *b, Type b_type, int ldb,
                                  long long b_stride, const void *beta, void *c, Type c_type, int ldc, long long c_stride,
                                  int batches, int compute, int) {
    const char *name = "cublasGemmStridedBatchedEx";
    // Factors have the type of the sums: 64 and 65 are sums in half precision, 68 to 77 in f32 by various methods.
    if (compute < 68 || compute > 77 || compute == 70 || compute == 71 || compute == 72 || compute == 73)
        mock::die("%s: sums of type %d have no stand-in", name, compute);
    if (a_type != b_type || (a_type != F32 && a_type != F16 && a_type != BF16) || (c_type != F32 && c_type != a_type))
        mock::die("%s: types %d, %d and %d have no stand-in", name, a_type, b_type, c_type);
    float alpha_value = *static_cast<const float *>(alpha), beta_value = *static_cast<const float *>(beta);
    return enqueue(handle, name,
                   {m, n, k, batches, alpha_value, beta_value, {a, a_type, lda, a_stride, a_op != 0},
                    {b, b_type, ldb, b_stride, b_op != 0}, {c, c_type, ldc, c_stride, false}});
}

Status cublasDgemmStridedBatched(Handle *handle, int a_op, int b_op, int m, int n, int k, const double *alpha, const double *a,
                                 int lda, long long a_stride, const double *b, int ldb, long long b_stride, const double *beta,
                                 double *c, int ldc, long long c_stride, int batches) {
    return enqueue(handle, "cublasDgemmStridedBatched",
                   {m, n, k, batches, *alpha, *beta, {a, F64, lda, a_stride, a_op != 0}, {b, F64, ldb, b_stride, b_op != 0},
                    {c, F64, ldc, c_stride, false}});
}
}
