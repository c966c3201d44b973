/* Stage 1, route: ids [T,K] -> checked, counted by expert, my slots in the order of the experts; the counts row goes
 * to every rank. Of the whole call this is all that every rank needs from every other one. A backward knows the routing
 * already: its slots' weights go into the window, and its row says which forward it belongs to. */
#include "moe/plan.h"

#include "base/num.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Counts slots per expert into offset[e + 1], or fails on the first bad id. */
static enum hmoe_status count_slots(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t slots = call->in.tokens * shape->topk;
    uint32_t *offset = call->counts->offset;

    memset(offset, 0, ((size_t)shape->experts + 1) * sizeof *offset);
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t id = moe_id_at(call, slot);
        if (id >= 0 && id < shape->experts)
            offset[id + 1]++;
        else if (id != -1)
            return base_fail(&call->error, HMOE_ERR_ID,
                             "topk_ids of rank %d, token %" PRId64 ", slot %" PRId64 " is %" PRId64
                             ": allowed are 0..%d, or -1 to mask the slot",
                             call->plan->rank, slot / shape->topk, slot % shape->topk, id, shape->experts - 1);
    }
    for (int e = 0; e < shape->experts; e++)
        offset[e + 1] += offset[e];
    return HMOE_OK;
}

/* Runs of tokens are reduced together: short enough to share out, and no more of them than the window counts. */
static void size_runs(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t tokens = call->in.tokens, run = shape->run_tokens, least = shape->tokens_max / MOE_RUNS_MAX + 1;

    if (!run)
        run = tokens / (8 * (int64_t)shape->workers) > 16 ? 16 : tokens / (8 * (int64_t)shape->workers);
    call->run_tokens = run > least ? run : least;
    call->runs = (tokens + call->run_tokens - 1) / call->run_tokens;
    memset(call->run_started, 0, (size_t)call->runs);
    for (int64_t r = 0; r < call->runs; r++)
        call->run_slots[r] = (uint64_t)moe_shared_slots(call, r);
}

/* A counting sort; and how many outputs each run of tokens will wait for, if the call runs at all. */
static void sort_slots(struct moe_call *call)
{
    struct moe_plan *plan = call->plan;
    int topk = plan->shape.topk;
    uint32_t *order = (void *)moe_at(call, plan->rank, plan->at.order);
    uint32_t slot = 0;

    memcpy(call->cursor, call->counts->offset, (size_t)plan->shape.experts * sizeof *call->cursor);
    for (int64_t token = 0; token < call->in.tokens; token++) {
        uint64_t unmasked = 0;
        for (int k = 0; k < topk; k++, slot++) {
            int64_t id = moe_id_at(call, slot);
            if (id >= 0) {
                order[call->cursor[id]++] = slot;
                unmasked++;
            }
        }
        call->run_slots[token / call->run_tokens] += unmasked;
    }
}

/* Tokens that travel together, so that there are at most MOE_CHUNKS_MAX chunks. */
static int64_t chunk_tokens(const struct moe_call *call)
{
    int64_t tokens = call->in.tokens, knob = call->plan->knobs.value[KNOB_CHUNK_TOKENS];
    int64_t least = (tokens + MOE_CHUNKS_MAX - 1) / MOE_CHUNKS_MAX, chunk = knob ? knob : (tokens + 31) / 32;

    if (!knob && chunk < 64)
        chunk = 64;
    chunk = chunk < least ? least : chunk;
    return chunk < 1 ? 1 : chunk;
}

static void publish(struct moe_call *call)
{
    struct moe_plan *plan = call->plan;
    struct moe_counts *counts = call->counts;
    const struct comm_transport *transport = plan->host.comm->transport;
    size_t mine = moe_offset(call, plan->at.inbox) + (size_t)plan->rank * plan->at.counts_bytes;
    size_t used = sizeof *counts, offsets = ((size_t)plan->shape.experts + 1) * sizeof counts->offset[0];

    used += call->kind == MOE_FORWARD ? offsets : 0;
    counts->status = (uint32_t)call->error.status;
    counts->kind = (uint32_t)call->kind;
    counts->saves = !call->saved ? 0 : 1u | (call->saved->keep_rows ? 2u : 0) | (call->saved->recompute ? 4u : 0);
    counts->of = call->saved ? call->saved->number : 0;
    counts->wants_dx = call->in.grad.dx != NULL;
    counts->tokens = call->in.tokens;
    counts->number = call->number + 1;
    counts->chunk_tokens = chunk_tokens(call);
    counts->run_slots = call->run_tokens * plan->shape.topk;
    counts->feed[MOE_X] = call->in.x;
    counts->feed[MOE_DY] = call->in.grad.dy;
    memcpy(counts->text, call->error.text, sizeof counts->text);
    for (int i = 0; i < plan->shape.ranks; i++) {
        int rank = (plan->rank + i) % plan->shape.ranks; /* rotated: nobody is everybody's first target */
        transport->put(&plan->window, rank, mine, counts, used);
        transport->signal(&plan->window, rank, moe_offset(call, plan->at.counts_in), 1);
    }
}

/* The rest of both routes: the goals, then the news to every rank. */
static void tell(struct moe_call *call, int64_t start, struct rt_worker *worker)
{
    int32_t shared;

    call->counts_goal += (uint64_t)call->plan->shape.ranks;
    moe_shared_lay(call);
    shared = call->shared_chains;
    moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_ROUTE, .expert = -1, .block = -1, .source = -1,
                                      .rows = (int32_t)(call->in.tokens * call->plan->shape.topk)});
    /* release: the poll that sees COUNTING sees the goals */
    atomic_store_explicit(&call->state, MOE_COUNTING, memory_order_release);
    publish(call); /* from here the call may end, and its slot be used again, if no shared expert holds it */
    if (shared)
        moe_shared_start(call, shared);
}

void moe_route(void *context, uint64_t unused, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int64_t start = moe_span_begin(worker);

    (void)unused;
    call->runs = 0;
    if (call->error.status == HMOE_OK && count_slots(call) == HMOE_OK) {
        size_runs(call);
        sort_slots(call);
    }
    tell(call, start, worker);
    moe_task_end(call);
}

/* The weights, widened, where the experts' owners find them. A masked slot's is not read. */
static void show_weights(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    float *weight = (void *)moe_at(call, plan->rank, plan->at.weight);

    for (int64_t slot = 0; slot < call->in.tokens * plan->shape.topk; slot++)
        if (moe_id_at(call, slot) >= 0) {
            weight[slot] = num_load(call->in.weights_type, call->in.topk_weights, slot);
            call->run_slots[slot / plan->shape.topk / call->run_tokens]++;
        }
}

void moe_route_back(void *context, uint64_t unused, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int64_t start = moe_span_begin(worker);

    (void)unused;
    call->runs = 0;
    if (call->error.status == HMOE_OK) {
        size_runs(call);
        show_weights(call);
    }
    tell(call, start, worker);
    moe_task_end(call);
}
