/* The launcher, and how a group chooses its transport. */
#include "comm/comm.h"
#include "comm/launch.h"
#include "comm_check.h"

#include <dirent.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const enum hmoe_via both[] = {HMOE_VIA_THREADS, HMOE_VIA_PROCESSES};

static struct base_error launch(enum hmoe_via via, int ranks, hmoe_rank_fn fn, void *argument)
{
    struct base_error error = {.status = HMOE_OK};
    enum hmoe_status status = comm_launch(via, ranks, fn, argument, &error);

    assert_int_equal(status, error.status);
    return error;
}

static int entries(const char *path)
{
    DIR *directory = opendir(path);
    int count = 0;

    assert_non_null(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* ---------------------------------------------------------------- endings */

static int sees_its_rank(const struct hmoe_boot *boot, void *argument)
{
    return boot->ranks == *(int *)argument && boot->rank >= 0 && boot->rank < boot->ranks && boot->allgather ? 0 : 1;
}

static void all_return_zero(void **state)
{
    (void)state;
    for (int v = 0; v < 2; v++)
        for (int ranks = 1; ranks <= 40; ranks = ranks * 2 + 1)
            assert_int_equal(launch(both[v], ranks, sees_its_rank, &ranks).status, HMOE_OK);
}

static int one_returns(const struct hmoe_boot *boot, void *argument)
{
    return boot->rank == 1 ? *(int *)argument : 0;
}

/* 256 and -1 do not fit in an exit status. */
static void a_returned_value_is_told(void **state)
{
    int values[] = {3, 256, -1, 255};
    char expected[40];

    (void)state;
    for (int v = 0; v < 2; v++)
        for (int i = 0; i < 4; i++) {
            struct base_error error = launch(both[v], 3, one_returns, &values[i]);
            assert_int_equal(error.status, HMOE_ERR_ABORTED);
            snprintf(expected, sizeof expected, "rank 1 returned %d", values[i]);
            assert_string_equal(error.text, expected);
        }
}

/* Rank 2 gives up first; the others return something only because of that. */
static int gives_up_first(const struct hmoe_boot *boot, void *argument)
{
    char mine = 0, all[3];

    (void)argument;
    return boot->rank == 2 ? 9 : boot->allgather(boot->allgather_context, &mine, all, 1);
}

static int dies_first(const struct hmoe_boot *boot, void *argument)
{
    char mine = 0, all[3];

    if (boot->rank == 2)
        raise(*(int *)argument);
    return boot->allgather(boot->allgather_context, &mine, all, 1);
}

static void the_first_cause_is_told(void **state)
{
    int kill_signal = SIGKILL, abort_signal = SIGABRT;
    struct base_error error;

    (void)state;
    for (int v = 0; v < 2; v++)
        assert_string_equal(launch(both[v], 3, gives_up_first, NULL).text, "rank 2 returned 9");
    error = launch(HMOE_VIA_PROCESSES, 3, dies_first, &kill_signal);
    assert_string_equal(error.text, "rank 2 was killed by signal 9 (Killed)");
    assert_int_equal(error.status, HMOE_ERR_PEER);
    error = launch(HMOE_VIA_PROCESSES, 3, dies_first, &abort_signal);
    assert_string_equal(error.text, "rank 2 was killed by signal 6 (Aborted)");
}

static int exits(const struct hmoe_boot *boot, void *argument)
{
    if (boot->rank == 0)
        _exit(*(int *)argument);
    return 0;
}

static void an_exit_is_no_return(void **state)
{
    int codes[] = {0, 5};

    (void)state;
    assert_string_equal(launch(HMOE_VIA_PROCESSES, 2, exits, &codes[0]).text,
                        "rank 0 ended before its function returned (exit status 0)");
    assert_string_equal(launch(HMOE_VIA_PROCESSES, 2, exits, &codes[1]).text,
                        "rank 0 ended before its function returned (exit status 5)");
}

static int has_files(const struct hmoe_boot *boot, void *argument)
{
    (void)boot;
    return entries("/proc/self/fd") == *(int *)argument ? 0 : 1;
}

static void children_inherit_nothing_new(void **state)
{
    int files = entries("/proc/self/fd");

    (void)state;
    assert_int_equal(launch(HMOE_VIA_PROCESSES, 4, has_files, &files).status, HMOE_OK);
}

static int must_not_run(const struct hmoe_boot *boot, void *argument)
{
    (void)boot;
    *(int *)argument = 1;
    return 0;
}

/* A child that cannot be watched: no rank runs. */
static void all_or_none_run(void **state)
{
    int *ran = mmap(NULL, sizeof *ran, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), next = dup(0);
    struct rlimit before, few;
    struct base_error error;

    (void)state;
    assert_true(ran != MAP_FAILED && next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = (struct rlimit){.rlim_cur = (rlim_t)next + 2, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    error = launch(HMOE_VIA_PROCESSES, 4, must_not_run, ran);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(error.status, HMOE_ERR_SYSTEM);
    assert_string_equal(error.text, "cannot start process 2 of 4: Too many open files");
    assert_int_equal(*ran, 0);
    assert_int_equal(dup(0), next); /* the watches are closed */
    assert_int_equal(close(next), 0);
    munmap(ran, sizeof *ran);
}

static void arguments_are_checked(void **state)
{
    int ranks = 1;

    (void)state;
    assert_int_equal(launch(HMOE_VIA_THREADS, 0, sees_its_rank, &ranks).status, HMOE_ERR_ARGUMENT);
    assert_int_equal(launch(HMOE_VIA_THREADS, -1, sees_its_rank, &ranks).status, HMOE_ERR_ARGUMENT);
    assert_int_equal(launch(HMOE_VIA_PROCESSES, 1025, sees_its_rank, &ranks).status, HMOE_ERR_ARGUMENT);
    assert_int_equal(launch(HMOE_VIA_PROCESSES, 1, NULL, NULL).status, HMOE_ERR_ARGUMENT);
    assert_int_equal(launch((enum hmoe_via)2, 1, sees_its_rank, &ranks).status, HMOE_ERR_ARGUMENT);
    assert_int_equal(launch((enum hmoe_via)-1, 1, sees_its_rank, &ranks).status, HMOE_ERR_ARGUMENT);
}

/* --------------------------------------------------------------- allgather */

static unsigned char gathered(int rank, size_t i, int round)
{
    return (unsigned char)((size_t)rank * 89 + i * 7 + (i >> 8) + (size_t)round * 31);
}

static int gather_once(const struct hmoe_boot *boot, size_t bytes, int round)
{
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)boot->ranks + 1);
    int code;

    CHECK(mine && all);
    for (size_t i = 0; i < bytes; i++)
        mine[i] = gathered(boot->rank, i, round);
    code = boot->allgather(boot->allgather_context, mine, all, bytes);
    CHECK(code == 0);
    for (int r = 0; r < boot->ranks; r++)
        for (size_t i = 0; i < bytes; i++)
            CHECK(all[(size_t)r * bytes + i] == gathered(r, i, round));
    free(mine);
    free(all);
    return 0;
}

static int gathers(const struct hmoe_boot *boot, void *argument)
{
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 100, 3 * 4096, 0, 1000003};
    int line = 0;

    (void)argument;
    for (int round = 0; round < 500 && line == 0; round++)
        line = gather_once(boot, round < 9 ? sizes[round] : (size_t)round % 200, round);
    return line;
}

static void allgather_gathers(void **state)
{
    (void)state;
    for (int v = 0; v < 2; v++)
        for (int ranks = 1; ranks <= 5; ranks++)
            assert_string_equal(launch(both[v], ranks, gathers, NULL).text, "");
}

/* The last rank brings more than one chunk, the others 8 bytes. All are told; the next gather works. */
static int gathers_unequally(const struct hmoe_boot *boot, void *argument)
{
    char mine[10000] = {0}, *all = malloc(sizeof mine * (size_t)boot->ranks);
    size_t bytes = boot->rank == boot->ranks - 1 ? sizeof mine : 8;

    (void)argument;
    CHECK(all);
    CHECK(boot->allgather(boot->allgather_context, mine, all, bytes) == HMOE_ERR_MISMATCH);
    free(all);
    return gather_once(boot, 5000, 1);
}

/* Rank 0 returns at once; those who still gather learn that it will not come. */
static int gathers_alone(const struct hmoe_boot *boot, void *argument)
{
    char mine = 0, all[3];

    (void)argument;
    if (boot->rank > 0)
        CHECK(boot->allgather(boot->allgather_context, &mine, all, 1) == HMOE_ERR_PEER);
    return 0;
}

/* Ending right after a gather must not spoil it for those who have not woken yet. */
static int gathers_and_ends(const struct hmoe_boot *boot, void *argument)
{
    (void)argument;
    return gather_once(boot, 16, 0);
}

static void allgather_fails_cleanly(void **state)
{
    (void)state;
    for (int v = 0; v < 2; v++) {
        assert_string_equal(launch(both[v], 4, gathers_unequally, NULL).text, "");
        assert_string_equal(launch(both[v], 3, gathers_alone, NULL).text, "");
        for (int i = 0; i < 200 / COMM_SHARE; i++)
            assert_string_equal(launch(both[v], 4, gathers_and_ends, NULL).text, "");
    }
}

/* ------------------------------------------------------------------- leaks */

static long mapped_pages(void)
{
    FILE *file = fopen("/proc/self/statm", "re");
    long pages = 0;

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld", &pages), 1);
    fclose(file);
    return pages;
}

static void a_hundred_launches_leave_nothing(void **state)
{
    int files = 0, ranks = 4;
    long pages = 0;

    (void)state;
    for (int i = 0; i < 110; i++) {
        if (i == 10) { /* thread stacks are cached by now */
            files = entries("/proc/self/fd");
            pages = mapped_pages();
        }
        assert_int_equal(launch(both[i % 2], ranks, sees_its_rank, &ranks).status, HMOE_OK);
    }
    assert_int_equal(entries("/proc/self/fd"), files);
    assert_true(mapped_pages() - pages < 16); /* one launch maps more: 4 ranks have 8 slots of 4 KB */
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
}

/* -------------------------------------------------------- what a launch inherits */

static int prints(const struct hmoe_boot *boot, void *argument)
{
    fprintf(argument, "rank %d\n", boot->rank);
    return 0;
}

/* Text that waits in a buffer when children are forked is written once, and theirs too. */
static void output_appears_once(void **state)
{
    FILE *file = tmpfile();
    char text[100] = {0};

    (void)state;
    assert_non_null(file);
    fprintf(file, "before\n");
    assert_int_equal(launch(HMOE_VIA_PROCESSES, 1, prints, file).status, HMOE_OK);
    rewind(file);
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    assert_string_equal(text, "before\nrank 0\n");
    fclose(file);
}

static void ignored_sigchld(void **state)
{
    int three = 3, ranks = 2, signal_number = SIGKILL;

    (void)state;
    signal(SIGCHLD, SIG_IGN);
    assert_int_equal(launch(HMOE_VIA_PROCESSES, 2, sees_its_rank, &ranks).status, HMOE_OK);
    assert_string_equal(launch(HMOE_VIA_PROCESSES, 2, one_returns, &three).text, "rank 1 returned 3");
    assert_int_equal(launch(HMOE_VIA_PROCESSES, 3, dies_first, &signal_number).status, HMOE_ERR_PEER);
    signal(SIGCHLD, SIG_DFL);
}

static int waits_for_ever(const struct hmoe_boot *boot, void *argument)
{
    char byte = (char)boot->rank;

    if (write(*(int *)argument, &byte, 1) == 1)
        for (;;)
            pause();
    return 1;
}

/* The ranks hold the pipe's other end: it is closed when all of them are gone. */
static void children_die_with_the_launcher(void **state)
{
    int ends[2];
    char bytes[4];
    pid_t launcher;

    (void)state;
    assert_int_equal(pipe(ends), 0);
    launcher = fork();
    if (launcher == 0) {
        struct base_error error;
        close(ends[0]);
        comm_launch(HMOE_VIA_PROCESSES, 2, waits_for_ever, &ends[1], &error);
        _exit(0);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], bytes, 1), 1);
    assert_int_equal(read(ends[0], bytes, 1), 1);
    assert_int_equal(kill(launcher, SIGKILL), 0);
    assert_int_equal(waitpid(launcher, NULL, 0), launcher);
    assert_int_equal(poll(&(struct pollfd){.fd = ends[0], .events = POLLIN}, 1, 10000), 1);
    assert_int_equal(read(ends[0], bytes, 1), 0);
    close(ends[0]);
}

