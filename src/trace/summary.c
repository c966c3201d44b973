/* The rings as figures. Times in which something held come from one sweep over all starts and ends. */
#include "trace/table.h"

#include <stdlib.h>

/* What the sweep counts: the lanes, and calls in flight. */
enum { CALLS = 3, COUNTED = 4 };

struct edge {
    int64_t ns;
    int what;
    int step; /* +1 a start, -1 an end */
};

/* Room for every kept event. */
struct scratch {
    struct trace_event *events;
    struct edge *edges; /* two an event */
    int64_t *ns;
};

const char *trace_stage_name(int stage)
{
    static const char *const names[HMOE_STAGES] = {"route", "permute", "dispatch", "gmm1", "swiglu",
                                                   "gmm2", "combine", "dact", "dgmm", "dweight"};

    return stage >= 0 && stage < HMOE_STAGES ? names[stage] : "unknown stage";
}

static int edge_order(const void *left, const void *right)
{
    const struct edge *a = left, *b = right;
    return (a->ns > b->ns) - (a->ns < b->ns);
}

static int ns_order(const void *left, const void *right)
{
    const int64_t *a = left, *b = right;
    return (*a > *b) - (*a < *b);
}

static void count_event(struct hmoe_trace_summary *summary, const struct trace_event *event)
{
    const struct trace_row *row = &trace_table[event->kind];
    int64_t ns = event->end_ns - event->start_ns;

    if (row->stage >= 0) {
        summary->stage_ns[row->stage] += ns;
        summary->stage_count[row->stage]++;
    }
    if (row->lane >= 0)
        summary->lane_busy_ns[row->lane] += ns;
}

/* A worker may have slept for hours before the first call: sleep is not part of the span. */
static int64_t span_of(const struct trace_event *events, uint64_t count)
{
    int64_t first = INT64_MAX, last = INT64_MIN;

    for (uint64_t i = 0; i < count; i++) {
        if (events[i].kind == TRACE_IDLE)
            continue;
        first = events[i].start_ns < first ? events[i].start_ns : first;
        last = events[i].end_ns > last ? events[i].end_ns : last;
    }
    return first <= last ? last - first : 0;
}

/* Returns how many edges; there is room for two of each event. */
static uint64_t edges_of(const struct trace_event *events, uint64_t count, struct edge *edges)
{
    uint64_t n = 0;

    for (uint64_t i = 0; i < count; i++) {
        int what = events[i].kind == TRACE_CALL ? CALLS : trace_table[events[i].kind].lane;
        if (what < 0)
            continue;
        edges[n++] = (struct edge){events[i].start_ns, what, 1};
        edges[n++] = (struct edge){events[i].end_ns, what, -1};
    }
    return n;
}

static void sweep(struct hmoe_trace_summary *summary, struct edge *edges, uint64_t count)
{
    int64_t open[COUNTED] = {0};

    qsort(edges, count, sizeof *edges, edge_order);
    for (uint64_t i = 0; i + 1 < count; i++) {
        open[edges[i].what] += edges[i].step;
        int64_t ns = edges[i + 1].ns - edges[i].ns;
        int busy = (open[TRACE_MATRIX] > 0) + (open[TRACE_VECTOR] > 0) + (open[TRACE_COMM] > 0);
        summary->any_busy_ns += busy >= 1 ? ns : 0;
        summary->overlap_ns += busy >= 2 ? ns : 0;
        summary->exposed_comm_ns += open[CALLS] > 0 && open[TRACE_MATRIX] == 0 ? ns : 0;
    }
}

/* The smallest value that at least `percent` of the values do not exceed. */
static int64_t percentile(const int64_t *sorted, int64_t count, int64_t percent)
{
    return count == 0 ? 0 : sorted[(count * percent + 99) / 100 - 1];
}

static void block_times(struct hmoe_trace_summary *summary, const struct scratch *scratch, uint64_t count)
{
    int64_t blocks = 0;

    for (uint64_t i = 0; i < count; i++)
        if (scratch->events[i].kind == TRACE_BLOCK)
            scratch->ns[blocks++] = scratch->events[i].end_ns - scratch->events[i].start_ns;
    qsort(scratch->ns, (size_t)blocks, sizeof *scratch->ns, ns_order);
    summary->blocks = blocks;
    summary->block_p50_ns = percentile(scratch->ns, blocks, 50);
    summary->block_p99_ns = percentile(scratch->ns, blocks, 99);
}

/* Returns how many events it gathered, at most `room`: an idle worker may still add one. */
static uint64_t gather(const struct trace *trace, struct hmoe_trace_summary *summary, struct trace_event *events,
                       uint64_t room)
{
    uint64_t count = 0;

    for (int i = 0; i < trace->rings; i++) {
        uint64_t kept = trace_kept(&trace->ring[i]);
        kept = kept < room - count ? kept : room - count;
        trace_copy(&trace->ring[i], kept, events + count);
        count += kept;
        summary->events_lost += (int64_t)(trace_written(&trace->ring[i]) - kept);
    }
    return count;
}

static void summarise(const struct trace *trace, struct hmoe_trace_summary *summary, const struct scratch *scratch,
                      uint64_t room)
{
    uint64_t count = gather(trace, summary, scratch->events, room);

    summary->events = (int64_t)count;
    summary->span_ns = span_of(scratch->events, count);
    for (uint64_t i = 0; i < count; i++)
        count_event(summary, &scratch->events[i]);
    sweep(summary, scratch->edges, edges_of(scratch->events, count, scratch->edges));
    block_times(summary, scratch, count);
}

static uint64_t kept_by_all(const struct trace *trace)
{
    uint64_t kept = 0;

    for (int i = 0; i < trace->rings; i++)
        kept += trace_kept(&trace->ring[i]);
    return kept;
}

/* Without memory to sort in, events is -1 and all else 0. */
void trace_summarise(const struct trace *trace, struct hmoe_trace_summary *summary)
{
    uint64_t kept = kept_by_all(trace);
    struct scratch scratch = {
        .events = calloc(kept + 1, sizeof *scratch.events),
        .edges = calloc(2 * kept + 1, sizeof *scratch.edges),
        .ns = calloc(kept + 1, sizeof *scratch.ns),
    };

    *summary = (struct hmoe_trace_summary){.size = summary->size, .events = -1};
    if (scratch.events != NULL && scratch.edges != NULL && scratch.ns != NULL)
        summarise(trace, summary, &scratch, kept);
    free(scratch.events);
    free(scratch.edges);
    free(scratch.ns);
}
