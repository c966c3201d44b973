/* Gradients summed over shards and ranks, clipped by their global norm, then AdamW (Loshchilov and Hutter 2019) with
 * warm-up and a cosine. Dense tensors are updated by every rank alike, experts by the rank that has them. */
#include "model/inner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double sum_squares(const float *value, int64_t count)
{
    double sum = 0.0;

    for (int64_t i = 0; i < count; i++)
        sum += (double)value[i] * (double)value[i];
    return sum;
}

/* One of my experts in one layer: its two gradients. */
static double expert_squares(const struct model *m, int l, int e)
{
    int64_t matrix = (int64_t)m->config.width * m->config.inner;

    return sum_squares(m->grad[1] + m->at[l].up + e * 2 * matrix, 2 * matrix) +
           sum_squares(m->grad[1] + m->at[l].down + e * matrix, matrix);
}

struct squares {
    const struct model *model;
    double *of_expert; /* [layers, my experts] */
};

static void expert_task(void *argument, int64_t index, int thread)
{
    const struct squares *job = argument;
    int experts = job->model->experts;

    (void)thread;
    job->of_expert[index] = expert_squares(job->model, (int)(index / experts), (int)(index % experts));
}

/* Each layer's experts in order of their numbers, then the layers: the same sum for every number of ranks. */
static double add_experts(const struct model *m, const double *all)
{
    double sum = 0.0;

    for (int l = 0; l < m->config.layers; l++)
        for (int r = 0; r < m->boot.ranks; r++)
            for (int e = 0; e < m->experts; e++)
                sum += all[(r * m->config.layers + l) * m->experts + e];
    return sum;
}

static enum hmoe_status gradient_norm(struct model *m, double *norm, struct base_error *error)
{
    int64_t count = (int64_t)m->config.layers * m->experts;
    double mine[count], all[count * m->boot.ranks], sum = 0.0;
    struct squares job = {m, mine};

    team_run(m->team, count, expert_task, &job);
    if (comm_allgather(&m->comm, mine, all, sizeof mine, error) != HMOE_OK)
        return error->status;
    for (int i = 0; i < m->tensors; i++)
        if (!m->tensor[i].expert)
            sum += sum_squares(m->grad[0] + m->tensor[i].offset, m->tensor[i].count);
    *norm = sqrt(sum + add_experts(m, all));
    return HMOE_OK;
}

static double rate_at(const struct model_optimizer *o, int64_t step)
{
    double rate = (double)o->rate, least = (double)o->least_rate, done;

    if (step < o->warmup)
        return rate * (double)(step + 1) / (double)o->warmup;
    done = (double)(step - o->warmup) / (double)(o->steps > o->warmup ? o->steps - o->warmup : 1);
    done = done > 1.0 ? 1.0 : done;
    return least + (rate - least) * 0.5 * (1.0 + cos(3.14159265358979323846 * done));
}

/* ---- the step itself, a piece of a tensor at a time */

enum { PIECE = 16384 };

struct update {
    struct model *model;
    const struct model_optimizer *optimizer;
    float rate, clip, fix1, fix2; /* fix: 1 / (1 - beta^t) */
    int vector;
    bool decays;
    int64_t first, count;
};

static void update_piece(void *argument, int64_t piece, int thread)
{
    const struct update *u = argument;
    const struct model_optimizer *o = u->optimizer;
    int64_t begin = u->first + piece * PIECE, end = u->first + u->count;
    float *value = u->model->value[u->vector], *m = u->model->first[u->vector], *v = u->model->second[u->vector];
    const float *grad = u->model->grad[u->vector];

    (void)thread;
    end = begin + PIECE < end ? begin + PIECE : end;
    for (int64_t i = begin; i < end; i++) {
        float g = grad[i] * u->clip;
        m[i] = o->beta1 * m[i] + (1.0f - o->beta1) * g;
        v[i] = o->beta2 * v[i] + (1.0f - o->beta2) * g * g;
        if (u->decays)
            value[i] -= u->rate * o->decay * value[i];
        value[i] -= u->rate * (m[i] * u->fix1) / (sqrtf(v[i] * u->fix2) + o->epsilon);
    }
}

static void update_range(struct update u, int vector, int64_t first, int64_t count, bool decays)
{
    u.vector = vector;
    u.first = first;
    u.count = count;
    u.decays = decays;
    team_run(u.model->team, (count + PIECE - 1) / PIECE, update_piece, &u);
}

enum hmoe_status model_learn(struct model *m, const struct model_optimizer *o, struct model_report *report,
                             struct base_error *error)
{
    float *mine[MODEL_SHARDS];
    double t = (double)(m->step + 1);
    struct update u = {.model = m, .optimizer = o, .rate = (float)rate_at(o, m->step),
                       .fix1 = (float)(1.0 / (1.0 - pow((double)o->beta1, t))),
                       .fix2 = (float)(1.0 / (1.0 - pow((double)o->beta2, t)))};

    for (int s = 0; s < m->shards; s++)
        mine[s] = m->shard_grad + s * m->dense;
    if (comm_sum(m->sum, mine, m->grad[0], m->dense, error) != HMOE_OK ||
        gradient_norm(m, &report->norm, error) != HMOE_OK)
        return error->status;
    u.clip = report->norm > (double)o->clip ? (float)((double)o->clip / report->norm) : 1.0f;
    for (int i = 0; i < m->tensors; i++)
        if (!m->tensor[i].expert)
            update_range(u, 0, m->tensor[i].offset, m->tensor[i].count, m->tensor[i].decays);
    update_range(u, 1, 0, m->own, true);
    report->rate = (double)u.rate;
    m->step++;
    return HMOE_OK;
}
