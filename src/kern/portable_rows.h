/* [N,K] for few rows: the weights are read strictly in order, as the memory likes it. The lanes of a vector are not
 * columns but VEC_LANES neighbouring chain blocks of one column; the blocks' sums are added up afterwards, in order.
 *
 *   packed  [group][rows][16][2][VEC_LANES]   f32: of each lane's block the 16 even and the 16 odd terms, in turns
 *   sums    [rows][columns of a tile][blocks] f32: e + o of each block
 *
 * Where the blocks of a column do not fill vectors but those of two do, two columns are joined: their groups run on
 * over the border, and the packed rows hold every block twice.
 */
#ifndef KERN_PORTABLE_ROWS_H
#define KERN_PORTABLE_ROWS_H

#include "kern/portable_nk.h"

#define ROWS_FEW 4 /* so many packed rows stay in L1 whole; with more the columns as lanes are faster */
#define ROWS_AHEAD 4096 /* bytes fetched ahead */
#define LANE_TERMS (CHAIN * VEC_LANES) /* floats of a group of one row */

/* How a product sum of `terms` terms lies in lanes. */
struct lanes {
    int64_t blocks;
    int joined; /* columns: 1 or 2 */
    int64_t groups; /* of the joined columns */
};

static inline struct lanes lanes_of(int64_t terms)
{
    struct lanes l = {.blocks = (terms + CHAIN - 1) / CHAIN, .joined = 1};
    if (l.blocks % VEC_LANES != 0 && 2 * l.blocks % VEC_LANES == 0 && terms % CHAIN == 0)
        l.joined = 2;
    l.groups = (l.joined * l.blocks + VEC_LANES - 1) / VEC_LANES;
    return l;
}

static inline size_t lanes_packed_bytes(int64_t terms, int rows)
{
    return (size_t)(lanes_of(terms).groups * LANE_TERMS * rows) * sizeof(float);
}

static inline size_t lanes_sums_bytes(int64_t terms)
{
    return (size_t)(lanes_of(terms).groups * VEC_LANES * VEC_LANES * ROWS_FEW + VEC_LANES) * sizeof(float);
}

/* terms [part.column, part.column + part.count) of one row */
static void lanes_put(float *packed, int64_t terms, int rows, int row, struct panel part, const float *f)
{
    struct lanes l = lanes_of(terms);

    for (int i = 0; i < part.count; i++) {
        int64_t k = part.column + i;
        for (int64_t block = k / CHAIN; block < l.joined * l.blocks; block += l.blocks) {
            float *at = packed + (block / VEC_LANES * rows + row) * LANE_TERMS;
            at[k % CHAIN * VEC_LANES + block % VEC_LANES] = f[i];
        }
    }
}

/* What one group meets. */
struct lanes_call {
    const float *x; /* the group's packed rows */
    int rows;
    float *sums;        /* row q's go to sums + q * sums_stride */
    int64_t sums_stride;
};

VEC_INLINE void lanes_rows(const int R, const enum hmoe_dtype dtype, const vec_u32 *dwords,
                           const struct lanes_call *call)
{
    const float *x = call->x;
    vec e[ROWS_FEW], o[ROWS_FEW];

    VEC_UNROLL
    for (int q = 0; q < R; q++)
        e[q] = o[q] = (vec){0};
    for (int j = 0; j < CHAIN / 2; j++) {
        struct duo d;
        if (dtype == HMOE_F32)
            d = (struct duo){(vec)dwords[2 * j], (vec)dwords[2 * j + 1]};
        else
            d = vec_widen(dtype, dwords[j]);
        VEC_UNROLL
        for (int q = 0; q < R; q++) {
            e[q] = vec_fma(vec_load(x + q * LANE_TERMS), d.lo, e[q]);
            o[q] = vec_fma(vec_load(x + q * LANE_TERMS + VEC_LANES), d.hi, o[q]);
        }
        x += 2 * VEC_LANES;
    }
    VEC_UNROLL
    for (int q = 0; q < R; q++)
        vec_store(call->sums + q * call->sums_stride, e[q] + o[q]);
}

