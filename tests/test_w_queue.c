/* Deferred work: order by key, the bound in bytes, flushing; and weight gradients that wait in it. */
#include "back_case.h"

#include "rt/deferred.h"

#include <pthread.h>

enum { KEYS = 4, EACH = 200, THREADS = 4 };

struct bed {
    struct rt_deferred *queue;
    pthread_mutex_t lock;
    int next[KEYS], running[KEYS], wrong;
    size_t held, held_most;
};

struct job {
    struct bed *bed;
    int key, number;
    size_t bytes;
};

static enum hmoe_status do_job(void *argument, struct base_error *error)
{
    struct job *job = argument;
    struct bed *bed = job->bed;

    pthread_mutex_lock(&bed->lock);
    bed->wrong += bed->next[job->key] != job->number || bed->running[job->key];
    bed->running[job->key] = 1;
    pthread_mutex_unlock(&bed->lock);
    sched_yield();
    pthread_mutex_lock(&bed->lock);
    bed->running[job->key] = 0;
    bed->next[job->key]++;
    bed->held -= job->bytes;
    pthread_mutex_unlock(&bed->lock);
    if (job->number == -1)
        return base_fail(error, HMOE_ERR_STATE, "a job that fails");
    return HMOE_OK;
}

static void push_job(struct job *job)
{
    struct base_error error = {.status = HMOE_OK};
    struct bed *bed = job->bed;
    struct rt_deferred_task task = {do_job, job, &bed->next[job->key], job->bytes};

    assert_int_equal(rt_deferred_push(bed->queue, &task, &error), HMOE_OK);
    assert_true(rt_deferred_pending(bed->queue).bytes <= 1000);
}

static void *flusher(void *argument)
{
    struct bed *bed = argument;
    struct base_error error = {.status = HMOE_OK};

    for (int i = 0; i < 400; i++)
        rt_deferred_flush(bed->queue, 3, NULL, &error);
    return NULL;
}

static void test_order_and_bound(void **state)
{
    static struct job jobs[KEYS * EACH];
    struct bed bed = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct base_error error = {.status = HMOE_OK};
    pthread_t thread[THREADS];

    (void)state;
    assert_int_equal(rt_deferred_create(&bed.queue, 1000, &error), HMOE_OK);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, flusher, &bed);
    for (int i = 0; i < KEYS * EACH; i++) {
        jobs[i] = (struct job){&bed, i % KEYS, i / KEYS, 100 + (size_t)(i % 7) * 50};
        push_job(&jobs[i]);
    }
    assert_int_equal(rt_deferred_flush(bed.queue, INT64_MAX, NULL, &error), HMOE_OK);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    for (int k = 0; k < KEYS; k++)
        assert_int_equal(bed.next[k], EACH);
    assert_int_equal(bed.wrong, 0);
    assert_int_equal(rt_deferred_pending(bed.queue).bytes, 0);
    assert_int_equal(rt_deferred_destroy(bed.queue, &error), HMOE_OK);
}

static bool two_done(void *context)
{
    return ((struct bed *)context)->next[0] == 2;
}

static void test_flush_some(void **state)
{
    struct bed bed = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct base_error error = {.status = HMOE_OK};
    struct job jobs[5];
    struct rt_deferred_until until = {two_done, &bed};

    (void)state;
    assert_int_equal(rt_deferred_create(&bed.queue, 1000, &error), HMOE_OK);
    for (int i = 0; i < 5; i++) {
        jobs[i] = (struct job){&bed, 0, i, 10};
        push_job(&jobs[i]);
    }
    assert_int_equal(rt_deferred_destroy(bed.queue, &error), HMOE_ERR_STATE);
    error.status = HMOE_OK;
    assert_int_equal(rt_deferred_flush(bed.queue, 1, NULL, &error), HMOE_OK);
    assert_int_equal(bed.next[0], 1);
    assert_int_equal(rt_deferred_flush(bed.queue, INT64_MAX, &until, &error), HMOE_OK);
    assert_int_equal(bed.next[0], 2);
    assert_int_equal(rt_deferred_pending(bed.queue).tasks, 3);
    assert_int_equal(rt_deferred_flush(bed.queue, INT64_MAX, NULL, &error), HMOE_OK);
    assert_int_equal(bed.next[0], 5);
    assert_int_equal(rt_deferred_destroy(bed.queue, &error), HMOE_OK);
}

