/* Stage 4, gmm1: packed rows x up_proj -> gate and up [rows, 2I] in the kernels' accumulators, SwiGLU there (stage 5),
 * `a` packed for the second GEMM. A task is a block, or one column strip of it.
 * Backward, dgmm: packed dH x up_proj, transposed as it lies -> each slot's dx, to its home rank's window. */
#include "moe/plan.h"

struct moe_range moe_strip(int64_t columns, int strips, int strip)
{
    int64_t units = (columns + KERN_STRIP - 1) / KERN_STRIP;
    struct moe_range range = {units * strip / strips * KERN_STRIP, units * (strip + 1) / strips * KERN_STRIP};

    range.last = range.last > columns ? columns : range.last;
    return range;
}

/* Tap pointers for this block, or NULL. */
static void *tap_at(const struct moe_call *call, const struct moe_block *block, void *base, int64_t columns)
{
    const struct moe_plan *plan = call->plan;

    if (!base || call->rows > plan->tap.rows_max || moe_width(plan, block->expert))
        return NULL;
    return (char *)base + (size_t)block->row * kern_row_bytes(plan->layer[0].dtype, columns);
}

/* Gate and up are wanted by a backward, or looked at. */
static void *gate_up_at(const struct moe_call *call, const struct moe_block *block, int64_t columns)
{
    if (call->saved && !call->saved->recompute)
        return moe_back_at(call, call->saved->back, block->expert, block->row).gate_up;
    return tap_at(call, block, call->plan->tap.gate_up, columns);
}

static struct kern_gmm1 gmm1_of(const struct moe_call *call, const struct moe_block *block,
                                const struct rt_worker *worker)
{
    const struct moe_plan *plan = call->plan;
    const struct kern_layer *layer = &plan->layer[moe_width(plan, block->expert)];
    struct moe_weights weights = moe_weights_of(call, block->expert);

    return (struct kern_gmm1){.layer = layer, .up = weights.up, .up_bias = weights.up_bias, .rows = (int)block->rows,
                              .last = layer->inner, .scratch = plan->bench[worker->index].kern};
}

void moe_gmm1(struct moe_call *call, const struct moe_block *block, const void *x, int strip,
              struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    int64_t swiglu_ns = 0, start = moe_span_begin(worker);
    struct kern_gmm1 gmm1 = gmm1_of(call, block, worker);
    int64_t inner = gmm1.last;
    struct moe_range range = moe_strip(inner, call->chain[block->chain].strips, strip);
    struct moe_span span = moe_block_span(call, block, TRACE_GMM1);

    gmm1.x = x;
    gmm1.a = block->a;
    gmm1.first = range.first;
    gmm1.last = range.last;
    gmm1.gate_up = gate_up_at(call, block, 2 * inner);
    gmm1.a_plain = tap_at(call, block, plan->tap.a, inner);
    gmm1.swiglu_ns = start ? &swiglu_ns : NULL;
    if (gmm1.first < gmm1.last)
        block->engine->gmm1(&gmm1);
    if (start)
        moe_swiglu_span(worker, call, base_now_ns(), swiglu_ns, span);
    moe_span_end(worker, call, start, span);
}

/* Gate and up once more, from the rows. `a` goes where nobody looks. */
void moe_gmm1_again(struct moe_call *call, const struct moe_block *block, struct moe_back back,
                    struct rt_worker *worker)
{
    struct moe_bench *bench = &call->plan->bench[worker->index];
    int64_t start = moe_span_begin(worker);
    struct kern_gmm1 gmm1 = gmm1_of(call, block, worker);

    moe_pack_x(call, block, back, bench->x);
    gmm1.x = bench->x;
    gmm1.a = bench->a;
    gmm1.gate_up = back.gate_up;
    block->engine->gmm1(&gmm1);
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_GMM1));
}

void moe_dgmm(struct moe_call *call, const struct moe_block *block, const void *dh, int strip,
              struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    struct moe_bench *bench = &plan->bench[worker->index];
    int64_t start = moe_span_begin(worker);
    struct moe_range range = moe_strip(plan->shape.hidden, call->chain[block->chain].strips, strip);

    if (range.first < range.last) {
        moe_find_outputs(call, block, bench->out);
        block->engine->gmm2(&(struct kern_gmm2){
            .layer = &plan->back[moe_width(plan, block->expert)], .down = moe_weights_of(call, block->expert).up,
            .a = dh, .rows = (int)block->rows, .first = range.first, .last = range.last, .out = bench->out,
            .scratch = bench->kern});
    }
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_DGMM));
}
