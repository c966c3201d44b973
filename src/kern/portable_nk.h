/* [N,K]: the rows of the matrix are the product's columns. A panel is PANEL neighbouring rows; 64 terms of it at a time
 * are turned into L1 and multiplied with all groups.
 *
 * Turning reads all rows of a panel side by side, which the hardware does not stream from DRAM. So while a panel is
 * multiplied the next one, which follows it in memory, is copied line by line in the order of its addresses into a
 * room in L2, between the multiplications; there it is turned from.
 */
#ifndef KERN_PORTABLE_NK_H
#define KERN_PORTABLE_NK_H

#include "kern/portable_gemm.h"

#define STAGE_BYTES ((int64_t)512 * 1024) /* the largest panel that is copied: two of them stay in L2 */

struct stage {
    char *room[2];
    const char *held; /* the panel whose copy is in room[0], or NULL */
};

/* The rest of a copy under way. */
struct copy {
    const char *from;
    char *to;
    int64_t lines;
};

static int64_t panel_bytes(const struct product *p)
{
    return PANEL * p->terms * (int64_t)num_bytes(p->layer->dtype);
}

/* Of the whole panel at `next`; of nothing when there is none, or it cannot be copied. */
static struct copy copy_begin(const struct product *p, const char *next)
{
    bool fits = next != NULL && p->terms % CHAIN == 0 && panel_bytes(p) <= STAGE_BYTES;
    return (struct copy){next, p->stage->room[1], fits ? panel_bytes(p) / LINE : 0};
}

static void copy_advance(struct copy *copy, int64_t lines)
{
    copy->from += lines * LINE;
    copy->to += lines * LINE;
    copy->lines -= lines;
}

/* up to `most` lines at once */
static void copy_lines(struct copy *copy, int64_t most)
{
    int64_t lines = most < copy->lines ? most : copy->lines;

    for (int64_t i = 0; i < lines; i++)
        copy_line(copy->from + i * LINE, copy->to + i * LINE);
    copy_advance(copy, lines);
}

/* What is left, and the rooms change places. */
static void copy_end(struct copy *copy, struct stage *stage, const char *next)
{
    char *room = stage->room[0];
    bool copied = copy->to != stage->room[1] || copy->lines > 0;

    copy_lines(copy, copy->lines);
    stage->held = copied ? next : NULL;
    stage->room[0] = stage->room[1];
    stage->room[1] = room;
}


/* rows of the matrix that are columns of the product: where the panel's row r starts, r in 0..PANEL-1 */
struct nk_rows {
    const char *at;
    int64_t stride;
};

/* the row of the panel in one lane of one half of a duo: the duo's order of portable_vec.h */
VEC_INLINE int nk_row(const enum hmoe_dtype dtype, int duo, int half, int lane)
{
    return dtype == HMOE_F32 ? duo + half * VEC_LANES + lane : duo + 2 * lane + half;
}

/* one block of terms of one vector of columns */
VEC_INLINE void pack_nk_vector(const enum hmoe_dtype dtype, struct nk_rows rows, int duo, int half, float *to)
{
    const int per_dword = dtype == HMOE_F32 ? 1 : 2;

    to += duo + half * VEC_LANES;
    for (int part = 0; part < CHAIN / per_dword; part += VEC_LANES) {
        vec_u32 v[VEC_LANES];
        VEC_UNROLL
        for (int i = 0; i < VEC_LANES; i++)
            v[i] = vec_load_u32(rows.at + nk_row(dtype, duo, half, i) * rows.stride + part * 4);
        transpose(v);
        VEC_UNROLL
        for (int i = 0; i < VEC_LANES; i++) {
            float *term = to + (part + i) * per_dword * PANEL;
            if (dtype == HMOE_F32) {
                vec_store_u32(term, v[i]);
            } else {
                struct duo d = vec_widen(dtype, v[i]);
                vec_store(term, d.lo);
                vec_store(term + PANEL, d.hi);
            }
        }
    }
}

