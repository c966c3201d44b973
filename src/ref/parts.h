/* What both directions of the oracle share: an expert's matrices as strides, and its forward. */
#ifndef REF_PARTS_H
#define REF_PARTS_H

#include "base/num.h"
#include "ref/moe_ref.h"

#include <stdbool.h>

/* One expert, routed or shared. */
struct ref_expert {
    int64_t inner;
    const void *up, *down, *up_bias, *down_bias; /* its own; biases may be NULL */
};

/* A projection of one expert: out[c] = round(sum over i of in[i] * weight[i * term + c * column] + bias[c]).
 * The two strides make both layouts one formula. */
struct ref_projection {
    enum hmoe_dtype dtype;
    const void *weight, *bias; /* bias NULL: none */
    int64_t terms, columns;
    int64_t term, column;
};

/* Where one slot's rows go. */
struct ref_rows {
    void *gate_up; /* [2I] */
    void *a;       /* [I] */
    void *out;     /* [H], or NULL: not wanted */
};

/* The columns of up_proj that make column i of `a`. */
struct ref_pair {
    int64_t gate, up;
};

static inline const void *ref_at(enum hmoe_dtype dtype, const void *base, int64_t index)
{
    return base == NULL ? NULL : (const char *)base + (size_t)index * num_bytes(dtype);
}

static inline struct ref_pair ref_pair(const struct ref_layer *layer, int64_t inner, int64_t i)
{
    bool halves = layer->gating == HMOE_HALVES;

    return (struct ref_pair){halves ? i : 2 * i, halves ? inner + i : 2 * i + 1};
}

static inline int64_t ref_id(const struct ref_forward *f, int64_t slot)
{
    return f->ids_type == HMOE_I32 ? ((const int32_t *)f->topk_ids)[slot] : ((const int64_t *)f->topk_ids)[slot];
}

static inline struct ref_expert ref_routed(const struct ref_layer *layer, int64_t e)
{
    int64_t inner = layer->inner, hidden = layer->hidden;

    return (struct ref_expert){inner, ref_at(layer->dtype, layer->up_proj, e * hidden * 2 * inner),
                               ref_at(layer->dtype, layer->down_proj, e * inner * hidden),
                               ref_at(layer->dtype, layer->up_bias, e * 2 * inner),
                               ref_at(layer->dtype, layer->down_bias, e * hidden)};
}

static inline struct ref_expert ref_shared(const struct ref_layer *layer, int64_t s)
{
    int64_t inner = layer->shared_inner, hidden = layer->hidden;

    return (struct ref_expert){inner, ref_at(layer->dtype, layer->shared_up, s * hidden * 2 * inner),
                               ref_at(layer->dtype, layer->shared_down, s * inner * hidden), NULL, NULL};
}

static inline size_t ref_inner_most(const struct ref_layer *layer)
{
    return (size_t)(layer->shared && layer->shared_inner > layer->inner ? layer->shared_inner : layer->inner);
}

/* [H,2I] of one expert, or [2I,H]; the columns stay as they are stored. */
static inline struct ref_projection ref_up(const struct ref_layer *layer, struct ref_expert expert)
{
    bool kn = layer->layout == HMOE_KN;

    return (struct ref_projection){.dtype = layer->dtype, .weight = expert.up, .bias = expert.up_bias,
                                   .terms = layer->hidden, .columns = 2 * expert.inner,
                                   .term = kn ? 2 * expert.inner : 1, .column = kn ? 1 : layer->hidden};
}

/* [I,H] of one expert, or [H,I] */
static inline struct ref_projection ref_down(const struct ref_layer *layer, struct ref_expert expert)
{
    bool kn = layer->layout == HMOE_KN;

    return (struct ref_projection){.dtype = layer->dtype, .weight = expert.down, .bias = expert.down_bias,
                                   .terms = expert.inner, .columns = layer->hidden,
                                   .term = kn ? layer->hidden : 1, .column = kn ? 1 : expert.inner};
}

/* Under base_fp_enter(). */
void ref_expert_forward(const struct ref_layer *layer, struct ref_expert expert, const void *x,
                        const struct ref_rows *rows);

#endif
