/* The KN layout: the block's rows are A tiles, and W must be turned in pairs of its rows to be B tiles. A stretch of
 * KN_DEPTH rows of W is read in order, two rows at a time (column panels would cost half the DRAM rate), unpacked
 * into a buffer in L2, and multiplied with all rows of the block; C stays in f32 in L2 until K is through.
 *
 * unpacklo and unpackhi leave in a first tile the columns 0-3, 8-11, 16-19, 24-27 of each 32, and in a second tile
 * the others. packus, with which two tiles' products become 32 words, puts them back in order. */
#ifndef KERN_AMX_KN_H
#define KERN_AMX_KN_H

#include "kern/amx_pack.h"

/* Rows of W that are unpacked at once, for blocks of at most KN_TALL_ROWS rows and for taller ones. */
#define KN_DEPTH 128
#define KN_DEPTH_TALL 256
#define KN_TALL_ROWS 128
/* What may lie in L2 at once: C, and the unpacked weights. Wider ranges are done in parts. */
#define KN_C_BYTES (1 << 20)
#define KN_B_BYTES (1 << 19)
/* W is prefetched so far ahead. */
#define KN_AHEAD_BYTES 8192
/* Outputs of blocks this tall are stored around the caches. */
#define KN_STREAM_ROWS 16
/* A line more from tile to tile of the buffer: else all the lines that one pair of rows fills share a set of L1. */
#define KN_PAD_BYTES 64

/* One or two runs of W's columns: gates and ups, or one run. */
struct kn_run {
    const char *x; /* activations: [tiles][steps][1 KB] */
    int rows, tiles;
    int64_t elements, steps;    /* of K */
    int64_t row_bytes;          /* of W */
    const char *w[2];           /* each run's first element */
    int runs;
    int64_t width, padded;      /* columns of a run; rounded up to 64 (to 128 for interleaved columns) */
    int64_t across;             /* tiles in all runs */
    int64_t depth, tile_stride; /* of the unpacked weights */
    char *b, *c; /* scratch; b: [across][depth / 32][1 KB] and padding, c: [tiles][across][1 KB] */
};

static inline size_t kn_scratch_bytes(void)
{
    return KN_C_BYTES + KN_B_BYTES + KN_B_BYTES / (KN_DEPTH * 32) * KN_PAD_BYTES;
}

static inline struct kn_run kn_run(const void *x, int rows, int64_t elements, int64_t columns, char *scratch)
{
    struct kn_run run = {.x = x,
                         .rows = rows,
                         .tiles = pack_tiles(rows),
                         .elements = elements,
                         .steps = pack_steps(elements),
                         .row_bytes = columns * 2,
                         .depth = rows > KN_TALL_ROWS ? KN_DEPTH_TALL : KN_DEPTH,
                         .b = scratch + KN_C_BYTES,
                         .c = scratch};
    run.tile_stride = run.depth / 32 * AMX_TILE_BYTES + KN_PAD_BYTES;
    return run;
}

/* The most columns at once, over all runs: a multiple of 128, at least 1024. */
static int64_t kn_columns_most(const struct kn_run *run)
{
    int64_t by_c = KN_C_BYTES / (run->tiles * 16 * 4), by_b = KN_B_BYTES / (run->depth * 2);
    return (by_c < by_b ? by_c : by_b) / 128 * 128;
}

/* Columns for each of the fewest equal parts of `columns`, a multiple of KERN_STRIP. */
static int64_t kn_part(int64_t columns, int64_t most)
{
    int64_t parts = (columns + most - 1) / most, part = (columns + parts - 1) / parts;
    return (part + KERN_STRIP - 1) / KERN_STRIP * KERN_STRIP;
}

/* ---------------------------------------------------------------- unpacking W */

/* 32 columns of two rows to one line of each of two tiles. */
static inline void kn_put(__m512i even, __m512i odd, char *to, int64_t tile_stride)
{
    _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(to + tile_stride, _mm512_unpackhi_epi16(even, odd));
}

/* How far ahead to prefetch: in whole pairs of rows. */
static int64_t kn_ahead(const struct kn_run *run)
{
    int64_t pair_bytes = 2 * run->runs * run->width * 2;
    return (KN_AHEAD_BYTES + pair_bytes - 1) / pair_bytes * 2 * run->row_bytes;
}

