#include "rt/ring.h"

void rt_ring_init(struct rt_ring_mpmc *ring, struct rt_slot *slots, uint64_t capacity)
{
    ring->slot = slots;
    ring->mask = capacity - 1;
    atomic_store_explicit(&ring->head, 0, memory_order_relaxed);
    atomic_store_explicit(&ring->tail, 0, memory_order_relaxed);
    for (uint64_t i = 0; i < capacity; i++)
        atomic_store_explicit(&slots[i].turn, i, memory_order_relaxed);
}

int rt_ring_push(struct rt_ring_mpmc *ring, const struct rt_task *task)
{
    uint64_t at = atomic_load_explicit(&ring->tail, memory_order_relaxed);

    for (;;) {
        struct rt_slot *slot = &ring->slot[at & ring->mask];
        int64_t ahead = (int64_t)(atomic_load_explicit(&slot->turn, memory_order_acquire) - at);
        if (ahead < 0)
            return 0;
        if (ahead > 0) {
            at = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        } else if (atomic_compare_exchange_weak_explicit(&ring->tail, &at, at + 1, memory_order_relaxed,
                                                         memory_order_relaxed)) {
            slot->task = *task;
            atomic_store_explicit(&slot->turn, at + 1, memory_order_release);
            return 1;
        }
    }
}

int rt_ring_pop(struct rt_ring_mpmc *ring, struct rt_task *task)
{
    uint64_t at = atomic_load_explicit(&ring->head, memory_order_relaxed);

    for (;;) {
        struct rt_slot *slot = &ring->slot[at & ring->mask];
        int64_t ahead = (int64_t)(atomic_load_explicit(&slot->turn, memory_order_acquire) - (at + 1));
        if (ahead < 0)
            return 0;
        if (ahead > 0) {
            at = atomic_load_explicit(&ring->head, memory_order_relaxed);
        } else if (atomic_compare_exchange_weak_explicit(&ring->head, &at, at + 1, memory_order_relaxed,
                                                         memory_order_relaxed)) {
            *task = slot->task;
            atomic_store_explicit(&slot->turn, at + ring->mask + 1, memory_order_release);
            return 1;
        }
    }
}

int rt_ring_empty(struct rt_ring_mpmc *ring)
{
    uint64_t at = atomic_load_explicit(&ring->head, memory_order_relaxed);

    return (int64_t)(atomic_load_explicit(&ring->slot[at & ring->mask].turn, memory_order_acquire) - (at + 1)) < 0;
}
