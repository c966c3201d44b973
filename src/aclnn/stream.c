/* Streams: a queue and a thread that works through it. */
#include "aclnn/aclnn.h"

#include <stdio.h>
#include <stdlib.h>

struct job {
    struct aclnn_work work;
    struct job *next;
};

struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct job *first, **last;
    bool busy, ends;
    aclnnStatus status; /* of the first failure that nobody was told of */
    char text[ACLNN_TEXT_BYTES];
};

static struct job *next_job(struct stream *stream)
{
    struct job *job;

    pthread_mutex_lock(&stream->lock);
    stream->busy = false;
    pthread_cond_broadcast(&stream->changed);
    while (!stream->first && !stream->ends)
        pthread_cond_wait(&stream->changed, &stream->lock);
    job = stream->first;
    if (job) {
        stream->first = job->next;
        if (!stream->first)
            stream->last = &stream->first;
        stream->busy = true;
    }
    pthread_mutex_unlock(&stream->lock);
    return job;
}

static void note(struct stream *stream, aclnnStatus status)
{
    pthread_mutex_lock(&stream->lock);
    if (status != ACLNN_SUCCESS && stream->status == ACLNN_SUCCESS) {
        stream->status = status;
        snprintf(stream->text, sizeof stream->text, "%s", aclGetRecentErrMsg());
    }
    pthread_mutex_unlock(&stream->lock);
}

static void *work_off(void *argument)
{
    struct stream *stream = argument;

    for (struct job *job; (job = next_job(stream)); free(job))
        note(stream, aclnn_run(&job->work));
    return NULL;
}

aclError aclrtCreateStream(aclrtStream *made)
{
    struct stream *stream;

    if (!made)
        return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "stream is NULL");
    stream = calloc(1, sizeof *stream);
    if (!stream)
        return aclnn_fail(ACLNN_ERR_INNER, "no memory for a stream");
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->last = &stream->first;
    if (pthread_create(&stream->thread, NULL, work_off, stream) == 0) {
        *made = stream;
        return ACL_SUCCESS;
    }
    free(stream);
    return aclnn_fail(ACLNN_ERR_INNER, "no thread for a stream");
}

aclnnStatus aclnn_enqueue(aclrtStream handle, const struct aclnn_work *work)
{
    struct stream *stream = handle;
    struct job *job = malloc(sizeof *job);

    if (!job)
        return aclnn_fail(ACLNN_ERR_INNER, "no memory to queue a call");
    job->work = *work;
    job->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *stream->last = job;
    stream->last = &job->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return ACLNN_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream handle)
{
    struct stream *stream = handle;
    aclnnStatus status;

    if (!stream)
        return ACL_SUCCESS; /* nothing is ever left to do there */
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    status = stream->status;
    stream->status = ACLNN_SUCCESS;
    if (status != ACLNN_SUCCESS)
        aclnn_fail_again(stream->text);
    pthread_mutex_unlock(&stream->lock);
    return status;
}

aclError aclrtDestroyStream(aclrtStream handle)
{
    struct stream *stream = handle;
    aclnnStatus status;

    if (!stream)
        return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "stream is NULL");
    status = aclrtSynchronizeStream(stream);
    pthread_mutex_lock(&stream->lock);
    stream->ends = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->changed);
    free(stream);
    return status;
}
