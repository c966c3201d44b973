/* The four calls of the two phases, and executors: copies of what phase one was given, kept by their group. */
#include "aclnn/aclnn.h"

#include <inttypes.h>
#include <stdlib.h>

/* Slots by the index that the setters count. */
static const struct {
    int inputs, outputs;
    enum aclnn_slot input[7], output[4];
} order[] = {
    [FORWARD] = {5, 2, {X, IDS, WEIGHTS, UP, DOWN}, {Y, SAVED}},
    [GRAD] = {7, 4, {DY, X, IDS, WEIGHTS, UP, DOWN, SAVED}, {DX, D_WEIGHTS, D_UP, D_DOWN}},
};

/* ---- kept by the group */

static struct aclOpExecutor *take(const struct aclnn_work *work)
{
    struct aclnn_group *group = work->group;
    struct aclOpExecutor *executor;

    pthread_mutex_lock(&group->lock);
    for (executor = group->executors; executor && !executor->used_up; executor = executor->next)
        continue;
    if (!executor && (executor = calloc(1, sizeof *executor))) {
        executor->next = group->executors;
        group->executors = executor;
    }
    if (executor) {
        executor->work = *work;
        executor->used_up = executor->repeatable = false;
    }
    pthread_mutex_unlock(&group->lock);
    return executor;
}

static aclnnStatus usable(const struct aclOpExecutor *executor)
{
    if (!executor)
        return aclnn_fail(ACLNN_ERR_INNER_NULLPTR, "executor is NULL");
    if (executor->used_up)
        return aclnn_fail(ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR, "the executor was used already: make another one, or make"
                          " it repeatable before its first use");
    return ACLNN_SUCCESS;
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor)
{
    aclnnStatus status = usable(executor);

    if (status == ACLNN_SUCCESS)
        executor->repeatable = true;
    return status;
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor)
{
    aclnnStatus status = usable(executor);

    if (status == ACLNN_SUCCESS)
        executor->used_up = true;
    return status;
}

static aclnnStatus set_address(struct aclOpExecutor *executor, const char *what, size_t index, bool input, void *addr)
{
    aclnnStatus status = usable(executor);
    int count;

    if (status != ACLNN_SUCCESS)
        return status;
    count = input ? order[executor->work.kind].inputs : order[executor->work.kind].outputs;
    if (index >= (size_t)count)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "index is %zu: %s 0 to %d are allowed", index, what, count - 1);
    enum aclnn_slot slot = (input ? order[executor->work.kind].input : order[executor->work.kind].output)[index];
    if (executor->work.tensor[slot].dims < 0)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "index is %zu: phase one was given no tensor there", index);
    executor->work.tensor[slot].data = addr;
    return ACLNN_SUCCESS;
}

aclnnStatus aclSetInputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr)
{
    (void)tensor;
    return set_address(executor, "inputs", index, true, addr);
}

aclnnStatus aclSetOutputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr)
{
    (void)tensor;
    return set_address(executor, "outputs", index, false, addr);
}

/* ---- phase one */

struct given {
    enum aclnn_slot slot;
    const char *name;
    const struct aclTensor *tensor;
    bool optional;
};

static aclnnStatus copy_tensors(struct aclnn_work *work, const struct given *given, int count)
{
    for (int s = 0; s < SLOTS; s++)
        work->tensor[s].dims = -1;
    for (int i = 0; i < count; i++) {
        if (given[i].tensor)
            work->tensor[given[i].slot] = *given[i].tensor;
        else if (!given[i].optional)
            return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "%s is NULL", given[i].name);
    }
    return ACLNN_SUCCESS;
}

static aclnnStatus prepare(struct aclnn_work *work, const struct aclnn_attributes *attributes, uint64_t *workspace_size,
                           struct aclOpExecutor **executor)
{
    aclnnStatus status;

    if (!workspace_size || !executor)
        return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "%s is NULL", workspace_size ? "executor" : "workspaceSize");
    status = aclnn_check(work, attributes);
    if (status != ACLNN_SUCCESS)
        return status;
    struct aclOpExecutor *made = take(work);
    if (!made)
        return aclnn_fail(ACLNN_ERR_INNER_CREATE_EXECUTOR, "no memory for an executor");
    *executor = made;
    *workspace_size = work->workspace_bytes;
    return ACLNN_SUCCESS;
}