/* ------------------------------------------------- the choice of a transport */

/* What a rank asks for, and what must come of it. */
struct choice {
    const char *wanted, *last_wants; /* of all, and of the last rank */
    enum hmoe_status status;
    const char *answer; /* the transport's name, or a part of the error */
};

static int open_as(const struct hmoe_boot *boot, const struct choice *choice, hmoe_allgather_fn allgather,
                   void *context)
{
    struct comm_boot comm_boot = {.rank = boot->rank, .ranks = boot->ranks, .allgather = allgather,
                                  .context = context};
    const char *wanted = boot->rank == boot->ranks - 1 ? choice->last_wants : choice->wanted;
    struct base_error error = {.status = HMOE_OK};
    struct comm comm;

    CHECK(comm_open(&comm, &comm_boot, wanted, &error) == choice->status);
    if (choice->status == HMOE_OK) {
        CHECK(strcmp(comm.transport->name, choice->answer) == 0);
        comm_close(&comm);
    } else if (!strstr(error.text, choice->answer)) {
        fprintf(stderr, "not \"%s\" but \"%s\"\n", choice->answer, error.text);
        return __LINE__;
    }
    return 0;
}

static int chooses(const struct hmoe_boot *boot, void *argument)
{
    return open_as(boot, argument, boot->allgather, boot->allgather_context);
}

