/* A backward's chain: all blocks of an expert.
 *
 *   prepare   rows of dY noted and packed; gate and up made again where they were not kept      (2, 4)
 *   dact      dY x down_proj, the gradient of SwiGLU -> dH, a, d_weight's sums                    (6)
 *   dgmm      dH x up_proj -> dx of every slot, home with d_weight                             (4, 7)
 *   dweight   gradients of the expert's weights, in the lane that fills gaps: from dact on  (dweight)
 *
 * The chain ends, and gives its buffer back, when both dgmm and dweight are done. backward_input leaves dweight to a
 * call of its own, which knows no other rank and takes what it needs from the saved state.
 */
#include "moe/plan.h"

/* The room of a chain's expert: in the saved state when it must outlast the call, in the bulk path's arrays, or in the
 * chain's buffer. Gate and up stand in the saved state unless they are made again. */
struct moe_back moe_chain_back(const struct moe_call *call, const struct moe_chain *chain)
{
    int32_t expert = call->block[chain->first_block].expert;
    int64_t row = call->expert[expert].row;
    struct moe_back kept = moe_back_at(call, call->saved->back, expert, row), back;

    if (call->kind == MOE_BACKWARD_INPUT)
        return kept;
    if (call->plan->bulk)
        back = moe_back_at(call, call->bulk_back, expert, row);
    else
        back = call->plan->buffer[chain->buffer].back;
    if (!call->saved->recompute)
        back.gate_up = kept.gate_up;
    return back;
}

struct moe_back moe_block_back(const struct moe_call *call, const struct moe_block *block)
{
    struct moe_back back = moe_chain_back(call, &call->chain[block->chain]);

    return moe_back_skip(call, back, block->expert, block->first);
}

/* Everything before dact. dy: room for the packed rows. */
void moe_back_prepare(struct moe_call *call, const struct moe_block *block, void *dy, struct rt_worker *worker)
{
    struct moe_back back = moe_block_back(call, block);

    moe_note_rows(call, block, back);
    if (call->saved->recompute)
        moe_gmm1_again(call, block, back, worker);
    moe_pack_dy(call, block, back, dy, worker);
}

static void *packed(const struct moe_call *call, const struct moe_block *block)
{
    const struct moe_plan *plan = call->plan;
    const struct moe_chain *chain = &call->chain[block->chain];
    size_t index = (size_t)(block - call->block - chain->first_block);

    return (char *)plan->buffer[chain->buffer].x + index * plan->x_bytes;
}

/* ---- dweight */

/* One piece, wherever its expert's values are. */
void moe_dweight_of(struct moe_call *call, int32_t expert, int piece, struct rt_worker *worker)
{
    const struct moe_expert *at = &call->expert[expert];
    struct moe_back back = {0}; /* an expert without rows has nothing to look up */

    if (at->rows && call->kind == MOE_BACKWARD_WEIGHT)
        back = moe_back_at(call, call->saved->back, expert, at->row);
    else if (at->rows)
        back = moe_chain_back(call, &call->chain[at->first_chain]);
    moe_dweight(call, expert, back, piece, worker);
}

static void dweight_task(void *context, uint64_t which, struct rt_worker *worker)
{
    struct moe_call *call = context;
    int32_t expert = (int32_t)(which >> 8);
    struct moe_chain *chain = &call->chain[call->expert[expert].first_chain];

    if (!moe_failed(call->plan)) {
        moe_dweight_of(call, expert, (int)(which & 0xff), worker);
        if (rt_event_raise(&chain->end, 1))
            moe_chain_done(call, chain, worker);
    }
    moe_task_end(call);
}

static void push_pieces(struct moe_call *call, int32_t expert, moe_task_fn task)
{
    int pieces = moe_dweight_pieces(call, expert);

    for (int piece = 0; piece < pieces; piece++)
        moe_push(call, RT_FILL, task, (uint64_t)expert << 8 | (uint64_t)piece);
}

static void begin_dweight(struct moe_call *call, struct moe_chain *chain)
{
    int32_t expert = call->block[chain->first_block].expert;

    rt_event_arm(&chain->end, (uint64_t)moe_dweight_pieces(call, expert) + 1);
    push_pieces(call, expert, dweight_task);
}

/* ---- dgmm */

static void dx_home(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker)
{
    moe_return_weights(call, block, moe_block_back(call, block));
    moe_block_done(call, block, worker);
}

static void chain_home(struct moe_call *call, const struct moe_chain *chain, struct rt_worker *worker)
{
    for (int32_t b = 0; b < chain->blocks; b++)
        dx_home(call, &call->block[chain->first_block + b], worker);
}

/* A shared expert's dx stays here, a routed one's is wanted when any rank wants its dx. */
static bool dx_wanted(const struct moe_call *call, const struct moe_chain *chain)
{
    if (moe_width(call->plan, call->block[chain->first_block].expert))
        return call->in.grad.dx != NULL;
    return call->dx_wanted;
}

static void dgmm_piece(struct moe_call *call, uint64_t which, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const struct moe_block *block = &call->block[which >> 8];
    struct moe_chain *chain = &call->chain[block->chain];
    void *dh = chain->strips == 1 ? plan->bench[worker->index].x : packed(call, block);
    bool wanted = dx_wanted(call, chain);

    if (moe_failed(plan))
        return;
    if (chain->strips == 1 && wanted)
        moe_pack_dh(call, block, moe_block_back(call, block), dh, worker);
    if (wanted)
        moe_dgmm(call, block, dh, (int)(which & 0xff), worker);
    if (chain->strips == 1)
        dx_home(call, block, worker);
    if (!rt_event_raise(&chain->gmm2, 1))
        return;
    if (chain->strips > 1)
        chain_home(call, chain, worker);
    if (rt_event_raise(&chain->end, 1))
        moe_chain_done(call, chain, worker);
}

