/* The forward call as a recipe.
 *
 *   start      the call takes its slot; whatever is wrong with its tensors travels with its counts row
 *   route      once every rank has retired the slot's last call: ids -> counts, order of my slots     (1_route)
 *   lay out    once every rank's counts row is in: experts, blocks, chains, goals of all events        (below)
 *   arrive     rows become reachable; a chain that has all its rows becomes ready                      (3_dispatch)
 *   chain      pack, gmm1 with SwiGLU, gmm2, outputs home                                       (chain, 2, 4, 5, 6)
 *   combine    a run of tokens whose outputs are all in -> y                                           (7_combine)
 *   end        all chains, runs and chunks done: retire, wake the caller                                   (call)
 *
 * The poll moves calls along whatever other ranks raised; tasks move everything else.
 */
#include "moe/plan.h"

#include <inttypes.h>
#include <string.h>

/* ---- lay out: the same counts on every rank, so the same errors on every rank */

/* The largest T of the ranks that exceed tokens_max, in the error of all. */
static void fail_tokens(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t most = 0;
    int rank = 0;

    for (int r = 0; r < shape->ranks; r++)
        if (moe_counts_of(call, r)->tokens > most) {
            most = moe_counts_of(call, r)->tokens;
            rank = r;
        }
    base_fail(&call->error, HMOE_ERR_LIMIT,
              "tokens of rank %d is %" PRId64 ", the most of all ranks: tokens_max of the plan allows %" PRId64, rank,
              most, shape->tokens_max);
}

/* The error of the lowest rank that has one. */
static bool ranks_agree(struct moe_call *call)
{
    for (int r = 0; r < call->plan->shape.ranks; r++) {
        const struct moe_counts *counts = moe_counts_of(call, r);
        if (counts->status == HMOE_OK)
            continue;
        if (counts->status == HMOE_ERR_LIMIT)
            fail_tokens(call);
        else
            base_fail(&call->error, (enum hmoe_status)counts->status, "%s", counts->text);
        return false;
    }
    return true;
}

static int64_t rows_of_rank(const struct moe_call *call, int rank)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t rows = 0;

    for (int r = 0; r < shape->ranks; r++) {
        const uint32_t *offset = moe_counts_of(call, r)->offset + (size_t)rank * (size_t)shape->local;
        rows += offset[shape->local] - offset[0];
    }
    return rows;
}

static bool within_limit(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t most = 0;
    int rank = 0;

    for (int r = 0; r < shape->ranks && shape->receive_max > 0; r++) {
        int64_t rows = rows_of_rank(call, r);
        if (rows > most) {
            most = rows;
            rank = r;
        }
    }
    if (most <= shape->receive_max)
        return true;
    base_fail(&call->error, HMOE_ERR_LIMIT,
              "rank %d would receive %" PRId64 " rows, the most of all ranks: receive_max of the plan allows %" PRId64,
              rank, most, shape->receive_max);
    return false;
}

/* Rows of each local expert, with each source's place among them. */
static void count_rows(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    uint32_t *base = call->base;

    call->rows = 0;
    for (int e = 0; e < shape->local; e++) {
        uint32_t rows = 0;
        for (int r = 0; r < shape->ranks; r++) {
            const uint32_t *offset = moe_counts_of(call, r)->offset + call->plan->rank * shape->local + e;
            *base++ = rows;
            rows += offset[1] - offset[0];
        }
        *base++ = rows;
        call->expert[e] = (struct moe_expert){.rows = rows, .row = call->rows};
        call->rows += rows;
    }
}

/* Experts with rows, most rows first (equal ones in order): what takes longest starts first. */
static void sort_experts(struct moe_call *call)
{
    int32_t count = 0;

    for (int32_t e = 0; e < call->plan->shape.local; e++) {
        int32_t at = count;
        if (!call->expert[e].rows)
            continue;
        for (; at > 0 && call->expert[call->by_rows[at - 1]].rows < call->expert[e].rows; at--)
            call->by_rows[at] = call->by_rows[at - 1];
        call->by_rows[at] = e;
        count++;
    }
    call->active = count;
}

/* As few blocks as the tallest one allows, about equally tall, in whole tiles of 16 rows where that fits. */
static uint32_t block_height(const struct moe_call *call, uint32_t rows)
{
    uint32_t most = (uint32_t)call->plan->shape.block_rows, blocks = (rows + most - 1) / most;
    uint32_t height = ((rows + blocks - 1) / blocks + 15) / 16 * 16;

    return height < most ? height : most;
}

static void add_chain(struct moe_call *call, int32_t first_block, int32_t blocks, uint32_t rows)
{
    struct moe_chain *chain = &call->chain[call->chains];

    chain->first_block = first_block;
    chain->blocks = blocks;
    if (rows)
        rt_event_arm(&chain->arrived, rows);
    for (int32_t b = 0; b < blocks; b++)
        call->block[first_block + b].chain = call->chains;
    call->chains++;
}

