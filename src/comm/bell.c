/* The doorbell and the group's first failure: what ranks tell each other through control blocks. */
#include "comm/comm.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "comm/futex.h"

#include <stdio.h>

#define LISTENING 1u /* the bell's lowest bit */
#define RECORDING_MOST_NS 10000000

/* Thread sanitizer does not follow fences; here they only decide who sees what in time, data is passed by acquire
 * loads of the news itself. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wtsan"
#endif
static void fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

/* Why no news is lost. A listener makes the bell odd, fences, looks for news. A ringer has stored news, fences, reads
 * the bell. Of two fences one is first: either the listener sees the news, or the ringer sees the odd bell and adds to
 * it, so it differs from what the listener has seen. With nobody listening a ring is one load. */
uint32_t comm_bell(const struct comm *comm)
{
    _Atomic uint32_t *bell = &comm->control[comm->boot.rank]->bell;
    uint32_t seen = atomic_load_explicit(bell, memory_order_acquire); /* pairs with comm_ring's add */

    if (!(seen & LISTENING))
        seen = atomic_fetch_or_explicit(bell, LISTENING, memory_order_acq_rel) | LISTENING;
    fence(); /* with comm_ring's */
    return seen;
}

/* The sleeper adds to waiters, then the kernel compares the bell; the ringer adds to the bell, then reads waiters. All
 * are seq_cst: either the ringer sees the sleeper and wakes it, or the kernel sees the new bell and does not sleep. */
void comm_ring(struct comm *comm, int rank)
{
    struct comm_control *control = comm->control[rank];

    fence(); /* with comm_bell's */
    if (!(atomic_load_explicit(&control->bell, memory_order_relaxed) & LISTENING))
        return;
    atomic_fetch_add(&control->bell, 1);
    if (atomic_load(&control->waiters) > 0)
        comm_futex_wake_all(&control->bell);
}

/* Pairs with comm_ring's add. */
static bool rung(struct comm_control *control, uint32_t seen)
{
    return atomic_load_explicit(&control->bell, memory_order_acquire) != seen;
}

static bool spin(struct comm_control *control, uint32_t seen, int64_t limit_ns)
{
    int64_t end_ns = base_now_ns() + limit_ns;

    while (!rung(control, seen)) {
        if (base_now_ns() >= end_ns)
            return false;
        base_cpu_relax();
    }
    return true;
}

bool comm_sleep(struct comm *comm, uint32_t seen, int64_t limit_ns)
{
    struct comm_control *control = comm->control[comm->boot.rank];
    int64_t spin_ns = comm->spin_ns < limit_ns ? comm->spin_ns : limit_ns, left_ns = limit_ns - spin_ns;
    bool woken;

    if (rung(control, seen) || (spin_ns > 0 && spin(control, seen, spin_ns)))
        return true;
    if (left_ns <= 0)
        return false;
    atomic_fetch_add(&control->waiters, 1); /* see comm_ring */
    woken = comm_futex_wait(&control->bell, seen, left_ns < COMM_SLEEP_MOST_NS ? left_ns : COMM_SLEEP_MOST_NS);
    atomic_fetch_sub_explicit(&control->waiters, 1, memory_order_relaxed);
    return woken;
}

void comm_fail(struct comm *comm, int cause_rank, enum hmoe_status status, const char *text)
{
    struct comm_failure *failure = comm->failure;
    uint32_t none = 0;

    if (!atomic_compare_exchange_strong_explicit(&failure->state, &none, 1, memory_order_relaxed,
                                                 memory_order_relaxed))
        return;
    failure->rank = cause_rank;
    failure->status = status;
    snprintf(failure->text, sizeof failure->text, "%s", text);
    atomic_store_explicit(&failure->state, 2, memory_order_release); /* pairs with recorded() */
    for (int r = 0; r < comm->boot.ranks; r++)
        comm_ring(comm, r);
}

/* A rank can be killed while it records: then the record stays in state 1 for ever. */
static bool recorded(struct comm_failure *failure)
{
    int64_t end_ns = base_now_ns() + RECORDING_MOST_NS;

    while (atomic_load_explicit(&failure->state, memory_order_acquire) != 2) { /* pairs with comm_fail */
        if (base_now_ns() >= end_ns)
            return false;
        base_cpu_relax();
    }
    return true;
}

enum hmoe_status comm_failed(const struct comm *comm, struct base_error *error)
{
    if (atomic_load_explicit(&comm->failure->state, memory_order_relaxed) == 0)
        return HMOE_OK;
    if (!recorded(comm->failure))
        return base_fail(error, HMOE_ERR_PEER, "a rank died while it reported a failure");
    return base_fail(error, (enum hmoe_status)comm->failure->status, "%s", comm->failure->text);
}
