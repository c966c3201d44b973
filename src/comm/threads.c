/* Ranks that are threads of one process, and the group of one rank. A rank's window is ordinary memory. */
#include "base/memory.h"
#include "comm/inner.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_BYTES ((size_t)2 << 20)

/* One rank's memory. Ranks let go of it in any order (after a failure some still use it); the last one frees. */
struct piece {
    _Atomic int users;
    char *memory;
    size_t bytes;
};

static int is_huge(size_t bytes)
{
    return bytes >= HUGE_BYTES;
}

/* In memory from now on, not at first touch. Kernels before 5.14 cannot: there it comes at first touch. */
static bool commit(char *memory, size_t bytes)
{
    size_t page = (size_t)getpagesize();

    return madvise(memory, (bytes + page - 1) / page * page, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
}

static struct piece *piece_create(size_t bytes, int users, struct base_error *error)
{
    struct piece *piece = malloc(sizeof *piece);
    char *memory = base_map(bytes, is_huge(bytes));

    if (!piece || !memory || !commit(memory, bytes)) {
        base_unmap(memory, bytes, is_huge(bytes));
        free(piece);
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a window of %zu bytes", bytes);
        return NULL;
    }
    atomic_init(&piece->users, users);
    piece->memory = memory;
    piece->bytes = bytes;
    return piece;
}

static void piece_destroy(struct piece *piece)
{
    base_unmap(piece->memory, piece->bytes, is_huge(piece->bytes));
    free(piece);
}

/* acq_rel: pairs with the other users' leave: who frees comes after everything they did. */
static void pieces_leave(struct piece **pieces, int ranks)
{
    for (int r = 0; r < ranks; r++)
        if (atomic_fetch_sub_explicit(&pieces[r]->users, 1, memory_order_acq_rel) == 1)
            piece_destroy(pieces[r]);
    free(pieces);
}

/* A piece of every rank; NULL on every rank alike when one cannot have it, or comes with an error. Pointers go round
 * only when all have agreed, so until then each rank frees its own. */
static struct piece **share(struct comm *comm, size_t bytes, struct base_error *error)
{
    struct piece **pieces = calloc((size_t)comm->boot.ranks, sizeof *pieces), *mine = NULL;

    if (!pieces)
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a table of %d ranks", comm->boot.ranks);
    if (error->status == HMOE_OK)
        mine = piece_create(bytes, comm->boot.ranks, error);
    if (comm_agree(comm, error) != HMOE_OK) {
        if (mine)
            piece_destroy(mine);
        free(pieces);
        return NULL;
    }
    if (comm_allgather(comm, &mine, pieces, sizeof mine, error) == HMOE_OK)
        return pieces;
    free(pieces); /* and not mine: others may have its address */
    return NULL;
}

static enum hmoe_status threads_open(struct comm *comm, struct base_error *error)
{
    struct piece **pieces;

    error->status = HMOE_OK;
    pieces = share(comm, sizeof(struct comm_block), error);
    if (!pieces)
        return error->status;
    for (int r = 0; r < comm->boot.ranks; r++)
        comm_bind(comm, r, pieces[r]->memory);
    comm->own = pieces;
    return HMOE_OK;
}

static void threads_close(struct comm *comm)
{
    pieces_leave(comm->own, comm->boot.ranks);
}

static enum hmoe_status threads_window_create(struct comm *comm, size_t bytes, struct comm_window *window,
                                              struct base_error *error)
{
    struct piece **pieces;
    char **base;

    if (comm_window_check(comm, bytes, error) != HMOE_OK)
        return error->status;
    base = calloc((size_t)comm->boot.ranks, sizeof *base);
    error->status = HMOE_OK;
    if (!base)
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a window's table");
    pieces = share(comm, bytes, error);
    if (!pieces) {
        free(base);
        return error->status;
    }
    for (int r = 0; r < comm->boot.ranks; r++)
        base[r] = pieces[r]->memory;
    *window = (struct comm_window){.comm = comm, .bytes = bytes, .base = base, .own = pieces};
    return HMOE_OK;
}

static void threads_window_destroy(struct comm_window *window)
{
    pieces_leave(window->own, window->comm->boot.ranks);
    free(window->base);
}

/* A thread does not die alone. */
static void threads_watch(struct comm *comm)
{
    (void)comm;
}

const struct comm_transport comm_threads = {
    .name = "threads",
    .open = threads_open,
    .close = threads_close,
    .window_create = threads_window_create,
    .window_destroy = threads_window_destroy,
    .put = comm_mapped_put,
    .signal = comm_mapped_signal,
    .same_memory = true,
    .watch = threads_watch,
};
