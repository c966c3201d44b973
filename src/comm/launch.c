#include "comm/launch.h"

#include "comm/comm.h"
#include "comm/futex.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { CHUNK_BYTES = 4096 };

enum gate { SHUT = 0, OPEN = 1, CANCELLED = 2 };

struct slot {
    size_t bytes; /* of the whole gather */
    char data[CHUNK_BYTES];
};

struct rank {
    struct launch *launch;
    int rank;
    int turn;     /* which of its two slots the next chunk uses */
    int returned; /* its function did, with code, as the order-th one */
    int code;
    uint32_t order;
    int wait_status; /* of a process, once reaped, as the `reaped`-th one */
    int reaped;
};

/* In memory that forked children share; at the same address in all of them. */
struct launch {
    _Alignas(COMM_LINE) _Atomic uint32_t gate; /* enum gate; a futex */
    _Alignas(COMM_LINE) _Atomic uint32_t round; /* twice the meetings held, odd: a rank has ended; a futex */
    _Atomic uint32_t present;                   /* ranks that have come to the next meeting */
    _Atomic uint32_t ended;
    int ranks;
    hmoe_rank_fn fn;
    void *argument;
    size_t bytes;
    struct rank *rank;    /* [ranks] */
    struct slot *slot[2]; /* [ranks] each */
};

static void gate_set(struct launch *launch, enum gate gate)
{
    atomic_store_explicit(&launch->gate, gate, memory_order_release); /* pairs with gate_await */
    comm_futex_wake_all(&launch->gate);
}

/* No rank runs before all could be started. */
static enum gate gate_await(struct launch *launch)
{
    uint32_t gate;

    while ((gate = atomic_load_explicit(&launch->gate, memory_order_acquire)) == SHUT) /* pairs with gate_set */
        comm_futex_wait(&launch->gate, SHUT, -1);
    return (enum gate)gate;
}

/* From now on no meeting can be held: somebody is missing. */
static void no_more_meetings(struct launch *launch)
{
    atomic_fetch_or_explicit(&launch->round, 1, memory_order_release); /* pairs with meet */
    comm_futex_wake_all(&launch->round);
}

/* Returns when all ranks have come; false when one never will.
 * present: acq_rel, so the last to come has seen what all others wrote, and passes it on with the release of round. */
static bool meet(struct launch *launch)
{
    uint32_t round = atomic_load_explicit(&launch->round, memory_order_acquire), now;

    if (round & 1)
        return false;
    if (atomic_fetch_add_explicit(&launch->present, 1, memory_order_acq_rel) + 1 == (uint32_t)launch->ranks) {
        atomic_store_explicit(&launch->present, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&launch->round, 2, memory_order_release); /* pairs with the load below */
        comm_futex_wake_all(&launch->round);
        return true;
    }
    while ((now = atomic_load_explicit(&launch->round, memory_order_acquire)) == round)
        comm_futex_wait(&launch->round, round, -1);
    return (now & ~1u) != round;
}

/* One meeting per chunk: a slot is written again two chunks later, and the meeting between says that all have read. */
static int exchange(struct rank *me, const char *mine, char *all, size_t bytes, size_t stride)
{
    struct launch *launch = me->launch;
    struct slot *slot = launch->slot[me->turn];

    me->turn ^= 1;
    slot[me->rank].bytes = stride;
    if (bytes > 0)
        memcpy(slot[me->rank].data, mine, bytes);
    if (!meet(launch))
        return HMOE_ERR_PEER;
    for (int r = 0; r < launch->ranks; r++)
        if (slot[r].bytes != stride)
            return HMOE_ERR_MISMATCH;
    for (int r = 0; r < launch->ranks && bytes > 0; r++)
        memcpy(all + (size_t)r * stride, slot[r].data, bytes);
    return 0;
}

static int allgather(void *context, const void *mine, void *all, size_t bytes)
{
    size_t done = 0, part;
    int code;

    do {
        part = bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES;
        code = exchange(context, (const char *)mine + done, (char *)all + done, part, bytes);
        done += part;
    } while (code == 0 && done < bytes);
    return code;
}