aclnnStatus aclnnHyperMegaMoEGetWorkspaceSize(
    const aclTensor *x, const aclTensor *topkIds, const aclTensor *topkWeights, const aclTensor *upProjWeight,
    const aclTensor *downProjWeight, const char *group, int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum,
    int64_t maxTokens, int64_t maxRecvRows, aclTensor *y, aclTensor *savedOut, uint64_t *workspaceSize,
    aclOpExecutor **executor)
{
    const struct given given[] = {
        {X, "x", x, false}, {IDS, "topkIds", topkIds, false}, {WEIGHTS, "topkWeights", topkWeights, false},
        {UP, "upProjWeight", upProjWeight, false}, {DOWN, "downProjWeight", downProjWeight, false}, {Y, "y", y, false},
        {SAVED, "savedOut", savedOut, true}};
    struct aclnn_attributes attributes = {group, epWorldSize, epRankId, moeExpertNum, maxTokens, maxRecvRows};
    struct aclnn_work work = {.kind = FORWARD};
    aclnnStatus status = copy_tensors(&work, given, 7);

    if (status == ACLNN_SUCCESS)
        status = prepare(&work, &attributes, workspaceSize, executor);
    if (status == ACLNN_SUCCESS && savedOut)
        *savedOut = work.tensor[SAVED];
    return status;
}

aclnnStatus aclnnHyperMegaMoEGradGetWorkspaceSize(
    const aclTensor *dy, const aclTensor *x, const aclTensor *topkIds, const aclTensor *topkWeights,
    const aclTensor *upProjWeight, const aclTensor *downProjWeight, const aclTensor *saved, const char *group,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, int64_t maxTokens, int64_t maxRecvRows, aclTensor *dx,
    aclTensor *dTopkWeights, aclTensor *dUpProjWeight, aclTensor *dDownProjWeight, uint64_t *workspaceSize,
    aclOpExecutor **executor)
{
    const struct given given[] = {
        {DY, "dy", dy, false}, {X, "x", x, false}, {IDS, "topkIds", topkIds, false},
        {WEIGHTS, "topkWeights", topkWeights, false}, {UP, "upProjWeight", upProjWeight, false},
        {DOWN, "downProjWeight", downProjWeight, false}, {SAVED, "saved", saved, false}, {DX, "dx", dx, true},
        {D_WEIGHTS, "dTopkWeights", dTopkWeights, true}, {D_UP, "dUpProjWeight", dUpProjWeight, true},
        {D_DOWN, "dDownProjWeight", dDownProjWeight, true}};
    struct aclnn_attributes attributes = {group, epWorldSize, epRankId, moeExpertNum, maxTokens, maxRecvRows};
    struct aclnn_work work = {.kind = GRAD};
    aclnnStatus status = copy_tensors(&work, given, 11);

    return status == ACLNN_SUCCESS ? prepare(&work, &attributes, workspaceSize, executor) : status;
}

/* ---- phase two */

static aclnnStatus check_launch(enum aclnn_kind kind, const void *workspace, uint64_t bytes,
                                const struct aclOpExecutor *executor)
{
    aclnnStatus status = usable(executor);

    if (status != ACLNN_SUCCESS)
        return status;
    if (executor->work.kind != kind)
        return aclnn_fail(ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR, "the executor is one of %s",
                          kind == FORWARD ? "aclnnHyperMegaMoEGrad" : "aclnnHyperMegaMoE");
    if (bytes < executor->work.workspace_bytes)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "workspaceSize is %" PRIu64 ": phase one asked for %zu", bytes,
                          executor->work.workspace_bytes);
    if (executor->work.workspace_bytes && !workspace)
        return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "workspace is NULL: %zu bytes are needed",
                          executor->work.workspace_bytes);
    return ACLNN_SUCCESS;
}

static aclnnStatus launch(enum aclnn_kind kind, void *workspace, uint64_t bytes, struct aclOpExecutor *executor,
                          aclrtStream stream)
{
    aclnnStatus status = check_launch(kind, workspace, bytes, executor);
    struct aclnn_work work;

    if (status != ACLNN_SUCCESS)
        return status;
    work = executor->work;
    work.workspace = workspace;
    executor->used_up = !executor->repeatable;
    return stream ? aclnn_enqueue(stream, &work) : aclnn_run(&work);
}

aclnnStatus aclnnHyperMegaMoE(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream)
{
    return launch(FORWARD, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnHyperMegaMoEGrad(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream)
{
    return launch(GRAD, workspace, workspaceSize, executor, stream);
}
