/* One expert's block through an engine, and the same in plain loops. A case is a shape, the kinds of its numbers, and a
 * seed.
 * The caller's tensors stand against pages nobody may touch. */
#ifndef TESTS_KERN_CASE_H
#define TESTS_KERN_CASE_H

#include "base/fpenv.h"
#include "base/num.h"
#include "base/prng.h"
#include "kern/kern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct kern_case {
    int64_t hidden, inner;
    int rows;
    enum hmoe_dtype dtype;
    enum hmoe_layout layout;
    enum hmoe_gating gating;
    int clamped;  /* gpt-oss's activation */
    int biased;
    int special;  /* NaN, Inf, denormals, huge and tiny numbers among the rest */
    int strip;    /* columns per call, a multiple of KERN_STRIP; 0: all at once */
    uint64_t seed;
};

/* ------------------------------------------------- memory between forbidden pages */

struct guarded {
    char *map, *data;
    size_t map_bytes, bytes;
};

/* The data touch the page after them, or with `low` the page before them. */
static inline struct guarded guarded_create(size_t bytes, int low)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (bytes + page - 1) / page * page;
    struct guarded g = {.map_bytes = body + 2 * page, .bytes = bytes};

    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.map == MAP_FAILED || mprotect(g.map, page, PROT_NONE) != 0 ||
        mprotect(g.map + page + body, page, PROT_NONE) != 0) {
        perror("guarded_create");
        abort();
    }
    memset(g.map + page, 0xa5, body);
    g.data = low ? g.map + page : g.map + page + body - bytes;
    return g;
}

static inline void guarded_destroy(struct guarded *g)
{
    munmap(g->map, g->map_bytes);
}

static inline void *aligned(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, KERN_ALIGN, bytes) != 0)
        abort();
    memset(p, 0xff, bytes); /* NaN in every dtype */
    return p;
}

/* ------------------------------------------------- numbers */

/* The corner where arm64 differs (tiny found before rounding) needs an inexact result just below 2^-126: these have
 * too few bits for it. */
static inline float special_number(struct base_prng *prng)
{
    static const float list[] = {0.0f, -0.0f, 0x1p-126f, -0x1p-126f, 0x1.8p-130f, 0x1p-149f, 0x1.cp+127f, -0x1.cp+127f,
                                 0x1p-14f, 0x1p-20f, -0x1p-24f, 65504.0f, -65504.0f, 0x1p+60f, 0x1p-70f};
    int64_t pick = base_random_below(prng, 40);

    if (pick == 38)
        return INFINITY;
    if (pick == 39)
        return num_float(0xffc12345); /* a NaN with a payload */
    return list[pick % 15];
}

static inline void fill(struct base_prng *prng, enum hmoe_dtype dtype, void *to, int64_t count, float scale,
                        int special)
{
    for (int64_t i = 0; i < count; i++) {
        float f = base_random_sym(prng, scale);
        if (special != 0 && base_random_below(prng, special) == 0)
            f = special_number(prng);
        if (dtype == HMOE_F32)
            memcpy((char *)to + i * 4, &f, 4); /* not canonical: denormals and payloads stay */
        else
            num_store(dtype, (char *)to, i, f);
    }
}

/* element i of possibly unaligned storage */
static inline float at(enum hmoe_dtype dtype, const void *base, int64_t i)
{
    size_t bytes = num_bytes(dtype);
    uint32_t one = 0;
    memcpy(&one, (const char *)base + (size_t)i * bytes, bytes);
    return num_load(dtype, &one, 0);
}

struct kern_data {
    struct kern_layer layer;
    struct guarded up, down, up_bias, down_bias, x;
    int64_t x_stride; /* elements */
};

static inline struct kern_layer case_layer(const struct kern_case *c)
{
    struct hmoe_activation act = {0};
    if (c->clamped)
        act = (struct hmoe_activation){1.702f, 0.75f, 1.0f};
    return (struct kern_layer){c->hidden, c->inner, c->dtype, c->layout, c->gating, num_activation(act)};
}

