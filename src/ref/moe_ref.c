/* The oracle. Read it as the definition of the layer: three products and two elementwise steps for each slot, then
 * a weighted sum for each token. Nothing here is fast. */
#include "ref/moe_ref.h"

#include "base/fpenv.h"
#include "base/num.h"

#include <stdbool.h>
#include <stdlib.h>

#define CHAIN_TERMS 32

/* A projection of one expert: out[c] = round(sum over i of in[i] * weight[i * term + c * column] + bias[c]).
 * The two strides make both layouts one formula. */
struct projection {
    enum hmoe_dtype dtype;
    const void *weight, *bias; /* bias NULL: none */
    int64_t terms, columns;
    int64_t term, column;
};

/* Where one slot's rows go. */
struct slot_rows {
    void *gate_up; /* [2I] */
    void *a;       /* [I] */
    void *out;     /* [H] */
};

static const void *at(enum hmoe_dtype dtype, const void *base, int64_t index)
{
    return (const char *)base + (size_t)index * num_bytes(dtype);
}

/* The last block executes the terms it lacks as (+0)*(+0): they turn a -0 that was flushed into +0. */
static float term_of(enum hmoe_dtype dtype, const void *base, int64_t stride, int64_t i, int64_t n)
{
    return i < n ? num_load(dtype, base, i * stride) : 0.0f;
}

float ref_chain(enum hmoe_dtype dtype, const void *a, int64_t as, const void *b, int64_t bs, int64_t n)
{
    float acc = 0.0f;

    for (int64_t block = 0; block < n; block += CHAIN_TERMS) {
        float e = 0.0f, o = 0.0f;
        for (int64_t i = block; i < block + CHAIN_TERMS; i += 2) {
            e = fmaf(term_of(dtype, a, as, i, n), term_of(dtype, b, bs, i, n), e);
            o = fmaf(term_of(dtype, a, as, i + 1, n), term_of(dtype, b, bs, i + 1, n), o);
        }
        acc = acc + (e + o);
    }
    return acc;
}

static void project(const struct projection *p, const void *in, void *out)
{
    for (int64_t c = 0; c < p->columns; c++) {
        float sum = ref_chain(p->dtype, in, 1, at(p->dtype, p->weight, c * p->column), p->term, p->terms);
        if (p->bias != NULL)
            sum = sum + num_load(p->dtype, p->bias, c);
        num_store(p->dtype, out, c, sum);
    }
}

/* [H,2I] of one expert, or [2I,H]; the columns stay as they are stored. */
static struct projection up_of(const struct ref_layer *layer, int64_t expert)
{
    int64_t columns = 2 * layer->inner;
    bool kn = layer->layout == HMOE_KN;

    return (struct projection){
        .dtype = layer->dtype,
        .weight = at(layer->dtype, layer->up_proj, expert * layer->hidden * columns),
        .bias = layer->up_bias == NULL ? NULL : at(layer->dtype, layer->up_bias, expert * columns),
        .terms = layer->hidden,
        .columns = columns,
        .term = kn ? columns : 1,
        .column = kn ? 1 : layer->hidden,
    };
}

/* [I,H] of one expert, or [H,I] */
static struct projection down_of(const struct ref_layer *layer, int64_t expert)
{
    bool kn = layer->layout == HMOE_KN;

    return (struct projection){
        .dtype = layer->dtype,
        .weight = at(layer->dtype, layer->down_proj, expert * layer->inner * layer->hidden),
        .bias = layer->down_bias == NULL ? NULL : at(layer->dtype, layer->down_bias, expert * layer->hidden),
        .terms = layer->inner,
        .columns = layer->hidden,
        .term = kn ? layer->hidden : 1,
        .column = kn ? 1 : layer->inner,
    };
}

/* a from the gate and up as they were stored, that is rounded */
static void gated(const struct ref_layer *layer, const void *gate_up, void *a)
{
    struct hmoe_activation act = num_activation(layer->activation);
    bool halves = layer->gating == HMOE_HALVES;

    for (int64_t i = 0; i < layer->inner; i++) {
        float gate = num_load(layer->dtype, gate_up, halves ? i : 2 * i);
        float up = num_load(layer->dtype, gate_up, halves ? layer->inner + i : 2 * i + 1);
        num_store(layer->dtype, a, i, num_gated(&act, gate, up));
    }
}

static void expert_forward(const struct ref_layer *layer, int64_t expert, const void *x, const struct slot_rows *rows)
{
    struct projection up = up_of(layer, expert), down = down_of(layer, expert);

    project(&up, x, rows->gate_up);
    gated(layer, rows->gate_up, rows->a);
    project(&down, rows->a, rows->out);
}

static int64_t id_of(const struct ref_forward *f, int64_t slot)
{
    return f->ids_type == HMOE_I32 ? ((const int32_t *)f->topk_ids)[slot] : ((const int64_t *)f->topk_ids)[slot];
}

/* Rows of the caller where it asked for them, else the scratch. */
static struct slot_rows rows_of(const struct ref_forward *f, int64_t slot, const struct slot_rows *scratch)
{
    enum hmoe_dtype dtype = f->layer->dtype;
    size_t inner = (size_t)f->layer->inner * num_bytes(dtype), hidden = (size_t)f->layer->hidden * num_bytes(dtype);
    struct slot_rows rows = *scratch;

    if (f->gate_up != NULL)
        rows.gate_up = (char *)f->gate_up + (size_t)slot * 2 * inner;
    if (f->a != NULL)
        rows.a = (char *)f->a + (size_t)slot * inner;
    if (f->slots != NULL)
        rows.out = (char *)f->slots + (size_t)slot * hidden;
    return rows;
}

/* y[t]: sum[h] = fma(weight, output, sum[h]) in slot order from +0, rounded once. A masked slot is not read. */
static void token_forward(const struct ref_forward *f, int64_t token, const struct slot_rows *scratch, float *sum)
{
    const struct ref_layer *layer = f->layer;
    const void *x = at(layer->dtype, f->x, token * layer->hidden);

    for (int64_t h = 0; h < layer->hidden; h++)
        sum[h] = 0.0f;
    for (int64_t slot = token * layer->topk; slot < (token + 1) * layer->topk; slot++) {
        int64_t expert = id_of(f, slot);
        if (expert < 0)
            continue;
        struct slot_rows rows = rows_of(f, slot, scratch);
        expert_forward(layer, expert, x, &rows);
        float weight = num_load(f->weights_type, f->topk_weights, slot);
        for (int64_t h = 0; h < layer->hidden; h++)
            sum[h] = fmaf(weight, num_load(layer->dtype, rows.out, h), sum[h]);
    }
    for (int64_t h = 0; h < layer->hidden; h++)
        num_store(layer->dtype, f->y, token * layer->hidden + h, sum[h]);
}

int ref_moe_forward(const struct ref_forward *forward)
{
    size_t inner = (size_t)forward->layer->inner, hidden = (size_t)forward->layer->hidden;
    struct slot_rows scratch = {calloc(2 * inner, 4), calloc(inner, 4), calloc(hidden, 4)};
    float *sum = calloc(hidden, sizeof *sum);
    bool have = scratch.gate_up != NULL && scratch.a != NULL && scratch.out != NULL && sum != NULL;

    if (have) {
        uint64_t before = base_fp_enter();
        for (int64_t token = 0; token < forward->tokens; token++)
            token_forward(forward, token, &scratch, sum);
        base_fp_leave(before);
    }
    free(scratch.gate_up);
    free(scratch.a);
    free(scratch.out);
    free(sum);
    return have ? 0 : -1;
}
