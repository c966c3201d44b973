/* The pair chain on registers: a few rows of the block times PANEL columns of a weight matrix, blocks of 32 terms.
 *
 *   a    [terms][R]      R rows, R constant and at most MICRO_ROWS, interleaved
 *   b    [terms][PANEL]  f32, columns in the order of duos (portable_vec.h)
 *   acc  [R][PANEL]      f32, the same column order
 *
 * Both chains of every output stay in registers: 4 * R vectors. An ISA file sets MICRO_ROWS to what its registers hold.
 */
#ifndef KERN_PORTABLE_MICRO_H
#define KERN_PORTABLE_MICRO_H

#include "kern/portable_vec.h"

#include <stdbool.h>

#define PANEL 32 /* columns */
#define CHAIN 32 /* terms of one block of the pair chain */
#define DUO (2 * VEC_LANES)
#define LINE 64 /* bytes of a cache line */
#define PANEL_BLOCKS 2 /* blocks of terms of a packed panel: 8 KB, which stay in L1 beside the rows they meet */
#define PASSES (PANEL / DUO) /* duos of a panel: how often a micro-kernel goes through the terms */

/* Lines of the weights that come next, in the order of their addresses: one run or two per matrix row. The hardware
 * streams sequential reads only, so what is read in panels is fetched ahead in this order, as many lines per panel as
 * a panel has. The micro-kernels fetch line[0], line[1], ... one by one between their multiplications. */
#define AHEAD_MOST (2 * CHAIN * PANEL_BLOCKS * PANEL / 16)

struct ahead {
    const char *at;           /* NULL: nothing comes next */
    int64_t left, run;        /* lines to go in this run, lines of a whole run */
    int64_t step, other_step; /* from the end of a run to the next one's start, in turns */
    const char *line[AHEAD_MOST];
    const char *idle[AHEAD_MOST]; /* a line that is in L1 anyway, again and again */
};

static void ahead_init(struct ahead *ahead, const void *idle)
{
    ahead->at = NULL;
    for (int i = 0; i < AHEAD_MOST; i++)
        ahead->idle[i] = ahead->line[i] = idle;
}

/* the next `count` lines */
static void ahead_fill(struct ahead *ahead, int count)
{
    const char **line = ahead->line;

    while (count > 0 && ahead->at != NULL) {
        int n = ahead->left < count ? (int)ahead->left : count;
        for (int i = 0; i < n; i++)
            line[i] = ahead->at + i * LINE;
        line += n;
        count -= n;
        ahead->at += n * LINE;
        ahead->left -= n;
        if (ahead->left == 0) {
            int64_t step = ahead->step;
            ahead->at += step;
            ahead->step = ahead->other_step;
            ahead->other_step = step;
            ahead->left = ahead->run;
        }
    }
}

/* into L2: there is a whole chunk of time until it is read */
VEC_INLINE void fetch(const char *line)
{
    __builtin_prefetch(line, 0, 2);
}

/* The chains of one block of R rows x one duo of columns. */
struct chains {
    struct duo e[MICRO_ROWS], o[MICRO_ROWS];
};

VEC_INLINE void chains_zero(const int R, struct chains *c)
{
    VEC_UNROLL
    for (int i = 0; i < R; i++)
        c->e[i].lo = c->e[i].hi = c->o[i].lo = c->o[i].hi = (vec){0};
}

/* one term more for each chain of one parity */
VEC_INLINE void chains_term(const int R, struct duo chain[MICRO_ROWS], const float *a, struct duo b)
{
    VEC_UNROLL
    for (int i = 0; i < R; i++) {
        vec v = vec_set(a[i]);
        chain[i].lo = vec_fma(v, b.lo, chain[i].lo);
        chain[i].hi = vec_fma(v, b.hi, chain[i].hi);
    }
}

VEC_INLINE void chains_add(const int R, const struct chains *c, float *acc)
{
    VEC_UNROLL
    for (int i = 0; i < R; i++) {
        float *row = acc + i * PANEL;
        vec_store(row, vec_load(row) + (c->e[i].lo + c->o[i].lo));
        vec_store(row + VEC_LANES, vec_load(row + VEC_LANES) + (c->e[i].hi + c->o[i].hi));
    }
}

/* What a micro-kernel does between its multiplications, for later: nothing waits for it, so it costs little more than
 * its instructions. It fetches lines, fetches and packs half a panel, or copies PASSES * CHAIN / 2 lines per block. */
struct micro_aside {
    const char *const *line; /* PASSES * CHAIN / 2 lines per block are fetched */
    const char *from;        /* packed or copied from here ... */
    int64_t stride;          /* ... bytes from term to term, when packed ... */
    float *to;               /* ... to here */
};

enum aside {
    ASIDE_F32 = HMOE_F32, /* packed, and lines fetched */
    ASIDE_BF16 = HMOE_BF16,
    ASIDE_F16 = HMOE_F16,
    ASIDE_FETCH,
    ASIDE_COPY,
    ASIDE_NOTHING
};

#define COPY_AHEAD 8192 /* bytes that a copy fetches ahead */

/* one line, and one further on into L1 */
VEC_INLINE void copy_line(const char *from, char *to)
{
    __builtin_prefetch(from + COPY_AHEAD, 0, 3);
    VEC_UNROLL
    for (int i = 0; i < LINE; i += VEC_BYTES)
        vec_store(to + i, vec_load(from + i));
}

VEC_INLINE void aside_move(const enum aside kind, const char *from, float *to)
{
    struct duo d;
    if (kind == ASIDE_COPY)
        copy_line(from, (char *)to);
    if (kind >= ASIDE_FETCH)
        return;
    d = vec_load_duo((enum hmoe_dtype)kind, from);
    vec_store(to, d.lo);
    vec_store(to + VEC_LANES, d.hi);
}

