/* The model: every gradient against central differences of the loss, the same bits for every number of ranks, exact
 * resume. */
#include "base/prng.h"
#include "model/model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

static const struct model_config tiny = {.layers = 2, .width = 16, .heads = 2, .experts = 4, .topk = 3, .inner = 8,
                                         .context = 12, .batch = 4};

static void *shared(size_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(base != MAP_FAILED);
    return base;
}

static struct model_state state_make(const struct model_config *config)
{
    size_t bytes = (size_t)model_size(config) * sizeof(float);
    struct model_state state = {shared(bytes), shared(bytes), shared(bytes), 0, 0};

    model_state_init(config, 7, &state);
    return state;
}

static void state_free(const struct model_config *config, struct model_state *state)
{
    size_t bytes = (size_t)model_size(config) * sizeof(float);

    munmap(state->value, bytes);
    munmap(state->first, bytes);
    munmap(state->second, bytes);
}

static void fill_text(const struct model_config *config, int step, uint8_t *inputs, uint8_t *targets)
{
    struct base_prng prng = {(uint64_t)step + 5};

    for (int i = 0; i < config->batch * config->context; i++) {
        inputs[i] = (uint8_t)(base_random_below(&prng, 30) + 60);
        targets[i] = (uint8_t)(inputs[i] ^ 1);
    }
}

static const struct model_boot alone = {.rank = 0, .ranks = 1, .workers = 2};

/* Loss and balancing loss at these parameters; gradient may be NULL. */
static double objective(const struct model_state *state, const struct model_optimizer *o, float *gradient)
{
    uint8_t inputs[4 * 12], targets[4 * 12];
    struct base_error error = {.status = HMOE_OK};
    struct model_report report;
    struct model *model;

    fill_text(&tiny, 0, inputs, targets);
    assert_int_equal(model_create(&model, &tiny, &alone, state, &error), HMOE_OK);
    assert_int_equal(model_step(model, o, inputs, targets, &report, &error), HMOE_OK);
    if (gradient)
        model_export_gradient(model, gradient);
    model_destroy(model);
    return report.loss + (double)o->balance * report.balance_loss;
}

static double difference(struct model_state *state, const struct model_optimizer *o, int64_t i, float step)
{
    float kept = state->value[i];
    double up, down;

    state->value[i] = kept + step;
    up = objective(state, o, NULL);
    state->value[i] = kept - step;
    down = objective(state, o, NULL);
    state->value[i] = kept;
    return (up - down) / (2.0 * (double)step);
}

/* The element of a tensor whose gradient is largest, and two at random. f32 sums of a loss near 5 leave about 1e-6,
 * which the step of 1e-2 makes 1e-4; the third order of the loss adds some percent. */
static void check_tensor(struct model_state *state, const struct model_optimizer *o, const struct model_tensor *t,
                         const float *gradient)
{
    struct base_prng prng = {(uint64_t)t->offset + 3};
    int64_t pick[3] = {t->offset, t->offset + base_random_below(&prng, t->count),
                       t->offset + base_random_below(&prng, t->count)};

    for (int64_t i = t->offset; i < t->offset + t->count; i++)
        pick[0] = fabsf(gradient[i]) > fabsf(gradient[pick[0]]) ? i : pick[0];
    assert_true(gradient[pick[0]] != 0.0f);
    for (int n = 0; n < 3; n++) {
        double wanted = difference(state, o, pick[n], 1e-2f), got = (double)gradient[pick[n]];
        if (fabs(wanted - got) > 3e-4 + 0.04 * fabs(wanted))
            fail_msg("%s[%lld]: %g, central difference %g", t->name, (long long)(pick[n] - t->offset), got, wanted);
    }
}

static void test_gradients(void **context)
{
    struct model_optimizer still = model_optimizer_standard;
    struct model_state state = state_make(&tiny);
    float *gradient = malloc((size_t)model_size(&tiny) * sizeof *gradient);
    struct model_tensor tensors[64];
    int count = model_tensors(&tiny, tensors);

    (void)context;
    still.rate = still.least_rate = 0.0f;
    still.balance = 2.0f; /* so that it shows */
    for (int64_t i = 0; i < tensors[0].count; i++)
        state.value[i] *= 25.0f; /* an embedding of size 1 makes all gradients large enough to measure */
    objective(&state, &still, gradient);
    for (int i = 0; i < count; i++)
        check_tensor(&state, &still, &tensors[i], gradient);
    free(gradient);
    state_free(&tiny, &state);
}