VEC_INLINE void lanes_group(const enum hmoe_dtype dtype, const char *w, const struct lanes_call *call)
{
    const int dwords = dtype == HMOE_F32 ? CHAIN : CHAIN / 2;
    vec_u32 turned[CHAIN];

    VEC_UNROLL
    for (int i = 0; i < dwords * VEC_LANES * 4; i += LINE)
        __builtin_prefetch(w + i + ROWS_AHEAD, 0, 3);
    VEC_UNROLL
    for (int part = 0; part < dwords; part += VEC_LANES) {
        VEC_UNROLL
        for (int i = 0; i < VEC_LANES; i++)
            turned[part + i] = vec_load_u32(w + (i * dwords + part) * 4);
        transpose(turned + part);
    }
    switch (call->rows) {
    case 1: lanes_rows(1, dtype, turned, call); break;
    case 2: lanes_rows(2, dtype, turned, call); break;
    case 3: lanes_rows(3, dtype, turned, call); break;
    case 4: lanes_rows(4, dtype, turned, call); break;
    }
}

/* one group of the columns that start at `column`; what lacks terms, or would be read past the matrix, is copied */
static void lanes_multiply(const struct product *p, const struct lanes *l, int64_t column, int64_t group,
                           const struct lanes_call *call)
{
    enum hmoe_dtype dtype = p->layer->dtype;
    int64_t bytes = (int64_t)num_bytes(dtype), length = p->terms * bytes, whole = LANE_TERMS * bytes;
    int64_t at = group * whole, left = (p->columns - column) * length - at;
    const char *w = p->w + column * length + at;
    char padded[LANE_TERMS * 4];

    if (l->joined == 1 && p->terms % CHAIN != 0 && length - at < left)
        left = length - at;
    if (left < whole) { /* left < 0: the group lies in the second of two joined columns, which does not exist */
        memset(padded, 0, sizeof padded);
        memcpy(padded, w, left > 0 ? (size_t)left : 0);
        w = padded;
    }
    if (dtype == HMOE_F32)
        lanes_group(HMOE_F32, w, call);
    else if (dtype == HMOE_BF16)
        lanes_group(HMOE_BF16, w, call);
    else
        lanes_group(HMOE_F16, w, call);
}

/* VEC_LANES columns of one row, from the sums of their blocks */
static vec lanes_add_up(const struct lanes *l, const float *sums)
{
    vec acc = {0};

    for (int64_t b = 0; b < l->blocks; b += VEC_LANES) {
        int64_t count = l->blocks - b < VEC_LANES ? l->blocks - b : VEC_LANES;
        vec_u32 v[VEC_LANES];
        VEC_UNROLL
        for (int i = 0; i < VEC_LANES; i++) {
            const float *column = sums + i / l->joined * l->groups * VEC_LANES + i % l->joined * l->blocks;
            v[i] = vec_load_u32(column + b); /* past the last block: whatever is there, unused */
        }
        transpose(v);
        for (int i = 0; i < count; i++)
            acc = acc + (vec)v[i];
    }
    return acc;
}

/* VEC_LANES columns from `column` on, of which `count` exist */
static void lanes_tile(const struct product *p, const struct lanes *l, int64_t column, int count, float *sums)
{
    int64_t line = l->groups * VEC_LANES; /* sums of joined columns */
    int lines = (count + l->joined - 1) / l->joined;

    for (int i = 0; i < lines; i++)
        for (int64_t group = 0; group < l->groups; group++) {
            struct lanes_call call = {p->a + group * p->rows * LANE_TERMS, p->rows,
                                      sums + i * line + group * VEC_LANES, line * (VEC_LANES / l->joined)};
            lanes_multiply(p, l, column + i * l->joined, group, &call);
        }
}

static void multiply_lanes(const struct product *p)
{
    struct lanes l = lanes_of(p->terms);
    int64_t row = l.groups * VEC_LANES * (VEC_LANES / l.joined);

    for (int index = 0; index < p->spans * panels_per_span(p); index++) {
        struct panel panel = panel_at(p, index);
        for (int tile = 0; tile < panel.count; tile += VEC_LANES) {
            int left = panel.count - tile;
            lanes_tile(p, &l, panel.column + tile, left < VEC_LANES ? left : VEC_LANES, p->sums);
            for (int q = 0; q < p->rows; q++)
                vec_store(panel_acc(p, index) + q * PANEL + tile, lanes_add_up(&l, p->sums + q * row));
        }
        for (int q = 0; q < p->rows && p->layer->dtype != HMOE_F32; q++)
            for (int duo = 0; duo < PANEL; duo += DUO) {
                float *acc = panel_acc(p, index) + q * PANEL + duo;
                struct duo d = vec_evens_odds(HMOE_F32, vec_load_duo(HMOE_F32, acc));
                vec_store(acc, d.lo);
                vec_store(acc + VEC_LANES, d.hi);
            }
    }
}

static inline bool lanes_fit(const struct kern_layer *layer, int rows)
{
    return layer->layout == HMOE_NK && rows <= ROWS_FEW;
}

#endif
