/* An expert's matrices and their gradients. A weight's gradient is a sum over all rows of the expert, in their order,
 * so it starts when the last row's dH is there; its rows are shared out in strips. */
#include "moe/plan.h"

static const char *const_at(const void *base, size_t index, size_t bytes)
{
    return base ? (const char *)base + index * bytes : NULL;
}

static char *at(void *base, size_t index, size_t bytes)
{
    return base ? (char *)base + index * bytes : NULL;
}

struct moe_weights moe_weights_of(const struct moe_call *call, int32_t expert)
{
    const struct moe_plan *plan = call->plan;
    const struct hmoe_layer *layer = &call->in.layer;
    const struct hmoe_gradients *grad = &call->in.grad;
    int width = moe_width(plan, expert);
    enum hmoe_dtype dtype = plan->layer[0].dtype;
    int64_t hidden = plan->shape.hidden, inner = plan->layer[width].inner;
    size_t index = (size_t)(width ? expert - plan->shape.local : expert);
    size_t down = kern_row_bytes(dtype, hidden * inner), d_down = kern_row_bytes(grad->dw_type, hidden * inner);

    if (width)
        return (struct moe_weights){.up = const_at(layer->shared_up_proj, index, 2 * down),
                                    .down = const_at(layer->shared_down_proj, index, down),
                                    .d_up = at(grad->d_shared_up_proj, index, 2 * d_down),
                                    .d_down = at(grad->d_shared_down_proj, index, d_down)};
    return (struct moe_weights){
        .up = const_at(layer->up_proj, index, 2 * down),
        .down = const_at(layer->down_proj, index, down),
        .up_bias = const_at(layer->up_bias, index, kern_row_bytes(dtype, 2 * inner)),
        .down_bias = const_at(layer->down_bias, index, kern_row_bytes(dtype, hidden)),
        .d_up = at(grad->d_up_proj, index, 2 * d_down),
        .d_down = at(grad->d_down_proj, index, d_down),
        .d_up_bias = at(grad->d_up_bias, index, kern_row_bytes(grad->dw_type, 2 * inner)),
        .d_down_bias = at(grad->d_down_bias, index, kern_row_bytes(grad->dw_type, hidden))};
}

/* As many strips as let the workers share what this expert has of all rows. Where those are not known yet, which is so
 * when a shared expert starts before the counts are in, as if it had all. */
static int strips_of(const struct moe_call *call, int32_t expert)
{
    int64_t rows = call->expert[expert].rows;
    int64_t all = moe_width(call->plan, expert) ? rows * call->plan->shape.shared : call->rows;
    int64_t strips = all ? (8 * call->plan->shape.workers * rows + all - 1) / all : 1;

    return (int)(strips < 1 ? 1 : strips > MOE_DWEIGHT_STRIPS_MAX ? MOE_DWEIGHT_STRIPS_MAX : strips);
}

int moe_dweight_pieces(const struct moe_call *call, int32_t expert)
{
    struct moe_weights weights = moe_weights_of(call, expert);

    if (call->kind == MOE_BACKWARD_INPUT ||
        (!call->expert[expert].rows && call->in.grad.dw_mode == HMOE_ACCUMULATE))
        return 0;
    if (!weights.d_up && !weights.d_down && !weights.d_up_bias && !weights.d_down_bias)
        return 0;
    return 2 * strips_of(call, expert) + 1;
}

/* out [left.columns, right.columns], or with the columns swapped its transpose, as the weights lie. */
static void outer(const struct moe_call *call, struct kern_outer outer, int strips, int strip)
{
    const struct moe_plan *plan = call->plan;
    struct moe_range range;

    if (plan->layer[0].layout == HMOE_NK) {
        struct kern_rows left = outer.left;
        outer.left = outer.right;
        outer.right = left;
    }
    range = moe_strip(outer.left.columns, strips, strip);
    outer.first = range.first;
    outer.last = range.last;
    if (outer.out && range.first < range.last)
        plan->choice.back->outer(&outer);
}

/* The sum of the rows: their product with a column of ones. */
static void bias(const struct moe_call *call, struct kern_outer outer, struct moe_back back)
{
    static const float one_f32 = 1.0f;
    static const uint16_t one_bf16 = 0x3f80, one_f16 = 0x3c00;
    const void *one = outer.dtype == HMOE_F32 ? (const void *)&one_f32
                                              : outer.dtype == HMOE_BF16 ? &one_bf16 : &one_f16;

    if (!outer.out)
        return;
    for (int64_t i = 0; i < outer.count; i++)
        back.one_at[i] = one;
    outer.left = (struct kern_rows){.row = back.one_at, .columns = 1};
    outer.last = 1;
    call->plan->choice.back->outer(&outer);
}

void moe_dweight(struct moe_call *call, int32_t expert, struct moe_back back, int piece, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const struct kern_layer *layer = &plan->layer[moe_width(plan, expert)];
    struct moe_weights weights = moe_weights_of(call, expert);
    int strips = strips_of(call, expert);
    int64_t start = moe_span_begin(worker);
    struct kern_rows x = {back.at[MOE_X], NULL, layer->hidden}, dh = {back.dh_at, NULL, 2 * layer->inner};
    struct kern_rows a = {back.a_at, NULL, layer->inner}, dy = {back.at[MOE_DY], back.weight, layer->hidden};
    struct kern_outer common = {.dtype = layer->dtype, .count = call->expert[expert].rows,
                                .out_dtype = call->in.grad.dw_type, .scratch = plan->bench[worker->index].kern,
                                .accumulate = call->in.grad.dw_mode == HMOE_ACCUMULATE};
    struct kern_outer up = common, down = common;

    up.left = x;
    up.right = dh;
    down.left = a;
    down.right = dy;
    if (piece < 2 * strips) {
        up.out = weights.d_up;
        down.out = weights.d_down;
        outer(call, piece < strips ? down : up, strips, piece % strips);
    } else {
        up.out = weights.d_up_bias;
        down.out = weights.d_down_bias;
        bias(call, up, back);
        bias(call, down, back);
    }
    moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_DWEIGHT, .source = -1, .block = piece,
                 .expert = moe_expert_number(plan, expert), .rows = (int32_t)common.count});
}
