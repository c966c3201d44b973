/* outer: left^T x right, summed over rows that lie anywhere. It is the product of portable_gemm.h with other names: the
 * rows are the terms, the columns of `left` stand where a block's rows stood. So packing left is widening alone, and
 * packing right is what [K,N] weights need.
 *
 *   left   [group][terms][R], VEC_LANES apart   f32, all groups of up to OUTER_COLUMNS columns
 *   right  [panel][terms][PANEL]                f32, columns in the order of duos
 *   acc    [columns][OUTER_WIDTH]               f32, with more than OUTER_TERMS rows
 *
 * Up to OUTER_TERMS rows, which is the usual case, sums go from registers into out; with more, they wait in L2 for the
 * next rows.
 * Few rows are common too, and then storing is the limit: terms that are missing from a chain's block are not executed;
 * adding +0 once to each chain that lacks some is the same.
 */
#ifndef KERN_PORTABLE_OUTER_H
#define KERN_PORTABLE_OUTER_H

#include "kern/portable_grad.h"

#define OUTER_COLUMNS 512 /* of left at a time: right is packed once for all of them */
#define OUTER_PANELS 4    /* of right at a time: 256 bytes of bf16 in a row of out */
#define OUTER_WIDTH (OUTER_PANELS * PANEL)
#define OUTER_TERMS 256   /* rows at a time; up to so many left is packed once for all of right */
#define OUTER_LEFT_FLOATS (OUTER_COLUMNS * (OUTER_TERMS + VEC_LANES))
#define OUTER_ACC_FLOATS (OUTER_COLUMNS * OUTER_WIDTH)
#define OUTER_FLOATS (OUTER_LEFT_FLOATS + OUTER_ACC_FLOATS + OUTER_TERMS * OUTER_WIDTH)

struct outer {
    const struct kern_outer *call;
    float *left, *acc, *right; /* scratch */
    int64_t first;             /* columns [first, first + columns) of left */
    int columns;
    struct groups groups;
    int64_t at; /* column of right */
    int width;
};

static inline float *outer_left(const struct outer *o, int index, int terms)
{
    return o->left + group_at(&o->groups, index).first * terms + index * VEC_LANES;
}

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

/* Rows [row, row + terms) of left's columns into groups. Whole vectors are stored: what is too much is overwritten by
 * the next row, or lies between two groups. */
VEC_INLINE void outer_pack_left(const enum hmoe_dtype dtype, const struct outer *o, int64_t row, int terms)
{
    float f[OUTER_COLUMNS + DUO + VEC_LANES] = {0};

    for (int t = 0; t < terms; t++) {
        for (int c = 0; c < o->columns; c += DUO)
            grad_in_order(dtype, f + c, outer_load(dtype, &o->call->left, row + t, o->first + c, o->columns - c));
        for (int g = 0; g < o->groups.count; g++) {
            struct group group = group_at(&o->groups, g);
            vec_store(outer_left(o, g, terms) + t * group.rows, vec_load(f + group.first));
            if (MICRO_ROWS > VEC_LANES) /* of 16 bytes */
                vec_store(outer_left(o, g, terms) + t * group.rows + VEC_LANES, vec_load(f + group.first + VEC_LANES));
        }
    }
}

VEC_INLINE void outer_pack_right(const enum hmoe_dtype dtype, const struct outer *o, int64_t row, int terms)
{
    for (int t = 0; t < terms; t++)
        for (int n = 0; n < o->width; n += DUO) {
            struct duo d = outer_load(dtype, &o->call->right, row + t, o->at + n, o->width - n);
            float *to = o->right + (n / PANEL * terms + t) * PANEL + n % PANEL;
            vec_store(to, d.lo);
            vec_store(to + VEC_LANES, d.hi);
        }
}

/* ------------------------------------------------- multiply */

/* `terms` terms of one block of the chain, of R columns of left and one duo of right, added to acc */
VEC_INLINE void outer_block(const int R, int terms, const float *left, const float *right, struct duo acc[MICRO_ROWS])
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
    VEC_UNROLL
    for (int i = 0; i < R; i++) {
        if (terms < CHAIN - 1) { /* (+0)*(+0): a -0 that was flushed becomes +0 */
            c.e[i].lo = c.e[i].lo + zero;
            c.e[i].hi = c.e[i].hi + zero;
        }
        if (terms < CHAIN) {
            c.o[i].lo = c.o[i].lo + zero;
            c.o[i].hi = c.o[i].hi + zero;
        }
        acc[i].lo = acc[i].lo + (c.e[i].lo + c.o[i].lo);
        acc[i].hi = acc[i].hi + (c.e[i].hi + c.o[i].hi);
    }
}

/* all terms of a duo at column n of right */
VEC_INLINE void outer_duo(const int R, const struct outer *o, int terms, const float *left, int n,
                          struct duo acc[MICRO_ROWS])
{
    const float *right = o->right + n / PANEL * terms * PANEL + n % PANEL;

    int t = 0;

