/* Ranks that are processes of one host. A rank's window is a memfd; peers open it through /proc/<pid>/fd/<fd>. It has
 * no name anywhere, so nothing is left behind however the processes end. */
#include "comm/inner.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct own {
    char **base; /* [ranks] struct comm_block */
    int epoll;   /* has every other rank's pidfd, each reported once */
    int pidfd[]; /* [ranks]; -1: none */
};

struct offer {
    int32_t pid, fd;
};

static void unmap(char **base, int ranks, size_t bytes)
{
    for (int r = 0; base && r < ranks; r++)
        if (base[r])
            munmap(base[r], bytes);
}

/* NULL on failure. */
static char *map(int fd, size_t bytes)
{
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED)
        return NULL;
    madvise(base, bytes, MADV_HUGEPAGE); /* only a wish */
    return base;
}

/* In full, now: a page that cannot be had later would be a SIGBUS. */
static int allocate(int fd, size_t bytes)
{
    int failed;

    do
        failed = fallocate(fd, 0, 0, (off_t)bytes);
    while (failed && errno == EINTR);
    return failed;
}

/* My memory: its file descriptor, mapped at *base; -1 on failure. */
static int create(size_t bytes, char **base, struct base_error *error)
{
    int fd = memfd_create("hmoe", MFD_CLOEXEC);

    if (fd < 0) {
        base_fail(error, HMOE_ERR_SYSTEM, "memfd_create: %s", strerror(errno));
        return -1;
    }
    if (allocate(fd, bytes) != 0 || !(*base = map(fd, bytes))) {
        base_fail(error, HMOE_ERR_MEMORY, "a shared window of %zu bytes: %s", bytes, strerror(errno));
        close(fd);
        return -1;
    }
    madvise(*base, bytes, MADV_POPULATE_WRITE); /* saves page faults later; kernels before 5.14 take them */
    return fd;
}

static void open_peer(int rank, const struct offer *offer, size_t bytes, char **base, struct base_error *error)
{
    char path[64];
    int fd;

    snprintf(path, sizeof path, "/proc/%d/fd/%d", offer->pid, offer->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0)
        *base = map(fd, bytes);
    if (!*base)
        base_fail(error, HMOE_ERR_SYSTEM, "cannot open the window of rank %d (process %d): %s", rank, offer->pid,
                  strerror(errno));
    if (fd >= 0)
        close(fd);
}

static void open_peers(struct comm *comm, size_t bytes, char **base, struct base_error *error)
{
    const struct offer *offers = comm->scratch;

    for (int r = 0; r < comm->boot.ranks && error->status == HMOE_OK; r++)
        if (r != comm->boot.rank)
            open_peer(r, &offers[r], bytes, &base[r], error);
}

/* Memory of every rank, mapped at base [ranks]. Fails on every rank alike when one cannot, or comes with an error.
 * The descriptor is closed when all have opened it, which the last agree says. */
static enum hmoe_status share(struct comm *comm, size_t bytes, char **base, struct base_error *error)
{
    struct offer mine = {.pid = getpid(), .fd = -1};
    enum hmoe_status status;

    if (error->status == HMOE_OK)
        mine.fd = create(bytes, &base[comm->boot.rank], error);
    status = comm_agree(comm, error);
    if (status == HMOE_OK)
        status = comm_allgather(comm, &mine, comm->scratch, sizeof mine, error);
    if (status == HMOE_OK) {
        open_peers(comm, bytes, base, error);
        status = comm_agree(comm, error);
    }
    if (mine.fd >= 0)
        close(mine.fd);
    if (status != HMOE_OK)
        unmap(base, comm->boot.ranks, bytes);
    return status;
}

static void watch_peer(struct own *own, int rank, int pid, struct base_error *error)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = (uint32_t)rank};

    own->pidfd[rank] = (int)syscall(SYS_pidfd_open, pid, 0);
    if (own->pidfd[rank] < 0 || epoll_ctl(own->epoll, EPOLL_CTL_ADD, own->pidfd[rank], &event) != 0)
        base_fail(error, HMOE_ERR_SYSTEM, "cannot watch rank %d (process %d): %s", rank, pid, strerror(errno));
}

