/* The NK layout: the rows of W are the rows of the A tiles, as they lie in memory; the block's activations are the
 * B operand, packed once. The products come out transposed, C[column][row], which two by two is the B operand of
 * the next multiplication.
 *
 * A panel is two A tiles: 16 gates and their 16 ups, or the even and the odd ones of 32 hidden columns. It is
 * multiplied with two tiles of the block's rows at a time. The weights are read once from DRAM, where the time goes:
 *   few rows     in place, all of K in one go, while the CPU's own prefetchers stream the 32 rows
 *   more         in place, and the lines of the next panel are prefetched between the products
 *   many         copied, K = 256 at a time, because rows 4 KB apart share one set of L1; the next chunk is copied
 *                between the products
 * But for few rows, SwiGLU of a panel is spread over the products of the next one.
 * An incomplete panel, and an incomplete last step of K, is always copied, and padded with zeros. */
#ifndef KERN_AMX_NK_H
#define KERN_AMX_NK_H

#include "kern/amx_pack.h"

/* The edges between these ways, in rows of the block. */
#define NK_PREFETCH_ROWS 33
#define NK_SPREAD_ROWS 33
#define NK_COPY_ROWS 128
/* Outputs of blocks this tall are stored around the caches. */
#define NK_STREAM_ROWS 16
/* Steps of 32 in a copied chunk, at 2 KB a step: two chunks fill two thirds of L1. */
#define NK_CHUNK 8
#define NK_CHUNK_BYTES (2 * NK_CHUNK * AMX_TILE_BYTES)
#define NK_C_BYTES (AMX_ROWS_MOST / 16 * 2 * AMX_TILE_BYTES)

struct nk_panel {
    const char *w[2]; /* the first row of each tile */
    int64_t stride;   /* from row to row of a tile, in bytes */
    int rows[2];      /* that exist, of 16 */
};

/* A stretch of K of one panel, in place or in a chunk. */
struct nk_span {
    const char *w[2];
    int64_t stride, step_bytes; /* from row to row, from step to step */
    int64_t first, steps;
    bool last; /* the panel is complete after it */
};

/* Complete products that await SwiGLU. */
struct nk_products {
    const char *c;     /* [tiles][2][1 KB] */
    char *a;           /* packed, of the first tile */
    const float *bias; /* 16 gates, 16 ups */
    int tiles;         /* 0: none */
    int begin, end;    /* pairs of columns, of 8 */
};

enum nk_lines { NK_NO_LINES, NK_PREFETCH, NK_COPY };

/* What is done between the products: lines of the next weights, and SwiGLU of the previous products. */
struct nk_aside {
    enum nk_lines lines;
    const char *from[2]; /* the first line of each tile */
    int64_t stride, steps;
    char *to;            /* a chunk */
    int64_t ahead;       /* copying also prefetches so many bytes further on; 0: not */
    int begin, end;      /* rows of 32: this multiplication's share */
    struct nk_products products; /* of at most two tiles */
};

struct nk_run {
    const char *b; /* activations: [tiles][steps][1 KB] */
    int rows, tiles;
    int64_t elements, steps; /* of K */
    char *chunk[2], *c[2];   /* scratch; C, now and of the previous panel: [tiles][2][1 KB] */
    int turn;                /* of the chunks */
    bool copied;             /* chunk[turn] already holds the coming span */
    int64_t ahead;
    /* SwiGLU, in gmm1 only */
    const struct hmoe_activation *act;
    char *a; /* [tiles][a_steps][1 KB] */
    int64_t a_steps, column;
    float bias[2][32];           /* of even and odd panels */
    struct nk_products previous; /* panel */
};

static inline size_t nk_scratch_bytes(void)
{
    return 2 * NK_CHUNK_BYTES + 2 * NK_C_BYTES;
}

static inline struct nk_run nk_run(const void *b, int rows, int64_t elements, char *scratch)
{
    struct nk_run run = {.b = b,
                         .rows = rows,
                         .tiles = pack_tiles(rows),
                         .elements = elements,
                         .steps = pack_steps(elements),
                         .chunk = {scratch, scratch + NK_CHUNK_BYTES},
                         .c = {scratch + 2 * NK_CHUNK_BYTES, scratch + 2 * NK_CHUNK_BYTES + NK_C_BYTES}};
    return run;
}

