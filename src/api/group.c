/* Groups: options checked, transport opened, workers started; the launcher. */
#include "api/objects.h"
#include "api/report.h"
#include "base/topology.h"
#include "comm/launch.h"
#include "kern/kern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PARENT_MARK 0x484d6f45u

/* ---- a page that tells a forked child from its parent */

static volatile uint32_t *mark_make(void)
{
    size_t bytes = (size_t)getpagesize();
    uint32_t *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED)
        return NULL;
    madvise(page, bytes, MADV_WIPEONFORK);
    *page = PARENT_MARK;
    return page;
}

static void mark_drop(volatile uint32_t *page)
{
    if (page)
        munmap((void *)page, (size_t)getpagesize());
}

enum hmoe_status api_check_group(const struct hmoe_group *group, struct base_error *error)
{
    if (!group)
        return base_fail(error, HMOE_ERR_ARGUMENT, "group is NULL");
    if (*group->parent != PARENT_MARK)
        return base_fail(error, HMOE_ERR_FORKED, "this process was forked from the one that made the group: make a"
                         " group of its own");
    return HMOE_OK;
}

/* ---- options */

static int copy_own(void *context, const void *mine, void *all, size_t bytes)
{
    (void)context;
    memcpy(all, mine, bytes);
    return 0;
}

static enum hmoe_status check_options(const struct hmoe_group_options *options, struct base_error *error)
{
    int ranks = options->ranks ? options->ranks : 1;

    if (api_check_size(options->size, sizeof *options, "hmoe_group_options", error) != HMOE_OK)
        return error->status;
    if (ranks < 1 || ranks > 1024)
        return base_fail(error, HMOE_ERR_ARGUMENT, "ranks is %d: 1 to 1024 are allowed", options->ranks);
    if (options->rank < 0 || options->rank >= ranks)
        return base_fail(error, HMOE_ERR_ARGUMENT, "rank is %d: 0 to %d are allowed", options->rank, ranks - 1);
    if (options->workers < 0 || options->workers > 1024)
        return base_fail(error, HMOE_ERR_ARGUMENT, "workers is %d: 0 (choose) to 1024 are allowed", options->workers);
    if (ranks > 1 && !options->allgather)
        return base_fail(error, HMOE_ERR_ARGUMENT, "allgather is NULL: %d ranks need one to find each other", ranks);
    return HMOE_OK;
}

static int choose_workers(const struct hmoe_group_options *options, int ranks)
{
    int workers = options->workers ? options->workers : base_cpus() / ranks;

    return workers < 1 ? 1 : workers;
}

/* ---- workers */

static void engines_begin(void)
{
    for (int i = 0; kern_engines[i]; i++)
        if (kern_engines[i]->present())
            kern_engines[i]->thread_begin();
}

static void engines_end(void)
{
    for (int i = 0; kern_engines[i]; i++)
        if (kern_engines[i]->present())
            kern_engines[i]->thread_end();
}

static enum hmoe_status start_workers(struct hmoe_group *group, int workers, struct base_error *error)
{
    int64_t vector = group->knobs.value[KNOB_VECTOR_WORKERS];
    struct rt_pool_options options = {.comm = &group->comm, .trace = &group->trace, .workers = workers,
                                      .vector_workers = vector < workers ? (int)vector : workers - 1,
                                      .thread_begin = engines_begin, .thread_end = engines_end};

    group->comm.spin_ns = workers * group->comm.boot.ranks <= base_cpus() ? group->knobs.value[KNOB_SPIN_NS] : 0;
    group->comm.close_limit_ns = group->knobs.value[KNOB_WAIT_LIMIT_MS] * 1000000;
    if (trace_init(&group->trace, group->comm.boot.rank, workers, group->knobs.value[KNOB_TRACE_EVENTS], error) !=
        HMOE_OK)
        return error->status;
    if (rt_pool_create(&group->pool, &options, error) != HMOE_OK)
        trace_fini(&group->trace);
    return error->status;
}

/* ---- create, destroy */

/* What every rank's build and configuration must share. */
static enum hmoe_status same_build(struct comm *comm, struct base_error *error)
{
    struct build {
        char version[32];
        uint64_t call_bytes, plan_bytes;
    } mine = {HMOE_VERSION, sizeof(struct hmoe_call), sizeof(struct hmoe_plan_options)}, *all;
    int ranks = comm->boot.ranks;

    all = calloc((size_t)ranks, sizeof *all);
    if (!all)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for %d ranks", ranks);
    if (comm_allgather(comm, &mine, all, sizeof mine, error) == HMOE_OK)
        for (int r = 1; r < ranks && error->status == HMOE_OK; r++)
            if (memcmp(&all[r], &all[0], sizeof *all) != 0)
                base_fail(error, HMOE_ERR_MISMATCH, "rank %d runs version %.31s of the library, rank 0 %.31s", r,
                          all[r].version, all[0].version);
    free(all);
    return error->status;
}

