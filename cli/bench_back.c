/* `hmoe bench --backward`: gradients' memory, what a backward must at least move, and a sample against the oracle. */
#include "bench.h"

#include "base/memory.h"
#include "base/num.h"

#include <stdlib.h>
#include <string.h>

enum { CHECKED_ROWS = 16 }; /* an expert's weight gradients are compared when so few rows make them */

static size_t dw_bytes(const struct bench_run *run, int64_t elements)
{
    return kern_row_bytes(run->what->dw_type, elements);
}

static int64_t down_elements(const struct bench_run *run)
{
    return run->shape.hidden * run->shape.inner;
}

bool bench_grads_make(struct bench_run *run)
{
    struct bench_grads *grads = &run->grads;
    size_t rows = kern_row_bytes(run->shape.dtype, run->what->tokens * run->shape.hidden);
    size_t down = (size_t)run->shape.experts * dw_bytes(run, down_elements(run));

    grads->bytes = 2 * rows + 3 * down + 4096;
    grads->map = base_map(grads->bytes, 1); /* zeros, and a page fault at the first touch */
    grads->d_weights = malloc((size_t)(run->what->tokens * run->shape.topk) * sizeof *grads->d_weights + 1);
    if (!grads->map || !grads->d_weights)
        return false;
    grads->d_up = grads->map;
    grads->d_down = grads->d_up + 2 * down;
    grads->dy = grads->d_down + down;
    grads->dx = grads->dy + rows;
    for (int64_t i = 0; i < run->what->tokens * run->shape.hidden; i++)
        num_store(run->shape.dtype, grads->dy, i, base_random_sym(&run->prng, 1.7320508f));
    return true;
}

void bench_grads_free(struct bench_run *run)
{
    base_unmap(run->grads.map, run->grads.bytes, 1);
    free(run->grads.d_weights);
    run->grads = (struct bench_grads){0};
}

struct hmoe_gradients bench_gradients(const struct bench_run *run, int rank)
{
    const struct bench_grads *grads = &run->grads;
    int64_t first = cli_first_token(run->what->tokens, rank, run->what->ranks);
    size_t rows = kern_row_bytes(run->shape.dtype, first * run->shape.hidden);
    size_t down = (size_t)(run->shape.experts / run->what->ranks * rank) * dw_bytes(run, down_elements(run));

    return (struct hmoe_gradients){.dy = grads->dy + rows, .dx = grads->dx + rows,
                                   .d_topk_weights = grads->d_weights + first * run->shape.topk,
                                   .d_up_proj = grads->d_up + 2 * down, .d_down_proj = grads->d_down + down,
                                   .dw_type = run->what->dw_type, .dw_mode = run->what->dw_mode};
}

/* Bytes of weight gradients: all experts' when overwriting, those of experts with rows when accumulating. */
double bench_dw_bytes(const struct bench_run *run, double touched)
{
    double all = run->shape.experts * cli_expert_bytes(&run->shape), bytes;

    bytes = run->what->dw_mode == HMOE_OVERWRITE ? all : touched;
    return bytes * (double)num_bytes(run->what->dw_type) / (double)num_bytes(run->shape.dtype);
}

double bench_back_floor(const struct bench_run *run, double touched)
{
    const struct bench_result *result = run->result;
    double dw = bench_dw_bytes(run, touched), read = touched, flop_ms = result->flops / result->gflops_limit / 1e6;
    double move_ms;

    read += run->what->dw_mode == HMOE_ACCUMULATE ? dw : 0.0;
    move_ms = read / result->read_gbs / 1e6 + dw / run->limits->store_gbs / 1e6;
    return move_ms > flop_ms ? move_ms : flop_ms;
}

/* ------------------------------------------------------------------- the sample */

static struct ref_forward one_token(const struct bench_run *run, const struct ref_layer *layer)
{
    int64_t token = run->token;

    return (struct ref_forward){
        .layer = layer, .tokens = 1, .ids_type = HMOE_I32, .weights_type = HMOE_F32,
        .x = run->batch.x + kern_row_bytes(run->shape.dtype, token * run->shape.hidden),
        .topk_ids = run->batch.ids + token * run->shape.topk,
        .topk_weights = run->batch.weights + token * run->shape.topk};
}

