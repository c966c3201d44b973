/* The ACLNN interface: the oracle's bits by way of tensors, executors and streams. */
#include "aclnn_case.h"

/* ---- the oracle's bits */

static int train(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct layer l = layer_of(b, boot->rank, "ep");
    aclrtStream stream;
    char *memory, *workspace;
    int64_t bytes;

    CHECK(join(boot) == ACLNN_SUCCESS);
    CHECK(aclrtCreateStream(&stream) == ACL_SUCCESS);
    CHECK(ask_forward(&l) == ACLNN_SUCCESS);
    bytes = saved_bytes(&l);
    CHECK(l.workspace == 0 && bytes > 0);
    memory = malloc((size_t)bytes);
    CHECK(aclSetOutputTensorAddr(l.executor, 1, l.saved, memory) == ACLNN_SUCCESS);
    CHECK(aclnnHyperMegaMoE(NULL, 0, l.executor, stream) == ACLNN_SUCCESS);
    aclDestroyTensor(l.saved);
    l.saved = bytes_tensor(bytes, memory);
    CHECK(ask_grad(&l) == ACLNN_SUCCESS);
    workspace = malloc(l.workspace + 1);
    layer_free(&l); /* tensors are not needed any more */
    back_reset(b, boot->rank);
    CHECK(aclnnHyperMegaMoEGrad(workspace, l.workspace, l.executor, stream) == ACLNN_SUCCESS);
    CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
    CHECK(!case_differs(&b->c, boot->rank) && !back_differs(b, boot->rank));
    CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
    CHECK(aclnnHyperMegaMoEGroupDestroy("ep", boot->rank) == ACLNN_SUCCESS);
    free(memory);
    free(workspace);
    return 0;
}

static void the_oracles_bits(void **state)
{
    (void)state;
    for (int i = 0; i < 24; i++) {
        struct back_case b = small();
        b.c.dtype = (enum hmoe_dtype)(i % 3);
        b.c.layout = (enum hmoe_layout)(i / 3 % 2);
        b.c.ranks = 1 + i / 6 % 2;
        b.c.ids_type = (enum hmoe_index)(i / 12);
        b.dw_type = i / 12 ? HMOE_F32 : b.c.dtype;
        back_make(&b);
        assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, b.c.ranks, train, &b), HMOE_OK);
        back_free(&b);
    }
    assert_int_equal(aclnnFinalize(), ACLNN_SUCCESS);
}

/* A saved state that is no good on one rank: the other hears of it at once. */
static int one_is_wrong(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct layer l = layer_of(b, boot->rank, "ep");
    char *memory = calloc(1, 1 << 20);
    aclnnStatus status;

    CHECK(memory && join(boot) == ACLNN_SUCCESS);
    aclDestroyTensor(l.saved);
    l.saved = bytes_tensor(1 << 20, memory);
    CHECK(ask_forward(&l) == ACLNN_SUCCESS && aclnnHyperMegaMoE(NULL, 0, l.executor, NULL) == ACLNN_SUCCESS);
    aclDestroyTensor(l.saved);
    l.saved = bytes_tensor((1 << 20) - 4096, memory + (boot->rank ? 4096 : 0));
    CHECK(ask_grad(&l) == ACLNN_SUCCESS);
    status = aclnnHyperMegaMoEGrad(NULL, 0, l.executor, NULL);
    CHECK(status == (boot->rank ? ACLNN_ERR_PARAM_INVALID : ACLNN_ERR_RUNTIME_ERROR));
    CHECK(strstr(aclGetRecentErrMsg(), boot->rank ? "holds no saved state" : "saved of rank 1 is NULL"));
    aclDestroyTensor(l.saved);
    l.saved = bytes_tensor(1 << 20, memory);
    back_reset(b, boot->rank);
    CHECK(ask_grad(&l) == ACLNN_SUCCESS && aclnnHyperMegaMoEGrad(NULL, 0, l.executor, NULL) == ACLNN_SUCCESS);
    CHECK(!back_differs(b, boot->rank));
    layer_free(&l);
    CHECK(aclnnHyperMegaMoEGroupDestroy("ep", boot->rank) == ACLNN_SUCCESS);
    free(memory);
    return 0;
}

static void wrong_on_one_rank(void **state)
{
    struct back_case b = small();

    (void)state;
    b.c.ranks = 2;
    back_make(&b);
    assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, one_is_wrong, &b), HMOE_OK);
    back_free(&b);
}

