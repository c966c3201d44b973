/* Phase two: a plan for the shape, copies of what is not contiguous, the call, and the saved state in its tensor. */
#include "aclnn/aclnn.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC 0x484d6f4553617665ull

static aclnnStatus failed(void)
{
    return aclnn_fail(ACLNN_ERR_RUNTIME_ERROR, "%s", hmoe_last_error());
}

/* ---- plans */

/* All ranks make the same calls, so all look for the same plans in the same order. */
static struct hmoe_plan *plan_for(struct aclnn_group *group, const struct hmoe_plan_options *options)
{
    struct aclnn_plan *plan = group->plans;

    while (plan && memcmp(&plan->options, options, sizeof *options) != 0)
        plan = plan->next;
    if (plan)
        return plan->plan;
    plan = calloc(1, sizeof *plan);
    if (!plan || hmoe_plan_create(group->group, options, &plan->plan) != HMOE_OK) {
        free(plan);
        return NULL;
    }
    plan->options = *options;
    plan->next = group->plans;
    group->plans = plan;
    return plan->plan;
}

/* ---- saved states */

static struct aclnn_header *header_of(const struct aclTensor *saved)
{
    uintptr_t at = (uintptr_t)aclnn_address(saved);

    return (struct aclnn_header *)((at + ACLNN_LINE - 1) / ACLNN_LINE * ACLNN_LINE);
}

/* The tensor holds no saved state any more. */
static void forget(struct aclnn_group *group, struct aclnn_header *header)
{
    struct aclnn_kept **at = &group->kept, *kept;

    header->magic = 0;
    while (*at && (*at)->header != header)
        at = &(*at)->next;
    kept = *at;
    if (!kept)
        return;
    *at = kept->next;
    hmoe_saved_destroy(kept->saved);
    free(kept);
}

static aclnnStatus keep(struct aclnn_group *group, struct aclnn_header *header, struct hmoe_saved *saved)
{
    struct aclnn_kept *kept = malloc(sizeof *kept);

    if (!kept)
        return aclnn_fail(ACLNN_ERR_INNER, "no memory to keep a saved state");
    *kept = (struct aclnn_kept){header, saved, group->kept};
    group->kept = kept;
    *header = (struct aclnn_header){MAGIC, header, group, saved};
    return ACLNN_SUCCESS;
}

/* A handle over the tensor, of which an earlier forward may have left one. */
static aclnnStatus open_saved(struct aclnn_work *work, struct hmoe_plan *plan, struct hmoe_saved **saved)
{
    struct aclnn_header *header = header_of(&work->tensor[SAVED]);
    struct hmoe_saved_options options = {.size = sizeof options};
    aclnnStatus status;

    _Static_assert(sizeof *header <= ACLNN_LINE, "a line");
    options.memory = (char *)header + ACLNN_LINE;
    options.memory_bytes = work->saved_bytes - 2 * ACLNN_LINE;
    forget(work->group, header);
    if (hmoe_saved_create(plan, &options, saved) != HMOE_OK)
        return failed();
    status = keep(work->group, header, *saved);
    if (status != ACLNN_SUCCESS)
        hmoe_saved_destroy(*saved);
    return status;
}

static aclnnStatus find_saved(const struct aclnn_work *work, struct hmoe_saved **saved)
{
    const struct aclnn_header *header = header_of(&work->tensor[SAVED]);
    const struct aclnn_kept *kept = work->group->kept;

    while (kept && kept->header != header)
        kept = kept->next;
    if (header->magic != MAGIC)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID,
                          "saved holds no saved state: aclnnHyperMegaMoE fills it, one gradient"
                          " uses it up");
    if (header->self != header)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "saved was filled at %p and is at %p now: it must not move",
                          header->self, (const void *)header);
    if (header->group != work->group || !kept)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "saved was filled by another group than \"%s\"", work->group->name);
    *saved = kept->saved;
    return ACLNN_SUCCESS;
}

/* ---- copies of what is not contiguous */

/* Where each tensor's elements are, contiguous; copied there if it is an input. */
static void stage(struct aclnn_work *work, void *at[SLOTS])
{
    char *next = (char *)(((uintptr_t)work->workspace + ACLNN_LINE - 1) / ACLNN_LINE * ACLNN_LINE);

    for (int s = 0; s < SLOTS; s++) {
        struct aclTensor *tensor = &work->tensor[s];
        size_t bytes = aclnn_staged_bytes(tensor);
        at[s] = tensor->dims < 0 ? NULL : aclnn_address(tensor);
        if (!bytes)
            continue;
        at[s] = next;
        next += bytes;
        if (s < SAVED)
            aclnn_gather(tensor, at[s]);
    }
}