static void run(struct rank *me)
{
    struct launch *launch = me->launch;
    struct hmoe_boot boot = {.rank = me->rank, .ranks = launch->ranks, .allgather = allgather,
                             .allgather_context = me};

    if (gate_await(launch) == CANCELLED)
        return;
    me->code = launch->fn(&boot, launch->argument);
    me->order = atomic_fetch_add_explicit(&launch->ended, 1, memory_order_relaxed);
    me->returned = 1;
    no_more_meetings(launch);
}

static void *thread_main(void *rank)
{
    run(rank);
    return NULL;
}

static enum hmoe_status run_threads(struct launch *launch, struct base_error *error)
{
    pthread_t *thread = calloc((size_t)launch->ranks, sizeof *thread);
    int started = 0, failed = 0;

    if (!thread)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for %d threads", launch->ranks);
    while (started < launch->ranks && !failed) {
        failed = pthread_create(&thread[started], NULL, thread_main, &launch->rank[started]);
        started += !failed;
    }
    gate_set(launch, failed ? CANCELLED : OPEN);
    for (int r = 0; r < started; r++)
        pthread_join(thread[r], NULL);
    free(thread);
    return failed ? base_fail(error, HMOE_ERR_SYSTEM, "cannot start thread %d of %d: %s", started, launch->ranks,
                              strerror(failed))
                  : HMOE_OK;
}

static _Noreturn void child(struct rank *me, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) /* it died before prctl */
        _exit(1);
    run(me);
    fflush(NULL);
    _exit(me->code > 0 && me->code < 256 ? me->code : me->code != 0);
}

/* Starts child r and watches it; children must not keep each other's pidfds. */
static bool start_child(struct launch *launch, int r, pid_t *pid, struct pollfd *watch)
{
    pid_t parent = getpid();

    pid[r] = fork();
    if (pid[r] == 0) {
        for (int i = 0; i < r; i++)
            close(watch[i].fd);
        child(&launch->rank[r], parent);
    }
    if (pid[r] < 0)
        return false;
    watch[r] = (struct pollfd){.fd = (int)syscall(SYS_pidfd_open, pid[r], 0), .events = POLLIN};
    return watch[r].fd >= 0;
}

/* A parent that ignores SIGCHLD has no status to wait for: then only `returned` tells. */
static void reap(struct rank *rank, pid_t pid, int order)
{
    rank->reaped = order;
    while (waitpid(pid, &rank->wait_status, 0) < 0 && errno == EINTR)
        ;
    no_more_meetings(rank->launch);
}

/* First those that died, then those that returned something, each in the order they did. */
static uint64_t severity(const struct rank *rank)
{
    if (!rank->returned || WIFSIGNALED(rank->wait_status))
        return (uint64_t)rank->reaped;
    return rank->code != 0 ? COMM_RANKS_MAX + (uint64_t)rank->order : UINT64_MAX;
}

/* A rank that is stopped (SIGSTOP) cannot end. It may rest as long as all is well; once another rank has failed nobody
 * waits for it any more. */
