/* Weight gradients that wait: the rt room's deferred queue, with calls as tasks. */
#include "api/objects.h"
#include "api/report.h"
#include "rt/deferred.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct hmoe_w_queue {
    struct rt_deferred *deferred;
};

/* What a task is given. */
struct waiting {
    struct hmoe_plan *plan;
    struct hmoe_call *call;
};

static enum hmoe_status run(void *argument, struct base_error *error)
{
    const struct timespec moment = {.tv_nsec = 50000};
    struct waiting waiting = *(struct waiting *)argument;

    free(argument);
    while ((error->status = hmoe_backward_weight(waiting.plan, waiting.call)) == HMOE_ERR_BUSY)
        nanosleep(&moment, NULL); /* others make weight gradients of this plan: theirs end */
    if (error->status != HMOE_OK)
        strncpy(error->text, hmoe_last_error(), sizeof error->text - 1);
    return error->status;
}

static const void *key_of(const struct hmoe_gradients *grad)
{
    const void *wanted[] = {grad->d_up_proj, grad->d_down_proj, grad->d_up_bias, grad->d_down_bias,
                            grad->d_shared_up_proj, grad->d_shared_down_proj};

    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (wanted[i])
            return wanted[i];
    return NULL;
}

static enum hmoe_status check_queue(const struct hmoe_w_queue *queue, struct base_error *error)
{
    return queue ? HMOE_OK : base_fail(error, HMOE_ERR_ARGUMENT, "queue is NULL");
}

enum hmoe_status hmoe_w_queue_create(size_t bytes_max, struct hmoe_w_queue **made)
{
    struct base_error error = {.status = HMOE_OK};
    struct hmoe_w_queue *queue = made ? calloc(1, sizeof *queue) : NULL;

    if (!made)
        base_fail(&error, HMOE_ERR_ARGUMENT, "queue is NULL");
    else if (!queue)
        base_fail(&error, HMOE_ERR_MEMORY, "no memory for a queue");
    else if (rt_deferred_create(&queue->deferred, bytes_max, &error) == HMOE_OK)
        *made = queue;
    if (error.status != HMOE_OK)
        free(queue);
    return api_report(&error);
}

static enum hmoe_status push(struct hmoe_w_queue *queue, struct hmoe_plan *plan, struct hmoe_call *call,
                             struct base_error *error)
{
    struct hmoe_saved_usage usage = {.size = sizeof usage};
    struct rt_deferred_task task = {.run = run};
    struct waiting *waiting;

    moe_saved_read(call->saved->moe, &usage);
    task.key = key_of(&call->grad);
    task.bytes = usage.routing_bytes + usage.rows_bytes + usage.gate_up_bytes + usage.pending_bytes;
    task.argument = waiting = malloc(sizeof *waiting);
    if (!waiting)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a call in the queue");
    *waiting = (struct waiting){plan, call};
    if (rt_deferred_push(queue->deferred, &task, error) != HMOE_OK)
        free(waiting);
    return error->status;
}

enum hmoe_status hmoe_w_queue_push(struct hmoe_w_queue *queue, struct hmoe_plan *plan, struct hmoe_call *call)
{
    struct base_error error = {.status = HMOE_OK};

    if (check_queue(queue, &error) == HMOE_OK && api_check_plan(plan, &error) == HMOE_OK) {
        if (!call || !call->saved)
            base_fail(&error, HMOE_ERR_ARGUMENT, "%s is NULL", call ? "call->saved" : "call");
        else
            push(queue, plan, call, &error);
    }
    return api_report(&error);
}

static bool ended(void *call)
{
    return hmoe_call_done(call) != 0;
}

enum hmoe_status hmoe_w_queue_flush(struct hmoe_w_queue *queue, int64_t most, const struct hmoe_call *until)
{
    struct base_error error = {.status = HMOE_OK};
    struct rt_deferred_until event = {ended, (void *)(uintptr_t)until};

    if (check_queue(queue, &error) == HMOE_OK)
        rt_deferred_flush(queue->deferred, most, until ? &event : NULL, &error);
    return api_report(&error);
}

int64_t hmoe_w_queue_length(struct hmoe_w_queue *queue)
{
    return queue ? rt_deferred_pending(queue->deferred).tasks : 0;
}

enum hmoe_status hmoe_w_queue_destroy(struct hmoe_w_queue *queue)
{
    struct base_error error = {.status = HMOE_OK};

    if (check_queue(queue, &error) == HMOE_OK && rt_deferred_destroy(queue->deferred, &error) == HMOE_OK)
        free(queue);
    return api_report(&error);
}
