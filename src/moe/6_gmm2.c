/* Stage 6, gmm2: a [rows, I] x down_proj -> each slot's expert output, written once, to its home rank's window.
 * Backward, dact: packed dY x down_proj, transposed as it lies -> dA in the kernels' accumulators, and there the
 * gradient of SwiGLU: dH in the place of gate and up, `a` again, and what makes the gradients of the slots' weights. */
#include "moe/plan.h"

#include <string.h>

void moe_find_outputs(struct moe_call *call, const struct moe_block *block, void **out)
{
    struct moe_plan *plan = call->plan;
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (uint32_t i = 0; moe_rows_next(&walk, &row); i++)
        out[i] = plan->shape.materialise ? call->copy_out + ((size_t)block->row + i) * plan->shape.row_bytes
                                         : moe_row_out(call, row, block->expert);
}

void moe_gmm2(struct moe_call *call, const struct moe_block *block, int strip, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    struct moe_bench *bench = &plan->bench[worker->index];
    struct moe_weights weights = moe_weights_of(call, block->expert);
    struct moe_range range = moe_strip(plan->shape.hidden, call->chain[block->chain].strips, strip);
    int64_t start = moe_span_begin(worker);

    if (range.first < range.last) {
        moe_find_outputs(call, block, bench->out);
        block->engine->gmm2(&(struct kern_gmm2){
            .layer = &plan->layer[moe_width(plan, block->expert)], .down = weights.down,
            .down_bias = weights.down_bias, .a = block->a, .rows = (int)block->rows, .first = range.first,
            .last = range.last, .out = bench->out, .scratch = bench->kern});
    }
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_GMM2));
}

/* permute_fusion off: the outputs were stored next to each other and are copied to their slots. */
void moe_copy_out(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    size_t bytes = plan->shape.row_bytes;
    const char *from = call->copy_out + (size_t)block->row * bytes;
    int64_t start = moe_span_begin(worker);
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (; moe_rows_next(&walk, &row); from += bytes)
        memcpy(moe_row_out(call, row, block->expert), from, bytes);
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_UNPERMUTE));
}

void moe_dact(struct moe_call *call, const struct moe_block *block, struct moe_back back, const void *dy, int strip,
              struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const struct kern_layer *layer = &plan->layer[moe_width(plan, block->expert)];
    struct moe_range range = moe_strip(layer->inner, call->chain[block->chain].strips, strip);
    int64_t start = moe_span_begin(worker);

    if (range.first < range.last)
        block->engine->dact(&(struct kern_dact){
            .layer = layer, .down = moe_weights_of(call, block->expert).down, .dy = dy, .rows = (int)block->rows,
            .first = range.first, .last = range.last, .weight = back.weight, .gate_up = back.gate_up, .a = back.a,
            .sums = back.sums, .scratch = plan->bench[worker->index].kern});
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_DACT));
}