static void watch_peers(struct comm *comm, struct own *own, struct base_error *error)
{
    own->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (own->epoll < 0)
        base_fail(error, HMOE_ERR_SYSTEM, "epoll_create1: %s", strerror(errno));
    for (int r = 0; r < comm->boot.ranks && error->status == HMOE_OK; r++)
        if (comm->control[r]->pid != getpid())
            watch_peer(own, r, comm->control[r]->pid, error);
}

static struct own *own_create(int ranks, struct base_error *error)
{
    struct own *own = malloc(sizeof *own + sizeof(int) * (size_t)ranks);
    char **base = calloc((size_t)ranks, sizeof *base);

    if (!own || !base) {
        free(own);
        free(base);
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a table of %d ranks", ranks);
        return NULL;
    }
    own->base = base;
    own->epoll = -1;
    for (int r = 0; r < ranks; r++)
        own->pidfd[r] = -1;
    return own;
}

static void own_destroy(struct own *own, int ranks)
{
    for (int r = 0; r < ranks; r++)
        if (own->pidfd[r] >= 0)
            close(own->pidfd[r]);
    if (own->epoll >= 0)
        close(own->epoll);
    free(own->base);
    free(own);
}

static void shm_close(struct comm *comm)
{
    struct own *own = comm->own;

    unmap(own->base, comm->boot.ranks, sizeof(struct comm_block));
    own_destroy(own, comm->boot.ranks);
    comm->failure = NULL;
}

/* Points comm at the control blocks. Each rank writes its pid there; the agree lets the others read it. */
static enum hmoe_status bind(struct comm *comm, struct own *own, struct base_error *error)
{
    for (int r = 0; r < comm->boot.ranks; r++)
        comm_bind(comm, r, own->base[r]);
    comm->own = own;
    return comm_agree(comm, error);
}

static enum hmoe_status shm_open_group(struct comm *comm, struct base_error *error)
{
    struct own *own;
    enum hmoe_status status;

    error->status = HMOE_OK;
    own = own_create(comm->boot.ranks, error);
    status = share(comm, sizeof(struct comm_block), own ? own->base : NULL, error);
    if (status != HMOE_OK) {
        if (own)
            own_destroy(own, comm->boot.ranks);
        return status;
    }
    status = bind(comm, own, error);
    if (status == HMOE_OK) {
        watch_peers(comm, own, error);
        status = comm_agree(comm, error);
    }
    if (status != HMOE_OK)
        shm_close(comm);
    return status;
}

static enum hmoe_status shm_window_create(struct comm *comm, size_t bytes, struct comm_window *window,
                                          struct base_error *error)
{
    char **base;
    enum hmoe_status status;

    if (comm_window_check(comm, bytes, error) != HMOE_OK)
        return error->status;
    base = calloc((size_t)comm->boot.ranks, sizeof *base);
    error->status = HMOE_OK;
    if (!base)
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a window's table");
    status = share(comm, bytes, base, error);
    if (status != HMOE_OK) {
        free(base);
        return status;
    }
    *window = (struct comm_window){.comm = comm, .bytes = bytes, .base = base, .own = NULL};
    return HMOE_OK;
}

static void shm_window_destroy(struct comm_window *window)
{
    unmap(window->base, window->comm->boot.ranks, window->bytes);
    free(window->base);
}

/* A process that ended: in order, or not? acquire: pairs with depart()'s release. */
static void bury(struct comm *comm, int rank)
{
    char text[64];

    if (comm_departed(comm, rank))
        return;
    snprintf(text, sizeof text, "rank %d died (process %d)", rank, comm->control[rank]->pid);
    comm_fail(comm, rank, HMOE_ERR_PEER, text);
}

static void shm_watch(struct comm *comm)
{
    struct own *own = comm->own;
    struct epoll_event events[16];
    int count = epoll_wait(own->epoll, events, 16, 0);

    for (int i = 0; i < count; i++)
        bury(comm, (int)events[i].data.u32);
}

const struct comm_transport comm_shm = {
    .name = "shm",
    .open = shm_open_group,
    .close = shm_close,
    .window_create = shm_window_create,
    .window_destroy = shm_window_destroy,
    .put = comm_mapped_put,
    .signal = comm_mapped_signal,
    .same_memory = false,
    .watch = shm_watch,
};