static void unstage(const struct aclnn_work *work, void *const at[SLOTS])
{
    for (int s = Y; s < SLOTS; s++)
        if (aclnn_staged_bytes(&work->tensor[s]))
            aclnn_scatter(at[s], &work->tensor[s]);
}

/* Addresses are only here all known. */
static aclnnStatus check_addresses(const struct aclnn_work *work)
{
    for (int s = 0; s < SLOTS; s++)
        if (aclnn_has(work, (enum aclnn_slot)s) && !work->tensor[s].data && aclnn_elements(&work->tensor[s]))
            return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "the data of a tensor of %d dimensions of type %d is NULL: give"
                              " it to the tensor, or to the executor by a setter", work->tensor[s].dims,
                              (int)work->tensor[s].type);
    return ACLNN_SUCCESS;
}

/* ---- the calls */

static struct hmoe_call call_of(const struct aclnn_work *work, void *const at[SLOTS])
{
    return (struct hmoe_call){
        .size = sizeof(struct hmoe_call), .tokens = work->tokens, .x = at[X], .topk_ids = at[IDS],
        .topk_weights = at[WEIGHTS], .ids_type = work->tensor[IDS].type == ACL_INT64 ? HMOE_I64 : HMOE_I32,
        .weights_type = aclnn_dtype(work->tensor[WEIGHTS].type), .layer = {.up_proj = at[UP], .down_proj = at[DOWN]}};
}

/* What is wrong on this rank alone the others must hear of: a call that is refused tells them. */
static aclnnStatus refuse(const struct aclnn_work *work, struct hmoe_plan *plan, aclnnStatus status)
{
    struct hmoe_call call = {.size = sizeof call, .tokens = -1};

    if (work->kind == FORWARD)
        hmoe_forward(plan, &call);
    else
        hmoe_backward(plan, &call);
    return status;
}

static aclnnStatus forward(struct aclnn_work *work, struct hmoe_plan *plan, void *const at[SLOTS])
{
    struct hmoe_call call = call_of(work, at);
    aclnnStatus status = ACLNN_SUCCESS;

    call.y = at[Y];
    if (aclnn_has(work, SAVED))
        status = open_saved(work, plan, &call.saved);
    if (status != ACLNN_SUCCESS)
        return refuse(work, plan, status);
    if (hmoe_forward(plan, &call) == HMOE_OK)
        return ACLNN_SUCCESS;
    status = failed();
    if (call.saved)
        forget(work->group, header_of(&work->tensor[SAVED]));
    return status;
}

static aclnnStatus gradient(struct aclnn_work *work, struct hmoe_plan *plan, void *const at[SLOTS])
{
    struct hmoe_call call = call_of(work, at);
    aclnnStatus status = find_saved(work, &call.saved);
    enum aclnn_slot typed = aclnn_has(work, D_UP) ? D_UP : aclnn_has(work, D_DOWN) ? D_DOWN : X;

    if (status != ACLNN_SUCCESS)
        return refuse(work, plan, status);
    call.grad = (struct hmoe_gradients){.dy = at[DY], .dx = at[DX], .d_topk_weights = at[D_WEIGHTS],
                                        .d_up_proj = at[D_UP], .d_down_proj = at[D_DOWN],
                                        .dw_type = aclnn_dtype(work->tensor[typed].type)};
    if (hmoe_backward(plan, &call) != HMOE_OK)
        return failed();
    forget(work->group, header_of(&work->tensor[SAVED]));
    return ACLNN_SUCCESS;
}

static aclnnStatus run_on(struct aclnn_work *work, struct hmoe_plan *plan)
{
    aclnnStatus status = check_addresses(work);
    void *at[SLOTS];

    if (status != ACLNN_SUCCESS)
        return refuse(work, plan, status);
    stage(work, at);
    status = work->kind == FORWARD ? forward(work, plan, at) : gradient(work, plan, at);
    if (status == ACLNN_SUCCESS)
        unstage(work, at);
    return status;
}

aclnnStatus aclnn_run(struct aclnn_work *work)
{
    struct hmoe_plan *plan;
    aclnnStatus status;

    pthread_mutex_lock(&work->group->lock);
    plan = plan_for(work->group, &work->options);
    status = plan ? run_on(work, plan) : failed();
    pthread_mutex_unlock(&work->group->lock);
    return status;
}
