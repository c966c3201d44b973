/* Groups by name: made, and taken down with all that was made in them. */
#include "aclnn/aclnn.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

aclnnStatus aclnnInit(const char *configPath)
{
    (void)configPath;
    return ACLNN_SUCCESS;
}

aclnnStatus aclnnFinalize(void)
{
    return aclnn_group_any() ? aclnn_fail(ACLNN_ERR_RUNTIME_ERROR, "groups are alive: destroy them first")
                             : ACLNN_SUCCESS;
}

aclnnStatus aclnn_check_name(const char *name)
{
    size_t length = name ? strnlen(name, ACLNN_NAME_MAX + 1) : 0;

    if (!name)
        return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "group is NULL");
    if (length < 1 || length > ACLNN_NAME_MAX)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "group has %s characters: 1 to %d are allowed",
                          length ? "more than 127" : "no", ACLNN_NAME_MAX);
    return ACLNN_SUCCESS;
}

static void drop(struct aclnn_group *group)
{
    pthread_mutex_destroy(&group->lock);
    free(group);
}

aclnnStatus aclnnHyperMegaMoEGroupCreate(const char *name, const struct hmoe_group_options *options)
{
    aclnnStatus status = aclnn_check_name(name);
    struct aclnn_group *group;

    if (status == ACLNN_SUCCESS && !options)
        status = aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "options is NULL");
    if (status != ACLNN_SUCCESS)
        return status;
    group = calloc(1, sizeof *group);
    if (!group)
        return aclnn_fail(ACLNN_ERR_INNER, "no memory for a group");
    memcpy(group->name, name, strlen(name));
    group->rank = options->rank;
    group->ranks = options->ranks ? options->ranks : 1;
    pthread_mutex_init(&group->lock, NULL);
    if (!aclnn_group_add(group)) {
        drop(group);
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "group is \"%s\": rank %d of this process has one of that name",
                          name,
                          options->rank);
    }
    if (hmoe_group_create(options, &group->group) == HMOE_OK)
        return ACLNN_SUCCESS;
    aclnn_group_remove(name, options->rank);
    drop(group);
    return aclnn_fail(ACLNN_ERR_RUNTIME_ERROR, "%s", hmoe_last_error());
}

static void drop_all(struct aclnn_group *group)
{
    for (struct aclnn_kept *kept; (kept = group->kept); free(kept)) {
        group->kept = kept->next;
        hmoe_saved_destroy(kept->saved);
    }
    for (struct aclnn_plan *plan; (plan = group->plans); free(plan)) {
        group->plans = plan->next;
        hmoe_plan_destroy(plan->plan);
    }
    for (struct aclOpExecutor *executor; (executor = group->executors); free(executor))
        group->executors = executor->next;
}

aclnnStatus aclnnHyperMegaMoEGroupDestroy(const char *name, int64_t epRankId)
{
    aclnnStatus status = aclnn_check_name(name);
    struct aclnn_group *group;

    if (status != ACLNN_SUCCESS)
        return status;
    group = aclnn_group_remove(name, epRankId);
    if (!group)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "group is \"%s\", epRankId %" PRId64 ": no group was made with this"
                          " name and rank", name, epRankId);
    drop_all(group);
    hmoe_group_destroy(group->group);
    drop(group);
    return ACLNN_SUCCESS;
}
