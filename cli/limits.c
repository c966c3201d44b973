#include "limits.h"

#include "base/clock.h"
#include "base/memory.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SPAN_BYTES ((size_t)1280 << 20) /* past any cache */
enum { THREADS_MOST = 256, STEP = 256 };

/* ------------------------------------------------------------------- reading */

typedef uint64_t vec __attribute__((vector_size(64), may_alias, aligned(64)));

/* `streams` sequential streams side by side, each prefetched `ahead` bytes (0: not at all). */
static inline __attribute__((always_inline)) uint64_t read_body(const char *base, size_t bytes, int streams, int ahead)
{
    size_t part = bytes / (size_t)streams / STEP * STEP;
    vec sum[4] = {{0}, {0}, {0}, {0}};

    for (size_t at = 0; at < part; at += STEP)
        for (int s = 0; s < streams; s++) {
            const char *p = base + (size_t)s * part + at;
            for (int i = 0; i < 4; i++) {
                if (ahead)
                    __builtin_prefetch(p + ahead + 64 * i, 0, 3);
                sum[i] ^= *(const vec *)(p + 64 * i);
            }
        }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    return sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3] ^ sum[0][4] ^ sum[0][5] ^ sum[0][6] ^ sum[0][7];
}

static uint64_t read_plain(const char *base, size_t bytes, int streams, int ahead)
{
    return read_body(base, bytes, streams, ahead);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static uint64_t read_512(const char *base, size_t bytes, int streams, int ahead)
{
    return read_body(base, bytes, streams, ahead);
}

__attribute__((target("avx2"))) static uint64_t read_256(const char *base, size_t bytes, int streams, int ahead)
{
    return read_body(base, bytes, streams, ahead);
}
#endif

static uint64_t read_best(const char *base, size_t bytes, int streams, int ahead)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return read_512(base, bytes, streams, ahead);
    if (__builtin_cpu_supports("avx2"))
        return read_256(base, bytes, streams, ahead);
#endif
    return read_plain(base, bytes, streams, ahead);
}

static const struct {
    const char *name;
    int streams, ahead;
} read_methods[] = {
    {"1 stream", 1, 0},
    {"1 stream, prefetch 512 B ahead", 1, 512},
    {"1 stream, prefetch 1 KB ahead", 1, 1024},
    {"1 stream, prefetch 2 KB ahead", 1, 2048},
    {"1 stream, prefetch 4 KB ahead", 1, 4096},
    {"1 stream, prefetch 8 KB ahead", 1, 8192},
    {"2 streams", 2, 0},
    {"2 streams, prefetch 1 KB ahead", 2, 1024},
    {"2 streams, prefetch 4 KB ahead", 2, 4096},
    {"4 streams", 4, 0},
    {"4 streams, prefetch 1 KB ahead", 4, 1024},
    {"4 streams, prefetch 4 KB ahead", 4, 4096},
    {"8 streams", 8, 0},
};
enum { READ_METHODS = sizeof read_methods / sizeof *read_methods };

const char *limits_read_name(int method)
{
    return method >= 0 && method < READ_METHODS ? read_methods[method].name : "unknown";
}

/* ------------------------------------------------------------------- storing */

static void store_plain(char *base, size_t bytes)
{
    memset(base, 1, bytes);
}

#if defined(__x86_64__)
static void store_128(char *base, size_t bytes)
{
    __m128i value = _mm_set1_epi8(1);

    for (size_t at = 0; at + 64 <= bytes; at += 64)
        for (size_t i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(void *)(base + at + i), value);
    _mm_sfence();
}

__attribute__((target("avx512f"))) static void store_512(char *base, size_t bytes)
{
    __m512i value = _mm512_set1_epi32(1);

    for (size_t at = 0; at + 64 <= bytes; at += 64)
        _mm512_stream_si512((__m512i *)(void *)(base + at), value);
    _mm_sfence();
}
#endif

static void store_with(int method, char *base, size_t bytes)
{
#if defined(__x86_64__)
    if (method == 1)
        store_128(base, bytes);
    if (method == 2 && __builtin_cpu_supports("avx512f"))
        store_512(base, bytes);
    if (method >= 1)
        return;
#endif
    store_plain(base, bytes);
}

static int store_methods(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") ? 3 : 2;
#else
    return 1;
#endif
}

/* ------------------------------------------------------------------- together */

/* The same work on every thread at once. */
struct team {
    int threads, method, passes;
    char *base;
    size_t bytes; /* of all threads */
    bool store;
    const struct kern_engine *engine; /* not NULL: its arithmetic, for ns */
    int64_t ns;
    pthread_barrier_t gate;
};

struct member {
    struct team *team;
    int index;
    int64_t start_ns, end_ns;
    double flops; /* per second */
    volatile uint64_t sink; /* so that reading is not optimised away */
};