static void choose(enum hmoe_via via, int ranks, struct choice choice)
{
    assert_string_equal(launch(via, ranks, chooses, &choice).text, "");
}

static void a_transport_is_chosen(void **state)
{
    (void)state;
    choose(HMOE_VIA_THREADS, 3, (struct choice){"auto", "auto", HMOE_OK, "threads"});
    choose(HMOE_VIA_THREADS, 3, (struct choice){"threads", "threads", HMOE_OK, "threads"});
    choose(HMOE_VIA_THREADS, 3, (struct choice){"shm", "shm", HMOE_OK, "shm"});
    choose(HMOE_VIA_PROCESSES, 1, (struct choice){"auto", "auto", HMOE_OK, "threads"});
    choose(HMOE_VIA_PROCESSES, 3, (struct choice){"auto", "auto", HMOE_OK, "shm"});
    choose(HMOE_VIA_PROCESSES, 3, (struct choice){"shm", "shm", HMOE_OK, "shm"});
    choose(HMOE_VIA_PROCESSES, 3, (struct choice){"threads", "threads", HMOE_ERR_UNSUPPORTED,
                                                  "all ranks in one process"});
    choose(HMOE_VIA_PROCESSES, 3, (struct choice){"shm", "auto", HMOE_ERR_MISMATCH,
                                                  "rank 0 asks for transport \"shm\", rank 2 for \"auto\""});
    choose(HMOE_VIA_THREADS, 2, (struct choice){"pigeon", "pigeon", HMOE_ERR_ARGUMENT, "\"pigeon\": choose auto"});
}

