/* Stage 3, dispatch: rows become reachable -> arrived[expert, block] is raised by the true number of rows; a chain
 * whose last row is there becomes ready, whatever else has not arrived. */
#include "moe/plan.h"

/* How many of the source's rows of a local expert belong to tokens before `token`: they stand in token order. */
static uint32_t rows_before(const struct moe_call *call, int source, int32_t expert, int64_t token)
{
    const uint32_t *base = call->base + (size_t)expert * ((size_t)call->plan->shape.ranks + 1) + source;
    const uint32_t *order = moe_source_slots(call, source, expert);
    uint64_t slot = (uint64_t)token * (uint64_t)call->plan->shape.topk;
    uint32_t low = 0, high = base[1] - base[0];

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (order[middle] < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void moe_ready(struct moe_call *call, int32_t chain)
{
    struct moe_plan *plan = call->plan;
    uint64_t entry = (uint64_t)call->slot << 32 | (uint32_t)chain;

    call->chain[chain].ready_ns = trace_on(plan->host.trace) ? base_now_ns() : 0;
    rt_ring_push(chain < call->shared_chains ? &plan->spare : &plan->ready, &(struct rt_task){.argument = entry});
}

/* Rows [first, last) of the chain's part [at, end) of the expert, as many as overlap. */
static uint32_t overlap(uint32_t first, uint32_t last, uint32_t at, uint32_t end)
{
    first = first > at ? first : at;
    last = last < end ? last : end;
    return last > first ? last - first : 0;
}

static void raise_chain(struct moe_call *call, int32_t index, uint32_t first, uint32_t last)
{
    struct moe_chain *chain = &call->chain[index];
    const struct moe_block *from = &call->block[chain->first_block], *to = from + chain->blocks - 1;
    uint32_t rows = overlap(first, last, from->first, to->first + to->rows);

    if (rows && rt_event_raise(&chain->arrived, rows))
        moe_ready(call, index);
}

/* Without waves the expert's first chain counts for all of them. */
static void raise_expert(struct moe_call *call, const struct moe_expert *expert, uint32_t rows)
{
    if (!rows || !rt_event_raise(&call->chain[expert->first_chain].arrived, rows))
        return;
    for (int32_t c = 0; c < expert->chains; c++)
        moe_ready(call, expert->first_chain + c);
}

/* The rows of tokens [first_token, last_token) of the source are there now. */
void moe_arrive(struct moe_call *call, int source, int64_t first_token, int64_t last_token)
{
    size_t stride = (size_t)call->plan->shape.ranks + 1;

    for (int32_t i = 0; i < call->active; i++) {
        int32_t expert = call->by_rows[i];
        const struct moe_expert *at = &call->expert[expert];
        uint32_t base = call->base[(size_t)expert * stride + (size_t)source];
        uint32_t first = base + rows_before(call, source, expert, first_token);
        uint32_t last = base + rows_before(call, source, expert, last_token);
        if (!call->plan->wave)
            raise_expert(call, at, last - first);
        else
            for (int32_t c = at->first_chain; first < last && c < at->first_chain + at->chains; c++)
                raise_chain(call, c, first, last);
    }
    moe_pump(call->plan);
}

void moe_arrive_chunk(void *context, uint64_t source_chunk, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int source = (int)(source_chunk / MOE_CHUNKS_MAX);
    int64_t chunk = (int64_t)(source_chunk % MOE_CHUNKS_MAX), start = moe_span_begin(worker);
    const struct moe_counts *counts = moe_counts_of(call, source);
    int64_t first = chunk * counts->chunk_tokens, last = first + counts->chunk_tokens;

    last = last > counts->tokens ? counts->tokens : last;
    if (!call->plan->bulk)
        moe_arrive(call, source, first, last);
    moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_DISPATCH, .expert = -1, .block = -1,
                                      .source = source, .rows = (int32_t)(last - first)});
    if (call->plan->bulk)
        moe_bulk_chunk(call);
    moe_duty_done(call, worker);
    moe_task_end(call);
}
