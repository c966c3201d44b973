#include "comm_conformance.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/resource.h>

#include <cmocka.h>

static void conforms(void **state)
{
    (void)state;
    assert_int_equal(conformance_all(HMOE_VIA_PROCESSES, "shm"), 0);
}

/* ------------------------------------------------------------ a killed rank */

enum { CHUNK = 4096, NOTICED_MOST_NS = 1000000000 };

static int entries(const char *path)
{
    DIR *directory = opendir(path);
    int count = 0;

    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

static int windows_mapped(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    int count = 0;

    while (maps && fgets(line, sizeof line, maps))
        count += strstr(line, "memfd:hmoe") != NULL;
    if (maps)
        fclose(maps);
    return count;
}

/* Writes to its neighbours until it is killed. */
static _Noreturn void work_until_killed(struct comm_window *window)
{
    char data[CHUNK] = {1};

    for (;;)
        for (int r = 0; r < window->comm->boot.ranks; r++) {
            window->comm->transport->put(window, r, CHUNK, data, sizeof data);
            window->comm->transport->signal(window, r, 0, 1);
        }
}

/* Looks every millisecond; the time from `since_ns` until the failure was there. */
static int64_t notice(struct comm *comm, int64_t since_ns, struct base_error *error)
{
    while (comm_failed(comm, error) == HMOE_OK && base_now_ns() - since_ns < CONFORMANCE_PATIENCE_NS) {
        comm->transport->watch(comm);
        comm_sleep(comm, comm_bell(comm), 1000000);
    }
    return base_now_ns() - since_ns;
}

/* Rank 0 kills the last rank in the middle of its writes; all others learn it, and who it was. */
static int survive_a_kill(struct comm *comm)
{
    int victim = comm->boot.ranks - 1;
    struct comm_window window;
    struct base_error error = {.status = HMOE_OK};
    char expected[64];
    int64_t since_ns, took_ns;

    CHECK(conformance_window(comm, (size_t)8 << 20, &window) == HMOE_OK);
    if (comm->boot.rank == victim)
        work_until_killed(&window);
    CHECK(conformance_await(&window, 0, 1000));
    since_ns = base_now_ns();
    if (comm->boot.rank == 0)
        CHECK(kill(comm->control[victim]->pid, SIGKILL) == 0);
    took_ns = notice(comm, since_ns, &error);
    snprintf(expected, sizeof expected, "rank %d died (process %d)", victim, comm->control[victim]->pid);
    CHECK(error.status == HMOE_ERR_PEER && strcmp(error.text, expected) == 0 && comm->failure->rank == victim);
    CHECK(took_ns < NOTICED_MOST_NS);
    if (comm->boot.rank == 0)
        printf("a kill was noticed after %.2f ms\n", (double)took_ns * 1e-6);
    comm->transport->window_destroy(&window);
    return 0;
}

static int kill_while_others_close(struct comm *comm)
{
    if (comm->boot.rank == comm->boot.ranks - 1) {
        usleep(30000);
        raise(SIGKILL);
    }
    return 0; /* and then comm_close waits for a rank that never departs */
}

/* Opens, runs, closes; nothing of the group may stay in this process. */
static int tidy_rank(const struct hmoe_boot *boot, void *argument)
{
    int files = entries("/proc/self/fd"), line;

    line = conformance_rank(boot, argument);
    CHECK(windows_mapped() == 0);
    CHECK(entries("/proc/self/fd") == files);
    return line;
}

/* The launcher's error, after checking that the host is as it was. */
static struct base_error launch_tidily(int ranks, int (*run)(struct comm *comm))
{
    struct conformance_job job = {.transport = "shm", .run = run};
    int files = entries("/proc/self/fd"), named = entries("/dev/shm");
    struct base_error error = {.status = HMOE_OK};

    comm_launch(HMOE_VIA_PROCESSES, ranks, tidy_rank, &job, &error);
    assert_int_equal(entries("/proc/self/fd"), files);
    assert_int_equal(entries("/dev/shm"), named);
    assert_int_equal(windows_mapped(), 0);
    return error;
}

static void a_kill_is_noticed(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++) {
        struct base_error error = launch_tidily(ranks, survive_a_kill);
        char expected[64];
        snprintf(expected, sizeof expected, "rank %d was killed by signal 9 (Killed)", ranks - 1);
        assert_string_equal(error.text, expected); /* and no survivor returned anything but 0 */
    }
}

static void a_kill_ends_the_close(void **state)
{
    int64_t start_ns = base_now_ns();

    (void)state;
    assert_string_equal(launch_tidily(3, kill_while_others_close).text, "rank 2 was killed by signal 9 (Killed)");
    assert_true(base_now_ns() - start_ns < 10000000000); /* far below the limit of comm_close */
}

