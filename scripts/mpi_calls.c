/* Measures an MPI library's collectives between the ranks of one host, for scripts/collectives_peers.py: the median GB/s of 25
 * rounds, counted over the whole buffer as in benches/collectives.rs, and the median microseconds of a short all-reduce. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 64 << 20, ROUNDS = 25, SHORT = 1 << 10, SHORT_ROUNDS = 20000 };

static float *whole, *other;
static int ranks;

static void reduce_scatter(int bytes) {
    MPI_Reduce_scatter_block(whole, other, bytes / 4 / ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void all_gather(int bytes) {
    MPI_Allgather(other, bytes / 4 / ranks, MPI_FLOAT, whole, bytes / 4 / ranks, MPI_FLOAT, MPI_COMM_WORLD);
}

static void all_reduce(int bytes) {
    MPI_Allreduce(MPI_IN_PLACE, whole, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the median number of seconds until the slowest rank is done. */
static double time_of(void (*run)(int), int bytes, int rounds) {
    double *times = malloc((size_t)rounds * sizeof *times);
    for (int round = 0; round < rounds; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double own = MPI_Wtime();
        run(bytes);
        own = MPI_Wtime() - own;
        MPI_Allreduce(&own, &times[round], 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    }
    qsort(times, (size_t)rounds, sizeof *times, ascending);
    double median = times[rounds / 2];
    free(times);
    return median;
}

int main(int argc, char **argv) {
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    whole = malloc(BYTES);
    other = malloc(BYTES);
    for (int i = 0; i < BYTES / 4; i++) {
        whole[i] = other[i] = 1.0f;
    }
    struct {
        const char *name;
        void (*run)(int);
    } const all[] = {{"reduce-scatter", reduce_scatter}, {"all-gather", all_gather}, {"all-reduce", all_reduce}};
    for (int i = 0; i < 3; i++) {
        double seconds = time_of(all[i].run, BYTES, ROUNDS);
        if (rank == 0) {
            printf("%s %.2f GB/s\n", all[i].name, BYTES / seconds / 1e9);
        }
        /* Without this reset, repeated sums would not stay finite. */
        for (int j = 0; j < BYTES / 4; j++) {
            whole[j] = other[j] = 1.0f;
        }
    }
    double seconds = time_of(all_reduce, SHORT, SHORT_ROUNDS);
    if (rank == 0) {
        printf("all-reduce of 1 KiB %.1f us\n", seconds * 1e6);
    }
    MPI_Finalize();
    return 0;
}
