/* One training case: moe_case.h's forward, saved, then its backward, against the oracle, bit for bit. */
#ifndef BACK_CASE_H
#define BACK_CASE_H

#include "moe_case.h"

enum { BACK_OUTPUTS = 8 };

/* Where each gradient of the whole batch goes, in the order of struct hmoe_gradients from dx on. */
struct back_output {
    char *got, *wanted, *before; /* before: what it held, when accumulating */
    size_t bytes;
};

struct back_case {
    struct moe_case c; /* training is set */
    enum hmoe_dtype dw_type;
    enum hmoe_dw_mode dw_mode;
    int keep_rows, recompute;
    int split;       /* backward_input, then backward_weight */
    int outstanding; /* forwards before the first backward; their backwards come last first. 0: 1 */
    int unwanted;    /* bit i: output i is not asked for, NULL */
    int special_dy;  /* NaN, Inf in dy */

    /* made */
    char *dy;
    struct back_output out[BACK_OUTPUTS];
    char *map;
    size_t map_bytes;
};

enum {
    OUT_DX, OUT_D_WEIGHTS, OUT_D_UP, OUT_D_DOWN, OUT_D_UP_BIAS, OUT_D_DOWN_BIAS, OUT_D_SHARED_UP, OUT_D_SHARED_DOWN
};

static inline size_t back_dw(const struct back_case *b, int64_t elements)
{
    return (size_t)elements * num_bytes(b->dw_type);
}

static inline void back_sizes(struct back_case *b)
{
    const struct moe_case *c = &b->c;
    int64_t E = c->experts, H = c->hidden, I = c->inner, shared = (int64_t)c->ranks * c->shared * H * c->shared_inner;

    b->out[OUT_DX].bytes = case_size(c, c->all * H);
    b->out[OUT_D_WEIGHTS].bytes = (size_t)(c->all * c->topk) * num_bytes(c->weights_type);
    b->out[OUT_D_UP].bytes = back_dw(b, E * H * 2 * I);
    b->out[OUT_D_DOWN].bytes = back_dw(b, E * H * I);
    b->out[OUT_D_UP_BIAS].bytes = c->biased ? back_dw(b, E * 2 * I) : 0;
    b->out[OUT_D_DOWN_BIAS].bytes = c->biased ? back_dw(b, E * H) : 0;
    b->out[OUT_D_SHARED_UP].bytes = back_dw(b, 2 * shared);
    b->out[OUT_D_SHARED_DOWN].bytes = back_dw(b, shared);
}

static inline size_t back_bind(struct back_case *b, char *at)
{
    char *start = at;

    b->dy = case_take(&at, case_size(&b->c, b->c.all * b->c.hidden));
    for (int i = 0; i < BACK_OUTPUTS; i++) {
        b->out[i].got = case_take(&at, b->out[i].bytes);
        b->out[i].wanted = case_take(&at, b->out[i].bytes);
        b->out[i].before = case_take(&at, b->out[i].bytes);
    }
    return (size_t)(at - start);
}

/* Of output i what belongs to the rank; NULL when it is not asked for. */
static inline char *back_part(const struct back_case *b, int i, char *whole, int rank, size_t *bytes)
{
    const struct moe_case *c = &b->c;
    size_t all = b->out[i].bytes, first;

    if (i == OUT_DX || i == OUT_D_WEIGHTS) {
        first = c->all ? all / (size_t)c->all * (size_t)c->first[rank] : 0;
        *bytes = c->all ? all / (size_t)c->all * (size_t)c->tokens[rank] : 0;
    } else {
        *bytes = all / (size_t)c->ranks;
        first = *bytes * (size_t)rank;
    }
    return !*bytes || b->unwanted >> i & 1 ? NULL : whole + first;
}

static inline void back_gradients(const struct back_case *b, int rank, struct hmoe_gradients *grad)
{
    size_t bytes;
    char *part[BACK_OUTPUTS];

    for (int i = 0; i < BACK_OUTPUTS; i++)
        part[i] = back_part(b, i, b->out[i].got, rank, &bytes);
    *grad = (struct hmoe_gradients){.dx = part[0], .d_topk_weights = part[1], .d_up_proj = part[2],
        .d_down_proj = part[3], .d_up_bias = part[4], .d_down_bias = part[5], .d_shared_up_proj = part[6],
        .d_shared_down_proj = part[7], .dw_type = b->dw_type, .dw_mode = b->dw_mode};
    if (b->c.tokens[rank])
        grad->dy = b->dy + case_size(&b->c, b->c.first[rank] * b->c.hidden);
}

