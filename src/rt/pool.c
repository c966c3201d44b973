#include "rt/rt.h"

#include "base/clock.h"
#include "base/fpenv.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* A worker that found nothing looks after the others' health this often. */
#define IDLE_LIMIT_NS 20000000

size_t rt_queue_bytes(const uint64_t capacity[RT_LANES])
{
    uint64_t slots = 0;

    for (int lane = 0; lane < RT_LANES; lane++)
        slots += capacity[lane];
    return (size_t)slots * sizeof(struct rt_slot);
}

void rt_queue_init(struct rt_queue *queue, const uint64_t capacity[RT_LANES], void *memory)
{
    struct rt_slot *slots = memory;

    for (int lane = 0; lane < RT_LANES; lane++) {
        rt_ring_init(&queue->lane[lane], slots, capacity[lane]);
        slots += capacity[lane];
    }
    atomic_init(&queue->asked, 0);
}

enum hmoe_status rt_attach(struct rt_pool *pool, struct rt_queue *queue, struct base_error *error)
{
    queue->pool = pool;
    for (int i = 0; i < RT_QUEUES_MAX; i++)
        if (!atomic_load_explicit(&pool->queue[i], memory_order_relaxed)) {
            /* release: pairs with enter()'s load, which must see the queue's members */
            atomic_store_explicit(&pool->queue[i], queue, memory_order_release);
            return HMOE_OK;
        }
    return base_fail(error, HMOE_ERR_LIMIT, "a group can have at most %d plans at once", RT_QUEUES_MAX);
}

void rt_detach(struct rt_queue *queue)
{
    struct rt_pool *pool = queue->pool;

    for (int i = 0; i < RT_QUEUES_MAX; i++)
        if (atomic_load_explicit(&pool->queue[i], memory_order_relaxed) == queue)
            atomic_store(&pool->queue[i], NULL); /* seq_cst, see enter() */
    for (int i = 0; i < pool->workers; i++)
        while (atomic_load(&pool->worker[i].inside) == queue)
            sched_yield();
}

/* The queue in place i, announced so that detach waits for us; NULL when there is none.
 * Announce, then look again: with detach's store and load all four seq_cst, either detach sees the announcement or we
 * see its NULL. */
static struct rt_queue *enter(struct rt_worker *worker, int i)
{
    struct rt_queue *queue = atomic_load_explicit(&worker->pool->queue[i], memory_order_acquire);

    if (!queue)
        return NULL;
    atomic_store(&worker->inside, queue);
    return atomic_load(&worker->pool->queue[i]) == queue ? queue : NULL;
}

static void leave(struct rt_worker *worker)
{
    atomic_store_explicit(&worker->inside, NULL, memory_order_release); /* pairs with detach's load */
}

void rt_push(struct rt_queue *queue, enum rt_lane lane, struct rt_task task)
{
    int pushed = rt_ring_push(&queue->lane[lane], &task);

    assert(pushed);
    (void)pushed;
    comm_ring(queue->pool->comm, queue->pool->comm->boot.rank);
}

/* Whoever asks first polls, again and again until nobody has asked meanwhile: news is never lost between two pollers.
 * asked: acq_rel on both sides, so a poll sees what was signalled before the ask it answers. */
static void poll_queue(struct rt_queue *queue, struct rt_worker *worker)
{
    uint32_t asked = atomic_fetch_add_explicit(&queue->asked, 1, memory_order_acq_rel) + 1;

    if (asked != 1)
        return;
    do {
        asked = atomic_load_explicit(&queue->asked, memory_order_acquire);
        queue->poll(queue->context, worker);
    } while (!atomic_compare_exchange_strong_explicit(&queue->asked, &asked, 0, memory_order_acq_rel,
                                                      memory_order_relaxed));
}

static void poll_all(struct rt_worker *worker)
{
    for (int i = 0; i < RT_QUEUES_MAX; i++) {
        struct rt_queue *queue = enter(worker, i);
        if (queue)
            poll_queue(queue, worker);
    }
    leave(worker);
}

