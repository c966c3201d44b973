/* The transport's seam: windows and put-with-signal.
 *
 * A window is memory that every rank of the group has one of, of the same size and layout. Its counters only go up.
 * put copies a payload into a peer's window; signal adds to a counter there, and no rank ever sees the counter before
 * the payloads that the same thread put before it. There is no order between signals; consumers count.
 * A consumer reads its own counters with an acquire load (comm_counter), which pairs with signal's release add.
 *
 * Inside a host a peer's window is mapped: peer() is its address, and puts may be plain stores followed by signal.
 * Every group also has a control block per rank in shared memory: the doorbell its workers sleep on, and the
 * group's first failure.
 */
#ifndef COMM_H
#define COMM_H

#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>

#define COMM_LINE 64

enum { COMM_RANKS_MAX = 1024 };

struct comm;

struct comm_window {
    struct comm *comm;
    size_t bytes;
    char **base; /* [ranks] where each rank's window is mapped here */
    void *own;   /* the transport's own data */
};

/* A transport. No entry is NULL. */
struct comm_transport {
    const char *name; /* "threads" (R = 1 too), "shm" */
    /* Control blocks and whatever the transport needs. Collective. */
    enum hmoe_status (*open)(struct comm *comm, struct base_error *error);
    void (*close)(struct comm *comm);
    /* A window on every rank, zero filled, allocated in full. Collective; fails on every rank alike. */
    enum hmoe_status (*window_create)(struct comm *comm, size_t bytes, struct comm_window *window,
                                      struct base_error *error);
    void (*window_destroy)(struct comm_window *window);
    void (*put)(struct comm_window *window, int rank, size_t offset, const void *data, size_t bytes);
    void (*signal)(struct comm_window *window, int rank, size_t counter_offset, uint64_t add);
    /* Can ranks read each other's ordinary memory (same process)? */
    bool same_memory;
    /* Looks for dead peers; records the first failure (comm_fail). Cheap; called by idle workers. */
    void (*watch)(struct comm *comm);
};

extern const struct comm_transport comm_threads, comm_shm;

/* In shared memory, one per rank. */
struct comm_control {
    _Alignas(COMM_LINE) _Atomic uint32_t bell; /* goes up when there may be news; odd: somebody listens; a futex */
    _Atomic uint32_t waiters;                  /* threads asleep on it, or about to be */
    _Alignas(COMM_LINE) _Atomic uint32_t departed; /* the rank closed its group in order */
    int32_t pid;
};

/* In shared memory, one per group: the first failure wins, and stays. */
struct comm_failure {
    _Atomic uint32_t state; /* 0 none, 1 being written, 2 readable */
    int32_t rank;           /* who caused it */
    uint32_t status;
    char text[HMOE_ERROR_BYTES];
};

struct comm_boot {
    int rank, ranks;
    hmoe_allgather_fn allgather; /* never NULL: for one rank it copies */
    void *context;
};

struct comm {
    const struct comm_transport *transport;
    struct comm_boot boot;
    struct comm_control **control; /* [ranks] */
    struct comm_failure *failure;
    int64_t spin_ns;   /* before sleeping; 0 where threads outnumber CPUs. comm_open knows one thread per rank */
    int64_t close_limit_ns; /* how long comm_close waits for the others; comm_open sets 100 s */
    void *scratch;     /* [ranks] records of COMM_SCRATCH_BYTES, for what collective calls gather */
    void *own;         /* the transport's own data */
};

enum { COMM_SCRATCH_BYTES = 256 };

/* transport: "auto", "threads" or "shm". Chooses alike on every rank, or fails on every rank, and then leaves nothing
 * to close. Collective. */
enum hmoe_status comm_open(struct comm *comm, const struct comm_boot *boot, const char *transport,
                           struct base_error *error);
/* With every window destroyed. Collective: returns when every rank has departed, or the group has failed. */
void comm_close(struct comm *comm);

/* Gathers, and turns a failed gather into an error that says so. Gathers nothing once the group has failed. */
enum hmoe_status comm_allgather(struct comm *comm, const void *mine, void *all, size_t bytes,
                                struct base_error *error);
/* Every rank gives its own status and text in *error; all get the error of the lowest rank that has one. Collective. */
enum hmoe_status comm_agree(struct comm *comm, struct base_error *error);

/* The doorbell of a rank, for its workers. To wait without ever missing news:
 *     seen = comm_bell(comm);  look for news;  if there is none: comm_sleep(comm, seen, limit_ns);  again
 * ring: after news was stored, by anybody, in any order of memory. bell: any ring that comes later changes it. sleep:
 * returns when the bell differs from `seen`, at the latest after limit_ns or COMM_SLEEP_MOST_NS; false when that time
 * passed; may return early. It spins comm->spin_ns first. */
#define COMM_SLEEP_MOST_NS 50000000
void comm_ring(struct comm *comm, int rank);
uint32_t comm_bell(const struct comm *comm);
bool comm_sleep(struct comm *comm, uint32_t seen, int64_t limit_ns);

/* Records the group's first failure and rings every bell. Later ones are dropped. */
void comm_fail(struct comm *comm, int cause_rank, enum hmoe_status status, const char *text);
/* HMOE_OK, or the recorded failure copied into *error. */
enum hmoe_status comm_failed(const struct comm *comm, struct base_error *error);

/* Has the rank closed its group? Then it will do nothing more, and all that it did is seen. */
static inline bool comm_departed(const struct comm *comm, int rank)
{
    return atomic_load_explicit(&comm->control[rank]->departed, memory_order_acquire); /* pairs with depart() */
}

static inline char *comm_peer(const struct comm_window *window, int rank)
{
    return window->base[rank];
}

/* My own counter, with everything that was put before it was raised. Pairs with signal's release. */
static inline uint64_t comm_counter(const struct comm_window *window, size_t offset)
{
    return atomic_load_explicit((_Atomic uint64_t *)(void *)(window->base[window->comm->boot.rank] + offset),
                                memory_order_acquire);
}

#endif
