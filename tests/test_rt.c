/* The runtime's pieces: rings under contention and across the wrap, events that fire once, pools that lose no task,
 * run lanes in order, and let go of queues. */
#include "rt/event.h"
#include "rt/rt.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- rings */

static void a_full_ring_refuses(void **state)
{
    struct rt_slot slots[2];
    struct rt_ring_mpmc ring;
    struct rt_task task = {.argument = 0};

    (void)state;
    rt_ring_init(&ring, slots, 2);
    for (uint64_t turn = 0; turn < 1000; turn++) {
        assert_true(rt_ring_empty(&ring));
        task.argument = turn;
        assert_true(rt_ring_push(&ring, &task));
        task.argument = turn + 1;
        assert_true(rt_ring_push(&ring, &task));
        assert_false(rt_ring_push(&ring, &task));
        assert_true(rt_ring_pop(&ring, &task) && task.argument == turn);
        assert_true(rt_ring_pop(&ring, &task) && task.argument == turn + 1);
        assert_false(rt_ring_pop(&ring, &task));
    }
}

struct contest {
    struct rt_ring_mpmc ring;
    _Atomic uint64_t sum, taken;
};

enum { PUSHES = 20000, PUSHERS = 3 };

static void *push_many(void *argument)
{
    struct contest *contest = argument;

    for (uint64_t i = 1; i <= PUSHES; i++)
        while (!rt_ring_push(&contest->ring, &(struct rt_task){.argument = i}))
            sched_yield();
    return NULL;
}

static void *pop_many(void *argument)
{
    struct contest *contest = argument;
    struct rt_task task;

    while (atomic_load(&contest->taken) < PUSHES * PUSHERS)
        if (rt_ring_pop(&contest->ring, &task)) {
            atomic_fetch_add(&contest->sum, task.argument);
            atomic_fetch_add(&contest->taken, 1);
        } else {
            sched_yield();
        }
    return NULL;
}

