/* The ACLNN interface: what it refuses, by which status, and what it says. */
#include "aclnn_case.h"

/* ---- what phase one refuses */

static void refused(struct bed *bed, aclTensor **which, aclTensor *instead, aclnnStatus status, const char *text)
{
    aclTensor *before = *which;

    *which = instead;
    fails(ask_forward(&bed->l), status, text);
    *which = before;
    aclDestroyTensor(instead);
}

static void grad_refused(struct bed *bed, aclTensor **which, aclTensor *instead, aclnnStatus status, const char *text)
{
    aclTensor *before = *which;

    *which = instead;
    fails(ask_grad(&bed->l), status, text);
    *which = before;
    aclDestroyTensor(instead);
}

static void tensors_refused(void **state)
{
    struct bed bed;
    struct layer *l = &bed.l;
    static float data[8192];

    (void)state;
    open_bed(&bed);
    refused(&bed, &l->x, NULL, ACLNN_ERR_PARAM_NULLPTR, "x is NULL");
    refused(&bed, &l->ids, NULL, ACLNN_ERR_PARAM_NULLPTR, "topkIds is NULL");
    refused(&bed, &l->weights, NULL, ACLNN_ERR_PARAM_NULLPTR, "topkWeights is NULL");
    refused(&bed, &l->up, NULL, ACLNN_ERR_PARAM_NULLPTR, "upProjWeight is NULL");
    refused(&bed, &l->down, NULL, ACLNN_ERR_PARAM_NULLPTR, "downProjWeight is NULL");
    refused(&bed, &l->y, NULL, ACLNN_ERR_PARAM_NULLPTR, "y is NULL");
    refused(&bed, &l->x, flat(20, 40, ACL_DOUBLE, data), ACLNN_ERR_PARAM_INVALID, "the type of x is 11");
    refused(&bed, &l->x, flat(20, 40, ACL_BF16, data), ACLNN_ERR_PARAM_INVALID, "the type of upProjWeight is 0");
    refused(&bed, &l->ids, flat(20, 2, ACL_FLOAT, data), ACLNN_ERR_PARAM_INVALID, "the type of topkIds is 0: 3 or 9");
    refused(&bed, &l->weights, flat(20, 2, ACL_BF16, data), ACLNN_ERR_PARAM_INVALID, "the type of topkWeights is 27");
    refused(&bed, &l->x, bytes_tensor(20, data), ACLNN_ERR_PARAM_INVALID, "the type of x is 4");
    refused(&bed, &l->ids, flat(19, 2, ACL_INT32, data), ACLNN_ERR_PARAM_INVALID, "dimension 0 of topkIds is 19");
    refused(&bed, &l->weights, flat(20, 3, ACL_FLOAT, data), ACLNN_ERR_PARAM_INVALID,
            "dimension 1 of topkWeights is 3");
    refused(&bed, &l->up, flat(40, 48, ACL_FLOAT, data), ACLNN_ERR_PARAM_INVALID, "upProjWeight has 2 dimensions");
    refused(&bed, &l->up, weight(l->c, 40, 46, ACL_FLOAT, data), ACLNN_ERR_PARAM_INVALID,
            "dimension 2 of upProjWeight is 46");
    refused(&bed, &l->y, flat(20, 41, ACL_FLOAT, data), ACLNN_ERR_INNER_INFERSHAPE_ERROR, "dimension 1 of y is 41");
    refused(&bed, &l->saved, flat(20, 40, ACL_UINT8, data), ACLNN_ERR_PARAM_INVALID, "savedOut has 2 dimensions");
    refused(&bed, &l->saved, bytes_tensor(100, data), ACLNN_ERR_PARAM_INVALID, "savedOut has 100 bytes");
    refused(&bed, &l->up, aclCreateTensor((int64_t[]){4, 40, 48}, 3, ACL_FLOAT, (int64_t[]){1920, 1, 40}, 0,
                                          ACL_FORMAT_ND,
            NULL, 0, data), ACLNN_ERR_PARAM_INVALID, "the strides of downProjWeight are [960,40,1]");
    refused(&bed, &l->up, aclCreateTensor((int64_t[]){4, 40, 48}, 3, ACL_FLOAT, (int64_t[]){1, 192, 4}, 0,
                                          ACL_FORMAT_ND,
            NULL, 0, data), ACLNN_ERR_PARAM_INVALID, "the strides of upProjWeight are [1,192,4]");
    run_forward(&bed);
    grad_refused(&bed, &l->dy, NULL, ACLNN_ERR_PARAM_NULLPTR, "dy is NULL");
    grad_refused(&bed, &l->saved, NULL, ACLNN_ERR_PARAM_NULLPTR, "saved is NULL");
    grad_refused(&bed, &l->dx, flat(20, 39, ACL_FLOAT, data), ACLNN_ERR_INNER_INFERSHAPE_ERROR,
                 "dimension 1 of dx is 39");
    grad_refused(&bed, &l->d_weights, flat(20, 2, ACL_BF16, data), ACLNN_ERR_PARAM_INVALID,
                 "the type of dTopkWeights is 27");
    grad_refused(&bed, &l->d_up, weight(l->c, 40, 48, ACL_BF16, data), ACLNN_ERR_PARAM_INVALID,
                 "the type of dUpProjWeight");
    run_grad(&bed);
    close_bed(&bed);
}

