/* The sum over shards: the same bits for 1, 2, 4 and 8 ranks, as threads and as processes, again and again. */
#include "base/prng.h"
#include "comm/sum.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { SHARDS = 8, MOST = 5000, ROUNDS = 20 };

static float element(int shard, int round, int64_t i)
{
    struct base_prng prng = {(uint64_t)shard * 1000003 + (uint64_t)round * 7919 + (uint64_t)i};

    return base_random_sym(&prng, 1.0f) * (i % 3 ? 1.0f : 1e6f);
}

static float wanted(int first, int shards, int round, int64_t i)
{
    volatile float left, right;

    if (shards == 1)
        return element(first, round, i);
    left = wanted(first, shards / 2, round, i);
    right = wanted(first + shards / 2, shards / 2, round, i);
    return left + right;
}

static int sum_rounds(struct comm *comm, struct comm_sum *sum)
{
    static const int64_t counts[] = {0, 1, 63, 64, 65, MOST};
    int share = SHARDS / comm->boot.ranks, wrong = 0;
    float *mine[SHARDS], *out = malloc(MOST * sizeof *out);
    struct base_error error = {.status = HMOE_OK};

    for (int s = 0; s < share; s++)
        mine[s] = malloc(MOST * sizeof **mine);
    for (int round = 0; round < ROUNDS; round++) {
        int64_t count = counts[round % 6];
        for (int s = 0; s < share; s++)
            for (int64_t i = 0; i < count; i++)
                mine[s][i] = element(comm->boot.rank * share + s, round, i);
        wrong += comm_sum(sum, mine, round % 2 ? out : mine[0], count, &error) != HMOE_OK;
        for (int64_t i = 0; i < count; i++) {
            float want = wanted(0, SHARDS, round, i);
            wrong += memcmp(round % 2 ? &out[i] : &mine[0][i], &want, 4) != 0;
        }
    }
    for (int s = 0; s < share; s++)
        free(mine[s]);
    free(out);
    return wrong;
}

static int open_sum(const struct hmoe_boot *boot, struct comm *comm, struct comm_sum **sum)
{
    struct base_error error = {.status = HMOE_OK};
    struct comm_boot own = {boot->rank, boot->ranks, boot->allgather, boot->allgather_context};

    return comm_open(comm, &own, "auto", &error) != HMOE_OK ||
           comm_sum_create(sum, comm, SHARDS, MOST, 20000000000, &error) != HMOE_OK;
}

static int sum_rank(const struct hmoe_boot *boot, void *argument)
{
    struct comm comm;
    struct comm_sum *sum;
    int wrong;

    (void)argument;
    if (open_sum(boot, &comm, &sum))
        return 1;
    wrong = sum_rounds(&comm, sum);
    comm_sum_destroy(sum);
    comm_close(&comm);
    return wrong != 0;
}

static void test_bits_do_not_depend_on_ranks(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= SHARDS; ranks *= 2)
        for (int via = 0; via < 2; via++)
            assert_int_equal(hmoe_launch((enum hmoe_via)via, ranks, sum_rank, NULL), HMOE_OK);
}

static int dying_rank(const struct hmoe_boot *boot, void *argument)
{
    struct comm comm;
    struct comm_sum *sum;
    float one = 1.0f, *mine[SHARDS] = {&one, &one, &one, &one};
    struct base_error error = {.status = HMOE_OK};

    (void)argument;
    if (open_sum(boot, &comm, &sum))
        return 1;
    if (boot->rank == 1)
        kill(getpid(), SIGKILL);
    comm_sum(sum, mine, &one, 1, &error);
    return error.status == HMOE_ERR_PEER ? 0 : 3;
}

static void test_killed_rank(void **state)
{
    (void)state;
    assert_int_not_equal(hmoe_launch(HMOE_VIA_PROCESSES, 2, dying_rank, NULL), HMOE_OK);
    assert_non_null(strstr(hmoe_last_error(), "rank 1"));
}

static int odd_rank(const struct hmoe_boot *boot, void *argument)
{
    struct base_error error = {.status = HMOE_OK};
    struct comm_boot own = {boot->rank, boot->ranks, boot->allgather, boot->allgather_context};
    struct comm_sum *sum;
    struct comm comm;

    if (comm_open(&comm, &own, "auto", &error) != HMOE_OK)
        return 1;
    comm_sum_create(&sum, &comm, *(int *)argument, 1, 1, &error);
    comm_close(&comm);
    return error.status != HMOE_ERR_ARGUMENT;
}

static void test_shards_that_do_not_fit(void **state)
{
    static int shards[] = {0, -4, 1, 3, 6};

    (void)state;
    for (int i = 0; i < 5; i++)
        assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, odd_rank, &shards[i]), HMOE_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_do_not_depend_on_ranks),
        cmocka_unit_test(test_killed_rank),
        cmocka_unit_test(test_shards_that_do_not_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
