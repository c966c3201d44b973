/* Step 4: training. A plan of training 1, a saved state in the forward's call, then the gradients: at once, or the
 * input's now and the weights' later.
 *
 * What you should see: the loss falls step by step; both ways give the same gradients, bit for bit. */
#include <hmoe.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { T = 32, H = 16, I = 24, E = 4, K = 2, STEPS = 60 };

static float x[T][H], up[E][H][2 * I], down[E][I][H], y[T][H], wanted[T][H], dy[T][H], dx[T][H];
static float d_up[E][H][2 * I], d_down[E][I][H], again_up[E][H][2 * I], again_down[E][I][H];
static int32_t ids[T][K];
static float weights[T][K];

static void fill(float *values, int count, uint32_t seed, float scale)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = ((float)(seed >> 8) / 8388608.0f - 1.0f) * scale;
    }
}

static void make_input(void)
{
    fill(&x[0][0], T * H, 1, 1.0f);
    fill(&up[0][0][0], E * H * 2 * I, 2, 0.3f);
    fill(&down[0][0][0], E * I * H, 3, 0.3f);
    fill(&wanted[0][0], T * H, 4, 1.0f);
    for (int t = 0; t < T; t++)
        for (int k = 0; k < K; k++) {
            ids[t][k] = (t + k) % E;
            weights[t][k] = 0.5f;
        }
}

/* Half the mean square of y - wanted, and its gradient. */
static double loss(void)
{
    double sum = 0;

    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            dy[t][h] = (y[t][h] - wanted[t][h]) / (T * H);
            sum += 0.5 * (double)dy[t][h] * (double)(y[t][h] - wanted[t][h]);
        }
    return sum;
}

static void learn(float *values, const float *gradient, int count)
{
    for (int i = 0; i < count; i++)
        values[i] -= 8.0f * gradient[i];
}

/* The weights' gradients once more, apart from the input's. */
static enum hmoe_status in_two_steps(struct hmoe_plan *plan, struct hmoe_call *forward, struct hmoe_call backward)
{
    enum hmoe_status status = hmoe_forward(plan, forward);

    backward.grad.d_up_proj = again_up;
    backward.grad.d_down_proj = again_down;
    if (status == HMOE_OK)
        status = hmoe_backward_input(plan, &backward);
    /* here dx could already go on its way back through the model */
    return status == HMOE_OK ? hmoe_backward_weight(plan, &backward) : status;
}

/* Returns the last loss, or -1. */
static double train(struct hmoe_plan *plan, struct hmoe_saved *saved)
{
    struct hmoe_call forward = {.size = sizeof forward, .tokens = T, .x = x, .topk_ids = ids, .topk_weights = weights,
                                .layer = {.up_proj = up, .down_proj = down}, .y = y, .saved = saved};
    struct hmoe_call backward = {.size = sizeof backward, .saved = saved,
                                 .grad = {.dy = dy, .dx = dx, .d_up_proj = d_up, .d_down_proj = d_down}};
    double now = -1;

    for (int step = 0; step < STEPS; step++) {
        if (hmoe_forward(plan, &forward))
            return -1;
        now = loss();
        if (hmoe_backward(plan, &backward) || in_two_steps(plan, &forward, backward))
            return -1;
        if (memcmp(d_up, again_up, sizeof d_up) != 0 || memcmp(d_down, again_down, sizeof d_down) != 0)
            return -1;
        if (step % 20 == 0)
            printf("step %2d: loss %.4f\n", step, now);
        learn(&up[0][0][0], &d_up[0][0][0], E * H * 2 * I);
        learn(&down[0][0][0], &d_down[0][0][0], E * I * H);
    }
    return now;
}

int main(void)
{
    struct hmoe_group_options group_options = {.size = sizeof group_options};
    struct hmoe_plan_options plan_options = {.size = sizeof plan_options, .hidden = H, .inner = I, .experts = E,
                                             .topk = K, .tokens_max = T, .training = 1};
    struct hmoe_group *group = NULL;
    struct hmoe_plan *plan = NULL;
    struct hmoe_saved *saved = NULL;
    double last;

    make_input();
    if (hmoe_group_create(&group_options, &group) || hmoe_plan_create(group, &plan_options, &plan) ||
        hmoe_saved_create(plan, NULL, &saved)) {
        fprintf(stderr, "%s\n", hmoe_last_error());
        return 1;
    }
    last = train(plan, saved);
    printf("step %2d: loss %.4f\n", STEPS - 1, last);
    if (last < 0)
        fprintf(stderr, "%s\n", hmoe_last_error());
    hmoe_saved_destroy(saved);
    hmoe_plan_destroy(plan);
    hmoe_group_destroy(group);
    return last >= 0 && last < 0.1 ? 0 : 1;
}
