/* dact and outer of one engine, and the same in plain loops: kern_case.h's cases for dact, cases of their own for
 * outer.
 * The caller's tensors stand against pages nobody may touch, and not aligned. */
#ifndef TESTS_KERN_BACKWARD_H
#define TESTS_KERN_BACKWARD_H

#include "kern_case.h"

static inline struct guarded guarded_copy(const struct guarded *from, int low)
{
    struct guarded g = guarded_create(from->bytes, low);
    memcpy(g.data, from->data, g.bytes);
    return g;
}

/* the one NaN that stands for all: sums in f32 are not yet rounded to anything */
static inline void quiet_all(float *f, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        f[i] = num_quiet(f[i]);
}

/* ------------------------------------------------- dact: numbers */

struct dact_data {
    struct kern_layer layer;
    struct guarded down, dy, gate_up, weight;
};

/* what dact writes; gate_up starts as the data's */
struct dact_result {
    struct guarded gate_up, a, sums; /* [rows,2I] [rows,I] [rows, ceil(I/32)] f32 */
};

static inline void dact_data_init(struct dact_data *d, const struct kern_case *c)
{
    struct base_prng prng = {c->seed * 104729 + 5};
    size_t bytes = num_bytes(c->dtype), rows = (size_t)c->rows, h = (size_t)c->hidden, i = (size_t)c->inner;
    int low = (int)(c->seed & 1);

    d->layer = case_layer(c);
    d->down = guarded_create(i * h * bytes, low);
    d->dy = guarded_create(rows * h * bytes, low);
    d->gate_up = guarded_create(rows * 2 * i * bytes, low);
    d->weight = guarded_create(rows * sizeof(float), low);
    fill(&prng, c->dtype, d->down.data, c->hidden * c->inner, 0.3f, c->special ? 900 : 0);
    fill(&prng, c->dtype, d->dy.data, c->rows * c->hidden, 2.0f, c->special ? 300 : 0);
    fill(&prng, c->dtype, d->gate_up.data, c->rows * 2 * c->inner, 3.0f, c->special ? 20 : 0);
    fill(&prng, HMOE_F32, d->weight.data, c->rows, 1.0f, c->special ? 10 : 0);
}

static inline void dact_data_fini(struct dact_data *d)
{
    guarded_destroy(&d->down);
    guarded_destroy(&d->dy);
    guarded_destroy(&d->gate_up);
    guarded_destroy(&d->weight);
}

static inline struct dact_result dact_result_create(const struct kern_case *c, const struct dact_data *d)
{
    size_t rows = (size_t)c->rows, blocks = ((size_t)c->inner + 31) / 32;
    int low = (int)(c->seed & 1);
    return (struct dact_result){
        .gate_up = guarded_copy(&d->gate_up, low),
        .a = guarded_create(rows * (size_t)c->inner * num_bytes(c->dtype), low),
        .sums = guarded_create(rows * blocks * sizeof(float), low),
    };
}

static inline void dact_result_destroy(struct dact_result *r)
{
    guarded_destroy(&r->gate_up);
    guarded_destroy(&r->a);
    guarded_destroy(&r->sums);
}

static inline int dact_result_equal(const struct dact_result *r, const struct dact_result *s)
{
    return memcmp(r->gate_up.data, s->gate_up.data, r->gate_up.bytes) == 0 &&
           memcmp(r->a.data, s->a.data, r->a.bytes) == 0 &&
           memcmp(r->sums.data, s->sums.data, r->sums.bytes) == 0;
}

static inline uint64_t dact_result_hash(uint64_t hash, const struct dact_result *r)
{
    hash = hash_bytes(hash, r->gate_up.data, r->gate_up.bytes);
    hash = hash_bytes(hash, r->a.data, r->a.bytes);
    return hash_bytes(hash, r->sums.data, r->sums.bytes);
}

/* ------------------------------------------------- dact: the plain loops */

/* element i of possibly unaligned storage, written */
static inline void put_at(enum hmoe_dtype dtype, void *base, int64_t i, float f)
{
    uint32_t one = 0;
    num_store(dtype, &one, 0, f);
    memcpy((char *)base + (size_t)i * num_bytes(dtype), &one, num_bytes(dtype));
}

