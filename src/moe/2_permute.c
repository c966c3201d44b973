/* Stage 2, permute: rows [T,H] -> the kernels' packed rows, gathered by index while packing; nothing is permuted in
 * memory. For ranks in other processes, rows are copied in chunks into this rank's window, where they can be read. */
#include "moe/plan.h"

#include <string.h>

/* A backward brings dY, and x again where it was not kept. */
static bool sends(const struct moe_call *call, enum moe_feed feed)
{
    if (call->kind == MOE_FORWARD)
        return feed == MOE_X;
    return feed == MOE_DY || !call->saved->keep_rows;
}

static void copy_chunk(struct moe_call *call, enum moe_feed feed, int64_t first, int64_t last)
{
    const struct moe_plan *plan = call->plan;
    const char *from = feed == MOE_X ? call->in.x : call->in.grad.dy;
    size_t bytes = plan->shape.row_bytes;

    memcpy(moe_at(call, plan->rank, plan->at.feed[feed]) + (size_t)first * bytes, from + (size_t)first * bytes,
           (size_t)(last - first) * bytes);
}

/* Copies one chunk of my rows into my window and tells every other rank. */
void moe_send_chunk(void *context, uint64_t chunk, struct rt_worker *worker)
{
    struct moe_call *call = context;
    struct moe_plan *plan = call->plan;
    int64_t start = moe_span_begin(worker), size = call->counts->chunk_tokens;
    int64_t first = (int64_t)chunk * size, last = first + size;
    size_t mine = moe_offset(call, plan->at.chunks) + ((size_t)plan->rank * MOE_CHUNKS_MAX + chunk) * 8;

    last = last > call->in.tokens ? call->in.tokens : last;
    for (int feed = 0; feed < MOE_FEEDS; feed++)
        if (sends(call, (enum moe_feed)feed))
            copy_chunk(call, (enum moe_feed)feed, first, last);
    for (int i = 1; i < plan->shape.ranks; i++)
        plan->host.comm->transport->signal(&plan->window, (plan->rank + i) % plan->shape.ranks, mine, 1);
    moe_span_end(worker, call, start, (struct moe_span){.kind = TRACE_PERMUTE, .expert = -1, .block = -1,
                                      .source = plan->rank, .rows = (int32_t)(last - first)});
    if (plan->bulk)
        moe_bulk_chunk(call);
    moe_duty_done(call, worker);
    moe_task_end(call);
}

static void tap_rows(const struct moe_call *call, const struct moe_block *block, const void *const *rows)
{
    const struct moe_plan *plan = call->plan;
    size_t bytes = plan->shape.row_bytes;

    if (plan->tap.rows && call->rows <= plan->tap.rows_max && !moe_width(plan, block->expert))
        for (uint32_t i = 0; i < block->rows; i++)
            memcpy((char *)plan->tap.rows + ((size_t)block->row + i) * bytes, rows[i], bytes);
}

/* permute_fusion off: the block's rows are copied next to each other first. */
void moe_copy_in(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker)
{
    enum moe_feed feed = call->kind == MOE_FORWARD ? MOE_X : MOE_DY;
    size_t bytes = call->plan->shape.row_bytes;
    char *to = call->copy_in + (size_t)block->row * bytes;
    int64_t start = moe_span_begin(worker);
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (; moe_rows_next(&walk, &row); to += bytes)
        memcpy(to, moe_row_in(call, row, feed), bytes);
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_PERMUTE));
}

/* Keeps the block's rows of x for the backward. */
static void keep_rows(struct moe_call *call, const struct moe_block *block, const void *const *rows)
{
    size_t bytes = call->plan->shape.row_bytes;

    if (call->saved && call->saved->keep_rows && !moe_width(call->plan, block->expert))
        for (uint32_t i = 0; i < block->rows; i++)
            memcpy(call->saved->x + ((size_t)block->row + i) * bytes, rows[i], bytes);
}

static void pack(const struct moe_call *call, const struct moe_block *block, const void *const *rows, void *x)
{
    const struct kern_layer *layer = &call->plan->layer[0];

    block->engine->pack(&(struct kern_pack){.layer = layer, .rows = rows, .count = (int)block->rows,
                                            .terms = layer->hidden, .x = x});
}

