#include "rt/deferred.h"

#include <pthread.h>
#include <stdlib.h>

struct entry {
    struct rt_deferred_task task;
    bool running;
    struct entry *next;
};

struct rt_deferred {
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t ended; /* a task has */
    struct entry *first;  /* oldest first, those running included */
    struct rt_deferred_level level;
    size_t bytes_max;
    struct base_error failure; /* the first */
};

enum hmoe_status rt_deferred_create(struct rt_deferred **made, size_t bytes_max, struct base_error *error)
{
    struct rt_deferred *queue = calloc(1, sizeof *queue);

    if (!queue)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a queue");
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->ended, NULL);
    queue->bytes_max = bytes_max;
    *made = queue;
    return HMOE_OK;
}

enum hmoe_status rt_deferred_destroy(struct rt_deferred *queue, struct base_error *error)
{
    struct rt_deferred_level level = rt_deferred_pending(queue);

    if (level.tasks)
        return base_fail(error, HMOE_ERR_STATE, "%lld tasks are left in the queue: flush it first",
                         (long long)level.tasks);
    pthread_cond_destroy(&queue->ended);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
    return HMOE_OK;
}

struct rt_deferred_level rt_deferred_pending(struct rt_deferred *queue)
{
    struct rt_deferred_level level;

    pthread_mutex_lock(&queue->lock);
    level = queue->level;
    pthread_mutex_unlock(&queue->lock);
    return level;
}

/* ---- under the lock */

/* Does an older task of its key stand before it? */
static bool blocked(const struct rt_deferred *queue, const struct entry *entry)
{
    for (const struct entry *e = queue->first; e != entry; e = e->next)
        if (e->task.key == entry->task.key)
            return true;
    return false;
}

static struct entry *oldest_free(const struct rt_deferred *queue)
{
    for (struct entry *e = queue->first; e; e = e->next)
        if (!e->running && !blocked(queue, e))
            return e;
    return NULL;
}

/* Has any not begun? */
static bool any_waits(const struct rt_deferred *queue)
{
    for (const struct entry *e = queue->first; e; e = e->next)
        if (!e->running)
            return true;
    return false;
}

static void unlink_entry(struct rt_deferred *queue, struct entry *entry)
{
    struct entry **at = &queue->first;

    while (*at != entry)
        at = &(*at)->next;
    *at = entry->next;
    queue->level.tasks--;
    queue->level.bytes -= entry->task.bytes;
}

static void run(struct rt_deferred *queue, struct entry *entry)
{
    struct base_error error = {.status = HMOE_OK};
    enum hmoe_status status;

    entry->running = true;
    pthread_mutex_unlock(&queue->lock);
    status = entry->task.run(entry->task.argument, &error);
    pthread_mutex_lock(&queue->lock);
    if (status != HMOE_OK && queue->failure.status == HMOE_OK)
        queue->failure = error;
    unlink_entry(queue, entry);
    free(entry);
    pthread_cond_broadcast(&queue->ended);
}

/* Runs the oldest task that may run, or waits until another thread's has ended. */
static void advance(struct rt_deferred *queue)
{
    struct entry *entry = oldest_free(queue);

    if (entry)
        run(queue, entry);
    else
        pthread_cond_wait(&queue->ended, &queue->lock);
}

static void append(struct rt_deferred *queue, struct entry *entry)
{
    struct entry **at = &queue->first;

    while (*at)
        at = &(*at)->next;
    *at = entry;
    queue->level.tasks++;
    queue->level.bytes += entry->task.bytes;
}

/* ---- push and flush */

enum hmoe_status rt_deferred_push(struct rt_deferred *queue, const struct rt_deferred_task *task,
                                  struct base_error *error)
{
    struct entry *entry = malloc(sizeof *entry);

    if (!entry)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a task");
    *entry = (struct entry){.task = *task, .running = task->bytes > queue->bytes_max}; /* then nobody else takes it */
    pthread_mutex_lock(&queue->lock);
    while (queue->level.tasks && queue->level.bytes + task->bytes > queue->bytes_max)
        advance(queue);
    append(queue, entry);
    if (task->bytes > queue->bytes_max) /* then none is left before it; else another thread may have it already */
        run(queue, entry);
    pthread_mutex_unlock(&queue->lock);
    return HMOE_OK;
}

enum hmoe_status rt_deferred_flush(struct rt_deferred *queue, int64_t most, const struct rt_deferred_until *until,
                                   struct base_error *error)
{
    bool stopped = false;

    pthread_mutex_lock(&queue->lock);
    for (int64_t begun = 0; begun < most && any_waits(queue);) {
        struct entry *entry = oldest_free(queue);
        stopped = until && until->happened(until->context);
        if (stopped)
            break;
        if (entry) {
            run(queue, entry);
            begun++;
        } else {
            pthread_cond_wait(&queue->ended, &queue->lock);
        }
    }
    while (!stopped && !any_waits(queue) && queue->level.tasks) /* all have begun: see them end */
        pthread_cond_wait(&queue->ended, &queue->lock);
    if (queue->failure.status != HMOE_OK)
        *error = queue->failure;
    pthread_mutex_unlock(&queue->lock);
    return error->status;
}
