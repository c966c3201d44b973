/* Calls and saved states: what must be right before anything begins is checked here, all else by the moe room. */
#include "api/objects.h"
#include "api/report.h"

#include <stdlib.h>
#include <string.h>

/* ---- start */

typedef enum hmoe_status start_fn(struct moe_plan *plan, struct hmoe_call *call, struct moe_saved *saved,
                                  struct base_error *error);

static enum hmoe_status check_start(const struct hmoe_plan *plan, const struct hmoe_call *call,
                                    struct base_error *error)
{
    if (api_check_plan(plan, error) != HMOE_OK)
        return error->status;
    if (!call)
        return base_fail(error, HMOE_ERR_ARGUMENT, "call is NULL");
    if (api_check_size(call->size, sizeof *call, "hmoe_call", error) != HMOE_OK)
        return error->status;
    if (__atomic_load_n(&call->phase, __ATOMIC_ACQUIRE) & 1) /* pairs with the end of a call */
        return base_fail(error, HMOE_ERR_STATE, "the call is in flight already: wait for it, or use another struct");
    return HMOE_OK;
}

static enum hmoe_status start(struct hmoe_plan *plan, struct hmoe_call *call, start_fn *begin)
{
    struct base_error error = {.status = HMOE_OK};

    if (check_start(plan, call, &error) == HMOE_OK) {
        call->plan = plan;
        begin(plan->moe, call, call->saved ? call->saved->moe : NULL, &error);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_forward_start(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return start(plan, call, moe_forward_start);
}

enum hmoe_status hmoe_backward_start(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return start(plan, call, moe_backward_start);
}

enum hmoe_status hmoe_backward_input_start(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return start(plan, call, moe_backward_input_start);
}

enum hmoe_status hmoe_backward_weight_start(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return start(plan, call, moe_backward_weight_start);
}

/* ---- end */

int hmoe_call_done(const struct hmoe_call *call)
{
    return call ? moe_call_done(call) : 0;
}

enum hmoe_status hmoe_call_wait(struct hmoe_call *call)
{
    struct base_error error = {.status = HMOE_OK};

    if (!call || !call->plan) {
        base_fail(&error, HMOE_ERR_STATE, "the call was never started");
    } else if (moe_call_done(call) || api_check_plan(call->plan, &error) == HMOE_OK) {
        error.status = moe_call_done(call) ? call->status : moe_call_wait(call->plan->moe, call);
        memcpy(error.text, call->error, sizeof error.text);
    }
    return api_report(&error);
}

static enum hmoe_status finish(enum hmoe_status started, struct hmoe_call *call)
{
    return started == HMOE_OK ? hmoe_call_wait(call) : started;
}

enum hmoe_status hmoe_forward(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return finish(hmoe_forward_start(plan, call), call);
}

enum hmoe_status hmoe_backward(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return finish(hmoe_backward_start(plan, call), call);
}

enum hmoe_status hmoe_backward_input(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return finish(hmoe_backward_input_start(plan, call), call);
}

enum hmoe_status hmoe_backward_weight(struct hmoe_plan *plan, struct hmoe_call *call)
{
    return finish(hmoe_backward_weight_start(plan, call), call);
}

/* ---- saved states */

static enum hmoe_status make_saved(struct hmoe_plan *plan, const struct hmoe_saved_options *options,
                                   struct hmoe_saved *saved, struct base_error *error)
{
    static const struct hmoe_saved_options standard = {.size = sizeof standard};

    options = options ? options : &standard;
    if (!saved)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a saved state");
    if (api_check_size(options->size, sizeof *options, "hmoe_saved_options", error) != HMOE_OK)
        return error->status;
    return moe_saved_create(&saved->moe, plan->moe, options, error);
}

enum hmoe_status hmoe_saved_create(struct hmoe_plan *plan, const struct hmoe_saved_options *options,
                                   struct hmoe_saved **made)
{
    struct base_error error = {.status = HMOE_OK};
    struct hmoe_saved *saved;

    if (api_check_plan(plan, &error) == HMOE_OK && !made)
        base_fail(&error, HMOE_ERR_ARGUMENT, "saved is NULL");
    if (error.status != HMOE_OK)
        return api_report(&error);
    saved = calloc(1, sizeof *saved);
    if (make_saved(plan, options, saved, &error) == HMOE_OK) {
        saved->plan = plan;
        plan->saved++;
        *made = saved;
    } else {
        free(saved);
    }
    return api_report(&error);
}

static enum hmoe_status check_saved(const struct hmoe_saved *saved, struct base_error *error)
{
    if (!saved)
        return base_fail(error, HMOE_ERR_ARGUMENT, "saved is NULL");
    return api_check_plan(saved->plan, error);
}

enum hmoe_status hmoe_saved_clear(struct hmoe_saved *saved)
{
    struct base_error error = {.status = HMOE_OK};

    if (check_saved(saved, &error) == HMOE_OK)
        moe_saved_clear(saved->moe, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_saved_destroy(struct hmoe_saved *saved)
{
    struct base_error error = {.status = HMOE_OK};

    if (check_saved(saved, &error) == HMOE_OK && moe_saved_destroy(saved->moe, &error) == HMOE_OK) {
        saved->plan->saved--;
        free(saved);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_saved_read(struct hmoe_saved *saved, struct hmoe_saved_usage *usage)
{
    struct base_error error = {.status = HMOE_OK};

    if (check_saved(saved, &error) == HMOE_OK && !usage)
        base_fail(&error, HMOE_ERR_ARGUMENT, "usage is NULL");
    if (error.status == HMOE_OK && api_check_size(usage->size, sizeof *usage, "hmoe_saved_usage", &error) == HMOE_OK)
        moe_saved_read(saved->moe, usage);
    return api_report(&error);
}
