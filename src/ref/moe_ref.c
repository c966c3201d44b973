/* The oracle. Read it as the definition of the layer: three products and two elementwise steps for each slot, then
 * a weighted sum for each token. Nothing here is fast. */
#include "ref/parts.h"

#include "base/fpenv.h"

#include <stdlib.h>

#define CHAIN_TERMS 32

/* The last block executes the terms it lacks as (+0)*(+0): they turn a -0 that was flushed into +0. */
static float term_of(struct ref_terms terms, int64_t i, int64_t n)
{
    return i < n ? num_load(terms.dtype, terms.base, i * terms.step) : 0.0f;
}

float ref_chain(struct ref_terms a, struct ref_terms b, int64_t n)
{
    float acc = 0.0f;

    for (int64_t block = 0; block < n; block += CHAIN_TERMS) {
        float e = 0.0f, o = 0.0f;
        for (int64_t i = block; i < block + CHAIN_TERMS; i += 2) {
            e = fmaf(term_of(a, i, n), term_of(b, i, n), e);
            o = fmaf(term_of(a, i + 1, n), term_of(b, i + 1, n), o);
        }
        acc = acc + (e + o);
    }
    return acc;
}

static void project(const struct ref_projection *p, const void *in, void *out)
{
    for (int64_t c = 0; c < p->columns; c++) {
        struct ref_terms weight = {p->dtype, ref_at(p->dtype, p->weight, c * p->column), p->term};
        float sum = ref_chain((struct ref_terms){p->dtype, in, 1}, weight, p->terms);
        if (p->bias != NULL)
            sum = sum + num_load(p->dtype, p->bias, c);
        num_store(p->dtype, out, c, sum);
    }
}

/* a from the gate and up as they were stored, that is rounded */
static void gated(const struct ref_layer *layer, int64_t inner, const void *gate_up, void *a)
{
    struct hmoe_activation act = num_activation(layer->activation);

    for (int64_t i = 0; i < inner; i++) {
        struct ref_pair at = ref_pair(layer, inner, i);
        float gate = num_load(layer->dtype, gate_up, at.gate), up = num_load(layer->dtype, gate_up, at.up);
        num_store(layer->dtype, a, i, num_gated(&act, gate, up));
    }
}

void ref_expert_forward(const struct ref_layer *layer, struct ref_expert expert, const void *x,
                        const struct ref_rows *rows)
{
    struct ref_projection up = ref_up(layer, expert), down = ref_down(layer, expert);

    project(&up, x, rows->gate_up);
    gated(layer, expert.inner, rows->gate_up, rows->a);
    if (rows->out != NULL)
        project(&down, rows->a, rows->out);
}

/* Rows of the caller where it asked for them, else the scratch. */
static struct ref_rows rows_of(const struct ref_forward *f, int64_t slot, const struct ref_rows *scratch)
{
    enum hmoe_dtype dtype = f->layer->dtype;
    size_t inner = (size_t)f->layer->inner * num_bytes(dtype), hidden = (size_t)f->layer->hidden * num_bytes(dtype);
    struct ref_rows rows = *scratch;

    if (f->gate_up != NULL)
        rows.gate_up = (char *)f->gate_up + (size_t)slot * 2 * inner;
    if (f->a != NULL)
        rows.a = (char *)f->a + (size_t)slot * inner;
    if (f->slots != NULL)
        rows.out = (char *)f->slots + (size_t)slot * hidden;
    return rows;
}

static void add(const struct ref_layer *layer, float weight, const void *out, float *sum)
{
    for (int64_t h = 0; h < layer->hidden; h++)
        sum[h] = fmaf(weight, num_load(layer->dtype, out, h), sum[h]);
}

/* y[t]: sum[h] = fma(weight, output, sum[h]) in slot order from +0, rounded once. A masked slot is not read. */
static void token_forward(const struct ref_forward *f, int64_t token, const struct ref_rows *scratch, float *sum)
{
    const struct ref_layer *layer = f->layer;
    const void *x = ref_at(layer->dtype, f->x, token * layer->hidden);

    for (int64_t h = 0; h < layer->hidden; h++)
        sum[h] = 0.0f;
    for (int64_t slot = token * layer->topk; slot < (token + 1) * layer->topk; slot++) {
        int64_t expert = ref_id(f, slot);
        if (expert < 0)
            continue;
        struct ref_rows rows = rows_of(f, slot, scratch);
        ref_expert_forward(layer, ref_routed(layer, expert), x, &rows);
        add(layer, num_load(f->weights_type, f->topk_weights, slot), rows.out, sum);
    }
    for (int s = 0; s < layer->shared; s++) {
        ref_expert_forward(layer, ref_shared(layer, s), x, scratch);
        add(layer, 1.0f, scratch->out, sum);
    }
    for (int64_t h = 0; h < layer->hidden; h++)
        num_store(layer->dtype, f->y, token * layer->hidden + h, sum[h]);
}

int ref_moe_forward(const struct ref_forward *forward)
{
    size_t inner = ref_inner_most(forward->layer), hidden = (size_t)forward->layer->hidden;
    struct ref_rows scratch = {calloc(2 * inner, 4), calloc(inner, 4), calloc(hidden, 4)};
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
