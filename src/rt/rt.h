/* The runtime: queues of tasks in lanes, and workers that serve them.
 *
 * A queue belongs to one plan: per lane a bounded ring whose capacity is the most that this plan can ever have ready
 * at once, so a push never fails and never waits. The pool's workers serve every attached queue: comm first, then
 * vector, then matrix, then fill. Whenever the rank's bell has rung they call each queue's poll, which looks at the
 * counters that other ranks raise and pushes what has become ready. With nothing to do they sleep on the bell.
 * Nothing here needs two workers, or two ranks, to run at the same instant.
 */
#ifndef RT_H
#define RT_H

#include "comm/comm.h"
#include "rt/ring.h"
#include "trace/trace.h"

#include <pthread.h>

/* fill: matrix work that nobody waits for, for the gaps of the others */
enum rt_lane { RT_COMM = 0, RT_VECTOR = 1, RT_MATRIX = 2, RT_FILL = 3, RT_LANES = 4 };

struct rt_pool;

struct rt_queue {
    struct rt_ring_mpmc lane[RT_LANES];
    struct rt_pool *pool;
    void (*poll)(void *context, struct rt_worker *worker);
    void *context;
    /* How often somebody asked for a poll since it was last idle: the first asker polls for all (rt_poll). */
    _Alignas(RT_LINE) _Atomic uint32_t asked;
};

struct rt_worker {
    int index; /* 0 .. workers-1 */
    struct rt_pool *pool;
    struct trace *trace;
    pthread_t thread;
    uint32_t polled; /* the bell's value when this worker last polled */
    _Alignas(RT_LINE) _Atomic(struct rt_queue *) inside; /* the queue it is looking at: keeps detach waiting */
};

enum { RT_QUEUES_MAX = 64 };

struct rt_pool {
    struct comm *comm;
    struct trace *trace;
    int workers, vector_workers;
    struct rt_worker *worker; /* [workers] */
    void (*thread_begin)(void);
    void (*thread_end)(void);
    _Atomic(struct rt_queue *) queue[RT_QUEUES_MAX];
    atomic_int stop;
};

struct rt_pool_options {
    struct comm *comm;
    struct trace *trace; /* with one ring per worker */
    int workers;         /* >= 1 */
    int vector_workers;  /* of them, how many never serve the matrix and fill lanes; < workers */
    /* Called in each worker's thread as it starts and ends. */
    void (*thread_begin)(void);
    void (*thread_end)(void);
};

enum hmoe_status rt_pool_create(struct rt_pool **pool, const struct rt_pool_options *options,
                                struct base_error *error);
void rt_pool_destroy(struct rt_pool *pool); /* with no queue attached */

/* capacity: of each lane, powers of two. memory: rt_queue_bytes(capacity). */
size_t rt_queue_bytes(const uint64_t capacity[RT_LANES]);
void rt_queue_init(struct rt_queue *queue, const uint64_t capacity[RT_LANES], void *memory);
/* From the thread that makes plans. attach fails when RT_QUEUES_MAX queues are attached; detach returns when no worker
 * looks at the queue. */
enum hmoe_status rt_attach(struct rt_pool *pool, struct rt_queue *queue, struct base_error *error);
void rt_detach(struct rt_queue *queue);

void rt_push(struct rt_queue *queue, enum rt_lane lane, struct rt_task task);

#endif
