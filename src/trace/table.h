/* What only this room knows: the table of kinds, and how to read a ring. */
#ifndef TRACE_TABLE_H
#define TRACE_TABLE_H

#include "trace/trace.h"

struct trace_row {
    const char *text;
    int lane, stage; /* -1: none */
};

extern const struct trace_row trace_table[TRACE_KINDS];

/* How many events were ever written. */
static inline uint64_t trace_written(const struct trace_ring *ring)
{
    /* acquire: pairs with the release in trace_emit, so that the counted events are readable */
    return __atomic_load_n(&ring->written, __ATOMIC_ACQUIRE);
}

/* How many events a ring holds. */
static inline uint64_t trace_kept(const struct trace_ring *ring)
{
    uint64_t written = trace_written(ring);
    return written < ring->capacity ? written : ring->capacity;
}

/* Copies a ring's `kept` events, in no order. */
void trace_copy(const struct trace_ring *ring, uint64_t kept, struct trace_event *out);

#endif
