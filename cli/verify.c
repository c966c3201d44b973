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

/* Steps of about 0.618 T visit every token once, and any first few of them lie spread over the batch. */
static int64_t golden_stride(int64_t tokens)
{
    int64_t stride = (int64_t)((double)tokens * 0.6180339887) + 1;

    while (common_divisor(stride, tokens) != 1)
        stride++;
    return stride;
}

/* Is it the first token of some rank? */
static bool is_first(const struct run *run, int64_t token)
{
    for (int r = 0; r < run->settings.ranks; r++)
        if (cli_first_token(run->batch.tokens, r, (int)run->settings.ranks) == token)
            return true;
    return false;
}

/* The first token of every rank, then all others in golden steps; -1: nothing at this index. */
static int64_t token_at(const struct verify *job, int64_t index)
{
    const struct run *run = job->run;
    int ranks = (int)run->settings.ranks, rank = (int)index;
    int64_t tokens = run->batch.tokens, token;

    if (index < ranks) {
        token = cli_first_token(tokens, rank, ranks);
        return token < cli_first_token(tokens, rank + 1, ranks) ? token : -1;
    }
    token = (index - ranks) * job->stride % tokens;
    return is_first(run, token) || base_now_ns() > job->deadline_ns ? -1 : token;
}

static void verify_one(void *argument, int64_t index)
{
    struct verify *job = argument;
    struct run *run = job->run;
    struct cli_difference difference = {0};
    int64_t token = token_at(job, index);

    if (token < 0)
        return;
    if (!cli_verify_token(&run->weights, &run->batch, token, &difference)) {
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

    cli_parallel(base_cpus(), run->batch.tokens + run->settings.ranks, verify_one, &job);
    return !atomic_load_explicit(&job.failed, memory_order_relaxed);
}
