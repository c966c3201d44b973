/* One weight matrix times one packed block, over a strip of its columns: accumulators of whole product sums.
 *
 * The block's rows lie in groups of at most MICRO_ROWS of nearly equal height, each [terms rounded up to 32][rows of
 * the group] f32, the missing terms +0. Accumulators are [panel][rows][PANEL] f32, columns in the order of duos.
 */
#ifndef KERN_PORTABLE_GEMM_H
#define KERN_PORTABLE_GEMM_H

#include "kern/portable_micro.h"
#include "kern/portable_transpose.h"

#include "kern/kern.h"

#define PANEL_TERMS (PANEL_BLOCKS * CHAIN)
#define GROUPS_DIRECT 3 /* up to so many groups a [K,N] matrix is read in place */

/* The block's groups: the first `taller` have height + 1 rows, the others height. */
struct groups {
    int count, height, taller;
};

struct group {
    int first, rows;
};

static inline struct groups groups_of(int rows)
{
    int count = (rows + MICRO_ROWS - 1) / MICRO_ROWS;
    return (struct groups){count, rows / count, rows % count};
}

static inline struct group group_at(const struct groups *groups, int index)
{
    int before = index < groups->taller ? index : groups->taller;
    return (struct group){index * groups->height + before, groups->height + (index < groups->taller)};
}

static inline struct group group_of_row(const struct groups *groups, int row)
{
    int tall = groups->taller * (groups->height + 1);
    return group_at(groups, row < tall ? row / (groups->height + 1) : groups->taller + (row - tall) / groups->height);
}

struct product {
    const struct kern_layer *layer;
    const char *w;
    int64_t terms, columns; /* of the whole matrix */
    int64_t first[2];       /* the spans: [first, first + width) */
    int64_t width;
    int spans; /* 1 or 2 */
    int rows;
    struct groups groups; /* of the rows */
    const float *a;
    float *acc;   /* out */
    float *panel; /* scratch [2][PANEL_TERMS][PANEL] */
    float *sums;  /* scratch of portable_rows.h */
    struct stage *stage; /* of portable_nk.h */
    const char *after;   /* [N,K]: the whole panel that is multiplied after this product, or NULL */
};

/* up to PANEL neighbouring columns of the stored matrix */
struct panel {
    int64_t column;
    int count;
};

static inline int64_t rounded_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static inline int panels_per_span(const struct product *p)
{
    return (int)((p->width + PANEL - 1) / PANEL);
}

static inline struct panel panel_at(const struct product *p, int index)
{
    int per_span = panels_per_span(p), span = index >= per_span;
    int64_t offset = (int64_t)(index - span * per_span) * PANEL, left = p->width - offset;
    return (struct panel){p->first[span] + offset, (int)(left < PANEL ? left : PANEL)};
}

static inline float *panel_acc(const struct product *p, int index)
{
    return p->acc + (size_t)index * (size_t)p->rows * PANEL;
}

static inline const char *element(const struct product *p, int64_t row, int64_t column)
{
    int64_t length = p->layer->layout == HMOE_KN ? p->columns : p->terms;
    return p->w + (size_t)(row * length + column) * num_bytes(p->layer->dtype);
}

/* lines of a panel's block of terms */
static inline int block_lines(const struct product *p)
{
    return (int)(CHAIN * PANEL * num_bytes(p->layer->dtype) / LINE);
}

/* Where a panel stands in its product. */
struct step {
    int index;
    int64_t first_term;
    int blocks;
};

/* All groups times p->panel. The first two pack the panel `next` when there is one, the ones after them fetch a panel's
 * share of what comes after that; with few groups both at once. */
static void multiply_panel(const struct product *p, const struct step *step, struct micro_aside next,
                           struct ahead *ahead)
{
    int64_t terms = rounded_up(p->terms, CHAIN);
    int groups = p->groups.count, each = PASSES * CHAIN / 2 * step->blocks, lines = block_lines(p) * step->blocks;
    int fetch_from = next.to != NULL && groups >= 2 + (lines + each - 1) / each ? 2 : 0;

    ahead_fill(ahead, lines);
    for (int i = groups * each; i < lines; i++)
        fetch(ahead->line[i]);
    for (int g = 0; g < groups; g++) {
        struct group group = group_at(&p->groups, g);
        int fetched = (g - fetch_from) * each;
        struct micro_aside aside = {.from = (const char *)p->panel, .to = p->panel};
        bool pack = g < 2 && next.to != NULL;
        if (pack) {
            aside = next;
            aside.from += g * step->blocks * (CHAIN / 2) * next.stride;
            aside.to += g * step->blocks * (CHAIN / 2) * PANEL;
        }
        aside.line = fetched >= 0 && fetched < lines ? ahead->line + fetched : ahead->idle;
        micro_panel_rows(pack ? (enum aside)p->layer->dtype : ASIDE_FETCH, group.rows, step->blocks,
                         p->a + terms * group.first + step->first_term * group.rows, p->panel,
                         panel_acc(p, step->index) + group.first * PANEL, &aside);
    }
}

/* ------------------------------------------------- [K,N] */

