/* outer: left^T x right, summed over rows that lie anywhere. It is the product of portable_gemm.h with other names: the
 * rows are the terms, the columns of `left` stand where a block's rows stood. So packing left is widening alone, and
 * packing right is what [K,N] weights need.
 *
 *   left   [group][terms][R], VEC_LANES apart   f32, all groups of up to OUTER_COLUMNS columns
 *   right  [panel][terms][PANEL]                f32, columns in the order of duos
 *   acc    [columns][OUTER_WIDTH]               f32: long runs of each row of out are stored at once
 *
 * Up to OUTER_TERMS rows, which is the usual case, a group of columns is multiplied and stored while its sums are in L1;
 * with more, the sums of all columns wait in L2 for the next rows.
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

/* Rows [row, row + terms) of left's columns into groups. Whole vectors are stored: what is too much is overwritten by the
 * next row, or lies between two groups. */
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
    VEC_UNROLL
    for (int i = 0; i < R; i++) {
        float *row = acc + i * OUTER_WIDTH;
        vec_store(row, vec_load(row) + (c.e[i].lo + c.o[i].lo));
        vec_store(row + VEC_LANES, vec_load(row + VEC_LANES) + (c.e[i].hi + c.o[i].hi));
    }
}

VEC_INLINE void outer_group(const int R, const struct outer *o, int terms, const float *left, float *acc)
{
    for (int n = 0; n < o->width; n += DUO) {
        const float *right = o->right + n / PANEL * terms * PANEL + n % PANEL;
        for (int t = 0; t < terms; t += CHAIN)
            outer_block(R, terms - t < CHAIN ? terms - t : CHAIN, left + t * R, right + t * PANEL, acc + n);
    }
}

/* One group of columns times right; acc: of the group */
static void outer_multiply(const struct outer *o, int index, int terms, float *acc)
{
    const float *left = outer_left(o, index, terms);

    switch (group_at(&o->groups, index).rows) {
    case 1: outer_group(1, o, terms, left, acc); break;
    case 2: outer_group(2, o, terms, left, acc); break;
#if MICRO_ROWS > 2
    case 3: outer_group(3, o, terms, left, acc); break;
#endif
#if MICRO_ROWS > 3
    case 4: outer_group(4, o, terms, left, acc); break;
    case 5: outer_group(5, o, terms, left, acc); break;
    case 6: outer_group(6, o, terms, left, acc); break;
#endif
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

/* columns [first, first + count) of left are rows of out */
VEC_INLINE void outer_store_rows(const enum hmoe_dtype dtype, const enum hmoe_dtype out_dtype, const struct outer *o,
                                 struct group columns, const float *acc)
{
    size_t bytes = num_bytes(out_dtype), line = (size_t)o->call->right.columns * bytes;
    char *to = (char *)o->call->out + (size_t)(o->first + columns.first) * line + (size_t)o->at * bytes;
    bool accumulate = o->call->accumulate;

    for (int c = 0; c < columns.rows; c++, to += line, acc += OUTER_WIDTH)
        for (int n = 0; n < o->width; n += DUO) {
            if (accumulate)
                __builtin_prefetch(to + (size_t)columns.rows * line + (size_t)n * bytes, 1, 3);
            outer_store(dtype, out_dtype, accumulate, to + (size_t)n * bytes, o->width - n,
                        vec_load_duo(HMOE_F32, acc + n));
        }
}

static void outer_finish(const struct outer *o, struct group columns, const float *acc)
{
    enum hmoe_dtype dtype = o->call->dtype;

    if (dtype == HMOE_F32)
        outer_store_rows(HMOE_F32, HMOE_F32, o, columns, acc);
    else if (dtype == HMOE_BF16 && o->call->out_dtype == HMOE_F32)
        outer_store_rows(HMOE_BF16, HMOE_F32, o, columns, acc);
    else if (dtype == HMOE_BF16)
        outer_store_rows(HMOE_BF16, HMOE_BF16, o, columns, acc);
    else if (o->call->out_dtype == HMOE_F32)
        outer_store_rows(HMOE_F16, HMOE_F32, o, columns, acc);
    else
        outer_store_rows(HMOE_F16, HMOE_F16, o, columns, acc);
}

/* ------------------------------------------------- the loops */

/* All rows at once: left is packed. */
VEC_INLINE void outer_strip_once(const enum hmoe_dtype dtype, const struct outer *o)
{
    int terms = (int)o->call->count;

    outer_pack_right(dtype, o, 0, terms);
    for (int g = 0; g < o->groups.count; g++) {
        struct group group = group_at(&o->groups, g);
        memset(o->acc, 0, (size_t)group.rows * OUTER_WIDTH * sizeof(float));
        outer_multiply(o, g, terms, o->acc);
        outer_finish(o, group, o->acc);
    }
}

VEC_INLINE void outer_strip_parts(const enum hmoe_dtype dtype, const struct outer *o)
{
    memset(o->acc, 0, (size_t)o->columns * OUTER_WIDTH * sizeof(float));
    for (int64_t row = 0; row < o->call->count; row += OUTER_TERMS) {
        int64_t left = o->call->count - row;
        int terms = (int)(left < OUTER_TERMS ? left : OUTER_TERMS);
        outer_pack_left(dtype, o, row, terms);
        outer_pack_right(dtype, o, row, terms);
        for (int g = 0; g < o->groups.count; g++)
            outer_multiply(o, g, terms, o->acc + group_at(&o->groups, g).first * OUTER_WIDTH);
    }
    outer_finish(o, (struct group){0, o->columns}, o->acc);
}

VEC_INLINE void outer_columns(const enum hmoe_dtype dtype, struct outer *o)
{
    bool once = o->call->count <= OUTER_TERMS;

    o->groups = groups_of(o->columns);
    if (once)
        outer_pack_left(dtype, o, 0, (int)o->call->count);
    for (o->at = 0; o->at < o->call->right.columns; o->at += OUTER_WIDTH) {
        int64_t left = o->call->right.columns - o->at;
        o->width = (int)(left < OUTER_WIDTH ? left : OUTER_WIDTH);
        if (once)
            outer_strip_once(dtype, o);
        else
            outer_strip_parts(dtype, o);
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