/* ---------------------------------------------------------------- between the products */

/* SwiGLU of two columns, `pair` of 8, of one tile of rows. */
static inline void nk_swiglu_pair(const struct nk_run *run, const struct nk_products *p, int tile, int pair)
{
    const char *c = p->c + 2 * tile * AMX_TILE_BYTES;
    char *a = p->a + tile * run->a_steps * AMX_TILE_BYTES;
    __m512i done[2];

    for (int i = 0; i < 2; i++) {
        int column = 2 * pair + i;
        __m512 gate = _mm512_add_ps(_mm512_loadu_ps(c + column * 64), _mm512_set1_ps(p->bias[column]));
        __m512 up = _mm512_loadu_ps(c + AMX_TILE_BYTES + column * 64);
        gate = _mm512_castsi512_ps(bf16_round(gate));
        up = _mm512_castsi512_ps(bf16_round(_mm512_add_ps(up, _mm512_set1_ps(p->bias[16 + column]))));
        done[i] = bf16_round(bf16_gated(run->act, gate, up));
    }
    _mm512_store_si512(a + pair * 64, bf16_pairs(done[0], done[1]));
}

static void nk_swiglu_all(const struct nk_run *run, const struct nk_products *p)
{
    for (int pair = p->begin; pair < p->end; pair++)
        for (int tile = 0; tile < p->tiles; tile++)
            nk_swiglu_pair(run, p, tile, pair);
}

/* The pieces of what nk_swiglu_all does, for at most two tiles. */
static inline int64_t nk_swiglu_pieces(const struct nk_products *p)
{
    return p->tiles * (p->end - p->begin);
}

static inline void nk_swiglu_piece(const struct nk_run *run, const struct nk_products *p, int piece)
{
    bool two = p->tiles == 2;
    nk_swiglu_pair(run, p, two ? piece & 1 : 0, p->begin + (two ? piece >> 1 : piece));
}

/* This share's lines of one step. */
static inline void nk_aside_lines(const struct nk_aside *aside, int64_t step)
{
    for (int row = aside->begin; row < aside->end; row++) {
        const char *line = aside->from[row >> 4] + (row & 15) * aside->stride + step * 64;
        if (aside->lines == NK_PREFETCH) {
            _mm_prefetch(line, _MM_HINT_T1);
            continue;
        }
        if (aside->ahead)
            _mm_prefetch(line + aside->ahead, _MM_HINT_T1);
        _mm512_store_si512(aside->to + ((row >> 4) * NK_CHUNK + step) * AMX_TILE_BYTES + (row & 15) * 64,
                           _mm512_loadu_si512(line));
    }
}

/* What the products' steps left over. */
static void nk_aside_rest(const struct nk_run *run, const struct nk_aside *aside, int64_t step)
{
    for (int64_t s = step; s < aside->steps; s++)
        nk_aside_lines(aside, s);
    for (int64_t piece = step; piece < nk_swiglu_pieces(&aside->products); piece++)
        nk_swiglu_piece(run, &aside->products, (int)piece);
}

/* ---------------------------------------------------------------- the products */

static inline __attribute__((always_inline)) void nk_load_c(const char *c, bool more, bool two)
{
    if (!more) {
        amx_tile_zero(0);
        amx_tile_zero(1);
        amx_tile_zero(2);
        amx_tile_zero(3);
        return;
    }
    amx_tile_load(0, c, 64);
    amx_tile_load(1, c + AMX_TILE_BYTES, 64);
    if (two) {
        amx_tile_load(2, c + 2 * AMX_TILE_BYTES, 64);
        amx_tile_load(3, c + 3 * AMX_TILE_BYTES, 64);
    }
}

static inline __attribute__((always_inline)) void nk_store_c(char *c, bool two)
{
    amx_tile_store(0, c, 64);
    amx_tile_store(1, c + AMX_TILE_BYTES, 64);
    if (two) {
        amx_tile_store(2, c + 2 * AMX_TILE_BYTES, 64);
        amx_tile_store(3, c + 3 * AMX_TILE_BYTES, 64);
    }
}

