/* One forward case for the tests: a global batch with its oracle, run over ranks as threads or processes, compared bit
 * for bit. The routing asked for is asserted to have occurred. */
#ifndef MOE_CASE_H
#define MOE_CASE_H

#include "base/fpenv.h"
#include "base/num.h"
#include "base/prng.h"
#include "moe/plan.h"
#include "ref/moe_ref.h"

#include "api/objects.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cmocka.h>

enum { CASE_RANKS_MAX = 16 };

enum case_routing {
    ROUTE_UNIFORM,    /* K distinct experts */
    ROUTE_DUPLICATES, /* any expert, so ids repeat in a row */
    ROUTE_LOGNORMAL,  /* popularity exp(normal) */
    ROUTE_ONE_HOT,    /* every slot to one expert */
    ROUTE_TWO_HOT,
    ROUTE_ALIKE,      /* every token the same row */
    ROUTE_ZEROS,      /* every slot expert 0 */
    ROUTE_FIRST_RANK, /* only experts of rank 0 */
    ROUTE_HOME,       /* only experts of the token's own rank */
    ROUTE_NONE        /* all masked */
};

struct moe_case {
    int64_t hidden, inner;
    int experts, topk, ranks;
    enum hmoe_dtype dtype;
    enum hmoe_layout layout;
    enum hmoe_gating gating;
    struct hmoe_activation activation;
    int biased;
    int shared; /* shared experts */
    int64_t shared_inner;
    enum hmoe_index ids_type;
    enum hmoe_dtype weights_type;
    int64_t tokens[CASE_RANKS_MAX];
    enum case_routing routing;
    double masked; /* share of slots that are -1, with NaN weights */
    int special;   /* x holds NaN, Inf, denormals */
    uint64_t seed;
    enum hmoe_via via;
    int workers, calls, calls_max, training;
    const char *knobs;

    /* made */
    int64_t all, first[CASE_RANKS_MAX + 1];
    char *x, *ids, *weights, *up, *down, *up_bias, *down_bias, *shared_up, *shared_down, *y, *wanted;
    size_t bytes;
    char *map;
};

static inline size_t case_size(const struct moe_case *c, int64_t elements)
{
    return (size_t)elements * num_bytes(c->dtype);
}

static inline void case_fill(struct moe_case *c, struct base_prng *prng, char *to, int64_t elements, float scale)
{
    for (int64_t i = 0; i < elements; i++)
        num_store(c->dtype, to, i, base_random_sym(prng, scale));
}

static inline int64_t case_id(const struct moe_case *c, int64_t slot)
{
    return c->ids_type == HMOE_I64 ? ((int64_t *)(void *)c->ids)[slot] : ((int32_t *)(void *)c->ids)[slot];
}

static inline void case_set_id(struct moe_case *c, int64_t slot, int64_t id)
{
    if (c->ids_type == HMOE_I64)
        ((int64_t *)(void *)c->ids)[slot] = id;
    else
        ((int32_t *)(void *)c->ids)[slot] = (int32_t)id;
}

/* A popular expert: the k-th largest of random numbers would do too; here by rejection on exp(normal). */
static inline int64_t case_popular(const struct moe_case *c, struct base_prng *prng, const double *popularity)
{
    double all = 0, at;

    for (int e = 0; e < c->experts; e++)
        all += popularity[e];
    at = all * (double)base_random_unit(prng);
    for (int e = 0; e < c->experts - 1; e++)
        if ((at -= popularity[e]) < 0)
            return e;
    return c->experts - 1;
}

/* An expert of the rank that the slot's token lives on. */
static inline int64_t case_home(const struct moe_case *c, struct base_prng *prng, int64_t slot)
{
    int64_t local = c->experts / c->ranks, rank = 0;

    while (rank < c->ranks - 1 && slot / c->topk >= c->first[rank + 1])
        rank++;
    return rank * local + base_random_below(prng, local);
}

static inline int64_t case_draw(const struct moe_case *c, struct base_prng *prng, const double *popularity,
                                int64_t slot)
{
    int64_t k = slot % c->topk;

    switch (c->routing) {
    case ROUTE_ONE_HOT:
        return c->experts - 1;
    case ROUTE_TWO_HOT:
        return base_random_below(prng, 2) ? c->experts - 1 : 0;
    case ROUTE_ALIKE:
        return (c->experts / 2 + k) % c->experts;
    case ROUTE_ZEROS:
        return 0;
    case ROUTE_FIRST_RANK:
        return base_random_below(prng, c->experts / c->ranks);
    case ROUTE_HOME:
        return case_home(c, prng, slot);
    case ROUTE_LOGNORMAL:
        return case_popular(c, prng, popularity);
    case ROUTE_NONE:
        return -1;
    default:
        return base_random_below(prng, c->experts);
    }
}

