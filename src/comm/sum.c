#include "comm/sum.h"

#include "base/clock.h"
#include "base/fpenv.h"
#include "base/num.h"

#include <stdlib.h>
#include <string.h>

/* A window: two counters, raised by every rank once per sum, my subtree, my slice of the sum. */
enum { AT_PARTS = 0, AT_SUMS = 64, AT_VECTORS = 128 };

struct comm_sum {
    struct comm *comm;
    struct comm_window window;
    int shards;
    int64_t count_max, limit_ns;
    uint64_t calls;
};

static float *part_of(const struct comm_sum *sum, int rank)
{
    return (float *)(void *)(comm_peer(&sum->window, rank) + AT_VECTORS);
}

static float *slice_of(const struct comm_sum *sum, int rank)
{
    return part_of(sum, rank) + sum->count_max;
}

static enum hmoe_status check(const struct comm *comm, int shards, struct base_error *error)
{
    int ranks = comm->boot.ranks;

    if (shards < 1 || (shards & (shards - 1)) || (ranks & (ranks - 1)) || shards % ranks)
        return base_fail(error, HMOE_ERR_ARGUMENT, "shards is %d: a power of two that the %d ranks divide is allowed",
                         shards, ranks);
    return HMOE_OK;
}

enum hmoe_status comm_sum_create(struct comm_sum **made, struct comm *comm, int shards, int64_t count_max,
                                 int64_t limit_ns, struct base_error *error)
{
    struct comm_sum *sum = calloc(1, sizeof *sum);

    if (!sum)
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a sum");
    else
        check(comm, shards, error);
    if (comm_agree(comm, error) == HMOE_OK) {
        *sum = (struct comm_sum){.comm = comm, .shards = shards, .count_max = count_max, .limit_ns = limit_ns};
        comm->transport->window_create(comm, AT_VECTORS + 2 * (size_t)count_max * sizeof(float), &sum->window, error);
    }
    if (error->status != HMOE_OK) {
        free(sum);
        return error->status;
    }
    *made = sum;
    return HMOE_OK;
}

void comm_sum_destroy(struct comm_sum *sum)
{
    struct base_error ignored = {.status = HMOE_OK};

    comm_agree(sum->comm, &ignored); /* nobody reads my window any more */
    sum->comm->transport->window_destroy(&sum->window);
    free(sum);
}

/* ---- adding: vector[0] += the tree over all of them */

static void add(float *to, const float *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = to[i] + from[i];
}

static void add_tree(float *const *vector, int vectors, int64_t count)
{
    for (int step = 1; step < vectors; step *= 2)
        for (int i = 0; i + step < vectors; i += 2 * step)
            add(vector[i], vector[i + step], count);
}

/* The tree over the ranks' subtrees for some elements, by recursion: nobody's subtree may be overwritten. */
static float tree_at(const struct comm_sum *sum, int first, int ranks, int64_t i)
{
    if (ranks == 1)
        return part_of(sum, first)[i];
    return tree_at(sum, first, ranks / 2, i) + tree_at(sum, first + ranks / 2, ranks / 2, i);
}

/* ---- between ranks */

static void tell_all(struct comm_sum *sum, size_t counter)
{
    struct comm *comm = sum->comm;

    for (int r = 0; r < comm->boot.ranks; r++)
        comm->transport->signal(&sum->window, (comm->boot.rank + r) % comm->boot.ranks, counter, 1);
}

static enum hmoe_status time_out(struct comm_sum *sum, struct base_error *error)
{
    struct comm *comm = sum->comm;

    base_fail(error, HMOE_ERR_TIMEOUT, "rank %d waited %lld ms in sum %llu for the other ranks", comm->boot.rank,
              (long long)(sum->limit_ns / 1000000), (unsigned long long)sum->calls);
    comm_fail(comm, comm->boot.rank, error->status, error->text);
    return error->status;
}

static enum hmoe_status await_all(struct comm_sum *sum, size_t counter, struct base_error *error)
{
    struct comm *comm = sum->comm;
    uint64_t goal = sum->calls * (uint64_t)comm->boot.ranks;
    int64_t end_ns = base_now_ns() + sum->limit_ns;

    for (;;) {
        uint32_t seen = comm_bell(comm);
        if (comm_counter(&sum->window, counter) >= goal)
            return HMOE_OK;
        if (comm_failed(comm, error) != HMOE_OK)
            return error->status;
        if (base_now_ns() >= end_ns)
            return time_out(sum, error);
        if (!comm_sleep(comm, seen, end_ns - base_now_ns()))
            comm->transport->watch(comm);
    }
}

/* Elements [first, last) are this rank's slice. */
static void reduce(struct comm_sum *sum, int64_t first, int64_t last)
{
    struct comm *comm = sum->comm;
    float *slice = slice_of(sum, comm->boot.rank);

    for (int64_t i = first; i < last; i++)
        slice[i] = num_quiet(tree_at(sum, 0, comm->boot.ranks, i)); /* which NaN would depend on the order */
}

static int64_t share(int64_t count, int rank, int ranks)
{
    return count / ranks * rank + count % ranks * rank / ranks;
}

static enum hmoe_status exchange(struct comm_sum *sum, const float *mine, float *out, int64_t count,
                                 struct base_error *error)
{
    int rank = sum->comm->boot.rank, ranks = sum->comm->boot.ranks;

    sum->calls++;
    memcpy(part_of(sum, rank), mine, (size_t)count * sizeof *mine);
    tell_all(sum, AT_PARTS);
    if (await_all(sum, AT_PARTS, error) != HMOE_OK)
        return error->status;
    reduce(sum, share(count, rank, ranks), share(count, rank + 1, ranks));
    tell_all(sum, AT_SUMS);
    if (await_all(sum, AT_SUMS, error) != HMOE_OK)
        return error->status;
    for (int r = 0; r < ranks; r++) {
        int64_t first = share(count, r, ranks), last = share(count, r + 1, ranks);
        memcpy(out + first, slice_of(sum, r) + first, (size_t)(last - first) * sizeof *out);
    }
    return HMOE_OK;
}

enum hmoe_status comm_sum(struct comm_sum *sum, float *const *mine, float *out, int64_t count,
                          struct base_error *error)
{
    uint64_t before = base_fp_enter();

    add_tree(mine, sum->shards / sum->comm->boot.ranks, count);
    if (sum->comm->boot.ranks > 1)
        exchange(sum, mine[0], out, count, error);
    for (int64_t i = 0; i < count && sum->comm->boot.ranks == 1; i++)
        out[i] = num_quiet(mine[0][i]);
    base_fp_leave(before);
    return error->status;
}
