/* Saved state: what a forward leaves for its backward. Its memory is reserved for the most rows a rank may receive and
 * committed by touching: what the options do not keep costs nothing. */
#include "moe/plan.h"

#include "base/atomics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct moe_back moe_back_skip(const struct moe_call *call, struct moe_back back, int32_t expert, int64_t rows)
{
    const struct kern_layer *layer = &call->plan->layer[moe_width(call->plan, expert)];
    size_t inner = (size_t)rows * kern_row_bytes(layer->dtype, layer->inner);

    back.gate_up += 2 * inner;
    back.a += inner;
    back.sums += rows * ((layer->inner + 31) / 32);
    back.weight += rows;
    for (int feed = 0; feed < MOE_FEEDS; feed++)
        back.at[feed] += rows;
    back.dh_at += rows;
    back.a_at += rows;
    back.one_at += rows;
    return back;
}

struct moe_back moe_back_at(const struct moe_call *call, const struct moe_back *room, int32_t expert, int64_t row)
{
    int width = moe_width(call->plan, expert);

    return moe_back_skip(call, room[width], expert, width ? row - call->plan->shape.rows_max : row);
}

/* ---- the handle's life */

/* What a call of this kind finds, and what it leaves when all went well. */
static const struct {
    uint32_t before, after;
    const char *wants;
} life[] = {
    [MOE_FORWARD] = {MOE_SAVED_EMPTY, MOE_SAVED_FULL, "an empty one"},
    [MOE_BACKWARD] = {MOE_SAVED_FULL, MOE_SAVED_EMPTY, "one that a forward has filled"},
    [MOE_BACKWARD_INPUT] = {MOE_SAVED_FULL, MOE_SAVED_PENDING, "one that a forward has filled"},
    [MOE_BACKWARD_WEIGHT] = {MOE_SAVED_PENDING, MOE_SAVED_EMPTY, "one that hmoe_backward_input has left"},
};

static const char *state_text(uint32_t state)
{
    static const char *const text[] = {"is empty", "holds a forward whose backward is due",
                                       "waits for hmoe_backward_weight", "is in use by a call in flight"};
    return text[state];
}

/* The call has the handle to itself from here to moe_saved_release; or its error says why not, and nothing changed. */
bool moe_saved_take(struct moe_call *call, struct moe_saved *saved)
{
    uint32_t state = life[call->kind].before;

    if (!saved || saved->plan != call->plan) {
        base_fail(&call->error, saved ? HMOE_ERR_STATE : HMOE_ERR_ARGUMENT, "saved of rank %d is %s: %s of this plan is"
                  " allowed", call->plan->rank, saved ? "of another plan" : "NULL", life[call->kind].wants);
        return false;
    }
    if (call->kind == MOE_BACKWARD_INPUT && saved->lent) {
        base_fail(&call->error, HMOE_ERR_STATE, "saved of rank %d lies in the caller's memory: hmoe_backward is"
                  " allowed", call->plan->rank);
        return false;
    }
    /* acquire pairs with moe_saved_release: what the call before left is seen */
    if (!atomic_compare_exchange_strong_explicit(&saved->state, &state, MOE_SAVED_IN_USE, memory_order_acq_rel,
                                                 memory_order_relaxed)) {
        base_fail(&call->error, HMOE_ERR_STATE, "saved of rank %d %s: %s is allowed", call->plan->rank,
                  state_text(state), life[call->kind].wants);
        return false;
    }
    call->saved = saved;
    call->saved_from = state;
    return true;
}

/* A call that was refused leaves the handle as it was; one that failed on its way leaves nothing of use. */
void moe_saved_release(struct moe_call *call)
{
    struct moe_saved *saved = call->saved;
    uint32_t state = life[call->kind].after;

    if (!saved)
        return;
    if (call->error.status != HMOE_OK)
        state = call->began ? MOE_SAVED_EMPTY : call->saved_from;
    call->saved = NULL;
    atomic_store_explicit(&saved->state, state, memory_order_release); /* pairs with take */
}

/* Notes the routing: the slots of all rows received, as every source keeps them. */
void moe_saved_fill(struct moe_call *call)
{
    const struct moe_shape *shape = &call->plan->shape;
    struct moe_saved *saved = call->saved;
    const uint32_t *base = call->base;

    saved->rows = call->rows;
    for (int e = 0; e < shape->local; e++, base += shape->ranks + 1)
        for (int r = 0; r < shape->ranks; r++)
            memcpy(saved->slot + call->expert[e].row + base[r], moe_source_slots(call, r, e),
                   (size_t)(base[r + 1] - base[r]) * sizeof *saved->slot);
}

/* ---- made and destroyed */

