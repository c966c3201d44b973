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

static void combine_token(const struct moe_call *call, int64_t token, struct moe_bench *bench)
{
    const struct moe_plan *plan = call->plan;
    size_t bytes = plan->shape.row_bytes;
    const char *slots = moe_at(call, plan->rank, plan->at.slots);
    struct kern_combine combine = {.hidden = plan->layer.hidden, .dtype = plan->layer.dtype, .term = bench->term,
                                   .weight = bench->weight, .y = (char *)call->in.y + (size_t)token * bytes};

    for (int64_t slot = token * plan->shape.topk; slot < (token + 1) * plan->shape.topk; slot++) {
        if (moe_id_at(call, slot) < 0)
            continue;
        bench->term[combine.count] = slots + (size_t)slot * bytes;
        bench->weight[combine.count++] = num_load(call->in.weights_type, call->in.topk_weights, slot);
    }
    plan->choice.many->combine(&combine);
}

void moe_combine_run(void *context, uint64_t run, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int64_t start = moe_span_begin(worker), first = (int64_t)run * call->run_tokens, last = first + call->run_tokens;

    last = last > call->in.tokens ? call->in.tokens : last;
    for (int64_t token = first; token < last && !moe_failed(call->plan); token++)
        combine_token(call, token, &call->plan->bench[worker->index]);
    moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_COMBINE, .expert = -1, .block = -1,
                                      .source = call->plan->rank, .rows = (int32_t)(last - first)});
    moe_duty_done(call, worker);
    moe_task_end(call);
}