/* ---- the same bits for every number of ranks */

enum { STEPS = 6 };

struct training {
    struct model_config config;
    struct model_state state;
    int first, last; /* steps */
    double *loss;    /* [STEPS + 1]; the last one: of validation */
    int workers;
};

static int train_rank(const struct hmoe_boot *boot, void *argument)
{
    struct training *t = argument;
    struct model_boot own = {boot->rank, boot->ranks, boot->allgather, boot->allgather_context, t->workers, NULL};
    struct model_optimizer optimizer = model_optimizer_standard;
    struct base_error error = {.status = HMOE_OK};
    struct model_report report = {0};
    uint8_t inputs[4 * 12], targets[4 * 12];
    struct model *model;
    double loss;

    optimizer.steps = STEPS;
    optimizer.warmup = 2;
    if (model_create(&model, &t->config, &own, &t->state, &error) != HMOE_OK)
        return 1;
    for (int step = t->first; step < t->last; step++) {
        fill_text(&t->config, step, inputs, targets);
        if (model_step(model, &optimizer, inputs, targets, &report, &error) != HMOE_OK)
            return 1;
        if (boot->rank == 0)
            t->loss[step] = report.loss;
    }
    if (model_loss(model, inputs, targets, &loss, &error) != HMOE_OK)
        return 1;
    if (boot->rank == 0)
        t->loss[STEPS] = loss;
    model_export(model, &t->state);
    model_destroy(model);
    return 0;
}

static struct training train(int ranks, enum hmoe_via via, int workers)
{
    struct training t = {.config = tiny, .state = state_make(&tiny), .last = STEPS,
                         .loss = shared((STEPS + 1) * sizeof(double)), .workers = workers};

    assert_int_equal(hmoe_launch(via, ranks, train_rank, &t), HMOE_OK);
    return t;
}

static void same(const struct training *a, const struct training *b)
{
    size_t bytes = (size_t)model_size(&tiny) * sizeof(float);

    assert_memory_equal(a->loss, b->loss, (STEPS + 1) * sizeof(double));
    assert_memory_equal(a->state.value, b->state.value, bytes);
    assert_memory_equal(a->state.first, b->state.first, bytes);
    assert_memory_equal(a->state.second, b->state.second, bytes);
}

static void test_ranks_give_the_same_bits(void **context)
{
    struct training one = train(1, HMOE_VIA_THREADS, 1);

    (void)context;
    assert_true(one.loss[0] > 5.0 && one.loss[STEPS - 1] < one.loss[0]);
    for (int i = 0; i < 5; i++) {
        struct training other = train(1 << i % 3, i < 3 ? HMOE_VIA_THREADS : HMOE_VIA_PROCESSES, 1 + i % 2);
        same(&one, &other);
        state_free(&tiny, &other.state);
    }
    state_free(&tiny, &one.state);
}

static void test_resumes_exactly(void **context)
{
    struct training whole = train(1, HMOE_VIA_THREADS, 2);
    struct training parts = {.config = tiny, .state = state_make(&tiny), .last = 3,
                             .loss = shared((STEPS + 1) * sizeof(double)), .workers = 1};

    (void)context;
    assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, train_rank, &parts), HMOE_OK);
    parts.first = 3;
    parts.last = STEPS;
    assert_int_equal(hmoe_launch(HMOE_VIA_PROCESSES, 4, train_rank, &parts), HMOE_OK);
    same(&whole, &parts);
    state_free(&tiny, &whole.state);
    state_free(&tiny, &parts.state);
}

static void test_config_is_checked(void **context)
{
    struct model_config config = tiny;
    char why[128];

    (void)context;
    assert_null(model_config_check(&config, 4, why, sizeof why));
    assert_non_null(model_config_check(&config, 3, why, sizeof why));
    config.batch = 6;
    assert_non_null(model_config_check(&config, 1, why, sizeof why));
    config = tiny;
    config.width = 18;
    assert_non_null(model_config_check(&config, 1, why, sizeof why));
    config = tiny;
    config.topk = 5;
    assert_non_null(model_config_check(&config, 1, why, sizeof why));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_ranks_give_the_same_bits),
        cmocka_unit_test(test_resumes_exactly),
        cmocka_unit_test(test_config_is_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