static bool check_dx(struct bench_run *run, const struct ref_layer *layer)
{
    size_t row = kern_row_bytes(run->shape.dtype, run->shape.hidden), at = (size_t)run->token * row;
    struct ref_forward forward = one_token(run, layer);
    struct ref_backward backward = {.forward = &forward, .dy = run->grads.dy + at, .dx = malloc(row)};
    bool fine = backward.dx && ref_moe_backward(&backward) == 0;

    if (fine)
        cli_compare_row(run->shape.dtype, run->grads.dx + at, backward.dx, run->shape.hidden, &run->difference);
    run->difference.token = run->token;
    free(backward.dx);
    return fine;
}

/* The rows of one expert alone, as a batch of its own with one expert. */
struct alone {
    int64_t rows;
    char *x, *dy;
    int32_t *ids;
    float *weights;
    char *down;
};

static void gather(const struct bench_run *run, int expert, struct alone *alone)
{
    size_t row = kern_row_bytes(run->shape.dtype, run->shape.hidden);

    for (int64_t slot = 0; slot < run->what->tokens * run->shape.topk; slot++) {
        size_t token = (size_t)(slot / run->shape.topk);
        if (run->batch.ids[slot] != expert || alone->rows++ >= CHECKED_ROWS)
            continue;
        memcpy(alone->x + (size_t)(alone->rows - 1) * row, run->batch.x + token * row, row);
        memcpy(alone->dy + (size_t)(alone->rows - 1) * row, run->grads.dy + token * row, row);
        alone->weights[alone->rows - 1] = run->batch.weights[slot];
    }
}

static bool solve_alone(struct bench_run *run, int expert, const struct alone *alone, struct ref_layer layer)
{
    size_t matrix = (size_t)expert * kern_row_bytes(run->shape.dtype, down_elements(run));
    size_t down = (size_t)expert * dw_bytes(run, down_elements(run));
    struct ref_forward forward = {.layer = &layer, .tokens = alone->rows, .x = alone->x, .topk_ids = alone->ids,
                                  .topk_weights = alone->weights, .ids_type = HMOE_I32, .weights_type = HMOE_F32};
    struct ref_backward backward = {.forward = &forward, .dy = alone->dy, .d_down_proj = alone->down,
                                    .dw_type = run->what->dw_type, .dw_mode = HMOE_OVERWRITE};

    layer.experts = layer.topk = 1;
    layer.up_proj = (const char *)layer.up_proj + 2 * matrix;
    layer.down_proj = (const char *)layer.down_proj + matrix;
    if (ref_moe_backward(&backward) != 0)
        return false;
    cli_compare_row(run->what->dw_type, run->grads.d_down + down, alone->down, down_elements(run), &run->difference);
    return true;
}

/* One expert's d_down_proj; only what was overwritten, so that it is of this call alone. */
static bool check_dw(struct bench_run *run, const struct ref_layer *layer)
{
    size_t row = kern_row_bytes(run->shape.dtype, run->shape.hidden);
    int expert = run->batch.ids[run->token * run->shape.topk];
    struct alone alone = {.x = calloc(CHECKED_ROWS, row), .dy = calloc(CHECKED_ROWS, row),
                          .ids = calloc(CHECKED_ROWS, 4), .weights = calloc(CHECKED_ROWS, 4),
                          .down = malloc(dw_bytes(run, down_elements(run)))};
    bool fine = alone.x && alone.dy && alone.ids && alone.weights && alone.down;

    if (fine)
        gather(run, expert, &alone);
    if (fine && alone.rows <= CHECKED_ROWS)
        fine = solve_alone(run, expert, &alone, *layer);
    free(alone.x);
    free(alone.dy);
    free(alone.ids);
    free(alone.weights);
    free(alone.down);
    return fine;
}

bool bench_check_back(struct bench_run *run, const struct cli_weights *weights)
{
    struct ref_layer layer = cli_ref_layer(weights);
    bool fine = check_dx(run, &layer);

    if (fine && !run->difference.differing && run->checked == 0 && run->what->dw_mode == HMOE_OVERWRITE)
        fine = check_dw(run, &layer);
    return fine;
}
