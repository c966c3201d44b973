/* The functions of an engine's table (kern.h) over portable_gemm.h. An ISA file sets VEC_BYTES and MICRO_ROWS, includes
 * this and names its table; everything here is static to it. */
#ifndef KERN_PORTABLE_ENGINE_H
#define KERN_PORTABLE_ENGINE_H

#include "kern/portable_rows.h"

#include "base/clock.h"

#define ROWS_MOST 128
#define ACC_BYTES (512 * 1024) /* accumulators of a strip stay in L2 */
#define UNIT 32                /* inner columns that go through SwiGLU together: two panels of up_proj */
#define STREAM_ROWS 32         /* slot rows bypass the caches from so many on: nobody reads them soon */

/* ------------------------------------------------- the packed block */

static size_t portable_packed_bytes(const struct kern_layer *layer, int64_t terms, int rows)
{
    if (lanes_fit(layer, rows))
        return lanes_packed_bytes(terms, rows);
    return (size_t)(rounded_up(terms, CHAIN) * rows) * sizeof(float);
}

/* rooms, accumulators, panels, sums */
static size_t portable_scratch_bytes(const struct kern_layer *layer)
{
    int64_t terms = layer->hidden > layer->inner ? layer->hidden : layer->inner;
    return 2 * STAGE_BYTES + ACC_BYTES + 2 * PANEL_TERMS * PANEL * sizeof(float) + lanes_sums_bytes(terms);
}

/* One row of a packed block. */
struct packed_row {
    bool lanes;   /* portable_rows.h */
    float *at;    /* term k at at[k * step]; for lanes the whole block */
    int64_t step;
    int64_t terms;
    int row, rows;
};

static struct packed_row packed_row(const struct kern_layer *layer, float *packed, int64_t terms, int rows, int row)
{
    struct packed_row r = {lanes_fit(layer, rows), packed, 0, terms, row, rows};
    struct groups groups = groups_of(rows);
    struct group group = group_of_row(&groups, row);

    if (!r.lanes) {
        r.at = packed + rounded_up(terms, CHAIN) * group.first + (row - group.first);
        r.step = group.rows;
    }
    return r;
}

/* terms [part.column, part.column + part.count) */
static inline void packed_put(const struct packed_row *r, struct panel part, const float *f)
{
    float *to = r->at + part.column * r->step;

    if (r->lanes)
        lanes_put(r->at, r->terms, r->rows, r->row, part, f);
    else
        for (int i = 0; i < part.count; i++, to += r->step)
            *to = f[i];
}

/* the terms that the last block of the chain lacks */
static void packed_end(const struct packed_row *r)
{
    static const float zeros[CHAIN];
    int lacking = (int)(rounded_up(r->terms, CHAIN) - r->terms);
    packed_put(r, (struct panel){r->terms, lacking}, zeros);
}

VEC_INLINE void pack_typed(const enum hmoe_dtype dtype, const struct kern_pack *pack)
{
    int64_t terms = pack->terms;

    for (int r = 0; r < pack->count; r++) {
        struct packed_row row = packed_row(pack->layer, pack->x, terms, pack->count, r);
        for (int64_t k = 0; k < terms; k += PANEL) {
            int count = (int)(terms - k < PANEL ? terms - k : PANEL);
            const char *from = (const char *)pack->rows[r] + (size_t)k * num_bytes(dtype);
            float f[PANEL];
            for (int duo = 0; duo < count; duo += DUO) {
                const char *at = from + (size_t)duo * num_bytes(dtype);
                struct duo d = vec_in_order(dtype, vec_load_duo_part(dtype, at, count - duo));
                vec_store(f + duo, d.lo);
                vec_store(f + duo + VEC_LANES, d.hi);
            }
            packed_put(&row, (struct panel){k, count}, f);
        }
        packed_end(&row);
    }
}

static void portable_pack(const struct kern_pack *pack)
{
    if (pack->layer->dtype == HMOE_F32)
        pack_typed(HMOE_F32, pack);
    else if (pack->layer->dtype == HMOE_BF16)
        pack_typed(HMOE_BF16, pack);
    else
        pack_typed(HMOE_F16, pack);
}

/* ------------------------------------------------- finished sums */

/* A panel's bias in the order of duos. */
struct panel_bias {
    bool any;
    float f[PANEL];
};

static void bias_load(struct panel_bias *bias, enum hmoe_dtype dtype, const void *all, struct panel panel)
{
    const char *from = all;

    bias->any = all != NULL;
    if (!bias->any)
        return;
    from += (size_t)panel.column * num_bytes(dtype);
    for (int duo = 0; duo < PANEL; duo += DUO) {
        struct duo d = {{0}, {0}};
        if (duo < panel.count)
            d = vec_load_duo_part(dtype, from + (size_t)duo * num_bytes(dtype), panel.count - duo);
        vec_store(bias->f + duo, d.lo);
        vec_store(bias->f + duo + VEC_LANES, d.hi);
    }
}