static void attributes_refused(void **state)
{
    struct bed bed;
    struct layer good, *l = &bed.l;
    char name[200];

    (void)state;
    open_bed(&bed);
    good = bed.l;
    memset(name, 'n', sizeof name);
    name[128] = 0;
    l->group = NULL;
    fails(ask_forward(l), ACLNN_ERR_PARAM_NULLPTR, "group is NULL");
    l->group = "";
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "group has no characters");
    l->group = name;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "more than 127 characters");
    l->group = "none";
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "group is \"none\", epRankId 0: no group");
    *l = good;
    l->ranks = 2;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "epWorldSize is 2");
    *l = good;
    l->rank = 1;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "epRankId 1");
    *l = good;
    l->experts = 5;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "dimension 0 of downProjWeight is 4");
    l->experts = 0;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "dimension 0 of");
    *l = good;
    l->tokens_max = 19;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "maxTokens is 19");
    l->tokens_max = (int64_t)1 << 50;
    fails(ask_forward(l), ACLNN_ERR_INNER_TILING_ERROR, "tokens_max is 1125899906842624");
    *l = good;
    l->rows_max = -1;
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "maxRecvRows is -1");
    *l = good;
    l->rows_max = 3; /* too few for this call: phase two knows */
    assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoE(NULL, 0, l->executor, NULL), ACLNN_ERR_RUNTIME_ERROR, "rows");
    *l = good;
    fails(aclnnHyperMegaMoEGetWorkspaceSize(l->x, l->ids, l->weights, l->up, l->down, "one", 1, 0, 4, 0, 0, l->y, NULL,
                                            NULL, &l->executor), ACLNN_ERR_PARAM_NULLPTR, "workspaceSize is NULL");
    fails(aclnnHyperMegaMoEGetWorkspaceSize(l->x, l->ids, l->weights, l->up, l->down, "one", 1, 0, 4, 0, 0, l->y, NULL,
                                            &l->workspace, NULL), ACLNN_ERR_PARAM_NULLPTR, "executor is NULL");
    fails(aclnnHyperMegaMoE(NULL, 0, NULL, NULL), ACLNN_ERR_INNER_NULLPTR, "executor is NULL");
    fails(aclnnHyperMegaMoEGroupCreate("one", &alone), ACLNN_ERR_PARAM_INVALID, "rank 0 of this process has one");
    fails(aclnnHyperMegaMoEGroupCreate("x", NULL), ACLNN_ERR_PARAM_NULLPTR, "options is NULL");
    fails(aclnnHyperMegaMoEGroupCreate("x", &(struct hmoe_group_options){.size = sizeof alone, .ranks = -1}),
          ACLNN_ERR_RUNTIME_ERROR, "ranks is -1");
    fails(aclnnHyperMegaMoEGroupDestroy("x", 0), ACLNN_ERR_PARAM_INVALID, "no group was made");
    close_bed(&bed);
}

/* Experts that the ranks cannot share evenly, which only a group of several can show. */
static int uneven(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct layer l = layer_of(b, boot->rank, "ep");

    CHECK(join(boot) == ACLNN_SUCCESS);
    l.experts = 5;
    CHECK(ask_forward(&l) == ACLNN_ERR_INNER_TILING_ERROR);
    CHECK(strstr(aclGetRecentErrMsg(), "moeExpertNum is 5: a multiple of epWorldSize, 2"));
    layer_free(&l);
    CHECK(aclnnHyperMegaMoEGroupDestroy("ep", boot->rank) == ACLNN_SUCCESS);
    return 0;
}

static void uneven_experts(void **state)
{
    struct back_case b = small();

    (void)state;
    b.c.ranks = 2;
    back_make(&b);
    assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, uneven, &b), HMOE_OK);
    back_free(&b);
}

/* ---- tensors by themselves */

