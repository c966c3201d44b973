/* What the tests of the ACLNN interface share: a layer as tensors and attributes, and a group of one rank with it. */
#ifndef ACLNN_CASE_H
#define ACLNN_CASE_H

#include "back_case.h"

#include "aclnn_hyper_mega_moe.h"

#include <stdlib.h>

static inline aclDataType type_of(enum hmoe_dtype dtype)
{
    return dtype == HMOE_F32 ? ACL_FLOAT : dtype == HMOE_BF16 ? ACL_BF16 : ACL_FLOAT16;
}

static inline aclTensor *flat(int64_t rows, int64_t columns, aclDataType type, const void *data)
{
    return aclCreateTensor((int64_t[]){rows, columns}, 2, type, NULL, 0, ACL_FORMAT_ND, NULL, 0,
                           (void *)(uintptr_t)data);
}

/* [count, rows, columns], or the transposed view of [count, columns, rows]. */
static inline aclTensor *weight(const struct moe_case *c, int64_t rows, int64_t columns, aclDataType type,
                                const void *data)
{
    int64_t local = c->experts / c->ranks, shape[] = {local, rows, columns};
    int64_t transposed[] = {rows * columns, 1, rows};

    return aclCreateTensor(shape, 3, type, c->layout == HMOE_NK ? transposed : NULL, 0, ACL_FORMAT_ND, NULL, 0,
                           (void *)(uintptr_t)data);
}

static inline aclTensor *bytes_tensor(int64_t bytes, void *data)
{
    return aclCreateTensor(&bytes, 1, ACL_UINT8, NULL, 0, ACL_FORMAT_ND, NULL, 0, data);
}

/* What a rank passes: tensors by name, attributes, and what it gets. */
struct layer {
    const struct moe_case *c;
    const char *group;
    int64_t ranks, rank, experts, tokens_max, rows_max;
    aclTensor *x, *ids, *weights, *up, *down, *y, *saved, *dy, *dx, *d_weights, *d_up, *d_down;
    uint64_t workspace;
    aclOpExecutor *executor;
};

static inline struct layer layer_of(struct back_case *b, int rank, const char *group)
{
    const struct moe_case *c = &b->c;
    struct hmoe_call call = case_call(c, rank);
    int64_t T = c->tokens[rank], H = c->hidden, I = c->inner;
    aclDataType type = type_of(c->dtype), dw = type_of(b->dw_type);
    struct hmoe_gradients grad;

    back_gradients(b, rank, &grad);
    return (struct layer){
        .c = c, .group = group, .ranks = c->ranks, .rank = rank, .experts = c->experts, .tokens_max = 64,
        .x = flat(T, H, type, call.x), .ids = flat(T, c->topk, c->ids_type == HMOE_I64 ? ACL_INT64 : ACL_INT32,
        call.topk_ids), .weights = flat(T, c->topk, type_of(c->weights_type), call.topk_weights),
        .up = weight(c, H, 2 * I, type, call.layer.up_proj), .down = weight(c, I, H, type, call.layer.down_proj),
        .y = flat(T, H, type, call.y), .saved = bytes_tensor(0, NULL), .dy = flat(T, H, type, grad.dy),
        .dx = flat(T, H, type, grad.dx), .d_weights = flat(T, c->topk, type_of(c->weights_type), grad.d_topk_weights),
        .d_up = weight(c, H, 2 * I, dw, grad.d_up_proj), .d_down = weight(c, I, H, dw, grad.d_down_proj)};
}

static inline void layer_free(struct layer *l)
{
    aclTensor *all[] = {l->x, l->ids, l->weights, l->up, l->down, l->y, l->saved, l->dy, l->dx, l->d_weights, l->d_up,
                        l->d_down};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        aclDestroyTensor(all[i]);
}

static inline aclnnStatus ask_forward(struct layer *l)
{
    return aclnnHyperMegaMoEGetWorkspaceSize(l->x, l->ids, l->weights, l->up, l->down, l->group, l->ranks, l->rank,
                                             l->experts, l->tokens_max, l->rows_max, l->y, l->saved, &l->workspace,
                                             &l->executor);
}

