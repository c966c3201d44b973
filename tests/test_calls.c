/* The life of calls: errors that every rank gets alike, limits, several in flight, two plans, two groups, memory that
 * does not grow. */
#include "moe_case.h"

#include <unistd.h>

static const struct moe_case plain = {.hidden = 32, .inner = 24, .experts = 8, .topk = 2, .ranks = 1,
                                      .dtype = HMOE_F32, .tokens = {9, 9, 9, 9}, .seed = 7, .workers = 1,
                                      .calls_max = 2};

/* ---- errors */

struct wrong {
    struct moe_case c;
    int rank;                        /* who gives it */
    void (*spoil)(struct hmoe_call *call, void *room);
    enum hmoe_status status;
    const char *text;                /* part of the error on every rank */
};

static void bad_tokens(struct hmoe_call *call, void *room)
{
    (void)room;
    call->tokens = -3;
}

static void too_many(struct hmoe_call *call, void *room)
{
    (void)room;
    call->tokens = 4711;
}

static void null_x(struct hmoe_call *call, void *room)
{
    (void)room;
    call->x = NULL;
}

static void null_up(struct hmoe_call *call, void *room)
{
    (void)room;
    call->layer.up_proj = NULL;
}

static void bad_weights_type(struct hmoe_call *call, void *room)
{
    (void)room;
    call->weights_type = (enum hmoe_dtype)9;
}

static void overlapping_y(struct hmoe_call *call, void *room)
{
    (void)room;
    call->y = (char *)(uintptr_t)call->x + 64;
}

static void odd_x(struct hmoe_call *call, void *room)
{
    (void)room;
    call->x = (const char *)call->x + 1;
}

/* Two bad ids: the lower slot is named. */
static void bad_id(struct hmoe_call *call, void *room)
{
    int32_t *ids = room;
    memcpy(ids, call->topk_ids, (size_t)call->tokens * 2 * 4);
    ids[11] = 8;
    ids[14] = -2;
    call->topk_ids = ids;
}

static void bad_id_64(struct hmoe_call *call, void *room)
{
    int64_t *ids = room;
    for (int i = 0; i < call->tokens * 2; i++)
        ids[i] = i % 8;
    ids[3] = (int64_t)1 << 40;
    call->topk_ids = ids;
    call->ids_type = HMOE_I64;
}

static int wrong_rank(const struct hmoe_boot *boot, void *argument)
{
    struct wrong *wrong = argument;
    struct case_bed bed;
    int64_t room[64];

    CHECK(!case_open(&wrong->c, boot, &bed));
    for (int turn = 0; turn < 3; turn++) {
        struct hmoe_call call = case_call(&wrong->c, boot->rank);
        if (boot->rank == wrong->rank)
            wrong->spoil(&call, room);
        memset(wrong->c.y + (size_t)wrong->c.first[boot->rank] * 32 * 4, 0x5a, 9 * 32 * 4);
        CHECK(hmoe_forward(bed.plan, &call) == wrong->status);
        CHECK(strstr(hmoe_last_error(), wrong->text));
        CHECK(strcmp(call.error, hmoe_last_error()) == 0);
        CHECK(hmoe_call_wait(&call) == wrong->status); /* idempotent */
        if (boot->rank != wrong->rank)
            for (int i = 0; i < 9 * 32; i++) /* nothing was written */
                CHECK(((unsigned char *)call.y)[i * 4] == 0x5a);
        for (int legal = 0; legal < 2; legal++) { /* the group stays usable, the call's slot too */
            call = case_call(&wrong->c, boot->rank);
            memset(call.y, 0xff, 9 * 32 * 4);
            CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
            CHECK(!case_differs(&wrong->c, boot->rank));
        }
    }
    return case_close(&bed);
}

