/* What a rank receives, cut up: rows by expert, blocks of about equal height, chains, column strips. */
#include "moe/plan.h"

/* Rows of each local expert, with each source's place among them. */
static void count_rows(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    uint32_t *base = call->saved ? call->saved->base : call->own_base;

    call->base = base;
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

/* A backward finds them in the saved state. */
static void recall_rows(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;

    call->base = call->saved->base;
    call->rows = 0;
    for (int e = 0; e < shape->local; e++) {
        uint32_t rows = call->base[(e + 1) * (shape->ranks + 1) - 1];
        call->expert[e] = (struct moe_expert){.rows = rows, .row = call->rows};
        call->rows += rows;
    }
}

/* Where the rows of each expert stand. */
void moe_place_rows(struct moe_call *call)
{
    if (call->kind != MOE_FORWARD) {
        recall_rows(call);
        return;
    }
    count_rows(call);
    if (call->saved)
        moe_saved_fill(call);
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
    chain->strips = 1;
    if (rows)
        rt_event_arm(&chain->arrived, rows);
    for (int32_t b = 0; b < blocks; b++)
        call->block[first_block + b].chain = call->chains;
    call->chains++;
}

static const struct kern_engine *engine_for(const struct moe_call *call, uint32_t rows)
{
    const struct kern_choice *choice = &call->plan->choice;

    return call->kind == MOE_FORWARD ? kern_pick(choice, rows) : choice->back;
}

/* Cuts an expert's rows into blocks and chains. */
void moe_add_expert(struct moe_call *call, int32_t e)
{
    struct moe_plan *plan = call->plan;
    struct moe_expert *expert = &call->expert[e];
    uint32_t height = block_height(call, expert->rows);
    bool wave = plan->wave || moe_width(plan, e);
    int32_t first = call->blocks;

    for (uint32_t at = 0; at < expert->rows; at += height) {
        uint32_t rows = expert->rows - at < height ? expert->rows - at : height;
        call->block[call->blocks++] = (struct moe_block){.expert = e, .first = at, .rows = rows,
            .row = expert->row + at, .engine = engine_for(call, rows)};
    }
    expert->first_chain = call->chains;
    if (plan->shape.keep_a || call->kind != MOE_FORWARD) {
        add_chain(call, first, call->blocks - first, expert->rows);
    } else {
        for (int32_t b = first; b < call->blocks; b++)
            add_chain(call, b, 1, wave ? call->block[b].rows : b == first ? expert->rows : 0);
    }
    expert->chains = call->chains - expert->first_chain;
}

/* Column strips, so that few blocks still keep all workers busy: the fewest that leave less than 1/16 idle. */
static int strips_for(const struct moe_call *call, int blocks)
{
    const struct moe_plan *plan = call->plan;
    int workers = plan->shape.workers - plan->host.pool->vector_workers, strips = 1;

    if (plan->shape.keep_a)
        return 1;
    if (plan->knobs.value[KNOB_STRIPS])
        return (int)plan->knobs.value[KNOB_STRIPS];
    while (blocks && strips < 8 && blocks < 4 * workers) {
        int pieces = blocks * strips, rounds = (pieces + workers - 1) / workers;
        if (rounds * workers * 16 <= pieces * 17)
            break;
        strips++;
    }
    return strips;
}

/* Of the chains from `first_chain` on, whose blocks start at `first_block`. */
void moe_choose_strips(struct moe_call *call, int32_t first_chain, int32_t first_block)
{
    int strips = strips_for(call, call->blocks - first_block);

    for (int32_t c = first_chain; c < call->chains; c++)
        call->chain[c].strips = strips;
}

void moe_lay_blocks(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    int32_t chains = call->chains, blocks = call->blocks;

    moe_place_rows(call);
    sort_experts(call);
    for (int32_t i = 0; i < call->active; i++)
        moe_add_expert(call, call->by_rows[i]);
    if (!plan->fill)
        moe_shared_add(call);
    moe_choose_strips(call, chains, blocks);
}