static void dgmm_task(void *context, uint64_t which, struct rt_worker *worker)
{
    dgmm_piece(context, which, worker);
    moe_task_end(context);
}

static void begin_dgmm(struct moe_call *call, struct moe_chain *chain, struct rt_worker *worker)
{
    const struct moe_block *first = &call->block[chain->first_block];

    for (int32_t b = 0; b < chain->blocks && chain->strips > 1 && dx_wanted(call, chain); b++)
        moe_pack_dh(call, &first[b], moe_block_back(call, &first[b]), packed(call, &first[b]), worker);
    rt_event_arm(&chain->gmm2, (uint64_t)(chain->blocks * chain->strips));
    moe_share(call, chain, dgmm_task);
    dgmm_piece(call, moe_piece(call, first, 0), worker);
}

/* ---- dact */

static void dact_piece(struct moe_call *call, uint64_t which, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const struct moe_block *block = &call->block[which >> 8];
    struct moe_chain *chain = &call->chain[block->chain];
    void *dy = chain->strips == 1 ? plan->bench[worker->index].x : packed(call, block);

    if (moe_failed(plan))
        return;
    if (chain->strips == 1) {
        if (plan->shape.materialise)
            moe_copy_in(call, block, worker);
        moe_back_prepare(call, block, dy, worker);
    }
    moe_dact(call, block, moe_block_back(call, block), dy, (int)(which & 0xff), worker);
    if (!rt_event_raise(&chain->gmm1, 1))
        return;
    begin_dweight(call, chain);
    begin_dgmm(call, chain, worker);
}

static void dact_task(void *context, uint64_t which, struct rt_worker *worker)
{
    dact_piece(context, which, worker);
    moe_task_end(context);
}

/* The rows are there and the buffer is ours. Blocks that several workers share are prepared once, before. */
void moe_back_chain_start(void *context, uint64_t index, struct rt_worker *worker)
{
    struct moe_call *call = context;
    struct moe_chain *chain = &call->chain[index];
    const struct moe_block *first = &call->block[chain->first_block];

    if (!moe_failed(call->plan)) {
        for (int32_t b = 0; b < chain->blocks && chain->strips > 1; b++) {
            if (call->plan->shape.materialise)
                moe_copy_in(call, &first[b], worker);
            moe_back_prepare(call, &first[b], packed(call, &first[b]), worker);
        }
        rt_event_arm(&chain->gmm1, (uint64_t)(chain->blocks * chain->strips));
        moe_share(call, chain, dact_task);
        dact_piece(call, moe_piece(call, first, 0), worker);
    }
    moe_task_end(call);
}

/* ---- ranks that share memory read each other's x and dY where they are, for weight gradients even after the dx of
 * these rows is home. So a rank's backward ends when every rank has told that it looks no more. */

void moe_looking_begin(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;

    call->looks = call->kind == MOE_BACKWARD && shape->same_memory && shape->ranks > 1 && !call->plan->bulk;
    if (!call->looks)
        return;
    call->looked_goal += (uint64_t)shape->ranks;
    rt_event_arm(&call->looking, (uint64_t)(call->chains - call->shared_chains) + 1);
}

/* One chain less, or laying out is over. */
void moe_looked(struct moe_call *call)
{
    if (call->looks && rt_event_raise(&call->looking, 1))
        moe_signal_all(call->plan, moe_offset(call, call->plan->at.looked));
}

bool moe_looked_by_all(const struct moe_call *call)
{
    size_t at = moe_offset(call, call->plan->at.looked);

    return !call->looks || rt_reached(comm_counter(&call->plan->window, at), call->looked_goal);
}

/* ---- pieces that no chain has: of experts without rows, and of a call that makes weight gradients alone */

static void piece_task(void *context, uint64_t which, struct rt_worker *worker)
{
    struct moe_call *call = context;

    if (!moe_failed(call->plan))
        moe_dweight_of(call, (int32_t)(which >> 8), (int)(which & 0xff), worker);
    moe_duty_done(call, worker);
    moe_task_end(call);
}

static bool chainless(const struct moe_call *call, int32_t expert)
{
    return call->kind == MOE_BACKWARD_WEIGHT || !call->expert[expert].rows;
}

uint64_t moe_chainless_pieces(const struct moe_call *call)
{
    uint64_t count = 0;

    for (int32_t e = 0; e < call->plan->shape.local + call->plan->shape.shared; e++)
        count += chainless(call, e) ? (uint64_t)moe_dweight_pieces(call, e) : 0;
    return count;
}

void moe_push_chainless(struct moe_call *call)
{
    for (int32_t e = 0; e < call->plan->shape.local + call->plan->shape.shared; e++)
        if (chainless(call, e))
            push_pieces(call, e, piece_task);
}

void moe_weight_begin(void *context, uint64_t unused, struct rt_worker *worker)
{
    struct moe_call *call = context;

    (void)unused;
    moe_place_rows(call);
    moe_shared_place(call);
    rt_event_arm(&call->duties, moe_chainless_pieces(call) + 1);
    moe_push_chainless(call);
    moe_duty_done(call, worker);
    moe_task_end(call);
}
