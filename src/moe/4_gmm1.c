/* Stage 4, gmm1: packed rows x up_proj -> gate and up [rows, 2I] in the kernels' accumulators, SwiGLU there (stage 5),
 * `a` packed for the second GEMM. A task is a block, or one column strip of it. */
#include "moe/plan.h"

void moe_strip(const struct moe_call *call, int64_t columns, int strip, int64_t *first, int64_t *last)
{
    int64_t units = (columns + KERN_STRIP - 1) / KERN_STRIP;

    *first = units * strip / call->strips * KERN_STRIP;
    *last = units * (strip + 1) / call->strips * KERN_STRIP;
    *last = *last > columns ? columns : *last;
}

/* Tap pointers for this block, or NULL. */
static void *tap_at(const struct moe_call *call, const struct moe_block *block, void *base, int64_t columns)
{
    const struct moe_plan *plan = call->plan;

    if (!base || call->rows > plan->tap.rows_max)
        return NULL;
    return (char *)base + (size_t)block->row * kern_row_bytes(plan->layer.dtype, columns);
}

void moe_gmm1(struct moe_call *call, const struct moe_block *block, const void *x, int strip,
              struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const struct hmoe_layer *weights = &call->in.layer;
    int64_t inner = plan->layer.inner, columns = 2 * inner, swiglu_ns = 0, start = moe_span_begin(worker);
    size_t row = kern_row_bytes(plan->layer.dtype, columns), expert = (size_t)block->expert;
    struct kern_gmm1 gmm1 = {
        .layer = &plan->layer,
        .up = (const char *)weights->up_proj + expert * row * (size_t)plan->layer.hidden,
        .up_bias = weights->up_bias ? (const char *)weights->up_bias + expert * row : NULL,
        .x = x, .rows = (int)block->rows, .a = block->a,
        .gate_up = tap_at(call, block, plan->tap.gate_up, columns),
        .a_plain = tap_at(call, block, plan->tap.a, inner),
        .swiglu_ns = start ? &swiglu_ns : NULL,
        .scratch = plan->bench[worker->index].kern};
    struct moe_span span = moe_block_span(call, block, TRACE_GMM1);

    moe_strip(call, inner, strip, &gmm1.first, &gmm1.last);
    if (gmm1.first < gmm1.last)
        block->engine->gmm1(&gmm1);
    if (start)
        moe_swiglu_span(worker, call, base_now_ns(), swiglu_ns, span);
    moe_span_end(worker, call, start, span);
}