/* The shared experts' gradients are of one rank's tokens. */
static inline void back_oracle_shared(struct back_case *b, const struct ref_forward *all, int rank)
{
    const struct moe_case *c = &b->c;
    size_t bytes, id = c->ids_type == HMOE_I64 ? 8 : 4;
    int64_t first = c->first[rank];
    struct ref_forward forward = *all;
    struct ref_backward backward = {.forward = &forward, .dw_type = b->dw_type, .dw_mode = b->dw_mode,
                                    .dy = b->dy + case_size(c, first * c->hidden)};

    forward.tokens = c->tokens[rank];
    forward.x = c->x + case_size(c, first * c->hidden);
    forward.topk_ids = c->ids + (size_t)(first * c->topk) * id;
    forward.topk_weights = c->weights + (size_t)(first * c->topk) * num_bytes(c->weights_type);
    backward.d_shared_up = back_part(b, OUT_D_SHARED_UP, b->out[OUT_D_SHARED_UP].wanted, rank, &bytes);
    backward.d_shared_down = back_part(b, OUT_D_SHARED_DOWN, b->out[OUT_D_SHARED_DOWN].wanted, rank, &bytes);
    assert_int_equal(ref_moe_backward(&backward), 0);
}

static inline void back_oracle(struct back_case *b)
{
    const struct moe_case *c = &b->c;
    struct ref_layer layer = case_layer(c);
    struct ref_forward forward = {.layer = &layer, .tokens = c->all, .x = c->x, .topk_ids = c->ids,
                                  .topk_weights = c->weights, .ids_type = c->ids_type,
                                  .weights_type = c->weights_type};
    struct ref_backward backward = {.forward = &forward, .dy = b->dy, .dx = b->out[0].wanted,
                                    .d_topk_weights = b->out[1].wanted, .d_up_proj = b->out[2].wanted,
                                    .d_down_proj = b->out[3].wanted, .dw_type = b->dw_type, .dw_mode = b->dw_mode};

    if (c->biased) {
        backward.d_up_bias = b->out[4].wanted;
        backward.d_down_bias = b->out[5].wanted;
    }
    assert_int_equal(ref_moe_backward(&backward), 0);
    for (int r = 0; r < c->ranks && c->shared; r++)
        back_oracle_shared(b, &forward, r);
}

/* What the gradients hold before: numbers when they are added to, else NaN. */
static inline void back_before(struct back_case *b, struct base_prng *prng)
{
    for (int i = 0; i < BACK_OUTPUTS; i++) {
        struct back_output *out = &b->out[i];
        memset(out->before, 0xff, out->bytes);
        if (i >= OUT_D_UP && b->dw_mode == HMOE_ACCUMULATE)
            for (size_t e = 0; e < out->bytes / num_bytes(b->dw_type); e++)
                num_store(b->dw_type, out->before, (int64_t)e, base_random_sym(prng, 1.0f));
        memcpy(out->wanted, out->before, out->bytes);
    }
}

