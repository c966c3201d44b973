/* Failure: aborts, killed and late ranks, forked children. Every wait ends, and says why. */
#include "moe_case.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct moe_case plain = {.hidden = 32, .inner = 24, .experts = 8, .topk = 2, .ranks = 1,
                                      .dtype = HMOE_F32, .tokens = {9, 9, 9, 9}, .seed = 7, .workers = 1,
                                      .calls_max = 2};

static void meet(const struct hmoe_boot *boot)
{
    char all[CASE_RANKS_MAX];

    boot->allgather(boot->allgather_context, "", all, 1);
}

static int abort_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_plan_options options = case_options(c);
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    CHECK(hmoe_group_poll(bed.group) == HMOE_OK);
    if (boot->rank == 1) {
        usleep(20000);
        CHECK(hmoe_group_abort(bed.group, "a test") == HMOE_OK);
    }
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_ABORTED);
    CHECK(strstr(hmoe_last_error(), "rank 1 aborted the group: a test"));
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_ABORTED);
    CHECK(hmoe_group_poll(bed.group) == HMOE_ERR_ABORTED);
    CHECK(hmoe_plan_create(bed.group, &options, &bed.plan) == HMOE_ERR_ABORTED);
    return case_close(&bed);
}

static void abort_reaches_every_rank(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct moe_case c = plain;
        c.ranks = 3;
        c.experts = 9;
        case_make(&c);
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 3, abort_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

/* Four ranks with many rows, so that they end at different times; as threads and as processes in turn. */
static void many_rows(int rounds, hmoe_rank_fn fn)
{
    for (int round = 0; round < rounds; round++) {
        struct moe_case c = plain;
        c.via = (enum hmoe_via)(round & 1);
        c.ranks = 4;
        c.topk = 40;
        case_make(&c);
        assert_int_equal(hmoe_launch(c.via, 4, fn, &c), HMOE_OK);
        case_free(&c);
    }
}

/* One rank gives up right after a call: that call is fine on every rank, the next one fails on the others. */
static int settling_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    CHECK(hmoe_plan_settle(bed.plan) == HMOE_OK);
    for (int i = 0; i < 3; i++)
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    if (boot->rank == 1) {
        CHECK(hmoe_plan_settle(bed.plan) == HMOE_OK);
        CHECK(hmoe_group_abort(bed.group, "no more") == HMOE_OK);
    } else {
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_ABORTED);
    }
    CHECK(hmoe_plan_settle(NULL) == HMOE_ERR_ARGUMENT);
    return case_close(&bed);
}

static void giving_up_between_calls(void **state)
{
    (void)state;
    many_rows(60, settling_rank);
}

/* One rank closes its group while the others go on, as a process does that has reached its end. */
struct leaver {
    const struct hmoe_boot *boot;
    bool leaves;
};

static int gather_or_not(void *context, const void *mine, void *all, size_t bytes)
{
    struct leaver *leaver = context;

    if (!leaver->leaves)
        return leaver->boot->allgather(leaver->boot->allgather_context, mine, all, bytes);
    for (int r = 0; r < leaver->boot->ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, mine, bytes);
    return 0;
}

static int leaving_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call call = case_call(c, boot->rank);
    struct leaver leaver = {.boot = boot};
    struct hmoe_boot own = *boot;
    struct case_bed bed;

    own.allgather = gather_or_not;
    own.allgather_context = &leaver;
    CHECK(!case_open(c, &own, &bed));
    for (int i = 0; i < 3; i++)
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK && !case_differs(c, boot->rank));
    if (boot->rank != 1) {
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_PEER);
        CHECK(strstr(hmoe_last_error(), "rank 1 left the group before call 3"));
    }
    leaver.leaves = true;
    return case_close(&bed);
}

static void a_leaving_rank(void **state)
{
    (void)state;
    many_rows(20, leaving_rank);
}