static enum hmoe_status open_comm(struct hmoe_group *group, const struct hmoe_group_options *options,
                                  struct base_error *error)
{
    struct comm_boot boot = {.rank = options->rank, .ranks = options->ranks ? options->ranks : 1,
                             .allgather = options->allgather ? options->allgather : copy_own,
                             .context = options->allgather_context};
    char transport[16];

    base_knob_choice(&group->knobs, KNOB_TRANSPORT, transport, sizeof transport);
    return comm_open(&group->comm, &boot, transport, error);
}

/* The transport is open: from here every rank fails alike, with what one of them brought along in *error too. */
static enum hmoe_status join(struct hmoe_group *group, const struct hmoe_group_options *options,
                             struct base_error *error)
{
    struct comm *comm = &group->comm;

    if (comm_agree(comm, error) == HMOE_OK && same_build(comm, error) == HMOE_OK)
        start_workers(group, choose_workers(options, comm->boot.ranks), error);
    if (comm_agree(comm, error) == HMOE_OK)
        return HMOE_OK;
    if (group->pool) {
        rt_pool_destroy(group->pool);
        trace_fini(&group->trace);
    }
    comm_close(comm);
    return error->status;
}

/* Values that are not allowed are known before the ranks meet, and told when they do. */
static enum hmoe_status create(const struct hmoe_group_options *options, struct hmoe_group *group,
                               struct base_error *error)
{
    struct base_error mine = {.status = HMOE_OK};

    if (base_knobs_init(&group->knobs, &mine) == HMOE_OK)
        base_knobs_set(&group->knobs, options->knobs, &mine);
    group->parent = mark_make();
    if (!group->parent)
        base_fail(&mine, HMOE_ERR_MEMORY, "no memory for a group");
    if (open_comm(group, options, error) != HMOE_OK)
        return error->status;
    *error = mine;
    return join(group, options, error);
}

enum hmoe_status hmoe_group_create(const struct hmoe_group_options *options, struct hmoe_group **made)
{
    struct base_error error = {.status = HMOE_OK};
    struct hmoe_group *group = NULL;

    if (!options || !made)
        base_fail(&error, HMOE_ERR_ARGUMENT, "%s is NULL", options ? "group" : "options");
    else if (check_options(options, &error) == HMOE_OK && !(group = calloc(1, sizeof *group)))
        base_fail(&error, HMOE_ERR_MEMORY, "no memory for a group");
    else if (error.status == HMOE_OK && create(options, group, &error) == HMOE_OK)
        *made = group;
    if (error.status != HMOE_OK && group) {
        mark_drop(group->parent);
        free(group);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_group_destroy(struct hmoe_group *group)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK && group->plans)
        base_fail(&error, HMOE_ERR_STATE, "%d plans of the group are alive: destroy them first", group->plans);
    if (error.status == HMOE_OK) {
        rt_pool_destroy(group->pool);
        trace_fini(&group->trace);
        comm_close(&group->comm);
        mark_drop(group->parent);
        free(group);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_group_abort(struct hmoe_group *group, const char *reason)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK) {
        struct base_error text;
        base_fail(&text, HMOE_ERR_ABORTED, "rank %d aborted the group: %s", group->comm.boot.rank,
                  reason ? reason : "no reason given");
        comm_fail(&group->comm, group->comm.boot.rank, HMOE_ERR_ABORTED, text.text);
    }
    return api_report(&error);
}

enum hmoe_status hmoe_group_poll(struct hmoe_group *group)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK)
        comm_failed(&group->comm, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_launch(enum hmoe_via via, int ranks, hmoe_rank_fn fn, void *argument)
{
    struct base_error error = {.status = HMOE_OK};

    comm_launch(via, ranks, fn, argument, &error);
    return api_report(&error);
}

/* ---- trace */

enum hmoe_status hmoe_trace_start(struct hmoe_group *group)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK)
        trace_start(&group->trace, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_trace_stop(struct hmoe_group *group)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK)
        trace_stop(&group->trace);
    return api_report(&error);
}

enum hmoe_status hmoe_trace_write(struct hmoe_group *group, const char *path)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK && !path)
        base_fail(&error, HMOE_ERR_ARGUMENT, "path is NULL");
    if (error.status == HMOE_OK)
        trace_write(&group->trace, path, &error);
    return api_report(&error);
}

enum hmoe_status hmoe_trace_read(struct hmoe_group *group, struct hmoe_trace_summary *summary)
{
    struct base_error error = {.status = HMOE_OK};

    if (api_check_group(group, &error) == HMOE_OK && !summary)
        base_fail(&error, HMOE_ERR_ARGUMENT, "summary is NULL");
    if (error.status == HMOE_OK &&
        api_check_size(summary->size, sizeof *summary, "hmoe_trace_summary", &error) == HMOE_OK)
        trace_summarise(&group->trace, summary);
    return api_report(&error);
}