/* One panel's span times one tile of the block's rows, or two. Tiles 0 to 3: C, 4 and 5: W, 6 and 7: activations. */
static inline __attribute__((always_inline)) void nk_multiply(const struct nk_run *run, const struct nk_span *w,
                                                              int tile, const struct nk_aside *given, bool two)
{
    const char *b0 = run->b + (tile * run->steps + w->first) * AMX_TILE_BYTES, *b1 = b0 + run->steps * AMX_TILE_BYTES;
    char *c = run->c[0] + 2 * tile * AMX_TILE_BYTES;
    const struct nk_span span = *w; /* copies, which no store below can change */
    const struct nk_aside aside = *given;
    int64_t pieces = nk_swiglu_pieces(&aside.products);

    amx_tile_fence();
    nk_load_c(c, span.first > 0, two);
    for (int64_t step = 0; step < span.steps; step++) {
        amx_tile_load(6, b0 + step * AMX_TILE_BYTES, 64);
        amx_tile_load(4, span.w[0] + step * span.step_bytes, span.stride);
        amx_tile_dp(0, 4, 6);
        if (step < aside.steps)
            nk_aside_lines(&aside, step);
        if (two) {
            amx_tile_load(7, b1 + step * AMX_TILE_BYTES, 64);
            amx_tile_dp(2, 4, 7);
        }
        if (step < pieces)
            nk_swiglu_piece(run, &aside.products, (int)step);
        amx_tile_load(5, span.w[1] + step * span.step_bytes, span.stride);
        amx_tile_dp(1, 5, 6);
        if (two)
            amx_tile_dp(3, 5, 7);
    }
    nk_store_c(c, two);
    nk_aside_rest(run, &aside, span.steps);
}

static __attribute__((noinline)) void nk_multiply_one(const struct nk_run *run, const struct nk_span *w, int tile,
                                                      const struct nk_aside *aside)
{
    nk_multiply(run, w, tile, aside, false);
}

static __attribute__((noinline)) void nk_multiply_two(const struct nk_run *run, const struct nk_span *w, int tile,
                                                      const struct nk_aside *aside)
{
    nk_multiply(run, w, tile, aside, true);
}

/* Of the previous panel's products: this multiplication's share. */
static struct nk_products nk_share(const struct nk_run *run, const struct nk_span *w, int tile, int tiles)
{
    struct nk_products p = run->previous;

    if (p.tiles == 0)
        return p;
    p.c += 2 * tile * AMX_TILE_BYTES;
    p.a += tile * run->a_steps * AMX_TILE_BYTES;
    p.tiles = tiles;
    p.begin = (int)(8 * w->first / run->steps);
    p.end = (int)(8 * (w->first + w->steps) / run->steps);
    return p;
}

/* A span times all rows of the block. */
static void nk_multiply_all(struct nk_run *run, const struct nk_span *w, struct nk_aside *aside)
{
    int pairs = (run->tiles + 1) / 2, share = (32 + pairs - 1) / pairs;

    for (int tile = 0; tile < run->tiles; tile += 2) {
        int tiles = tile + 1 < run->tiles ? 2 : 1;
        aside->begin = tile / 2 * share < 32 ? tile / 2 * share : 32;
        aside->end = aside->begin + share < 32 ? aside->begin + share : 32;
        aside->products = nk_share(run, w, tile, tiles);
        (tiles == 2 ? nk_multiply_two : nk_multiply_one)(run, w, tile, aside);
    }
}

/* ---------------------------------------------------------------- one panel */

static bool nk_whole(const struct nk_panel *p)
{
    return p->rows[0] == 16 && p->rows[1] == 16;
}

/* A chunk from any part of a panel, with zeros for what lies outside the matrix. */
static void nk_copy(const struct nk_run *run, const struct nk_panel *p, int64_t first, char *chunk)
{
    for (int t = 0; t < 2; t++)
        for (int row = 0; row < 16; row++)
            for (int64_t step = first; step < first + NK_CHUNK; step++) {
                __mmask32 mask = row < p->rows[t] ? bf16_mask(run->elements - step * 32) : 0;
                __m512i line = _mm512_maskz_loadu_epi16(mask, p->w[t] + row * p->stride + step * 64);
                _mm512_store_si512(chunk + (t * NK_CHUNK + step - first) * AMX_TILE_BYTES + row * 64, line);
            }
}

