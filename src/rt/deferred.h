/* Work that may wait: tasks of a function, an argument, a key and the bytes they hold on to until they have run.
 *
 * Tasks of one key run in the order in which they were pushed, never two at once, whoever runs them; so what they
 * accumulate has the same bits whenever the queue is flushed. Tasks run in the threads that flush, or, when a push
 * would hold more than bytes_max, in the thread that pushes: the oldest first, until it fits. So memory is bounded,
 * however many microbatches there are. This is not the data path: it locks, and it allocates as it grows.
 */
#ifndef RT_DEFERRED_H
#define RT_DEFERRED_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct rt_deferred;

struct rt_deferred_task {
    /* Not HMOE_OK: error has the sentence. */
    enum hmoe_status (*run)(void *argument, struct base_error *error);
    void *argument;
    const void *key; /* the parameter that it writes */
    size_t bytes;
};

enum hmoe_status rt_deferred_create(struct rt_deferred **queue, size_t bytes_max, struct base_error *error);
/* HMOE_ERR_STATE, and nothing happens, when tasks are left. */
enum hmoe_status rt_deferred_destroy(struct rt_deferred *queue, struct base_error *error);

/* A task larger than bytes_max runs at once, after all others. Threads: any, but not from a running task. On failure
 * the task was not taken. */
enum hmoe_status rt_deferred_push(struct rt_deferred *queue, const struct rt_deferred_task *task,
                                  struct base_error *error);

/* Runs tasks, oldest first, until `most` have begun, or until->happened says true (asked before each), or none is left;
 * then it also waits for those that other threads run. What the first task to fail said is returned from then on; the
 * others run all the same, as each has its own state. Threads: any, but not from a running task. */
struct rt_deferred_until {
    bool (*happened)(void *context);
    void *context;
};
enum hmoe_status rt_deferred_flush(struct rt_deferred *queue, int64_t most, const struct rt_deferred_until *until,
                                   struct base_error *error);

/* Tasks that have not ended, and their bytes. */
struct rt_deferred_level {
    int64_t tasks;
    size_t bytes;
};
struct rt_deferred_level rt_deferred_pending(struct rt_deferred *queue);

#endif
