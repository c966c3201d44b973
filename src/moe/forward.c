/* A call as a recipe, forward and backward alike.
 *
 *   start      the call takes its slot; whatever is wrong with its tensors travels with its counts row     (call)
 *   route      once every rank has retired the slot's last call: ids -> counts, order of my slots       (1_route)
 *   lay out    once every rank's counts row is in: experts, blocks, chains, goals of all events           (below)
 *   arrive     rows become reachable; a chain that has all its rows becomes ready                    (3_dispatch)
 *   chain      pack, gmm1 with SwiGLU, gmm2, outputs home                                    (chain, 2, 4, 5, 6)
 *              backward: pack, dact, dgmm, dx home; weight gradients in the gaps          (backward, 2, 4, 5, 6)
 *   combine    a run of tokens whose outputs are all in -> y or dx                                    (7_combine)
 *   end        all chains, runs and chunks done: retire, wake the caller                                   (call)
 *
 * The poll moves calls along whatever other ranks raised; tasks move everything else.
 */
#include "moe/plan.h"

#include <string.h>

/* ---- lay out */

static int64_t chunks_of(const struct moe_call *call, int source)
{
    const struct moe_counts *counts = moe_counts_of(call, source);

    if (call->plan->shape.same_memory || call->plan->shape.ranks == 1)
        return 0;
    return (counts->tokens + counts->chunk_tokens - 1) / counts->chunk_tokens;
}

/* The goals of everything that other ranks raise. Returns how many chunks I send and receive. */
static uint64_t expect_chunks(struct moe_call *call)
{
    uint64_t all = 0;

    for (int r = 0; r < call->plan->shape.ranks; r++) {
        size_t at = (size_t)r * MOE_CHUNKS_MAX;
        int64_t chunks = chunks_of(call, r);
        all += (uint64_t)chunks;
        memset(call->chunk_started + at, 1, MOE_CHUNKS_MAX);
        for (int64_t c = 0; c < chunks && r != call->plan->rank; c++) {
            call->chunk_goal[at + (size_t)c]++;
            call->chunk_started[at + (size_t)c] = 0;
        }
    }
    return all;
}

/* Sends what other processes need, and lets in what is reachable already. */
static void begin_rows(struct moe_call *call)
{
    struct moe_plan *plan = call->plan;

    for (int64_t c = 0; c < chunks_of(call, plan->rank); c++)
        moe_push(call, RT_VECTOR, moe_send_chunk, (uint64_t)c);
    for (int r = 0; r < plan->shape.ranks && !plan->bulk; r++)
        if (plan->shape.same_memory || r == plan->rank)
            moe_arrive(call, r, 0, moe_counts_of(call, r)->tokens);
    if (!plan->fill && !plan->bulk)
        moe_shared_start(call, call->chains);
}

static bool any_wants_dx(const struct moe_call *call)
{
    for (int r = 0; r < call->plan->shape.ranks; r++)
        if (moe_counts_of(call, r)->wants_dx)
            return true;
    return false;
}

static void lay_events(struct moe_call *call)
{
    struct moe_plan *plan = call->plan;
    uint64_t chunks = expect_chunks(call), chains;

    for (int64_t r = 0; r < call->runs; r++)
        call->run_goal[r] += call->run_slots[r];
    moe_lay_blocks(call);
    call->dx_wanted = any_wants_dx(call);
    call->began = true;
    chains = plan->bulk ? 0 : (uint64_t)(call->chains - call->shared_chains) + moe_chainless_pieces(call);
    moe_looking_begin(call);
    /* and one for laying out, one for the poll */
    rt_event_arm(&call->duties, chains + (uint64_t)call->runs + chunks + 2);
    if (plan->bulk)
        moe_bulk_begin(call, chunks);
}

static void run(struct moe_call *call)
{
    struct moe_plan *plan = call->plan;

    /* release: the poll that sees RUNNING sees all goals */
    atomic_store_explicit(&call->state, MOE_RUNNING, memory_order_release);
    begin_rows(call);
    if (!plan->bulk)
        moe_push_chainless(call);
    comm_ring(plan->host.comm, plan->rank); /* counters may have come before the state */
}

