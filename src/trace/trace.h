/* Evidence: each worker writes spans into its own ring (single producer, overwriting the oldest), which is read only
 * when no call is in flight. Off costs one relaxed load and a branch. Times are CLOCK_MONOTONIC ns, so ranks of one
 * host share an axis. Kinds, names and lanes: events.def, the only list. */
#ifndef TRACE_H
#define TRACE_H

#include "hmoe.h"

#include <stdatomic.h>

enum trace_lane { TRACE_MATRIX = 0, TRACE_VECTOR = 1, TRACE_COMM = 2 };

enum trace_kind {
#define X(name, text, lane, stage) name,
#include "trace/events.def"
#undef X
    TRACE_KINDS
};

struct trace_event {
    int64_t start_ns, end_ns; /* a point event has both alike */
    uint64_t call;            /* the plan's call number */
    int32_t expert, block;    /* -1: none; expert is the global number */
    int32_t source;           /* the source rank, -1: none */
    int32_t rows;             /* rows, tokens or slots handled */
    int32_t layer;
    uint8_t kind; /* enum trace_kind */
};

/* One worker's ring. */
struct trace_ring {
    struct trace_event *events; /* [capacity], a power of two */
    uint64_t capacity;
    uint64_t written; /* all events ever; the latest `capacity` are kept */
};

struct trace {
    atomic_int on;
    int rank, rings;
    struct trace_ring *ring; /* [rings], one per worker */
};

struct base_error;
/* events: capacity of each ring, rounded up to a power of two; memory is taken at the first trace_start. */
enum hmoe_status trace_init(struct trace *trace, int rank, int rings, int64_t events, struct base_error *error);
void trace_fini(struct trace *trace);
enum hmoe_status trace_start(struct trace *trace, struct base_error *error); /* empties the rings, then records */
void trace_stop(struct trace *trace);

static inline int trace_on(const struct trace *trace)
{
    /* relaxed: a worker may see start or stop one event late */
    return atomic_load_explicit(&trace->on, memory_order_relaxed);
}

/* Called by the ring's worker only, when trace_on. */
void trace_emit(struct trace *trace, int ring, const struct trace_event *event);

enum hmoe_status trace_write(const struct trace *trace, const char *path, struct base_error *error);
void trace_summarise(const struct trace *trace, struct hmoe_trace_summary *summary);
const char *trace_stage_name(int stage);

#endif