static inline void data_init(struct kern_data *d, const struct kern_case *c)
{
    struct base_prng prng = {c->seed * 7919 + 11};
    size_t bytes = num_bytes(c->dtype);
    size_t h = (size_t)c->hidden, i = (size_t)c->inner;
    int low = (int)(c->seed & 1);

    d->layer = case_layer(c);
    d->x_stride = c->hidden + (low ? 0 : 1);
    d->up = guarded_create(h * 2 * i * bytes, low);
    d->down = guarded_create(i * h * bytes, low);
    d->up_bias = guarded_create(2 * i * bytes, low);
    d->down_bias = guarded_create(h * bytes, low);
    d->x = guarded_create(((size_t)(c->rows - 1) * (size_t)d->x_stride + h) * bytes, low);
    fill(&prng, c->dtype, d->up.data, 2 * c->hidden * c->inner, 0.3f, c->special ? 900 : 0);
    fill(&prng, c->dtype, d->down.data, c->hidden * c->inner, 0.3f, c->special ? 900 : 0);
    fill(&prng, c->dtype, d->up_bias.data, 2 * c->inner, 1.0f, c->special ? 20 : 0);
    fill(&prng, c->dtype, d->down_bias.data, c->hidden, 1.0f, c->special ? 20 : 0);
    fill(&prng, c->dtype, d->x.data, (c->rows - 1) * d->x_stride + c->hidden, 2.0f, c->special ? 100 : 0);
}

static inline void data_fini(struct kern_data *d)
{
    guarded_destroy(&d->up);
    guarded_destroy(&d->down);
    guarded_destroy(&d->up_bias);
    guarded_destroy(&d->down_bias);
    guarded_destroy(&d->x);
}

static const void *data_row(const struct kern_data *d, int row)
{
    return d->x.data + (size_t)(row * d->x_stride) * num_bytes(d->layer.dtype);
}

/* ------------------------------------------------- results */

struct kern_result {
    char *gate_up, *a, *out; /* [rows,2I] [rows,I] [rows,H] */
    size_t gate_up_bytes, a_bytes, out_bytes;
};

static inline struct kern_result result_create(const struct kern_case *c)
{
    size_t rows = (size_t)c->rows * num_bytes(c->dtype);
    struct kern_result r = {NULL, NULL, NULL, rows * 2 * (size_t)c->inner, rows * (size_t)c->inner,
                            rows * (size_t)c->hidden};
    r.gate_up = aligned(r.gate_up_bytes);
    r.a = aligned(r.a_bytes);
    r.out = aligned(r.out_bytes);
    return r;
}

static inline void result_destroy(struct kern_result *r)
{
    free(r->gate_up);
    free(r->a);
    free(r->out);
}

static inline int result_equal(const struct kern_result *r, const struct kern_result *s)
{
    return memcmp(r->gate_up, s->gate_up, r->gate_up_bytes) == 0 && memcmp(r->a, s->a, r->a_bytes) == 0 &&
           memcmp(r->out, s->out, r->out_bytes) == 0;
}

/* FNV-1a */
static inline uint64_t hash_bytes(uint64_t hash, const char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return hash;
}

static inline uint64_t result_hash(uint64_t hash, const struct kern_result *r)
{
    hash = hash_bytes(hash, r->gate_up, r->gate_up_bytes);
    hash = hash_bytes(hash, r->a, r->a_bytes);
    return hash_bytes(hash, r->out, r->out_bytes);
}

/* ------------------------------------------------- the plain loops */

/* the pair chain of DESIGN 5 over widened terms: a[i], b[i * stride] */
static inline float plain_chain(const float *a, const float *b, int64_t stride, int64_t terms)
{
    float acc = 0.0f;

    for (int64_t k = 0; k < terms; k += 32) {
        float e = 0.0f, o = 0.0f;
        for (int64_t i = k; i < k + 32; i += 2) {
            e = i < terms ? fmaf(a[i], b[i * stride], e) : fmaf(0.0f, 0.0f, e);
            o = i + 1 < terms ? fmaf(a[i + 1], b[(i + 1) * stride], o) : fmaf(0.0f, 0.0f, o);
        }
        acc = acc + (e + o);
    }
    return acc;
}