/* A gather that makes the last rank seem to be somewhere else: it changes `find` in what that rank has sent. */
struct disguise {
    const struct hmoe_boot *boot;
    char find[64];
    struct choice choice;
};

static int gather_disguised(void *context, const void *mine, void *all, size_t bytes)
{
    const struct disguise *disguise = context;
    int code = disguise->boot->allgather(disguise->boot->allgather_context, mine, all, bytes);
    char *last = (char *)all + bytes * (size_t)(disguise->boot->ranks - 1);
    char *found = memmem(last, bytes, disguise->find, strlen(disguise->find));

    if (found)
        *found = '?';
    return code;
}

static int opens_disguised(const struct hmoe_boot *boot, void *argument)
{
    struct disguise disguise = *(struct disguise *)argument;

    disguise.boot = boot;
    return open_as(boot, &disguise.choice, gather_disguised, &disguise);
}

static void strangers_are_refused(void **state)
{
    struct disguise other_host = {.choice = {"auto", "auto", HMOE_ERR_UNSUPPORTED, "hosts differ"}};
    struct disguise other_version = {.find = HMOE_VERSION,
                                     .choice = {"auto", "auto", HMOE_ERR_MISMATCH, "version " HMOE_VERSION}};
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");

    (void)state;
    assert_non_null(file);
    assert_int_equal(fread(other_host.find, 1, 36, file), 36);
    fclose(file);
    for (int v = 0; v < 2; v++) {
        assert_string_equal(launch(both[v], 3, opens_disguised, &other_host).text, "");
        assert_string_equal(launch(both[v], 3, opens_disguised, &other_version).text, "");
    }
}