VEC_INLINE void pack_kn_typed(const enum hmoe_dtype dtype, const struct product *p, struct panel panel,
                              int64_t first_term, int blocks)
{
    int64_t stride = p->columns * (int64_t)num_bytes(dtype), left = p->terms - first_term;
    int count = blocks * CHAIN, real = left < count ? (int)left : count;
    const char *from = element(p, first_term, panel.column);
    float *to = p->panel;

    for (int k = 0; k < real; k++, from += stride, to += PANEL)
        for (int duo = 0; duo < PANEL; duo += DUO) {
            struct duo d = vec_load_duo_part(dtype, from + (size_t)duo * num_bytes(dtype), panel.count - duo);
            vec_store(to + duo, d.lo);
            vec_store(to + duo + VEC_LANES, d.hi);
        }
    memset(to, 0, (size_t)(count - real) * PANEL * sizeof *to);
}

static void pack_kn(const struct product *p, struct panel panel, int64_t first_term, int blocks)
{
    if (p->layer->dtype == HMOE_F32)
        pack_kn_typed(HMOE_F32, p, panel, first_term, blocks);
    else if (p->layer->dtype == HMOE_BF16)
        pack_kn_typed(HMOE_BF16, p, panel, first_term, blocks);
    else
        pack_kn_typed(HMOE_F16, p, panel, first_term, blocks);
}

static void multiply_direct(const struct product *p, int index, int64_t first_term, struct ahead *ahead)
{
    const int each = PASSES * CHAIN / 2;
    int64_t terms = rounded_up(p->terms, CHAIN);
    int groups = p->groups.count, lines = block_lines(p);
    float *acc = panel_acc(p, index);
    struct micro_source source = {
        .at = element(p, first_term, panel_at(p, index).column),
        .stride = p->columns * (int64_t)num_bytes(p->layer->dtype),
        .dtype = p->layer->dtype,
    };

    ahead_fill(ahead, lines);
    for (int g = 0; g < groups; g++) {
        struct group group = group_at(&p->groups, g);
        source.line[0] = g * each < lines ? ahead->line + g * each : ahead->idle;
        source.line[1] = groups == 1 ? ahead->line + each : source.line[0];
        micro_direct_rows(group.rows, &source, p->a + terms * group.first + first_term * group.rows,
                          acc + group.first * PANEL);
    }
}

/* fetches the strip's rows from first_term on */
static void ahead_kn(struct ahead *ahead, const struct product *p, int64_t first_term)
{
    int64_t bytes = (int64_t)num_bytes(p->layer->dtype), run = (p->width * bytes + LINE - 1) / LINE;
    int64_t row = p->columns * bytes, gap = p->spans == 2 ? (p->first[1] - p->first[0]) * bytes : row;

    if (first_term >= p->terms)
        ahead_init(ahead, p->a);
    else
        ahead->at = element(p, first_term, p->first[0]);
    ahead->left = ahead->run = run;
    ahead->step = gap - run * LINE;
    ahead->other_step = (p->spans == 2 ? row - gap : row) - run * LINE;
}

static struct step step_next(const struct product *p, int64_t chunk, struct step step)
{
    int64_t left;

    if (++step.index == p->spans * panels_per_span(p)) {
        step.index = 0;
        step.first_term += chunk;
    }
    left = rounded_up(p->terms - step.first_term, CHAIN);
    step.blocks = (int)((left < chunk ? left : chunk) / CHAIN);
    return step;
}

static bool step_whole(const struct product *p, const struct step *step)
{
    return panel_at(p, step->index).count == PANEL && step->first_term + step->blocks * CHAIN <= p->terms;
}

static void multiply_kn_direct(const struct product *p)
{
    struct step step = {0, 0, 1};
    struct ahead ahead;

    ahead_init(&ahead, p->a);
    for (; step.first_term < p->terms; step = step_next(p, CHAIN, step)) {
        if (step.index == 0)
            ahead_kn(&ahead, p, step.first_term + CHAIN);
        if (step_whole(p, &step)) {
            multiply_direct(p, step.index, step.first_term, &ahead);
        } else {
            pack_kn(p, panel_at(p, step.index), step.first_term, step.blocks);
            multiply_panel(p, &step, (struct micro_aside){0}, &ahead);
        }
    }
}

/* Each panel is packed while the one before is multiplied, where it is whole. */
static void multiply_kn_packed(const struct product *given)
{
    struct product p = *given;
    float *other = p.panel + PANEL_TERMS * PANEL, *spare;
    struct step step = step_next(&p, PANEL_TERMS, (struct step){-1, 0, 0}), next;
    struct ahead ahead;

    ahead_init(&ahead, p.a);
    pack_kn(&p, panel_at(&p, 0), 0, step.blocks);
    for (; step.first_term < p.terms; step = next) {
        struct micro_aside aside = {0};
        bool more, whole;
        next = step_next(&p, PANEL_TERMS, step);
        more = next.first_term < p.terms;
        whole = more && step_whole(&p, &next) && next.blocks == step.blocks;
        if (step.index == 0)
            ahead_kn(&ahead, &p, step.first_term + PANEL_TERMS);
        if (whole)
            aside = (struct micro_aside){
                .from = element(&p, next.first_term, panel_at(&p, next.index).column),
                .stride = p.columns * (int64_t)num_bytes(p.layer->dtype),
                .to = other,
            };
        multiply_panel(&p, &step, aside, &ahead);
        spare = p.panel;
        p.panel = other;
        other = spare;
        if (more && !whole)
            pack_kn(&p, panel_at(&p, next.index), next.first_term, next.blocks);
    }
}

static void multiply_kn(const struct product *p)
{
    if (p->groups.count <= GROUPS_DIRECT)
        multiply_kn_direct(p);
    else
        multiply_kn_packed(p);
}

#endif
