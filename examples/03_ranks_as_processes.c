/* Step 3: three ranks, as processes of this host, and the two halves of a call: start, do something else, wait.
 *
 * Processes share nothing that you do not share. So each rank checks itself: it computes its own tokens once more,
 * alone, in a group of one that holds every expert. Every call must give the same bytes, a token's neighbours do not
 * matter. */
#include <hmoe.h>

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { H = 64, I = 48, E = 6, K = 2, T_MOST = 16 };

/* Filled before the launch, so every rank has the same copy. bf16, as its 16 bits. */
static uint16_t up[E][2 * I][H], down[E][H][I];

struct tokens {
    int64_t count;
    uint16_t x[T_MOST][H], y[T_MOST][H];
    int64_t ids[T_MOST][K];
    float weights[T_MOST][K];
};

static uint32_t next(uint32_t *seed)
{
    return *seed = *seed * 1664525u + 1013904223u;
}

/* bf16 values of either sign, of size 1/16 to 1/2 */
static void fill(uint16_t *values, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++)
        values[i] = (uint16_t)(0x3d80 + (next(&seed) >> 16) % 0x180) | (uint16_t)(next(&seed) >> 31 << 15);
}

static void make_tokens(struct tokens *tokens, int rank)
{
    uint32_t seed = 100 + (uint32_t)rank;

    memset(tokens, 0, sizeof *tokens);
    tokens->count = T_MOST - 5 * rank; /* ranks need not have equally many */
    fill(&tokens->x[0][0], T_MOST * H, seed);
    for (int t = 0; t < T_MOST; t++) {
        for (int k = 0; k < K; k++) {
            tokens->ids[t][k] = (next(&seed) >> 16) % E;
            tokens->weights[t][k] = 0.5f;
        }
    }
}

/* The layer over this group, for these tokens. */
static enum hmoe_status run_layer(const struct hmoe_group_options *group_options, struct tokens *tokens)
{
    struct hmoe_plan_options plan_options = {.size = sizeof plan_options,
                                             .hidden = H,
                                             .inner = I,
                                             .experts = E,
                                             .topk = K,
                                             .tokens_max = T_MOST,
                                             .dtype = HMOE_BF16,
                                             .layout = HMOE_NK};
    int first_expert = group_options->rank * (E / group_options->ranks);
    struct hmoe_call call = {.size = sizeof call,
                             .tokens = tokens->count,
                             .x = tokens->x,
                             .topk_ids = tokens->ids,
                             .topk_weights = tokens->weights,
                             .ids_type = HMOE_I64,
                             .layer = {.up_proj = up[first_expert], .down_proj = down[first_expert]},
                             .y = tokens->y};
    struct hmoe_group *group = NULL;
    struct hmoe_plan *plan = NULL;
    enum hmoe_status status = hmoe_group_create(group_options, &group);

    if (status == HMOE_OK)
        status = hmoe_plan_create(group, &plan_options, &plan);
    if (status == HMOE_OK)
        status = hmoe_forward_start(plan, &call); /* returns at once; the tensors are lent until wait returns */
    if (status == HMOE_OK)
        status = hmoe_call_wait(&call);
    if (status != HMOE_OK)
        fprintf(stderr, "rank %d: %s\n", group_options->rank, call.error[0] ? call.error : hmoe_last_error());
    if (plan)
        hmoe_plan_destroy(plan);
    if (group)
        hmoe_group_destroy(group);
    return status;
}

static int run_rank(const struct hmoe_boot *boot, void *argument)
{
    struct hmoe_group_options together = {.size = sizeof together,
                                          .rank = boot->rank,
                                          .ranks = boot->ranks,
                                          .allgather = boot->allgather,
                                          .allgather_context = boot->allgather_context};
    struct hmoe_group_options alone = {.size = sizeof alone, .ranks = 1};
    struct tokens tokens, again;

    (void)argument;
    make_tokens(&tokens, boot->rank);
    make_tokens(&again, boot->rank);
    if (run_layer(&together, &tokens) || run_layer(&alone, &again))
        return 1;
    if (memcmp(tokens.y, again.y, sizeof tokens.y) != 0) {
        fprintf(stderr, "rank %d: together and alone differ\n", boot->rank);
        return 1;
    }
    return 0;
}

int main(void)
{
    fill(&up[0][0][0], E * 2 * I * H, 2);
    fill(&down[0][0][0], E * H * I, 3);
    if (hmoe_launch(HMOE_VIA_PROCESSES, 3, run_rank, NULL)) {
        fprintf(stderr, "%s\n", hmoe_last_error());
        return 1;
    }
    printf("three processes: every token has the bytes it has alone\n");
    return 0;
}
