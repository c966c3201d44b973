/* Memory: nothing is allocated once a shape has run; an allocation that fails anywhere gives HMOE_ERR_MEMORY and leaks
 * nothing. The allocator is replaced for the whole program, so sanitized builds, which bring their own, skip both. */
#include "back_case.h"

#include <errno.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *memory);

static _Atomic int64_t allocations, alive;
static _Atomic int64_t fail_at; /* the allocation that fails, counted down; 0: none */

static bool fails(void)
{
    atomic_fetch_add(&allocations, 1);
    return atomic_load(&fail_at) > 0 && atomic_fetch_sub(&fail_at, 1) == 1;
}

static void *counted(void *memory)
{
    if (memory)
        atomic_fetch_add(&alive, 1);
    else
        errno = ENOMEM;
    return memory;
}

void *malloc(size_t bytes)
{
    return counted(fails() ? NULL : __libc_malloc(bytes));
}

void *calloc(size_t count, size_t bytes)
{
    return counted(fails() ? NULL : __libc_calloc(count, bytes));
}

void *realloc(void *old, size_t bytes)
{
    if (fails())
        return NULL;
    if (!old)
        atomic_fetch_add(&alive, 1);
    return __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return counted(fails() ? NULL : __libc_memalign(alignment, bytes));
}

void free(void *memory)
{
    if (memory)
        atomic_fetch_sub(&alive, 1);
    __libc_free(memory);
}
#endif

#if !SANITIZED
static const struct moe_case plain = {.hidden = 64, .inner = 40, .experts = 1200, .topk = 4, .ranks = 1,
                                      .dtype = HMOE_F32, .tokens = {600, 90}, .seed = 3, .workers = 2,
                                      .routing = ROUTE_LOGNORMAL};

static int steady_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct case_bed bed;
    int64_t before = 0;

    CHECK(!case_open(c, boot, &bed));
    for (int turn = 0; turn < 4; turn++) {
        struct hmoe_call call = case_call(c, boot->rank);
        if (turn == 1)
            before = atomic_load(&allocations);
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK && !case_differs(c, boot->rank));
        if (turn >= 1 && atomic_load(&allocations) != before) {
            fprintf(stderr, "call %d allocated\n", turn);
            return 3;
        }
    }
    return case_close(&bed);
}

static void steady_state_allocates_nothing(void **state)
{
    static const char *const knobs[] = {NULL, "path=bulk", "expert_block=off,permute_fusion=off", "strips=4"};

    (void)state;
    for (int i = 0; i < 4; i++)
        for (int ranks = 1; ranks <= 2; ranks++) {
            struct moe_case c = plain;
            c.knobs = knobs[i];
            c.ranks = ranks;
            case_make(&c);
            /* processes: in a process of its own nobody else allocates meanwhile */
            assert_int_equal(hmoe_launch(HMOE_VIA_PROCESSES, ranks, steady_rank, &c), HMOE_OK);
            case_free(&c);
        }
}

/* Forward and backward, in both ways, a thousand times: no allocation, no growth. */
static int steady_training(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct hmoe_saved *saved;
    struct case_bed bed;
    int64_t before = 0;
    size_t resident = 0;

    CHECK(!case_open(&b->c, boot, &bed));
    CHECK(hmoe_saved_create(bed.plan, NULL, &saved) == HMOE_OK);
    for (int turn = 0; turn < b->c.calls; turn++) {
        struct hmoe_call call = case_call(&b->c, boot->rank), back = {.size = sizeof back, .saved = saved};
        struct hmoe_workspace space = {.size = sizeof space};
        call.saved = saved;
        back_gradients(b, boot->rank, &back.grad);
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
        if (turn % 2)
            CHECK(hmoe_backward(bed.plan, &back) == HMOE_OK);
        else
            CHECK(hmoe_backward_input(bed.plan, &back) == HMOE_OK && hmoe_backward_weight(bed.plan, &back) == HMOE_OK);
        before = turn == 100 ? atomic_load(&allocations) : before;
        CHECK(turn < 100 || atomic_load(&allocations) == before);
        CHECK(turn % 500 != 499 || hmoe_plan_workspace(bed.plan, &space) == HMOE_OK);
        resident = turn == 499 ? space.high_water_bytes : resident;
        CHECK(turn % 500 != 499 || space.high_water_bytes <= resident);
        before = turn % 500 == 499 ? atomic_load(&allocations) : before; /* looking may allocate */
    }
    CHECK(!back_differs(b, boot->rank));
    CHECK(hmoe_saved_destroy(saved) == HMOE_OK);
    return case_close(&bed);
}

