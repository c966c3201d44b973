/* The oracle's way back: for each slot dA, the gradient of SwiGLU, dx; for each token a sum over its slots; for each
 * weight a sum over its expert's rows, in the order of the slots. Nothing here is fast. */
#include "ref/parts.h"

#include "base/fpenv.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* The rows of one expert, in order, with what its weights' gradients are made of. */
struct kept {
    int64_t rows, inner;
    char *x, *dh, *a, *dy; /* [rows,H] [rows,2I] [rows,I] [rows,H], dy times weight, rounded */
};

/* One slot's way back. */
struct slot {
    struct ref_expert expert;
    const void *x, *dy; /* of its token */
    float weight;
    char *gate_up, *a;  /* scratch */
    float *da;          /* [I] scratch */
    char *dh, *dx;      /* out */
    float d_weight;     /* out */
};

struct gradient_of {
    void *up, *down, *up_bias, *down_bias; /* of one expert, or NULL */
};

static struct ref_terms row(enum hmoe_dtype dtype, const void *base)
{
    return (struct ref_terms){dtype, base, 1};
}

/* dA[i] = chain over h of dY[h] * Wd[i][h], and d_weight = chain over i of dA * a, plus that of dY * bias */
static void slot_da(const struct ref_layer *layer, struct slot *slot)
{
    struct ref_projection down = ref_down(layer, slot->expert);

    for (int64_t i = 0; i < down.terms; i++) {
        struct ref_terms weight = {down.dtype, ref_at(down.dtype, down.weight, i * down.term), down.column};
        slot->da[i] = ref_chain(row(down.dtype, slot->dy), weight, layer->hidden);
    }
    slot->d_weight = ref_chain(row(HMOE_F32, slot->da), row(down.dtype, slot->a), down.terms);
    if (down.bias != NULL)
        slot->d_weight = slot->d_weight + ref_chain(row(down.dtype, slot->dy), row(down.dtype, down.bias),
                                                    layer->hidden);
}

static void slot_dh(const struct ref_layer *layer, struct slot *slot)
{
    struct hmoe_activation act = num_activation(layer->activation);
    enum hmoe_dtype dtype = layer->dtype;

    for (int64_t i = 0; i < slot->expert.inner; i++) {
        struct ref_pair at = ref_pair(layer, slot->expert.inner, i);
        float gate = num_load(dtype, slot->gate_up, at.gate), up = num_load(dtype, slot->gate_up, at.up);
        struct num_gate_grad grad = num_gated_grad(&act, gate, up, slot->da[i] * slot->weight);
        num_store(dtype, slot->dh, at.gate, grad.gate);
        num_store(dtype, slot->dh, at.up, grad.up);
    }
}

/* dx[h] = chain over the columns of up_proj as stored */
static void slot_dx(const struct ref_layer *layer, struct slot *slot)
{
    struct ref_projection up = ref_up(layer, slot->expert);

    for (int64_t h = 0; h < layer->hidden; h++) {
        struct ref_terms weight = {up.dtype, ref_at(up.dtype, up.weight, h * up.term), up.column};
        num_store(layer->dtype, slot->dx, h, ref_chain(row(layer->dtype, slot->dh), weight, up.columns));
    }
}

static void slot_backward(const struct ref_layer *layer, struct slot *slot)
{
    struct ref_rows rows = {slot->gate_up, slot->a, NULL};

    ref_expert_forward(layer, slot->expert, slot->x, &rows);
    slot_da(layer, slot);
    slot_dh(layer, slot);
    slot_dx(layer, slot);
}

/* ---- weights' gradients */

static void put(const struct ref_backward *b, void *to, int64_t index, float sum)
{
    if (b->dw_mode == HMOE_ACCUMULATE)
        sum = num_load(b->dw_type, to, index) + sum;
    num_store(b->dw_type, to, index, sum);
}

/* to[k * k_step + n * n_step] = chain over the rows of left[r][k] * right[r][n] */
struct outer {
    const char *left, *right;
    int64_t left_columns, right_columns, rows;
    void *to;
    int64_t k_step, n_step;
};

static void outer(const struct ref_backward *b, const struct outer *o)
{
    enum hmoe_dtype dtype = b->forward->layer->dtype;

    for (int64_t k = 0; k < o->left_columns && o->to != NULL; k++)
        for (int64_t n = 0; n < o->right_columns; n++) {
            struct ref_terms left = {dtype, ref_at(dtype, o->left, k), o->left_columns};
            struct ref_terms right = {dtype, ref_at(dtype, o->right, n), o->right_columns};
            put(b, o->to, k * o->k_step + n * o->n_step, ref_chain(left, right, o->rows));
        }
}

