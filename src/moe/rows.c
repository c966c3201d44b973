/* Where an expert's rows come from: its rows stand in the order (source rank, token, k). Each source keeps the list
 * of its slots by expert in its window, so a row's source and slot are looked up, never stored. */
#include "moe/plan.h"

static const uint32_t *bases(const struct moe_call *call, int32_t expert)
{
    return call->base + (size_t)expert * (size_t)(call->plan->shape.ranks + 1);
}

void moe_rows_begin(struct moe_row_walk *walk, const struct moe_call *call, const struct moe_block *block)
{
    const uint32_t *base = bases(call, block->expert);

    *walk = (struct moe_row_walk){.call = call, .expert = block->expert, .at = block->first,
                                  .end = block->first + block->rows};
    while (base[walk->source + 1] <= walk->at)
        walk->source++;
}

bool moe_rows_next(struct moe_row_walk *walk, struct moe_row *row)
{
    const struct moe_call *call = walk->call;
    const struct moe_plan *plan = call->plan;
    const uint32_t *base = bases(call, walk->expert), *order, *offset;

    if (walk->at == walk->end)
        return false;
    while (base[walk->source + 1] <= walk->at)
        walk->source++;
    order = (const void *)moe_at(call, walk->source, plan->at.order);
    offset = moe_counts_of(call, walk->source)->offset + (size_t)plan->rank * (size_t)plan->shape.local;
    row->source = walk->source;
    row->slot = order[offset[walk->expert] + walk->at - base[walk->source]];
    walk->at++;
    return true;
}

/* x of the row's token: the tensor itself where ranks share memory or the rank is this one, else its window's copy. */
const char *moe_row_in(const struct moe_call *call, struct moe_row row)
{
    const struct moe_plan *plan = call->plan;
    size_t token = row.slot / (uint32_t)plan->shape.topk;
    const char *x;

    if (row.source == plan->rank)
        x = call->in.x;
    else if (plan->shape.same_memory)
        x = moe_counts_of(call, row.source)->x;
    else
        x = moe_at(call, row.source, plan->at.x);
    return x + token * plan->shape.row_bytes;
}

/* The slot's place in its home rank's window. */
char *moe_row_out(const struct moe_call *call, struct moe_row row)
{
    const struct moe_plan *plan = call->plan;

    return moe_at(call, row.source, plan->at.slots) + (size_t)row.slot * plan->shape.row_bytes;
}

int64_t moe_tap_rows(const struct moe_plan *plan, int32_t *source, int64_t *slot, int64_t rows_max)
{
    const struct moe_call *call = &plan->call[(plan->started - 1) % (uint64_t)plan->shape.calls_max];

    for (int32_t b = 0; b < call->blocks && call->rows <= rows_max; b++) {
        struct moe_row_walk walk;
        struct moe_row row;
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
