/* Which transport a group gets: every rank tells who and where it is, so all decide alike. */
#include "comm/inner.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct comm_transport *const transports[] = {&comm_threads, &comm_shm};
enum { TRANSPORTS = sizeof transports / sizeof *transports };

struct identity {
    char version[16];
    char wanted[16];
    char host[64];
    char boot[40];       /* differs between hosts, whatever they are called */
    uint64_t pid_space;  /* a pid means something only inside it */
    int64_t pid;
    int32_t rank;
};

_Static_assert(sizeof(struct identity) <= COMM_SCRATCH_BYTES, "choose gathers identities into scratch");

/* Stays empty where it cannot be read: the host's name then decides. */
static void read_boot_id(char *text, size_t size)
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t count = fd >= 0 ? read(fd, text, size - 1) : 0;

    text[count > 0 ? count : 0] = 0;
    text[strcspn(text, "\n")] = 0;
    if (fd >= 0)
        close(fd);
}

static void identify(struct identity *me, int rank, const char *wanted)
{
    struct stat space;

    memset(me, 0, sizeof *me);
    snprintf(me->version, sizeof me->version, "%s", HMOE_VERSION);
    snprintf(me->wanted, sizeof me->wanted, "%s", wanted);
    gethostname(me->host, sizeof me->host - 1);
    read_boot_id(me->boot, sizeof me->boot);
    me->pid_space = stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
    me->pid = getpid();
    me->rank = rank;
}

static bool same_host(const struct identity *a, const struct identity *b)
{
    return a->boot[0] && b->boot[0] ? strcmp(a->boot, b->boot) == 0 : strcmp(a->host, b->host) == 0;
}

/* The one gathered as rank r against rank 0. */
static enum hmoe_status compare(const struct identity *all, int r, struct base_error *error)
{
    const struct identity *a = &all[0], *b = &all[r];

    if (b->rank != r)
        return base_fail(error, HMOE_ERR_MISMATCH, "rank is %d where allgather has rank %d: each rank must be there"
                         " once, in order", b->rank, r);
    if (strcmp(a->version, b->version) != 0)
        return base_fail(error, HMOE_ERR_MISMATCH, "rank 0 has version %s of the library, rank %d has %s", a->version,
                         r, b->version);
    if (strcmp(a->wanted, b->wanted) != 0)
        return base_fail(error, HMOE_ERR_MISMATCH, "rank 0 asks for transport \"%s\", rank %d for \"%s\"", a->wanted,
                         r, b->wanted);
    if (!same_host(a, b))
        return base_fail(error, HMOE_ERR_UNSUPPORTED,
                         "hosts differ (rank 0 on %.60s, rank %d on %.60s): supported are ranks of one process or of "
                         "one host", a->host, r, b->host);
    if (a->pid_space != b->pid_space)
        return base_fail(error, HMOE_ERR_UNSUPPORTED,
                         "ranks 0 and %d are in different pid namespaces (containers) of host %.60s", r, a->host);
    return HMOE_OK;
}

/* The first rank that is not in rank 0's process, or -1. */
static int first_elsewhere(const struct identity *all, int ranks)
{
    for (int r = 0; r < ranks; r++)
        if (all[r].pid != all[0].pid)
            return r;
    return -1;
}

static const struct comm_transport *find(const char *name)
{
    for (int i = 0; i < TRANSPORTS; i++)
        if (strcmp(transports[i]->name, name) == 0)
            return transports[i];
    return NULL;
}

enum hmoe_status comm_choose(struct comm *comm, const char *wanted, struct base_error *error)
{
    struct identity me, *all = comm->scratch;
    int ranks = comm->boot.ranks, elsewhere;

    identify(&me, comm->boot.rank, wanted);
    if (comm_allgather(comm, &me, all, sizeof me, error) != HMOE_OK)
        return error->status;
    for (int r = 0; r < ranks; r++)
        if (compare(all, r, error) != HMOE_OK)
            return error->status;
    elsewhere = first_elsewhere(all, ranks);
    comm->transport = strcmp(wanted, "auto") != 0 ? find(wanted) : elsewhere < 0 ? &comm_threads : &comm_shm;
    if (!comm->transport)
        return base_fail(error, HMOE_ERR_ARGUMENT, "transport \"%.60s\": choose auto, threads or shm", wanted);
    if (comm->transport->same_memory && elsewhere >= 0)
        return base_fail(error, HMOE_ERR_UNSUPPORTED,
                         "transport \"%s\" needs all ranks in one process; rank 0 is process %lld, rank %d is %lld",
                         wanted, (long long)all[0].pid, elsewhere, (long long)all[elsewhere].pid);
    return HMOE_OK;
}