static void bias(const struct ref_backward *b, const char *of, int64_t columns, int64_t rows, void *to)
{
    const float one = 1.0f;
    enum hmoe_dtype dtype = b->forward->layer->dtype;

    for (int64_t n = 0; n < columns && to != NULL; n++) {
        struct ref_terms terms = {dtype, ref_at(dtype, of, n), columns};
        put(b, to, n, ref_chain(terms, (struct ref_terms){HMOE_F32, &one, 0}, rows));
    }
}

static void expert_weights(const struct ref_backward *b, const struct kept *kept, struct gradient_of to)
{
    const struct ref_layer *layer = b->forward->layer;
    bool kn = layer->layout == HMOE_KN;
    int64_t hidden = layer->hidden, inner = kept->inner;

    if (kept->rows == 0 && b->dw_mode == HMOE_ACCUMULATE)
        return;
    outer(b, &(struct outer){kept->x, kept->dh, hidden, 2 * inner, kept->rows, to.up, kn ? 2 * inner : 1,
                             kn ? 1 : hidden});
    outer(b, &(struct outer){kept->a, kept->dy, inner, hidden, kept->rows, to.down, kn ? hidden : 1, kn ? 1 : inner});
    bias(b, kept->dh, 2 * inner, kept->rows, to.up_bias);
    bias(b, kept->dy, hidden, kept->rows, to.down_bias);
}

/* ---- the whole */

/* All scratch, and the rows of dx that tokens sum. */
struct scratch {
    char *gate_up, *a, *dh, *dx; /* one slot's */
    float *da;
    struct kept kept;
    char *dx_slots;   /* [T*K,H] */
    char *dx_shared;  /* [S,T,H] */
};

static void keep(const struct ref_layer *layer, struct kept *kept, const struct slot *slot)
{
    enum hmoe_dtype dtype = layer->dtype;
    size_t hidden = (size_t)layer->hidden * num_bytes(dtype), inner = (size_t)kept->inner * num_bytes(dtype);
    size_t at = (size_t)kept->rows++;

    memcpy(kept->x + at * hidden, slot->x, hidden);
    memcpy(kept->dh + at * 2 * inner, slot->dh, 2 * inner);
    memcpy(kept->a + at * inner, slot->a, inner);
    for (int64_t h = 0; h < layer->hidden; h++)
        num_store(dtype, kept->dy + at * hidden, h, slot->weight * num_load(dtype, slot->dy, h));
}

static struct slot slot_of(const struct ref_backward *b, const struct scratch *s, int64_t token,
                           struct ref_expert expert)
{
    const struct ref_layer *layer = b->forward->layer;

    return (struct slot){.expert = expert, .x = ref_at(layer->dtype, b->forward->x, token * layer->hidden),
                         .dy = ref_at(layer->dtype, b->dy, token * layer->hidden), .weight = 1.0f,
                         .gate_up = s->gate_up, .a = s->a, .da = s->da, .dh = s->dh, .dx = s->dx};
}

static void routed_slot(const struct ref_backward *b, struct scratch *s, int64_t number, int64_t e)
{
    const struct ref_forward *f = b->forward;
    const struct ref_layer *layer = f->layer;
    size_t bytes = num_bytes(layer->dtype), hidden = (size_t)layer->hidden * bytes;
    size_t inner = (size_t)layer->inner * bytes;
    struct slot slot = slot_of(b, s, number / layer->topk, ref_routed(layer, e));

    slot.weight = num_load(f->weights_type, f->topk_weights, number);
    slot.dx = s->dx_slots + (size_t)number * hidden;
    slot_backward(layer, &slot);
    if (b->d_topk_weights != NULL)
        num_store(f->weights_type, b->d_topk_weights, number, slot.d_weight);
    if (b->dh != NULL)
        memcpy((char *)b->dh + (size_t)number * 2 * inner, slot.dh, 2 * inner);
    if (b->dx_slots != NULL)
        memcpy((char *)b->dx_slots + (size_t)number * hidden, slot.dx, hidden);
    keep(layer, &s->kept, &slot);
}

static void *part(const struct ref_backward *b, void *base, int64_t index)
{
    return base == NULL ? NULL : (char *)base + (size_t)index * num_bytes(b->dw_type);
}

