/* Plans and calls: options checked here and compared over the ranks, then handed to the moe room. */
#include "api/objects.h"
#include "api/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum hmoe_status api_check_plan(const struct hmoe_plan *plan, struct base_error *error)
{
    if (!plan)
        return base_fail(error, HMOE_ERR_ARGUMENT, "plan is NULL");
    return api_check_group(plan->group, error);
}

/* ---- options: one table of what is allowed, also what ranks compare */

struct field {
    const char *name;
    int64_t value, least, most;
};

enum { FIELDS = 18 };

static int64_t float_bits(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, 4);
    return bits;
}

static void list_fields(const struct hmoe_plan_options *o, const struct base_knobs *knobs, struct field *fields)
{
    const struct field list[FIELDS] = {
        {"hidden", o->hidden, 1, (int64_t)1 << 31},
        {"inner", o->inner, 1, (int64_t)1 << 31},
        {"experts", o->experts, 1, 1 << 20},
        {"topk", o->topk, 1, 1 << 20},
        {"tokens_max", o->tokens_max, 0, (int64_t)1 << 40},
        {"receive_max", o->receive_max, 0, (int64_t)1 << 40},
        {"dtype", (int64_t)o->dtype, HMOE_F32, HMOE_F16},
        {"layout", (int64_t)o->layout, HMOE_KN, HMOE_NK},
        {"gating", (int64_t)o->gating, HMOE_HALVES, HMOE_INTERLEAVED},
        {"calls_max", o->calls_max, 0, 1024},
        {"training", o->training, 0, 1},
        {"shared_experts", o->shared_experts, 0, 1024},
        {"shared_inner", o->shared_inner, o->shared_experts > 0, (int64_t)1 << 31},
        {"activation.alpha (bits)", float_bits(o->activation.alpha), INT64_MIN, INT64_MAX},
        {"activation.limit (bits)", float_bits(o->activation.limit), INT64_MIN, INT64_MAX},
        {"activation.offset (bits)", float_bits(o->activation.offset), INT64_MIN, INT64_MAX},
        {"knob path", knobs->value[KNOB_PATH], INT64_MIN, INT64_MAX},
        {"knob counter_start", knobs->value[KNOB_COUNTER_START], INT64_MIN, INT64_MAX},
    };

    memcpy(fields, list, sizeof list);
}

/* Zero or normal: comparisons would read a denormal as zero on some CPUs. */
static bool plain_number(float f)
{
    return f == 0.0f || isnormal(f);
}

static enum hmoe_status check_activation(const struct hmoe_activation *a, struct base_error *error)
{
    bool limit = a->limit >= 0 && (isinf(a->limit) || plain_number(a->limit));

    if (limit && plain_number(a->alpha) && plain_number(a->offset))
        return HMOE_OK;
    return base_fail(error, HMOE_ERR_ARGUMENT, "activation is alpha %g, limit %g, offset %g: each must be 0 or a normal"
                     " number, limit not negative", (double)a->alpha, (double)a->limit, (double)a->offset);
}

static enum hmoe_status check_fields(const struct hmoe_plan_options *options, const struct field *fields, int ranks,
                                     struct base_error *error)
{
    for (int i = 0; i < FIELDS; i++)
        if (fields[i].value < fields[i].least || fields[i].value > fields[i].most)
            return base_fail(error, HMOE_ERR_ARGUMENT, "%s is %" PRId64 ": %" PRId64 " to %" PRId64 " are allowed",
                             fields[i].name, fields[i].value, fields[i].least, fields[i].most);
    if (options->experts % ranks)
        return base_fail(error, HMOE_ERR_ARGUMENT, "experts is %d: it must be a multiple of the %d ranks",
                         options->experts, ranks);
    return check_activation(&options->activation, error);
}

/* Size, knobs and every field. */
static enum hmoe_status check_options(const struct hmoe_plan_options *options, int ranks, struct base_knobs *knobs,
                                      struct field *fields, struct base_error *error)
{
    if (!options)
        return base_fail(error, HMOE_ERR_ARGUMENT, "options is NULL");
    if (api_check_size(options->size, sizeof *options, "hmoe_plan_options", error) != HMOE_OK ||
        base_knobs_set(knobs, options->knobs, error) != HMOE_OK)
        return error->status;
    list_fields(options, knobs, fields);
    return check_fields(options, fields, ranks, error);
}

static enum hmoe_status compare(struct comm *comm, const struct field *fields, struct base_error *error)
{
    int64_t mine[FIELDS], *all = malloc((size_t)comm->boot.ranks * sizeof mine);

    if (!all)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for %d ranks", comm->boot.ranks);
    for (int i = 0; i < FIELDS; i++)
        mine[i] = fields[i].value;
    comm_allgather(comm, mine, all, sizeof mine, error);
    for (int r = 1; r < comm->boot.ranks && error->status == HMOE_OK; r++)
        for (int i = 0; i < FIELDS && error->status == HMOE_OK; i++)
            if (all[r * FIELDS + i] != all[i])
                base_fail(error, HMOE_ERR_MISMATCH, "%s is %" PRId64 " on rank %d and %" PRId64 " on rank 0: plans must"
                          " be the same on all ranks", fields[i].name, all[r * FIELDS + i], r, all[i]);
    free(all);
    return error->status;
}

