/* outer: left^T x right, summed over rows that lie anywhere. It is the product of portable_gemm.h with other names: the
 * rows are the terms, the columns of `left` stand where a block's rows stood. So packing left is widening alone, and
 * packing right is what [K,N] weights need.
 *
 *   left   [group][terms][R]       f32, all groups of up to OUTER_COLUMNS columns
 *   right  [terms][PANEL]          f32, columns in the order of duos
 *   acc    [panel][columns][PANEL] f32, OUTER_PANELS panels: long runs of each row of out are stored at once
 *
 * Few rows are the usual case, and then storing is the limit: terms that are missing from a chain's block are not
 * executed; adding +0 once to each chain that lacks some is the same.
 */
#ifndef KERN_PORTABLE_OUTER_H
#define KERN_PORTABLE_OUTER_H

#include "kern/portable_grad.h"

#define OUTER_COLUMNS 512 /* of left at a time: right is packed once for all of them */
#define OUTER_PANELS 4    /* of right at a time: 256 bytes of bf16 in a row of out */
#define OUTER_TERMS 256   /* rows at a time; up to so many left is packed once for all of right */
#define OUTER_LEFT_FLOATS (OUTER_COLUMNS * OUTER_TERMS + VEC_LANES)
#define OUTER_ACC_FLOATS (OUTER_COLUMNS * OUTER_PANELS * PANEL)
#define OUTER_FLOATS (OUTER_LEFT_FLOATS + OUTER_ACC_FLOATS + OUTER_TERMS * PANEL)

struct outer {
    const struct kern_outer *call;
    float *left, *acc, *right; /* scratch */
    int64_t first;             /* columns [first, first + columns) of left */
    int columns;
    struct groups groups;
    int64_t at; /* column of right */
    int width;
};

/* one duo of a row: the element itself, or round(scale * element) */
VEC_INLINE struct duo outer_load(const enum hmoe_dtype dtype, const struct kern_rows *rows, int64_t row,
                                 int64_t column, int64_t count)
{
    const char *from = (const char *)rows->row[row] + (size_t)column * num_bytes(dtype);
    struct duo d = vec_load_duo_part(dtype, from, count);

    if (rows->scale != NULL) {
        vec scale = vec_set(rows->scale[row]);
        d = vec_round_duo(dtype, (struct duo){scale * d.lo, scale * d.hi});
    }
    return d;
}

/* rows [row, row + terms) of left's columns into groups */
VEC_INLINE void outer_pack_left(const enum hmoe_dtype dtype, const struct outer *o, int64_t row, int terms)
{
    float f[OUTER_COLUMNS + DUO];

    for (int t = 0; t < terms; t++) {
        for (int c = 0; c < o->columns; c += DUO)
            grad_in_order(dtype, f + c, outer_load(dtype, &o->call->left, row + t, o->first + c, o->columns - c));
        for (int g = 0; g < o->groups.count; g++) {
            struct group group = group_at(&o->groups, g);
            memcpy(o->left + group.first * terms + t * group.rows, f + group.first,
                   (size_t)group.rows * sizeof(float));
        }
    }
}

VEC_INLINE void outer_pack_right(const enum hmoe_dtype dtype, const struct outer *o, int panel, int64_t row, int terms)
{
    int64_t first = o->at + panel * PANEL;
    float *to = o->right;

    for (int t = 0; t < terms; t++, to += PANEL)
        for (int duo = 0; duo < PANEL; duo += DUO) {
            int64_t count = o->call->right.columns - first - duo;
            struct duo d = {{0}, {0}};
            if (count > 0)
                d = outer_load(dtype, &o->call->right, row + t, first + duo, count);
            vec_store(to + duo, d.lo);
            vec_store(to + duo + VEC_LANES, d.hi);
        }
}

/* ------------------------------------------------- multiply */