/* a sum with its bias, not yet rounded */
VEC_INLINE struct duo sum_load(const float *acc, const struct panel_bias *bias, int duo)
{
    struct duo d = vec_load_duo(HMOE_F32, acc + duo);
    if (bias->any) {
        d.lo = d.lo + vec_load(bias->f + duo);
        d.hi = d.hi + vec_load(bias->f + duo + VEC_LANES);
    }
    return d;
}

/* UNIT inner columns: of up_proj as stored, a panel of gates and one of ups, or two panels of both in turns */
struct unit {
    const struct kern_gmm1 *call;
    int64_t column; /* inner */
    int count;
    struct panel panel[2];
    const float *acc[2];
    struct panel_bias bias[2];
};

static void unit_load(struct unit *unit, const struct kern_gmm1 *call, const struct product *p, int index)
{
    int other = p->spans == 2 ? index + panels_per_span(p) : index + 1;

    unit->panel[0] = panel_at(p, index);
    unit->acc[0] = panel_acc(p, index);
    unit->panel[1] = (struct panel){unit->panel[0].column + PANEL, 0};
    unit->acc[1] = unit->acc[0];
    if (other < p->spans * panels_per_span(p)) {
        unit->panel[1] = panel_at(p, other);
        unit->acc[1] = panel_acc(p, other);
    }
    unit->call = call;
    unit->column = p->spans == 2 ? unit->panel[0].column : unit->panel[0].column / 2;
    unit->count = p->spans == 2 ? unit->panel[0].count : (unit->panel[0].count + unit->panel[1].count) / 2;
    for (int i = 0; i < 2; i++)
        bias_load(&unit->bias[i], call->layer->dtype, call->up_bias, unit->panel[i]);
}

VEC_INLINE void gate_up_store(const enum hmoe_dtype dtype, const struct unit *unit, int row, int i, int duo,
                              struct duo d)
{
    const struct kern_gmm1 *call = unit->call;
    size_t at = (size_t)row * (size_t)call->layer->inner * 2 + (size_t)(unit->panel[i].column + duo);

    if (call->gate_up != NULL)
        vec_store_duo_part(dtype, (char *)call->gate_up + at * num_bytes(dtype), unit->panel[i].count - duo, d);
}

/* the rounded `a` of one row of a unit, in order */
VEC_INLINE void unit_halves(const enum hmoe_dtype dtype, const struct unit *unit, int row, float a[UNIT])
{
    const struct hmoe_activation *act = &unit->call->layer->act;

    for (int duo = 0; duo < PANEL; duo += DUO) {
        struct duo g = vec_round_duo(dtype, sum_load(unit->acc[0] + row * PANEL, &unit->bias[0], duo));
        struct duo u = vec_round_duo(dtype, sum_load(unit->acc[1] + row * PANEL, &unit->bias[1], duo));
        struct duo d = {vec_gated(act, g.lo, u.lo), vec_gated(act, g.hi, u.hi)};
        gate_up_store(dtype, unit, row, 0, duo, g);
        gate_up_store(dtype, unit, row, 1, duo, u);
        d = vec_in_order(dtype, vec_round_duo(dtype, d));
        vec_store(a + duo, d.lo);
        vec_store(a + duo + VEC_LANES, d.hi);
    }
}

VEC_INLINE void unit_interleaved(const enum hmoe_dtype dtype, const struct unit *unit, int row, float a[UNIT])
{
    const struct hmoe_activation *act = &unit->call->layer->act;

    for (int i = 0; i < 2; i++)
        for (int duo = 0; duo < PANEL; duo += DUO) {
            struct duo d = vec_round_duo(dtype, sum_load(unit->acc[i] + row * PANEL, &unit->bias[i], duo));
            gate_up_store(dtype, unit, row, i, duo, d);
            d = vec_evens_odds(dtype, d);
            vec_store(a + i * PANEL / 2 + duo / 2, vec_round(dtype, vec_gated(act, d.lo, d.hi)));
        }
}