static void routed_expert(const struct ref_backward *b, struct scratch *s, int64_t e)
{
    const struct ref_layer *layer = b->forward->layer;
    int64_t inner = layer->inner, hidden = layer->hidden;
    struct gradient_of to = {part(b, b->d_up_proj, e * hidden * 2 * inner), part(b, b->d_down_proj, e * inner * hidden),
                             part(b, b->d_up_bias, e * 2 * inner), part(b, b->d_down_bias, e * hidden)};

    s->kept.rows = 0;
    s->kept.inner = inner;
    for (int64_t slot = 0; slot < b->forward->tokens * layer->topk; slot++)
        if (ref_id(b->forward, slot) == e)
            routed_slot(b, s, slot, e);
    expert_weights(b, &s->kept, to);
}

static void shared_expert(const struct ref_backward *b, struct scratch *s, int64_t e)
{
    const struct ref_layer *layer = b->forward->layer;
    int64_t inner = layer->shared_inner, hidden = layer->hidden, tokens = b->forward->tokens;
    struct gradient_of to = {part(b, b->d_shared_up, e * hidden * 2 * inner),
                             part(b, b->d_shared_down, e * inner * hidden), NULL, NULL};

    s->kept.rows = 0;
    s->kept.inner = inner;
    for (int64_t token = 0; token < tokens; token++) {
        struct slot slot = slot_of(b, s, token, ref_shared(layer, e));
        slot.dx = s->dx_shared + (size_t)((e * tokens + token) * hidden) * num_bytes(layer->dtype);
        slot_backward(layer, &slot);
        keep(layer, &s->kept, &slot);
    }
    expert_weights(b, &s->kept, to);
}

/* dx[t]: acc = acc + dx of each slot in order from +0, shared experts last, rounded once */
static void token_dx(const struct ref_backward *b, const struct scratch *s, int64_t token)
{
    const struct ref_layer *layer = b->forward->layer;
    int64_t hidden = layer->hidden, tokens = b->forward->tokens;

    for (int64_t h = 0; h < hidden; h++) {
        float acc = 0.0f;
        for (int64_t slot = token * layer->topk; slot < (token + 1) * layer->topk; slot++)
            if (ref_id(b->forward, slot) >= 0)
                acc = acc + num_load(layer->dtype, s->dx_slots, slot * hidden + h);
        for (int64_t e = 0; e < layer->shared; e++)
            acc = acc + num_load(layer->dtype, s->dx_shared, (e * tokens + token) * hidden + h);
        num_store(layer->dtype, b->dx, token * hidden + h, acc);
    }
}

static void backward(const struct ref_backward *b, struct scratch *s)
{
    const struct ref_forward *f = b->forward;

    for (int64_t slot = 0; slot < f->tokens * f->layer->topk && b->d_topk_weights != NULL; slot++)
        num_store(f->weights_type, b->d_topk_weights, slot, 0.0f);
    for (int64_t e = 0; e < f->layer->experts; e++)
        routed_expert(b, s, e);
    for (int64_t e = 0; e < f->layer->shared; e++)
        shared_expert(b, s, e);
    for (int64_t token = 0; token < f->tokens && b->dx != NULL; token++)
        token_dx(b, s, token);
}

/* Everything as large as f32 would need. */
static size_t bind(const struct ref_forward *f, struct scratch *s, void *memory)
{
    struct base_carve at = {memory, 0};
    size_t inner = ref_inner_most(f->layer) * 4, hidden = (size_t)f->layer->hidden * 4, tokens = (size_t)f->tokens;
    size_t slots = tokens * (size_t)f->layer->topk, rows = slots > tokens ? slots : tokens;

    s->gate_up = base_carve(&at, 2 * inner);
    s->a = base_carve(&at, inner);
    s->dh = base_carve(&at, 2 * inner);
    s->dx = base_carve(&at, hidden);
    s->da = base_carve(&at, inner);
    s->kept.x = base_carve(&at, rows * hidden);
    s->kept.dh = base_carve(&at, rows * 2 * inner);
    s->kept.a = base_carve(&at, rows * inner);
    s->kept.dy = base_carve(&at, rows * hidden);
    s->dx_slots = base_carve(&at, slots * hidden);
    s->dx_shared = base_carve(&at, (size_t)f->layer->shared * tokens * hidden);
    return at.used;
}

int ref_moe_backward(const struct ref_backward *b)
{
    struct scratch s;
    char *memory = calloc(bind(b->forward, &s, NULL), 1);
    uint64_t before;

    if (memory == NULL)
        return -1;
    bind(b->forward, &s, memory);
    before = base_fp_enter();
    backward(b, &s);
    base_fp_leave(before);
    free(memory);
    return 0;
}
