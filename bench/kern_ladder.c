/* The FMA engines over a whole layer of Qwen3-30B-A3B's shape, against this machine's limits taken in the same run:
 *
 *     kern_ladder ENGINE kn|nk TOKENS,... [REPEATS] [hot]
 *
 * Two pinned threads, 1.2 GB of bf16 weights in 2 MB pages, uniform routing (or, hot, every row to one expert at a
 * time). Prints the median CPU time of both threads' mean, and the floor max(weight bytes / sequential read,
 * flops / FMA peak) over it. Not part of the build: gcc -O3 -march=native -D_GNU_SOURCE -Iinclude -Isrc, with the
 * objects of src/kern, -lpthread -lm. Without -march=native the reader falls 15 % short of the memory and flatters. */
#include "base/clock.h"
#include "base/fpenv.h"
#include "base/num.h"
#include "base/prng.h"
#include "kern/kern.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { H = 2048, I = 768, E = 128, K = 8, THREADS = 2, TOKENS_MOST = 4096, TASKS_MOST = 8192 };
#define UP_BYTES ((size_t)H * 2 * I * 2)
#define DOWN_BYTES ((size_t)I * H * 2)

struct task {
    int expert, first, rows; /* slots order[first .. first + rows) */
};

static struct bench {
    const struct kern_engine *engine, *few;
    struct kern_layer layer;
    char *up, *down, *x, *slots, *y;
    int tokens, tasks;
    int ids[TOKENS_MOST * K], order[TOKENS_MOST * K];
    float weights[TOKENS_MOST * K];
    struct task task[TASKS_MOST];
    void *packed_x[THREADS], *packed_a[THREADS], *scratch[THREADS];
    double rate[THREADS], busy_ns[THREADS];
    atomic_int next, generation, arrived, done;
    void (*run)(int thread);
} bench;

/* ------------------------------------------------- two threads */