VEC_INLINE void unit_finish(const enum hmoe_dtype dtype, const struct unit *unit)
{
    const struct kern_gmm1 *call = unit->call;
    int64_t inner = call->layer->inner;
    _Alignas(KERN_ALIGN) float a[UNIT];

    for (int r = 0; r < call->rows; r++) {
        struct packed_row row = packed_row(call->layer, call->a, inner, call->rows, r);
        if (call->layer->gating == HMOE_HALVES)
            unit_halves(dtype, unit, r, a);
        else
            unit_interleaved(dtype, unit, r, a);
        packed_put(&row, (struct panel){unit->column, unit->count}, a);
        if (unit->column + unit->count == inner)
            packed_end(&row);
        for (int c = 0; call->a_plain != NULL && c < unit->count; c++)
            num_store(dtype, call->a_plain, r * inner + unit->column + c, a[c]);
    }
}

static void gmm1_finish(const struct kern_gmm1 *call, const struct product *p)
{
    int64_t start = call->swiglu_ns != NULL ? base_now_ns() : 0;
    enum hmoe_dtype dtype = call->layer->dtype;
    struct unit unit;

    for (int index = 0; index < panels_per_span(p); index += p->spans == 2 ? 1 : 2) {
        unit_load(&unit, call, p, index);
        if (dtype == HMOE_F32)
            unit_finish(HMOE_F32, &unit);
        else if (dtype == HMOE_BF16)
            unit_finish(HMOE_BF16, &unit);
        else
            unit_finish(HMOE_F16, &unit);
    }
    if (call->swiglu_ns != NULL)
        *call->swiglu_ns += base_now_ns() - start;
}

/* ------------------------------------------------- gmm1, gmm2 */

static void scratch_bind(struct product *p, struct stage *stage, void *scratch)
{
    *stage = (struct stage){.room = {scratch, (char *)scratch + STAGE_BYTES}};
    p->stage = stage;
    p->acc = (float *)(void *)((char *)scratch + 2 * STAGE_BYTES);
    p->panel = p->acc + ACC_BYTES / sizeof(float);
    p->sums = p->panel + 2 * PANEL_TERMS * PANEL;
}

static void multiply(const struct product *p)
{
    if (lanes_fit(p->layer, p->rows)) {
        multiply_lanes(p);
        return;
    }
    memset(p->acc, 0, (size_t)p->spans * (size_t)panels_per_span(p) * (size_t)p->rows * PANEL * sizeof *p->acc);
    if (p->layer->layout == HMOE_KN)
        multiply_kn(p);
    else
        multiply_nk(p);
}

/* columns multiplied at once, of each of `spans` spans: a [K,N] matrix is read along whole rows, as far as the
 * accumulators allow; an [N,K] matrix panel by panel */
static int64_t strip_width(const struct kern_layer *layer, int rows, int spans)
{
    int64_t most = ACC_BYTES / (rows * (int64_t)sizeof(float)) / spans;
    return layer->layout == HMOE_KN ? most / KERN_STRIP * KERN_STRIP : PANEL;
}

/* Is there a whole strip of an [N,K] matrix at column `at`? */
static bool whole_strip(const struct kern_layer *layer, int64_t at, int64_t strip, int64_t last)
{
    return layer->layout == HMOE_NK && at + strip <= last;
}

static void portable_gmm1(const struct kern_gmm1 *call)
{
    const struct kern_layer *layer = call->layer;
    int64_t strip = strip_width(layer, call->rows, 2);
    struct product p = {
        .layer = layer,
        .w = call->up,
        .terms = layer->hidden,
        .columns = 2 * layer->inner,
        .rows = call->rows,
        .groups = groups_of(call->rows),
        .a = call->x,
    };
    struct stage stage;

    scratch_bind(&p, &stage, call->scratch);
    for (int64_t at = call->first; at < call->last; at += strip) {
        int64_t width = call->last - at < strip ? call->last - at : strip;
        bool halves = layer->gating == HMOE_HALVES;
        p.spans = halves ? 2 : 1;
        p.first[0] = halves ? at : 2 * at;
        p.first[1] = layer->inner + at;
        p.width = halves ? width : 2 * width;
        p.after = NULL;
        if (whole_strip(layer, at + strip, strip, call->last))
            p.after = element(&p, (halves ? 1 : 2) * (at + strip), 0);
        multiply(&p);
        gmm1_finish(call, &p);
    }
}

VEC_INLINE void slots_store(const enum hmoe_dtype dtype, const struct kern_gmm2 *call, const struct product *p,
                            int index)
{
    struct panel panel = panel_at(p, index);
    struct panel_bias bias;

    bias_load(&bias, dtype, call->down_bias, panel);
    for (int r = 0; r < call->rows; r++) {
        char *to = (char *)call->out[r] + (size_t)panel.column * num_bytes(dtype);
        bool stream = call->rows >= STREAM_ROWS && panel.count == PANEL && (uintptr_t)to % LINE == 0;
        for (int duo = 0; duo < panel.count; duo += DUO) {
            struct duo d = sum_load(panel_acc(p, index) + r * PANEL, &bias, duo);
            if (stream)
                vec_stream_duo(dtype, to + (size_t)duo * num_bytes(dtype), d);
            else
                vec_store_duo_part(dtype, to + (size_t)duo * num_bytes(dtype), panel.count - duo, d);
        }
    }
}