static void rings_lose_nothing(void **state)
{
    struct rt_slot slots[8];
    struct contest contest = {.sum = 0};
    pthread_t threads[PUSHERS * 2];

    (void)state;
    rt_ring_init(&contest.ring, slots, 8);
    for (int i = 0; i < PUSHERS * 2; i++)
        pthread_create(&threads[i], NULL, i < PUSHERS ? push_many : pop_many, &contest);
    for (int i = 0; i < PUSHERS * 2; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(contest.sum, (uint64_t)PUSHERS * PUSHES * (PUSHES + 1) / 2);
}

/* ---- events */

static void events_fire_once_per_use(void **state)
{
    static const uint64_t starts[] = {0, UINT64_MAX - 3, UINT32_MAX - 1, (uint64_t)INT64_MAX - 1};

    (void)state;
    for (int s = 0; s < 4; s++) {
        struct rt_event event;
        rt_event_init(&event, starts[s]);
        for (int use = 0; use < 10; use++) {
            int fired = 0;
            rt_event_arm(&event, 7);
            fired += rt_event_raise(&event, 3);
            assert_false(rt_reached(event.count, event.goal));
            fired += rt_event_raise(&event, 1);
            assert_int_equal(fired, 0);
            fired += rt_event_raise(&event, 3);
            assert_int_equal(fired, 1);
            assert_true(rt_reached(event.count, event.goal));
        }
    }
}

/* ---- pools */

static int copy(void *context, const void *mine, void *all, size_t bytes)
{
    (void)context;
    memcpy(all, mine, bytes);
    return 0;
}

static void nothing(void)
{
}

static void no_poll(void *context, struct rt_worker *worker)
{
    (void)worker;
    atomic_fetch_add((_Atomic int *)context, 1);
}

struct bed {
    struct comm comm;
    struct trace trace;
    struct rt_pool *pool;
    struct rt_queue *queue;
    void *memory;
    _Atomic int polls;
};

static void bed_make(struct bed *bed, int workers, int vector_workers)
{
    const uint64_t capacity[RT_LANES] = {1024, 1024, 1024, 1024};
    struct comm_boot boot = {.rank = 0, .ranks = 1, .allgather = copy};
    struct base_error error = {.status = HMOE_OK};
    struct rt_pool_options options = {.comm = &bed->comm, .trace = &bed->trace, .workers = workers,
                                      .vector_workers = vector_workers, .thread_begin = nothing,
                                      .thread_end = nothing};

    memset(bed, 0, sizeof *bed);
    assert_int_equal(comm_open(&bed->comm, &boot, "auto", &error), HMOE_OK);
    assert_int_equal(trace_init(&bed->trace, 0, workers, 16, &error), HMOE_OK);
    assert_int_equal(rt_pool_create(&bed->pool, &options, &error), HMOE_OK);
    bed->queue = aligned_alloc(RT_LINE, sizeof *bed->queue);
    bed->memory = malloc(rt_queue_bytes(capacity));
    rt_queue_init(bed->queue, capacity, bed->memory);
    bed->queue->poll = no_poll;
    bed->queue->context = &bed->polls;
    assert_int_equal(rt_attach(bed->pool, bed->queue, &error), HMOE_OK);
}

static void bed_free(struct bed *bed)
{
    rt_detach(bed->queue);
    memset(bed->memory, 0xff, 64); /* nobody looks any more */
    free(bed->queue);
    free(bed->memory);
    rt_pool_destroy(bed->pool);
    trace_fini(&bed->trace);
    comm_close(&bed->comm);
}

static void count(void *context, uint64_t argument, struct rt_worker *worker)
{
    (void)worker;
    atomic_fetch_add((_Atomic uint64_t *)context, argument);
}

static void wait_for(_Atomic uint64_t *value, uint64_t wanted)
{
    int64_t start = base_now_ns();

    while (atomic_load(value) != wanted) {
        assert_true(base_now_ns() - start < 10000000000); /* a lost task */
        sched_yield();
    }
}

static void no_task_is_lost(void **state)
{
    (void)state;
    for (int workers = 1; workers <= 4; workers++) {
        _Atomic uint64_t sum = 0;
        struct bed bed;
        bed_make(&bed, workers, workers - 1);
        for (uint64_t i = 1; i <= 3000; i++) {
            rt_push(bed.queue, (enum rt_lane)(i % RT_LANES), (struct rt_task){count, &sum, i});
            if (i % 100 == 0)
                wait_for(&sum, i * (i + 1) / 2); /* workers fall asleep between */
        }
        assert_true(bed.polls > 0);
        bed_free(&bed);
    }
}

struct order {
    _Atomic uint64_t gate, done;
    int lanes[30];
};

static void hold(void *context, uint64_t argument, struct rt_worker *worker)
{
    struct order *order = context;

    (void)argument;
    (void)worker;
    while (!atomic_load(&order->gate))
        sched_yield();
}

static void note(void *context, uint64_t lane, struct rt_worker *worker)
{
    struct order *order = context;

    (void)worker;
    order->lanes[atomic_load(&order->done)] = (int)lane;
    atomic_fetch_add(&order->done, 1);
}

/* One worker: what waits is served comm first, then vector, then matrix. */
static void lanes_have_priorities(void **state)
{
    struct order order = {.gate = 0};
    struct bed bed;

    (void)state;
    bed_make(&bed, 1, 0);
    rt_push(bed.queue, RT_MATRIX, (struct rt_task){hold, &order, 0});
    for (int i = 0; i < 30; i++)
        rt_push(bed.queue, (enum rt_lane)(2 - i % 3), (struct rt_task){note, &order, (uint64_t)(2 - i % 3)});
    atomic_store(&order.gate, 1);
    wait_for(&order.done, 30);
    for (int i = 1; i < 30; i++)
        assert_true(order.lanes[i - 1] <= order.lanes[i]);
    bed_free(&bed);
}

static void which(void *context, uint64_t argument, struct rt_worker *worker)
{
    _Atomic uint64_t *seen = context;

    atomic_fetch_or(&seen[argument], 1u << worker->index);
    atomic_fetch_add(&seen[3], 1);
}

/* Workers dedicated to the vector lane never take matrix tasks. */
static void dedicated_workers(void **state)
{
    _Atomic uint64_t seen[4] = {0};
    struct bed bed;

    (void)state;
    bed_make(&bed, 3, 2);
    for (uint64_t i = 0; i < 600; i++)
        rt_push(bed.queue, (enum rt_lane)(i % 3), (struct rt_task){which, seen, i % 3});
    wait_for(&seen[3], 600);
    assert_int_equal(seen[RT_MATRIX], 4);
    bed_free(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_ring_refuses), cmocka_unit_test(rings_lose_nothing),
        cmocka_unit_test(events_fire_once_per_use), cmocka_unit_test(no_task_is_lost),
        cmocka_unit_test(lanes_have_priorities), cmocka_unit_test(dedicated_workers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