static inline int case_repeats(const struct moe_case *c, int64_t slot, int k)
{
    for (int j = 1; j <= k; j++)
        if (case_id(c, slot - j) == case_id(c, slot))
            return 1;
    return 0;
}

static inline void case_route(struct moe_case *c, struct base_prng *prng)
{
    double *popularity = calloc((size_t)c->experts, sizeof *popularity);
    int distinct = c->routing == ROUTE_UNIFORM && c->topk <= c->experts;
    int64_t masked = 0, repeats = 0;

    for (int e = 0; e < c->experts; e++)
        popularity[e] = exp(base_random_normal(prng));
    for (int64_t slot = 0; slot < c->all * c->topk; slot++) {
        int k = (int)(slot % c->topk), hide = c->masked > 0 && (double)base_random_unit(prng) < c->masked;
        do
            case_set_id(c, slot, case_draw(c, prng, popularity, slot));
        while (distinct && case_repeats(c, slot, k));
        repeats += case_repeats(c, slot, k);
        if (hide)
            case_set_id(c, slot, -1);
        masked += case_id(c, slot) < 0;
        num_store(c->weights_type, c->weights, slot, hide ? NAN : base_random_sym(prng, 1.0f));
    }
    if (c->routing == ROUTE_DUPLICATES && c->all * c->topk > 40 && c->topk > 1)
        assert_true(repeats > 0);
    if (c->masked > 0 && c->all * c->topk > 40)
        assert_true(masked > 0);
    free(popularity);
}

static inline char *case_take(char **at, size_t bytes)
{
    char *piece = *at;
    *at += (bytes + 127) / 64 * 64;
    return piece;
}

/* Carves everything out of one shared mapping; called twice, first to measure. */
static inline void case_bind(struct moe_case *c, char *at)
{
    char *start = at;
    int64_t slots = c->all * c->topk, E = c->experts, H = c->hidden, I = c->inner;

    c->x = case_take(&at, case_size(c, c->all * H));
    c->y = case_take(&at, case_size(c, c->all * H));
    c->wanted = case_take(&at, case_size(c, c->all * H));
    c->ids = case_take(&at, (size_t)slots * 8);
    c->weights = case_take(&at, (size_t)slots * 4);
    c->up = case_take(&at, case_size(c, E * H * 2 * I));
    c->down = case_take(&at, case_size(c, E * H * I));
    c->up_bias = case_take(&at, case_size(c, E * 2 * I));
    c->down_bias = case_take(&at, case_size(c, E * H));
    c->shared_up = case_take(&at, case_size(c, c->shared * H * 2 * c->shared_inner));
    c->shared_down = case_take(&at, case_size(c, c->shared * H * c->shared_inner));
    c->bytes = (size_t)(at - start);
}

static inline void case_specials(struct moe_case *c, struct base_prng *prng)
{
    static const float values[] = {NAN, INFINITY, -INFINITY, 1e-40f, -1e-39f, 3e38f, -0.0f};

    for (int i = 0; i < 7 && c->all; i++)
        num_store(c->dtype, c->x, base_random_below(prng, c->all * c->hidden), values[i]);
}

static inline struct ref_layer case_layer(const struct moe_case *c)
{
    return (struct ref_layer){.hidden = c->hidden, .inner = c->inner, .experts = c->experts, .topk = c->topk,
                              .dtype = c->dtype, .layout = c->layout, .gating = c->gating,
                              .activation = c->activation, .up_proj = c->up, .down_proj = c->down,
                              .up_bias = c->biased ? c->up_bias : NULL, .down_bias = c->biased ? c->down_bias : NULL,
                              .shared = c->shared, .shared_inner = c->shared_inner, .shared_up = c->shared_up,
                              .shared_down = c->shared_down};
}

static inline void case_oracle(struct moe_case *c)
{
    struct ref_layer layer = case_layer(c);
    struct ref_forward forward = {.layer = &layer, .tokens = c->all, .x = c->x, .topk_ids = c->ids,
                                  .topk_weights = c->weights, .ids_type = c->ids_type,
                                  .weights_type = c->weights_type, .y = c->wanted};

    assert_int_equal(ref_moe_forward(&forward), 0);
}