/* `terms` terms of one block of the chain, of R columns of left and one duo of right */
VEC_INLINE void outer_block(const int R, int terms, const float *left, const float *right, float *acc)
{
    const vec zero = {0};
    struct chains c;
    int t = 0;

    chains_zero(R, &c);
    for (; t + 1 < terms; t += 2) {
        chains_term(R, c.e, left, vec_load_duo(HMOE_F32, right));
        chains_term(R, c.o, left + R, vec_load_duo(HMOE_F32, right + PANEL));
        left += 2 * R;
        right += 2 * PANEL;
    }
    if (t < terms)
        chains_term(R, c.e, left, vec_load_duo(HMOE_F32, right));
    if (terms < CHAIN) { /* (+0)*(+0): a -0 that was flushed becomes +0 */
        VEC_UNROLL
        for (int i = 0; i < R; i++) {
            c.o[i].lo = c.o[i].lo + zero;
            c.o[i].hi = c.o[i].hi + zero;
            if (terms < CHAIN - 1) {
                c.e[i].lo = c.e[i].lo + zero;
                c.e[i].hi = c.e[i].hi + zero;
            }
        }
    }
    chains_add(R, &c, acc);
}

VEC_INLINE void outer_group(const int R, int terms, const float *left, const float *right, float *acc)
{
    for (int duo = 0; duo < PANEL; duo += DUO)
        for (int t = 0; t < terms; t += CHAIN)
            outer_block(R, terms - t < CHAIN ? terms - t : CHAIN, left + t * R, right + t * PANEL + duo, acc + duo);
}

static void outer_panel(const struct outer *o, int panel, int terms)
{
    float *acc = o->acc + (size_t)panel * (size_t)o->columns * PANEL;

    for (int g = 0; g < o->groups.count; g++) {
        struct group group = group_at(&o->groups, g);
        const float *left = o->left + group.first * terms;
        float *to = acc + group.first * PANEL;
        switch (group.rows) {
        case 1: outer_group(1, terms, left, o->right, to); break;
        case 2: outer_group(2, terms, left, o->right, to); break;
#if MICRO_ROWS > 2
        case 3: outer_group(3, terms, left, o->right, to); break;
#endif
#if MICRO_ROWS > 3
        case 4: outer_group(4, terms, left, o->right, to); break;
        case 5: outer_group(5, terms, left, o->right, to); break;
        case 6: outer_group(6, terms, left, o->right, to); break;
#endif
        }
    }
}

/* ------------------------------------------------- store */

/* one duo of sums into out; `count` of its columns exist */
VEC_INLINE void outer_store(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, bool accumulate, char *to,
                            int64_t count, struct duo sum)
{
    bool stream = !accumulate && count >= DUO && (uintptr_t)to % VEC_BYTES == 0;

    if (dtype != HMOE_F32 && out_dtype == HMOE_F32)
        sum = vec_in_order(dtype, sum);
    if (accumulate) {
        struct duo old = vec_load_duo_part(out_dtype, to, count);
        sum = (struct duo){old.lo + sum.lo, old.hi + sum.hi};
    }
    if (stream)
        vec_stream_duo(out_dtype, to, sum);
    else
        vec_store_duo_part(out_dtype, to, count, sum);
}

VEC_INLINE void outer_store_all(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, const struct outer *o)
{
    size_t bytes = num_bytes(out_dtype), line = (size_t)o->call->right.columns * bytes;
    bool accumulate = o->call->accumulate;

    for (int c = 0; c < o->columns; c++) {
        char *to = (char *)o->call->out + (size_t)(o->first + c) * line + (size_t)o->at * bytes;
        for (int n = 0; n < o->width; n += DUO) {
            const float *acc = o->acc + ((size_t)(n / PANEL) * (size_t)o->columns + (size_t)c) * PANEL + n % PANEL;
            if (accumulate)
                __builtin_prefetch(to + line + (size_t)n * bytes, 1, 3);
            outer_store(dtype, out_dtype, accumulate, to + (size_t)n * bytes, o->width - n,
                        vec_load_duo(HMOE_F32, acc));
        }
    }
}