/* Rows k and k + 1 of one run; zeros for what lies outside. */
static void kn_unpack_pair(const struct kn_run *run, const char *w, int64_t k, char *to)
{
    const char *even = w + k * run->row_bytes, *odd = even + run->row_bytes;
    int64_t column = 0, ahead = kn_ahead(run);

    for (; k + 1 < run->elements && column + 32 <= run->width; column += 32, to += 2 * run->tile_stride) {
        _mm_prefetch(even + column * 2 + ahead, _MM_HINT_T0);
        __m512i e = _mm512_loadu_si512(even + column * 2);
        _mm_prefetch(odd + column * 2 + ahead, _MM_HINT_T0);
        kn_put(e, _mm512_loadu_si512(odd + column * 2), to, run->tile_stride);
    }
    for (; column < run->padded; column += 32, to += 2 * run->tile_stride) {
        __mmask32 mask = bf16_mask(run->width - column);
        __m512i e = _mm512_maskz_loadu_epi16(k < run->elements ? mask : 0, even + column * 2);
        __m512i o = _mm512_maskz_loadu_epi16(k + 1 < run->elements ? mask : 0, odd + column * 2);
        kn_put(e, o, to, run->tile_stride);
    }
}

/* `steps` steps of W, from step `first`, to the buffer. */
static void kn_unpack(const struct kn_run *run, int64_t first, int64_t steps)
{
    for (int64_t k = 0; k < steps * 32; k += 2)
        for (int i = 0; i < run->runs; i++) {
            char *tile = run->b + i * (run->padded / 16) * run->tile_stride;
            kn_unpack_pair(run, run->w[i], first * 32 + k, tile + k / 32 * AMX_TILE_BYTES + k % 32 * 32);
        }
}

/* ---------------------------------------------------------------- the products */

/* Four C tiles: two tiles of rows by two of columns, or one by four. */
struct kn_block {
    const char *a, *b;
    char *c;
    int64_t a_stride, b_stride, c_stride; /* from tile to tile; c's from tile of rows to tile of rows */
    int64_t steps;
    bool more; /* C continues */
};

static inline __attribute__((always_inline)) void kn_load_c(const char *c0, const char *c2, bool more)
{
    if (!more) {
        amx_tile_zero(0);
        amx_tile_zero(1);
        amx_tile_zero(2);
        amx_tile_zero(3);
        return;
    }
    amx_tile_load(0, c0, 64);
    amx_tile_load(1, c0 + AMX_TILE_BYTES, 64);
    amx_tile_load(2, c2, 64);
    amx_tile_load(3, c2 + AMX_TILE_BYTES, 64);
}

static inline __attribute__((always_inline)) void kn_store_c(char *c0, char *c2)
{
    amx_tile_store(0, c0, 64);
    amx_tile_store(1, c0 + AMX_TILE_BYTES, 64);
    amx_tile_store(2, c2, 64);
    amx_tile_store(3, c2 + AMX_TILE_BYTES, 64);
}

static __attribute__((noinline)) void kn_two_by_two(const struct kn_block *p)
{
    const char *a = p->a, *b = p->b;

    kn_load_c(p->c, p->c + p->c_stride, p->more);
    for (int64_t step = 0; step < p->steps; step++, a += AMX_TILE_BYTES, b += AMX_TILE_BYTES) {
        amx_tile_load(6, b, 64);
        amx_tile_load(4, a, 64);
        amx_tile_dp(0, 4, 6);
        amx_tile_load(7, b + p->b_stride, 64);
        amx_tile_dp(1, 4, 7);
        amx_tile_load(5, a + p->a_stride, 64);
        amx_tile_dp(2, 5, 6);
        amx_tile_dp(3, 5, 7);
    }
    kn_store_c(p->c, p->c + p->c_stride);
}

static __attribute__((noinline)) void kn_one_by_four(const struct kn_block *p)
{
    const char *a = p->a, *b = p->b;

    kn_load_c(p->c, p->c + 2 * AMX_TILE_BYTES, p->more);
    for (int64_t step = 0; step < p->steps; step++, a += AMX_TILE_BYTES, b += AMX_TILE_BYTES) {
        amx_tile_load(4, a, 64);
        amx_tile_load(5, b, 64);
        amx_tile_dp(0, 4, 5);
        amx_tile_load(6, b + p->b_stride, 64);
        amx_tile_dp(1, 4, 6);
        amx_tile_load(7, b + 2 * p->b_stride, 64);
        amx_tile_dp(2, 4, 7);
        amx_tile_load(5, b + 3 * p->b_stride, 64);
        amx_tile_dp(3, 4, 5);
    }
    kn_store_c(p->c, p->c + 2 * AMX_TILE_BYTES);
}