static inline void case_make(struct moe_case *c)
{
    struct base_prng prng = {c->seed};

    c->all = 0;
    for (int r = 0; r < c->ranks; r++) {
        c->first[r] = c->all;
        c->all += c->tokens[r];
    }
    case_bind(c, NULL);
    c->map = mmap(NULL, c->bytes + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(c->map != MAP_FAILED);
    case_bind(c, c->map);
    case_fill(c, &prng, c->x, c->all * c->hidden, 1.0f);
    case_fill(c, &prng, c->up, (int64_t)c->experts * c->hidden * 2 * c->inner, 2.0f / sqrtf((float)c->hidden));
    case_fill(c, &prng, c->down, (int64_t)c->experts * c->hidden * c->inner, 2.0f / sqrtf((float)c->inner));
    case_fill(c, &prng, c->up_bias, (int64_t)c->experts * 2 * c->inner, 0.5f);
    case_fill(c, &prng, c->down_bias, (int64_t)c->experts * c->hidden, 0.5f);
    case_fill(c, &prng, c->shared_up, c->shared * c->hidden * 2 * c->shared_inner, 2.0f / sqrtf((float)c->hidden));
    case_fill(c, &prng, c->shared_down, c->shared * c->hidden * c->shared_inner,
              2.0f / sqrtf((float)c->shared_inner + 1.0f));
    case_route(c, &prng);
    if (c->special)
        case_specials(c, &prng);
    case_oracle(c);
}

static inline void case_free(struct moe_case *c)
{
    munmap(c->map, c->bytes + 64);
}

static inline struct hmoe_call case_call(const struct moe_case *c, int rank)
{
    int64_t first = c->first[rank], local = c->experts / c->ranks, expert = rank * local;
    size_t id = c->ids_type == HMOE_I64 ? 8 : 4;
    struct hmoe_call call = {.size = sizeof call, .tokens = c->tokens[rank], .ids_type = c->ids_type,
                             .weights_type = c->weights_type};

    call.layer = (struct hmoe_layer){.up_proj = c->up + case_size(c, expert * c->hidden * 2 * c->inner),
                                     .down_proj = c->down + case_size(c, expert * c->hidden * c->inner)};
    if (c->biased) {
        call.layer.up_bias = c->up_bias + case_size(c, expert * 2 * c->inner);
        call.layer.down_bias = c->down_bias + case_size(c, expert * c->hidden);
    }
    if (c->shared) {
        call.layer.shared_up_proj = c->shared_up;
        call.layer.shared_down_proj = c->shared_down;
    }
    if (call.tokens) {
        call.x = c->x + case_size(c, first * c->hidden);
        call.y = c->y + case_size(c, first * c->hidden);
        call.topk_ids = c->ids + (size_t)(first * c->topk) * id;
        call.topk_weights = c->weights + (size_t)(first * c->topk) * num_bytes(c->weights_type);
    }
    return call;
}

static inline struct hmoe_plan_options case_options(const struct moe_case *c)
{
    int64_t most = 0;

    for (int r = 0; r < c->ranks; r++)
        most = c->tokens[r] > most ? c->tokens[r] : most;
    return (struct hmoe_plan_options){.size = sizeof(struct hmoe_plan_options), .hidden = c->hidden,
                                      .inner = c->inner, .experts = c->experts, .topk = c->topk, .tokens_max = most,
                                      .dtype = c->dtype, .layout = c->layout, .gating = c->gating,
                                      .activation = c->activation, .calls_max = c->calls_max,
                                      .training = c->training, .shared_experts = c->shared,
                                      .shared_inner = c->shared_inner};
}

static inline enum hmoe_status case_group(const struct moe_case *c, const struct hmoe_boot *boot,
                                          struct hmoe_group **group)
{
    struct hmoe_group_options options = {.size = sizeof options, .rank = boot->rank, .ranks = boot->ranks,
                                         .workers = c->workers, .allgather = boot->allgather,
                                         .allgather_context = boot->allgather_context, .knobs = c->knobs};

    return hmoe_group_create(&options, group);
}

/* Everything that a call must not depend on: packed rows, `a`, scratch, slot outputs, permuted copies. */
static inline void case_poison(struct hmoe_plan *handle)
{
    struct moe_plan *plan = handle->moe;
    const struct moe_shape *shape = &plan->shape;

    for (int i = 0; i < plan->buffers; i++)
        memset(plan->buffer[i].a, 0xff, plan->a_bytes);
    for (int i = 0; i < plan->buffers - 1; i++)
        memset(plan->buffer[i].x, 0xff, (size_t)((char *)plan->buffer[i].a - (char *)plan->buffer[i].x));
    for (int w = 0; w < shape->workers; w++)
        memset(plan->bench[w].kern, 0xff, (size_t)((char *)plan->bench[w].in - (char *)plan->bench[w].kern));
    for (int i = 0; i < shape->calls_max; i++)
        memset(comm_peer(&plan->window, plan->rank) + plan->at.call + (size_t)i * plan->at.stride + plan->at.order,
               0xff, plan->at.stride - plan->at.order);
    for (int i = 0; i < shape->calls && shape->materialise; i++)
        memset(plan->call[i].copy_in, 0xff, (size_t)(plan->call[i].copy_out - plan->call[i].copy_in) * 2);
}

/* Compares one rank's y; 0 when equal. */
static inline int case_differs(const struct moe_case *c, int rank)
{
    size_t row = case_size(c, c->hidden), bytes = (size_t)c->tokens[rank] * row;
    const char *got = c->y + (size_t)c->first[rank] * row, *wanted = c->wanted + (size_t)c->first[rank] * row;

    if (memcmp(got, wanted, bytes) == 0)
        return 0;
    for (size_t i = 0; i < bytes; i += num_bytes(c->dtype))
        if (memcmp(got + i, wanted + i, num_bytes(c->dtype)) != 0) {
            fprintf(stderr, "rank %d token %zu column %zu differs (seed %llu)\n", rank, i / row,
                    i % row / num_bytes(c->dtype), (unsigned long long)c->seed);
            break;
        }
    return 1;
}

static inline int case_say(const char *what, enum hmoe_status status)
{
    if (status != HMOE_OK)
        fprintf(stderr, "%s: %s: %s\n", what, hmoe_status_name(status), hmoe_last_error());
    return status != HMOE_OK;
}

/* In a rank's function: 1 with the reason unless the condition holds. */
#define CHECK(condition)                                                                                      \
    do {                                                                                                      \
        if (!(condition)) {                                                                                   \
            fprintf(stderr, "%s, rank %d, line %d: %s (%s)\n", __FILE__, boot->rank, __LINE__, #condition,    \
                    hmoe_last_error());                                                                       \
            return 1;                                                                                         \
        }                                                                                                     \
    } while (0)

/* A rank's group and plan for the case. */
struct case_bed {
    struct hmoe_group *group;
    struct hmoe_plan *plan;
};

static inline int case_open(const struct moe_case *c, const struct hmoe_boot *boot, struct case_bed *bed)
{
    struct hmoe_plan_options options = case_options(c);

    return case_say("group", case_group(c, boot, &bed->group)) ||
           case_say("plan", hmoe_plan_create(bed->group, &options, &bed->plan));
}

static inline int case_close(struct case_bed *bed)
{
    return case_say("destroy plan", hmoe_plan_destroy(bed->plan)) ||
           case_say("destroy group", hmoe_group_destroy(bed->group));
}

/* One rank, without a launcher. */
static inline int case_alone(void *context, const void *mine, void *all, size_t bytes)
{
    (void)context;
    memcpy(all, mine, bytes);
    return 0;
}

static const struct hmoe_boot case_boot_alone = {.rank = 0, .ranks = 1, .allgather = case_alone};

/* What each rank does: `calls` forwards, each poisoned before and compared after. */
static inline int case_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    for (int i = 0; i < (c->calls ? c->calls : 1); i++) {
        struct hmoe_call call = case_call(c, boot->rank);
        char all[CASE_RANKS_MAX];
        case_poison(bed.plan);
        if (call.y)
            memset(call.y, 0xff, case_size(c, call.tokens * c->hidden));
        boot->allgather(boot->allgather_context, "", all, 1); /* nobody starts before all have poisoned */
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
        CHECK(!case_differs(c, boot->rank));
    }
    return case_close(&bed);
}

/* Makes, runs and frees the case. */
static inline void case_check(struct moe_case *c)
{
    enum hmoe_status status;

    case_make(c);
    status = hmoe_launch(c->via, c->ranks, case_rank, c);
    if (status != HMOE_OK)
        fprintf(stderr, "launch: %s\n", hmoe_last_error());
    assert_int_equal(status, HMOE_OK);
    case_free(c);
}

#endif
