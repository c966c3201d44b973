/* Backward where callers go wrong: each gets a clear error, on every rank alike, and nothing has changed. */
#include "back_case.h"

static struct back_case small(int ranks)
{
    return (struct back_case){.c = {.hidden = 32, .inner = 24, .experts = 4, .topk = 2, .ranks = ranks,
                                    .dtype = HMOE_F32, .workers = 2, .tokens = {20, 9, 0, 5}, .seed = 9}};
}

static void run(struct back_case *b, hmoe_rank_fn fn)
{
    back_make(b);
    assert_int_equal(hmoe_launch(b->c.via, b->c.ranks, fn, b), HMOE_OK);
    back_free(b);
}

/* Two ranks, as threads and as processes. */
static void run_both_ways(hmoe_rank_fn fn)
{
    for (int via = 0; via < 2; via++) {
        struct back_case b = small(2);
        b.c.via = (enum hmoe_via)via;
        run(&b, fn);
    }
}

struct world {
    struct case_bed bed;
    struct hmoe_saved *saved;
    struct hmoe_call forward, back;
};

static int enter(struct back_case *b, const struct hmoe_boot *boot, struct world *w)
{
    *w = (struct world){.forward = case_call(&b->c, boot->rank)};
    if (case_open(&b->c, boot, &w->bed) || case_say("saved", hmoe_saved_create(w->bed.plan, NULL, &w->saved)))
        return 1;
    w->forward.saved = w->saved;
    w->back = (struct hmoe_call){.size = sizeof w->back, .saved = w->saved};
    back_gradients(b, boot->rank, &w->back.grad);
    back_reset(b, boot->rank);
    return 0;
}

static int leave(struct back_case *b, const struct hmoe_boot *boot, struct world *w)
{
    CHECK(!back_differs(b, boot->rank)); /* whatever went wrong, in the end the gradients are right */
    CHECK(hmoe_saved_destroy(w->saved) == HMOE_OK);
    return case_close(&w->bed);
}

static int says(const struct hmoe_call *call, enum hmoe_status status, const char *text)
{
    if (call->status == status && strstr(call->error, text) && strcmp(call->error, hmoe_last_error()) == 0)
        return 1;
    fprintf(stderr, "%s: \"%s\", wanted \"%s\"\n", hmoe_status_name(call->status), call->error, text);
    return 0;
}

/* empty -> forward -> backward -> empty: every other order is refused and leaves the state as it was. */
static int orders(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct world w;

    CHECK(!enter(b, boot, &w));
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_ERR_STATE && says(&w.back, HMOE_ERR_STATE, "is empty"));
    CHECK(hmoe_backward_weight(w.bed.plan, &w.back) == HMOE_ERR_STATE);
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_ERR_STATE &&
          says(&w.forward, HMOE_ERR_STATE, "backward is due"));
    CHECK(hmoe_backward_weight(w.bed.plan, &w.back) == HMOE_ERR_STATE);
    CHECK(hmoe_backward_input(w.bed.plan, &w.back) == HMOE_OK);
    CHECK(hmoe_backward_input(w.bed.plan, &w.back) == HMOE_ERR_STATE);
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_ERR_STATE &&
          says(&w.back, HMOE_ERR_STATE, "waits for hmoe_backward_weight"));
    CHECK(hmoe_backward_weight(w.bed.plan, &w.back) == HMOE_OK);
    CHECK(hmoe_backward_weight(w.bed.plan, &w.back) == HMOE_ERR_STATE);
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_ERR_STATE);
    return leave(b, boot, &w);
}

static void test_orders(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        struct back_case b = small(ranks);
        b.c.via = ranks == 2 ? HMOE_VIA_PROCESSES : HMOE_VIA_THREADS;
        run(&b, orders);
    }
}

