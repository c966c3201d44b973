/* The oracle's gradients: against central differences of a forward in doubles, and facts that hold bit for bit. */
#include "base/num.h"
#include "base/prng.h"
#include "ref/moe_ref.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { T = 5, H = 9, I = 6, E = 3, K = 2, S = 1, J = 4 };

/* Every tensor in doubles, and as the oracle gets it. */
enum { X, WEIGHTS, UP, DOWN, UP_BIAS, DOWN_BIAS, SHARED_UP, SHARED_DOWN, TENSORS };
static const int64_t count[TENSORS] = {T * H, T * K, E * H * 2 * I, E * I * H, E * 2 * I, E * H, S * H * 2 * J,
                                       S * J * H};
static const char *const names[TENSORS] = {"dx", "d_topk_weights", "d_up_proj", "d_down_proj", "d_up_bias",
                                           "d_down_bias", "d_shared_up", "d_shared_down"};

struct world {
    double value[TENSORS][E * H * 2 * I];
    float single[TENSORS][E * H * 2 * I], grad[TENSORS][E * H * 2 * I];
    int32_t ids[T * K];
    float dy[T * H], y[T * H];
    struct ref_layer layer;
};

static void fill(struct world *w, uint64_t seed)
{
    struct base_prng prng = {seed};

    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < count[t]; i++) {
            w->single[t][i] = base_random_sym(&prng, t == X ? 1.5f : 0.7f);
            w->value[t][i] = (double)w->single[t][i];
        }
    for (int i = 0; i < T * H; i++)
        w->dy[i] = base_random_sym(&prng, 1.0f);
    for (int i = 0; i < T * K; i++)
        w->ids[i] = (int32_t)base_random_below(&prng, E + 1) - 1;
}

static struct world *make(uint64_t seed, enum hmoe_layout layout, enum hmoe_gating gating, bool clamped)
{
    struct world *w = calloc(1, sizeof *w);

    fill(w, seed);
    w->layer = (struct ref_layer){.hidden = H, .inner = I, .experts = E, .topk = K, .dtype = HMOE_F32, .layout = layout,
                                  .gating = gating, .up_proj = w->single[UP], .down_proj = w->single[DOWN],
                                  .up_bias = w->single[UP_BIAS], .down_bias = w->single[DOWN_BIAS], .shared = S,
                                  .shared_inner = J, .shared_up = w->single[SHARED_UP],
                                  .shared_down = w->single[SHARED_DOWN]};
    if (clamped)
        w->layer.activation = (struct hmoe_activation){1.702f, 0.6f, 1.0f};
    return w;
}

static struct ref_forward forward_of(struct world *w)
{
    return (struct ref_forward){.layer = &w->layer, .tokens = T, .x = w->single[X], .topk_ids = w->ids,
                                .topk_weights = w->single[WEIGHTS], .y = w->y};
}

static void backward(struct world *w, enum hmoe_dw_mode mode)
{
    struct ref_forward forward = forward_of(w);
    struct ref_backward b = {.forward = &forward, .dy = w->dy, .dx = w->grad[X], .d_topk_weights = w->grad[WEIGHTS],
                             .d_up_proj = w->grad[UP], .d_down_proj = w->grad[DOWN], .d_up_bias = w->grad[UP_BIAS],
                             .d_down_bias = w->grad[DOWN_BIAS], .d_shared_up = w->grad[SHARED_UP],
                             .d_shared_down = w->grad[SHARED_DOWN], .dw_mode = mode};

    assert_int_equal(ref_moe_backward(&b), 0);
}

/* ---- the layer once more, in doubles */

static double at(const struct world *w, int tensor, int64_t e, int64_t term, int64_t column, int64_t terms,
                 int64_t columns)
{
    bool kn = w->layer.layout == HMOE_KN;

    return w->value[tensor][e * terms * columns + (kn ? term * columns + column : column * terms + term)];
}

static double gated(const struct world *w, double gate, double up)
{
    const struct hmoe_activation act = num_activation(w->layer.activation);

    gate = fmin(gate, (double)act.limit);
    up = fmax(fmin(up, (double)act.limit), -(double)act.limit) + (double)act.offset;
    return gate / (1.0 + exp(-(double)act.alpha * gate)) * up;
}

struct expert {
    int up, down; /* tensors */
    int64_t e, inner;
    bool biased;
};

