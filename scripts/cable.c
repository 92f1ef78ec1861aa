/* A cable between two network namespaces, with a given rate and delay in each direction: a substitute for `tc qdisc netem` on
 * kernels that lack it. Both ends are TUN devices called `cable`; this program carries packets from one to the other.
 *
 *   cc -O2 -pthread -o cable scripts/cable.c
 *   cable NAMESPACE_A NAMESPACE_B BITS_PER_SECOND MICROSECONDS
 *
 * Prints a line when both ends are up (the caller assigns their addresses), and runs until it is killed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PACKET = 65536, WAITING = 512 };

struct way {
    int from, to;
    double nanoseconds_per_byte;
    uint64_t delay;
    /* Packets in transit: added at `in`, removed at `out`. */
    char *data[WAITING];
    ssize_t len[WAITING];
    uint64_t due[WAITING];
    size_t in, out;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static void check(int failed, const char *what) {
    if (failed) {
        perror(what);
        exit(1);
    }
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* An end of the cable, in a namespace. */
static int end_in(const char *namespace) {
    char path[256];
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int home = open(path, O_RDONLY);
    check(home < 0, path);
    /* A device belongs to the namespace in which it is opened. */
    check(setns(home, CLONE_NEWNET) != 0, path);
    int end = open("/dev/net/tun", O_RDWR);
    check(end < 0, "/dev/net/tun");
    strcpy(request.ifr_name, "cable");
    check(ioctl(end, TUNSETIFF, &request) != 0, "TUNSETIFF");
    close(home);
    return end;
}

/* Takes packets in at the rate of the cable: the next one enters once the current one has entered completely. */
static void *take_in(void *argument) {
    struct way *way = argument;
    uint64_t idle_from = now();
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (way->in - way->out == WAITING) {
            pthread_cond_wait(&way->changed, &way->lock);
        }
        pthread_mutex_unlock(&way->lock);
        size_t place = way->in % WAITING;
        ssize_t len = read(way->from, way->data[place], PACKET);
        check(len < 0, "read");
        uint64_t start = now();
        start = start > idle_from ? start : idle_from;
        idle_from = start + (uint64_t)((double)len * way->nanoseconds_per_byte);
        way->len[place] = len;
        way->due[place] = idle_from + way->delay;
        pthread_mutex_lock(&way->lock);
        way->in++;
        pthread_cond_broadcast(&way->changed);
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

/* Delivers packets when they are due. */
static void *give_out(void *argument) {
    struct way *way = argument;
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (way->in == way->out) {
            pthread_cond_wait(&way->changed, &way->lock);
        }
        pthread_mutex_unlock(&way->lock);
        size_t place = way->out % WAITING;
        struct timespec due = {.tv_sec = (time_t)(way->due[place] / 1000000000u),
                               .tv_nsec = (long)(way->due[place] % 1000000000u)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) != 0) {
        }
        /* An end that is down loses the packets that arrive, as a real cable does. */
        if (write(way->to, way->data[place], (size_t)way->len[place]) < 0) {
        }
        pthread_mutex_lock(&way->lock);
        way->out++;
        pthread_cond_broadcast(&way->changed);
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: cable NAMESPACE_A NAMESPACE_B BITS_PER_SECOND MICROSECONDS\n");
        return 2;
    }
    int a = end_in(argv[1]), b = end_in(argv[2]);
    static struct way ways[2];
    pthread_t threads[4];
    for (int i = 0; i < 2; i++) {
        ways[i].from = i == 0 ? a : b;
        ways[i].to = i == 0 ? b : a;
        ways[i].nanoseconds_per_byte = 8e9 / atof(argv[3]);
        ways[i].delay = (uint64_t)(atof(argv[4]) * 1000);
        pthread_mutex_init(&ways[i].lock, NULL);
        pthread_cond_init(&ways[i].changed, NULL);
        for (int place = 0; place < WAITING; place++) {
            ways[i].data[place] = malloc(PACKET);
            check(ways[i].data[place] == NULL, "malloc");
        }
        check(pthread_create(&threads[2 * i], NULL, take_in, &ways[i]) != 0, "pthread_create");
        check(pthread_create(&threads[2 * i + 1], NULL, give_out, &ways[i]) != 0, "pthread_create");
    }
    /* A real cable does not wait for busy processors. */
    struct sched_param first = {.sched_priority = 1};
    for (int i = 0; i < 4; i++) {
        if (pthread_setschedparam(threads[i], SCHED_FIFO, &first) != 0) {
            fputs("the cable has no real-time priority: it is slower while processors are busy\n", stderr);
            break;
        }
    }
    puts("the cable is up");
    fflush(stdout);
    pthread_join(threads[0], NULL);
    return 0;
}
