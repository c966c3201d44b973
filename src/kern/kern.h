/* The kernels' seam: one table per engine. A block is `rows` rows of one expert, at most engine->rows_most.
 *
 * Forward: an engine packs the block's rows once (pack), multiplies them with any range of the inner columns (gmm1,
 * with SwiGLU on the hot accumulators) into packed `a`, and multiplies that with any range of the hidden columns (gmm2)
 * straight into the slots' rows.
 * Backward: the product with a transposed weight is a product of the other layout, so dY is packed for kern_flip'ed
 * weights; dact multiplies it with down_proj and runs SwiGLU's gradient on the hot accumulators; dX is gmm2 of the
 * packed dH (kern_flip, inner = 2I); outer makes any of the weights' gradients from all rows of an expert.
 *
 * There is one packed form for a block of rows of `terms` elements, the engine's own: what pack makes of x, gmm1 of
 * `a`. So pack and gmm2 together are a plain product. Ranges that tile a whole give the same bits as the whole; every
 * engine gives the bits of the pair chain (DESIGN 5, docs/numerics.md).
 *
 * Every function runs between thread_begin and thread_end, is called by any number of threads on different
 * buffers, allocates nothing and never fails: what it cannot do is refused when the plan is made.
 * Adding an engine is one row in kern.c.
 */
#ifndef KERN_H
#define KERN_H

#include "hmoe.h"

#include <stdbool.h>

/* A range of columns starts and ends on a multiple of this, or at the matrix's end. */
#define KERN_STRIP 64
/* Packed buffers and scratch are aligned to this. The caller's tensors are not aligned at all. */
#define KERN_ALIGN 64

/* What does not change from expert to expert. act is complete (num_activation). */
struct kern_layer {
    int64_t hidden, inner;
    enum hmoe_dtype dtype;
    enum hmoe_layout layout;
    enum hmoe_gating gating;
    struct hmoe_activation act;
};

struct kern_pack {
    const struct kern_layer *layer;
    const void *const *rows; /* [count] rows of `terms` elements, anywhere */
    int count;
    int64_t terms;
    void *x; /* out: packed_bytes */
};

struct kern_gmm1 {
    const struct kern_layer *layer;
    const void *up;      /* this expert's up_proj: [H,2I] or [2I,H] */
    const void *up_bias; /* [2I], columns as in up, or NULL */
    const void *x;       /* packed, of pack */
    int rows;
    int64_t first, last; /* inner columns [first, last) */
    void *a;             /* out, packed, I terms: columns [first, last) of every row */
    void *gate_up;       /* out or NULL: the rounded gate and up, plain [rows,2I], columns as in up */
    void *a_plain;       /* out or NULL: the rounded a, plain [rows,I] */
    int64_t *swiglu_ns;  /* in/out or NULL: the time spent in SwiGLU is added */
    void *scratch;       /* the worker's: scratch_bytes */
};

struct kern_gmm2 {
    const struct kern_layer *layer;
    const void *down;      /* this expert's down_proj: [I,H] or [H,I] */
    const void *down_bias; /* [H] or NULL */
    const void *a;         /* packed, I terms, complete */
    int rows;
    int64_t first, last; /* hidden columns [first, last) */
    void *const *out;    /* [rows] rows of H elements, anywhere; only columns [first, last) are written */
    void *scratch;
};

/* dA = dY x down^T [rows,I] in accumulators, never rounded; with it the gradient of SwiGLU (num_gated_grad). */
struct kern_dact {
    const struct kern_layer *layer; /* the forward's */
    const void *down;    /* as in gmm2 */
    const void *dy;      /* packed for kern_flip(layer), H terms */
    int rows;
    int64_t first, last; /* inner columns [first, last) */
    const float *weight; /* [rows], the slots' topk_weights: da = dA * weight */
    void *gate_up; /* in: the rounded gate and up, plain [rows,2I], columns as in up; out: in their place rounded dH */
    void *a;       /* out: the rounded a, plain [rows,I] */
    float *sums;   /* out: [rows][ceil(I/32)]: e + o of each block of the pair chain over i of dA * a */
    void *scratch;
};