/* one row, from its dA: gate_up in place, a, and the factor a widened */
static inline void plain_gradients(const struct kern_layer *layer, const float *da, float weight, char *gate_up,
                                   char *a, float *wide_a)
{
    bool halves = layer->gating == HMOE_HALVES;

    for (int64_t c = 0; c < layer->inner; c++) {
        int64_t g = halves ? c : 2 * c, u = halves ? layer->inner + c : g + 1;
        float gate = at(layer->dtype, gate_up, g), up = at(layer->dtype, gate_up, u);
        struct num_gate_grad grad = num_gated_grad(&layer->act, gate, up, da[c] * weight);
        wide_a[c] = num_round(layer->dtype, num_gated(&layer->act, gate, up));
        put_at(layer->dtype, a, c, wide_a[c]);
        put_at(layer->dtype, gate_up, g, grad.gate);
        put_at(layer->dtype, gate_up, u, grad.up);
    }
}

static inline void dact_plain(const struct kern_case *c, const struct dact_data *d, struct dact_result *r)
{
    float *down = widened(c->dtype, d->down.data, c->hidden * c->inner);
    float *da = aligned((size_t)c->inner * sizeof *da), *wide_a = aligned((size_t)c->inner * sizeof *da);
    int64_t blocks = (c->inner + 31) / 32, bytes = (int64_t)num_bytes(c->dtype);
    bool kn = c->layout == HMOE_KN; /* down is [I,H], else [H,I] */

    for (int64_t row = 0; row < c->rows; row++) {
        float *dy = widened(c->dtype, d->dy.data + row * c->hidden * bytes, c->hidden);
        for (int64_t i = 0; i < c->inner; i++)
            da[i] = plain_chain(dy, down + (kn ? i * c->hidden : i), kn ? 1 : c->inner, c->hidden);
        plain_gradients(&d->layer, da, at(HMOE_F32, d->weight.data, row),
                        r->gate_up.data + row * 2 * c->inner * bytes, r->a.data + row * c->inner * bytes, wide_a);
        for (int64_t b = 0; b < blocks; b++)
            put_at(HMOE_F32, r->sums.data, row * blocks + b,
                   plain_chain(da + 32 * b, wide_a + 32 * b, 1, c->inner - 32 * b < 32 ? c->inner - 32 * b : 32));
        free(dy);
    }
    free(down);
    free(da);
    free(wide_a);
}

/* ------------------------------------------------- dact: an engine */

/* dY packed for the flipped layer; the caller frees it */
static inline void *dact_pack(const struct kern_engine *engine, const struct kern_case *c, const struct dact_data *d)
{
    struct kern_layer flipped = kern_flip(d->layer);
    void *dy = aligned(engine->packed_bytes(&flipped, c->hidden, c->rows));
    const void **rows = aligned((size_t)c->rows * sizeof *rows);

    for (int r = 0; r < c->rows; r++)
        rows[r] = d->dy.data + (size_t)r * kern_row_bytes(c->dtype, c->hidden);
    engine->pack(&(struct kern_pack){&flipped, rows, c->rows, c->hidden, dy});
    free(rows);
    return dy;
}

/* in strips, the last one first: their order is free */
static inline void dact_engine(const struct kern_engine *engine, const struct kern_case *c,
                               const struct dact_data *d, struct dact_result *r)
{
    int64_t strip = c->strip ? c->strip : c->inner;
    struct kern_dact call = {.layer = &d->layer, .down = d->down.data, .rows = c->rows,
                             .weight = (const float *)(const void *)d->weight.data, .gate_up = r->gate_up.data,
                             .a = r->a.data, .sums = (float *)(void *)r->sums.data};
    void *dy, *scratch = aligned(engine->scratch_bytes(&d->layer));

    engine->thread_begin();
    dy = dact_pack(engine, c, d);
    call.dy = dy;
    call.scratch = scratch;
    for (int64_t first = (c->inner - 1) / strip * strip; first >= 0; first -= strip) {
        call.first = first;
        call.last = first + strip < c->inner ? first + strip : c->inner;
        engine->dact(&call);
    }
    engine->thread_end();
    free(dy);
    free(scratch);
}

