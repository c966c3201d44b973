/* The router: a softmax over the experts, the K largest renormalised (ties to the lower number), and a loss that
 * balances the load (Fedus et al. 2021, eq. 4): for each layer and shard E * sum over e of f_e * P_e, f the share of
 * slots that go to e, P its mean chance; averaged over layers and shards. */
#include "model/inner.h"

#include "base/num.h"

#include <string.h>

static void softmax(float *s, int count)
{
    float most = s[0], sum = 0.0f;

    for (int e = 1; e < count; e++)
        most = s[e] > most ? s[e] : most;
    for (int e = 0; e < count; e++) {
        s[e] = num_exp(s[e] - most);
        sum += s[e];
    }
    for (int e = 0; e < count; e++)
        s[e] /= sum;
}

/* The largest that is not among the first k of ids. */
static int32_t next_largest(const float *chance, int experts, const int32_t *ids, int k)
{
    int32_t best = -1;

    for (int32_t e = 0; e < experts; e++) {
        bool taken = false;
        for (int j = 0; j < k; j++)
            taken |= ids[j] == e;
        if (!taken && (best < 0 || chance[e] > chance[best]))
            best = e;
    }
    return best;
}

static void route_row(const struct model_config *c, struct layer_rows *rows, int64_t row)
{
    float *chance = rows->chance + row * c->experts, *weights = rows->weights + row * c->topk, sum = 0.0f;
    int32_t *ids = rows->ids + row * c->topk;

    softmax(chance, c->experts);
    for (int k = 0; k < c->topk; k++) {
        ids[k] = next_largest(chance, c->experts, ids, k);
        sum += chance[ids[k]];
    }
    for (int k = 0; k < c->topk; k++)
        weights[k] = chance[ids[k]] / sum;
}

struct routing {
    const struct pass *pass;
    struct layer_rows *rows;
    const float *d_weights;
    float *d_chance;
};

static int64_t *shard_load(const struct routing *r, int64_t shard)
{
    int experts = r->pass->model->config.experts;

    return r->rows->load + experts + shard * experts;
}

static void balance_shard(const struct routing *r, int64_t shard, int64_t first, int64_t rows)
{
    const struct model *m = r->pass->model;
    const struct model_config *c = &m->config;
    double loss = 0.0;

    for (int e = 0; e < c->experts; e++) {
        double mean = 0.0;
        for (int64_t row = first; row < first + rows; row++)
            mean += (double)r->rows->chance[row * c->experts + e];
        loss += (double)shard_load(r, shard)[e] / (double)(rows * c->topk) * mean / (double)rows;
    }
    m->shard_balance[shard] += loss * c->experts / c->layers;
}

static void route_shard(void *argument, int64_t shard, int thread)
{
    const struct routing *r = argument;
    const struct model_config *c = &r->pass->model->config;
    int64_t rows = r->pass->rows / r->pass->model->shards, first = shard * rows, *load = shard_load(r, shard);

    (void)thread;
    memset(load, 0, (size_t)c->experts * sizeof *load);
    for (int64_t row = first; row < first + rows; row++) {
        route_row(c, r->rows, row);
        for (int k = 0; k < c->topk; k++)
            load[r->rows->ids[row * c->topk + k]]++;
    }
    if (r->pass->learns)
        balance_shard(r, shard, first, rows);
}

static void route_one(void *argument, int64_t row, int thread)
{
    const struct routing *r = argument;

    (void)thread;
    route_row(&r->pass->model->config, r->rows, row);
}

void model_route(const struct pass *pass, struct layer_rows *rows)
{
    struct routing routing = {pass, rows, NULL, NULL};

    if (pass->rows == pass->model->rows)
        team_run(pass->model->team, pass->model->shards, route_shard, &routing);
    else
        team_run(pass->model->team, pass->rows, route_one, &routing);
}

/* ---- backward: into the logits */

/* dp of the chosen: (dw - sum over k of dw*w) / sum of their chances */
static void weights_back(const struct routing *r, int64_t row, float *dp)
{
    const struct model_config *c = &r->pass->model->config;
    const float *weights = r->rows->weights + row * c->topk, *dw = r->d_weights + row * c->topk;
    const int32_t *ids = r->rows->ids + row * c->topk;
    float sum = 0.0f, mean = 0.0f;

    for (int k = 0; k < c->topk; k++) {
        sum += r->rows->chance[row * c->experts + ids[k]];
        mean += dw[k] * weights[k];
    }
    for (int k = 0; k < c->topk; k++)
        dp[ids[k]] += (dw[k] - mean) / sum;
}

static void back_row(const struct routing *r, int64_t row, const float *d_balance)
{
    const struct model_config *c = &r->pass->model->config;
    const float *chance = r->rows->chance + row * c->experts;
    float *dp = r->d_chance + row * c->experts, mean = 0.0f;

    memcpy(dp, d_balance, (size_t)c->experts * sizeof *dp);
    weights_back(r, row, dp);
    for (int e = 0; e < c->experts; e++)
        mean += dp[e] * chance[e];
    for (int e = 0; e < c->experts; e++)
        dp[e] = chance[e] * (dp[e] - mean);
}

static void back_shard(void *argument, int64_t shard, int thread)
{
    const struct routing *r = argument;
    const struct model_config *c = &r->pass->model->config;
    int64_t rows = r->pass->rows / r->pass->model->shards;
    float d_balance[c->experts];

    (void)thread;
    for (int e = 0; e < c->experts; e++)
        d_balance[e] = r->pass->balance * (float)c->experts * (float)shard_load(r, shard)[e] /
                       ((float)(rows * c->topk) * (float)rows * (float)(c->layers * MODEL_SHARDS));
    for (int64_t row = shard * rows; row < (shard + 1) * rows; row++)
        back_row(r, row, d_balance);
}

void model_route_back(const struct pass *pass, const struct layer_rows *rows, const float *d_weights, float *d_chance)
{
    struct layer_rows copy = *rows;
    struct routing routing = {pass, &copy, d_weights, d_chance};

    team_run(pass->model->team, pass->model->shards, back_shard, &routing);
}

/* ---- loads of all ranks */

enum hmoe_status model_gather_load(const struct pass *pass)
{
    struct model *m = pass->model;
    int experts = m->config.experts, ranks = m->boot.ranks;
    int64_t mine[experts], all[experts * ranks];

    for (int l = 0; l < m->config.layers; l++) {
        int64_t *load = m->layer[l].load;
        memset(mine, 0, sizeof mine);
        for (int s = 0; s < m->shards; s++)
            for (int e = 0; e < experts; e++)
                mine[e] += load[experts + s * experts + e];
        if (comm_allgather(&m->comm, mine, all, sizeof mine, pass->error) != HMOE_OK)
            return pass->error->status;
        for (int e = 0; e < experts; e++) {
            load[e] = 0;
            for (int r = 0; r < ranks; r++)
                load[e] += all[r * experts + e];
        }
    }
    return HMOE_OK;
}
