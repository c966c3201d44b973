/* Step 1: one rank. Make a group of one, a plan for a shape, and call the layer.
 *
 * What you should see: the library's y and the definition, written here in doubles, agree. */
#include <hmoe.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>

/* The letters of hmoe.h: T tokens, H hidden, I inner width, E experts, K experts per token. */
enum { T = 5, H = 16, I = 24, E = 4, K = 2 };

static float x[T][H], up[E][H][2 * I], down[E][I][H], y[T][H];
static int32_t ids[T][K];
static float weights[T][K];

/* Numbers in [-1, 1) that look random and are the same on every machine. */
static void fill(float *values, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

/* Token t goes to experts t mod E and t+1 mod E. A real model asks its router. */
static void make_input(void)
{
    fill(&x[0][0], T * H, 1);
    fill(&up[0][0][0], E * H * 2 * I, 2);
    fill(&down[0][0][0], E * I * H, 3);
    for (int t = 0; t < T; t++) {
        for (int k = 0; k < K; k++) {
            ids[t][k] = (t + k) % E;
            weights[t][k] = k == 0 ? 0.75f : 0.25f;
        }
    }
    ids[2][1] = -1; /* this slot is masked: it adds nothing */
}

/* Column c of expert(x) = (silu(x*Wg) * (x*Wu)) * Wd, where up_proj = [Wg | Wu]. */
static double expert_output(const float *row, int expert, int c)
{
    double sum = 0;

    for (int i = 0; i < I; i++) {
        double gate = 0, linear = 0;
        for (int h = 0; h < H; h++) {
            gate += (double)row[h] * (double)up[expert][h][i];
            linear += (double)row[h] * (double)up[expert][h][I + i];
        }
        sum += gate / (1 + exp(-gate)) * linear * (double)down[expert][i][c];
    }
    return sum;
}

/* The largest difference between y and its definition. */
static double difference(void)
{
    double most = 0;

    for (int t = 0; t < T; t++) {
        for (int c = 0; c < H; c++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                if (ids[t][k] >= 0)
                    sum += (double)weights[t][k] * expert_output(x[t], ids[t][k], c);
            most = fmax(most, fabs(sum - (double)y[t][c]));
        }
    }
    return most;
}

int main(void)
{
    /* Options are structs whose zero is a good default; size tells the library which version of it you mean. */
    struct hmoe_group_options group_options = {.size = sizeof group_options};
    struct hmoe_plan_options plan_options = {
        .size = sizeof plan_options, .hidden = H, .inner = I, .experts = E, .topk = K, .tokens_max = T};
    struct hmoe_call call = {.size = sizeof call,
                             .tokens = T,
                             .x = x,
                             .topk_ids = ids,
                             .topk_weights = weights,
                             .layer = {.up_proj = up, .down_proj = down},
                             .y = y};
    struct hmoe_group *group = NULL;
    struct hmoe_plan *plan = NULL;

    make_input();
    if (hmoe_group_create(&group_options, &group) || hmoe_plan_create(group, &plan_options, &plan) ||
        hmoe_forward(plan, &call)) {
        fprintf(stderr, "%s\n", call.error[0] ? call.error : hmoe_last_error());
        return 1;
    }
    printf("%d tokens, %d experts: largest difference to the definition %.2g\n", T, E, difference());

    /* What was made last goes first. */
    hmoe_plan_destroy(plan);
    hmoe_group_destroy(group);
    return difference() < 1e-4 ? 0 : 1;
}
