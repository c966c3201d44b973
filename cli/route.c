#include "cli.h"
#include "text.h"

#include "base/num.h"
#include "base/prng.h"
#include "kern/kern.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { RUN = 64, WAVES = 32 }; /* tokens that one thread takes at a time; sines of the position signal */

struct embed {
    const struct cli_shape *shape;
    const int32_t *tokens;
    struct cli_batch *batch;
    uint64_t seed;
    atomic_int failed;
};

/* sin and cos of the position at falling frequencies, as in the first transformers */
static void position_signal(int64_t position, float signal[2 * WAVES])
{
    for (int i = 0; i < WAVES; i++) {
        double angle = (double)position * pow(10000.0, -(double)i / WAVES);
        signal[2 * i] = (float)sin(angle);
        signal[2 * i + 1] = (float)cos(angle);
    }
}

static void embed_row(const struct embed *job, int64_t token, float *row)
{
    int64_t hidden = job->shape->hidden;
    struct base_prng prng = {job->seed + (uint64_t)job->tokens[token] * 0xd1b54a32d192ed03u};
    float signal[2 * WAVES], squares = 0.0f, scale;

    base_random(&prng);
    position_signal(token, signal);
    for (int64_t h = 0; h < hidden; h++) {
        row[h] = base_random_sym(&prng, 1.7320508f) + 0.5f * signal[h % (2 * WAVES)];
        squares += row[h] * row[h];
    }
    scale = 1.0f / sqrtf(squares / (float)hidden + 1e-6f);
    for (int64_t h = 0; h < hidden; h++)
        num_store(job->shape->dtype, job->batch->x, token * hidden + h, row[h] * scale);
}

static void embed_run(void *argument, int64_t run)
{
    struct embed *job = argument;
    int64_t last = (run + 1) * RUN < job->batch->tokens ? (run + 1) * RUN : job->batch->tokens;
    float *row = malloc((size_t)job->shape->hidden * sizeof *row);

    if (!row)
        atomic_store_explicit(&job->failed, 1, memory_order_relaxed); /* read after the join */
    for (int64_t token = run * RUN; row && token < last; token++)
        embed_row(job, token, row);
    free(row);
}

bool cli_embed(const struct cli_shape *shape, const int32_t *tokens, struct cli_batch *batch, uint64_t seed,
               int threads)
{
    struct embed job = {.shape = shape, .tokens = tokens, .batch = batch, .seed = seed};

    cli_progress("embedding tokens");
    cli_parallel(threads, (batch->tokens + RUN - 1) / RUN, embed_run, &job);
    return !atomic_load_explicit(&job.failed, memory_order_relaxed);
}

struct route {
    const struct cli_shape *shape;
    struct cli_batch *batch;
    const float *router; /* [H,E] */
    atomic_int failed;
};

static void logits_of(const struct route *job, int64_t token, float *logits)
{
    int64_t hidden = job->shape->hidden, experts = job->shape->experts;

    for (int64_t e = 0; e < experts; e++)
        logits[e] = 0.0f;
    for (int64_t h = 0; h < hidden; h++) {
        float x = num_load(job->shape->dtype, job->batch->x, token * hidden + h);
        const float *row = job->router + h * experts;
        for (int64_t e = 0; e < experts; e++)
            logits[e] += x * row[e];
    }
}

static void softmax(float *values, int count)
{
    float most = values[0], sum = 0.0f;

    for (int e = 1; e < count; e++)
        most = values[e] > most ? values[e] : most;
    for (int e = 0; e < count; e++)
        sum += values[e] = expf(values[e] - most);
    for (int e = 0; e < count; e++)
        values[e] /= sum;
}

/* The K largest, the lower number first of two alike; what was taken becomes -1. */
static void take_largest(const struct cli_shape *shape, float *share, int32_t *ids, float *weights)
{
    float sum = 0.0f;

    for (int k = 0; k < shape->topk; k++) {
        int best = 0;
        for (int e = 1; e < shape->experts; e++)
            best = share[e] > share[best] ? e : best;
        ids[k] = best;
        weights[k] = share[best];
        sum += share[best];
        share[best] = -1.0f;
    }
    for (int k = 0; shape->renormalised && k < shape->topk; k++)
        weights[k] /= sum;
}

static void route_run(void *argument, int64_t run)
{
    struct route *job = argument;
    const struct cli_shape *shape = job->shape;
    int64_t last = (run + 1) * RUN < job->batch->tokens ? (run + 1) * RUN : job->batch->tokens;
    float *share = malloc((size_t)shape->experts * sizeof *share);

    if (!share)
        atomic_store_explicit(&job->failed, 1, memory_order_relaxed); /* read after the join */
    for (int64_t token = run * RUN; share && token < last; token++) {
        logits_of(job, token, share);
        softmax(share, shape->experts);
        take_largest(shape, share, job->batch->ids + token * shape->topk, job->batch->weights + token * shape->topk);
    }
    free(share);
}

static float *make_router(const struct cli_shape *shape, uint64_t seed)
{
    int64_t count = shape->hidden * shape->experts;
    float *router = malloc((size_t)count * sizeof *router), scale = 1.7320508f / sqrtf((float)shape->hidden);
    struct base_prng prng = {seed ^ (uint64_t)7 << 32};

    for (int64_t i = 0; router && i < count; i++)
        router[i] = base_random_sym(&prng, scale);
    return router;
}

bool cli_route(const struct cli_shape *shape, struct cli_batch *batch, uint64_t seed, int threads)
{
    float *router = make_router(shape, seed);
    struct route job = {.shape = shape, .batch = batch, .router = router};

    cli_progress("routing tokens");
    if (router)
        cli_parallel(threads, (batch->tokens + RUN - 1) / RUN, route_run, &job);
    free(router);
    return router && !atomic_load_explicit(&job.failed, memory_order_relaxed);
}