static void training_allocates_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct back_case b = {.c = plain, .dw_type = HMOE_F32};
        b.c.ranks = 1 + i;
        b.c.experts = 16;
        b.c.tokens[0] = 60;
        b.c.calls = i ? 1000 : 10000; /* the long one on one rank */
        b.c.shared = 1;
        b.c.shared_inner = 24;
        b.c.hidden = 24;
        b.c.inner = 16;
        back_make(&b);
        assert_int_equal(hmoe_launch(HMOE_VIA_PROCESSES, b.c.ranks, steady_training, &b), HMOE_OK);
        back_free(&b);
    }
}

/* Makes and uses everything; the error of the first thing that fails. */
static enum hmoe_status use(const struct moe_case *c)
{
    struct hmoe_group_options group_options = {.size = sizeof group_options, .workers = 2};
    struct hmoe_plan_options options = case_options(c);
    struct hmoe_call call = case_call(c, 0), back = {.size = sizeof back};
    struct hmoe_group *group;
    struct hmoe_plan *plan = NULL;
    enum hmoe_status status = hmoe_group_create(&group_options, &group), trace;

    if (status != HMOE_OK)
        return status;
    trace = hmoe_trace_start(group);
    options.training = 1;
    status = hmoe_plan_create(group, &options, &plan);
    if (status == HMOE_OK)
        status = hmoe_saved_create(plan, NULL, &call.saved);
    if (status == HMOE_OK)
        status = hmoe_forward(plan, &call);
    back.saved = call.saved;
    back.grad.dy = call.y;
    if (status == HMOE_OK)
        status = hmoe_backward(plan, &back);
    if (call.saved)
        assert_int_equal(hmoe_saved_destroy(call.saved), HMOE_OK);
    if (plan)
        assert_int_equal(hmoe_plan_destroy(plan), HMOE_OK);
    assert_int_equal(hmoe_group_destroy(group), HMOE_OK);
    return status == HMOE_OK ? trace : status;
}

static void every_allocation_may_fail(void **state)
{
    struct moe_case c = plain;
    int64_t needed, failures = 0;

    (void)state;
    c.experts = 8;
    case_make(&c);
    assert_int_equal(use(&c), HMOE_OK);
    needed = atomic_load(&allocations);
    assert_int_equal(use(&c), HMOE_OK);
    needed = atomic_load(&allocations) - needed;
    assert_true(needed > 3);
    for (int64_t n = 1; n <= needed; n++) {
        int64_t before = atomic_load(&alive);
        enum hmoe_status status;
        atomic_store(&fail_at, n);
        status = use(&c);
        atomic_store(&fail_at, 0);
        if (status != HMOE_OK && status != HMOE_ERR_MEMORY && status != HMOE_ERR_SYSTEM)
            fail_msg("allocation %lld of %lld: %s: %s", (long long)n, (long long)needed, hmoe_status_name(status),
                     hmoe_last_error());
        failures += status != HMOE_OK;
        assert_int_equal(atomic_load(&alive), before);
    }
    assert_true(failures > 3);
    case_free(&c);
}
#endif

int main(void)
{
#if SANITIZED
    puts("[  PASSED  ] 0 test(s): the sanitizer brings its own allocator");
    return 0;
#else
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steady_state_allocates_nothing),
        cmocka_unit_test(training_allocates_nothing),
        cmocka_unit_test(every_allocation_may_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