VEC_INLINE void pack_nk_block(const enum hmoe_dtype dtype, struct nk_rows rows, float *to)
{
    for (int duo = 0; duo < PANEL; duo += DUO)
        for (int half = 0; half < 2; half++)
            pack_nk_vector(dtype, rows, duo, half, to);
}

/* a block that lacks rows or terms, filled up with +0 */
static struct nk_rows nk_padded(const struct product *p, struct panel panel, int64_t first_term, char *whole)
{
    int64_t bytes = (int64_t)num_bytes(p->layer->dtype), left = p->terms - first_term, stride = CHAIN * bytes;
    size_t length = (size_t)((left < CHAIN ? left : CHAIN) * bytes);

    memset(whole, 0, (size_t)(PANEL * stride));
    for (int r = 0; r < panel.count; r++)
        memcpy(whole + r * stride, element(p, panel.column + r, first_term), length);
    return (struct nk_rows){whole, stride};
}

/* staged: the copy of a whole panel, or NULL */
static void pack_nk(const struct product *p, struct panel panel, const char *staged, const struct step *step)
{
    enum hmoe_dtype dtype = p->layer->dtype;
    char whole[PANEL * CHAIN * 4];

    for (int q = 0; q < step->blocks; q++) {
        int64_t k = step->first_term + q * CHAIN;
        struct nk_rows rows = {element(p, panel.column, k), p->terms * (int64_t)num_bytes(dtype)};
        float *to = p->panel + q * CHAIN * PANEL;
        if (staged != NULL)
            rows.at = staged + (size_t)k * num_bytes(dtype);
        else if (panel.count < PANEL || k + CHAIN > p->terms)
            rows = nk_padded(p, panel, k, whole);
        if (dtype == HMOE_F32)
            pack_nk_block(HMOE_F32, rows, to);
        else if (dtype == HMOE_BF16)
            pack_nk_block(HMOE_BF16, rows, to);
        else
            pack_nk_block(HMOE_F16, rows, to);
    }
}

/* All groups times p->panel. The first ones copy as many lines as the step's share of a panel has. */
static void multiply_nk_panel(const struct product *p, const struct step *step, struct copy *copy)
{
    int64_t terms = rounded_up(p->terms, CHAIN);
    int each = PASSES * CHAIN / 2 * step->blocks, share = block_lines(p) * step->blocks;

    for (int g = 0; g < p->groups.count; g++) {
        struct group group = group_at(&p->groups, g);
        bool now = share >= each && copy->lines >= each;
        struct micro_aside aside = {.from = copy->from, .to = (float *)(void *)copy->to};
        micro_panel_rows(now ? ASIDE_COPY : ASIDE_NOTHING, group.rows, step->blocks,
                         p->a + terms * group.first + step->first_term * group.rows, p->panel,
                         panel_acc(p, step->index) + group.first * PANEL, &aside);
        if (now) {
            copy_advance(copy, each);
            share -= each;
        }
    }
    copy_lines(copy, share);
}

/* The panel after this one, if it is whole. */
static const char *nk_next(const struct product *p, int index)
{
    struct panel next;

    if (index + 1 == p->spans * panels_per_span(p))
        return p->after;
    next = panel_at(p, index + 1);
    return next.count == PANEL ? element(p, next.column, 0) : NULL;
}

static void multiply_nk(const struct product *p)
{
    for (int index = 0; index < p->spans * panels_per_span(p); index++) {
        struct panel panel = panel_at(p, index);
        const char *here = element(p, panel.column, 0), *next = nk_next(p, index);
        const char *staged = here == p->stage->held ? p->stage->room[0] : NULL;
        struct copy copy = copy_begin(p, next);
        for (int64_t k = 0; k < p->terms; k += PANEL_TERMS) {
            int64_t left = rounded_up(p->terms - k, CHAIN);
            struct step step = {index, k, (int)((left < PANEL_TERMS ? left : PANEL_TERMS) / CHAIN)};
            pack_nk(p, panel, staged, &step);
            multiply_nk_panel(p, &step, &copy);
        }
        copy_end(&copy, p->stage, next);
    }
}

#endif