/* Larger than the bound: it runs in push, after what was before it. */
static void test_large_and_failing(void **state)
{
    struct bed bed = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct base_error error = {.status = HMOE_OK};
    struct job small = {&bed, 0, 0, 10}, large = {&bed, 0, 1, 5000}, failing = {&bed, 1, -1, 10};

    (void)state;
    bed.next[1] = -1;
    assert_int_equal(rt_deferred_create(&bed.queue, 1000, &error), HMOE_OK);
    push_job(&small);
    push_job(&large);
    assert_int_equal(bed.next[0], 2);
    push_job(&failing);
    assert_int_equal(rt_deferred_flush(bed.queue, INT64_MAX, NULL, &error), HMOE_ERR_STATE);
    assert_string_equal(error.text, "a job that fails");
    assert_int_equal(bed.wrong, 0);
    assert_int_equal(rt_deferred_destroy(bed.queue, &error), HMOE_OK);
}

/* Four microbatches accumulate into the same gradients: at once, or later in the queue, with room for all or one. */
static int waiting_rank(const struct hmoe_boot *boot, void *argument)
{
    struct back_case *b = argument;
    struct hmoe_w_queue *queue;
    struct hmoe_saved *saved[4];
    struct hmoe_call late[4];
    struct case_bed bed;

    CHECK(!case_open(&b->c, boot, &bed));
    CHECK(hmoe_w_queue_create(b->split ? 1 : (size_t)1 << 30, &queue) == HMOE_OK);
    back_reset(b, boot->rank);
    for (int i = 0; i < 4; i++) {
        struct hmoe_call call = case_call(&b->c, boot->rank);
        CHECK(hmoe_saved_create(bed.plan, NULL, &saved[i]) == HMOE_OK);
        call.saved = saved[i];
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
        late[i] = (struct hmoe_call){.size = sizeof late[i], .saved = saved[i]};
        back_gradients(b, boot->rank, &late[i].grad);
        CHECK(hmoe_backward_input(bed.plan, &late[i]) == HMOE_OK);
        CHECK(hmoe_w_queue_push(queue, bed.plan, &late[i]) == HMOE_OK);
        CHECK(hmoe_w_queue_length(queue) == (b->split ? 0 : i + 1));
    }
    CHECK(b->split || hmoe_w_queue_destroy(queue) == HMOE_ERR_STATE);
    CHECK(hmoe_w_queue_flush(queue, INT64_MAX, NULL) == HMOE_OK);
    CHECK(!back_differs(b, boot->rank));
    CHECK(hmoe_w_queue_destroy(queue) == HMOE_OK);
    for (int i = 0; i < 4; i++)
        CHECK(hmoe_saved_destroy(saved[i]) == HMOE_OK);
    return case_close(&bed);
}

static void test_weight_gradients_wait(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct back_case b = {.c = {.hidden = 40, .inner = 24, .experts = 4, .topk = 2, .ranks = 1 + i / 2,
                                    .dtype = HMOE_BF16, .workers = 2, .tokens = {30, 17}, .seed = 5},
                              .dw_mode = HMOE_ACCUMULATE, .dw_type = HMOE_F32, .split = i % 2};
        back_make(&b);
        for (int more = 0; more < 3; more++)
            back_oracle(&b); /* four in all */
        assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, b.c.ranks, waiting_rank, &b), HMOE_OK);
        back_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_bound),
        cmocka_unit_test(test_flush_some),
        cmocka_unit_test(test_large_and_failing),
        cmocka_unit_test(test_weight_gradients_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