static void errors_reach_every_rank(void **state)
{
    static const struct wrong wrongs[] = {
        {.spoil = bad_tokens, .status = HMOE_ERR_ARGUMENT, .text = "tokens of rank 1 is -3"},
        {.spoil = too_many, .status = HMOE_ERR_LIMIT, .text = "tokens of rank 1 is 4711, the most of all ranks"},
        {.spoil = null_x, .status = HMOE_ERR_ARGUMENT, .text = "x of rank 1 is NULL"},
        {.spoil = null_up, .status = HMOE_ERR_ARGUMENT, .text = "up_proj of rank 1 is NULL"},
        {.spoil = bad_weights_type, .status = HMOE_ERR_ARGUMENT, .text = "weights_type of rank 1 is 9"},
        {.spoil = overlapping_y, .status = HMOE_ERR_ARGUMENT, .text = "y of rank 1 overlaps x"},
        {.spoil = odd_x, .status = HMOE_ERR_ARGUMENT, .text = "x of rank 1 is at"},
        {.spoil = bad_id, .status = HMOE_ERR_ID, .text = "topk_ids of rank 1, token 5, slot 1 is 8"},
        {.spoil = bad_id_64, .status = HMOE_ERR_ID, .text = "token 1, slot 1 is 1099511627776"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++)
        for (int way = 0; way < 4; way++) {
            struct wrong wrong = wrongs[i];
            wrong.c = plain;
            wrong.c.knobs = "wait_limit_ms=5000";
            wrong.c.calls_max = 1 + way / 2;
            wrong.c.ranks = 3;
            wrong.c.experts = 9;
            wrong.c.via = (enum hmoe_via)(way % 2);
            wrong.rank = 1;
            if (wrong.spoil == bad_id) { /* E = 8: 8 is the first that is not allowed */
                wrong.c.ranks = 2;
                wrong.c.experts = 8;
            }
            case_make(&wrong.c);
            assert_int_equal(hmoe_launch(wrong.c.via, wrong.c.ranks, wrong_rank, &wrong), HMOE_OK);
            case_free(&wrong.c);
        }
}

static int limit_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_plan_options options = case_options(c);
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;

    CHECK(case_group(c, boot, &bed.group) == HMOE_OK);
    options.receive_max = 20; /* all 36 slots go to rank 0 */
    CHECK(hmoe_plan_create(bed.group, &options, &bed.plan) == HMOE_OK);
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_LIMIT);
    CHECK(strstr(hmoe_last_error(), "rank 0 would receive 36 rows"));
    call = case_call(c, boot->rank);
    call.tokens = 5; /* 20 rows */
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    CHECK(hmoe_plan_destroy(bed.plan) == HMOE_OK);
    options.receive_max = -1;
    CHECK(hmoe_plan_create(bed.group, &options, &bed.plan) == HMOE_ERR_ARGUMENT);
    CHECK(strstr(hmoe_last_error(), "receive_max is -1"));
    options.receive_max = 36 + boot->rank;
    CHECK(hmoe_plan_create(bed.group, &options, &bed.plan) == HMOE_ERR_MISMATCH);
    CHECK(strstr(hmoe_last_error(), "receive_max is 37 on rank 1 and 36 on rank 0"));
    options.receive_max = 36;
    CHECK(hmoe_plan_create(bed.group, &options, &bed.plan) == HMOE_OK);
    call = case_call(c, boot->rank);
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    CHECK(!case_differs(c, boot->rank));
    CHECK(hmoe_group_destroy(bed.group) == HMOE_ERR_STATE);
    return case_close(&bed);
}

static void receive_limits(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.ranks = 2;
    c.calls_max = 1;
    c.knobs = "wait_limit_ms=5000";
    c.routing = ROUTE_FIRST_RANK;
    case_make(&c);
    assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, limit_rank, &c), HMOE_OK);
    case_free(&c);
}

/* A knob that only one rank gets wrong: every rank is told, nobody hangs. */
static int knob_rank(const struct hmoe_boot *boot, void *argument)
{
    struct hmoe_group_options options = {.size = sizeof options, .rank = boot->rank, .ranks = boot->ranks,
                                         .allgather = boot->allgather, .allgather_context = boot->allgather_context,
                                         .knobs = boot->rank == 1 ? "strips=65" : NULL};
    struct hmoe_group *group;

    (void)argument;
    CHECK(hmoe_group_create(&options, &group) == HMOE_ERR_ARGUMENT);
    CHECK(strstr(hmoe_last_error(), "knob strips: \"65\" is not a number from 0 to 64"));
    return 0;
}

static void a_knob_of_one_rank(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++)
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 3, knob_rank, NULL), HMOE_OK);
}