static void cut_blocks(struct moe_call *call, int32_t e)
{
    struct moe_plan *plan = call->plan;
    struct moe_expert *expert = &call->expert[e];
    uint32_t height = block_height(call, expert->rows);
    int32_t first = call->blocks;

    for (uint32_t at = 0; at < expert->rows; at += height) {
        uint32_t rows = expert->rows - at < height ? expert->rows - at : height;
        call->block[call->blocks++] = (struct moe_block){.expert = e, .first = at, .rows = rows,
            .row = expert->row + at, .engine = kern_pick(&plan->choice, rows)};
    }
    expert->first_chain = call->chains;
    if (plan->shape.keep_a) {
        add_chain(call, first, call->blocks - first, expert->rows);
    } else {
        for (int32_t b = first; b < call->blocks; b++)
            add_chain(call, b, 1, plan->wave ? call->block[b].rows : b == first ? expert->rows : 0);
    }
    expert->chains = call->chains - expert->first_chain;
}

/* Column strips, so that few blocks still keep all workers busy: the fewest that leave less than 1/16 idle. */
static int choose_strips(const struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    int workers = plan->shape.workers - plan->host.pool->vector_workers, strips = 1;

    if (plan->shape.keep_a)
        return 1;
    if (plan->knobs.value[KNOB_STRIPS])
        return (int)plan->knobs.value[KNOB_STRIPS];
    while (call->blocks && strips < 8 && call->blocks < 4 * workers) {
        int pieces = call->blocks * strips, rounds = (pieces + workers - 1) / workers;
        if (rounds * workers * 16 <= pieces * 17)
            break;
        strips++;
    }
    return strips;
}

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

static void lay_blocks(struct moe_call *call)
{
    count_rows(call);
    sort_experts(call);
    call->blocks = call->chains = 0;
    for (int32_t i = 0; i < call->active; i++)
        cut_blocks(call, call->by_rows[i]);
    call->strips = choose_strips(call);
}

/* Sends what other processes need, and lets in what is reachable already. */
static void begin_rows(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;

    for (int64_t c = 0; c < chunks_of(call, plan->rank); c++)
        moe_push(call, RT_VECTOR, moe_send_chunk, (uint64_t)c);
    for (int r = 0; r < plan->shape.ranks && !plan->bulk; r++)
        if (plan->shape.same_memory || r == plan->rank)
            moe_arrive(call, r, 0, moe_counts_of(call, r)->tokens);
}

static void lay_events(struct moe_call *call)
{
    struct moe_plan *plan = call->plan;
    uint64_t chunks = expect_chunks(call);

    for (int64_t r = 0; r < call->runs; r++)
        call->run_goal[r] += call->run_slots[r];
    lay_blocks(call);
    rt_event_arm(&call->duties, (uint64_t)(plan->bulk ? 1 : call->chains) + (uint64_t)call->runs + chunks + 1);
    if (plan->bulk)
        moe_bulk_begin(call, chunks);
}

static void run(struct moe_call *call, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;

    /* release: the poll that sees RUNNING sees all goals */
    atomic_store_explicit(&call->state, MOE_RUNNING, memory_order_release);
    begin_rows(call);
    comm_ring(plan->host.comm, plan->rank); /* counters may have come before the state */
    moe_duty_done(call, worker); /* the one for laying out; from here the call may end */
}

void moe_lay_out(void *context, uint64_t unused, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int64_t start = moe_span_begin(worker);

    (void)unused;
    if (ranks_agree(call) && within_limit(call)) {
        lay_events(call);
        moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_LAYOUT, .expert = -1, .block = -1,
                                          .source = -1, .rows = (int32_t)call->rows});
        run(call, worker);
    } else {
        moe_call_end(call, worker);
    }
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
    moe_push(call, RT_VECTOR, moe_route, 0);
}

static void poll_counting(struct moe_call *call)
{
    if (!rt_reached(counter(call, call->plan->at.counts_in, 0), call->counts_goal))
        return;
    atomic_store_explicit(&call->state, MOE_LAYING, memory_order_relaxed); /* only the poll looks at this one */
    moe_push(call, RT_VECTOR, moe_lay_out, 0);
}

static void poll_running(struct moe_call *call, struct rt_worker *worker)
{
    const struct moe_plan *plan = call->plan;
    size_t chunks = plan->shape.same_memory ? 0 : (size_t)plan->shape.ranks * MOE_CHUNKS_MAX;

    for (size_t c = 0; c < chunks; c++)
        if (!call->chunk_started[c] && rt_reached(counter(call, plan->at.chunks, c), call->chunk_goal[c])) {
            call->chunk_started[c] = 1;
            moe_push(call, RT_COMM, moe_arrive_chunk, c);
        }
    if (plan->bulk)
        moe_bulk_poll(call, worker);
    for (int64_t r = 0; r < call->runs && !plan->bulk; r++)
        if (!call->run_started[r] && rt_reached(counter(call, plan->at.returned, (size_t)r), call->run_goal[r])) {
            call->run_started[r] = 1;
            moe_push(call, RT_VECTOR, moe_combine_run, (uint64_t)r);
        }
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
    for (int i = 0; i < plan->shape.calls_max; i++)
        poll_call(&plan->call[i], worker);
}
