/* Stage 6, gmm2: a [rows, I] x down_proj -> each slot's expert output, written once, to its home rank's window. */
#include "moe/plan.h"

#include <string.h>

static void find_outputs(struct moe_call *call, const struct moe_block *block, void **out)
{
    struct moe_plan *plan = call->plan;
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (uint32_t i = 0; moe_rows_next(&walk, &row); i++)
        out[i] = plan->shape.materialise ? plan->outs + ((size_t)block->row + i) * plan->shape.row_bytes
                                         : moe_row_out(call, row);
}

void moe_gmm2(struct moe_call *call, const struct moe_block *block, int strip, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    struct moe_bench *bench = &plan->bench[worker->index];
    const struct hmoe_layer *weights = &call->in.layer;
    size_t row = plan->shape.row_bytes, expert = (size_t)block->expert;
    int64_t start = moe_span_begin(worker);
    struct kern_gmm2 gmm2 = {
        .layer = &plan->layer,
        .down = (const char *)weights->down_proj + expert * row * (size_t)plan->layer.inner,
        .down_bias = weights->down_bias ? (const char *)weights->down_bias + expert * row : NULL,
        .a = block->a, .rows = (int)block->rows, .out = bench->out, .scratch = bench->kern};

    moe_strip(call, plan->layer.hidden, strip, &gmm2.first, &gmm2.last);
    if (gmm2.first < gmm2.last) {
        find_outputs(call, block, bench->out);
        block->engine->gmm2(&gmm2);
    }
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_GMM2));
}

/* permute_fusion off: the outputs were stored next to each other and are copied to their slots. */
void moe_copy_out(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    size_t bytes = plan->shape.row_bytes;
    const char *from = plan->outs + (size_t)block->row * bytes;
    int64_t start = moe_span_begin(worker);
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (; moe_rows_next(&walk, &row); from += bytes)
        memcpy(moe_row_out(call, row), from, bytes);
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_UNPERMUTE));
}
