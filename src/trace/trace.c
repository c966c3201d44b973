/* The rings: made once, filled by one worker each, read when nothing runs. */
#include "trace/table.h"

#include "base/status.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

const struct trace_row trace_table[TRACE_KINDS] = {
#define X(name, text, lane, stage) [name] = {text, lane, stage},
#include "trace/events.def"
#undef X
};

enum hmoe_status trace_init(struct trace *trace, int rank, int rings, int64_t events, struct base_error *error)
{
    uint64_t capacity = 1;

    *trace = (struct trace){.rank = rank, .rings = rings};
    if (rings < 1 || events < 1)
        return base_fail(error, HMOE_ERR_ARGUMENT, "a trace needs at least one worker and one event, not %d and %lld",
                         rings, (long long)events);
    while (capacity < (uint64_t)events)
        capacity *= 2;
    trace->ring = calloc((size_t)rings, sizeof *trace->ring);
    if (trace->ring == NULL)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for the trace of %d workers", rings);
    for (int i = 0; i < rings; i++)
        trace->ring[i].capacity = capacity;
    return HMOE_OK;
}

void trace_fini(struct trace *trace)
{
    for (int i = 0; trace->ring != NULL && i < trace->rings; i++)
        free(trace->ring[i].events);
    free(trace->ring);
    trace->ring = NULL;
}

/* Touched here, so that recording meets no page fault. */
static enum hmoe_status ring_memory(struct trace_ring *ring, struct base_error *error)
{
    if (ring->events != NULL)
        return HMOE_OK;
    ring->events = calloc(ring->capacity, sizeof *ring->events);
    if (ring->events == NULL)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a trace of %llu events for each worker",
                         (unsigned long long)ring->capacity);
    memset(ring->events, 0xff, ring->capacity * sizeof *ring->events);
    return HMOE_OK;
}

enum hmoe_status trace_start(struct trace *trace, struct base_error *error)
{
    for (int i = 0; i < trace->rings; i++) {
        enum hmoe_status status = ring_memory(&trace->ring[i], error);
        if (status != HMOE_OK)
            return status;
    }
    for (int i = 0; i < trace->rings; i++)
        __atomic_store_n(&trace->ring[i].written, 0, __ATOMIC_RELAXED);
    /* release: pairs with the acquire in trace_emit, which then sees the rings' memory */
    atomic_store_explicit(&trace->on, 1, memory_order_release);
    return HMOE_OK;
}

void trace_stop(struct trace *trace)
{
    atomic_store_explicit(&trace->on, 0, memory_order_relaxed);
}

void trace_emit(struct trace *trace, int index, const struct trace_event *event)
{
    assert(index >= 0 && index < trace->rings && event->kind < TRACE_KINDS && event->start_ns <= event->end_ns);
    /* acquire: pairs with the release in trace_start */
    if (!atomic_load_explicit(&trace->on, memory_order_acquire))
        return;

    struct trace_ring *ring = &trace->ring[index];
    uint64_t written = __atomic_load_n(&ring->written, __ATOMIC_RELAXED);
    ring->events[written & (ring->capacity - 1)] = *event;
    /* release: pairs with the acquire in trace_written */
    __atomic_store_n(&ring->written, written + 1, __ATOMIC_RELEASE);
}

void trace_copy(const struct trace_ring *ring, uint64_t kept, struct trace_event *out)
{
    for (uint64_t i = 0; i < kept; i++)
        out[i] = ring->events[i];
}
