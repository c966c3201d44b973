/* The bulk path (knob path=bulk): the same kernels, one stage after the other, with a barrier over all ranks between
 * stages and materialised permutes. It is the unfused baseline that the fused path is measured against, and a second
 * check of it: other order, same bits.
 *
 *   0 send   1 permute   2 gmm1 (with SwiGLU)   3 gmm2   4 unpermute to the home ranks   5 combine
 */
#include "moe/plan.h"

enum { STAGE_SEND = 0, STAGE_PERMUTE, STAGE_GMM1, STAGE_GMM2, STAGE_UNPERMUTE, STAGE_COMBINE };

/* The last piece of my part tells every rank; the barrier's goal counts one from each. */
static void stage_done(struct moe_call *call)
{
    if (rt_event_raise(&call->stage, 1))
        moe_signal_all(call->plan, moe_offset(call, call->plan->at.barrier));
}

static void work(struct moe_call *call, struct moe_block *block, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    void *x = plan->bench[worker->index].x;

    switch (call->stage_at) {
    case STAGE_PERMUTE:
        moe_copy_in(call, block, worker);
        break;
    case STAGE_GMM1:
        block->a = plan->kept_a + (size_t)(block - call->block) * plan->a_bytes;
        moe_pack_block(call, block, x, worker);
        moe_gmm1(call, block, x, 0, worker);
        break;
    case STAGE_GMM2:
        moe_gmm2(call, block, 0, worker);
        break;
    case STAGE_UNPERMUTE:
        moe_copy_out(call, block, worker);
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

/* One more chunk sent or received. */
void moe_bulk_chunk(struct moe_call *call)
{
    stage_done(call);
}

static void begin_blocks(struct moe_call *call)
{
    int stage = call->stage_at;
    enum rt_lane lane = stage == STAGE_GMM1 || stage == STAGE_GMM2 ? RT_MATRIX : RT_VECTOR;

    call->barrier_goal += (uint64_t)call->plan->shape.ranks;
    rt_event_arm(&call->stage, (uint64_t)call->blocks + 1);
    for (int32_t b = 0; b < call->blocks; b++)
        moe_push(call, lane, stage_task, (uint64_t)b);
    stage_done(call);
}

void moe_bulk_begin(struct moe_call *call, uint64_t chunks)
{
    call->stage_at = STAGE_SEND;
    call->barrier_goal += (uint64_t)call->plan->shape.ranks;
    rt_event_arm(&call->stage, chunks + 1);
    stage_done(call);
}

/* Past the barrier? Then the next stage begins; the duty of having served all stages ends with the last barrier. */
void moe_bulk_poll(struct moe_call *call, struct rt_worker *worker)
{
    const struct moe_plan *plan = call->plan;
    size_t at = moe_offset(call, plan->at.barrier);

    if (call->stage_at == STAGE_COMBINE || !rt_reached(comm_counter(&plan->window, at), call->barrier_goal))
        return;
    if (++call->stage_at < STAGE_COMBINE) {
        begin_blocks(call);
        return;
    }
    for (int64_t r = 0; r < call->runs; r++)
        moe_push(call, RT_VECTOR, moe_combine_run, (uint64_t)r);
    moe_duty_done(call, worker);
}