static inline float *widened(enum hmoe_dtype dtype, const void *from, int64_t count)
{
    float *f = aligned((size_t)count * sizeof *f);
    for (int64_t i = 0; i < count; i++)
        f[i] = at(dtype, from, i);
    return f;
}

/* one row of a product: [columns] sums of terms x[terms] * w, plus the bias, rounded into out */
static void plain_row(const struct kern_layer *layer, const float *x, const float *w, int64_t terms, int64_t columns,
                      const void *bias, char *out)
{
    bool kn = layer->layout == HMOE_KN;

    for (int64_t c = 0; c < columns; c++) {
        float sum = plain_chain(x, w + (kn ? c : c * terms), kn ? columns : 1, terms);
        if (bias != NULL)
            sum = sum + at(layer->dtype, bias, c);
        num_store(layer->dtype, out, c, sum);
    }
}

static inline void plain_swiglu(const struct kern_layer *layer, const char *gate_up, char *a)
{
    for (int64_t c = 0; c < layer->inner; c++) {
        bool halves = layer->gating == HMOE_HALVES;
        int64_t g = halves ? c : 2 * c, u = halves ? layer->inner + c : g + 1;
        num_store(layer->dtype, a, c,
                  num_gated(&layer->act, at(layer->dtype, gate_up, g), at(layer->dtype, gate_up, u)));
    }
}

static inline void run_plain(const struct kern_case *c, const struct kern_data *d, struct kern_result *r)
{
    float *up = widened(c->dtype, d->up.data, 2 * c->hidden * c->inner);
    float *down = widened(c->dtype, d->down.data, c->hidden * c->inner);
    size_t bytes = num_bytes(c->dtype), h = (size_t)c->hidden * bytes, i = (size_t)c->inner * bytes;

    for (int row = 0; row < c->rows; row++) {
        char *gate_up = r->gate_up + (size_t)row * 2 * i, *a = r->a + (size_t)row * i;
        float *x = widened(c->dtype, data_row(d, row), c->hidden), *wide_a;
        plain_row(&d->layer, x, up, c->hidden, 2 * c->inner, c->biased ? d->up_bias.data : NULL, gate_up);
        plain_swiglu(&d->layer, gate_up, a);
        wide_a = widened(c->dtype, a, c->inner);
        plain_row(&d->layer, wide_a, down, c->inner, c->hidden, c->biased ? d->down_bias.data : NULL,
                  r->out + (size_t)row * h);
        free(x);
        free(wide_a);
    }
    free(up);
    free(down);
}

/* ------------------------------------------------- an engine */

struct kern_room {
    void *x, *a, *scratch;
    struct guarded slots; /* [rows] of H elements, in turned order, one element apart */
    void **out;
    const void **rows;
};

static void room_init(struct kern_room *m, const struct kern_engine *engine, const struct kern_case *c,
                      const struct kern_data *d)
{
    size_t bytes = num_bytes(c->dtype), stride = ((size_t)c->hidden + (c->seed & 1)) * bytes;

    m->x = aligned(engine->packed_bytes(&d->layer, c->hidden, c->rows));
    m->a = aligned(engine->packed_bytes(&d->layer, c->inner, c->rows));
    m->scratch = aligned(engine->scratch_bytes(&d->layer));
    m->slots = guarded_create((size_t)(c->rows - 1) * stride + (size_t)c->hidden * bytes, (int)(c->seed & 1));
    m->out = aligned((size_t)c->rows * sizeof *m->out);
    m->rows = aligned((size_t)c->rows * sizeof *m->rows);
    for (int r = 0; r < c->rows; r++) {
        m->rows[r] = data_row(d, r);
        m->out[r] = m->slots.data + (size_t)(c->rows - 1 - r) * stride;
    }
}

static inline void room_fini(struct kern_room *m)
{
    free(m->x);
    free(m->a);
    free(m->scratch);
    free(m->out);
    free(m->rows);
    guarded_destroy(&m->slots);
}

