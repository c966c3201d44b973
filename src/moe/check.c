/* What a rank can find wrong with its own tensors: it goes into the call's error, and with the counts row to all. */
#include "moe/plan.h"

#include "base/num.h"

#include <inttypes.h>

static enum hmoe_status check_optional(struct base_error *error, int rank, const char *name, const void *pointer,
                                       size_t bytes)
{
    if (error->status == HMOE_OK && (uintptr_t)pointer % bytes)
        base_fail(error, HMOE_ERR_ARGUMENT, "%s of rank %d is at %p: its elements of %zu bytes must be aligned", name,
                  rank, pointer, bytes);
    return error->status;
}

static enum hmoe_status check_pointer(struct base_error *error, int rank, const char *name, const void *pointer,
                                      size_t bytes)
{
    if (error->status == HMOE_OK && !pointer)
        base_fail(error, HMOE_ERR_ARGUMENT, "%s of rank %d is NULL", name, rank);
    return check_optional(error, rank, name, pointer, bytes);
}

static void check_weights(struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    const struct hmoe_layer *layer = &call->in.layer;
    size_t bytes = num_bytes(plan->layer[0].dtype);
    struct base_error *error = &call->error;

    check_pointer(error, plan->rank, "up_proj", layer->up_proj, bytes);
    check_pointer(error, plan->rank, "down_proj", layer->down_proj, bytes);
    check_optional(error, plan->rank, "up_bias", layer->up_bias, bytes);
    check_optional(error, plan->rank, "down_bias", layer->down_bias, bytes);
    if (!plan->shape.shared)
        return;
    check_pointer(error, plan->rank, "shared_up_proj", layer->shared_up_proj, bytes);
    check_pointer(error, plan->rank, "shared_down_proj", layer->shared_down_proj, bytes);
}

/* Others read `in` while `out` is written. */
static void check_apart(struct moe_call *call, const char *out_name, const void *out, const char *in_name,
                        const void *in)
{
    uintptr_t a = (uintptr_t)out, b = (uintptr_t)in, bytes = (uintptr_t)call->in.tokens * call->plan->shape.row_bytes;

    if (call->error.status == HMOE_OK && out && in && a < b + bytes && b < a + bytes)
        base_fail(&call->error, HMOE_ERR_ARGUMENT, "%s of rank %d overlaps %s: give it its own memory", out_name,
                  call->plan->rank, in_name);
}

/* What forward and backward both read. */
static void check_inputs(struct moe_call *call)
{
    const struct hmoe_call *in = &call->in;
    struct base_error *error = &call->error;
    int rank = call->plan->rank;

    check_pointer(error, rank, "x", in->x, num_bytes(call->plan->layer[0].dtype));
    check_pointer(error, rank, "topk_ids", in->topk_ids, in->ids_type == HMOE_I64 ? 8 : 4);
    check_pointer(error, rank, "topk_weights", in->topk_weights, num_bytes(in->weights_type));
}

static void check_tokens(struct moe_call *call)
{
    const struct hmoe_call *in = &call->in;

    check_inputs(call);
    check_pointer(&call->error, call->plan->rank, "y", in->y, num_bytes(call->plan->layer[0].dtype));
    check_apart(call, "y", in->y, "x", in->x);
}

/* LIMIT's text is made where all counts are known. */
void moe_check_forward(struct moe_call *call)
{
    const struct hmoe_call *in = &call->in;
    struct base_error *error = &call->error;
    int rank = call->plan->rank;

    if (in->tokens < 0)
        base_fail(error, HMOE_ERR_ARGUMENT, "tokens of rank %d is %" PRId64 ": at least 0 is allowed", rank,
                  in->tokens);
    else if (in->ids_type != HMOE_I32 && in->ids_type != HMOE_I64)
        base_fail(error, HMOE_ERR_ARGUMENT, "ids_type of rank %d is %d: HMOE_I32 or HMOE_I64 are allowed", rank,
                  (int)in->ids_type);
    else if (in->weights_type != HMOE_F32 && in->weights_type != HMOE_BF16 && in->weights_type != HMOE_F16)
        base_fail(error, HMOE_ERR_ARGUMENT, "weights_type of rank %d is %d: HMOE_F32, HMOE_BF16 or HMOE_F16 are"
                  " allowed", rank, (int)in->weights_type);
    else if (in->tokens > call->plan->shape.tokens_max)
        base_fail(error, HMOE_ERR_LIMIT, "tokens of rank %d is %" PRId64, rank, in->tokens);
    else
        check_weights(call);
    if (error->status == HMOE_OK && in->tokens > 0)
        check_tokens(call);
}

static void check_dweights(struct moe_call *call)
{
    const struct hmoe_gradients *grad = &call->in.grad;
    const struct moe_plan *plan = call->plan;
    size_t bytes = num_bytes(grad->dw_type);
    struct base_error *error = &call->error;

    if (grad->dw_type != HMOE_F32 && grad->dw_type != plan->layer[0].dtype)
        base_fail(error, HMOE_ERR_ARGUMENT, "grad.dw_type of rank %d is %d: HMOE_F32 (0) or the plan's dtype (%d) are"
                  " allowed", plan->rank, (int)grad->dw_type, (int)plan->layer[0].dtype);
    else if (grad->dw_mode != HMOE_OVERWRITE && grad->dw_mode != HMOE_ACCUMULATE)
        base_fail(error, HMOE_ERR_ARGUMENT, "grad.dw_mode of rank %d is %d: HMOE_OVERWRITE (0) or HMOE_ACCUMULATE (1)"
                  " are allowed", plan->rank, (int)grad->dw_mode);
    check_optional(error, plan->rank, "grad.d_up_proj", grad->d_up_proj, bytes);
    check_optional(error, plan->rank, "grad.d_down_proj", grad->d_down_proj, bytes);
    check_optional(error, plan->rank, "grad.d_up_bias", grad->d_up_bias, bytes);
    check_optional(error, plan->rank, "grad.d_down_bias", grad->d_down_bias, bytes);
    check_optional(error, plan->rank, "grad.d_shared_up_proj", grad->d_shared_up_proj, bytes);
    check_optional(error, plan->rank, "grad.d_shared_down_proj", grad->d_shared_down_proj, bytes);
}

void moe_check_backward(struct moe_call *call)
{
    const struct hmoe_gradients *grad = &call->in.grad;
    size_t bytes = num_bytes(call->plan->layer[0].dtype);
    struct base_error *error = &call->error;
    int rank = call->plan->rank;

    if (call->kind != MOE_BACKWARD_INPUT)
        check_dweights(call);
    check_weights(call);
    if (call->kind == MOE_BACKWARD_WEIGHT || !call->in.tokens)
        return;
    check_inputs(call);
    check_pointer(error, rank, "grad.dy", grad->dy, bytes);
    check_optional(error, rank, "grad.dx", grad->dx, bytes);
    check_optional(error, rank, "grad.d_topk_weights", grad->d_topk_weights, num_bytes(call->in.weights_type));
    check_apart(call, "grad.dx", grad->dx, "grad.dy", grad->dy);
    check_apart(call, "grad.dx", grad->dx, "x", call->in.x);
}