/* Packs a block's rows for its engine: straight from where they are, or from the permuted copy. */
void moe_pack_block(struct moe_call *call, const struct moe_block *block, void *x, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    const void **rows = plan->bench[worker->index].in;
    int64_t start = moe_span_begin(worker);
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (uint32_t i = 0; moe_rows_next(&walk, &row); i++)
        rows[i] = plan->shape.materialise ? call->copy_in + ((size_t)block->row + i) * plan->shape.row_bytes
                                          : moe_row_in(call, row, MOE_X);
    tap_rows(call, block, rows);
    keep_rows(call, block, rows);
    pack(call, block, rows, x);
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_PERMUTE));
}

/* ---- backward: the same rows of dY, of x, and dH */

/* A row that weight gradients will be made of after this call has ended is copied; one that they are made of at once
 * stays where it is. */
static const void *lasting(const struct moe_call *call, const void *row, char *room, int64_t index)
{
    char *copy = room + (size_t)index * call->plan->shape.row_bytes;

    return call->kind == MOE_BACKWARD_INPUT ? memcpy(copy, row, call->plan->shape.row_bytes) : row;
}

/* My own x lasts: the saved state refers to it. */
static const void *row_of_x(const struct moe_call *call, const struct moe_block *block, struct moe_row row, uint32_t i)
{
    const struct moe_saved *saved = call->saved;

    if (saved->keep_rows && !moe_width(call->plan, block->expert))
        return saved->x + ((size_t)block->row + i) * call->plan->shape.row_bytes;
    if (row.source == call->plan->rank)
        return moe_row_in(call, row, MOE_X);
    return lasting(call, moe_row_in(call, row, MOE_X), saved->x, block->row + i);
}

static const void *row_of_dy(const struct moe_call *call, const struct moe_block *block, struct moe_row row, uint32_t i)
{
    const struct moe_saved *saved = call->saved;
    const void *dy = moe_row_in(call, row, MOE_DY);

    return lasting(call, dy, saved->dy, block->row + i); /* shared experts' rows stand behind the others */
}

static float weight_of(const struct moe_call *call, const struct moe_block *block, struct moe_row row)
{
    if (moe_width(call->plan, block->expert))
        return 1.0f;
    return ((const float *)(const void *)moe_at(call, row.source, call->plan->at.weight))[row.slot];
}

/* Notes where the block's rows are and what they weigh, for all that follows. back: of the block. */
void moe_note_rows(struct moe_call *call, const struct moe_block *block, struct moe_back back)
{
    const struct kern_layer *layer = &call->plan->layer[moe_width(call->plan, block->expert)];
    size_t inner = kern_row_bytes(layer->dtype, layer->inner);
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (uint32_t i = 0; moe_rows_next(&walk, &row); i++) {
        back.at[MOE_X][i] = row_of_x(call, block, row, i);
        back.at[MOE_DY][i] = row_of_dy(call, block, row, i);
        back.weight[i] = weight_of(call, block, row);
        back.dh_at[i] = back.gate_up + 2 * inner * i;
        back.a_at[i] = back.a + inner * i;
    }
}

void moe_pack_dy(struct moe_call *call, const struct moe_block *block, struct moe_back back, void *dy,
                 struct rt_worker *worker)
{
    const struct moe_plan *plan = call->plan;
    const void **rows = plan->bench[worker->index].in;
    int64_t start = moe_span_begin(worker);

    for (uint32_t i = 0; i < block->rows; i++)
        rows[i] = plan->shape.materialise ? call->copy_in + ((size_t)block->row + i) * plan->shape.row_bytes
                                          : back.at[MOE_DY][i];
    block->engine->pack(&(struct kern_pack){.layer = &plan->back[0], .rows = rows, .count = (int)block->rows,
                                            .terms = plan->shape.hidden, .x = dy});
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_PERMUTE));
}

void moe_pack_x(struct moe_call *call, const struct moe_block *block, struct moe_back back, void *x)
{
    pack(call, block, back.at[MOE_X], x);
}

void moe_pack_dh(struct moe_call *call, const struct moe_block *block, struct moe_back back, void *dh,
                 struct rt_worker *worker)
{
    const struct kern_layer *layer = &call->plan->back[moe_width(call->plan, block->expert)];
    int64_t start = moe_span_begin(worker);

    block->engine->pack(&(struct kern_pack){.layer = layer, .rows = back.dh_at, .count = (int)block->rows,
                                            .terms = layer->inner, .x = dh});
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_PERMUTE));
}