/* ------------------------------------------------- dact: both */

struct dact_want {
    const struct kern_case *c;
    struct dact_data data;
    struct dact_result result;
};

static inline void dact_want_init(struct dact_want *w, const struct kern_case *c)
{
    w->c = c;
    dact_data_init(&w->data, c);
    w->result = dact_result_create(c, &w->data);
    dact_plain(c, &w->data, &w->result);
    quiet_all((float *)(void *)w->result.sums.data, (int64_t)(w->result.sums.bytes / 4));
}

static inline void dact_want_fini(struct dact_want *w)
{
    dact_data_fini(&w->data);
    dact_result_destroy(&w->result);
}

/* 0, or 1 after saying which case differs */
static inline int dact_differs(const struct dact_want *want, const struct kern_engine *engine)
{
    struct dact_result got = dact_result_create(want->c, &want->data);
    int differs;

    dact_engine(engine, want->c, &want->data, &got);
    quiet_all((float *)(void *)got.sums.data, (int64_t)(got.sums.bytes / 4));
    differs = !dact_result_equal(&want->result, &got);
    if (differs)
        case_print("dact differs", engine, want->c);
    dact_result_destroy(&got);
    return differs;
}

/* ------------------------------------------------- outer */

struct outer_case {
    int64_t count, left, right; /* rows, and columns of both */
    enum hmoe_dtype dtype;
    int out_f32, accumulate, scaled; /* scaled: 1 left, 2 right, 3 both */
    int special;
    int strip;   /* rows of out per call, a multiple of KERN_STRIP; 0: all at once */
    int skipped; /* the strip that nobody asks for, plus one; 0: none */
    uint64_t seed;
};

struct outer_want {
    const struct outer_case *c;
    enum hmoe_dtype out_dtype;
    struct guarded left, right, scale, old, out; /* old: out before, out: what is wanted */
    const void **left_row, **right_row;
};

/* `count` rows in the opposite order, `gap` elements apart */
static inline struct guarded outer_rows(const struct outer_case *c, struct base_prng *prng, int64_t columns,
                                        const void **row)
{
    size_t bytes = num_bytes(c->dtype), stride = ((size_t)columns + (c->seed & 2)) * bytes;
    size_t all = c->count > 0 ? (size_t)(c->count - 1) * stride + (size_t)columns * bytes : bytes;
    struct guarded g = guarded_create(all, (int)(c->seed & 1));

    fill(prng, c->dtype, g.data, (int64_t)(all / bytes), 2.0f, c->special ? 300 : 0);
    for (int64_t r = 0; r < c->count; r++)
        row[r] = g.data + (size_t)(c->count - 1 - r) * stride;
    return g;
}

static inline float outer_element(const struct outer_case *c, const void *row, int64_t i, const float *scale)
{
    float f = at(c->dtype, row, i);
    return scale != NULL ? num_round(c->dtype, *scale * f) : f;
}

static inline const float *outer_scale(const struct outer_want *w, int side)
{
    return (w->c->scaled & side) != 0 ? (const float *)(const void *)w->scale.data : NULL;
}

/* columns as the plain chain wants them: [columns][count] */
static inline float *outer_turned(const struct outer_want *w, const void *const *row, int64_t columns, int side)
{
    const float *scale = outer_scale(w, side);
    float *f = aligned((size_t)(columns * w->c->count + 1) * sizeof *f);

    for (int64_t r = 0; r < w->c->count; r++)
        for (int64_t i = 0; i < columns; i++)
            f[i * w->c->count + r] = outer_element(w->c, row[r], i, scale != NULL ? scale + r : NULL);
    return f;
}

static inline bool outer_skips(const struct outer_case *c, int64_t k)
{
    return c->strip != 0 && k / c->strip == c->skipped - 1;
}