/* Rows that lie anywhere, of one dtype. */
struct kern_rows {
    const void *const *row; /* [count] rows of `columns` elements */
    const float *scale;     /* [count]: element i of row r stands for round(scale[r] * element); NULL: for itself */
    int64_t columns;
};

/* out[k][n] = sum over rows r, in order, of left[r][k] * right[r][n]: a weight's gradient. */
struct kern_outer {
    enum hmoe_dtype dtype; /* of left and right */
    struct kern_rows left, right;
    int64_t count;         /* rows; 0: zeros, or when accumulating nothing is touched */
    int64_t first, last;   /* rows [first, last) of out, multiples of KERN_STRIP or the end */
    enum hmoe_dtype out_dtype; /* dtype or HMOE_F32 */
    bool accumulate;       /* round(out + sum) instead of round(sum) */
    void *out;             /* [left.columns, right.columns] */
    void *scratch;
};

/* y = sum of weight[i] * term[i] in order, by fma from +0, rounded once */
struct kern_combine {
    int64_t hidden;
    enum hmoe_dtype dtype;
    int count; /* may be 0: y = +0 */
    const void *const *term; /* [count] rows of H elements */
    const float *weight;     /* [count] */
    void *y;                 /* [H] */
};

struct kern_engine {
    const char *name; /* "amx", "avx512", "avx2", "neon", "scalar" */
    unsigned dtypes;  /* bit (1 << enum hmoe_dtype) for each storage dtype it takes */
    int rows_most;    /* the tallest block */
    bool (*present)(void); /* does this CPU (and kernel) run it? May ask the kernel for permission. */
    /* of a block of this many rows; not necessarily more for more rows */
    size_t (*packed_bytes)(const struct kern_layer *layer, int64_t terms, int rows);
    size_t (*scratch_bytes)(const struct kern_layer *layer); /* enough for forward and backward */
    void (*thread_begin)(void);
    void (*thread_end)(void);
    void (*pack)(const struct kern_pack *pack);
    void (*gmm1)(const struct kern_gmm1 *gmm1);
    void (*gmm2)(const struct kern_gmm2 *gmm2);
    void (*dact)(const struct kern_dact *dact);
    void (*outer)(const struct kern_outer *outer);
    void (*combine)(const struct kern_combine *combine);
    /* This machine's limit for this engine's arithmetic: runs a register (or, for tiles, L1) loop for about
     * `ns` nanoseconds and returns floating-point operations per second of one thread. */
    double (*limit)(int64_t ns);
};

/* Every engine of this build, best first, ending with NULL; the ones that run here: present(). */
extern const struct kern_engine *const kern_engines[];

/* The engines a plan uses. Forward few is used for blocks of at most few_rows rows, many above; backward, back. */
struct kern_choice {
    const struct kern_engine *few, *many, *back;
    int few_rows;
};

/* name: an engine's name, or "auto" for the best. NULL text on success, else why not (static). */
const char *kern_choose(struct kern_choice *choice, const char *name, const struct kern_layer *layer);

/* Forward, the engine for a block of this many rows. */
static inline const struct kern_engine *kern_pick(const struct kern_choice *choice, int64_t rows)
{
    return rows <= choice->few_rows ? choice->few : choice->many;
}

/* The layer whose matrices are the transposes of this one's, as they lie. */
static inline struct kern_layer kern_flip(struct kern_layer layer)
{
    layer.layout = layer.layout == HMOE_KN ? HMOE_NK : HMOE_KN;
    return layer;
}

/* Bytes of a row of `count` elements. */
static inline size_t kern_row_bytes(enum hmoe_dtype dtype, int64_t count)
{
    return (size_t)count * (dtype == HMOE_F32 ? 4 : 2);
}

#endif