/* ------------------------------------------------------ one rank cannot go on */

/* Rank 1 may open so many more files. Its trouble is everybody's, and the group stays usable. */
static int out_of_files(struct comm *comm, rlim_t more, const char *text)
{
    struct rlimit before, few;
    struct base_error error = {.status = HMOE_OK};
    struct comm_window window;
    int next = dup(0);

    CHECK(next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = (struct rlimit){.rlim_cur = (rlim_t)next + more, .rlim_max = before.rlim_max};
    if (comm->boot.rank == 1)
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    CHECK(comm->transport->window_create(comm, 10000, &window, &error) == HMOE_ERR_SYSTEM);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(strstr(error.text, text) && strstr(error.text, "Too many open files"));
    return conformance_one_size(comm, 10000);
}

static int out_of_files_for_mine(struct comm *comm)
{
    return out_of_files(comm, 0, "memfd_create");
}

static int out_of_files_for_peers(struct comm *comm)
{
    return out_of_files(comm, 1, "cannot open the window of rank 0");
}

static void trouble_of_one_is_trouble_of_all(void **state)
{
    (void)state;
    assert_string_equal(launch_tidily(3, out_of_files_for_mine).text, "");
    assert_string_equal(launch_tidily(3, out_of_files_for_peers).text, "");
}

/* --------------------------------------------------------- orderly departure */

/* The last rank says that it departed, and ends. The others watch it end, and call it no failure. */
static int departs_first(const struct hmoe_boot *boot, void *unused)
{
    struct comm_boot comm_boot = {.rank = boot->rank, .ranks = boot->ranks, .allgather = boot->allgather,
                                  .context = boot->allgather_context};
    struct comm_control *last;
    struct base_error error;
    struct comm comm;

    (void)unused;
    CHECK(comm_open(&comm, &comm_boot, "shm", &error) == HMOE_OK);
    last = comm.control[boot->ranks - 1];
    if (boot->rank == boot->ranks - 1) {
        atomic_store(&last->departed, 1);
        return 0;
    }
    while (kill(last->pid, 0) == 0 || errno != ESRCH)
        usleep(1000);
    for (int i = 0; i < 100; i++) {
        comm.transport->watch(&comm);
        CHECK(comm_failed(&comm, &error) == HMOE_OK);
    }
    comm_close(&comm);
    return 0;
}

static void departure_is_no_failure(void **state)
{
    struct base_error error;

    (void)state;
    assert_int_equal(comm_launch(HMOE_VIA_PROCESSES, 3, departs_first, NULL, &error), HMOE_OK);
}

static int nothing(struct comm *comm)
{
    (void)comm;
    return 0;
}

static void opens_and_closes_again_and_again(void **state)
{
    (void)state;
    for (int i = 0; i < 50; i++)
        assert_int_equal(launch_tidily(4, nothing).status, HMOE_OK);
}

/* A rank that never comes: the close of the others ends by its limit. */
static int stay_away(struct comm *comm)
{
    struct base_error error;

    comm->close_limit_ns = 50000000;
    if (comm->boot.rank == 0) {
        CHECK(notice(comm, base_now_ns(), &error) < NOTICED_MOST_NS);
        CHECK(error.status == HMOE_ERR_TIMEOUT);
        CHECK(strcmp(error.text, "rank 0 did not close the group within 50 ms") == 0);
    }
    return 0;
}

static void close_has_a_limit(void **state)
{
    (void)state;
    assert_string_equal(launch_tidily(3, stay_away).text, "");
}

/* A rank killed between the two steps of recording a failure must not hide it. */
static int half_recorded(struct comm *comm)
{
    struct base_error error;

    atomic_store(&comm->failure->state, 1);
    CHECK(comm_failed(comm, &error) == HMOE_ERR_PEER);
    CHECK(strcmp(error.text, "a rank died while it reported a failure") == 0);
    return 0;
}

static void a_half_recorded_failure_counts(void **state)
{
    (void)state;
    assert_int_equal(launch_tidily(1, half_recorded).status, HMOE_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conforms),
        cmocka_unit_test(a_kill_is_noticed),
        cmocka_unit_test(a_kill_ends_the_close),
        cmocka_unit_test(trouble_of_one_is_trouble_of_all),
        cmocka_unit_test(departure_is_no_failure),
        cmocka_unit_test(opens_and_closes_again_and_again),
        cmocka_unit_test(close_has_a_limit),
        cmocka_unit_test(a_half_recorded_failure_counts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