/* Two ranks that both call themselves 0. */
static int twin_rank(const struct hmoe_boot *boot, void *argument)
{
    struct hmoe_group_options options = {.size = sizeof options, .rank = 0, .ranks = boot->ranks,
                                         .allgather = boot->allgather, .allgather_context = boot->allgather_context};
    struct hmoe_group *group;

    (void)argument;
    CHECK(hmoe_group_create(&options, &group) == HMOE_ERR_MISMATCH);
    CHECK(strstr(hmoe_last_error(), "rank is 0 where allgather has rank 1"));
    return 0;
}

static void twins(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++)
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 2, twin_rank, NULL), HMOE_OK);
}

static void group_options_are_checked(void **state)
{
    struct hmoe_group_options options = {.size = sizeof options};
    struct hmoe_group *group;

    (void)state;
    assert_int_equal(hmoe_group_create(NULL, &group), HMOE_ERR_ARGUMENT);
    options.knobs = "waves=on";
    assert_int_equal(hmoe_group_create(&options, &group), HMOE_ERR_ARGUMENT);
    assert_non_null(strstr(hmoe_last_error(), "no knob \"waves\""));
    options.knobs = "engine=avx9";
    assert_int_equal(hmoe_group_create(&options, &group), HMOE_ERR_ARGUMENT);
    assert_non_null(strstr(hmoe_last_error(), "auto|amx|"));
    options.knobs = NULL;
    options.ranks = 2;
    assert_int_equal(hmoe_group_create(&options, &group), HMOE_ERR_ARGUMENT);
    assert_non_null(strstr(hmoe_last_error(), "allgather is NULL"));
}

static void options_are_checked(void **state)
{
    struct hmoe_group_options group_options = {.size = sizeof group_options};
    struct hmoe_plan_options good = case_options(&plain), bad;
    struct hmoe_group *group;
    struct hmoe_plan *plan;

    (void)state;
    assert_int_equal(hmoe_group_create(&group_options, &group), HMOE_OK);
    assert_int_equal(hmoe_plan_create(group, NULL, &plan), HMOE_ERR_ARGUMENT);
    bad = good, bad.size = 3;
    assert_int_equal(hmoe_plan_create(group, &bad, &plan), HMOE_ERR_ARGUMENT);
    bad = good, bad.hidden = 0;
    assert_int_equal(hmoe_plan_create(group, &bad, &plan), HMOE_ERR_ARGUMENT);
    assert_non_null(strstr(hmoe_last_error(), "hidden is 0"));
    bad = good, bad.dtype = (enum hmoe_dtype)3;
    assert_int_equal(hmoe_plan_create(group, &bad, &plan), HMOE_ERR_ARGUMENT);
    bad = good, bad.activation.alpha = NAN;
    assert_int_equal(hmoe_plan_create(group, &bad, &plan), HMOE_ERR_ARGUMENT);
    bad = good, bad.tokens_max = (int64_t)1 << 33;
    assert_int_equal(hmoe_plan_create(group, &bad, &plan), HMOE_ERR_ARGUMENT);
    assert_int_equal(hmoe_plan_create(group, &good, &plan), HMOE_OK);
    assert_int_equal(hmoe_call_wait(NULL), HMOE_ERR_STATE);
    assert_int_equal(hmoe_forward_start(plan, NULL), HMOE_ERR_ARGUMENT);
    assert_int_equal(hmoe_forward_start(plan, &(struct hmoe_call){.size = 1}), HMOE_ERR_ARGUMENT);
    assert_int_equal(hmoe_plan_destroy(plan), HMOE_OK);
    assert_int_equal(hmoe_group_destroy(group), HMOE_OK);
}

/* ---- several in flight */

static int flight_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument; /* two cases of different size */
    struct hmoe_plan_options big = case_options(&c[1]), small = case_options(&c[0]);
    struct hmoe_group *group;
    struct hmoe_plan *plan[2];

    big.calls_max = small.calls_max = 3;
    CHECK(case_group(&c[0], boot, &group) == HMOE_OK);
    CHECK(hmoe_plan_create(group, &small, &plan[0]) == HMOE_OK);
    CHECK(hmoe_plan_create(group, &big, &plan[1]) == HMOE_OK);
    for (int turn = 0; turn < 30; turn++) {
        struct hmoe_call calls[2];
        memset(c[0].y + case_size(&c[0], c[0].first[boot->rank] * c->hidden), 0xff,
               case_size(&c[0], c[0].tokens[boot->rank] * c->hidden));
        for (int i = 0; i < 2; i++) {
            calls[i] = case_call(&c[i], boot->rank);
            CHECK(hmoe_forward_start(plan[i], &calls[i]) == HMOE_OK);
        }
        for (int i = 1; i >= 0; i--)
            CHECK(hmoe_call_wait(&calls[i]) == HMOE_OK && !case_differs(&c[i], boot->rank));
    }
    CHECK(hmoe_plan_destroy(plan[0]) == HMOE_OK);
    CHECK(hmoe_plan_destroy(plan[1]) == HMOE_OK);
    CHECK(hmoe_group_destroy(group) == HMOE_OK);
    return 0;
}