static double project(const struct world *w, int tensor, struct expert expert, const double *in, int64_t column,
                      int64_t terms, int64_t columns)
{
    double sum = 0.0;

    for (int64_t i = 0; i < terms; i++)
        sum += in[i] * at(w, tensor, expert.e, i, column, terms, columns);
    return sum;
}

/* y += weight * expert(x) */
static void add_expert(const struct world *w, struct expert expert, double weight, const double *x, double *y)
{
    bool halves = w->layer.gating == HMOE_HALVES;
    int64_t inner = expert.inner;
    double a[I], both[2 * I];

    for (int64_t c = 0; c < 2 * inner; c++)
        both[c] = project(w, expert.up, expert, x, c, H, 2 * inner) +
                  (expert.biased ? w->value[UP_BIAS][expert.e * 2 * inner + c] : 0.0);
    for (int64_t i = 0; i < inner; i++)
        a[i] = gated(w, both[halves ? i : 2 * i], both[halves ? inner + i : 2 * i + 1]);
    for (int64_t h = 0; h < H; h++)
        y[h] += weight * (project(w, expert.down, expert, a, h, inner, H) +
                          (expert.biased ? w->value[DOWN_BIAS][expert.e * H + h] : 0.0));
}

/* <dy, y>: its gradient is what the oracle calls the gradients. */
static double objective(const struct world *w)
{
    double sum = 0.0;

    for (int t = 0; t < T; t++) {
        double y[H] = {0.0};
        for (int k = 0; k < K; k++)
            if (w->ids[t * K + k] >= 0)
                add_expert(w, (struct expert){UP, DOWN, w->ids[t * K + k], I, true}, w->value[WEIGHTS][t * K + k],
                           &w->value[X][t * H], y);
        for (int s = 0; s < S; s++)
            add_expert(w, (struct expert){SHARED_UP, SHARED_DOWN, s, J, false}, 1.0, &w->value[X][t * H], y);
        for (int h = 0; h < H; h++)
            sum += (double)w->dy[t * H + h] * y[h];
    }
    return sum;
}

/* Central differences in doubles are exact to about 1e-9 here, but where a clamp's kink lies within the step; the
 * oracle's f32 sums of a few dozen terms of size 1 to about 1e-5. */
static void check_element(struct world *w, int tensor, int64_t i, int *kinks)
{
    double kept = w->value[tensor][i], wide, narrow, step = 1e-4, got = (double)w->grad[tensor][i], up, down;

    w->value[tensor][i] = kept + step;
    up = objective(w);
    w->value[tensor][i] = kept - step;
    down = objective(w);
    wide = (up - down) / (2 * step);
    w->value[tensor][i] = kept + step / 10;
    up = objective(w);
    w->value[tensor][i] = kept - step / 10;
    down = objective(w);
    narrow = (up - down) / (2 * step / 10);
    w->value[tensor][i] = kept;
    if (fabs(wide - narrow) > 1e-6) /* a kink */
        (*kinks)++;
    else if (fabs(got - narrow) > 2e-5 + 2e-5 * fabs(narrow))
        fail_msg("%s[%lld] is %.9g, central difference %.9g", names[tensor], (long long)i, got, narrow);
}

static void test_central_differences(void **state)
{
    (void)state;
    for (int variant = 0; variant < 8; variant++) {
        struct world *w = make(77 + (uint64_t)variant, (enum hmoe_layout)(variant & 1),
                               (enum hmoe_gating)(variant >> 1 & 1), variant >> 2);
        int kinks = 0, checked = 0, masked = 0;
        backward(w, HMOE_OVERWRITE);
        for (int t = 0; t < TENSORS; t++)
            for (int64_t i = 0; i < count[t]; i++, checked++)
                check_element(w, t, i, &kinks);
        for (int i = 0; i < T * K; i++)
            masked += w->ids[i] < 0;
        assert_true(masked > 0 && masked < T * K);
        assert_true(kinks * 20 < checked);
        free(w);
    }
}

/* ---- bit for bit */