static void end_stopped(const struct launch *launch, const pid_t *pid, const struct pollfd *watch)
{
    bool failed = false;

    for (int r = 0; r < launch->ranks; r++)
        failed |= watch[r].fd < 0 && severity(&launch->rank[r]) != UINT64_MAX;
    for (int r = 0; r < launch->ranks && failed; r++) {
        siginfo_t info = {.si_pid = 0};
        if (watch[r].fd >= 0 && waitid(P_PID, (id_t)pid[r], &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 && info.si_pid)
            kill(pid[r], SIGKILL);
    }
}

static void reap_all(struct launch *launch, const pid_t *pid, struct pollfd *watch)
{
    for (int left = launch->ranks; left > 0;) {
        int news = poll(watch, (nfds_t)launch->ranks, 100);
        if (news == 0)
            end_stopped(launch, pid, watch);
        if (news <= 0)
            continue;
        for (int r = 0; r < launch->ranks; r++)
            if (watch[r].fd >= 0 && watch[r].revents) {
                reap(&launch->rank[r], pid[r], launch->ranks - left);
                close(watch[r].fd);
                watch[r].fd = -1;
                left--;
            }
    }
}

static enum hmoe_status fork_all(struct launch *launch, pid_t *pid, struct pollfd *watch, struct base_error *error)
{
    int started = 0;

    fflush(NULL); /* or each child prints what was pending */
    while (started < launch->ranks && start_child(launch, started, pid, watch))
        started++;
    if (started == launch->ranks) {
        gate_set(launch, OPEN);
        reap_all(launch, pid, watch);
        return HMOE_OK;
    }
    base_fail(error, HMOE_ERR_SYSTEM, "cannot start process %d of %d: %s", started, launch->ranks, strerror(errno));
    gate_set(launch, CANCELLED);
    for (int r = 0; r <= started; r++)
        if (pid[r] > 0)
            reap(&launch->rank[r], pid[r], r);
    for (int r = 0; r < started; r++)
        close(watch[r].fd);
    return error->status;
}

static enum hmoe_status run_processes(struct launch *launch, struct base_error *error)
{
    pid_t *pid = calloc((size_t)launch->ranks, sizeof *pid);
    struct pollfd *watch = calloc((size_t)launch->ranks, sizeof *watch);
    enum hmoe_status status;

    if (pid && watch)
        status = fork_all(launch, pid, watch, error);
    else
        status = base_fail(error, HMOE_ERR_MEMORY, "no memory for %d processes", launch->ranks);
    free(pid);
    free(watch);
    return status;
}

static enum hmoe_status verdict(const struct launch *launch, struct base_error *error)
{
    const struct rank *worst = &launch->rank[0];

    for (int r = 1; r < launch->ranks; r++)
        if (severity(&launch->rank[r]) < severity(worst))
            worst = &launch->rank[r];
    if (WIFSIGNALED(worst->wait_status))
        return base_fail(error, HMOE_ERR_PEER, "rank %d was killed by signal %d (%s)", worst->rank,
                         WTERMSIG(worst->wait_status), strsignal(WTERMSIG(worst->wait_status)));
    if (!worst->returned)
        return base_fail(error, HMOE_ERR_PEER, "rank %d ended before its function returned (exit status %d)",
                         worst->rank, WEXITSTATUS(worst->wait_status));
    if (worst->code != 0)
        return base_fail(error, HMOE_ERR_ABORTED, "rank %d returned %d", worst->rank, worst->code);
    return HMOE_OK;
}

static struct launch *launch_create(int ranks, hmoe_rank_fn fn, void *argument)
{
    size_t count = (size_t)ranks;
    size_t bytes = sizeof(struct launch) + count * (sizeof(struct rank) + 2 * sizeof(struct slot));
    struct launch *launch = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (launch == MAP_FAILED)
        return NULL;
    launch->ranks = ranks;
    launch->fn = fn;
    launch->argument = argument;
    launch->bytes = bytes;
    launch->rank = (struct rank *)(launch + 1);
    launch->slot[0] = (struct slot *)(launch->rank + count);
    launch->slot[1] = launch->slot[0] + count;
    for (int r = 0; r < ranks; r++)
        launch->rank[r] = (struct rank){.launch = launch, .rank = r};
    return launch;
}

enum hmoe_status comm_launch(enum hmoe_via via, int ranks, hmoe_rank_fn fn, void *argument, struct base_error *error)
{
    struct launch *launch;
    enum hmoe_status status;

    if (via != HMOE_VIA_THREADS && via != HMOE_VIA_PROCESSES)
        return base_fail(error, HMOE_ERR_ARGUMENT, "via is %d: threads is %d, processes %d", (int)via,
                         HMOE_VIA_THREADS, HMOE_VIA_PROCESSES);
    if (ranks < 1 || ranks > COMM_RANKS_MAX)
        return base_fail(error, HMOE_ERR_ARGUMENT, "ranks is %d: allowed are 1..%d", ranks, COMM_RANKS_MAX);
    if (!fn)
        return base_fail(error, HMOE_ERR_ARGUMENT, "fn is NULL: the function each rank runs");
    launch = launch_create(ranks, fn, argument);
    if (!launch)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory to launch %d ranks", ranks);
    status = via == HMOE_VIA_THREADS ? run_threads(launch, error) : run_processes(launch, error);
    if (status == HMOE_OK)
        status = verdict(launch, error);
    munmap(launch, launch->bytes);
    return status;
}