static void two_plans_in_flight(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct moe_case c[2] = {plain, plain};
        for (int i = 0; i < 2; i++) {
            c[i].ranks = 2;
            c[i].seed = (uint64_t)i;
            c[i].hidden = i ? 80 : 32;
            c[i].tokens[0] = i ? 70 : 3;
            case_make(&c[i]);
        }
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 2, flight_rank, c), HMOE_OK);
        case_free(&c[0]);
        case_free(&c[1]);
    }
}

/* One plan, three calls in flight, a fourth refused; T changes from call to call; poll ends them without waiting. */
static int same_plan_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct case_bed bed;
    char *y = malloc(case_size(c, 3 * c->tokens[boot->rank] * c->hidden));
    size_t row = case_size(c, c->hidden);

    CHECK(!case_open(c, boot, &bed));
    for (int turn = 0; turn < 40; turn++) {
        struct hmoe_call calls[3];
        for (int i = 0; i < 3; i++) {
            calls[i] = case_call(c, boot->rank);
            calls[i].tokens = (turn + i * 3) % (calls[i].tokens + 1);
            calls[i].y = y + (size_t)i * (size_t)c->tokens[boot->rank] * row;
            calls[i].tag = (uint64_t)i;
            CHECK(hmoe_forward_start(bed.plan, &calls[i]) == HMOE_OK);
        }
        for (int i = 2; i >= 0; i--) {
            while (turn % 2 && !hmoe_call_done(&calls[i]))
                usleep(10);
            CHECK(hmoe_call_wait(&calls[i]) == HMOE_OK);
            CHECK(memcmp(calls[i].y, c->wanted + (size_t)c->first[boot->rank] * row,
                         (size_t)calls[i].tokens * row) == 0);
        }
    }
    free(y);
    return case_close(&bed);
}

static void three_calls_of_one_plan(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct moe_case c = plain;
        c.ranks = 2;
        c.calls_max = 3;
        c.tokens[1] = 33;
        case_make(&c);
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 2, same_plan_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

static void meet(const struct hmoe_boot *boot)
{
    char all[CASE_RANKS_MAX];

    boot->allgather(boot->allgather_context, "", all, 1);
}

/* Rank 0 starts all it may while rank 1 has not begun. */
static int busy_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call calls[3];
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    for (int i = 0; i < 3; i++)
        calls[i] = case_call(c, boot->rank);
    if (boot->rank == 1)
        meet(boot);
    CHECK(hmoe_forward_start(bed.plan, &calls[0]) == HMOE_OK);
    CHECK(hmoe_forward_start(bed.plan, &calls[1]) == HMOE_OK);
    if (boot->rank == 0) {
        CHECK(hmoe_forward_start(bed.plan, &calls[0]) == HMOE_ERR_STATE);
        CHECK(hmoe_forward_start(bed.plan, &calls[2]) == HMOE_ERR_BUSY);
        CHECK(strstr(hmoe_last_error(), "calls_max"));
        CHECK(hmoe_plan_destroy(bed.plan) == HMOE_ERR_STATE);
        CHECK(!hmoe_call_done(&calls[0]));
        meet(boot);
    }
    CHECK(hmoe_call_wait(&calls[1]) == HMOE_OK && hmoe_call_wait(&calls[0]) == HMOE_OK);
    CHECK(hmoe_call_wait(&calls[0]) == HMOE_OK && hmoe_call_done(&calls[0]));
    CHECK(hmoe_forward(bed.plan, &calls[2]) == HMOE_OK);
    CHECK(!case_differs(c, boot->rank));
    return case_close(&bed);
}