static void move_bytes(struct member *member)
{
    const struct team *team = member->team;
    size_t part = team->bytes / (size_t)team->threads / 4096 * 4096;
    char *base = team->base + part * (size_t)member->index;

    for (int pass = 0; pass < team->passes; pass++) {
        if (team->store)
            store_with(team->method, base, part);
        else
            member->sink = read_best(base, part, read_methods[team->method].streams, read_methods[team->method].ahead);
    }
}

static void *member_main(void *argument)
{
    struct member *member = argument;
    struct team *team = member->team;

    if (team->engine)
        team->engine->thread_begin();
    pthread_barrier_wait(&team->gate);
    member->start_ns = base_now_ns();
    if (team->engine)
        member->flops = team->engine->limit(team->ns);
    else
        move_bytes(member);
    member->end_ns = base_now_ns();
    if (team->engine)
        team->engine->thread_end();
    return NULL;
}

/* Seconds from the first start to the last end, and the flops of all. 0 when threads could not be started. */
static double team_run(struct team *team, double *flops)
{
    struct member member[THREADS_MOST] = {0};
    pthread_t thread[THREADS_MOST];
    int64_t start = INT64_MAX, end = 0;

    pthread_barrier_init(&team->gate, NULL, (unsigned)team->threads);
    for (int i = 0; i < team->threads; i++) {
        member[i] = (struct member){.team = team, .index = i};
        if (i > 0 && pthread_create(&thread[i], NULL, member_main, &member[i]) != 0) {
            fprintf(stderr, "hmoe bench: cannot start %d threads\n", team->threads);
            _Exit(1); /* those that started wait for ever */
        }
    }
    member_main(&member[0]);
    for (int i = 0; i < team->threads; i++) {
        if (i > 0)
            pthread_join(thread[i], NULL);
        start = member[i].start_ns < start ? member[i].start_ns : start;
        end = member[i].end_ns > end ? member[i].end_ns : end;
        *flops += member[i].flops;
    }
    pthread_barrier_destroy(&team->gate);
    return (double)(end - start) / 1e9;
}

/* GB/s of one method. */
static double bandwidth(struct team team)
{
    double none = 0.0, seconds = team_run(&team, &none);
    return (double)team.bytes * team.passes / seconds / 1e9;
}

double limits_engine(const struct kern_engine *engine, int threads, int64_t ns)
{
    struct team team = {.threads = threads, .engine = engine, .ns = ns};
    double flops = 0.0;

    team_run(&team, &flops);
    return flops / 1e9;
}

int limits_engine_index(const struct kern_engine *engine)
{
    int index = 0;

    while (kern_engines[index] && kern_engines[index] != engine)
        index++;
    return index;
}

double limits_read_again(const struct limits *limits, const void *base, size_t bytes)
{
    struct team team = {.threads = limits->threads, .method = limits->read_method, .passes = 1,
                        .base = (char *)(uintptr_t)base, .bytes = bytes < SPAN_BYTES ? bytes : SPAN_BYTES};
    double first = bandwidth(team), second = bandwidth(team);

    return first > second ? first : second;
}

static void measure_memory(struct limits *limits, char *base)
{
    struct team team = {.threads = limits->threads, .passes = 1, .base = base, .bytes = SPAN_BYTES};

    for (int round = 0; round < 3; round++)
        for (team.method = 0; team.method < READ_METHODS; team.method++) {
            double gbs = bandwidth(team);
            limits->read_method = gbs > limits->read_gbs ? team.method : limits->read_method;
            limits->read_gbs = gbs > limits->read_gbs ? gbs : limits->read_gbs;
        }
    team.store = true;
    for (int round = 0; round < 3; round++)
        for (team.method = 0; team.method < store_methods(); team.method++) {
            double gbs = bandwidth(team);
            limits->store_gbs = gbs > limits->store_gbs ? gbs : limits->store_gbs;
        }
}

static void measure_engines(struct limits *limits)
{
    for (int i = 0; kern_engines[i] && i < LIMITS_ENGINES; i++)
        for (int round = 0; round < 3 && kern_engines[i]->present(); round++) {
            double gflops = limits_engine(kern_engines[i], limits->threads, 150000000);
            limits->engine_gflops[i] = gflops > limits->engine_gflops[i] ? gflops : limits->engine_gflops[i];
        }
}

bool limits_measure(struct limits *limits, int threads)
{
    char *base = base_map(SPAN_BYTES, 1);

    *limits = (struct limits){.threads = threads};
    if (!base)
        return false;
    memset(base, 1, SPAN_BYTES);
    measure_memory(limits, base);
    base_unmap(base, SPAN_BYTES, 1);
    measure_engines(limits);
    return true;
}
