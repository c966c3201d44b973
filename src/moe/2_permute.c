/* Stage 2, permute: rows [T,H] -> the kernels' packed rows, gathered by index while packing; nothing is permuted in
 * memory. For ranks in other processes, rows are copied in chunks into this rank's window, where they can be read. */
#include "moe/plan.h"

#include <string.h>

/* Copies one chunk of x into my window and tells every other rank. */
void moe_send_chunk(void *context, uint64_t chunk, struct rt_worker *worker)
{
    struct moe_call *call = context;
    struct moe_plan *plan = call->plan;
    int64_t start = moe_span_begin(worker), size = call->counts->chunk_tokens;
    int64_t first = (int64_t)chunk * size, last = first + size;
    size_t bytes = plan->shape.row_bytes;
    size_t mine = moe_offset(call, plan->at.chunks) + ((size_t)plan->rank * MOE_CHUNKS_MAX + chunk) * 8;

    last = last > call->in.tokens ? call->in.tokens : last;
    memcpy(moe_at(call, plan->rank, plan->at.x) + (size_t)first * bytes,
           (const char *)call->in.x + (size_t)first * bytes, (size_t)(last - first) * bytes);
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

    if (plan->tap.rows && call->rows <= plan->tap.rows_max)
        for (uint32_t i = 0; i < block->rows; i++)
            memcpy((char *)plan->tap.rows + ((size_t)block->row + i) * bytes, rows[i], bytes);
}

/* permute_fusion off: the block's rows are copied next to each other first. */
void moe_copy_in(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    size_t bytes = plan->shape.row_bytes;
    char *to = plan->rows + (size_t)block->row * bytes;
    int64_t start = moe_span_begin(worker);
    struct moe_row_walk walk;
    struct moe_row row;

    moe_rows_begin(&walk, call, block);
    for (; moe_rows_next(&walk, &row); to += bytes)
        memcpy(to, moe_row_in(call, row), bytes);
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_PERMUTE));
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
        rows[i] = plan->shape.materialise ? plan->rows + ((size_t)block->row + i) * plan->shape.row_bytes
                                          : moe_row_in(call, row);
    tap_rows(call, block, rows);
    block->engine->pack(&(struct kern_pack){.layer = &plan->layer, .rows = rows, .count = (int)block->rows, .x = x});
    moe_span_end(worker, call, start, moe_block_span(call, block, TRACE_PERMUTE));
}
