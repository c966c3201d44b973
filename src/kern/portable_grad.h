/* dact: the product of dY with down_proj, transposed as it lies, and on its accumulators the gradient of SwiGLU. A
 * panel of PANEL inner columns is just one block of the pair chain over i, so it also gives its sum for each row. */
#ifndef KERN_PORTABLE_GRAD_H
#define KERN_PORTABLE_GRAD_H

#include "kern/portable_engine.h"

#define GRAD_ROWS 4 /* rows whose chains run side by side */

/* One row of a panel, in the order of its columns; columns that do not exist are +0. */
struct grad_row {
    float da[PANEL], a[PANEL];
};

/* Where one row of a panel lies. */
struct grad_at {
    char *gate, *up; /* up: halves only */
    char *a;
    const float *acc;
    vec weight;
    int count;
};

static struct grad_at grad_at(const struct kern_dact *call, const struct product *p, int index, int row)
{
    size_t bytes = num_bytes(call->layer->dtype), inner = (size_t)call->layer->inner;
    struct panel panel = panel_at(p, index);
    bool halves = call->layer->gating == HMOE_HALVES;
    size_t column = (size_t)panel.column, gate = (size_t)row * 2 * inner + (halves ? column : 2 * column);

    return (struct grad_at){.gate = (char *)call->gate_up + gate * bytes,
                            .up = (char *)call->gate_up + (gate + inner) * bytes,
                            .a = (char *)call->a + ((size_t)row * inner + column) * bytes,
                            .acc = panel_acc(p, index) + row * PANEL, .weight = vec_set(call->weight[row]),
                            .count = panel.count};
}

VEC_INLINE void grad_in_order(const enum hmoe_dtype dtype, float *to, struct duo d)
{
    d = vec_in_order(dtype, d);
    vec_store(to, d.lo);
    vec_store(to + VEC_LANES, d.hi);
}

VEC_INLINE void grad_halves(const enum hmoe_dtype dtype, const struct hmoe_activation *act, const struct grad_at *at,
                            struct grad_row *row)
{
    for (int duo = 0; duo < at->count; duo += DUO) {
        size_t to = (size_t)duo * num_bytes(dtype);
        int count = at->count - duo;
        struct duo da = vec_load_duo(HMOE_F32, at->acc + duo);
        struct duo g = vec_load_duo_part(dtype, at->gate + to, count);
        struct duo u = vec_load_duo_part(dtype, at->up + to, count);
        struct vec_gate_grad lo = vec_gated_grad(act, g.lo, u.lo, da.lo * at->weight);
        struct vec_gate_grad hi = vec_gated_grad(act, g.hi, u.hi, da.hi * at->weight);
        struct duo a = vec_round_duo(dtype, (struct duo){lo.a, hi.a});
        vec_store_duo_part(dtype, at->gate + to, count, (struct duo){lo.gate, hi.gate});
        vec_store_duo_part(dtype, at->up + to, count, (struct duo){lo.up, hi.up});
        vec_store_duo_part(dtype, at->a + to, count, a);
        grad_in_order(dtype, row->da + duo, da);
        grad_in_order(dtype, row->a + duo, a);
    }
}

/* Half a duo of gates and half of ups at a time. */
VEC_INLINE void grad_interleaved(const enum hmoe_dtype dtype, const struct hmoe_activation *act,
                                 const struct grad_at *at, struct grad_row *row)
{
    for (int duo = 0; duo < PANEL; duo += DUO)
        grad_in_order(dtype, row->da + duo, vec_load_duo(HMOE_F32, at->acc + duo));
    for (int c = 0; c < at->count; c += VEC_LANES) {
        char *from = at->gate + (size_t)(2 * c) * num_bytes(dtype);
        int64_t count = 2 * (at->count - c);
        struct duo d = vec_evens_odds(dtype, vec_load_duo_part(dtype, from, count));
        struct vec_gate_grad grad = vec_gated_grad(act, d.lo, d.hi, vec_load(row->da + c) * at->weight);
        d = (struct duo){grad.gate, grad.up};
        vec_store_duo_part(dtype, from, count, dtype == HMOE_F32 ? vec_in_order(HMOE_BF16, d) : d);
        vec_store(row->a + c, vec_round(dtype, grad.a));
    }
    for (int duo = 0; duo < at->count; duo += DUO) {
        struct duo a = vec_load_duo(HMOE_F32, row->a + duo);
        a = dtype == HMOE_F32 ? a : vec_evens_odds(HMOE_F32, a);
        vec_store_duo_part(dtype, at->a + (size_t)duo * num_bytes(dtype), at->count - duo, a);
    }
}

/* The block's sums of up to GRAD_ROWS rows. */
static void grad_chains(const struct grad_row *row, int rows, float *sums, int64_t stride)
{
    float e[GRAD_ROWS] = {0}, o[GRAD_ROWS] = {0};

    for (int i = 0; i < CHAIN; i += 2)
        for (int r = 0; r < GRAD_ROWS; r++) {
            e[r] = fmaf(row[r].da[i], row[r].a[i], e[r]);
            o[r] = fmaf(row[r].da[i + 1], row[r].a[i + 1], o[r]);
        }
    for (int r = 0; r < rows; r++)
        sums[r * stride] = e[r] + o[r];
}

VEC_INLINE void grad_panel(const enum hmoe_dtype dtype, const struct kern_dact *call, const struct product *p,
                           int index)
{
    int64_t blocks = (call->layer->inner + CHAIN - 1) / CHAIN, block = panel_at(p, index).column / CHAIN;

    for (int first = 0; first < call->rows; first += GRAD_ROWS) {
        int rows = call->rows - first < GRAD_ROWS ? call->rows - first : GRAD_ROWS;
        struct grad_row row[GRAD_ROWS] = {0};
        for (int r = 0; r < rows; r++) {
            struct grad_at at = grad_at(call, p, index, first + r);
            if (call->layer->gating == HMOE_HALVES)
                grad_halves(dtype, &call->layer->act, &at, &row[r]);
            else
                grad_interleaved(dtype, &call->layer->act, &at, &row[r]);
            for (int c = at.count; c < PANEL; c++)
                row[r].da[c] = row[r].a[c] = 0.0f;
        }
        grad_chains(row, rows, call->sums + first * blocks + block, blocks);
    }
}

static void dact_finish(const void *given, const struct product *p)
{
    const struct kern_dact *call = given;

    for (int index = 0; index < panels_per_span(p); index++)
        if (call->layer->dtype == HMOE_F32)
            grad_panel(HMOE_F32, call, p, index);
        else if (call->layer->dtype == HMOE_BF16)
            grad_panel(HMOE_BF16, call, p, index);
        else
            grad_panel(HMOE_F16, call, p, index);
}

static void portable_dact(const struct kern_dact *call)
{
    struct kern_layer flipped = kern_flip(*call->layer);
    struct product p = {
        .layer = &flipped,
        .w = call->down,
        .terms = flipped.hidden,
        .columns = flipped.inner,
        .spans = 1,
        .rows = call->rows,
        .groups = groups_of(call->rows),
        .a = call->dy,
    };

    multiply_span(&p, (struct span){call->first, call->last}, call->scratch, dact_finish, call);
}

#endif