static void gmm2_finish(const void *given, const struct product *p)
{
    const struct kern_gmm2 *call = given;

    for (int index = 0; index < panels_per_span(p); index++)
        if (call->layer->dtype == HMOE_F32)
            slots_store(HMOE_F32, call, p, index);
        else if (call->layer->dtype == HMOE_BF16)
            slots_store(HMOE_BF16, call, p, index);
        else
            slots_store(HMOE_F16, call, p, index);
}

/* columns [first, last) of a product with one span */
struct span {
    int64_t first, last;
};

/* Multiplies strip by strip; finish is given each strip's sums. */
static void multiply_span(struct product *p, struct span span, void *scratch,
                          void (*finish)(const void *call, const struct product *p), const void *call)
{
    int64_t strip = strip_width(p->layer, p->rows, 1);
    struct stage stage;

    scratch_bind(p, &stage, scratch);
    for (int64_t at = span.first; at < span.last; at += strip) {
        p->first[0] = at;
        p->width = span.last - at < strip ? span.last - at : strip;
        p->after = NULL;
        if (whole_strip(p->layer, at + strip, strip, span.last))
            p->after = element(p, at + strip, 0);
        multiply(p);
        finish(call, p);
    }
}

static void portable_gmm2(const struct kern_gmm2 *call)
{
    const struct kern_layer *layer = call->layer;
    struct product p = {
        .layer = layer,
        .w = call->down,
        .terms = layer->inner,
        .columns = layer->hidden,
        .spans = 1,
        .rows = call->rows,
        .groups = groups_of(call->rows),
        .a = call->a,
    };

    multiply_span(&p, (struct span){call->first, call->last}, call->scratch, gmm2_finish, call);
    vec_stream_end();
}

/* ------------------------------------------------- combine */

VEC_INLINE void combine_typed(const enum hmoe_dtype dtype, const struct kern_combine *call)
{
    for (int64_t c = 0; c < call->hidden; c += DUO) {
        struct duo acc = {{0}, {0}};
        size_t at = (size_t)c * num_bytes(dtype);
        for (int i = 0; i < call->count; i++) {
            struct duo d = vec_load_duo_part(dtype, (const char *)call->term[i] + at, call->hidden - c);
            vec w = vec_set(call->weight[i]);
            acc.lo = vec_fma(w, d.lo, acc.lo);
            acc.hi = vec_fma(w, d.hi, acc.hi);
        }
        vec_store_duo_part(dtype, (char *)call->y + at, call->hidden - c, acc);
    }
}

static void portable_combine(const struct kern_combine *call)
{
    if (call->dtype == HMOE_F32)
        combine_typed(HMOE_F32, call);
    else if (call->dtype == HMOE_BF16)
        combine_typed(HMOE_BF16, call);
    else
        combine_typed(HMOE_F16, call);
}

/* ------------------------------------------------- the rest of the table */

static void portable_thread_begin(void)
{
}

static void portable_thread_end(void)
{
}

/* `chains` independent FMA chains, `steps` long: flops per second */
VEC_INLINE double fma_rate(const int chains, int64_t steps)
{
    volatile float source = 0.5f, sink;
    vec acc[16], x = vec_set(source), y = vec_set(source);
    int64_t start = base_now_ns(), took;
    float sum = 0.0f;

    for (int i = 0; i < chains; i++)
        acc[i] = vec_set(source);
    for (int64_t n = 0; n < steps; n++) {
        VEC_UNROLL
        for (int i = 0; i < chains; i++)
            acc[i] = vec_fma(x, acc[i], y);
    }
    took = base_now_ns() - start;
    for (int i = 0; i < chains; i++)
        sum = sum + acc[i][0];
    sink = sum;
    (void)sink;
    return 2.0 * VEC_LANES * chains * (double)steps * 1e9 / (double)(took > 0 ? took : 1);
}

static double portable_limit(int64_t ns)
{
    int64_t end = base_now_ns() + ns;
    double best = 0.0;

    do {
        double rate[3] = {fma_rate(8, 4000), fma_rate(10, 4000), fma_rate(12, 4000)};
        for (int i = 0; i < 3; i++)
            best = rate[i] > best ? rate[i] : best;
    } while (base_now_ns() < end);
    return best;
}

/* What kern.c finds out about this CPU, without code of a wider ISA. */
bool kern_has_avx512(void);
bool kern_has_avx2(void);
bool kern_has_baseline(void);

#endif
