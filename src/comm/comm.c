#include "comm/inner.h"

#include "base/clock.h"
#include "base/topology.h"

#include <stdlib.h>
#include <string.h>

#define SPIN_NS 4000
#define CLOSE_LIMIT_NS 100000000000

_Static_assert(sizeof(struct base_error) <= COMM_SCRATCH_BYTES, "agree gathers errors into scratch");

enum hmoe_status comm_allgather(struct comm *comm, const void *mine, void *all, size_t bytes,
                                struct base_error *error)
{
    int code;

    if (comm->failure && comm_failed(comm, error) != HMOE_OK)
        return error->status;
    code = comm->boot.allgather(comm->boot.context, mine, all, bytes);
    if (code != 0)
        return base_fail(error, HMOE_ERR_SYSTEM, "rank %d: the allgather callback failed with code %d (%zu bytes)",
                         comm->boot.rank, code, bytes);
    return HMOE_OK;
}

/* The lowest rank whose status is not HMOE_OK, or -1. Needs no heap: it also says that there was no memory. */
static enum hmoe_status first_unhappy(struct comm *comm, enum hmoe_status status, int *rank, struct base_error *error)
{
    uint32_t mine = status, all[COMM_RANKS_MAX];

    if (comm_allgather(comm, &mine, all, sizeof mine, error) != HMOE_OK)
        return error->status;
    *rank = -1;
    for (int r = comm->boot.ranks - 1; r >= 0; r--)
        *rank = all[r] != HMOE_OK ? r : *rank;
    return HMOE_OK;
}

enum hmoe_status comm_agree(struct comm *comm, struct base_error *error)
{
    struct base_error mine = *error, *all = comm->scratch;
    int cause;

    if (first_unhappy(comm, mine.status, &cause, error) != HMOE_OK)
        return error->status;
    if (cause < 0)
        return HMOE_OK;
    if (comm_allgather(comm, &mine, all, sizeof mine, error) != HMOE_OK)
        return error->status;
    *error = all[cause];
    return error->status;
}

static void release(struct comm *comm)
{
    free(comm->control);
    free(comm->scratch);
    comm->control = NULL;
    comm->scratch = NULL;
}

/* The only step that can fail on one rank before there is a place to gather error texts into. */
static enum hmoe_status tables_create(struct comm *comm, struct base_error *error)
{
    size_t ranks = (size_t)comm->boot.ranks;
    int poor;

    comm->control = calloc(ranks, sizeof *comm->control);
    comm->scratch = calloc(ranks, COMM_SCRATCH_BYTES);
    if (first_unhappy(comm, comm->control && comm->scratch ? HMOE_OK : HMOE_ERR_MEMORY, &poor, error) != HMOE_OK)
        return error->status;
    if (poor >= 0)
        return base_fail(error, HMOE_ERR_MEMORY, "rank %d has no memory for a group of %d ranks", poor,
                         comm->boot.ranks);
    return HMOE_OK;
}

enum hmoe_status comm_open(struct comm *comm, const struct comm_boot *boot, const char *transport,
                           struct base_error *error)
{
    enum hmoe_status status;

    memset(comm, 0, sizeof *comm);
    comm->boot = *boot;
    if (boot->ranks < 1 || boot->ranks > COMM_RANKS_MAX || boot->rank < 0 || boot->rank >= boot->ranks)
        return base_fail(error, HMOE_ERR_ARGUMENT, "rank %d of %d: ranks must be 1..%d and rank below it", boot->rank,
                         boot->ranks, COMM_RANKS_MAX);
    comm->spin_ns = boot->ranks <= base_cpus() ? SPIN_NS : 0;
    comm->close_limit_ns = CLOSE_LIMIT_NS;
    status = tables_create(comm, error);
    if (status == HMOE_OK)
        status = comm_choose(comm, transport, error);
    if (status == HMOE_OK)
        status = comm->transport->open(comm, error);
    if (status != HMOE_OK)
        release(comm);
    return status;
}

/* The lowest rank that has not departed, or -1. */
static int still_here(const struct comm *comm)
{
    for (int r = 0; r < comm->boot.ranks; r++)
        if (!comm_departed(comm, r))
            return r;
    return -1;
}

static void depart(struct comm *comm)
{
    /* release: pairs with still_here(), and with whoever finds this process ended */
    atomic_store_explicit(&comm->control[comm->boot.rank]->departed, 1, memory_order_release);
    for (int r = 0; r < comm->boot.ranks; r++)
        comm_ring(comm, r);
}

static void await_departures(struct comm *comm)
{
    int64_t end_ns = base_now_ns() + comm->close_limit_ns;
    struct base_error error;

    for (;;) {
        uint32_t seen = comm_bell(comm);
        int rank = still_here(comm);
        if (rank < 0 || comm_failed(comm, &error) != HMOE_OK)
            return;
        if (base_now_ns() >= end_ns) {
            base_fail(&error, HMOE_ERR_TIMEOUT, "rank %d did not close the group within %lld ms", rank,
                      (long long)(comm->close_limit_ns / 1000000));
            comm_fail(comm, rank, error.status, error.text);
            return;
        }
        comm->transport->watch(comm);
        comm_sleep(comm, seen, end_ns - base_now_ns());
    }
}

void comm_close(struct comm *comm)
{
    depart(comm);
    await_departures(comm);
    comm->transport->close(comm);
    release(comm);
}
