/* One case of `hmoe check` through an engine's functions alone, without a group: for engines that no plan uses, such
 * as the emulated matrix unit. */
#include "check.h"

#include "base/fpenv.h"
#include "base/memory.h"
#include "base/num.h"
#include "base/prng.h"

#include <stdlib.h>

struct kernels {
    struct check_play *play;
    struct kern_layer layer;
    struct base_prng prng; /* where blocks and columns are cut */
    char *slots;           /* [T*K,H] outputs */
    void *memory;          /* what the rest lies in */
    void *x, *a, *scratch;
    const void **in;       /* [rows_most] */
    void **out;            /* [rows_most] */
    int64_t *slot;         /* [rows_most], of the rows of the block */
    char *gate_up, *a_plain;
    const void **term;     /* [K] */
    float *weight;         /* [K] */
};

static int64_t id_at(const struct case_data *data, int64_t slot)
{
    return data->ids_type == HMOE_I32 ? ((const int32_t *)data->ids)[slot] : ((const int64_t *)data->ids)[slot];
}

static const void *at(const struct kernels *k, const void *base, int64_t index)
{
    return base ? (const char *)base + kern_row_bytes(k->layer.dtype, index) : NULL;
}

/* With memory NULL it only measures: the result is the size. */
static size_t place(struct kernels *k)
{
    const struct kern_engine *engine = k->play->engine;
    const struct cli_shape *shape = &k->play->data->shape;
    struct base_carve carve = {k->memory, 0};
    size_t rows = (size_t)engine->rows_most, topk = (size_t)shape->topk;

    k->x = base_carve(&carve, engine->packed_bytes(&k->layer, k->layer.hidden, engine->rows_most));
    k->a = base_carve(&carve, engine->packed_bytes(&k->layer, k->layer.inner, engine->rows_most));
    k->scratch = base_carve(&carve, engine->scratch_bytes(&k->layer));
    k->gate_up = base_carve(&carve, rows * kern_row_bytes(shape->dtype, 2 * shape->inner));
    k->a_plain = base_carve(&carve, rows * kern_row_bytes(shape->dtype, shape->inner));
    k->in = base_carve(&carve, rows * sizeof *k->in);
    k->out = base_carve(&carve, rows * sizeof *k->out);
    k->slot = base_carve(&carve, rows * sizeof *k->slot);
    k->term = base_carve(&carve, topk * sizeof *k->term);
    k->weight = base_carve(&carve, topk * sizeof *k->weight);
    k->slots = base_carve(&carve, (size_t)k->play->data->first[k->play->data->ranks] * topk *
                                      kern_row_bytes(shape->dtype, shape->hidden));
    return carve.used;
}

/* The end of a range of columns that begins at `first`: on a strip, or the matrix's end. */
static int64_t cut(struct kernels *k, int64_t first, int64_t columns)
{
    int64_t last = first + KERN_STRIP * (1 + base_random_below(&k->prng, 4));
    return last < columns ? last : columns;
}

static void multiply(struct kernels *k, int64_t expert, int rows)
{
    const struct kern_engine *engine = k->play->engine;
    const struct ref_layer *ref = &k->play->data->layer;
    int64_t hidden = k->layer.hidden, inner = k->layer.inner;
    struct kern_pack pack = {&k->layer, k->in, rows, k->layer.hidden, k->x};
    struct kern_gmm1 gmm1 = {.layer = &k->layer, .up = at(k, ref->up_proj, expert * hidden * 2 * inner),
                             .up_bias = at(k, ref->up_bias, expert * 2 * inner), .x = k->x, .rows = rows, .a = k->a,
                             .gate_up = k->gate_up, .a_plain = k->a_plain, .scratch = k->scratch};
    struct kern_gmm2 gmm2 = {.layer = &k->layer, .down = at(k, ref->down_proj, expert * hidden * inner),
                             .down_bias = at(k, ref->down_bias, expert * hidden), .a = k->a, .rows = rows,
                             .out = k->out, .scratch = k->scratch};

    engine->pack(&pack);
    for (; gmm1.first < inner; gmm1.first = gmm1.last) {
        gmm1.last = cut(k, gmm1.first, inner);
        engine->gmm1(&gmm1);
    }
    for (; gmm2.first < hidden; gmm2.first = gmm2.last) {
        gmm2.last = cut(k, gmm2.first, hidden);
        engine->gmm2(&gmm2);
    }
}

