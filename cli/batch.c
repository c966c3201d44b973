#include "layer.h"

#include "kern/kern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *cli_shared(size_t bytes)
{
    void *base = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

void cli_shared_free(void *base, size_t bytes)
{
    if (base)
        munmap(base, bytes ? bytes : 1);
}

static size_t rows_bytes(const struct cli_shape *shape, int64_t tokens)
{
    return (size_t)tokens * kern_row_bytes(shape->dtype, shape->hidden);
}

static size_t slots_of(const struct cli_shape *shape, int64_t tokens)
{
    return (size_t)tokens * (size_t)shape->topk;
}

double cli_batch_bytes(const struct cli_shape *shape, int64_t tokens)
{
    return 2.0 * (double)rows_bytes(shape, tokens) + 8.0 * (double)slots_of(shape, tokens);
}

bool cli_batch_make(struct cli_batch *batch, const struct cli_shape *shape, int64_t tokens)
{
    size_t slots = slots_of(shape, tokens);

    *batch = (struct cli_batch){
        .tokens = tokens,
        .x = malloc(rows_bytes(shape, tokens) + 1),
        .ids = malloc(slots * sizeof *batch->ids + 1),
        .weights = malloc(slots * sizeof *batch->weights + 1),
        .y = cli_shared(rows_bytes(shape, tokens)),
    };
    if (batch->x && batch->ids && batch->weights && batch->y)
        return true;
    cli_batch_free(batch, shape);
    return false;
}

void cli_batch_free(struct cli_batch *batch, const struct cli_shape *shape)
{
    free(batch->x);
    free(batch->ids);
    free(batch->weights);
    cli_shared_free(batch->y, rows_bytes(shape, batch->tokens));
    *batch = (struct cli_batch){0};
}

int64_t cli_first_token(int64_t tokens, int rank, int ranks)
{
    return tokens / ranks * rank + tokens % ranks * rank / ranks;
}

struct hmoe_call cli_call(const struct cli_weights *weights, const struct cli_batch *batch, int rank, int ranks)
{
    const struct cli_shape *shape = &weights->shape;
    int64_t first = cli_first_token(batch->tokens, rank, ranks);
    int64_t tokens = cli_first_token(batch->tokens, rank + 1, ranks) - first;
    size_t rows = rows_bytes(shape, first), slots = slots_of(shape, first);

    return (struct hmoe_call){
        .size = sizeof(struct hmoe_call),
        .tokens = tokens,
        .x = tokens ? batch->x + rows : NULL,
        .topk_ids = tokens ? batch->ids + slots : NULL,
        .topk_weights = tokens ? batch->weights + slots : NULL,
        .ids_type = HMOE_I32,
        .weights_type = HMOE_F32,
        .layer = cli_weights_of(weights, rank, ranks),
        .y = tokens ? batch->y + rows : NULL,
    };
}

static uint32_t bits_at(enum hmoe_dtype dtype, const void *row, int64_t column)
{
    uint32_t word;

    if (dtype != HMOE_F32)
        return ((const uint16_t *)row)[column];
    memcpy(&word, (const char *)row + column * 4, sizeof word);
    return word;
}

void cli_compare_row(enum hmoe_dtype dtype, const void *got, const void *wanted, int64_t columns,
                     struct cli_difference *difference)
{
    difference->differing = 0;
    if (memcmp(got, wanted, kern_row_bytes(dtype, columns)) == 0)
        return;
    for (int64_t column = columns - 1; column >= 0; column--) {
        uint32_t g = bits_at(dtype, got, column), w = bits_at(dtype, wanted, column);
        if (g == w)
            continue;
        difference->differing++;
        difference->column = column;
        difference->got = g;
        difference->wanted = w;
    }
}

const char *cli_difference_text(char *buffer, size_t size, const struct cli_shape *shape,
                                const struct cli_difference *difference)
{
    int digits = shape->dtype == HMOE_F32 ? 8 : 4;

    snprintf(buffer, size, "token %lld: %lld of %lld columns differ, the first is %lld: %0*x, not %0*x",
             (long long)difference->token, (long long)difference->differing, (long long)shape->hidden,
             (long long)difference->column, digits, difference->got, digits, difference->wanted);
    return buffer;
}

struct ref_layer cli_ref_layer(const struct cli_weights *weights)
{
    const struct cli_shape *shape = &weights->shape;

    return (struct ref_layer){
        .hidden = shape->hidden,
        .inner = shape->inner,
        .experts = shape->experts,
        .topk = shape->topk,
        .dtype = shape->dtype,
        .layout = shape->layout,
        .gating = shape->gating,
        .activation = shape->activation,
        .up_proj = weights->up,
        .down_proj = weights->down,
        .up_bias = weights->up_bias,
        .down_bias = weights->down_bias,
    };
}

bool cli_verify_token(const struct cli_weights *weights, const struct cli_batch *batch, int64_t token,
                      struct cli_difference *difference)
{
    const struct cli_shape *shape = &weights->shape;
    struct ref_layer layer = cli_ref_layer(weights);
    size_t row = kern_row_bytes(shape->dtype, shape->hidden), slot = slots_of(shape, token);
    struct ref_forward forward = {
        .layer = &layer,
        .tokens = 1,
        .x = batch->x + (size_t)token * row,
        .topk_ids = batch->ids + slot,
        .topk_weights = batch->weights + slot,
        .ids_type = HMOE_I32,
        .weights_type = HMOE_F32,
        .y = malloc(row),
    };
    bool fine = forward.y && ref_moe_forward(&forward) == 0;

    difference->token = token;
    if (fine)
        cli_compare_row(shape->dtype, batch->y + (size_t)token * row, forward.y, shape->hidden, difference);
    free(forward.y);
    return fine;
}