/* One rank's mistake is every rank's error, and the next try works. */
static int one_rank_errs(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    bool wrong = boot->rank == 1;
    struct hmoe_call bad;
    struct world w;

    CHECK(!enter(b, boot, &w));
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    bad = w.back;
    bad.saved = wrong ? NULL : bad.saved;
    CHECK(hmoe_backward(w.bed.plan, &bad) == HMOE_ERR_ARGUMENT && says(&bad, HMOE_ERR_ARGUMENT, "saved of rank 1"));
    bad = w.back;
    bad.grad.dy = wrong ? NULL : bad.grad.dy;
    CHECK(hmoe_backward(w.bed.plan, &bad) == HMOE_ERR_ARGUMENT && says(&bad, HMOE_ERR_ARGUMENT, "grad.dy of rank 1"));
    bad = w.back;
    bad.grad.dx = wrong ? (void *)(uintptr_t)bad.grad.dy : bad.grad.dx;
    CHECK(hmoe_backward(w.bed.plan, &bad) == HMOE_ERR_ARGUMENT && says(&bad, HMOE_ERR_ARGUMENT, "overlaps grad.dy"));
    bad = w.back;
    bad.grad.dw_type = wrong ? HMOE_F16 : bad.grad.dw_type;
    CHECK(hmoe_backward(w.bed.plan, &bad) == HMOE_ERR_ARGUMENT && says(&bad, HMOE_ERR_ARGUMENT, "grad.dw_type"));
    bad = w.back;
    bad.grad.dw_mode = wrong ? (enum hmoe_dw_mode)7 : bad.grad.dw_mode;
    CHECK(hmoe_backward(w.bed.plan, &bad) == HMOE_ERR_ARGUMENT && says(&bad, HMOE_ERR_ARGUMENT, "grad.dw_mode"));
    bad = w.back;
    bad.grad.d_up_proj = wrong ? (char *)bad.grad.d_up_proj + 1 : bad.grad.d_up_proj;
    CHECK(hmoe_backward(w.bed.plan, &bad) == HMOE_ERR_ARGUMENT && says(&bad, HMOE_ERR_ARGUMENT, "grad.d_up_proj"));
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
    return leave(b, boot, &w);
}

static void test_one_rank_errs(void **state)
{
    (void)state;
    run_both_ways(one_rank_errs);
}

static void *copied(const void *from, int64_t floats)
{
    void *to = malloc((size_t)floats * 4 + 4);

    assert_non_null(to);
    return from ? memcpy(to, from, (size_t)floats * 4) : to;
}

/* What the forward read may move before the backward, which is told where to. */
static int tensors_move(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct moe_case *c = &b->c;
    int64_t tokens = c->tokens[boot->rank], half = c->experts / c->ranks * c->hidden * c->inner;
    const int64_t size[5] = {tokens * c->hidden, tokens * c->topk, 2 * half, half, tokens * c->topk};
    struct world w;

    CHECK(!enter(b, boot, &w));
    w.back.x = w.forward.x;
    w.back.topk_weights = w.forward.topk_weights;
    w.back.layer = w.forward.layer;
    w.back.topk_ids = w.forward.topk_ids;
    void *copy[5] = {copied(w.forward.x, size[0]), copied(w.forward.topk_weights, size[1]),
                     copied(w.forward.layer.up_proj, size[2]), copied(w.forward.layer.down_proj, size[3]),
                     copied(w.forward.topk_ids, size[4])};
    w.forward.x = copy[0];
    w.forward.topk_weights = copy[1];
    w.forward.layer.up_proj = copy[2];
    w.forward.layer.down_proj = copy[3];
    w.forward.topk_ids = copy[4];
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    for (int i = 0; i < 5; i++) {
        memset(copy[i], 0xff, (size_t)size[i] * 4);
        free(copy[i]);
    }
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
    return leave(b, boot, &w);
}

static void test_tensors_move(void **state)
{
    (void)state;
    run_both_ways(tensors_move);
}

/* A saved state in the caller's memory: no more is asked for than what is kept, and nothing is written behind it. */
static int lent_memory(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct hmoe_plan_options plan = case_options(&b->c);
    struct hmoe_saved_options options = {.size = sizeof options};
    size_t bytes, slots = 34 * 2, element = 4; /* of all ranks */
    struct hmoe_saved *own;
    struct world w;

    CHECK(!enter(b, boot, &w));
    own = w.saved;
    for (int kind = 0; kind < 4; kind++) {
        options = (struct hmoe_saved_options){.size = sizeof options, .keep_rows = kind & 1, .recompute = kind >> 1};
        CHECK(hmoe_saved_query(&plan, b->c.ranks, &options, &bytes) == HMOE_OK);
        if (kind == 0)
            CHECK(bytes >= slots * 2 * (size_t)b->c.inner * element);
        options.memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
        CHECK(options.memory);
        memset(options.memory, 0xff, bytes + 64);
        options.memory_bytes = bytes - 1;
        CHECK(hmoe_saved_create(w.bed.plan, &options, &w.saved) == HMOE_ERR_ARGUMENT);
        CHECK(strstr(hmoe_last_error(), "memory is"));
        options.memory_bytes = bytes;
        CHECK(hmoe_saved_create(w.bed.plan, &options, &w.saved) == HMOE_OK);
        w.forward.saved = w.back.saved = w.saved;
        back_reset(b, boot->rank);
        CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
        CHECK(hmoe_backward_input(w.bed.plan, &w.back) == HMOE_ERR_STATE &&
              says(&w.back, HMOE_ERR_STATE, "hmoe_backward is allowed"));
        CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
        CHECK(!back_differs(b, boot->rank));
        for (int i = 0; i < 64; i++)
            CHECK(((unsigned char *)options.memory)[bytes + (size_t)i] == 0xff);
        CHECK(hmoe_saved_destroy(w.saved) == HMOE_OK);
        free(options.memory);
    }
    w.saved = own;
    return leave(b, boot, &w);
}