static void compare(struct kernels *k, struct check_finding finding, const void *got, const void *wanted,
                    int64_t columns)
{
    cli_compare_row(k->layer.dtype, got, wanted, columns, &finding.difference);
    check_report(k->play, &finding);
}

static void compare_block(struct kernels *k, int rows)
{
    const struct check_wanted *wanted = k->play->wanted;
    int64_t hidden = k->layer.hidden, inner = k->layer.inner;

    for (int i = 0; wanted && i < rows; i++) {
        int64_t slot = k->slot[i], topk = k->play->data->shape.topk;
        struct check_finding finding = {.stage = CHECK_GATE_UP, .slot = slot % topk, .difference.token = slot / topk};
        compare(k, finding, at(k, k->gate_up, i * 2 * inner), at(k, wanted->gate_up, slot * 2 * inner), 2 * inner);
        finding.stage = CHECK_A;
        compare(k, finding, at(k, k->a_plain, i * inner), at(k, wanted->a, slot * inner), inner);
        finding.stage = CHECK_SLOTS;
        compare(k, finding, k->out[i], at(k, wanted->slots, slot * hidden), hidden);
    }
}

/* Every slot of one expert, in blocks of random heights. */
static void run_expert(struct kernels *k, int64_t expert)
{
    const struct case_data *data = k->play->data;
    int64_t slots = data->first[data->ranks] * data->shape.topk, hidden = k->layer.hidden;
    int rows = 0, height = 1 + (int)base_random_below(&k->prng, k->play->engine->rows_most);

    for (int64_t slot = 0; slot <= slots; slot++) {
        if (rows == height || (slot == slots && rows > 0)) {
            multiply(k, expert, rows);
            compare_block(k, rows);
            rows = 0;
        }
        if (slot == slots || id_at(data, slot) != expert)
            continue;
        k->in[rows] = at(k, data->x, slot / data->shape.topk * hidden);
        k->out[rows] = (void *)(uintptr_t)at(k, k->slots, slot * hidden);
        k->slot[rows++] = slot;
    }
}

static void combine_token(struct kernels *k, int64_t token)
{
    const struct case_data *data = k->play->data;
    int64_t hidden = k->layer.hidden, topk = data->shape.topk;
    struct check_finding finding = {.stage = CHECK_Y, .slot = -1, .difference.token = token};
    void *y = (void *)(uintptr_t)at(k, data->y, token * hidden);
    int count = 0;

    for (int64_t slot = token * topk; slot < (token + 1) * topk; slot++)
        if (id_at(data, slot) >= 0) {
            k->term[count] = at(k, k->slots, slot * hidden);
            k->weight[count++] = num_load(data->weights_type, data->weights, slot);
        }
    k->play->engine->combine(&(struct kern_combine){hidden, k->layer.dtype, count, k->term, k->weight, y});
    compare(k, finding, y, at(k, data->wanted, token * hidden), hidden);
}

bool check_kernels(struct check_play *play)
{
    const struct case_data *data = play->data;
    struct kernels k = {.play = play, .layer = cli_kern_layer(&data->shape), .prng = {data->seed}};
    uint64_t before;

    play->finding = (struct check_finding){0};
    k.memory = aligned_alloc(KERN_ALIGN, place(&k));
    if (!k.memory) {
        snprintf(play->seats[0].error, HMOE_ERROR_BYTES, "out of memory");
        return false;
    }
    place(&k);
    pthread_mutex_init(&play->lock, NULL);
    before = base_fp_enter();
    play->engine->thread_begin();
    for (int expert = 0; expert < data->shape.experts; expert++)
        run_expert(&k, expert);
    for (int64_t token = 0; token < data->first[data->ranks]; token++)
        combine_token(&k, token);
    play->engine->thread_end();
    base_fp_leave(before);
    pthread_mutex_destroy(&play->lock);
    free(k.memory);
    return !play->finding.difference.differing;
}
