/* Do the ranks agree on a call? Every rank looks at the same counts rows, so all find the same error. */
#include "moe/plan.h"

#include <inttypes.h>
#include <stdio.h>

/* The largest T of the ranks that exceed tokens_max, in the error of all. */
static void fail_tokens(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t most = 0;
    int rank = 0;

    for (int r = 0; r < shape->ranks; r++)
        if (moe_counts_of(call, r)->tokens > most) {
            most = moe_counts_of(call, r)->tokens;
            rank = r;
        }
    base_fail(&call->error, HMOE_ERR_LIMIT,
              "tokens of rank %d is %" PRId64 ", the most of all ranks: tokens_max of the plan allows %" PRId64, rank,
              most, shape->tokens_max);
}

/* The error of the lowest rank that has one. */
static bool nobody_failed(struct moe_call *call)
{
    for (int r = 0; r < call->plan->shape.ranks; r++) {
        const struct moe_counts *counts = moe_counts_of(call, r);
        if (counts->status == HMOE_OK)
            continue;
        if (counts->status == HMOE_ERR_LIMIT)
            fail_tokens(call);
        else
            base_fail(&call->error, (enum hmoe_status)counts->status, "%s", counts->text);
        return false;
    }
    return true;
}

static int64_t rows_of_rank(const struct moe_call *call, int rank)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t rows = 0;

    for (int r = 0; r < shape->ranks; r++) {
        const uint32_t *offset = moe_counts_of(call, r)->offset + (size_t)rank * (size_t)shape->local;
        rows += offset[shape->local] - offset[0];
    }
    return rows;
}

static bool within_limit(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    int64_t most = 0;
    int rank = 0;

    for (int r = 0; r < shape->ranks && shape->receive_max > 0; r++) {
        int64_t rows = rows_of_rank(call, r);
        if (rows > most) {
            most = rows;
            rank = r;
        }
    }
    if (most <= shape->receive_max)
        return true;
    base_fail(&call->error, HMOE_ERR_LIMIT,
              "rank %d would receive %" PRId64 " rows, the most of all ranks: receive_max of the plan allows %" PRId64,
              rank, most, shape->receive_max);
    return false;
}

static void name_call(const struct moe_counts *counts, char *text, size_t bytes)
{
    static const char *const kind[] = {"hmoe_forward", "hmoe_backward", "hmoe_backward_input"};
    const char *saved = counts->kind == MOE_FORWARD && counts->saves ? " with a saved state" : "";
    const char *keep = counts->saves & 2 ? ", keep_rows 1" : "", *again = counts->saves & 4 ? ", recompute 1" : "";

    if (counts->kind == MOE_FORWARD)
        snprintf(text, bytes, "%s%s%s%s", kind[counts->kind], saved, keep, again);
    else
        snprintf(text, bytes, "%s of call %" PRIu64 "%s%s", kind[counts->kind], counts->of, keep, again);
}

/* The n-th call of a plan is the same one on every rank. */
static bool same_call(struct moe_call *call)
{
    const struct moe_counts *first = moe_counts_of(call, 0);

    for (int r = 1; r < call->plan->shape.ranks; r++) {
        const struct moe_counts *counts = moe_counts_of(call, r);
        char mine[96], other[96];
        if (counts->kind == first->kind && counts->saves == first->saves &&
            (counts->kind == MOE_FORWARD || counts->of == first->of))
            continue;
        name_call(first, mine, sizeof mine);
        name_call(counts, other, sizeof other);
        base_fail(&call->error, HMOE_ERR_MISMATCH, "call %" PRIu64 " of the plan is %s on rank 0 and %s on rank %d:"
                  " calls must match", call->number, mine, other, r);
        return false;
    }
    return true;
}

bool moe_ranks_agree(struct moe_call *call)
{
    if (!nobody_failed(call) || !same_call(call))
        return false;
    return call->kind != MOE_FORWARD || within_limit(call);
}
