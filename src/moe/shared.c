/* Shared experts: every token of this rank goes through each of them, so their chains need no other rank. They are laid
 * out with the routing, before the counts of the other ranks are in, and run in the lane that fills gaps: the wait for
 * counts, and for rows that come back. Their outputs stay here, are counted in like any other, and are added last. */
#include "moe/plan.h"

/* What a run of my tokens waits for from them. */
int64_t moe_shared_slots(const struct moe_call *call, int64_t run)
{
    int64_t left = call->in.tokens - run * call->run_tokens;

    return call->plan->shape.shared * (left < call->run_tokens ? left : call->run_tokens);
}

void moe_shared_place(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;

    for (int s = 0; s < shape->shared; s++)
        call->expert[shape->local + s] = (struct moe_expert){.rows = (uint32_t)call->in.tokens,
                                                             .row = shape->rows_max + s * shape->tokens_max};
}

void moe_shared_add(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;

    moe_shared_place(call);
    for (int s = 0; s < shape->shared && call->in.tokens; s++)
        moe_add_expert(call, shape->local + s);
}

/* Their chains come first in the call's tables; blocks.c adds those of the routed experts behind them. The event holds
 * one for each chain, and one for laying out, which every call does. */
void moe_shared_lay(struct moe_call *call)
{
    call->blocks = call->chains = 0;
    call->began = false;
    call->rows = 0;
    if (call->plan->fill && call->error.status == HMOE_OK)
        moe_shared_add(call);
    moe_choose_strips(call, 0, 0);
    call->shared_chains = call->chains;
    rt_event_arm(&call->shared, (uint64_t)call->shared_chains + 1);
}

/* All their rows are here. chains: those laid out so far. */
void moe_shared_start(struct moe_call *call, int32_t chains)
{
    for (int32_t c = 0; c < chains; c++) {
        struct moe_chain *chain = &call->chain[c];
        const struct moe_block *from = &call->block[chain->first_block], *to = from + chain->blocks - 1;
        if (moe_width(call->plan, from->expert) &&
            rt_event_raise(&chain->arrived, to->first + to->rows - from->first))
            moe_ready(call, c);
    }
    moe_pump(call->plan);
}

/* One of their chains is done, or laying out is. A call that the ranks refused ends with them. */
void moe_shared_done(struct moe_call *call, struct rt_worker *worker)
{
    if (!rt_event_raise(&call->shared, 1))
        return;
    if (call->began)
        moe_duty_done(call, worker);
    else
        moe_call_end(call, worker);
}