static void test_lent_memory(void **state)
{
    (void)state;
    struct back_case b = small(2);
    run(&b, lent_memory);
}

/* The n-th call of a plan must be the same on every rank. */
static int calls_differ(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct hmoe_saved *other;
    struct hmoe_call call, second;
    struct world w;

    CHECK(!enter(b, boot, &w));
    call = w.forward;
    call.saved = boot->rank ? w.saved : NULL;
    CHECK(hmoe_forward(w.bed.plan, &call) == HMOE_ERR_MISMATCH && says(&call, HMOE_ERR_MISMATCH, "a saved state"));
    CHECK(hmoe_saved_create(w.bed.plan, NULL, &other) == HMOE_OK);
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    second = w.forward;
    second.saved = other;
    CHECK(hmoe_forward(w.bed.plan, &second) == HMOE_OK);
    call = w.back;
    call.saved = boot->rank ? other : w.saved;
    CHECK(hmoe_backward(w.bed.plan, &call) == HMOE_ERR_MISMATCH && says(&call, HMOE_ERR_MISMATCH, "hmoe_backward of"));
    call = w.back;
    CHECK((boot->rank ? hmoe_backward(w.bed.plan, &call) : hmoe_backward_input(w.bed.plan, &call)) ==
          HMOE_ERR_MISMATCH);
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
    CHECK(!back_differs(b, boot->rank));
    CHECK(hmoe_saved_clear(other) == HMOE_OK && hmoe_saved_clear(other) == HMOE_OK); /* no backward: dropped */
    call = w.back;
    call.saved = other;
    CHECK(hmoe_backward(w.bed.plan, &call) == HMOE_ERR_STATE && says(&call, HMOE_ERR_STATE, "is empty"));
    CHECK(hmoe_forward(w.bed.plan, &second) == HMOE_OK && hmoe_backward(w.bed.plan, &call) == HMOE_OK);
    CHECK(hmoe_saved_destroy(other) == HMOE_OK);
    return leave(b, boot, &w);
}

static void test_calls_differ(void **state)
{
    struct back_case b = small(2);

    (void)state;
    run(&b, calls_differ);
}

/* Another plan's state; a plan that cannot train; objects destroyed too early. */
static int wrong_plans(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct hmoe_plan_options options = case_options(&b->c);
    struct hmoe_saved_usage usage = {.size = sizeof usage};
    struct hmoe_saved *none = NULL;
    struct hmoe_plan *other;
    struct world w;

    CHECK(!enter(b, boot, &w));
    options.training = 0;
    CHECK(hmoe_plan_create(w.bed.group, &options, &other) == HMOE_OK);
    CHECK(hmoe_saved_create(other, NULL, &none) == HMOE_ERR_STATE && strstr(hmoe_last_error(), "training"));
    CHECK(hmoe_plan_destroy(other) == HMOE_OK);
    options.training = 1;
    CHECK(hmoe_plan_create(w.bed.group, &options, &other) == HMOE_OK);
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    CHECK(hmoe_backward(other, &w.back) == HMOE_ERR_STATE && says(&w.back, HMOE_ERR_STATE, "another plan"));
    CHECK(hmoe_backward_weight(other, &w.back) == HMOE_ERR_STATE);
    CHECK(hmoe_plan_destroy(w.bed.plan) == HMOE_ERR_STATE && strstr(hmoe_last_error(), "saved"));
    CHECK(hmoe_saved_read(w.saved, &usage) == HMOE_OK && usage.rows > 0 && usage.pending_bytes == 0);
    CHECK(usage.gate_up_bytes == (size_t)usage.rows * 2 * (size_t)b->c.inner * 4 && usage.rows_bytes == 0);
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
    CHECK(hmoe_saved_read(w.saved, &usage) == HMOE_OK && usage.rows == 0 && usage.gate_up_bytes == 0);
    CHECK(hmoe_plan_destroy(other) == HMOE_OK);
    return leave(b, boot, &w);
}