/* The span that chunk[turn] holds. */
static struct nk_span nk_span_copied(const struct nk_run *run, int64_t first)
{
    char *chunk = run->chunk[run->turn];
    struct nk_span span = {.w = {chunk, chunk + NK_CHUNK_BYTES / 2}, .stride = 64, .step_bytes = AMX_TILE_BYTES};

    span.first = first;
    span.steps = run->steps - first < NK_CHUNK ? run->steps - first : NK_CHUNK;
    span.last = first + span.steps == run->steps;
    return span;
}

/* To copy the chunk of p that starts at `first` into the other buffer, if all of it lies in the matrix. */
static struct nk_aside nk_aside_copy(const struct nk_run *run, const struct nk_panel *p, int64_t first)
{
    struct nk_aside aside = {.lines = NK_NO_LINES};
    int64_t steps = run->steps - first < NK_CHUNK ? run->steps - first : NK_CHUNK;

    if (!p || !nk_whole(p) || (first + steps) * 32 > run->elements)
        return aside;
    aside.lines = NK_COPY;
    aside.from[0] = p->w[0] + first * 64;
    aside.from[1] = p->w[1] + first * 64;
    aside.stride = p->stride;
    aside.steps = steps;
    aside.to = run->chunk[run->turn ^ 1];
    aside.ahead = run->ahead;
    return aside;
}

/* To prefetch what nk_in_place will read of p. */
static struct nk_aside nk_aside_prefetch(const struct nk_run *run, const struct nk_panel *p)
{
    struct nk_aside aside = {.lines = NK_NO_LINES};

    if (!p || run->rows < NK_PREFETCH_ROWS)
        return aside;
    aside.lines = NK_PREFETCH;
    aside.from[0] = p->w[0];
    aside.from[1] = p->w[1];
    aside.stride = p->stride;
    aside.steps = run->elements / 32;
    return aside;
}

static void nk_copied(struct nk_run *run, const struct nk_panel *p, const struct nk_panel *next)
{
    for (int64_t first = 0; first < run->steps; first += NK_CHUNK) {
        struct nk_span span = nk_span_copied(run, first);
        struct nk_aside aside = nk_aside_copy(run, span.last ? next : p, span.last ? 0 : first + NK_CHUNK);

        if (!run->copied)
            nk_copy(run, p, first, run->chunk[run->turn]);
        nk_multiply_all(run, &span, &aside);
        run->copied = aside.lines == NK_COPY;
        run->turn ^= 1;
    }
}

static void nk_in_place(struct nk_run *run, const struct nk_panel *p, const struct nk_panel *next)
{
    struct nk_aside aside = nk_aside_prefetch(run, next), nothing = {.lines = NK_NO_LINES};
    int64_t steps = run->elements / 32;
    struct nk_span span = {.w = {p->w[0], p->w[1]}, .stride = p->stride, .step_bytes = 64, .steps = steps};

    span.last = steps == run->steps;
    if (steps > 0)
        nk_multiply_all(run, &span, &aside);
    if (span.last)
        return;
    nk_copy(run, p, steps, run->chunk[run->turn]);
    span = nk_span_copied(run, steps);
    nk_multiply_all(run, &span, &nothing);
}

/* C = a panel times the block. next: the panel after it, or NULL. */
static void nk_panel(struct nk_run *run, const struct nk_panel *p, const struct nk_panel *next)
{
    if (run->rows >= NK_COPY_ROWS || !nk_whole(p))
        nk_copied(run, p, next);
    else
        nk_in_place(run, p, next);
}

/* C of one tile of rows, biased, rounded and turned: lane j of v[row] is column j of the panel's two tiles. */
static inline void nk_turned(const struct nk_run *run, int tile, const float *bias, vec_u32 v[16])
{
    const char *c = run->c[0] + 2 * tile * AMX_TILE_BYTES;

    for (int i = 0; i < 16; i++) {
        __m512 low = _mm512_add_ps(_mm512_loadu_ps(c + i * 64), _mm512_set1_ps(bias[i]));
        __m512 high = _mm512_add_ps(_mm512_loadu_ps(c + AMX_TILE_BYTES + i * 64), _mm512_set1_ps(bias[16 + i]));
        v[i] = (vec_u32)bf16_pairs(bf16_round(low), bf16_round(high));
    }
    transpose(v);
}

