#include "crew.h"

#include "base/clock.h"
#include "base/topology.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

int cli_workers(int64_t asked, int64_t ranks)
{
    int64_t share = base_cpus() / ranks;

    return asked ? (int)asked : share < 1 ? 1 : (int)share;
}

bool cli_note(struct cli_player *player, enum hmoe_status status)
{
    struct cli_seat *seat = cli_seat_of(player);

    if (status == HMOE_OK)
        return true;
    if (!*seat->error)
        snprintf(seat->error, sizeof seat->error, "%s",
                 *hmoe_last_error() ? hmoe_last_error() : hmoe_status_text(status));
    return false;
}

bool cli_enter(struct cli_player *player, int workers, const char *knobs)
{
    struct hmoe_group_options options = {
        .size = sizeof options,
        .rank = player->boot->rank,
        .ranks = player->boot->ranks,
        .workers = workers,
        .allgather = player->boot->allgather,
        .allgather_context = player->boot->allgather_context,
        .knobs = knobs,
    };
    return cli_note(player, hmoe_group_create(&options, &player->group));
}

bool cli_leave(struct cli_player *player, bool fine)
{
    struct rusage usage;

    if (getrusage(RUSAGE_SELF, &usage) == 0)
        cli_seat_of(player)->peak_bytes = usage.ru_maxrss * 1024;
    if (!player->group)
        return false;
    return cli_note(player, hmoe_group_destroy(player->group)) && fine;
}

bool cli_barrier(struct cli_player *player)
{
    const struct hmoe_boot *boot = player->boot;
    char mine = 0, all[1024];

    if (boot->ranks == 1)
        return true;
    if (boot->allgather(boot->allgather_context, &mine, all, 1) == 0)
        return true;
    snprintf(cli_seat_of(player)->error, HMOE_ERROR_BYTES, "the other ranks are gone");
    return false;
}

bool cli_timed_call(struct cli_player *player, cli_call_fn *run, struct hmoe_plan *plan, struct hmoe_call *call)
{
    struct cli_seat *seat = cli_seat_of(player);
    enum hmoe_status status;

    if (!cli_barrier(player))
        return false;
    seat->start_ns = base_now_ns();
    status = run(plan, call);
    seat->end_ns = base_now_ns();
    return cli_note(player, status) && cli_barrier(player);
}

static bool write_trace(struct cli_player *player, const char *path)
{
    char own[4096];

    if (player->boot->ranks == 1)
        return cli_note(player, hmoe_trace_write(player->group, path));
    snprintf(own, sizeof own, "%s.rank%d", path, player->boot->rank);
    return cli_note(player, hmoe_trace_write(player->group, own));
}

bool cli_traced_call(struct cli_player *player, cli_call_fn *run, struct hmoe_plan *plan, struct hmoe_call *call,
                     const char *path)
{
    struct cli_seat *seat = cli_seat_of(player);
    bool fine = cli_note(player, hmoe_trace_start(player->group)) && cli_timed_call(player, run, plan, call);

    seat->summary.size = sizeof seat->summary;
    return fine && cli_note(player, hmoe_trace_stop(player->group)) &&
           cli_note(player, hmoe_trace_read(player->group, &seat->summary)) && (!path || write_trace(player, path));
}

int64_t cli_span(const struct cli_seat *seats, int ranks)
{
    int64_t start = seats[0].start_ns, end = seats[0].end_ns;

    for (int r = 1; r < ranks; r++) {
        start = seats[r].start_ns < start ? seats[r].start_ns : start;
        end = seats[r].end_ns > end ? seats[r].end_ns : end;
    }
    return end - start;
}

int cli_first_error(const struct cli_seat *seats, int ranks)
{
    for (int r = 0; r < ranks; r++)
        if (*seats[r].error)
            return r;
    return -1;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

void cli_sum_summaries(const struct cli_seat *seats, int ranks, struct hmoe_trace_summary *sum)
{
    *sum = (struct hmoe_trace_summary){.size = sizeof *sum};
    for (int r = 0; r < ranks; r++) {
        const struct hmoe_trace_summary *one = &seats[r].summary;
        sum->events += one->events;
        sum->events_lost += one->events_lost;
        sum->span_ns += one->span_ns;
        for (int s = 0; s < HMOE_STAGES; s++) {
            sum->stage_ns[s] += one->stage_ns[s];
            sum->stage_count[s] += one->stage_count[s];
        }
        for (int lane = 0; lane < 3; lane++)
            sum->lane_busy_ns[lane] += one->lane_busy_ns[lane];
        sum->any_busy_ns += one->any_busy_ns;
        sum->overlap_ns += one->overlap_ns;
        sum->exposed_comm_ns += one->exposed_comm_ns;
        sum->block_p50_ns = larger(sum->block_p50_ns, one->block_p50_ns);
        sum->block_p99_ns = larger(sum->block_p99_ns, one->block_p99_ns);
        sum->blocks += one->blocks;
    }
}

/* Moves one rank's events into `all`. */
static int merge_one(json_t *all, const char *path)
{
    json_t *trace = json_load_file(path, 0, NULL), *events = json_object_get(trace, "traceEvents");
    int failed = !events || json_array_extend(all, events) != 0;

    json_decref(trace);
    unlink(path);
    return failed ? EINVAL : 0;
}

int cli_trace_merge(const char *path, int ranks)
{
    json_t *events = json_array(), *trace;
    char own[4096];
    int failed = 0;

    for (int r = 0; r < ranks; r++) {
        snprintf(own, sizeof own, "%s.rank%d", path, r);
        failed |= merge_one(events, own);
    }
    trace = json_pack("{s:s, s:o}", "displayTimeUnit", "ns", "traceEvents", events);
    errno = 0;
    if (!failed && json_dump_file(trace, path, JSON_COMPACT | JSON_REAL_PRECISION(16)) != 0)
        failed = errno ? errno : EIO;
    json_decref(trace);
    return failed;
}

static int order(const void *left, const void *right)
{
    const double *a = left, *b = right;
    return (*a > *b) - (*a < *b);
}

double cli_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, order);
    return count ? (values[(count - 1) / 2] + values[count / 2]) / 2.0 : 0.0;
}

double cli_percentile(const double *sorted, int count, double percent)
{
    int index = (int)(percent / 100.0 * count + 0.999999) - 1;
    return count ? sorted[index < 0 ? 0 : index >= count ? count - 1 : index] : 0.0;
}