/* ---- plans */

static enum hmoe_status create(struct hmoe_group *group, const struct hmoe_plan_options *options,
                               struct hmoe_plan *plan, struct base_error *error)
{
    struct base_knobs knobs = group->knobs;
    struct field fields[FIELDS];
    struct moe_host host = {.comm = &group->comm, .pool = group->pool, .trace = &group->trace};

    if (!plan)
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a plan");
    else
        check_options(options, group->comm.boot.ranks, &knobs, fields, error);
    if (comm_agree(&group->comm, error) != HMOE_OK || compare(&group->comm, fields, error) != HMOE_OK)
        return error->status;
    return moe_plan_create(&plan->moe, &host, options, &knobs, error);
}

enum hmoe_status hmoe_plan_create(struct hmoe_group *group, const struct hmoe_plan_options *options,
                                  struct hmoe_plan **made)
{
    struct base_error error = {.status = HMOE_OK};
    struct hmoe_plan *plan;

    if (api_check_group(group, &error) != HMOE_OK)
        return api_report(&error);
    if (!made) {
        base_fail(&error, HMOE_ERR_ARGUMENT, "plan is NULL");
        return api_report(&error);
    }
    if (comm_failed(&group->comm, &error) != HMOE_OK)
        return api_report(&error);
    plan = calloc(1, sizeof *plan);
    if (create(group, options, plan, &error) == HMOE_OK) {
        plan->group = group;
        group->plans++;
        *made = plan;
    } else {
        free(plan);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_plan_destroy(struct hmoe_plan *plan)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_plan(plan, &error) == HMOE_OK && !moe_plan_idle(plan->moe))
        base_fail(&error, HMOE_ERR_STATE, "a call of the plan is in flight: wait for it first");
    if (error.status == HMOE_OK && plan->saved)
        base_fail(&error, HMOE_ERR_STATE, "%d saved states of the plan are alive: destroy them first", plan->saved);
    if (error.status == HMOE_OK) {
        moe_plan_destroy(plan->moe);
        plan->group->plans--;
        free(plan);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_plan_settle(struct hmoe_plan *plan)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_plan(plan, &error) == HMOE_OK && !moe_plan_idle(plan->moe))
        base_fail(&error, HMOE_ERR_STATE, "a call of the plan is in flight: wait for it first");
    if (error.status == HMOE_OK)
        moe_plan_settle(plan->moe, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_workspace_query(const struct hmoe_plan_options *options, int ranks, int workers,
                                      struct hmoe_workspace *workspace)
{
    struct base_error error = {.status = HMOE_OK};
    struct field fields[FIELDS];
    struct base_knobs knobs;

    if (!workspace || ranks < 1 || workers < 1)
        base_fail(&error, HMOE_ERR_ARGUMENT, "workspace is %p, ranks %d, workers %d: not NULL and at least 1 are"
                  " allowed", (void *)workspace, ranks, workers);
    else if (api_check_size(workspace->size, sizeof *workspace, "hmoe_workspace", &error) == HMOE_OK &&
             base_knobs_init(&knobs, &error) == HMOE_OK &&
             check_options(options, ranks, &knobs, fields, &error) == HMOE_OK)
        moe_plan_measure(options, &knobs, ranks, workers, workspace, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_saved_query(const struct hmoe_plan_options *options, int ranks,
                                  const struct hmoe_saved_options *saved, size_t *bytes)
{
    struct base_error error = {.status = HMOE_OK};
    struct field fields[FIELDS];
    struct base_knobs knobs;

    if (!saved || !bytes || ranks < 1)
        base_fail(&error, HMOE_ERR_ARGUMENT, "saved is %p, memory_bytes %p, ranks %d: not NULL and at least 1 are"
                  " allowed", (const void *)saved, (void *)bytes, ranks);
    else if (api_check_size(saved->size, sizeof *saved, "hmoe_saved_options", &error) == HMOE_OK &&
             base_knobs_init(&knobs, &error) == HMOE_OK &&
             check_options(options, ranks, &knobs, fields, &error) == HMOE_OK)
        moe_saved_measure(options, &knobs, ranks, saved, bytes, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_plan_workspace(struct hmoe_plan *plan, struct hmoe_workspace *workspace)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_plan(plan, &error) == HMOE_OK && !workspace)
        base_fail(&error, HMOE_ERR_ARGUMENT, "workspace is NULL");
    if (error.status == HMOE_OK &&
        api_check_size(workspace->size, sizeof *workspace, "hmoe_workspace", &error) == HMOE_OK)
        moe_plan_workspace(plan->moe, workspace);
    return api_report(&error);
}