/* All rows of the block times four tiles of columns, from tile `across`. Two tiles of columns stay in L1. */
static void kn_multiply_four(const struct kn_run *run, int64_t first, int64_t steps, int64_t across)
{
    struct kn_block block = {.a_stride = run->steps * AMX_TILE_BYTES,
                             .b_stride = run->tile_stride,
                             .c_stride = run->across * AMX_TILE_BYTES,
                             .steps = steps,
                             .more = first > 0};

    for (int64_t column = across; column < across + 4; column += 2)
        for (int tile = 0; tile + 1 < run->tiles; tile += 2) {
            block.a = run->x + (tile * run->steps + first) * AMX_TILE_BYTES;
            block.b = run->b + column * run->tile_stride;
            block.c = run->c + (tile * run->across + column) * AMX_TILE_BYTES;
            kn_two_by_two(&block);
        }
    if (run->tiles % 2 == 0)
        return;
    block.a = run->x + ((run->tiles - 1) * run->steps + first) * AMX_TILE_BYTES;
    block.b = run->b + across * run->tile_stride;
    block.c = run->c + ((run->tiles - 1) * run->across + across) * AMX_TILE_BYTES;
    kn_one_by_four(&block);
}

/* C = the block times the runs' columns. */
static void kn_multiply(const struct kn_run *run)
{
    for (int64_t first = 0; first < run->steps; first += run->depth / 32) {
        int64_t steps = run->steps - first < run->depth / 32 ? run->steps - first : run->depth / 32;
        kn_unpack(run, first, steps);
        amx_tile_fence();
        for (int64_t across = 0; across < run->across; across += 4)
            kn_multiply_four(run, first, steps, across);
    }
}

/* ---------------------------------------------------------------- from C to words */

struct kn_bias {
    __m512 low, high;
};

/* 32 columns' biases, in C's order; -0, which changes nothing, where there is none. bias NULL: none. */
static inline struct kn_bias kn_bias(const void *bias, int64_t column, int64_t count)
{
    __m512 none = _mm512_set1_ps(-0.0f);
    struct kn_bias b = {none, none};

    if (bias) {
        __m512i words = _mm512_maskz_loadu_epi16(bf16_mask(count), (const uint16_t *)bias + column);
        b.low = bf16_low(words);
        b.high = bf16_high(words);
    }
    return b;
}

/* 32 columns of a row, from tile `across`: biased, rounded, in order. */
static inline __m512i kn_words(const struct kn_run *run, int row, int64_t across, const struct kn_bias *bias)
{
    const char *c = run->c + (row / 16 * run->across + across) * AMX_TILE_BYTES + row % 16 * 64;
    return bf16_words(_mm512_add_ps(_mm512_loadu_ps(c), bias->low),
                     _mm512_add_ps(_mm512_loadu_ps(c + AMX_TILE_BYTES), bias->high));
}

/* ---------------------------------------------------------------- gmm1 */

/* Where 32 inner columns, from `column`, lie in C and in up_proj's columns, as two groups of 32: gates and ups, or
 * pairs and more pairs. */
struct kn_place {
    int64_t across[2], column[2];
    int64_t count[2]; /* that exist, of 32 */
};

static struct kn_place kn_place(const struct kn_run *run, const struct kern_gmm1 *g, int64_t first, int64_t column)
{
    int64_t inner = g->layer->inner, tile = (column - first) / 16, left = inner - column;
    struct kn_place halves = {{tile, run->padded / 16 + tile}, {column, inner + column}, {left, left}};
    struct kn_place pairs = {{2 * tile, 2 * tile + 2}, {2 * column, 2 * column + 32}, {2 * left, 2 * left - 32}};
    return g->layer->gating == HMOE_HALVES ? halves : pairs;
}