/* What shared experts have counted in, or will, was not in vain: the counters stand higher. */
static void refuse(struct moe_call *call)
{
    for (int64_t r = 0; r < call->runs && call->shared_chains; r++)
        call->run_goal[r] += (uint64_t)moe_shared_slots(call, r);
}

void moe_lay_out(void *context, uint64_t unused, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int64_t start = moe_span_begin(worker);

    (void)unused;
    if (moe_ranks_agree(call)) {
        lay_events(call);
        moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_LAYOUT, .expert = -1, .block = -1,
                                          .source = -1, .rows = (int32_t)call->rows});
        run(call);
        moe_looked(call);
    } else {
        refuse(call);
    }
    moe_shared_done(call, worker); /* the one for laying out; from here the call may end */
    moe_task_end(call);
}

/* ---- the poll: what other ranks raised */

static uint64_t counter(const struct moe_call *call, size_t piece, size_t index)
{
    return comm_counter(&call->plan->window, moe_offset(call, piece) + index * 8);
}

static void poll_started(struct moe_call *call)
{
    for (int r = 0; r < call->plan->shape.ranks; r++)
        if (!rt_reached(counter(call, call->plan->at.retired, (size_t)r), call->retired_goal))
            return;
    call->retired_goal++;
    atomic_store_explicit(&call->state, MOE_ROUTING, memory_order_relaxed); /* only the poll looks at this one */
    moe_push(call, RT_VECTOR, call->kind == MOE_FORWARD ? moe_route : moe_route_back, 0);
}

static void poll_counting(struct moe_call *call)
{
    if (!rt_reached(counter(call, call->plan->at.counts_in, 0), call->counts_goal))
        return;
    atomic_store_explicit(&call->state, MOE_LAYING, memory_order_relaxed); /* only the poll looks at this one */
    moe_push(call, RT_VECTOR, moe_lay_out, 0);
}

/* What arrived begins; true when nothing is left to arrive. */
static bool poll_chunks(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    size_t chunks = plan->shape.same_memory ? 0 : (size_t)plan->shape.ranks * MOE_CHUNKS_MAX;
    bool all = true;

    for (size_t c = 0; c < chunks; c++) {
        if (!call->chunk_started[c] && rt_reached(counter(call, plan->at.chunks, c), call->chunk_goal[c])) {
            call->chunk_started[c] = 1;
            moe_push(call, RT_COMM, moe_arrive_chunk, c);
        }
        all = all && call->chunk_started[c];
    }
    return all;
}

static bool poll_runs(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    bool all = true;

    for (int64_t r = 0; r < call->runs; r++) {
        if (!call->run_started[r] && rt_reached(counter(call, plan->at.returned, (size_t)r), call->run_goal[r])) {
            call->run_started[r] = 1;
            moe_push(call, RT_VECTOR, moe_combine_run, (uint64_t)r);
        }
        all = all && call->run_started[r];
    }
    return all;
}

/* The poll has a duty of its own: a call does not end, and begin anew, under its eyes. */
static void poll_running(struct moe_call *call, struct rt_worker *worker)
{
    bool chunks = poll_chunks(call), runs = call->plan->bulk ? moe_bulk_poll(call) : poll_runs(call);

    if (!chunks || !runs || !moe_looked_by_all(call))
        return;
    atomic_store_explicit(&call->state, MOE_POLLED, memory_order_relaxed); /* only the poll looks at this one */
    moe_duty_done(call, worker);
}

static void poll_call(struct moe_call *call, struct rt_worker *worker)
{
    switch (atomic_load_explicit(&call->state, memory_order_acquire)) {
    case MOE_STARTED:
        poll_started(call);
        break;
    case MOE_COUNTING:
        poll_counting(call);
        break;
    case MOE_RUNNING:
        poll_running(call, worker);
        break;
    default:
        break;
    }
    moe_watch(call);
}

void moe_poll(void *context, struct rt_worker *worker)
{
    struct moe_plan *plan = context;

    if (moe_failed(plan)) {
        moe_end_failed(plan);
        return;
    }
    for (int i = 0; i < plan->shape.calls_max; i++) /* the others wait for no rank */
        poll_call(&plan->call[i], worker);
}
