/* A bounded queue for many producers and consumers, without locks. Each slot carries the turn it is good for:
 * turn == position: free for the producer of that position; turn == position + 1: filled, for its consumer.
 * After the consumer, turn = position + capacity: free for the producer one round later (the scheme is D. Vyukov's).
 * A producer's release store of turn pairs with the consumer's acquire load of it, and the other way round.
 */
#ifndef RT_RING_H
#define RT_RING_H

#include <stdatomic.h>
#include <stdint.h>

#define RT_LINE 64

struct rt_worker;

struct rt_task {
    void (*run)(void *context, uint64_t argument, struct rt_worker *worker);
    void *context;
    uint64_t argument;
};

struct rt_slot {
    _Atomic uint64_t turn;
    struct rt_task task;
};

struct rt_ring_mpmc {
    struct rt_slot *slot; /* [mask + 1] */
    uint64_t mask;
    _Alignas(RT_LINE) _Atomic uint64_t head; /* next to take */
    _Alignas(RT_LINE) _Atomic uint64_t tail; /* next to fill */
};

/* slots: room for `capacity`, a power of two. */
void rt_ring_init(struct rt_ring_mpmc *ring, struct rt_slot *slots, uint64_t capacity);
int rt_ring_push(struct rt_ring_mpmc *ring, const struct rt_task *task); /* 0 when full */
int rt_ring_pop(struct rt_ring_mpmc *ring, struct rt_task *task);        /* 0 when empty */
int rt_ring_empty(struct rt_ring_mpmc *ring);

#endif
