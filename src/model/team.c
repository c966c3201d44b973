#include "model/team.h"

#include "base/fpenv.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct member {
    struct team *team;
    pthread_t thread;
    int index;
};

struct team {
    int threads;
    struct member *member;
    pthread_mutex_t lock; /* of what follows, but for next */
    pthread_cond_t begin, end;
    uint64_t loop; /* counts loops; a change wakes the members */
    int working;   /* members that have not finished this loop */
    bool stop;
    team_body *body;
    void *argument;
    int64_t count;
    _Atomic int64_t next; /* relaxed: the lock orders the loops */
};

static void work(struct team *team, int thread)
{
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
        if (index >= team->count)
            return;
        team->body(team->argument, index, thread);
    }
}

static void *member_main(void *argument)
{
    struct member *member = argument;
    struct team *team = member->team;
    uint64_t before = base_fp_enter(), seen = 0;

    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->loop == seen && !team->stop)
            pthread_cond_wait(&team->begin, &team->lock);
        if (team->stop)
            break;
        seen = team->loop;
        pthread_mutex_unlock(&team->lock);
        work(team, member->index);
        pthread_mutex_lock(&team->lock);
        if (--team->working == 0)
            pthread_cond_signal(&team->end);
    }
    pthread_mutex_unlock(&team->lock);
    base_fp_leave(before);
    return NULL;
}

void team_run(struct team *team, int64_t count, team_body *body, void *argument)
{
    uint64_t before = base_fp_enter();

    pthread_mutex_lock(&team->lock);
    team->body = body;
    team->argument = argument;
    team->count = count;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    team->working = team->threads - 1;
    team->loop++;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    work(team, 0);
    pthread_mutex_lock(&team->lock);
    while (team->working)
        pthread_cond_wait(&team->end, &team->lock);
    pthread_mutex_unlock(&team->lock);
    base_fp_leave(before);
}

enum hmoe_status team_create(struct team **made, int threads, struct base_error *error)
{
    struct team *team = calloc(1, sizeof *team);

    if (!team || !(team->member = calloc((size_t)threads, sizeof *team->member))) {
        free(team);
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for %d threads", threads);
    }
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->begin, NULL);
    pthread_cond_init(&team->end, NULL);
    for (team->threads = 1; team->threads < threads; team->threads++) {
        struct member *member = &team->member[team->threads];
        int failed;
        *member = (struct member){.team = team, .index = team->threads};
        failed = pthread_create(&member->thread, NULL, member_main, member);
        if (failed) {
            base_fail(error, HMOE_ERR_SYSTEM, "cannot start thread %d of %d: %s", team->threads, threads,
                      strerror(failed));
            team_destroy(team);
            return error->status;
        }
    }
    *made = team;
    return HMOE_OK;
}

void team_destroy(struct team *team)
{
    pthread_mutex_lock(&team->lock);
    team->stop = true;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    for (int i = 1; i < team->threads; i++)
        pthread_join(team->member[i].thread, NULL);
    pthread_cond_destroy(&team->begin);
    pthread_cond_destroy(&team->end);
    pthread_mutex_destroy(&team->lock);
    free(team->member);
    free(team);
}
