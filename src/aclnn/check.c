/* Phase one: everything that can be known about a call without asking another rank. */
#include "aclnn/aclnn.h"

#include <inttypes.h>

static const char *const names[2][SLOTS] = {
    [FORWARD] = {"x", "topkIds", "topkWeights", "upProjWeight", "downProjWeight", "dy", "savedOut", "y"},
    [GRAD] = {"x", "topkIds", "topkWeights", "upProjWeight", "downProjWeight", "dy", "saved", "y", "dx",
              "dTopkWeights", "dUpProjWeight", "dDownProjWeight"},
};

static const char *name_of(const struct aclnn_work *work, enum aclnn_slot slot)
{
    return names[work->kind][slot];
}

/* ---- each tensor */

static aclnnStatus check_type(const struct aclnn_work *work, enum aclnn_slot slot, aclDataType a, aclDataType b)
{
    aclDataType type = work->tensor[slot].type;

    if (!aclnn_has(work, slot) || type == a || type == b)
        return ACLNN_SUCCESS;
    if (a == b)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "the type of %s is %d: %d is allowed", name_of(work, slot),
                          (int)type,
                          (int)a);
    return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "the type of %s is %d: %d or %d are allowed", name_of(work, slot),
                      (int)type, (int)a, (int)b);
}

static aclnnStatus check_types(const struct aclnn_work *work)
{
    aclDataType x = work->tensor[X].type, weights = work->tensor[WEIGHTS].type;
    aclDataType dw = aclnn_has(work, D_UP) ? work->tensor[D_UP].type : x;
    aclnnStatus status = ACLNN_SUCCESS;

    if (x != ACL_FLOAT && x != ACL_FLOAT16 && x != ACL_BF16)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID,
                          "the type of x is %d: ACL_FLOAT (0), ACL_FLOAT16 (1) or ACL_BF16 (27)"
                          " are allowed", (int)x);
    const struct {
        enum aclnn_slot slot;
        aclDataType a, b;
    } allowed[] = {{IDS, ACL_INT32, ACL_INT64}, {WEIGHTS, ACL_FLOAT, x}, {UP, x, x}, {DOWN, x, x}, {DY, x, x},
                   {Y, x, x},
                   {DX, x, x}, {D_WEIGHTS, weights, weights}, {D_UP, ACL_FLOAT, x}, {D_DOWN, ACL_FLOAT, x},
                   {SAVED, ACL_UINT8, ACL_UINT8}};
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed && !status; i++)
        status = check_type(work, allowed[i].slot, allowed[i].a, allowed[i].b);
    if (!status && aclnn_has(work, D_UP) && aclnn_has(work, D_DOWN))
        status = check_type(work, D_DOWN, dw, dw);
    return status;
}

/* `text` is what the shape means; sizes of -1 are any. */
static aclnnStatus check_shape(const struct aclnn_work *work, enum aclnn_slot slot, const char *text, int dims,
                               const int64_t *sizes)
{
    const struct aclTensor *tensor = &work->tensor[slot];
    aclnnStatus wrong = slot >= Y ? ACLNN_ERR_INNER_INFERSHAPE_ERROR : ACLNN_ERR_PARAM_INVALID;

    if (!aclnn_has(work, slot))
        return ACLNN_SUCCESS;
    if (tensor->dims != dims)
        return aclnn_fail(wrong, "%s has %d dimensions: %s is expected", name_of(work, slot), tensor->dims, text);
    for (int d = 0; d < dims; d++)
        if (sizes[d] >= 0 && tensor->shape[d] != sizes[d])
            return aclnn_fail(wrong, "dimension %d of %s is %" PRId64 ": %s is expected, with %" PRId64 " there", d,
                              name_of(work, slot), tensor->shape[d], text, sizes[d]);
    return ACLNN_SUCCESS;
}

static aclnnStatus check_shapes(struct aclnn_work *work, const struct aclnn_attributes *a)
{
    const struct aclTensor *tensor = work->tensor;
    int64_t local = a->experts / a->ranks;
    int64_t T = tensor[X].shape[0], H = tensor[X].shape[1], K = tensor[IDS].shape[1], I = tensor[DOWN].shape[1];
    const int64_t rows[] = {T, H}, slots[] = {T, K}, up[] = {local, H, 2 * I}, down[] = {local, I, H};
    const struct {
        enum aclnn_slot slot;
        const char *text;
        int dims;
        const int64_t *sizes;
    } expected[] = {{X, "[T,H]", 2, rows}, {IDS, "[T,K]", 2, slots}, {WEIGHTS, "[T,K]", 2, slots},
                    {DOWN, "[L,I,H]", 3, down}, {UP, "[L,H,2I]", 3, up}, {DY, "[T,H]", 2, rows}, {Y, "[T,H]", 2, rows},
                    {DX, "[T,H]", 2, rows}, {D_WEIGHTS, "[T,K]", 2, slots}, {D_UP, "[L,H,2I]", 3, up},
                    {D_DOWN, "[L,I,H]", 3, down}, {SAVED, "[bytes]", 1, (const int64_t[]){-1}}};
    aclnnStatus status = ACLNN_SUCCESS;

    for (size_t i = 0; i < sizeof expected / sizeof *expected && !status; i++)
        status = check_shape(work, expected[i].slot, expected[i].text, expected[i].dims, expected[i].sizes);
    work->tokens = T;
    return status;
}

/* ---- layout: one for all weights and their gradients */

