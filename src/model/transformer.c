/* Forward and backward of the whole stack, layer by layer. Gradients of dense tensors go to each shard's own vector;
 * the experts' accumulate where the fused layer puts them. */
#include "model/inner.h"

#include <string.h>

static float *shard_grad(const struct model *m, int64_t offset)
{
    return m->shard_grad + offset;
}

static void multiply(const struct pass *pass, const float *x, int64_t terms, const float *w, int64_t columns,
                     float *y)
{
    linear_multiply(&pass->model->linear, &(struct linear_product){x, w, pass->rows, terms, columns, HMOE_KN, y});
}

/* The gradient of x = y * w^T: w [columns,terms] of the forward, as it lies. */
static void multiply_back(const struct pass *pass, const float *dy, int64_t terms, const float *w, int64_t columns,
                          float *dx)
{
    linear_multiply(&pass->model->linear, &(struct linear_product){dy, w, pass->rows, terms, columns, HMOE_NK, dx});
}

static void outer(const struct pass *pass, const float *left, int64_t left_columns, const float *right,
                  int64_t right_columns, int64_t offset)
{
    struct model *m = pass->model;

    linear_outer(&m->linear, &(struct linear_outer){left, right, pass->rows, left_columns, right_columns, m->shards,
                                                    shard_grad(m, offset), m->dense});
}

static struct norm norm_of(const struct pass *pass, const float *x, int64_t gain, float *scale, float *y)
{
    return (struct norm){x, dense_at(pass->model, gain), scale, y, pass->rows, pass->model->config.width};
}

static void norm_back(const struct pass *pass, struct norm forward, int64_t gain, const float *dy, float *dx)
{
    struct model *m = pass->model;

    model_norm_back(m->team, &(struct norm_back){forward, dy, dx, shard_grad(m, gain), m->shards, m->dense});
}

/* ---- small loops over rows */

struct rows {
    const float *a, *b;
    float *to;
    int64_t width, rows;
};

enum { BLOCK = 64 };

static void add_block(void *argument, int64_t block, int thread)
{
    const struct rows *r = argument;
    int64_t last = (block + 1) * BLOCK < r->rows ? (block + 1) * BLOCK : r->rows;

    (void)thread;
    for (int64_t i = block * BLOCK * r->width; i < last * r->width; i++)
        r->to[i] = r->a[i] + r->b[i];
}

/* to = a + b */
static void add(const struct pass *pass, const float *a, const float *b, float *to)
{
    struct rows rows = {a, b, to, pass->model->config.width, pass->rows};

    team_run(pass->model->team, (pass->rows + BLOCK - 1) / BLOCK, add_block, &rows);
}

static void embed(const struct pass *pass, float *x)
{
    const struct model *m = pass->model;
    size_t bytes = (size_t)m->config.width * sizeof *x;

    for (int64_t row = 0; row < pass->rows; row++)
        memcpy(x + row * m->config.width, dense_at(m, m->embedding) + pass->inputs[row] * m->config.width, bytes);
}

/* ---- the experts, by the fused layer */

static struct hmoe_call call_of(const struct pass *pass, int l)
{
    struct model *m = pass->model;
    struct layer_rows *r = &m->layer[l];

    return (struct hmoe_call){.size = sizeof(struct hmoe_call), .tokens = pass->rows, .x = r->h2, .topk_ids = r->ids,
                              .topk_weights = r->weights, .ids_type = HMOE_I32, .weights_type = HMOE_F32,
                              .layer = {.up_proj = m->value[1] + m->at[l].up, .down_proj = m->value[1] + m->at[l].down},
                              .y = m->moe_out, .saved = pass->learns ? r->saved : NULL, .layer_number = l};
}

static enum hmoe_status moe(const struct pass *pass, enum hmoe_status status)
{
    return status == HMOE_OK ? status : base_fail(pass->error, status, "%s", hmoe_last_error());
}

static enum hmoe_status moe_back(const struct pass *pass, int l, const float *dy, float *dx)
{
    struct model *m = pass->model;
    struct hmoe_call call = {.size = sizeof call, .saved = m->layer[l].saved, .layer_number = l,
                             .grad = {.dy = dy, .dx = dx, .d_topk_weights = m->d_weights,
                                      .d_up_proj = m->grad[1] + m->at[l].up,
                                      .d_down_proj = m->grad[1] + m->at[l].down}};

    return moe(pass, hmoe_backward(m->plan, &call));
}

/* ---- forward */

static enum hmoe_status layer_forward(const struct pass *pass, int l, float *next)
{
    struct model *m = pass->model;
    const struct layer_at *at = &m->at[l];
    struct layer_rows *r = &m->layer[l];
    int64_t D = m->config.width;
    struct norm norm1 = norm_of(pass, r->x, at->norm1, r->scale1, r->h1);
    struct norm norm2 = norm_of(pass, r->middle, at->norm2, r->scale2, r->h2);
    struct hmoe_call call = call_of(pass, l);

