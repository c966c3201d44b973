#include "model/linear.h"

#include "base/memory.h"

#include <stdlib.h>

enum { LINEAR_ROWS = 64 };

static struct kern_layer layer_of(int64_t terms, int64_t columns, enum hmoe_layout layout)
{
    return (struct kern_layer){.hidden = columns, .inner = terms, .dtype = HMOE_F32, .layout = layout};
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t scratch_bytes(const struct kern_engine *engine, int64_t widest)
{
    struct kern_layer kn = layer_of(widest, widest, HMOE_KN), nk = layer_of(widest, widest, HMOE_NK);

    return larger(engine->scratch_bytes(&kn), engine->scratch_bytes(&nk));
}

static size_t packed_bytes(const struct kern_engine *engine, int64_t widest)
{
    size_t most = 0;

    for (int rows = 1; rows <= LINEAR_ROWS; rows++) {
        struct kern_layer kn = layer_of(widest, widest, HMOE_KN), nk = layer_of(widest, widest, HMOE_NK);
        most = larger(most, engine->packed_bytes(&kn, widest, rows));
        most = larger(most, engine->packed_bytes(&nk, widest, rows));
    }
    return most;
}

static size_t bind(struct linear *linear, int64_t widest, void *memory)
{
    struct base_carve carve = {memory, 0};

    for (int t = 0; t < linear->threads; t++) {
        char *scratch = base_carve(&carve, scratch_bytes(linear->engine, widest));
        char *packed = base_carve(&carve, packed_bytes(linear->engine, widest));
        void **out = base_carve(&carve, LINEAR_ROWS * sizeof *out);
        if (memory) {
            linear->scratch[t] = scratch;
            linear->packed[t] = packed;
            linear->out[t] = out;
        }
    }
    for (int i = 0; i < 2; i++)
        linear->row[i] = base_carve(&carve, (size_t)linear->rows_max * sizeof *linear->row[i]);
    return carve.used;
}

enum hmoe_status linear_create(struct linear *linear, struct team *team, int threads, int64_t rows_max, int64_t widest,
                               struct base_error *error)
{
    struct kern_layer layer = layer_of(widest, widest, HMOE_KN);
    struct kern_choice choice;
    const char *why = kern_choose(&choice, "auto", &layer);
    size_t count = (size_t)threads;

    if (why)
        return base_fail(error, HMOE_ERR_UNSUPPORTED, "%s", why);
    *linear = (struct linear){.team = team, .threads = threads, .engine = choice.back, .rows_max = rows_max,
                              .scratch = calloc(count, sizeof(char *)), .packed = calloc(count, sizeof(char *)),
                              .out = calloc(count, sizeof(void **))};
    linear->memory = aligned_alloc(KERN_ALIGN, bind(linear, widest, NULL));
    if (!linear->scratch || !linear->packed || !linear->out || !linear->memory) {
        linear_destroy(linear);
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for products");
    }
    bind(linear, widest, linear->memory);
    return HMOE_OK;
}

void linear_destroy(struct linear *linear)
{
    free(linear->scratch);
    free(linear->packed);
    free(linear->out);
    free(linear->memory);
    *linear = (struct linear){0};
}

/* ---- rows times a matrix, a block of rows at a time */

struct multiply {
    struct linear *linear;
    const struct linear_product *product;
    struct kern_layer layer;
};

static void multiply_block(void *argument, int64_t block, int thread)
{
    const struct multiply *job = argument;
    const struct linear_product *p = job->product;
    struct linear *linear = job->linear;
    int64_t first = block * LINEAR_ROWS, left = p->rows - first;
    int rows = (int)(left < LINEAR_ROWS ? left : LINEAR_ROWS);

    for (int i = 0; i < rows; i++) {
        linear->row[0][first + i] = p->x + (first + i) * p->terms;
        linear->out[thread][i] = p->y + (first + i) * p->columns;
    }
    linear->engine->pack(&(struct kern_pack){.layer = &job->layer, .rows = linear->row[0] + first, .count = rows,
                                             .terms = p->terms, .x = linear->packed[thread]});
    linear->engine->gmm2(&(struct kern_gmm2){.layer = &job->layer, .down = p->w, .a = linear->packed[thread],
                                             .rows = rows, .last = p->columns, .out = linear->out[thread],
                                             .scratch = linear->scratch[thread]});
}

void linear_multiply(struct linear *linear, const struct linear_product *product)
{
    struct multiply job = {linear, product, layer_of(product->terms, product->columns, product->layout)};

    team_run(linear->team, (product->rows + LINEAR_ROWS - 1) / LINEAR_ROWS, multiply_block, &job);
}

/* ---- a matrix's gradient, a strip of its rows in one shard at a time */

struct outer {
    struct linear *linear;
    const struct linear_outer *outer;
    int64_t strips;
};

static void outer_strip(void *argument, int64_t index, int thread)
{
    const struct outer *job = argument;
    const struct linear_outer *o = job->outer;
    int64_t shard = index / job->strips, first = index % job->strips * KERN_STRIP, last = first + KERN_STRIP;
    int64_t rows = o->rows / o->shards;

    job->linear->engine->outer(&(struct kern_outer){
        .dtype = HMOE_F32, .out_dtype = HMOE_F32, .count = rows, .first = first,
        .last = last < o->left_columns ? last : o->left_columns,
        .left = {job->linear->row[0] + shard * rows, NULL, o->left_columns},
        .right = {job->linear->row[1] + shard * rows, NULL, o->right_columns},
        .out = o->out + shard * o->out_stride, .scratch = job->linear->scratch[thread]});
}

void linear_outer(struct linear *linear, const struct linear_outer *outer)
{
    struct outer job = {linear, outer, (outer->left_columns + KERN_STRIP - 1) / KERN_STRIP};

    for (int64_t i = 0; i < outer->rows; i++) {
        linear->row[0][i] = outer->left + i * outer->left_columns;
        linear->row[1][i] = outer->right + i * outer->right_columns;
    }
    team_run(linear->team, job.strips * outer->shards, outer_strip, &job);
}