static void metadata(void **state)
{
    const int64_t shape[] = {3, 5}, stride[] = {20, 2}, storage[] = {4, 20}, far[] = {(int64_t)1 << 62, 1};
    float data[80];
    aclTensor *tensor = aclCreateTensor(shape, 2, ACL_FLOAT, stride, 7, ACL_FORMAT_ND, storage, 2, data);
    int64_t *got, offset;
    uint64_t count;
    aclDataType type;
    aclFormat format;

    (void)state;
    assert_non_null(tensor);
    assert_int_equal(aclGetViewShape(tensor, &got, &count), ACLNN_SUCCESS);
    assert_true(count == 2 && got[0] == 3 && got[1] == 5);
    free(got);
    assert_int_equal(aclGetViewStrides(tensor, &got, &count), ACLNN_SUCCESS);
    assert_true(count == 2 && got[0] == 20 && got[1] == 2);
    free(got);
    assert_int_equal(aclGetStorageShape(tensor, &got, &count), ACLNN_SUCCESS);
    assert_true(count == 2 && got[0] == 4 && got[1] == 20);
    free(got);
    assert_true(aclGetViewOffset(tensor, &offset) == ACLNN_SUCCESS && offset == 7);
    assert_true(aclGetDataType(tensor, &type) == ACLNN_SUCCESS && type == ACL_FLOAT);
    assert_true(aclGetFormat(tensor, &format) == ACLNN_SUCCESS && format == ACL_FORMAT_ND);
    fails(aclGetViewShape(NULL, &got, &count), ACLNN_ERR_PARAM_NULLPTR, "tensor is NULL");
    fails(aclGetViewOffset(tensor, NULL), ACLNN_ERR_PARAM_NULLPTR, "an output is NULL");
    aclDestroyTensor(tensor);
    assert_null(aclCreateTensor(shape, 2, ACL_FLOAT, stride, 40, ACL_FORMAT_ND, storage, 2, data));
    fails(0, 0, "reaches element 88 of a storage of 80");
    assert_null(aclCreateTensor(shape, 9, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, NULL, 0, data));
    assert_null(aclCreateTensor((int64_t[]){3, -1}, 2, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, NULL, 0, data));
    assert_null(aclCreateTensor(shape, 2, ACL_DT_UNDEFINED, NULL, 0, ACL_FORMAT_ND, NULL, 0, data));
    assert_null(aclCreateTensor(shape, 2, ACL_FLOAT, NULL, -1, ACL_FORMAT_ND, NULL, 0, data));
    assert_null(aclCreateTensor(shape, 2, ACL_FLOAT, NULL, 0, ACL_FORMAT_UNDEFINED, NULL, 0, data));
    assert_null(aclCreateTensor((int64_t[]){(int64_t)1 << 40, (int64_t)1 << 40}, 2, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND,
                                NULL, 0,
                                data));
    assert_null(aclCreateTensor(shape, 2, ACL_FLOAT, far, 0, ACL_FORMAT_ND, storage, 2, data));
    aclIntArray *array = aclCreateIntArray(shape, 2);
    assert_true(aclGetIntArraySize(array, &count) == ACLNN_SUCCESS && count == 2);
    assert_int_equal(aclDestroyIntArray(array), ACLNN_SUCCESS);
    assert_null(aclCreateIntArray(NULL, 2));
    assert_null(aclCreateIntArray(shape, UINT64_MAX));
}

/* ---- without memory; sanitized builds bring an allocator of their own */

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern void *__libc_calloc(size_t count, size_t bytes);
static int64_t callocs_left = INT64_MAX;

void *calloc(size_t count, size_t bytes)
{
    return callocs_left-- > 0 ? __libc_calloc(count, bytes) : NULL;
}

/* The first call of calloc that fails is the one for the executor. */
static void no_memory(void **state)
{
    struct bed bed;
    aclrtStream stream;
    aclnnStatus status;

    (void)state;
    open_bed(&bed);
    assert_int_equal(ask_forward(&bed.l), ACLNN_SUCCESS); /* takes the executor that was free */
    callocs_left = 0;
    status = ask_forward(&bed.l);
    callocs_left = INT64_MAX;
    fails(status, ACLNN_ERR_INNER_CREATE_EXECUTOR, "no memory for an executor");
    callocs_left = 0;
    status = aclrtCreateStream(&stream);
    callocs_left = INT64_MAX;
    fails(status, ACLNN_ERR_INNER, "no memory for a stream");
    callocs_left = 0;
    status = aclnnHyperMegaMoEGroupCreate("more", &alone);
    aclTensor *tensor = flat(1, 1, ACL_FLOAT, NULL);
    callocs_left = INT64_MAX;
    fails(status, ACLNN_ERR_INNER, "no memory for a tensor");
    assert_null(tensor);
    close_bed(&bed);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_refused), cmocka_unit_test(attributes_refused), cmocka_unit_test(uneven_experts),
        cmocka_unit_test(metadata),
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        cmocka_unit_test(no_memory),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