static inline aclnnStatus ask_grad(struct layer *l)
{
    return aclnnHyperMegaMoEGradGetWorkspaceSize(l->dy, l->x, l->ids, l->weights, l->up, l->down, l->saved, l->group,
                                                 l->ranks, l->rank, l->experts, l->tokens_max, l->rows_max, l->dx,
                                                 l->d_weights, l->d_up, l->d_down, &l->workspace, &l->executor);
}

static inline int64_t saved_bytes(const struct layer *l)
{
    int64_t *dims, bytes;
    uint64_t count;

    if (aclGetViewShape(l->saved, &dims, &count) != ACLNN_SUCCESS)
        return -1;
    bytes = count == 1 ? dims[0] : -1;
    free(dims);
    return bytes;
}

/* A launched rank's group "ep". */
static inline aclnnStatus join(const struct hmoe_boot *boot)
{
    struct hmoe_group_options options = {.size = sizeof options, .rank = boot->rank, .ranks = boot->ranks, .workers = 1,
                                         .allgather = boot->allgather, .allgather_context = boot->allgather_context};

    return aclnnHyperMegaMoEGroupCreate("ep", &options);
}

static inline struct back_case small(void)
{
    return (struct back_case){.c = {.hidden = 40, .inner = 24, .experts = 4, .topk = 2, .ranks = 1, .dtype = HMOE_F32,
                                    .workers = 1, .tokens = {20, 9}, .seed = 9}};
}

/* ---- on one rank */

struct bed {
    struct back_case b;
    struct layer l;
    char *memory, *workspace;
};

static const struct hmoe_group_options alone = {.size = sizeof alone, .workers = 1};

static inline void open_bed(struct bed *bed)
{
    *bed = (struct bed){.b = small()};
    back_make(&bed->b);
    assert_int_equal(aclnnInit(NULL), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoEGroupCreate("one", &alone), ACLNN_SUCCESS);
    bed->l = layer_of(&bed->b, 0, "one");
    assert_int_equal(ask_forward(&bed->l), ACLNN_SUCCESS);
    bed->memory = malloc((size_t)saved_bytes(&bed->l) + 64);
    assert_non_null(bed->memory);
    assert_int_equal(aclDestroyAclOpExecutor(bed->l.executor), ACLNN_SUCCESS);
    aclDestroyTensor(bed->l.saved);
    bed->l.saved = bytes_tensor(1 << 20, bed->memory);
}

static inline void close_bed(struct bed *bed)
{
    layer_free(&bed->l);
    assert_int_equal(aclnnFinalize(), ACLNN_ERR_RUNTIME_ERROR);
    assert_int_equal(aclnnHyperMegaMoEGroupDestroy("one", 0), ACLNN_SUCCESS);
    assert_int_equal(aclnnFinalize(), ACLNN_SUCCESS);
    free(bed->memory);
    back_free(&bed->b);
}

static inline void fails(aclnnStatus status, aclnnStatus wanted, const char *text)
{
    if (status != wanted || !strstr(aclGetRecentErrMsg(), text))
        fail_msg("%d \"%s\" instead of %d \"%s\"", status, aclGetRecentErrMsg(), wanted, text);
}

static inline void run_forward(struct bed *bed)
{
    assert_int_equal(ask_forward(&bed->l), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoE(NULL, 0, bed->l.executor, NULL), ACLNN_SUCCESS);
}

static inline void run_grad(struct bed *bed)
{
    back_reset(&bed->b, 0);
    assert_int_equal(ask_grad(&bed->l), ACLNN_SUCCESS);
    assert_int_equal(aclnnHyperMegaMoEGrad(NULL, 0, bed->l.executor, NULL), ACLNN_SUCCESS);
    assert_false(back_differs(&bed->b, 0));
}

#endif
