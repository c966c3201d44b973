/* The sample of `hmoe run` against the oracle. */
#include "run.h"

#include "base/clock.h"
#include "base/topology.h"

#include <pthread.h>
#include <stdatomic.h>

enum { VERIFY_NS = 2000000000 };

struct verify {
    struct run *run;
    int64_t stride, deadline_ns;
    pthread_mutex_t lock; /* of the run's checked and difference */
    atomic_int failed;
};

static int64_t common_divisor(int64_t a, int64_t b)
{
    return b ? common_divisor(b, a % b) : a;
}

/* Steps of about 0.618 T visit every token once, and any first few of them lie spread over all ranks. */
static int64_t golden_stride(int64_t tokens)
{
    int64_t stride = (int64_t)((double)tokens * 0.6180339887) + 1;

    while (common_divisor(stride, tokens) != 1)
        stride++;
    return stride;
}

static void verify_one(void *argument, int64_t index)
{
    struct verify *job = argument;
    struct run *run = job->run;
    struct cli_difference difference = {0};

    if (base_now_ns() > job->deadline_ns && index >= run->settings.ranks)
        return;
    if (!cli_verify_token(&run->weights, &run->batch, index * job->stride % run->batch.tokens, &difference)) {
        atomic_store_explicit(&job->failed, 1, memory_order_relaxed); /* read after the join */
        return;
    }
    pthread_mutex_lock(&job->lock);
    run->checked++;
    if (difference.differing && (!run->difference.differing || difference.token < run->difference.token))
        run->difference = difference;
    cli_progress("%lld tokens compared with the oracle", (long long)run->checked);
    pthread_mutex_unlock(&job->lock);
}

bool run_verify(struct run *run)
{
    struct verify job = {.run = run, .stride = golden_stride(run->batch.tokens),
                         .deadline_ns = base_now_ns() + VERIFY_NS, .lock = PTHREAD_MUTEX_INITIALIZER};

    cli_parallel(base_cpus(), run->batch.tokens, verify_one, &job);
    return !atomic_load_explicit(&job.failed, memory_order_relaxed);
}
