/* Where an expert's rows come from: a routed expert's stand in the order (source rank, token, k). Each source keeps the
 * list of its slots by expert in its window, so a row's source and slot are looked up, never sent; a saved state keeps
 * the slots. A shared expert's rows are this rank's tokens. */
#include "moe/plan.h"

static const uint32_t *bases(const struct moe_call *call, int32_t expert)
{
    return call->base + (size_t)expert * (size_t)(call->plan->shape.ranks + 1);
}

const uint32_t *moe_source_slots(const struct moe_call *call, int source, int32_t expert)
{
    const struct moe_plan *plan = call->plan;
    const uint32_t *offset;

    if (call->saved && call->kind != MOE_FORWARD)
        return call->saved->slot + call->expert[expert].row + bases(call, expert)[source];
    offset = moe_counts_of(call, source)->offset + (size_t)plan->rank * (size_t)plan->shape.local;
    return (const uint32_t *)(const void *)moe_at(call, source, plan->at.order) + offset[expert];
}

void moe_rows_begin(struct moe_row_walk *walk, const struct moe_call *call, const struct moe_block *block)
{
    *walk = (struct moe_row_walk){.call = call, .expert = block->expert, .at = block->first,
                                  .end = block->first + block->rows};
    if (moe_width(call->plan, block->expert))
        walk->source = call->plan->rank;
}

bool moe_rows_next(struct moe_row_walk *walk, struct moe_row *row)
{
    const struct moe_call *call = walk->call;
    const uint32_t *base;

    if (walk->at == walk->end)
        return false;
    if (moe_width(call->plan, walk->expert)) {
        *row = (struct moe_row){call->plan->rank, walk->at++ * (uint32_t)call->plan->shape.topk};
        return true;
    }
    base = bases(call, walk->expert);
    while (base[walk->source + 1] <= walk->at)
        walk->source++;
    row->source = walk->source;
    row->slot = moe_source_slots(call, walk->source, walk->expert)[walk->at - base[walk->source]];
    walk->at++;
    return true;
}

/* The row of the slot's token: in the tensor itself where ranks share memory or the rank is this one, else in its
 * window's copy. */
const char *moe_row_in(const struct moe_call *call, struct moe_row row, enum moe_feed feed)
{
    const struct moe_plan *plan = call->plan;
    size_t token = row.slot / (uint32_t)plan->shape.topk;
    const char *rows;

    if (row.source == plan->rank)
        rows = feed == MOE_X ? call->in.x : call->in.grad.dy;
    else if (plan->shape.same_memory)
        rows = moe_counts_of(call, row.source)->feed[feed];
    else
        rows = moe_at(call, row.source, plan->at.feed[feed]);
    return rows + token * plan->shape.row_bytes;
}

/* The slot's place in its home rank's window; a shared expert's outputs stay here, one for each token. */
char *moe_row_out(const struct moe_call *call, struct moe_row row, int32_t expert)
{
    const struct moe_shape *shape = &call->plan->shape;
    size_t token = row.slot / (uint32_t)shape->topk;

    if (expert < shape->local)
        return moe_at(call, row.source, call->plan->at.slots) + (size_t)row.slot * shape->row_bytes;
    return call->shared_out + ((size_t)(expert - shape->local) * (size_t)shape->tokens_max + token) * shape->row_bytes;
}

int64_t moe_tap_rows(const struct moe_plan *plan, int32_t *source, int64_t *slot, int64_t rows_max)
{
    const struct moe_call *call = &plan->call[(plan->started - 1) % (uint64_t)plan->shape.calls_max];

    for (int32_t b = 0; b < call->blocks && call->rows <= rows_max; b++) {
        struct moe_row_walk walk;
        struct moe_row row;
        if (moe_width(plan, call->block[b].expert))
            continue;
        moe_rows_begin(&walk, call, &call->block[b]);
        for (int64_t i = call->block[b].row; moe_rows_next(&walk, &row); i++) {
            source[i] = row.source;
            slot[i] = row.slot;
        }
    }
    return call->rows;
}

const void *moe_tap_slots(const struct moe_plan *plan)
{
    const struct moe_call *call = &plan->call[(plan->started - 1) % (uint64_t)plan->shape.calls_max];

    return moe_at(call, plan->rank, plan->at.slots);
}