/* The n-th gather fails on every rank: open says so, and leaves nothing. */
struct breakdown {
    const struct hmoe_boot *boot;
    int left;
};

static int gather_until_broken(void *context, const void *mine, void *all, size_t bytes)
{
    struct breakdown *breakdown = context;

    if (breakdown->left-- == 0)
        return 77;
    return breakdown->boot->allgather(breakdown->boot->allgather_context, mine, all, bytes);
}

static int opens_broken(const struct hmoe_boot *boot, void *argument)
{
    struct breakdown breakdown = {.boot = boot, .left = *(int *)argument};
    struct choice choice = {"shm", "shm", HMOE_ERR_SYSTEM, "code 77"};
    int files = entries("/proc/self/fd"), line;

    line = open_as(boot, &choice, gather_until_broken, &breakdown);
    CHECK(entries("/proc/self/fd") == files);
    return line;
}

static void a_broken_gather_is_told(void **state)
{
    (void)state;
    for (int good = 0; good < 7; good++)
        assert_string_equal(launch(HMOE_VIA_PROCESSES, 2, opens_broken, &good).text, "");
}

static int opens_out_of_range(const struct hmoe_boot *boot, void *argument)
{
    static const int ranks[][2] = {{0, 0}, {0, 1025}, {-1, 2}, {2, 2}};
    struct base_error error;
    struct comm comm;

    (void)argument;
    for (int i = 0; i < 4; i++) {
        struct comm_boot bad = {.rank = ranks[i][0], .ranks = ranks[i][1], .allgather = boot->allgather,
                                .context = boot->allgather_context};
        CHECK(comm_open(&comm, &bad, "auto", &error) == HMOE_ERR_ARGUMENT);
    }
    return 0;
}

static void ranks_are_checked(void **state)
{
    (void)state;
    assert_string_equal(launch(HMOE_VIA_THREADS, 1, opens_out_of_range, NULL).text, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_return_zero),
        cmocka_unit_test(a_returned_value_is_told),
        cmocka_unit_test(the_first_cause_is_told),
        cmocka_unit_test(an_exit_is_no_return),
        cmocka_unit_test(children_inherit_nothing_new),
        cmocka_unit_test(all_or_none_run),
        cmocka_unit_test(arguments_are_checked),
        cmocka_unit_test(allgather_gathers),
        cmocka_unit_test(allgather_fails_cleanly),
        cmocka_unit_test(a_hundred_launches_leave_nothing),
        cmocka_unit_test(output_appears_once),
        cmocka_unit_test(ignored_sigchld),
        cmocka_unit_test(children_die_with_the_launcher),
        cmocka_unit_test(a_transport_is_chosen),
        cmocka_unit_test(strangers_are_refused),
        cmocka_unit_test(a_broken_gather_is_told),
        cmocka_unit_test(ranks_are_checked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