static aclnnStatus check_layout(struct aclnn_work *work)
{
    static const enum aclnn_slot slots[] = {UP, DOWN, D_UP, D_DOWN};
    static const int kn[] = {0, 1, 2}, nk[] = {0, 2, 1};
    bool all_kn = true, all_nk = true;

    for (int i = 0; i < 4; i++) {
        const struct aclTensor *tensor = &work->tensor[slots[i]];
        if (!aclnn_has(work, slots[i]))
            continue;
        all_kn = all_kn && aclnn_dense(tensor, kn);
        all_nk = all_nk && aclnn_dense(tensor, nk);
        if (!all_kn && !all_nk)
            return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "the strides of %s are [%" PRId64 ",%" PRId64 ",%" PRId64 "]:"
                              " weights and their gradients must all be contiguous, or all the transposed view of"
                              " contiguous memory", name_of(work, slots[i]), tensor->stride[0], tensor->stride[1],
                              tensor->stride[2]);
    }
    work->options.layout = all_kn ? HMOE_KN : HMOE_NK;
    return ACLNN_SUCCESS;
}

/* ---- attributes */

static aclnnStatus check_group(struct aclnn_work *work, const struct aclnn_attributes *a)
{
    aclnnStatus status = aclnn_check_name(a->group);

    if (status != ACLNN_SUCCESS)
        return status;
    work->group = aclnn_group_find(a->group, a->rank);
    if (!work->group)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "group is \"%s\", epRankId %" PRId64 ": no group was made with this"
                          " name and rank", a->group, a->rank);
    if (a->ranks != work->group->ranks)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "epWorldSize is %" PRId64 ": group \"%s\" has %d ranks", a->ranks,
                          a->group, work->group->ranks);
    return ACLNN_SUCCESS;
}

static aclnnStatus check_numbers(const struct aclnn_work *work, const struct aclnn_attributes *a)
{
    if (a->experts < 1 || a->experts > INT32_MAX)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "moeExpertNum is %" PRId64 ": 1 to %d are allowed", a->experts,
                          INT32_MAX);
    if (a->experts % a->ranks)
        return aclnn_fail(ACLNN_ERR_INNER_TILING_ERROR, "moeExpertNum is %" PRId64 ": a multiple of epWorldSize, %"
                          PRId64 ", is needed", a->experts, a->ranks);
    if (a->tokens_max < 0 || (a->tokens_max && work->tokens > a->tokens_max))
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID,
                          "maxTokens is %" PRId64 ": 0, or at least the %" PRId64 " tokens of x"
                          " are allowed", a->tokens_max, work->tokens);
    if (a->rows_max < 0)
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "maxRecvRows is %" PRId64 ": at least 0 is allowed", a->rows_max);
    return ACLNN_SUCCESS;
}

/* What the library says to these options, before any plan is made. */
static aclnnStatus check_options(struct aclnn_work *work, const struct aclnn_attributes *a)
{
    const struct aclTensor *tensor = work->tensor;
    struct hmoe_workspace workspace = {.size = sizeof workspace};
    struct hmoe_plan_options *options = &work->options;

    options->size = sizeof *options;
    options->hidden = tensor[X].shape[1];
    options->inner = tensor[DOWN].shape[1];
    options->experts = (int)a->experts;
    options->topk = tensor[IDS].shape[1] <= INT32_MAX ? (int)tensor[IDS].shape[1] : INT32_MAX;
    options->tokens_max = a->tokens_max ? a->tokens_max : work->tokens;
    options->receive_max = a->rows_max;
    options->dtype = aclnn_dtype(tensor[X].type);
    options->training = aclnn_has(work, SAVED);
    if (hmoe_workspace_query(options, work->group->ranks, 1, &workspace) != HMOE_OK)
        return aclnn_fail(ACLNN_ERR_INNER_TILING_ERROR, "%s", hmoe_last_error());
    return ACLNN_SUCCESS;
}

/* ---- sizes */

static aclnnStatus measure_saved(struct aclnn_work *work)
{
    struct hmoe_saved_options options = {.size = sizeof options};
    struct aclTensor *saved = &work->tensor[SAVED];
    size_t bytes = 0;

    if (!aclnn_has(work, SAVED))
        return ACLNN_SUCCESS;
    if (hmoe_saved_query(&work->options, work->group->ranks, &options, &bytes) != HMOE_OK)
        return aclnn_fail(ACLNN_ERR_INNER_TILING_ERROR, "%s", hmoe_last_error());
    work->saved_bytes = bytes + 2 * ACLNN_LINE; /* to a line, and the header */
    if (work->kind == FORWARD && !saved->data) {
        saved->shape[0] = (int64_t)work->saved_bytes;
        saved->stride[0] = 1;
    }
    if (saved->shape[0] < (int64_t)work->saved_bytes || (saved->stride[0] != 1 && saved->shape[0] > 1))
        return aclnn_fail(ACLNN_ERR_PARAM_INVALID, "%s has %" PRId64 " bytes: at least %zu, contiguous, are needed",
                          name_of(work, SAVED), saved->shape[0], work->saved_bytes);
    return ACLNN_SUCCESS;
}

static void measure_workspace(struct aclnn_work *work)
{
    for (int s = 0; s < SLOTS; s++)
        work->workspace_bytes += aclnn_staged_bytes(&work->tensor[s]);
    if (work->workspace_bytes)
        work->workspace_bytes += ACLNN_LINE; /* to a line */
}

aclnnStatus aclnn_check(struct aclnn_work *work, const struct aclnn_attributes *attributes)
{
    aclnnStatus status = check_group(work, attributes);

    if (!status)
        status = check_types(work);
    if (!status)
        status = check_shapes(work, attributes);
    if (!status)
        status = check_numbers(work, attributes);
    if (!status)
        status = check_layout(work);
    if (!status)
        status = check_options(work, attributes);
    if (!status)
        status = measure_saved(work);
    if (!status)
        measure_workspace(work);
    return status;
}
