#include "comm/inner.h"

#include "base/topology.h"

#include <string.h>
#include <unistd.h>

void comm_bind(struct comm *comm, int rank, char *block)
{
    struct comm_block *at = (struct comm_block *)(void *)block;

    comm->control[rank] = &at->control;
    if (rank == 0)
        comm->failure = &at->failure;
    if (rank == comm->boot.rank)
        at->control.pid = getpid();
}

struct wish {
    uint64_t bytes, available;
};

enum hmoe_status comm_window_check(struct comm *comm, size_t bytes, struct base_error *error)
{
    struct wish mine = {.bytes = bytes, .available = base_memory_available()}, *all = comm->scratch;
    uint64_t least = UINT64_MAX;
    int ranks = comm->boot.ranks;

    if (comm_allgather(comm, &mine, all, sizeof mine, error) != HMOE_OK)
        return error->status;
    for (int r = 0; r < ranks; r++) {
        if (all[r].bytes != all[0].bytes)
            return base_fail(error, HMOE_ERR_MISMATCH, "rank 0 wants a window of %llu bytes, rank %d of %llu",
                             (unsigned long long)all[0].bytes, r, (unsigned long long)all[r].bytes);
        least = all[r].available < least ? all[r].available : least;
    }
    if (bytes == 0)
        return base_fail(error, HMOE_ERR_ARGUMENT, "a window has at least one byte");
    if (bytes > least / (uint64_t)ranks)
        return base_fail(error, HMOE_ERR_MEMORY, "%d windows of %zu bytes do not fit: %llu bytes are available", ranks,
                         bytes, (unsigned long long)least);
    return HMOE_OK;
}

void comm_mapped_put(struct comm_window *window, int rank, size_t offset, const void *data, size_t bytes)
{
    if (bytes > 0)
        memcpy(window->base[rank] + offset, data, bytes);
}

void comm_mapped_signal(struct comm_window *window, int rank, size_t counter_offset, uint64_t add)
{
    _Atomic uint64_t *counter = (_Atomic uint64_t *)(void *)(window->base[rank] + counter_offset);

    atomic_fetch_add_explicit(counter, add, memory_order_release); /* pairs with comm_counter */
    comm_ring(window->comm, rank);
}
