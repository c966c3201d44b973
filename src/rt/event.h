/* An event is a counter that only goes up and a goal that goes up with it.
 *
 * Usage: before anybody can raise it, one thread sets the goal of this use (rt_event_arm: so many raises from now).
 * Raisers add; the one whose add reaches the goal gets 1 and does what the event stands for, exactly once.
 * Raises are never taken back and counters never reset, so a stale event cannot exist; comparing by difference keeps
 * this true when a counter wraps.
 * Why it is safe: each raise is acq_rel, so the last raiser has seen everything that every earlier raiser did before
 * its raise; arm happens before the first raise because whoever raises was started by (or after) the arming thread.
 */
#ifndef RT_EVENT_H
#define RT_EVENT_H

#include <stdatomic.h>
#include <stdint.h>

struct rt_event {
    _Atomic uint64_t count;
    uint64_t goal;
};

static inline void rt_event_init(struct rt_event *event, uint64_t start)
{
    atomic_store_explicit(&event->count, start, memory_order_relaxed);
    event->goal = start;
}

/* This use ends after `raises` more; raises >= 1. All raises of the use before must be in. */
static inline void rt_event_arm(struct rt_event *event, uint64_t raises)
{
    event->goal += raises;
}

/* 1 for the raise that reaches the goal. acq_rel pairs with the other raisers' acq_rel. */
static inline int rt_event_raise(struct rt_event *event, uint64_t by)
{
    uint64_t goal = event->goal; /* before the add: after the last raise it may be armed again */

    return atomic_fetch_add_explicit(&event->count, by, memory_order_acq_rel) + by == goal;
}

/* Has a counter that others raise come to the goal? Holds across the wrap. */
static inline int rt_reached(uint64_t count, uint64_t goal)
{
    return (int64_t)(count - goal) >= 0;
}

#endif