static void pin(size_t cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void *serve(void *argument)
{
    int seen = 0;
    (void)argument;
    pin(1);
    base_fp_enter();
    bench.engine->thread_begin();
    for (;;) {
        while (atomic_load(&bench.generation) == seen)
            __builtin_ia32_pause();
        seen++;
        bench.run(1);
        atomic_fetch_add(&bench.done, 1);
    }
    return NULL;
}

static double both(void (*run)(int))
{
    int64_t start = base_now_ns();
    bench.run = run;
    atomic_store(&bench.done, 0);
    atomic_store(&bench.next, 0);
    atomic_store(&bench.arrived, 0);
    atomic_fetch_add(&bench.generation, 1);
    run(0);
    while (atomic_load(&bench.done) < 1)
        __builtin_ia32_pause();
    return (double)(base_now_ns() - start);
}

/* this thread's time on its CPU: what others take from it does not count */
static double cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static double busy(void (*run)(int))
{
    both(run);
    return (bench.busy_ns[0] + bench.busy_ns[1]) / THREADS;
}

static void barrier(void)
{
    atomic_fetch_add(&bench.arrived, 1);
    while (atomic_load(&bench.arrived) < THREADS)
        __builtin_ia32_pause();
}

/* ------------------------------------------------- limits */

static void run_limit(int thread)
{
    bench.rate[thread] = bench.engine->limit(5000000);
}

typedef uint64_t line_of_memory __attribute__((vector_size(64)));
static volatile uint64_t sink;

/* eight sums, so that the memory and not a chain of additions is the limit */
static void run_read(int thread)
{
    size_t half = E * UP_BYTES / THREADS;
    const char *from = bench.up + half * (size_t)thread;
    line_of_memory sum = {0};
    double start = cpu_ns();
    for (size_t i = 0; i < half; i += 64) {
        __builtin_prefetch(from + i + 16384, 0, 2);
        sum += *(const line_of_memory *)(const void *)(from + i);
    }
    bench.busy_ns[thread] = cpu_ns() - start;
    sink = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static double best_read(void)
{
    double best = 0.0;
    for (int i = 0; i < 3; i++) {
        double rate = (double)(E * UP_BYTES) / busy(run_read);
        best = rate > best ? rate : best;
    }
    return best;
}

static double peak(void)
{
    double best = 0.0;
    for (int i = 0; i < 3; i++) {
        both(run_limit);
        best = bench.rate[0] + bench.rate[1] > best ? bench.rate[0] + bench.rate[1] : best;
    }
    return best * 1e-9;
}

/* ------------------------------------------------- the layer */

static void route(struct base_prng *prng, int hot, int rotate)
{
    for (int t = 0; t < bench.tokens; t++)
        for (int k = 0; k < K; k++) {
            int *id = &bench.ids[t * K + k], again = 1;
            while (again) {
                *id = bench.tokens == 1 ? (rotate * K + k) % E : (int)base_random_below(prng, E);
                again = 0;
                for (int j = 0; j < k; j++)
                    again |= bench.ids[t * K + j] == *id;
            }
            if (hot)
                *id = rotate % E;
            bench.weights[t * K + k] = base_random_unit(prng);
        }
}

static void make_tasks(void)
{
    int at = 0, rows_most = bench.engine->rows_most;
    bench.tasks = 0;
    for (int e = 0; e < E; e++) {
        int first = at, blocks;
        for (int s = 0; s < bench.tokens * K; s++)
            if (bench.ids[s] == e)
                bench.order[at++] = s;
        blocks = (at - first + rows_most - 1) / rows_most;
        for (int b = 0; b < blocks; b++) {
            int from = first + (at - first) * b / blocks, to = first + (at - first) * (b + 1) / blocks;
            bench.task[bench.tasks++] = (struct task){e, from, to - from};
        }
    }
}

static int taller(const void *a, const void *b)
{
    return ((const struct task *)b)->rows - ((const struct task *)a)->rows;
}

static void run_block(int thread, const struct task *task)
{
    const void *rows[512];
    void *out[512];
    for (int r = 0; r < task->rows; r++) {
        int slot = bench.order[task->first + r];
        rows[r] = bench.x + (size_t)(slot / K) * H * 2;
        out[r] = bench.slots + (size_t)slot * H * 2;
    }
    bench.engine->pack(&(struct kern_pack){&bench.layer, rows, task->rows, bench.packed_x[thread]});
    bench.engine->gmm1(&(struct kern_gmm1){.layer = &bench.layer, .up = bench.up + (size_t)task->expert * UP_BYTES,
                                           .x = bench.packed_x[thread], .rows = task->rows, .last = I,
                                           .a = bench.packed_a[thread], .scratch = bench.scratch[thread]});
    bench.engine->gmm2(&(struct kern_gmm2){.layer = &bench.layer,
                                           .down = bench.down + (size_t)task->expert * DOWN_BYTES,
                                           .a = bench.packed_a[thread], .rows = task->rows, .last = H, .out = out,
                                           .scratch = bench.scratch[thread]});
}

static void run_layer(int thread)
{
    double start = cpu_ns();
    int n;
    while ((n = atomic_fetch_add(&bench.next, 1)) < bench.tasks)
        run_block(thread, &bench.task[n]);
    bench.busy_ns[thread] = cpu_ns() - start;
    barrier();
    start = cpu_ns();
    for (int t = thread; t < bench.tokens; t += THREADS) {
        const void *term[K];
        for (int k = 0; k < K; k++)
            term[k] = bench.slots + (size_t)(t * K + k) * H * 2;
        bench.engine->combine(&(struct kern_combine){H, HMOE_BF16, K, term, bench.weights + t * K,
                                                     bench.y + (size_t)t * H * 2});
    }
    bench.busy_ns[thread] += cpu_ns() - start;
}

static int rising(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(int tokens, int repeats, int hot)
{
    struct base_prng prng = {(uint64_t)tokens};
    double ns[64], floor_ns[64], ratio[64], read = best_read(), flops = peak(), read_after, flops_after;

    bench.tokens = tokens;
    for (int i = -1; i < repeats; i++) {
        double by_bytes, by_flops = (double)tokens * K * 3 * H * I * 2 / flops;
        int experts = 0, last = -1;
        route(&prng, hot, i + 1);
        make_tasks();
        for (int n = 0; n < bench.tasks; n++) {
            experts += bench.task[n].expert != last;
            last = bench.task[n].expert;
        }
        qsort(bench.task, (size_t)bench.tasks, sizeof bench.task[0], taller);
        by_bytes = (double)experts * (double)(UP_BYTES + DOWN_BYTES) / read;
        if (i < 0) {
            busy(run_layer);
            continue;
        }
        ns[i] = busy(run_layer);
        floor_ns[i] = by_bytes > by_flops ? by_bytes : by_flops;
        ratio[i] = floor_ns[i] / ns[i];
    }
    read_after = best_read(), flops_after = peak();
    qsort(ratio, (size_t)repeats, sizeof ratio[0], rising);
    qsort(ns, (size_t)repeats, sizeof ns[0], rising);
    printf("%-7s %s T=%-5d%s %8.3f ms  read %.1f (%.1f) GB/s  peak %.0f (%.0f) GFLOP/s", bench.engine->name,
           bench.layer.layout == HMOE_KN ? "kn" : "nk", tokens, hot ? " hot" : "", ns[repeats / 2] * 1e-6, read,
           read_after, flops, flops_after);
    printf("  of floor: median %.3f best %.3f\n", ratio[repeats / 2], ratio[repeats - 1]);
    fflush(stdout);
}

/* ------------------------------------------------- set up */

static char *huge(size_t bytes)
{
    size_t page = (size_t)2 << 20;
    char *p = mmap(NULL, bytes + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        abort();
    p += page - (uintptr_t)p % page;
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0, bytes);
    return p;
}

static char *numbers(size_t bytes, float scale)
{
    static uint16_t pool[65536 + 64];
    struct base_prng prng = {bytes};
    char *p = huge(bytes);
    for (int i = 0; i < 65536 + 64; i++)
        pool[i] = num_to_bf16(base_random_sym(&prng, scale));
    for (size_t i = 0; i + 128 <= bytes; i += 128)
        memcpy(p + i, pool + base_random_below(&prng, 65536), 128);
    return p;
}

static void set_up(const char *engine, const char *layout)
{
    pthread_t thread;
    bench.layer = (struct kern_layer){.hidden = H, .inner = I, .dtype = HMOE_BF16};
    bench.layer.act = num_activation((struct hmoe_activation){0});
    bench.layer.layout = strcmp(layout, "nk") == 0 ? HMOE_NK : HMOE_KN;
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        if (strcmp((*e)->name, engine) == 0 && (*e)->present())
            bench.engine = *e;
    if (bench.engine == NULL) {
        fprintf(stderr, "no engine %s here\n", engine);
        exit(1);
    }
    bench.up = numbers(E * UP_BYTES, 0.04f);
    bench.down = numbers(E * DOWN_BYTES, 0.04f);
    bench.x = numbers((size_t)TOKENS_MOST * H * 2, 1.0f);
    bench.slots = huge((size_t)TOKENS_MOST * K * H * 2);
    bench.y = huge((size_t)TOKENS_MOST * H * 2);
    for (int i = 0; i < THREADS; i++) {
        bench.packed_x[i] = huge(bench.engine->x_bytes(&bench.layer, bench.engine->rows_most));
        bench.packed_a[i] = huge(bench.engine->a_bytes(&bench.layer, bench.engine->rows_most));
        bench.scratch[i] = huge(bench.engine->scratch_bytes(&bench.layer));
    }
    pin(0);
    base_fp_enter();
    bench.engine->thread_begin();
    pthread_create(&thread, NULL, serve, NULL);
}

int main(int argc, char **argv)
{
    int repeats = argc > 4 ? atoi(argv[4]) : 7, hot = argc > 5;
    if (argc < 4 || repeats < 1 || repeats > 64) {
        fprintf(stderr, "usage: kern_ladder ENGINE kn|nk TOKENS,... [REPEATS 1..64] [hot]\n");
        return 1;
    }
    set_up(argv[1], argv[2]);
    for (char *t = strtok(argv[3], ","); t != NULL; t = strtok(NULL, ","))
        measure(atoi(t), repeats, hot);
    return 0;
}