/* Aborted in the middle of long calls: nobody is left behind, and no rank reads a tensor after its wait. */
static int storm_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    size_t bytes = case_size(c, c->tokens[boot->rank] * c->hidden);
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    for (int turn = 0;; turn++) {
        struct hmoe_call call = case_call(c, boot->rank);
        char *x = malloc(bytes);
        enum hmoe_status status, started;
        memcpy(x, call.x, bytes);
        call.x = x;
        started = hmoe_forward_start(bed.plan, &call);
        CHECK(started == HMOE_OK || started == HMOE_ERR_ABORTED);
        if (turn == 3 && boot->rank == 0)
            hmoe_group_abort(bed.group, "storm");
        status = started == HMOE_OK ? hmoe_call_wait(&call) : started;
        memset(x, 0xff, bytes);
        free(x); /* a late reader would be seen by the sanitizers */
        if (status == HMOE_ERR_ABORTED)
            break;
        CHECK(status == HMOE_OK);
    }
    return case_close(&bed);
}

static void abort_in_the_middle(void **state)
{
    (void)state;
    for (int turn = 0; turn < 20; turn++) {
        struct moe_case c = plain;
        c.ranks = 4;
        c.seed = (uint64_t)turn;
        c.workers = 1 + turn % 2;
        c.tokens[2] = 200;
        case_make(&c);
        assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 4, storm_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

static int killed_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;
    int64_t start;

    CHECK(!case_open(c, boot, &bed));
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    if (boot->rank == 2)
        raise(SIGKILL);
    start = base_now_ns();
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_PEER);
    CHECK(strstr(hmoe_last_error(), "rank 2"));
    CHECK(base_now_ns() - start < 5000000000); /* not the wait limit of 100 s */
    return case_close(&bed);
}

static void a_killed_rank(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.ranks = 3;
    c.experts = 9;
    case_make(&c);
    assert_int_equal(hmoe_launch(HMOE_VIA_PROCESSES, 3, killed_rank, &c), HMOE_ERR_PEER);
    assert_non_null(strstr(hmoe_last_error(), "rank 2 was killed by signal 9"));
    case_free(&c);
}

static int late_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    if (boot->rank == 0) {
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_TIMEOUT);
        CHECK(strstr(hmoe_last_error(), "for the counts of rank 1"));
    }
    meet(boot);
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_TIMEOUT);
    return case_close(&bed);
}

static void waits_end(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct moe_case c = plain;
        c.ranks = 2;
        c.knobs = "wait_limit_ms=200";
        case_make(&c);
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 2, late_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

/* A frozen rank: the others' waits end by their limit, and the launcher does not wait for it either. */
static int frozen_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    if (boot->rank == 1)
        raise(SIGSTOP);
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_TIMEOUT);
    CHECK(strstr(hmoe_last_error(), "of rank 1"));
    return case_close(&bed) + 7;
}

static void a_frozen_rank(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.ranks = 3;
    c.experts = 9;
    c.knobs = "wait_limit_ms=300";
    case_make(&c);
    assert_int_not_equal(hmoe_launch(HMOE_VIA_PROCESSES, 3, frozen_rank, &c), HMOE_OK);
    case_free(&c);
}

static void a_forked_child(void **state)
{
    struct moe_case c = plain;
    struct hmoe_call call;
    struct case_bed bed;
    int exit_status;
    pid_t child;

    (void)state;
    case_make(&c);
    call = case_call(&c, 0);
    assert_false(case_open(&c, &case_boot_alone, &bed));
    child = fork();
    if (child == 0)
        _exit(hmoe_forward(bed.plan, &call) == HMOE_ERR_FORKED && hmoe_plan_destroy(bed.plan) == HMOE_ERR_FORKED &&
              hmoe_group_abort(bed.group, NULL) == HMOE_ERR_FORKED ? 0 : 1);
    assert_int_equal(waitpid(child, &exit_status, 0), child);
    assert_int_equal(exit_status, 0);
    assert_int_equal(hmoe_forward(bed.plan, &call), HMOE_OK);
    assert_false(case_close(&bed));
    case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(abort_reaches_every_rank), cmocka_unit_test(abort_in_the_middle),
        cmocka_unit_test(giving_up_between_calls), cmocka_unit_test(a_leaving_rank),
        cmocka_unit_test(a_killed_rank), cmocka_unit_test(a_frozen_rank),
        cmocka_unit_test(waits_end), cmocka_unit_test(a_forked_child),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