/* gmm1 and gmm2 in strips, the last one first: their order is free */
static void run_strips(const struct kern_engine *engine, const struct kern_case *c, struct kern_gmm1 *one,
                       struct kern_gmm2 *two)
{
    int64_t i_strip = c->strip ? c->strip : c->inner, h_strip = c->strip ? c->strip : c->hidden;

    for (int64_t at = (c->inner - 1) / i_strip * i_strip; at >= 0; at -= i_strip) {
        one->first = at;
        one->last = at + i_strip < c->inner ? at + i_strip : c->inner;
        engine->gmm1(one);
    }
    for (int64_t at = (c->hidden - 1) / h_strip * h_strip; at >= 0; at -= h_strip) {
        two->first = at;
        two->last = at + h_strip < c->hidden ? at + h_strip : c->hidden;
        engine->gmm2(two);
    }
}

/* r's gate_up and a NULL: the engine is asked for its output alone. */
static void run_engine(const struct kern_engine *engine, const struct kern_case *c, const struct kern_data *d,
                       struct kern_result *r)
{
    struct kern_room m;
    int64_t swiglu_ns = 0;

    room_init(&m, engine, c, d);
    struct kern_pack pack = {&d->layer, m.rows, c->rows, c->hidden, m.x};
    struct kern_gmm1 one = {.layer = &d->layer, .up = d->up.data, .up_bias = c->biased ? d->up_bias.data : NULL,
                            .x = m.x, .rows = c->rows, .a = m.a, .gate_up = r->gate_up, .a_plain = r->a,
                            .swiglu_ns = r->gate_up ? &swiglu_ns : NULL, .scratch = m.scratch};
    struct kern_gmm2 two = {.layer = &d->layer, .down = d->down.data,
                            .down_bias = c->biased ? d->down_bias.data : NULL, .a = m.a, .rows = c->rows,
                            .out = m.out, .scratch = m.scratch};
    engine->thread_begin();
    engine->pack(&pack);
    run_strips(engine, c, &one, &two);
    engine->thread_end();
    for (int row = 0; row < c->rows; row++)
        memcpy(r->out + (size_t)row * kern_row_bytes(c->dtype, c->hidden), m.out[row],
               kern_row_bytes(c->dtype, c->hidden));
    room_fini(&m);
}

/* ------------------------------------------------- both */

static inline void case_print(const char *what, const struct kern_engine *engine, const struct kern_case *c)
{
    printf("%s: %s H %lld I %lld rows %d dtype %d layout %d gating %d", what, engine->name, (long long)c->hidden,
           (long long)c->inner, c->rows, (int)c->dtype, (int)c->layout, (int)c->gating);
    printf(" clamped %d biased %d special %d strip %d seed %llu\n", c->clamped, c->biased, c->special, c->strip,
           (unsigned long long)c->seed);
}

/* A case's numbers and the plain loops' results, made once for all engines. */
struct kern_want {
    const struct kern_case *c;
    struct kern_data data;
    struct kern_result result;
};

static inline void want_init(struct kern_want *w, const struct kern_case *c)
{
    w->c = c;
    w->result = result_create(c);
    data_init(&w->data, c);
    run_plain(c, &w->data, &w->result);
}

static inline void want_fini(struct kern_want *w)
{
    data_fini(&w->data);
    result_destroy(&w->result);
}

/* 0, or 1 after saying which case differs */
static inline int want_differs(const struct kern_want *want, const struct kern_engine *engine)
{
    struct kern_result got = result_create(want->c);
    int differs;

    run_engine(engine, want->c, &want->data, &got);
    differs = !result_equal(&want->result, &got);
    if (differs)
        case_print("differs", engine, want->c);
    result_destroy(&got);
    return differs;
}

/* The same for one engine alone; *hash takes in the plain loops' bits when it is not NULL. */
static inline int case_differs(const struct kern_engine *engine, const struct kern_case *c, uint64_t *hash)
{
    uint64_t before = base_fp_enter();
    struct kern_want want;
    int differs;

    want_init(&want, c);
    if (hash != NULL)
        *hash = result_hash(*hash, &want.result);
    differs = want_differs(&want, engine);
    want_fini(&want);
    base_fp_leave(before);
    return differs;
}

#endif
