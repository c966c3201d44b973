/* The layer by way of CANN's calling convention: two phases, a stream, a saved state for the gradient.
 * Prints y's first numbers and checks that hmoe_forward gives the same bits. */
#include <aclnn_hyper_mega_moe.h>
#include <hmoe.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 5, H = 16, I = 8, E = 4, K = 2 };

static float x[T * H], weights[T * K], up[E * H * 2 * I], down[E * I * H], y[T * H], again[T * H];
static float dy[T * H], dx[T * H], d_weights[T * K], d_up[E * H * 2 * I], d_down[E * I * H];
static int32_t ids[T * K];

static void fill(float *to, int count, unsigned seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        to[i] = (float)(seed >> 8) / (1 << 24) - 0.5f;
    }
}

static aclTensor *tensor(aclDataType type, void *data, int dims, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[] = {a, b, c};

    return aclCreateTensor(shape, (uint64_t)dims, type, NULL, 0, ACL_FORMAT_ND, NULL, 0, data);
}

static void must(const char *what, aclnnStatus status)
{
    if (status == ACLNN_SUCCESS)
        return;
    fprintf(stderr, "%s: %d, %s\n", what, (int)status, aclGetRecentErrMsg());
    exit(1);
}

/* Memory for what the gradient needs: its size is what phase one writes into the tensor's shape. */
static void *saved_memory(const aclTensor *saved, size_t *bytes)
{
    int64_t *shape;
    uint64_t count;
    void *memory;

    must("shape of saved", aclGetViewShape(saved, &shape, &count));
    *bytes = (size_t)shape[0];
    free(shape);
    memory = malloc(*bytes);
    if (!memory)
        exit(1);
    return memory;
}

static int same_as_hmoe(void)
{
    struct hmoe_group_options group_options = {.size = sizeof group_options};
    struct hmoe_plan_options options = {.size = sizeof options, .hidden = H, .inner = I, .experts = E, .topk = K,
                                        .tokens_max = T};
    struct hmoe_call call = {.size = sizeof call, .tokens = T, .x = x, .topk_ids = ids, .topk_weights = weights,
                             .layer = {.up_proj = up, .down_proj = down}, .y = again};
    struct hmoe_group *group = NULL;
    struct hmoe_plan *plan = NULL;
    int ok = hmoe_group_create(&group_options, &group) == HMOE_OK && hmoe_plan_create(group, &options,
                                                                                      &plan) == HMOE_OK &&
             hmoe_forward(plan, &call) == HMOE_OK && memcmp(y, again, sizeof y) == 0;

    hmoe_plan_destroy(plan);
    hmoe_group_destroy(group);
    return ok;
}

int main(void)
{
    struct hmoe_group_options options = {.size = sizeof options};
    uint64_t workspace_size;
    aclOpExecutor *executor;
    aclrtStream stream;
    size_t bytes;

    fill(x, T * H, 1);
    fill(weights, T * K, 2);
    fill(up, E * H * 2 * I, 3);
    fill(down, E * I * H, 4);
    fill(dy, T * H, 5);
    for (int i = 0; i < T * K; i++)
        ids[i] = i % E;

    must("init", aclnnInit(NULL));
    must("group", aclnnHyperMegaMoEGroupCreate("ep", &options));
    must("stream", aclrtCreateStream(&stream));
    aclTensor *tx = tensor(ACL_FLOAT, x, 2, T, H, 0), *tids = tensor(ACL_INT32, ids, 2, T, K, 0);
    aclTensor *tweights = tensor(ACL_FLOAT, weights, 2, T, K, 0), *tup = tensor(ACL_FLOAT, up, 3, E, H, 2 * I);
    aclTensor *tdown = tensor(ACL_FLOAT, down, 3, E, I, H), *ty = tensor(ACL_FLOAT, y, 2, T, H, 0);
    aclTensor *tsaved = tensor(ACL_UINT8, NULL, 1, 0, 0, 0);

    /* forward; nothing is strided, so no workspace is needed */
    must("phase one", aclnnHyperMegaMoEGetWorkspaceSize(tx, tids, tweights, tup, tdown, "ep", 1, 0, E, 0, 0, ty, tsaved,
                                                        &workspace_size, &executor));
    void *memory = saved_memory(tsaved, &bytes);
    must("address", aclSetOutputTensorAddr(executor, 1, tsaved, memory));
    must("phase two", aclnnHyperMegaMoE(NULL, workspace_size, executor, stream));
    aclDestroyTensor(tsaved);

    /* gradient, queued behind it */
    tsaved = tensor(ACL_UINT8, memory, 1, (int64_t)bytes, 0, 0);
    aclTensor *tdy = tensor(ACL_FLOAT, dy, 2, T, H, 0), *tdx = tensor(ACL_FLOAT, dx, 2, T, H, 0);
    aclTensor *tdw = tensor(ACL_FLOAT, d_weights, 2, T, K, 0), *tdup = tensor(ACL_FLOAT, d_up, 3, E, H, 2 * I);
    aclTensor *tddown = tensor(ACL_FLOAT, d_down, 3, E, I, H);
    must("phase one of the gradient",
         aclnnHyperMegaMoEGradGetWorkspaceSize(tdy, tx, tids, tweights, tup, tdown, tsaved, "ep", 1, 0, E, 0, 0, tdx,
                                               tdw,
                                               tdup, tddown, &workspace_size, &executor));
    must("phase two of the gradient", aclnnHyperMegaMoEGrad(NULL, workspace_size, executor, stream));
    must("synchronize", aclrtSynchronizeStream(stream));

    printf("y[0] = %.6f %.6f %.6f ...   dx[0] = %.6f %.6f %.6f ...\n", (double)y[0], (double)y[1], (double)y[2],
           (double)dx[0], (double)dx[1], (double)dx[2]);
    aclTensor *all[] = {tx, tids, tweights, tup, tdown, ty, tsaved, tdy, tdx, tdw, tdup, tddown};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        aclDestroyTensor(all[i]);
    must("stream's end", aclrtDestroyStream(stream));
    must("group's end", aclnnHyperMegaMoEGroupDestroy("ep", 0));
    must("finalize", aclnnFinalize());
    free(memory);
    puts(same_as_hmoe() ? "the same bits as hmoe_forward" : "NOT the bits of hmoe_forward");
    return same_as_hmoe() ? 0 : 1;
}