    for (; t + CHAIN <= terms; t += CHAIN)
        outer_block(R, CHAIN, left + t * R, right + t * PANEL, acc);
    if (t < terms)
        outer_block(R, terms - t, left + t * R, right + t * PANEL, acc);
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

/* element (column of left, column n of the strip of right) of out */
static inline char *outer_at(const struct outer *o, int column, int n)
{
    size_t bytes = num_bytes(o->call->out_dtype), line = (size_t)o->call->right.columns * bytes;

    return (char *)o->call->out + (size_t)(o->first + column) * line + (size_t)(o->at + n) * bytes;
}

/* A group of columns against the strip of right, straight into out. */
VEC_INLINE void outer_group(const int R, const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype,
                            const struct outer *o, int index)
{
    int terms = (int)o->call->count, first = group_at(&o->groups, index).first;
    const float *left = outer_left(o, index, terms);
    size_t line = (size_t)o->call->right.columns * num_bytes(out_dtype);
    bool accumulate = o->call->accumulate;

    for (int n = 0; n < o->width; n += DUO) {
        struct duo acc[MICRO_ROWS] = {{{0}, {0}}};
        char *to = outer_at(o, first, n);
        if (accumulate)
            for (int i = 0; i < R; i++)
                __builtin_prefetch(to + (size_t)(R + i) * line, 1, 3);
        outer_duo(R, o, terms, left, n, acc);
        VEC_UNROLL
        for (int i = 0; i < R; i++)
            outer_store(dtype, out_dtype, accumulate, to + (size_t)i * line, o->width - n, acc[i]);
    }
}

VEC_INLINE void outer_groups(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, const struct outer *o)
{
    for (int g = 0; g < o->groups.count; g++)
        switch (group_at(&o->groups, g).rows) {
        case 1: outer_group(1, dtype, out_dtype, o, g); break;
        case 2: outer_group(2, dtype, out_dtype, o, g); break;
#if MICRO_ROWS > 2
        case 3: outer_group(3, dtype, out_dtype, o, g); break;
#endif
#if MICRO_ROWS > 3
        case 4: outer_group(4, dtype, out_dtype, o, g); break;
        case 5: outer_group(5, dtype, out_dtype, o, g); break;
        case 6: outer_group(6, dtype, out_dtype, o, g); break;
#endif
        }
}

/* ------------------------------------------------- many rows: sums wait in memory */

VEC_INLINE void outer_part(const int R, const struct outer *o, int index, int terms)
{
    float *row = o->acc + group_at(&o->groups, index).first * OUTER_WIDTH;
    const float *left = outer_left(o, index, terms);

    for (int n = 0; n < o->width; n += DUO) {
        struct duo acc[MICRO_ROWS];
        VEC_UNROLL
        for (int i = 0; i < R; i++)
            acc[i] = vec_load_duo(HMOE_F32, row + i * OUTER_WIDTH + n);
        outer_duo(R, o, terms, left, n, acc);
        VEC_UNROLL
        for (int i = 0; i < R; i++) {
            vec_store(row + i * OUTER_WIDTH + n, acc[i].lo);
            vec_store(row + i * OUTER_WIDTH + n + VEC_LANES, acc[i].hi);
        }
    }
}

static void outer_parts(const struct outer *o, int terms)
{
    for (int g = 0; g < o->groups.count; g++)
        switch (group_at(&o->groups, g).rows) {
        case 1: outer_part(1, o, g, terms); break;
        case 2: outer_part(2, o, g, terms); break;
#if MICRO_ROWS > 2
        case 3: outer_part(3, o, g, terms); break;
#endif
#if MICRO_ROWS > 3
        case 4: outer_part(4, o, g, terms); break;
        case 5: outer_part(5, o, g, terms); break;
        case 6: outer_part(6, o, g, terms); break;
#endif
        }
}

VEC_INLINE void outer_store_all(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, const struct outer *o)
{
    for (int c = 0; c < o->columns; c++)
        for (int n = 0; n < o->width; n += DUO)
            outer_store(dtype, out_dtype, o->call->accumulate, outer_at(o, c, n), o->width - n,
                        vec_load_duo(HMOE_F32, o->acc + c * OUTER_WIDTH + n));
}

/* ------------------------------------------------- the loops */

/* All rows at once: left is packed. */
VEC_INLINE void outer_strip(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, const struct outer *o)
{
    outer_pack_right(dtype, o, 0, (int)o->call->count);
    outer_groups(dtype, out_dtype, o);
}

VEC_INLINE void outer_strip_parts(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, const struct outer *o)
{
    memset(o->acc, 0, (size_t)o->columns * OUTER_WIDTH * sizeof(float));
    for (int64_t row = 0; row < o->call->count; row += OUTER_TERMS) {
        int64_t left = o->call->count - row;
        int terms = (int)(left < OUTER_TERMS ? left : OUTER_TERMS);
        outer_pack_left(dtype, o, row, terms);
        outer_pack_right(dtype, o, row, terms);
        outer_parts(o, terms);
    }
    outer_store_all(dtype, out_dtype, o);
}

VEC_INLINE void outer_columns(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, struct outer *o)
{
    bool once = o->call->count <= OUTER_TERMS;

    o->groups = groups_of(o->columns);
    if (once)
        outer_pack_left(dtype, o, 0, (int)o->call->count);
    for (o->at = 0; o->at < o->call->right.columns; o->at += OUTER_WIDTH) {
        int64_t left = o->call->right.columns - o->at;
        o->width = (int)(left < OUTER_WIDTH ? left : OUTER_WIDTH);
        if (once)
            outer_strip(dtype, out_dtype, o);
        else
            outer_strip_parts(dtype, out_dtype, o);
    }
}

static void outer_typed(struct outer *o)
{
    enum hmoe_dtype dtype = o->call->dtype;

    if (dtype == HMOE_F32)
        outer_columns(HMOE_F32, HMOE_F32, o);
    else if (dtype == HMOE_BF16 && o->call->out_dtype == HMOE_F32)
        outer_columns(HMOE_BF16, HMOE_F32, o);
    else if (dtype == HMOE_BF16)
        outer_columns(HMOE_BF16, HMOE_BF16, o);
    else if (o->call->out_dtype == HMOE_F32)
        outer_columns(HMOE_F16, HMOE_F32, o);
    else
        outer_columns(HMOE_F16, HMOE_F16, o);
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
        outer_typed(&o);
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