/* Every second element of twice the memory, rows 4 elements further apart, beginning at element 3. */
static aclTensor *spread(int64_t rows, int64_t columns, aclDataType type, size_t element, const char *from, char **made)
{
    int64_t line = 2 * columns + 4, shape[] = {rows, columns}, stride[] = {line, 2}, storage = rows * line + 3;

    *made = malloc((size_t)storage * element);
    memset(*made, 0xff, (size_t)storage * element);
    for (int64_t r = 0; r < rows && from; r++)
        for (int64_t i = 0; i < columns; i++)
            memcpy(*made + (size_t)(3 + r * line + 2 * i) * element, from + (size_t)(r * columns + i) * element,
                   element);
    return aclCreateTensor(shape, 2, type, stride, 3, ACL_FORMAT_ND, &storage, 1, *made);
}

static void collect(char *to, int64_t rows, int64_t columns, size_t element, const char *from)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i++)
            memcpy(to + (size_t)(r * columns + i) * element,
                   from + (size_t)(3 + r * (2 * columns + 4) + 2 * i) * element, element);
}

static void any_strides(void **state)
{
    struct bed bed;
    struct layer *l = &bed.l;
    struct hmoe_gradients grad;
    char *made[7], *workspace;

    (void)state;
    open_bed(&bed);
    struct hmoe_call call = case_call(&bed.b.c, 0);
    back_gradients(&bed.b, 0, &grad);
    aclTensor *replaced[] = {l->x, l->ids, l->weights, l->y, l->dy, l->dx, l->d_weights};
    l->x = spread(20, 40, ACL_FLOAT, 4, call.x, &made[0]);
    l->ids = spread(20, 2, ACL_INT32, 4, call.topk_ids, &made[1]);
    l->weights = spread(20, 2, ACL_FLOAT, 4, call.topk_weights, &made[2]);
    l->y = spread(20, 40, ACL_FLOAT, 4, NULL, &made[3]);
    l->dy = spread(20, 40, ACL_FLOAT, 4, grad.dy, &made[4]);
    l->dx = spread(20, 40, ACL_FLOAT, 4, NULL, &made[5]);
    l->d_weights = spread(20, 2, ACL_FLOAT, 4, NULL, &made[6]);
    for (int i = 0; i < 7; i++)
        aclDestroyTensor(replaced[i]);
    back_reset(&bed.b, 0);
    assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
    assert_true(l->workspace >= 2 * 20 * 40 * 4 + 2 * 20 * 2 * 4);
    workspace = malloc(l->workspace);
    fails(aclnnHyperMegaMoE(NULL, l->workspace, l->executor, NULL), ACLNN_ERR_PARAM_NULLPTR, "workspace is NULL");
    fails(aclnnHyperMegaMoE(workspace, 5, l->executor, NULL), ACLNN_ERR_PARAM_INVALID, "workspaceSize is 5");
    assert_int_equal(aclnnHyperMegaMoE(workspace, l->workspace, l->executor, NULL), ACLNN_SUCCESS);
    collect(call.y, 20, 40, 4, made[3]);
    assert_false(case_differs(&bed.b.c, 0));
    assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
    workspace = realloc(workspace, l->workspace);
    assert_int_equal(aclnnHyperMegaMoEGrad(workspace, l->workspace, l->executor, NULL), ACLNN_SUCCESS);
    collect(grad.dx, 20, 40, 4, made[5]);
    collect(grad.d_topk_weights, 20, 2, 4, made[6]);
    assert_false(back_differs(&bed.b, 0));
    free(workspace);
    for (int i = 0; i < 7; i++)
        free(made[i]);
    close_bed(&bed);
}

static void repeatable_executors(void **state)
{
    struct bed bed;
    struct layer *l = &bed.l;
    float y[20 * 40];

    (void)state;
    open_bed(&bed);
    run_forward(&bed);
    fails(aclnnHyperMegaMoE(NULL, 0, l->executor, NULL), ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR, "used already");
    fails(aclSetAclOpExecutorRepeatable(l->executor), ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR, "used already");
    fails(aclSetInputTensorAddr(l->executor, 0, NULL, y), ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR, "used already");
    assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, NULL), ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR,
          "of aclnnHyperMegaMoE");
    assert_int_equal(aclSetAclOpExecutorRepeatable(l->executor), ACLNN_SUCCESS);
    for (int i = 0; i < 3; i++)
        assert_int_equal(aclnnHyperMegaMoE(NULL, 0, l->executor, NULL), ACLNN_SUCCESS);
    assert_int_equal(aclSetOutputTensorAddr(l->executor, 0, l->y, y), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoE(NULL, 0, l->executor, NULL), ACLNN_SUCCESS);
    assert_memory_equal(y, case_call(&bed.b.c, 0).y, sizeof y);
    fails(aclSetInputTensorAddr(l->executor, 5, NULL, y), ACLNN_ERR_PARAM_INVALID, "index is 5: inputs 0 to 4");
    fails(aclSetOutputTensorAddr(l->executor, 2, NULL, y), ACLNN_ERR_PARAM_INVALID, "index is 2: outputs 0 to 1");
    assert_int_equal(aclSetInputTensorAddr(l->executor, 0, NULL, NULL), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoE(NULL, 0, l->executor, NULL), ACLNN_ERR_PARAM_NULLPTR, "is NULL");
    assert_int_equal(aclDestroyAclOpExecutor(l->executor), ACLNN_SUCCESS);
    run_grad(&bed);
    close_bed(&bed);
}

