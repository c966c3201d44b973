/* Stage 7, combine: slot outputs and weights -> y [T,H], summed in slot order at the token's home rank, a run of tokens
 * at a time, as soon as the run's last output is in. */
#include "moe/plan.h"

#include "base/num.h"

/* Raises the run's counter at a row's home rank without ringing. Release pairs with the acquire load in the home
 * rank's poll: outputs are seen before they are counted. */
static void raise_run(const struct moe_call *call, int source, int64_t run, uint64_t rows)
{
    _Atomic uint64_t *counter = (void *)(moe_at(call, source, call->plan->at.returned) + (size_t)run * 8);

    atomic_fetch_add_explicit(counter, rows, memory_order_release);
}

/* Counts a block's outputs in at their home ranks: neighbours of one run in one step, one ring for each rank. */
void moe_return_block(struct moe_call *call, const struct moe_block *block)
{
    struct comm *comm = call->plan->host.comm;
    struct moe_row_walk walk;
    struct moe_row row;
    int source = -1;
    int64_t run = -1, run_slots = 1;
    uint64_t rows = 0;

    moe_rows_begin(&walk, call, block);
    while (moe_rows_next(&walk, &row)) {
        if (row.source != source || row.slot / run_slots != run) {
            if (rows)
                raise_run(call, source, run, rows);
            if (rows && row.source != source)
                comm_ring(comm, source);
            source = row.source;
            run_slots = moe_counts_of(call, source)->run_slots;
            run = row.slot / run_slots;
            rows = 0;
        }
        rows++;
    }
    raise_run(call, source, run, rows);
    comm_ring(comm, source);
}

/* ---- backward: d_weight of a slot is <dA, a>, with a down bias plus <dY, bias> */

static float add_up(const float *sums, int64_t blocks)
{
    float acc = 0.0f;

    for (int64_t b = 0; b < blocks; b++)
        acc = acc + sums[b];
    return acc;
}

/* Their pair chain over the hidden columns. */
static float dot(enum hmoe_dtype dtype, const void *a, const void *b, int64_t terms)
{
    float acc = 0.0f;

    for (int64_t first = 0; first < terms; first += 32) {
        float sum[2] = {0.0f, 0.0f};
        for (int64_t i = first; i < first + 32; i++) {
            float left = i < terms ? num_load(dtype, a, i) : 0.0f, right = i < terms ? num_load(dtype, b, i) : 0.0f;
            sum[i & 1] = fmaf(left, right, sum[i & 1]);
        }
        acc = acc + (sum[0] + sum[1]);
    }
    return acc;
}

/* Writes the gradients of a block's slot weights to their home ranks. back: of the block. */
void moe_return_weights(struct moe_call *call, const struct moe_block *block, struct moe_back back)
{
    const struct moe_plan *plan = call->plan;
    const struct kern_layer *layer = &plan->layer[0];
    const char *bias = moe_weights_of(call, block->expert).down_bias;
    int64_t blocks = (layer->inner + 31) / 32;
    struct moe_row_walk walk;
    struct moe_row row;

    if (moe_width(plan, block->expert))
        return;
    moe_rows_begin(&walk, call, block);
    for (int64_t i = 0; moe_rows_next(&walk, &row); i++) {
        float *home = (void *)moe_at(call, row.source, plan->at.d_weight);
        float sum = add_up(back.sums + i * blocks, blocks);
        home[row.slot] = bias ? sum + dot(layer->dtype, back.at[MOE_DY][i], bias, layer->hidden) : sum;
    }
}

static void store_d_weights(const struct moe_call *call, int64_t token)
{
    const struct moe_plan *plan = call->plan;
    const float *home = (const void *)moe_at(call, plan->rank, plan->at.d_weight);

    for (int64_t slot = token * plan->shape.topk; slot < (token + 1) * plan->shape.topk; slot++)
        num_store(call->in.weights_type, call->in.grad.d_topk_weights, slot,
                  moe_id_at(call, slot) < 0 ? 0.0f : home[slot]);
}

/* ---- combine */

/* y: slot outputs times their weights; dx: slot gradients as they are, which is the same with a weight of one. Shared
 * experts come last, with a weight of one. */
static void combine_token(const struct moe_call *call, int64_t token, char *to, struct moe_bench *bench)
{
    const struct moe_plan *plan = call->plan;
    const struct moe_shape *shape = &plan->shape;
    const char *slots = moe_at(call, plan->rank, plan->at.slots);
    struct kern_combine combine = {.hidden = shape->hidden, .dtype = plan->layer[0].dtype, .term = bench->term,
                                   .weight = bench->weight, .y = to + (size_t)token * shape->row_bytes};

    for (int64_t slot = token * shape->topk; slot < (token + 1) * shape->topk; slot++) {
        if (moe_id_at(call, slot) < 0)
            continue;
        bench->term[combine.count] = slots + (size_t)slot * shape->row_bytes;
        bench->weight[combine.count++] =
            call->kind == MOE_FORWARD ? num_load(call->in.weights_type, call->in.topk_weights, slot) : 1.0f;
    }
    for (int s = 0; s < shape->shared; s++) {
        bench->term[combine.count] = call->shared_out + (size_t)(s * shape->tokens_max + token) * shape->row_bytes;
        bench->weight[combine.count++] = 1.0f;
    }
    plan->choice.many->combine(&combine);
}

void moe_combine_run(void *context, uint64_t run, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int64_t start = moe_span_begin(worker), first = (int64_t)run * call->run_tokens, last = first + call->run_tokens;
    char *to = call->kind == MOE_FORWARD ? call->in.y : call->in.grad.dx;
    bool weights = call->kind != MOE_FORWARD && call->in.grad.d_topk_weights;

    last = last > call->in.tokens ? call->in.tokens : last;
    for (int64_t token = first; token < last && !moe_failed(call->plan); token++) {
        if (to)
            combine_token(call, token, to, &call->plan->bench[worker->index]);
        if (weights)
            store_d_weights(call, token);
    }
    moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_COMBINE, .expert = -1, .block = -1,
                                      .source = call->plan->rank, .rows = (int32_t)(last - first)});
    moe_duty_done(call, worker);
    moe_task_end(call);
}