/* from a packed panel */
VEC_INLINE void micro_panel(const int R, const enum aside kind, int blocks, const float *a, const float *b, float *acc,
                            const struct micro_aside *aside)
{
    const bool copy = kind == ASIDE_COPY;
    const int64_t from_step = copy ? LINE : aside->stride, to_step = copy ? LINE / 4 : PANEL;
    const char *const *line = aside->line;

    for (int duo = 0; duo < PANEL; duo += DUO) {
        const float *terms = a, *row = b + duo;
        int copied = duo / DUO * blocks * (CHAIN / 2); /* lines, by the passes before */
        const char *from = aside->from + (copy ? copied * LINE : duo * (kind == ASIDE_F32 ? 4 : 2));
        float *to = aside->to + (copy ? copied * LINE / 4 : duo);
        for (int q = 0; q < blocks; q++) {
            struct chains c;
            chains_zero(R, &c);
            for (int k = 0; k < CHAIN / 2; k++) {
                if (kind <= ASIDE_FETCH)
                    fetch(*line++);
                aside_move(kind, from, to);
                chains_term(R, c.e, terms, vec_load_duo(HMOE_F32, row));
                chains_term(R, c.o, terms + R, vec_load_duo(HMOE_F32, row + PANEL));
                terms += 2 * R;
                row += 2 * PANEL;
                from += from_step;
                to += to_step;
            }
            chains_add(R, &c, acc + duo);
        }
    }
}

/* One block of terms where it lies in a [K,N] matrix: no store and no reload, worth it while few rows share it. */
struct micro_source {
    const char *at; /* first term, first column */
    int64_t stride; /* bytes from term to term */
    enum hmoe_dtype dtype;
    const char *const *line[2]; /* fetched in step, PASSES * CHAIN / 2 lines each */
};

VEC_INLINE void micro_direct(const int R, const enum hmoe_dtype dtype, const struct micro_source *source,
                             const float *a, float *acc)
{
    int64_t stride = source->stride;
    const char *const *line = source->line[0], *const *other = source->line[1];

    for (int duo = 0; duo < PANEL; duo += DUO) {
        const char *at = source->at + (size_t)duo * num_bytes(dtype);
        const float *terms = a;
        struct chains c;
        chains_zero(R, &c);
        for (int k = 0; k < CHAIN / 2; k++) {
            fetch(*line++);
            chains_term(R, c.e, terms, vec_load_duo(dtype, at));
            fetch(*other++);
            chains_term(R, c.o, terms + R, vec_load_duo(dtype, at + stride));
            terms += 2 * R;
            at += 2 * stride;
        }
        chains_add(R, &c, acc + duo);
    }
}

/* ------------------------------------------------- the number of rows becomes a constant */

VEC_INLINE void micro_panel_kind(const enum aside kind, int rows, int blocks, const float *a, const float *b,
                                 float *acc, const struct micro_aside *aside)
{
    switch (rows) {
    case 1: micro_panel(1, kind, blocks, a, b, acc, aside); break;
    case 2: micro_panel(2, kind, blocks, a, b, acc, aside); break;
#if MICRO_ROWS > 2
    case 3: micro_panel(3, kind, blocks, a, b, acc, aside); break;
#endif
#if MICRO_ROWS > 3
    case 4: micro_panel(4, kind, blocks, a, b, acc, aside); break;
    case 5: micro_panel(5, kind, blocks, a, b, acc, aside); break;
    case 6: micro_panel(6, kind, blocks, a, b, acc, aside); break;
#endif
    }
}

static void micro_panel_rows(enum aside kind, int rows, int blocks, const float *a, const float *b, float *acc,
                             const struct micro_aside *aside)
{
    switch (kind) {
    case ASIDE_F32: micro_panel_kind(ASIDE_F32, rows, blocks, a, b, acc, aside); break;
    case ASIDE_BF16: micro_panel_kind(ASIDE_BF16, rows, blocks, a, b, acc, aside); break;
    case ASIDE_F16: micro_panel_kind(ASIDE_F16, rows, blocks, a, b, acc, aside); break;
    case ASIDE_FETCH: micro_panel_kind(ASIDE_FETCH, rows, blocks, a, b, acc, aside); break;
    case ASIDE_COPY: micro_panel_kind(ASIDE_COPY, rows, blocks, a, b, acc, aside); break;
    case ASIDE_NOTHING: micro_panel_kind(ASIDE_NOTHING, rows, blocks, a, b, acc, aside); break;
    }
}

VEC_INLINE void micro_direct_typed(int rows, const enum hmoe_dtype dtype, const struct micro_source *source,
                                   const float *a, float *acc)
{
    switch (rows) {
    case 1: micro_direct(1, dtype, source, a, acc); break;
    case 2: micro_direct(2, dtype, source, a, acc); break;
#if MICRO_ROWS > 2
    case 3: micro_direct(3, dtype, source, a, acc); break;
#endif
#if MICRO_ROWS > 3
    case 4: micro_direct(4, dtype, source, a, acc); break;
    case 5: micro_direct(5, dtype, source, a, acc); break;
    case 6: micro_direct(6, dtype, source, a, acc); break;
#endif
    }
}

static void micro_direct_rows(int rows, const struct micro_source *source, const float *a, float *acc)
{
    if (source->dtype == HMOE_F32)
        micro_direct_typed(rows, HMOE_F32, source, a, acc);
    else if (source->dtype == HMOE_BF16)
        micro_direct_typed(rows, HMOE_BF16, source, a, acc);
    else
        micro_direct_typed(rows, HMOE_F16, source, a, acc);
}

#endif