static void saved_states(void **state)
{
    struct bed bed;
    struct layer *l = &bed.l;
    aclTensor *good;
    char *elsewhere;
    int64_t bytes;

    (void)state;
    open_bed(&bed);
    good = l->saved;
    memset(bed.memory, 0, 128);
    assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, NULL), ACLNN_ERR_PARAM_INVALID, "holds no saved state");
    run_forward(&bed);
    run_forward(&bed); /* the one before is given up */
    run_grad(&bed);
    assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, NULL), ACLNN_ERR_PARAM_INVALID, "holds no saved state");
    run_forward(&bed);
    l->saved = bytes_tensor(0, NULL);
    assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
    bytes = saved_bytes(l);
    aclDestroyAclOpExecutor(l->executor);
    aclDestroyTensor(l->saved);
    elsewhere = malloc((size_t)bytes + 64);
    memcpy((char *)(((uintptr_t)elsewhere + 63) / 64 * 64), (char *)(((uintptr_t)bed.memory + 63) / 64 * 64),
           (size_t)bytes - 64);
    l->saved = bytes_tensor(bytes, elsewhere);
    assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, NULL), ACLNN_ERR_PARAM_INVALID, "it must not move");
    aclDestroyTensor(l->saved);
    l->saved = bytes_tensor(bytes - 1, elsewhere);
    fails(ask_grad(l), ACLNN_ERR_PARAM_INVALID, "saved has ");
    fails(ask_forward(l), ACLNN_ERR_PARAM_INVALID, "savedOut has ");
    aclDestroyTensor(l->saved);
    assert_int_equal(aclnnHyperMegaMoEGroupCreate("two", &alone), ACLNN_SUCCESS);
    l->saved = good;
    l->group = "two";
    assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
    fails(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, NULL), ACLNN_ERR_PARAM_INVALID, "by another group than \"two\"");
    l->group = "one";
    run_grad(&bed);
    run_forward(&bed); /* its gradient never comes: the group gives it up */
    assert_int_equal(aclnnHyperMegaMoEGroupDestroy("two", 0), ACLNN_SUCCESS);
    free(elsewhere);
    close_bed(&bed);
}

static void streams(void **state)
{
    struct bed bed;
    struct layer *l = &bed.l;
    int32_t wrong[40];
    aclrtStream stream;

    (void)state;
    open_bed(&bed);
    assert_int_equal(aclrtCreateStream(&stream), ACL_SUCCESS);
    fails(aclrtCreateStream(NULL), ACLNN_ERR_PARAM_NULLPTR, "stream is NULL");
    fails(aclrtDestroyStream(NULL), ACLNN_ERR_PARAM_NULLPTR, "stream is NULL");
    assert_int_equal(aclrtSynchronizeStream(NULL), ACL_SUCCESS);
    for (int i = 0; i < 20; i++) { /* each gradient needs the forward before it to be over */
        assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
        assert_int_equal(aclnnHyperMegaMoE(NULL, 0, l->executor, stream), ACLNN_SUCCESS);
        assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
        assert_int_equal(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, stream), ACLNN_SUCCESS);
    }
    assert_int_equal(aclrtSynchronizeStream(stream), ACL_SUCCESS);
    assert_false(back_differs(&bed.b, 0));
    memset(wrong, 0, sizeof wrong);
    wrong[7] = 4;
    assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
    assert_int_equal(aclSetInputTensorAddr(l->executor, 1, NULL, wrong), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoE(NULL, 0, l->executor, stream), ACLNN_SUCCESS);
    assert_int_equal(ask_grad(l), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoEGrad(NULL, 0, l->executor, stream), ACLNN_SUCCESS);
    fails(aclrtSynchronizeStream(stream), ACLNN_ERR_RUNTIME_ERROR, "token 3, slot 1 is 4");
    assert_int_equal(aclrtSynchronizeStream(stream), ACL_SUCCESS); /* told once */
    assert_int_equal(ask_forward(l), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoE(NULL, 0, l->executor, stream), ACLNN_SUCCESS);
    assert_int_equal(aclrtDestroyStream(stream), ACL_SUCCESS);
    run_grad(&bed);
    close_bed(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oracles_bits), cmocka_unit_test(any_strides), cmocka_unit_test(repeatable_executors),
        cmocka_unit_test(saved_states), cmocka_unit_test(streams), cmocka_unit_test(wrong_on_one_rank),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