/* bias[i] = the i-th of `count`, `stride` apart; -0, which changes nothing, for those that do not exist */
static void nk_bias(float bias[16], const uint16_t *from, int64_t stride, int count)
{
    for (int i = 0; i < 16; i++)
        bias[i] = from && i < count ? num_from_bf16(from[i * stride]) : -0.0f;
}

static int nk_rows_of(const struct nk_run *run, int tile)
{
    return run->rows - tile * 16 < 16 ? run->rows - tile * 16 : 16;
}

/* ---------------------------------------------------------------- gmm1 */

/* 16 gates and their ups, from inner column `column`. */
static struct nk_panel nk_up_panel(const struct kern_gmm1 *g, int64_t column)
{
    int64_t row_bytes = g->layer->hidden * 2, inner = g->layer->inner;
    bool halves = g->layer->gating == HMOE_HALVES;
    int rows = (int)(inner - column < 16 ? inner - column : 16);
    struct nk_panel p = {.stride = halves ? row_bytes : 2 * row_bytes, .rows = {rows, rows}};

    p.w[0] = (const char *)g->up + (halves ? column : 2 * column) * row_bytes;
    p.w[1] = p.w[0] + (halves ? inner : 1) * row_bytes;
    return p;
}

static void nk_up_bias(const struct kern_gmm1 *g, int64_t column, int count, float bias[32])
{
    const uint16_t *from = g->up_bias;
    bool halves = g->layer->gating == HMOE_HALVES;
    const uint16_t *gates = from ? from + (halves ? column : 2 * column) : NULL;

    nk_bias(bias, gates, halves ? 1 : 2, count);
    nk_bias(bias + 16, gates ? gates + (halves ? g->layer->inner : 1) : NULL, halves ? 1 : 2, count);
}

/* The panel's gates and ups, as rows. */
static void nk_gate_up(const struct nk_run *run, const struct kern_gmm1 *g, int count)
{
    int64_t inner = g->layer->inner, column = run->column;
    __mmask16 mask = (__mmask16)bf16_mask(count);
    vec_u32 v[16];

    for (int tile = 0; tile < run->tiles; tile++) {
        nk_turned(run, tile, run->bias[column / 16 % 2], v);
        for (int row = 0; row < nk_rows_of(run, tile); row++) {
            uint16_t *line = (uint16_t *)g->gate_up + (tile * 16 + row) * 2 * inner;
            if (g->layer->gating == HMOE_INTERLEAVED) {
                bf16_store(line + 2 * column, (__m512i)v[row], 2 * count, false);
                continue;
            }
            _mm256_mask_storeu_epi16(line + column, mask, _mm512_cvtepi32_epi16((__m512i)v[row]));
            _mm256_mask_storeu_epi16(line + inner + column, mask, _mm512_cvtepi32_epi16((__m512i)(v[row] >> 16)));
        }
    }
}

/* Zeros in the last step of `a` for the columns that do not exist: an Inf in x times the zeros that W was padded with
 * is NaN, and would not stay in its column. */
static void nk_pad_a(const struct nk_run *run, int64_t inner)
{
    int64_t real = inner - (run->a_steps - 1) * 32, pairs = (real + 1) / 2;

    for (int tile = 0; tile < run->tiles; tile++) {
        char *last = run->a + ((tile + 1) * run->a_steps - 1) * AMX_TILE_BYTES;
        for (int64_t row = 0; real % 2 != 0 && row < 16; row++)
            memset(last + (pairs - 1) * 64 + row * 4 + 2, 0, 2);
        memset(last + pairs * 64, 0, (size_t)(16 - pairs) * 64);
    }
}

/* The range of `a`, as rows. */
static void nk_a_plain(const struct nk_run *run, const struct kern_gmm1 *g)
{
    vec_u32 v[16];

    for (int tile = 0; tile < run->tiles; tile++)
        for (int64_t column = g->first; column < g->last; column += 32) {
            const char *a = run->a + (tile * run->a_steps + column / 32) * AMX_TILE_BYTES;
            for (int i = 0; i < 16; i++)
                v[i] = vec_load_u32(a + i * 64);
            transpose(v);
            for (int row = 0; row < nk_rows_of(run, tile); row++)
                bf16_store((uint16_t *)g->a_plain + (tile * 16 + row) * g->layer->inner + column, (__m512i)v[row],
                           g->last - column, false);
        }
}