/* SwiGLU of 32 inner columns of every row. */
static void kn_swiglu(const struct kn_run *run, const struct kern_gmm1 *g, int64_t first, int64_t column)
{
    struct kn_place place = kn_place(run, g, first, column);
    int64_t inner = g->layer->inner, steps = pack_steps(inner);
    struct kn_bias low = kn_bias(g->up_bias, place.column[0], place.count[0]);
    struct kn_bias high = kn_bias(g->up_bias, place.column[1], place.count[1]);

    for (int row = 0; row < run->rows; row++) {
        __m512i p = kn_words(run, row, place.across[0], &low), q = kn_words(run, row, place.across[1], &high), a;
        if (g->gate_up) {
            uint16_t *line = (uint16_t *)g->gate_up + row * 2 * inner;
            bf16_store(line + place.column[0], p, place.count[0], false);
            bf16_store(line + place.column[1], q, place.count[1], false);
        }
        if (g->layer->gating == HMOE_HALVES)
            a = bf16_gated_words(&g->layer->act, p, q);
        else
            a = bf16_gated_words(&g->layer->act, bf16_every_other(p, q, 0), bf16_every_other(p, q, 1));
        /* columns that do not exist hold NaN where x holds Inf */
        a = _mm512_maskz_mov_epi16(bf16_mask(inner - column), a);
        _mm512_store_si512((char *)g->a + (row / 16 * steps + column / 32) * AMX_TILE_BYTES + row % 16 * 64, a);
        if (g->a_plain)
            bf16_store((uint16_t *)g->a_plain + row * inner + column, a, inner - column, false);
    }
}

/* The runs for `width` inner columns from `first`. */
static void kn_up_runs(struct kn_run *run, const struct kern_gmm1 *g, int64_t first, int64_t width)
{
    bool halves = g->layer->gating == HMOE_HALVES;
    int64_t padded = (width + KERN_STRIP - 1) / KERN_STRIP * KERN_STRIP;

    run->runs = halves ? 2 : 1;
    run->w[0] = (const char *)g->up + (halves ? first : 2 * first) * 2;
    run->w[1] = run->w[0] + g->layer->inner * 2;
    run->width = halves ? width : 2 * width;
    run->padded = halves ? padded : 2 * padded;
    run->across = 2 * padded / 16;
}

static void kn_gmm1(const struct kern_gmm1 *g)
{
    struct kn_run run = kn_run(g->x, g->rows, g->layer->hidden, 2 * g->layer->inner, g->scratch);
    int64_t part = kn_part(g->last - g->first, kn_columns_most(&run) / 2);

    for (int64_t first = g->first; first < g->last; first += part) {
        int64_t last = g->last - first < part ? g->last : first + part, start;
        kn_up_runs(&run, g, first, last - first);
        kn_multiply(&run);
        start = g->swiglu_ns ? base_now_ns() : 0;
        for (int64_t column = first; column < last; column += 32)
            kn_swiglu(&run, g, first, column);
        if (g->swiglu_ns)
            *g->swiglu_ns += base_now_ns() - start;
    }
}

/* ---------------------------------------------------------------- gmm2 */

static void kn_out(const struct kn_run *run, const struct kern_gmm2 *g, int64_t first, int64_t last)
{
    for (int row = 0; row < run->rows; row++)
        for (int64_t column = first; column < last; column += 32) {
            struct kn_bias bias = kn_bias(g->down_bias, column, last - column);
            __m512i words = kn_words(run, row, (column - first) / 16, &bias);
            bf16_store((uint16_t *)g->out[row] + column, words, last - column, run->rows >= KN_STREAM_ROWS);
        }
}

static void kn_gmm2(const struct kern_gmm2 *g)
{
    struct kn_run run = kn_run(g->a, g->rows, g->layer->inner, g->layer->hidden, g->scratch);
    int64_t part = kn_part(g->last - g->first, kn_columns_most(&run));

    for (int64_t first = g->first; first < g->last; first += part) {
        int64_t last = g->last - first < part ? g->last : first + part;
        run.runs = 1;
        run.w[0] = (const char *)g->down + first * 2;
        run.width = last - first;
        run.padded = (run.width + KERN_STRIP - 1) / KERN_STRIP * KERN_STRIP;
        run.across = run.padded / 16;
        kn_multiply(&run);
        kn_out(&run, g, first, last);
    }
    _mm_sfence(); /* the streamed rows are complete before anyone is told so */
}

#endif