    model_norm(m->team, &norm1);
    multiply(pass, r->h1, D, dense_at(m, at->qkv), 3 * D, r->qkv);
    model_attention(pass, r);
    multiply(pass, r->mixed, D, dense_at(m, at->out), D, m->d[0]);
    add(pass, r->x, m->d[0], r->middle);
    model_norm(m->team, &norm2);
    multiply(pass, r->h2, D, dense_at(m, at->router), m->config.experts, r->chance);
    model_route(pass, r);
    if (moe(pass, hmoe_forward(m->plan, &call)) != HMOE_OK)
        return pass->error->status;
    add(pass, r->middle, m->moe_out, next);
    return HMOE_OK;
}

enum hmoe_status model_forward(const struct pass *pass)
{
    struct model *m = pass->model;
    int layers = m->config.layers;
    struct norm norm = norm_of(pass, m->last, m->final_norm, m->last_scale, m->last_norm);

    embed(pass, m->layer[0].x);
    for (int l = 0; l < layers; l++)
        if (layer_forward(pass, l, l + 1 < layers ? m->layer[l + 1].x : m->last) != HMOE_OK)
            return pass->error->status;
    model_norm(m->team, &norm);
    multiply_back(pass, m->last_norm, m->config.width, dense_at(m, m->embedding), MODEL_BYTES, m->logits);
    return HMOE_OK;
}

/* ---- backward: `stream` is the gradient of what a layer put out, and becomes that of what it took in */

static void attention_back(const struct pass *pass, int l, float *stream)
{
    struct model *m = pass->model;
    const struct layer_at *at = &m->at[l];
    struct layer_rows *r = &m->layer[l];
    int64_t D = m->config.width;

    outer(pass, r->mixed, D, stream, D, at->out);
    multiply_back(pass, stream, D, dense_at(m, at->out), D, m->d[1]);
    model_attention_back(pass, r, m->d[1], m->d[2]);
    outer(pass, r->h1, D, m->d[2], 3 * D, at->qkv);
    multiply_back(pass, m->d[2], 3 * D, dense_at(m, at->qkv), D, m->d[1]);
    norm_back(pass, norm_of(pass, r->x, at->norm1, r->scale1, r->h1), at->norm1, m->d[1], stream);
}

static enum hmoe_status experts_back(const struct pass *pass, int l, float *stream)
{
    struct model *m = pass->model;
    const struct layer_at *at = &m->at[l];
    struct layer_rows *r = &m->layer[l];
    int64_t D = m->config.width;

    if (moe_back(pass, l, stream, m->d[1]) != HMOE_OK)
        return pass->error->status;
    model_route_back(pass, r, m->d_weights, m->d_chance);
    outer(pass, r->h2, D, m->d_chance, m->config.experts, at->router);
    multiply_back(pass, m->d_chance, m->config.experts, dense_at(m, at->router), D, m->d[2]);
    add(pass, m->d[1], m->d[2], m->d[1]);
    norm_back(pass, norm_of(pass, r->middle, at->norm2, r->scale2, r->h2), at->norm2, m->d[1], stream);
    return HMOE_OK;
}

/* The rows of a shard were looked up one after the other. */
static void embedding_shard(void *argument, int64_t shard, int thread)
{
    const struct pass *pass = argument;
    const struct model *m = pass->model;
    int64_t D = m->config.width, rows = pass->rows / m->shards;
    float *grad = shard_grad(m, m->embedding) + shard * m->dense;

    (void)thread;
    for (int64_t row = shard * rows; row < (shard + 1) * rows; row++)
        for (int64_t i = 0; i < D; i++)
            grad[pass->inputs[row] * D + i] += m->d[0][row * D + i];
}

enum hmoe_status model_backward(const struct pass *pass)
{
    struct model *m = pass->model;
    int64_t D = m->config.width;
    float *stream = m->d[0];
    struct pass copy = *pass;

    outer(pass, m->logits, MODEL_BYTES, m->last_norm, D, m->embedding);
    multiply(pass, m->logits, MODEL_BYTES, dense_at(m, m->embedding), D, m->d[1]);
    memset(stream, 0, (size_t)(pass->rows * D) * sizeof *stream);
    norm_back(pass, norm_of(pass, m->last, m->final_norm, m->last_scale, m->last_norm), m->final_norm, m->d[1], stream);
    for (int l = m->config.layers - 1; l >= 0; l--) {
        if (experts_back(pass, l, stream) != HMOE_OK)
            return pass->error->status;
        attention_back(pass, l, stream);
    }
    team_run(m->team, m->shards, embedding_shard, &copy);
    return HMOE_OK;
}
