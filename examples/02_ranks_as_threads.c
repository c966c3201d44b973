/* Step 2: four ranks, as threads of this process. Each rank holds a quarter of the experts and its own tokens.
 *
 * What you should see: the four ranks together give the very bytes that one rank gives for the whole batch. */
#include <hmoe.h>

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { H = 64, I = 48, E = 8, K = 2, TOKENS = 50 };

static float x[TOKENS][H], up[E][H][2 * I], down[E][I][H], weights[TOKENS][K];
static int32_t ids[TOKENS][K];

static void fill(float *values, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void make_input(void)
{
    fill(&x[0][0], TOKENS * H, 1);
    fill(&up[0][0][0], E * H * 2 * I, 2);
    fill(&down[0][0][0], E * I * H, 3);
    fill(&weights[0][0], TOKENS * K, 4);
    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < K; k++)
            ids[t][k] = (t * 5 + k * 3) % E;
}

/* One rank's life. The batch is cut in rank order; rank 1 gets nothing and still serves its experts. */
static int run_rank(const struct hmoe_boot *boot, void *argument)
{
    float(*y)[H] = argument; /* the whole batch's y: threads share memory */
    int cut[5] = {0, 20, 20, 37, TOKENS};
    int first = boot->ranks == 1 ? 0 : cut[boot->rank], last = boot->ranks == 1 ? TOKENS : cut[boot->rank + 1];
    int first_expert = boot->rank * (E / boot->ranks);
    struct hmoe_group_options group_options = {.size = sizeof group_options,
                                               .rank = boot->rank,
                                               .ranks = boot->ranks,
                                               .allgather = boot->allgather,
                                               .allgather_context = boot->allgather_context};
    struct hmoe_plan_options plan_options = {
        .size = sizeof plan_options, .hidden = H, .inner = I, .experts = E, .topk = K, .tokens_max = TOKENS};
    struct hmoe_call call = {.size = sizeof call,
                             .tokens = last - first,
                             .x = x[first],
                             .topk_ids = ids[first],
                             .topk_weights = weights[first],
                             .layer = {.up_proj = up[first_expert], .down_proj = down[first_expert]},
                             .y = y[first]};
    struct hmoe_group *group = NULL;
    struct hmoe_plan *plan = NULL;
    enum hmoe_status status = hmoe_group_create(&group_options, &group);

    if (status == HMOE_OK)
        status = hmoe_plan_create(group, &plan_options, &plan);
    if (status == HMOE_OK)
        status = hmoe_forward(plan, &call);
    if (status != HMOE_OK)
        fprintf(stderr, "rank %d: %s\n", boot->rank, call.error[0] ? call.error : hmoe_last_error());
    if (plan)
        hmoe_plan_destroy(plan);
    if (group)
        hmoe_group_destroy(group);
    return status != HMOE_OK;
}

int main(void)
{
    static float y_one[TOKENS][H], y_four[TOKENS][H];

    make_input();
    if (hmoe_launch(HMOE_VIA_THREADS, 1, run_rank, y_one) || hmoe_launch(HMOE_VIA_THREADS, 4, run_rank, y_four)) {
        fprintf(stderr, "%s\n", hmoe_last_error());
        return 1;
    }
    if (memcmp(y_one, y_four, sizeof y_one) != 0) {
        fprintf(stderr, "one rank and four ranks differ\n");
        return 1;
    }
    printf("%d tokens: one rank and four ranks give the same %zu bytes\n", TOKENS, sizeof y_one);
    return 0;
}
