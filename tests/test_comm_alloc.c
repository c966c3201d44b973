/* Memory that runs out on one rank, at its n-th allocation: every rank is told the same, nothing is lost, and the next
 * try works. The test brings its own malloc and calloc, so it is empty under sanitizers, which bring theirs. */
#include "comm/comm.h"
#include "comm/launch.h"
#include "comm_check.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static _Thread_local int allocations_left = -1; /* negative: no limit */
static _Atomic int living;

#if COMM_SHARE == 1
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void __libc_free(void *memory);

static void *hand_out(void *memory)
{
    if (memory)
        living++;
    return memory;
}

static int run_out(void)
{
    if (allocations_left < 0 || allocations_left-- > 0)
        return 0;
    allocations_left = 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes)
{
    return run_out() ? NULL : hand_out(__libc_malloc(bytes));
}

void *calloc(size_t count, size_t bytes)
{
    return run_out() ? NULL : hand_out(__libc_calloc(count, bytes));
}

void free(void *memory)
{
    if (memory)
        living--;
    __libc_free(memory);
}
#endif

enum { RANKS = 3 };

struct shortage {
    const char *transport;
    int at; /* which allocation of rank 1 fails */
};

static enum hmoe_status use_window(struct comm *comm, struct base_error *error)
{
    struct comm_window window;

    if (comm->transport->window_create(comm, 5000, &window, error) != HMOE_OK)
        return error->status;
    comm->transport->window_destroy(&window);
    return HMOE_OK;
}

/* What open and a window came to, with rank 1 short of memory. */
static enum hmoe_status try_short(const struct comm_boot *boot, const struct shortage *shortage,
                                  struct base_error *error)
{
    struct comm comm;
    enum hmoe_status status;

    allocations_left = boot->rank == 1 ? shortage->at : -1;
    status = comm_open(&comm, boot, shortage->transport, error);
    if (status == HMOE_OK) {
        status = use_window(&comm, error);
        allocations_left = -1;
        comm_close(&comm);
    }
    allocations_left = -1;
    return status;
}

/* 0 when it went well, -1 when every rank had the same HMOE_ERR_MEMORY. */
static int tries(const struct hmoe_boot *boot, void *argument)
{
    struct comm_boot comm_boot = {.rank = boot->rank, .ranks = boot->ranks, .allgather = boot->allgather,
                                  .context = boot->allgather_context};
    struct shortage plenty = {.transport = ((struct shortage *)argument)->transport, .at = -1};
    struct base_error error, all[RANKS], ignored;
    enum hmoe_status status;

    memset(&error, 0, sizeof error);
    status = try_short(&comm_boot, argument, &error);
    error.status = status;
    CHECK(boot->allgather(boot->allgather_context, &error, all, sizeof error) == 0);
    CHECK(try_short(&comm_boot, &plenty, &ignored) == HMOE_OK);
    if (status == HMOE_OK)
        return 0;
    CHECK(status == HMOE_ERR_MEMORY);
    for (int r = 0; r < RANKS; r++)
        CHECK(all[r].status == status && strcmp(all[r].text, error.text) == 0);
    return -1;
}

/* 1 when rank 1 ran out. */
static int runs_out(const char *transport, int at)
{
    struct shortage shortage = {.transport = transport, .at = at};
    struct base_error error = {.status = HMOE_OK};

    if (comm_launch(HMOE_VIA_THREADS, RANKS, tries, &shortage, &error) == HMOE_OK)
        return 0;
    assert_non_null(strstr(error.text, "returned -1"));
    return 1;
}

static void memory_runs_out(void **state)
{
    const char *transports[] = {"threads", "shm"};

    (void)state;
    for (int t = 0; t < 2; t++) {
        int failures = 0, before;
        assert_int_equal(runs_out(transports[t], -1), 0); /* threads keep some memory for the next ones */
        before = living;
        for (int at = 0; at < 30; at++)
            failures += runs_out(transports[t], at);
        assert_in_range(failures, 5, 20); /* and above that it always went well */
        assert_int_equal(living, before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(memory_runs_out)};

    return COMM_SHARE == 1 ? cmocka_run_group_tests(tests, NULL, NULL) : 0;
}