static void test_masked_and_empty(void **state)
{
    struct world *w = make(5, HMOE_KN, HMOE_HALVES, false);

    (void)state;
    memset(w->grad, 0xff, sizeof w->grad);
    for (int i = 0; i < T * K; i++) {
        w->ids[i] = i % 3 ? 1 : -1;
        w->single[WEIGHTS][i] = i % 3 ? 0.5f : NAN;
    }
    backward(w, HMOE_OVERWRITE);
    for (int i = 0; i < T * K; i++)
        assert_true((num_bits(w->grad[WEIGHTS][i]) == 0) == (i % 3 == 0));
    for (int64_t i = 0; i < H * 2 * I; i++) {
        assert_int_equal(num_bits(w->grad[UP][i]), 0); /* expert 0 has no rows */
        assert_true(w->grad[UP][H * 2 * I + i] == w->grad[UP][H * 2 * I + i]);
    }
    memset(w->grad, 0xff, sizeof w->grad);
    backward(w, HMOE_ACCUMULATE);
    assert_int_equal(num_bits(w->grad[UP][0]), 0xffffffff); /* and is not touched */
    free(w);
}

/* A shared expert, and the same weights as an ordinary one that every token chooses with weight 1 in its last slot. */
static void test_shared_is_an_expert_chosen_last(void **state)
{
    static float up[2 * H * 2 * I], down[2 * I * H], x[T * H], dy[T * H], weights[T * 2], dx[2][T * H], y[2][T * H];
    static float d_up[2][2 * H * 2 * I], d_down[2][2 * I * H];
    struct base_prng prng = {12};
    int32_t ids[T * 2], one[T];
    struct ref_layer both = {.hidden = H, .inner = I, .experts = 2, .topk = 2, .up_proj = up, .down_proj = down};
    struct ref_layer shared = {.hidden = H, .inner = I, .experts = 1, .topk = 1, .up_proj = up, .down_proj = down,
                               .shared = 1, .shared_inner = I, .shared_up = up + H * 2 * I,
                               .shared_down = down + I * H};
    struct ref_forward f[2] = {
        {.layer = &both, .tokens = T, .x = x, .topk_ids = ids, .topk_weights = weights, .y = y[0]},
        {.layer = &shared, .tokens = T, .x = x, .topk_ids = one, .y = y[1]}};
    struct ref_backward b[2] = {
        {.forward = &f[0], .dy = dy, .dx = dx[0], .d_up_proj = d_up[0], .d_down_proj = d_down[0]},
        {.forward = &f[1], .dy = dy, .dx = dx[1], .d_up_proj = d_up[1], .d_down_proj = d_down[1],
         .d_shared_up = d_up[1] + H * 2 * I, .d_shared_down = d_down[1] + I * H}};
    float first[T];

    (void)state;
    for (size_t i = 0; i < sizeof up / 4; i++)
        up[i] = base_random_sym(&prng, 1.0f);
    for (size_t i = 0; i < sizeof down / 4; i++)
        down[i] = base_random_sym(&prng, 1.0f);
    for (int i = 0; i < T * H; i++) {
        x[i] = base_random_sym(&prng, 1.0f);
        dy[i] = base_random_sym(&prng, 1.0f);
    }
    for (int t = 0; t < T; t++) {
        first[t] = weights[2 * t] = base_random_sym(&prng, 1.0f);
        weights[2 * t + 1] = 1.0f;
        ids[2 * t] = one[t] = t % 2 ? 0 : -1;
        ids[2 * t + 1] = 1;
    }
    f[1].topk_weights = first;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ref_moe_forward(&f[i]), 0);
        assert_int_equal(ref_moe_backward(&b[i]), 0);
    }
    assert_memory_equal(y[0], y[1], sizeof y[0]);
    assert_memory_equal(dx[0], dx[1], sizeof dx[0]);
    assert_memory_equal(d_up[0], d_up[1], sizeof d_up[0]);
    assert_memory_equal(d_down[0], d_down[1], sizeof d_down[0]);
}

/* A gradient passes a clamp at equality, and what is cut is +0; NaN is not cut. */
static void test_clamps(void **state)
{
    struct hmoe_activation act = {1.702f, 7.0f, 1.0f};
    struct num_gate_grad at_limit = num_gated_grad(&act, 7.0f, -7.0f, 1.0f);
    struct num_gate_grad beyond = num_gated_grad(&act, 7.5f, -7.5f, -1.0f);
    struct num_gate_grad nan = num_gated_grad(&act, NAN, NAN, 1.0f);

    (void)state;
    assert_true(at_limit.gate != 0.0f && at_limit.up != 0.0f);
    assert_int_equal(num_bits(beyond.gate), 0);
    assert_int_equal(num_bits(beyond.up), 0);
    assert_true(nan.gate != nan.gate && nan.up != nan.up);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_central_differences),
        cmocka_unit_test(test_masked_and_empty),
        cmocka_unit_test(test_shared_is_an_expert_chosen_last),
        cmocka_unit_test(test_clamps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