/* Runs one task of this lane, of any queue. */
static int run_lane(struct rt_worker *worker, int lane)
{
    struct rt_task task;

    for (int i = 0; i < RT_QUEUES_MAX; i++) {
        struct rt_queue *queue = enter(worker, i);
        if (queue && rt_ring_pop(&queue->lane[lane], &task)) {
            task.run(task.context, task.argument, worker);
            leave(worker);
            return 1;
        }
    }
    leave(worker);
    return 0;
}

static int run_one(struct rt_worker *worker)
{
    int lanes = worker->index < worker->pool->vector_workers ? RT_MATRIX : RT_LANES;

    for (int lane = 0; lane < lanes; lane++)
        if (run_lane(worker, lane))
            return 1;
    return 0;
}

/* false when nothing happened for a while. */
static bool sleep_on(struct rt_worker *worker, uint32_t bell)
{
    int64_t start = trace_on(worker->trace) ? base_now_ns() : 0;
    bool woken = comm_sleep(worker->pool->comm, bell, IDLE_LIMIT_NS);

    if (start && trace_on(worker->trace))
        trace_emit(worker->trace, worker->index,
                   &(struct trace_event){.start_ns = start, .end_ns = base_now_ns(), .expert = -1, .block = -1,
                                         .source = -1, .kind = TRACE_IDLE});
    return woken;
}

static void serve(struct rt_worker *worker)
{
    struct comm *comm = worker->pool->comm;

    /* relaxed: the bell that destroy rings orders it */
    while (!atomic_load_explicit(&worker->pool->stop, memory_order_relaxed)) {
        uint32_t bell = comm_bell(comm);
        if (bell != worker->polled) {
            worker->polled = bell;
            poll_all(worker);
        }
        if (run_one(worker))
            continue;
        if (!sleep_on(worker, bell)) { /* time to look after the peers and the clock */
            comm->transport->watch(comm);
            poll_all(worker);
        }
    }
}

static void *worker_main(void *argument)
{
    struct rt_worker *worker = argument;
    uint64_t before = base_fp_enter();

    worker->pool->thread_begin();
    serve(worker);
    worker->pool->thread_end();
    base_fp_leave(before);
    return NULL;
}

static void stop_workers(struct rt_pool *pool, int started)
{
    atomic_store(&pool->stop, 1);
    comm_ring(pool->comm, pool->comm->boot.rank);
    for (int i = 0; i < started; i++)
        pthread_join(pool->worker[i].thread, NULL);
}

static enum hmoe_status start_workers(struct rt_pool *pool, struct base_error *error)
{
    for (int i = 0; i < pool->workers; i++) {
        struct rt_worker *worker = &pool->worker[i];
        int failed;
        worker->index = i;
        worker->pool = pool;
        worker->trace = pool->trace;
        worker->polled = comm_bell(pool->comm);
        atomic_init(&worker->inside, NULL);
        failed = pthread_create(&worker->thread, NULL, worker_main, worker);
        if (failed) {
            stop_workers(pool, i);
            return base_fail(error, HMOE_ERR_SYSTEM, "cannot start worker %d of %d: %s", i, pool->workers,
                             strerror(failed));
        }
    }
    return HMOE_OK;
}

enum hmoe_status rt_pool_create(struct rt_pool **made, const struct rt_pool_options *options,
                                struct base_error *error)
{
    struct rt_pool *pool = calloc(1, sizeof *pool);
    struct rt_worker *worker = aligned_alloc(RT_LINE, sizeof *worker * (size_t)options->workers);

    if (!pool || !worker) {
        free(pool);
        free(worker);
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for %d workers", options->workers);
    }
    memset(worker, 0, sizeof *worker * (size_t)options->workers);
    *pool = (struct rt_pool){.comm = options->comm, .trace = options->trace, .workers = options->workers,
                             .vector_workers = options->vector_workers, .worker = worker,
                             .thread_begin = options->thread_begin, .thread_end = options->thread_end};
    if (start_workers(pool, error) != HMOE_OK) {
        free(worker);
        free(pool);
        return error->status;
    }
    *made = pool;
    return HMOE_OK;
}

void rt_pool_destroy(struct rt_pool *pool)
{
    stop_workers(pool, pool->workers);
    free(pool->worker);
    free(pool);
}
