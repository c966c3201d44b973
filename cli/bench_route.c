/* New routing for every call of a bench. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const bench_routing_names[] = {"uniform", "lognormal", "hot"};

static void shuffle(struct base_prng *prng, int32_t *values, int count)
{
    for (int i = count - 1; i > 0; i--) {
        int j = (int)base_random_below(prng, i + 1);
        int32_t value = values[i];
        values[i] = values[j];
        values[j] = value;
    }
}

bool bench_deck_make(struct bench_deck *deck, int experts)
{
    *deck = (struct bench_deck){.experts = experts, .at = experts};
    deck->order = malloc((size_t)experts * sizeof *deck->order);
    for (int e = 0; deck->order && e < experts; e++)
        deck->order[e] = e;
    return deck->order != NULL;
}

void bench_deck_free(struct bench_deck *deck)
{
    free(deck->order);
    deck->order = NULL;
}

/* Each half is shuffled by itself: an expert comes again after at least half of the others, so few tokens do not find
 * their weights in a large cache. */
static int32_t deal(struct bench_deck *deck, struct base_prng *prng)
{
    int half = deck->experts / 2;

    if (deck->at == deck->experts) {
        shuffle(prng, deck->order, half);
        shuffle(prng, deck->order + half, deck->experts - half);
        deck->at = 0;
    }
    return deck->order[deck->at++];
}

static void route_dealt(struct bench_run *run)
{
    int64_t slots = run->batch.tokens * run->shape.topk;

    for (int64_t i = 0; i < slots; i++)
        run->batch.ids[i] = deal(&run->deck, &run->prng);
}

static void route_hot(struct bench_run *run)
{
    int64_t slots = run->batch.tokens * run->shape.topk;
    int32_t hot = (int32_t)base_random_below(&run->prng, run->shape.experts);

    for (int64_t i = 0; i < slots; i++)
        run->batch.ids[i] = hot;
}

/* An expert by its share of `load`, a running sum. */
static int32_t draw(struct base_prng *prng, const double *load, int experts)
{
    double at = (double)(base_random(prng) >> 11) * 0x1p-53 * load[experts - 1];
    int low = 0, high = experts - 1;

    while (low < high) {
        int middle = (low + high) / 2;
        if (load[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* K different experts for every token, drawn by their load. */
static void route_drawn(struct bench_run *run, const double *load)
{
    int topk = run->shape.topk;

    for (int64_t t = 0; t < run->batch.tokens; t++) {
        int32_t *ids = run->batch.ids + t * topk;
        for (int k = 0; k < topk;) {
            int j = 0;
            ids[k] = draw(&run->prng, load, run->shape.experts);
            while (ids[j] != ids[k])
                j++;
            k += j == k;
        }
    }
}

/* Uniform, or log-normal with sigma 1: which experts are the busy ones changes with every call. */
static void route_by_load(struct bench_run *run)
{
    int experts = run->shape.experts;
    double *load = malloc((size_t)experts * sizeof *load), sum = 0.0;

    if (!load) {
        run->out_of_memory = true;
        return;
    }
    for (int e = 0; e < experts; e++)
        load[e] = sum += run->what->routing == BENCH_LOGNORMAL ? exp(base_random_normal(&run->prng)) : 1.0;
    route_drawn(run, load);
    free(load);
}

static int count_distinct(const struct bench_run *run, unsigned char *seen)
{
    int64_t slots = run->batch.tokens * run->shape.topk;
    int distinct = 0;

    for (int64_t i = 0; i < slots; i++) {
        distinct += !seen[run->batch.ids[i]];
        seen[run->batch.ids[i]] = 1;
    }
    return distinct;
}

int bench_route(struct bench_run *run)
{
    int64_t slots = run->batch.tokens * run->shape.topk;
    unsigned char *seen = calloc((size_t)run->shape.experts, 1);
    int distinct;

    if (run->what->routing == BENCH_HOT)
        route_hot(run);
    else if (run->what->routing == BENCH_UNIFORM && slots <= run->shape.experts / 4)
        route_dealt(run);
    else
        route_by_load(run);
    for (int64_t i = 0; i < slots; i++)
        run->batch.weights[i] = base_random_unit(&run->prng);
    distinct = seen ? count_distinct(run, seen) : 0;
    run->out_of_memory = run->out_of_memory || !seen;
    free(seen);
    return distinct;
}
