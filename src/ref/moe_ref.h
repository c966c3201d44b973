/* The oracle: one MoE layer in plain loops, with DESIGN 5's rounding points and nothing else. It defines the answer
 * that every engine, transport and rank count must give bit for bit. Sets and restores the control word itself. */
#ifndef MOE_REF_H
#define MOE_REF_H

#include "hmoe.h"

/* The whole global batch on one rank with all E experts. ids already checked: each is -1 or in [0,E). */
struct ref_layer {
    int64_t hidden, inner;
    int experts, topk;
    enum hmoe_dtype dtype;
    enum hmoe_layout layout;
    enum hmoe_gating gating;
    struct hmoe_activation activation; /* zeros as in hmoe.h */
    const void *up_proj, *down_proj;   /* [E,H,2I] or [E,2I,H]; [E,I,H] or [E,H,I] */
    const void *up_bias, *down_bias;   /* [E,2I], [E,H], or NULL */
    int shared;                        /* S experts that every token goes through, added last with weight 1 */
    int64_t shared_inner;
    const void *shared_up, *shared_down; /* [S,H,2I'], [S,I',H], or the other layout; NULL when S is 0 */
};

struct ref_forward {
    const struct ref_layer *layer;
    int64_t tokens;
    const void *x;                /* [T,H] */
    const void *topk_ids;         /* [T,K] */
    const void *topk_weights;     /* [T,K] */
    enum hmoe_index ids_type;
    enum hmoe_dtype weights_type;
    void *y;                      /* out [T,H] */
    /* out or NULL, one row per slot, in slot order (masked slots are left untouched): */
    void *gate_up;                /* [T*K,2I] rounded, columns as in up_proj */
    void *a;                      /* [T*K,I] rounded */
    void *slots;                  /* [T*K,H] each slot's expert output, rounded */
};

/* 0, or -1 when out of memory (it needs one slot's rows). */
int ref_moe_forward(const struct ref_forward *forward);

/* The gradients. Weights' gradients are of dw_type; before an overwrite they may hold anything. */
struct ref_backward {
    const struct ref_forward *forward; /* what the forward read; its outputs are not looked at */
    const void *dy;                    /* [T,H] */
    void *dx;                          /* out or NULL [T,H] */
    void *d_topk_weights;              /* out or NULL [T,K] in weights_type; 0 for masked slots */
    void *d_up_proj, *d_down_proj, *d_up_bias, *d_down_bias, *d_shared_up, *d_shared_down; /* in/out or NULL */
    enum hmoe_dtype dw_type;           /* HMOE_F32 or the layer's dtype */
    enum hmoe_dw_mode dw_mode;
    /* out or NULL, one row per slot, in slot order (masked slots are left untouched): */
    void *dh;                          /* [T*K,2I] rounded, columns as in up_proj */
    void *dx_slots;                    /* [T*K,H] rounded */
};

/* 0, or -1 when out of memory (it needs the rows of one expert). */
int ref_moe_backward(const struct ref_backward *backward);

/* Elements of one dtype, `step` apart. */
struct ref_terms {
    enum hmoe_dtype dtype;
    const void *base;
    int64_t step;
};

/* The pair chain over n terms a[i] * b[i], as f32. Under base_fp_enter(). */
float ref_chain(struct ref_terms a, struct ref_terms b, int64_t n);

#endif