static inline void back_make(struct back_case *b)
{
    struct base_prng prng = {b->c.seed + 77};

    b->c.training = 1;
    if (!b->c.calls_max)
        b->c.calls_max = 1;
    case_make(&b->c);
    back_sizes(b);
    b->map_bytes = back_bind(b, NULL) + 64;
    b->map = mmap(NULL, b->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(b->map != MAP_FAILED);
    back_bind(b, b->map);
    case_fill(&b->c, &prng, b->dy, b->c.all * b->c.hidden, 1.0f);
    for (int i = 0; i < 3 && b->special_dy && b->c.all; i++)
        num_store(b->c.dtype, b->dy, base_random_below(&prng, b->c.all * b->c.hidden), i ? INFINITY : NAN);
    back_before(b, &prng);
    back_oracle(b);
}

static inline void back_free(struct back_case *b)
{
    munmap(b->map, b->map_bytes);
    case_free(&b->c);
}

static inline void back_reset(struct back_case *b, int rank)
{
    size_t bytes;

    for (int i = 0; i < BACK_OUTPUTS; i++) {
        char *got = back_part(b, i, b->out[i].got, rank, &bytes);
        if (got)
            memcpy(got, back_part(b, i, b->out[i].before, rank, &bytes), bytes);
    }
}

/* 0 when all that the rank got is what the oracle says. */
static inline int back_differs(struct back_case *b, int rank)
{
    static const char *const name[BACK_OUTPUTS] = {"dx", "d_topk_weights", "d_up_proj", "d_down_proj", "d_up_bias",
                                                   "d_down_bias", "d_shared_up_proj", "d_shared_down_proj"};
    int wrong = 0;

    for (int i = 0; i < BACK_OUTPUTS; i++) {
        size_t bytes, at = 0;
        const char *got = back_part(b, i, b->out[i].got, rank, &bytes);
        const char *wanted = back_part(b, i, b->out[i].wanted, rank, &bytes);
        if (!got || memcmp(got, wanted, bytes) == 0)
            continue;
        while (got[at] == wanted[at])
            at++;
        fprintf(stderr, "rank %d: %s differs from byte %zu of %zu on (seed %llu)\n", rank, name[i], at, bytes,
                (unsigned long long)b->c.seed);
        wrong = 1;
    }
    return wrong;
}

/* More memory that a call must not depend on. */
static inline void back_poison(struct hmoe_plan *handle)
{
    struct moe_plan *plan = handle->moe;

    case_poison(handle);
    for (int i = 0; i < plan->buffers; i++) {
        struct moe_back *back = &plan->buffer[i].back;
        memset(back->gate_up, 0xff, (size_t)((char *)(void *)back->one_at - back->gate_up));
    }
    for (int w = 0; w < plan->shape.workers; w++)
        memset(plan->bench[w].a, 0xff, plan->a_bytes);
}

static inline int back_run(struct back_case *b, const struct hmoe_boot *boot, struct hmoe_plan *plan,
                           struct hmoe_saved *saved)
{
    struct hmoe_call call = {.size = sizeof call, .saved = saved};

    back_gradients(b, boot->rank, &call.grad);
    if (!b->split)
        return case_say("backward", hmoe_backward(plan, &call));
    if (case_say("backward_input", hmoe_backward_input(plan, &call)))
        return 1;
    back_poison(plan);
    call.grad.dy = NULL; /* a weight gradient knows it no more */
    return case_say("backward_weight", hmoe_backward_weight(plan, &call));
}

/* What each rank does, `calls` times: forwards into as many handles as are outstanding, then their backwards. */
static inline int back_rank(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct moe_case *c = &b->c;
    struct hmoe_saved_options options = {.size = sizeof options, .keep_rows = b->keep_rows,
                                         .recompute = b->recompute};
    int handles = b->outstanding ? b->outstanding : 1;
    struct hmoe_saved *saved[8];
    struct case_bed bed;
    char all[CASE_RANKS_MAX];

    CHECK(!case_open(c, boot, &bed));
    for (int i = 0; i < handles; i++)
        CHECK(hmoe_saved_create(bed.plan, &options, &saved[i]) == HMOE_OK);
    for (int round = 0; round < (c->calls ? c->calls : 1); round++) {
        for (int i = 0; i < handles; i++) {
            struct hmoe_call call = case_call(c, boot->rank);
            call.saved = saved[i];
            CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
            CHECK(!case_differs(c, boot->rank));
        }
        for (int i = handles; i-- > 0;) {
            boot->allgather(boot->allgather_context, "", all, 1); /* nobody writes my window now */
            back_poison(bed.plan);
            back_reset(b, boot->rank);
            boot->allgather(boot->allgather_context, "", all, 1);
            CHECK(!back_run(b, boot, bed.plan, saved[i]));
            CHECK(!back_differs(b, boot->rank));
        }
    }
    for (int i = 0; i < handles; i++)
        CHECK(hmoe_saved_destroy(saved[i]) == HMOE_OK);
    return case_close(&bed);
}

static inline void back_check(struct back_case *b)
{
    enum hmoe_status status;

    back_make(b);
    status = hmoe_launch(b->c.via, b->c.ranks, back_rank, b);
    if (status != HMOE_OK)
        fprintf(stderr, "launch: %s\n", hmoe_last_error());
    assert_int_equal(status, HMOE_OK);
    back_free(b);
}

#endif