static void busy_and_early(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.ranks = 2;
    case_make(&c);
    assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, busy_rank, &c), HMOE_OK);
    case_free(&c);
}

/* One rank is far behind in every call, and needed by no expert: the others start early, wait for its counts, and take
 * nothing for its silence. Slow is not dead. */
static int slow_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct case_bed bed;
    size_t row = case_size(c, c->hidden);

    CHECK(!case_open(c, boot, &bed));
    for (int turn = 0; turn < 8; turn++) {
        struct hmoe_call call = case_call(c, boot->rank);
        if (boot->rank == 1)
            usleep(turn ? 20000 : 300000);
        call.tokens = (turn * 5 + boot->rank) % 10;
        memset(call.y, 0xff, (size_t)call.tokens * row);
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
        CHECK(memcmp(call.y, c->wanted + (size_t)c->first[boot->rank] * row, (size_t)call.tokens * row) == 0);
    }
    return case_close(&bed);
}

static void a_slow_rank(void **state)
{
    (void)state;
    for (int calls_max = 1; calls_max <= 2; calls_max++)
        for (int via = 0; via < 2; via++) {
            struct moe_case c = plain;
            c.ranks = 2;
            c.routing = ROUTE_HOME;
            c.calls_max = calls_max;
            case_make(&c);
            assert_int_equal(hmoe_launch((enum hmoe_via)via, 2, slow_rank, &c), HMOE_OK);
            case_free(&c);
        }
}

/* Groups live side by side and are destroyed in any order. */
static void two_groups(void **state)
{
    struct moe_case c = plain;
    struct case_bed bed[2];

    (void)state;
    case_make(&c);
    for (int i = 0; i < 2; i++)
        assert_false(case_open(&c, &case_boot_alone, &bed[i]));
    for (int turn = 0; turn < 10; turn++)
        for (int i = 0; i < 2; i++) {
            struct hmoe_call call = case_call(&c, 0);
            memset(call.y, 0xff, case_size(&c, c.all * c.hidden));
            assert_int_equal(hmoe_forward(bed[i].plan, &call), HMOE_OK);
            assert_false(case_differs(&c, 0));
        }
    for (int i = 0; i < 2; i++)
        assert_false(case_close(&bed[i]));
    case_free(&c);
}

/* The reported bytes bound each other and do not grow. */
static void workspace(void **state)
{
    struct hmoe_workspace asked = {.size = sizeof asked}, got = {.size = sizeof got}, later = {.size = sizeof later};
    struct moe_case c = plain;
    struct hmoe_plan_options options;
    struct case_bed bed;

    (void)state;
    case_make(&c);
    options = case_options(&c);
    assert_int_equal(hmoe_workspace_query(&options, 1, 1, &asked), HMOE_OK);
    assert_int_equal(hmoe_workspace_query(&options, 3, 1, &asked), HMOE_ERR_ARGUMENT);
    assert_false(case_open(&c, &case_boot_alone, &bed));
    for (int turn = 0; turn < 10000; turn++) {
        struct hmoe_call call = case_call(&c, 0);
        call.tokens = turn % 10;
        assert_int_equal(hmoe_forward(bed.plan, &call), HMOE_OK);
        if (turn == 9)
            assert_int_equal(hmoe_plan_workspace(bed.plan, &got), HMOE_OK);
    }
    assert_int_equal(hmoe_plan_workspace(bed.plan, &later), HMOE_OK);
    assert_int_equal(got.reserved_bytes, asked.reserved_bytes);
    assert_int_equal(got.high_water_bytes, later.high_water_bytes);
    assert_true(later.high_water_bytes > 0 && later.high_water_bytes <= later.reserved_bytes);
    assert_true(got.shared_bytes <= got.reserved_bytes);
    assert_false(case_close(&bed));
    case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_reach_every_rank), cmocka_unit_test(receive_limits),
        cmocka_unit_test(a_knob_of_one_rank), cmocka_unit_test(twins), cmocka_unit_test(group_options_are_checked),
        cmocka_unit_test(options_are_checked), cmocka_unit_test(two_plans_in_flight),
        cmocka_unit_test(three_calls_of_one_plan), cmocka_unit_test(busy_and_early), cmocka_unit_test(a_slow_rank),
        cmocka_unit_test(two_groups), cmocka_unit_test(workspace),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
