/* A chain's way through the matrix lane: a buffer, its rows packed, gmm1, gmm2, outputs returned, buffer given back.
 * Chains start in the order in which they became ready, as many at a time as there are buffers; so memory does not
 * grow with the rows received. Nothing waits: whoever finishes the last piece of a step starts the next one. */
#include "moe/plan.h"

/* The next chain that wants a buffer: one that other ranks wait for before one of a shared expert. */
static bool pop_ready(struct moe_plan *plan, struct rt_task *ready)
{
    return rt_ring_pop(&plan->ready, ready) || rt_ring_pop(&plan->spare, ready);
}

/* Shared experts' chains, and all weight gradients, run in the gaps of the others. */
enum rt_lane moe_lane(const struct moe_call *call, const struct moe_chain *chain)
{
    return chain - call->chain < call->shared_chains ? RT_FILL : RT_MATRIX;
}

/* Gives buffers to ready chains. Called after pushing to either ring. The fences order that push before our look at
 * the other ring, so of two threads that each pushed one half of a match at least one sees both. */
void moe_pump(struct moe_plan *plan)
{
    struct rt_task buffer, ready;

    for (;;) {
        struct moe_call *call;
        struct moe_chain *chain;
        atomic_thread_fence(memory_order_seq_cst);
        if (!rt_ring_pop(&plan->free_buffers, &buffer))
            return;
        if (!pop_ready(plan, &ready)) {
            rt_ring_push(&plan->free_buffers, &buffer);
            atomic_thread_fence(memory_order_seq_cst);
            if (rt_ring_empty(&plan->ready) && rt_ring_empty(&plan->spare))
                return;
            continue;
        }
        call = &plan->call[ready.argument >> 32];
        chain = &call->chain[(uint32_t)ready.argument];
        chain->buffer = (int32_t)buffer.argument;
        moe_push(call, moe_lane(call, chain), call->kind == MOE_FORWARD ? moe_chain_start : moe_back_chain_start,
                 (uint32_t)ready.argument);
    }
}

/* The chain has done all it had to: its buffer is free, the call owes it no more. */
void moe_chain_done(struct moe_call *call, const struct moe_chain *chain, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    bool shared = chain - call->chain < call->shared_chains;

    rt_ring_push(&plan->free_buffers, &(struct rt_task){.argument = (uint64_t)chain->buffer});
    moe_pump(plan);
    if (shared) {
        moe_shared_done(call, worker);
        return;
    }
    moe_looked(call);
    moe_duty_done(call, worker);
}

/* The block has its outputs: bring them home. */
void moe_block_done(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker)
{
    int64_t ready_ns = call->chain[block->chain].ready_ns;

    if (call->plan->shape.materialise)
        moe_copy_out(call, block, worker);
    moe_return_block(call, block);
    if (ready_ns)
        moe_span_end(worker, call, ready_ns, moe_block_span(call, block, TRACE_BLOCK));
}

uint64_t moe_piece(const struct moe_call *call, const struct moe_block *block, int strip)
{
    return (uint64_t)(block - call->block) << 8 | (uint64_t)strip;
}

static void gmm2_piece(struct moe_call *call, uint64_t which, struct rt_worker *worker)
{
    const struct moe_block *block = &call->block[which >> 8];
    struct moe_chain *chain = &call->chain[block->chain];

    if (moe_failed(call->plan))
        return;
    moe_gmm2(call, block, (int)(which & 0xff), worker);
    if (chain->strips == 1)
        moe_block_done(call, block, worker);
    if (!rt_event_raise(&chain->gmm2, 1))
        return;
    if (chain->strips > 1)
        moe_block_done(call, block, worker);
    moe_chain_done(call, chain, worker);
}

static void gmm2_task(void *context, uint64_t which, struct rt_worker *worker)
{
    gmm2_piece(context, which, worker);
    moe_task_end(context);
}

void moe_share(struct moe_call *call, const struct moe_chain *chain, moe_task_fn task)
{
    for (int32_t b = chain->blocks - 1; b >= 0; b--)
        for (int strip = chain->strips - 1; strip >= (b == 0); strip--)
            moe_push(call, moe_lane(call, chain), task, moe_piece(call, &call->block[chain->first_block + b], strip));
}

static void gmm1_piece(struct moe_call *call, uint64_t which, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const struct moe_block *block = &call->block[which >> 8];
    struct moe_chain *chain = &call->chain[block->chain];
    void *x = plan->buffer[chain->buffer].x;

    if (moe_failed(plan))
        return;
    if (chain->strips == 1) {
        x = plan->bench[worker->index].x;
        if (plan->shape.materialise)
            moe_copy_in(call, block, worker);
        moe_pack_block(call, block, x, worker);
    }
    moe_gmm1(call, block, x, (int)(which & 0xff), worker);
    if (!rt_event_raise(&chain->gmm1, 1))
        return;
    moe_share(call, chain, gmm2_task);
    gmm2_piece(call, moe_piece(call, &call->block[chain->first_block], 0), worker);
}

static void gmm1_task(void *context, uint64_t which, struct rt_worker *worker)
{
    gmm1_piece(context, which, worker);
    moe_task_end(context);
}

/* The rows are there and the buffer is ours. A block that several workers share is packed once, before. */
void moe_chain_start(void *context, uint64_t index, struct rt_worker *worker)
{
    struct moe_call *call = context;
    struct moe_plan *plan = call->plan;
    struct moe_chain *chain = &call->chain[index];
    struct moe_block *first = &call->block[chain->first_block];

    if (!moe_failed(plan)) {
        for (int32_t b = 0; b < chain->blocks; b++)
            first[b].a = plan->shape.keep_a ? call->kept_a + (size_t)(chain->first_block + b) * plan->a_bytes
                                            : plan->buffer[chain->buffer].a;
        if (chain->strips > 1 && plan->shape.materialise)
            moe_copy_in(call, first, worker);
        if (chain->strips > 1)
            moe_pack_block(call, first, plan->buffer[chain->buffer].x, worker);
        rt_event_arm(&chain->gmm1, (uint64_t)(chain->blocks * chain->strips));
        rt_event_arm(&chain->gmm2, (uint64_t)(chain->blocks * chain->strips));
        moe_share(call, chain, gmm1_task);
        gmm1_piece(call, moe_piece(call, first, 0), worker);
    }
    moe_task_end(call);
}
