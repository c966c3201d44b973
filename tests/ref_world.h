/* Random small layers for the tests of the oracle. */
#ifndef REF_WORLD_H
#define REF_WORLD_H

#include "base/num.h"
#include "base/prng.h"
#include "ref/moe_ref.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdbool.h>
#include <stdlib.h>

/* A layer, its input, and every output the oracle can give. */
struct world {
    struct ref_layer layer;
    struct ref_forward call;
    void *up, *down, *up_bias, *down_bias, *x, *ids, *weights, *gate_up, *a, *slots, *y;
    void *dy; /* or NULL */
};

struct shape {
    int64_t tokens, hidden, inner;
    int experts, topk;
};

enum { BIASED = 1, INTERLEAVED = 2, NK = 4, CLAMPED = 8, VARIANTS = 16 };

static const struct shape odd_shape = {6, 37, 19, 4, 3}, two_block_shape = {3, 65, 33, 3, 2};
static const struct shape crowded = {5, 16, 40, 2, 7};
static const struct hmoe_activation oss = {1.702f, 7.0f, 1.0f};
static const enum hmoe_dtype dtypes[] = {HMOE_F32, HMOE_BF16, HMOE_F16};

static inline void *tensor(struct base_prng *prng, enum hmoe_dtype dtype, int64_t count, float scale)
{
    void *values = malloc((size_t)count * num_bytes(dtype));
    assert_non_null(values);
    for (int64_t i = 0; i < count; i++)
        num_store(dtype, values, i, base_random_sym(prng, scale));
    return values;
}

static inline void set_id(struct world *w, int64_t slot, int64_t id)
{
    if (w->call.ids_type == HMOE_I32)
        ((int32_t *)w->ids)[slot] = (int32_t)id;
    else
        ((int64_t *)w->ids)[slot] = id;
}

static inline int64_t id_at(const struct world *w, int64_t slot)
{
    return w->call.ids_type == HMOE_I32 ? ((const int32_t *)w->ids)[slot] : ((const int64_t *)w->ids)[slot];
}

/* Outputs start as 0xee bytes. */
static inline void *poisoned(int64_t count, enum hmoe_dtype dtype)
{
    void *values = malloc((size_t)count * num_bytes(dtype));
    assert_non_null(values);
    return memset(values, 0xee, (size_t)count * num_bytes(dtype));
}

static inline void make_outputs(struct world *w)
{
    const struct ref_layer *l = &w->layer;
    int64_t slots = w->call.tokens * l->topk;

    w->gate_up = poisoned(slots * 2 * l->inner, l->dtype);
    w->a = poisoned(slots * l->inner, l->dtype);
    w->slots = poisoned(slots * l->hidden, l->dtype);
    w->y = poisoned(w->call.tokens * l->hidden, l->dtype);
}

static inline void connect(struct world *w)
{
    struct ref_layer *l = &w->layer;
    struct ref_forward *c = &w->call;

    l->up_proj = w->up;
    l->down_proj = w->down;
    l->up_bias = w->up_bias;
    l->down_bias = w->down_bias;
    c->layer = l;
    c->x = w->x;
    c->topk_ids = w->ids;
    c->topk_weights = w->weights;
    c->y = w->y;
    c->gate_up = w->gate_up;
    c->a = w->a;
    c->slots = w->slots;
}

/* Every fifth slot or so is masked. */
static inline struct world *world(uint64_t seed, enum hmoe_dtype dtype, const struct shape *s, int variant)
{
    struct base_prng prng = {seed};
    struct world *w = calloc(1, sizeof *w);
    int64_t E = s->experts, H = s->hidden, I = s->inner, slots = s->tokens * s->topk;
    float near = variant & CLAMPED ? 8.0f : 1.0f;
    assert_non_null(w);

    w->layer = (struct ref_layer){.hidden = H, .inner = I, .experts = s->experts, .topk = s->topk, .dtype = dtype};
    w->layer.layout = variant & NK ? HMOE_NK : HMOE_KN;
    w->layer.gating = variant & INTERLEAVED ? HMOE_INTERLEAVED : HMOE_HALVES;
    w->layer.activation = variant & CLAMPED ? oss : (struct hmoe_activation){0};
    w->call = (struct ref_forward){.tokens = s->tokens, .weights_type = dtypes[seed % 3]};
    w->call.ids_type = seed & 1 ? HMOE_I32 : HMOE_I64;
    w->up = tensor(&prng, dtype, E * H * 2 * I, near);
    w->down = tensor(&prng, dtype, E * I * H, 0.5f);
    w->up_bias = variant & BIASED ? tensor(&prng, dtype, E * 2 * I, 1.0f) : NULL;
    w->down_bias = variant & BIASED ? tensor(&prng, dtype, E * H, 1.0f) : NULL;
    w->x = tensor(&prng, dtype, s->tokens * H, 1.0f);
    w->weights = tensor(&prng, w->call.weights_type, slots, 1.0f);
    w->ids = malloc((size_t)slots * 8);
    assert_non_null(w->ids);
    for (int64_t slot = 0; slot < slots; slot++)
        set_id(w, slot, base_random_below(&prng, 5) == 0 ? -1 : base_random_below(&prng, E));
    make_outputs(w);
    connect(w);
    return w;
}

static inline void drop(struct world *w)
{
    void *all[] = {w->up, w->down, w->up_bias, w->down_bias, w->x, w->ids,
                   w->weights, w->gate_up, w->a, w->slots, w->y, w->dy};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free(w);
}

static inline void forward(struct world *w)
{
    assert_int_equal(ref_moe_forward(&w->call), 0);
}

#endif