/* One panel's products, once complete. */
static struct nk_products nk_products(const struct nk_run *run)
{
    struct nk_products p = {.c = run->c[0],
                            .a = run->a + run->column / 32 * AMX_TILE_BYTES + run->column % 32 / 2 * 64,
                            .bias = run->bias[run->column / 16 % 2],
                            .tiles = run->tiles,
                            .end = 8};
    return p;
}

/* The panel's SwiGLU is left to the next one, which has another C. */
static void nk_up_later(struct nk_run *run)
{
    char *c = run->c[0];

    run->previous = nk_products(run);
    run->c[0] = run->c[1];
    run->c[1] = c;
}

static void nk_up_now(const struct nk_run *run, const struct kern_gmm1 *g, int count)
{
    struct nk_products p = nk_products(run);
    int64_t start = g->swiglu_ns ? base_now_ns() : 0;

    if (g->gate_up)
        nk_gate_up(run, g, count);
    nk_swiglu_all(run, &p);
    if (g->swiglu_ns)
        *g->swiglu_ns += base_now_ns() - start;
}

static void nk_gmm1(const struct kern_gmm1 *g)
{
    struct nk_run run = nk_run(g->x, g->rows, g->layer->hidden, g->scratch);
    bool later = g->rows >= NK_SPREAD_ROWS && !g->gate_up && !g->swiglu_ns;

    run.act = &g->layer->act;
    run.a = g->a;
    run.a_steps = pack_steps(g->layer->inner);
    for (run.column = g->first; run.column < g->last; run.column += 16) {
        struct nk_panel panel = nk_up_panel(g, run.column), next = nk_up_panel(g, run.column + 16);
        nk_up_bias(g, run.column, panel.rows[0], run.bias[run.column / 16 % 2]);
        nk_panel(&run, &panel, run.column + 16 < g->last ? &next : NULL);
        if (later)
            nk_up_later(&run);
        else
            nk_up_now(&run, g, panel.rows[0]);
    }
    nk_swiglu_all(&run, &run.previous);
    if (g->last == g->layer->inner)
        nk_pad_a(&run, g->layer->inner);
    if (g->a_plain)
        nk_a_plain(&run, g);
}

/* ---------------------------------------------------------------- gmm2 */

/* 32 hidden columns from `column`; the even ones are the first tile, so that C's pairs are neighbours. */
static struct nk_panel nk_down_panel(const struct kern_gmm2 *g, int64_t column)
{
    int64_t row_bytes = g->layer->inner * 2, left = g->layer->hidden - column;
    int rows = (int)(left < 32 ? left : 32);
    struct nk_panel p = {.stride = 2 * row_bytes, .rows = {(rows + 1) / 2, rows / 2}};

    p.w[0] = (const char *)g->down + column * row_bytes;
    p.w[1] = p.w[0] + row_bytes;
    return p;
}

static void nk_out(const struct nk_run *run, const struct kern_gmm2 *g, int64_t column, const float bias[32])
{
    vec_u32 v[16];

    for (int tile = 0; tile < run->tiles; tile++) {
        nk_turned(run, tile, bias, v);
        for (int row = 0; row < nk_rows_of(run, tile); row++)
            bf16_store((uint16_t *)g->out[tile * 16 + row] + column, (__m512i)v[row], g->last - column,
                       run->rows >= NK_STREAM_ROWS);
    }
}

static void nk_gmm2(const struct kern_gmm2 *g)
{
    struct nk_run run = nk_run(g->a, g->rows, g->layer->inner, g->scratch);

    run.ahead = 32 * g->layer->inner * 2; /* one panel */
    for (int64_t column = g->first; column < g->last; column += 32) {
        struct nk_panel panel = nk_down_panel(g, column), next = nk_down_panel(g, column + 32);
        const uint16_t *from = g->down_bias ? (const uint16_t *)g->down_bias + column : NULL;
        nk_bias(run.bias[0], from, 2, panel.rows[0]);
        nk_bias(run.bias[0] + 16, from ? from + 1 : NULL, 2, panel.rows[1]);
        nk_panel(&run, &panel, column + 32 < g->last ? &next : NULL);
        nk_out(&run, g, column, run.bias[0]);
    }
    _mm_sfence(); /* the streamed rows are complete before anyone is told so */
}

#endif