static void test_wrong_plans(void **state)
{
    struct back_case b = small(1);

    (void)state;
    run(&b, wrong_plans);
}

static int dead_group(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct world w;

    CHECK(!enter(b, boot, &w));
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    CHECK(hmoe_group_abort(w.bed.group, "enough") == HMOE_OK);
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_ERR_ABORTED);
    CHECK(hmoe_backward_input(w.bed.plan, &w.back) == HMOE_ERR_ABORTED);
    CHECK(hmoe_backward_weight(w.bed.plan, &w.back) == HMOE_ERR_ABORTED);
    CHECK(hmoe_saved_destroy(w.saved) == HMOE_OK);
    return case_close(&w.bed);
}

static void test_dead_group(void **state)
{
    struct back_case b = small(1);

    (void)state;
    run(&b, dead_group);
}

/* NaN and Inf in one token's dY stay in that token's dx and d_topk_weights; other tokens' bits are those without. */
static int nan_stays(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    const struct moe_case *c = &b->c;
    float *dy = (float *)(void *)b->dy;
    size_t row = case_size(c, c->hidden);
    struct world w;

    CHECK(!enter(b, boot, &w));
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK);
    for (int64_t h = 0; h < c->hidden; h++)
        dy[3 * c->hidden + h] = h % 2 ? NAN : INFINITY;
    CHECK(hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
    for (int64_t t = 0; t < c->all; t++) {
        const char *got = b->out[OUT_DX].got + (size_t)t * row, *wanted = b->out[OUT_DX].wanted + (size_t)t * row;
        CHECK((memcmp(got, wanted, row) == 0) == (t != 3));
    }
    CHECK(memcmp(b->out[OUT_D_WEIGHTS].got, b->out[OUT_D_WEIGHTS].wanted, (size_t)(3 * c->topk) * 4) == 0);
    CHECK(hmoe_saved_destroy(w.saved) == HMOE_OK);
    return case_close(&w.bed);
}

static void test_nan_stays_in_its_token(void **state)
{
    struct back_case b = small(1);

    (void)state;
    run(&b, nan_stays);
}

/* Several calls in flight: forwards of some microbatches while backwards of others run. */
static int in_flight(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct world w;
    struct hmoe_saved *saved[4];
    struct hmoe_call forward[4], back;

    CHECK(!enter(b, boot, &w));
    for (int i = 0; i < 4; i++) {
        CHECK(hmoe_saved_create(w.bed.plan, NULL, &saved[i]) == HMOE_OK);
        forward[i] = w.forward;
        forward[i].saved = saved[i];
    }
    CHECK(hmoe_forward(w.bed.plan, &forward[0]) == HMOE_OK);
    for (int i = 0; i < 4; i++) {
        back = w.back;
        back.saved = saved[i];
        CHECK(hmoe_backward_start(w.bed.plan, &back) == HMOE_OK);
        if (i < 3)
            CHECK(hmoe_forward_start(w.bed.plan, &forward[i + 1]) == HMOE_OK);
        CHECK(hmoe_call_wait(&back) == HMOE_OK && (i == 3 || hmoe_call_wait(&forward[i + 1]) == HMOE_OK));
        CHECK(!back_differs(b, boot->rank));
        back_reset(b, boot->rank);
    }
    CHECK(hmoe_forward(w.bed.plan, &w.forward) == HMOE_OK && hmoe_backward(w.bed.plan, &w.back) == HMOE_OK);
    CHECK(!back_differs(b, boot->rank));
    for (int i = 0; i < 4; i++)
        CHECK(hmoe_saved_destroy(saved[i]) == HMOE_OK);
    CHECK(hmoe_saved_destroy(w.saved) == HMOE_OK);
    return case_close(&w.bed);
}

static void test_in_flight(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct back_case b = small(2);
        b.c.calls_max = 2;
        b.c.via = (enum hmoe_via)via;
        run(&b, in_flight);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_orders),      cmocka_unit_test(test_one_rank_errs),
        cmocka_unit_test(test_tensors_move), cmocka_unit_test(test_lent_memory),
        cmocka_unit_test(test_calls_differ), cmocka_unit_test(test_wrong_plans),
        cmocka_unit_test(test_dead_group),  cmocka_unit_test(test_nan_stays_in_its_token),
        cmocka_unit_test(test_in_flight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