static void outer_finish(const struct outer *o)
{
    enum hmoe_dtype dtype = o->call->dtype;

    if (dtype == HMOE_F32)
        outer_store_all(HMOE_F32, HMOE_F32, o);
    else if (dtype == HMOE_BF16 && o->call->out_dtype == HMOE_F32)
        outer_store_all(HMOE_BF16, HMOE_F32, o);
    else if (dtype == HMOE_BF16)
        outer_store_all(HMOE_BF16, HMOE_BF16, o);
    else if (o->call->out_dtype == HMOE_F32)
        outer_store_all(HMOE_F16, HMOE_F32, o);
    else
        outer_store_all(HMOE_F16, HMOE_F16, o);
}

/* ------------------------------------------------- the loops */

VEC_INLINE void outer_strip(const enum hmoe_dtype dtype, const struct outer *o, bool packed)
{
    int64_t count = o->call->count;
    int panels = (o->width + PANEL - 1) / PANEL;

    memset(o->acc, 0, (size_t)panels * (size_t)o->columns * PANEL * sizeof(float));
    for (int64_t row = 0; row < count; row += OUTER_TERMS) {
        int terms = (int)(count - row < OUTER_TERMS ? count - row : OUTER_TERMS);
        if (!packed)
            outer_pack_left(dtype, o, row, terms);
        for (int panel = 0; panel < panels; panel++) {
            outer_pack_right(dtype, o, panel, row, terms);
            outer_panel(o, panel, terms);
        }
    }
    outer_finish(o);
}

VEC_INLINE void outer_columns(const enum hmoe_dtype dtype, struct outer *o)
{
    bool once = o->call->count <= OUTER_TERMS;

    o->groups = groups_of(o->columns);
    if (once)
        outer_pack_left(dtype, o, 0, (int)o->call->count);
    for (o->at = 0; o->at < o->call->right.columns; o->at += OUTER_PANELS * PANEL) {
        int64_t left = o->call->right.columns - o->at;
        o->width = (int)(left < OUTER_PANELS * PANEL ? left : OUTER_PANELS * PANEL);
        outer_strip(dtype, o, once);
    }
}

/* No rows: zeros, in one run. */
static void outer_zeros(const struct kern_outer *call)
{
    size_t line = (size_t)call->right.columns * num_bytes(call->out_dtype);
    char *to = (char *)call->out + (size_t)call->first * line, *end = (char *)call->out + (size_t)call->last * line;
    size_t head = (size_t)(-(uintptr_t)to % VEC_BYTES);

    head = head < (size_t)(end - to) ? head : (size_t)(end - to);
    memset(to, 0, head);
    for (to += head; to + VEC_BYTES <= end; to += VEC_BYTES)
        vec_stream(to, (vec_u32){0});
    memset(to, 0, (size_t)(end - to));
}

static void outer_rows(const struct kern_outer *call)
{
    struct outer o = {.call = call, .left = call->scratch};

    o.acc = o.left + OUTER_LEFT_FLOATS;
    o.right = o.acc + OUTER_ACC_FLOATS;
    for (o.first = call->first; o.first < call->last; o.first += OUTER_COLUMNS) {
        o.columns = (int)(call->last - o.first < OUTER_COLUMNS ? call->last - o.first : OUTER_COLUMNS);
        if (call->dtype == HMOE_F32)
            outer_columns(HMOE_F32, &o);
        else if (call->dtype == HMOE_BF16)
            outer_columns(HMOE_BF16, &o);
        else
            outer_columns(HMOE_F16, &o);
    }
}

static void portable_outer(const struct kern_outer *call)
{
    if (call->count)
        outer_rows(call);
    else if (!call->accumulate)
        outer_zeros(call);
    vec_stream_end();
}

static size_t portable_scratch(const struct kern_layer *layer)
{
    size_t forward = portable_scratch_bytes(layer), outer = OUTER_FLOATS * sizeof(float);

    return forward > outer ? forward : outer;
}

#endif
