/* The bulk path (knob path=bulk): the same kernels, one stage after the other, with a barrier over all ranks between
 * stages and materialised permutes. It is the unfused baseline that the fused path is measured against, and a second
 * check of it: other order, same bits.
 */
#include "moe/plan.h"

enum stage { SEND = 0, PERMUTE, GMM1, GMM2, DACT, DGMM, UNPERMUTE, DWEIGHT, COMBINE };

/* The stages of each kind of call, in order. */
static const enum stage forward[] = {SEND, PERMUTE, GMM1, GMM2, UNPERMUTE, COMBINE};
static const enum stage backward[] = {SEND, PERMUTE, DACT, DGMM, UNPERMUTE, DWEIGHT, COMBINE};

static enum stage stage_of(const struct moe_call *call)
{
    return call->kind == MOE_FORWARD ? forward[call->stage_at] : backward[call->stage_at];
}

/* The last piece of my part tells every rank; the barrier's goal counts one from each. */
static void stage_done(struct moe_call *call)
{
    if (rt_event_raise(&call->stage, 1))
        moe_signal_all(call->plan, moe_offset(call, call->plan->at.barrier));
}

static void gmm1(struct moe_call *call, struct moe_block *block, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    void *x = plan->bench[worker->index].x;

    block->a = call->kept_a + (size_t)(block - call->block) * plan->a_bytes;
    moe_pack_block(call, block, x, worker);
    moe_gmm1(call, block, x, 0, worker);
}

static void dact(struct moe_call *call, struct moe_block *block, struct rt_worker *worker)
{
    void *dy = call->plan->bench[worker->index].x;

    moe_back_prepare(call, block, dy, worker);
    moe_dact(call, block, moe_block_back(call, block), dy, 0, worker);
}

static void dgmm(struct moe_call *call, struct moe_block *block, struct rt_worker *worker)
{
    void *dh = call->plan->bench[worker->index].x;

    moe_pack_dh(call, block, moe_block_back(call, block), dh, worker);
    moe_dgmm(call, block, dh, 0, worker);
    moe_return_weights(call, block, moe_block_back(call, block));
}

static void work(struct moe_call *call, struct moe_block *block, struct rt_worker *worker)
{
    switch (stage_of(call)) {
    case PERMUTE:
        moe_copy_in(call, block, worker);
        break;
    case GMM1:
        gmm1(call, block, worker);
        break;
    case GMM2:
        moe_gmm2(call, block, 0, worker);
        break;
    case DACT:
        dact(call, block, worker);
        break;
    case DGMM:
        dgmm(call, block, worker);
        break;
    case UNPERMUTE:
        moe_copy_out(call, block, worker);
        break;
    default:
        break;
    }
}

/* A block's task in the stage that the call is at: the stage does not change before all of them are done. */
static void stage_task(void *context, uint64_t block, struct rt_worker *worker)
{
    struct moe_call *call = context;

    if (!moe_failed(call->plan))
        work(call, &call->block[block], worker);
    stage_done(call);
    moe_task_end(call);
}

static void dweight_task(void *context, uint64_t which, struct rt_worker *worker)
{
    struct moe_call *call = context;

    if (!moe_failed(call->plan))
        moe_dweight_of(call, (int32_t)(which >> 8), (int)(which & 0xff), worker);
    stage_done(call);
    moe_task_end(call);
}

/* One more chunk sent or received. */
void moe_bulk_chunk(struct moe_call *call)
{
    stage_done(call);
}

static void begin_dweights(struct moe_call *call)
{
    int32_t experts = call->plan->shape.local + call->plan->shape.shared;
    uint64_t pieces = 0;

    for (int32_t e = 0; e < experts; e++)
        pieces += (uint64_t)moe_dweight_pieces(call, e);
    rt_event_arm(&call->stage, pieces + 1);
    for (int32_t e = 0; e < experts; e++)
        for (int piece = moe_dweight_pieces(call, e) - 1; piece >= 0; piece--)
            moe_push(call, RT_FILL, dweight_task, (uint64_t)e << 8 | (uint64_t)piece);
    stage_done(call);
}

static void begin_blocks(struct moe_call *call)
{
    enum stage stage = stage_of(call);
    bool vector = stage == PERMUTE || stage == UNPERMUTE;

    rt_event_arm(&call->stage, (uint64_t)call->blocks + 1);
    for (int32_t b = 0; b < call->blocks; b++)
        moe_push(call, vector ? RT_VECTOR : RT_MATRIX, stage_task, (uint64_t)b);
    stage_done(call);
}

void moe_bulk_begin(struct moe_call *call, uint64_t chunks)
{
    call->stage_at = 0;
    call->barrier_goal += (uint64_t)call->plan->shape.ranks;
    rt_event_arm(&call->stage, chunks + 1);
    stage_done(call);
}

/* Past the barrier? Then the next stage begins. True once the last one has. */
bool moe_bulk_poll(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    size_t at = moe_offset(call, plan->at.barrier);

    if (!rt_reached(comm_counter(&plan->window, at), call->barrier_goal))
        return false;
    call->stage_at++;
    if (stage_of(call) != COMBINE) {
        call->barrier_goal += (uint64_t)plan->shape.ranks;
        if (stage_of(call) == DWEIGHT)
            begin_dweights(call);
        else
            begin_blocks(call);
        return false;
    }
    for (int64_t r = 0; r < call->runs; r++)
        moe_push(call, RT_VECTOR, moe_combine_run, (uint64_t)r);
    return true;
}