static inline void outer_plain(struct outer_want *w)
{
    const struct outer_case *c = w->c;
    float *left = outer_turned(w, w->left_row, c->left, 1), *right = outer_turned(w, w->right_row, c->right, 2);

    for (int64_t k = 0; k < c->left && !(c->count == 0 && c->accumulate); k++)
        for (int64_t n = 0; n < c->right && !outer_skips(c, k); n++) {
            float sum = plain_chain(left + k * c->count, right + n * c->count, 1, c->count);
            if (c->accumulate)
                sum = at(w->out_dtype, w->out.data, k * c->right + n) + sum;
            put_at(w->out_dtype, w->out.data, k * c->right + n, sum);
        }
    free(left);
    free(right);
}

static inline void outer_want_init(struct outer_want *w, const struct outer_case *c)
{
    struct base_prng prng = {c->seed * 31337 + 1};
    int low = (int)(c->seed & 1);

    w->c = c;
    w->out_dtype = c->out_f32 ? HMOE_F32 : c->dtype;
    w->left_row = aligned((size_t)(c->count + 1) * sizeof *w->left_row);
    w->right_row = aligned((size_t)(c->count + 1) * sizeof *w->right_row);
    w->left = outer_rows(c, &prng, c->left, w->left_row);
    w->right = outer_rows(c, &prng, c->right, w->right_row);
    w->scale = guarded_create((size_t)(c->count + 1) * sizeof(float), low);
    fill(&prng, HMOE_F32, w->scale.data, c->count + 1, 1.0f, c->special ? 30 : 0);
    w->old = guarded_create((size_t)(c->left * c->right) * num_bytes(w->out_dtype), low);
    fill(&prng, w->out_dtype, w->old.data, c->left * c->right, 5.0f, c->special ? 50 : 0);
    w->out = guarded_copy(&w->old, low);
    outer_plain(w);
}

static inline void outer_want_fini(struct outer_want *w)
{
    guarded_destroy(&w->left);
    guarded_destroy(&w->right);
    guarded_destroy(&w->scale);
    guarded_destroy(&w->old);
    guarded_destroy(&w->out);
    free(w->left_row);
    free(w->right_row);
}

static inline void outer_engine(const struct outer_want *w, const struct kern_engine *engine, void *out)
{
    const struct outer_case *c = w->c;
    const struct kern_layer any = {1, 1, c->dtype, HMOE_KN, HMOE_HALVES, {1.0f, INFINITY, 0.0f}};
    int64_t strip = c->strip ? c->strip : c->left;
    void *scratch = aligned(engine->scratch_bytes(&any));
    struct kern_outer call = {
        .dtype = c->dtype,
        .left = {w->left_row, outer_scale(w, 1), c->left},
        .right = {w->right_row, outer_scale(w, 2), c->right},
        .count = c->count, .out_dtype = w->out_dtype, .accumulate = c->accumulate, .out = out, .scratch = scratch,
    };

    engine->thread_begin();
    for (int64_t first = (c->left - 1) / strip * strip; first >= 0; first -= strip) {
        call.first = first;
        call.last = first + strip < c->left ? first + strip : c->left;
        if (!outer_skips(c, first))
            engine->outer(&call);
    }
    engine->thread_end();
    free(scratch);
}

static inline void outer_print(const char *what, const struct kern_engine *engine, const struct outer_case *c)
{
    printf("%s: %s rows %lld left %lld right %lld dtype %d f32 %d accumulate %d", what, engine->name,
           (long long)c->count, (long long)c->left, (long long)c->right, (int)c->dtype, c->out_f32, c->accumulate);
    printf(" scaled %d special %d strip %d skipped %d seed %llu\n", c->scaled, c->special, c->strip, c->skipped,
           (unsigned long long)c->seed);
}

/* 0, or 1 after saying which case differs */
static inline int outer_differs(const struct outer_want *w, const struct kern_engine *engine)
{
    struct guarded out = guarded_copy(&w->old, (int)(w->c->seed & 1));
    int differs;

    outer_engine(w, engine, out.data);
    differs = memcmp(out.data, w->out.data, out.bytes) != 0;
    if (differs)
        outer_print("outer differs", engine, w->c);
    guarded_destroy(&out);
    return differs;
}

#endif