static void describe(struct moe_saved *saved, struct moe_plan *plan, const struct hmoe_saved_options *options,
                     bool lent)
{
    saved->plan = plan;
    saved->keep_rows = options->keep_rows != 0;
    saved->recompute = options->recompute != 0;
    saved->lent = lent;
    saved->arena_bytes = moe_saved_bind(saved, NULL);
}

size_t moe_saved_bytes(struct moe_plan *plan, const struct hmoe_saved_options *options)
{
    struct moe_saved saved = {0};

    describe(&saved, plan, options, true);
    return saved.arena_bytes;
}

static void place(struct moe_saved *saved, const struct hmoe_saved_options *options, struct base_error *error)
{
    saved->arena = options->memory;
    if (!saved->lent)
        saved->arena = base_map(saved->arena_bytes, saved->plan->knobs.value[KNOB_HUGE_PAGES] != 0);
    if (!saved->arena)
        base_fail(error, HMOE_ERR_MEMORY, "a saved state needs %zu bytes of address space (tokens_max and"
                  " receive_max decide)", saved->arena_bytes);
    else if (saved->lent && (options->memory_bytes < saved->arena_bytes || (uintptr_t)saved->arena % 64))
        base_fail(error, HMOE_ERR_ARGUMENT, "memory is %zu bytes at %p: at least %zu are needed, aligned to 64",
                  options->memory_bytes, options->memory, saved->arena_bytes);
    else
        moe_saved_bind(saved, saved->arena);
}

enum hmoe_status moe_saved_create(struct moe_saved **made, struct moe_plan *plan,
                                  const struct hmoe_saved_options *options, struct base_error *error)
{
    struct moe_saved *saved = calloc(1, sizeof *saved);

    if (!plan->shape.training)
        base_fail(error, HMOE_ERR_STATE, "the plan was made with training 0: make it with training 1 to save state");
    else if (!saved)
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a saved state");
    else {
        describe(saved, plan, options, options->memory != NULL);
        place(saved, options, error);
    }
    if (error->status == HMOE_OK)
        *made = saved;
    else
        free(saved);
    return error->status;
}

enum hmoe_status moe_saved_clear(struct moe_saved *saved, struct base_error *error)
{
    uint32_t state = atomic_load_explicit(&saved->state, memory_order_acquire); /* pairs with moe_saved_release */

    while (state != MOE_SAVED_IN_USE)
        if (atomic_compare_exchange_weak_explicit(&saved->state, &state, MOE_SAVED_EMPTY, memory_order_acq_rel,
                                                  memory_order_acquire)) /* pairs with moe_saved_take */
            return HMOE_OK;
    return base_fail(error, HMOE_ERR_STATE, "a call in flight uses the saved state: wait for it first");
}

enum hmoe_status moe_saved_destroy(struct moe_saved *saved, struct base_error *error)
{
    if (moe_saved_clear(saved, error) != HMOE_OK)
        return error->status;
    if (!saved->lent)
        base_unmap(saved->arena, saved->arena_bytes, saved->plan->knobs.value[KNOB_HUGE_PAGES] != 0);
    free(saved);
    return HMOE_OK;
}

void moe_saved_read(const struct moe_saved *saved, struct hmoe_saved_usage *usage)
{
    const struct moe_plan *plan = saved->plan;
    const struct moe_shape *shape = &plan->shape;
    uint32_t state = atomic_load_explicit(&saved->state, memory_order_acquire); /* pairs with moe_saved_release */
    size_t rows = state == MOE_SAVED_EMPTY ? 0 : (size_t)saved->rows, row = shape->row_bytes;
    size_t tokens = state == MOE_SAVED_EMPTY ? 0 : (size_t)saved->in.tokens, shared = (size_t)shape->shared * tokens;
    size_t inner = kern_row_bytes(plan->layer[0].dtype, plan->layer[0].inner);
    size_t wide = kern_row_bytes(plan->layer[1].dtype, plan->layer[1].inner);
    size_t gate_up = 2 * (rows * inner + shared * wide);

    usage->rows = (int64_t)rows;
    usage->routing_bytes = rows * 4 + (size_t)shape->local * ((size_t)shape->ranks + 1) * 4;
    usage->rows_bytes = saved->keep_rows ? rows * row : 0;
    usage->gate_up_bytes = saved->recompute ? 0 : gate_up;
    usage->pending_bytes = 0;
    if (state == MOE_SAVED_PENDING) {
        usage->pending_bytes = (rows + shared) * row + rows * inner + shared * wide;
        usage->pending_bytes += saved->recompute ? gate_up : 0;
        usage->pending_bytes += saved->keep_rows || shape->ranks == 1 ? 0 : rows * row;
    }
    usage->reserved_bytes = saved->arena_bytes;
}
