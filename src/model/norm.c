/* RMSNorm (Zhang and Sennrich 2019), rows in blocks, its gain's gradient by shards. */
#include "model/inner.h"

#include <math.h>

enum { BLOCK = 32 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void norm_row(const struct norm *n, int64_t row)
{
    const float *x = n->x + row * n->width;
    float *y = n->y + row * n->width, sum = 0.0f;

    for (int64_t i = 0; i < n->width; i++)
        sum += x[i] * x[i];
    n->scale[row] = 1.0f / sqrtf(sum / (float)n->width + 1e-5f);
    for (int64_t i = 0; i < n->width; i++)
        y[i] = x[i] * n->scale[row] * n->gain[i];
}

static void norm_block(void *argument, int64_t block, int thread)
{
    const struct norm *n = argument;

    (void)thread;
    for (int64_t row = block * BLOCK; row < least((block + 1) * BLOCK, n->rows); row++)
        norm_row(n, row);
}

void model_norm(struct team *team, const struct norm *norm)
{
    struct norm job = *norm;

    team_run(team, (norm->rows + BLOCK - 1) / BLOCK, norm_block, &job);
}

/* dx += scale * (dy*gain - x * scale^2 / D * <dy*gain, x>) */
static void back_row(const struct norm_back *b, int64_t row)
{
    const struct norm *n = &b->forward;
    const float *x = n->x + row * n->width, *dy = b->dy + row * n->width;
    float *dx = b->dx + row * n->width, scale = n->scale[row], sum = 0.0f;

    for (int64_t i = 0; i < n->width; i++)
        sum += dy[i] * n->gain[i] * x[i];
    sum = sum * scale * scale / (float)n->width;
    for (int64_t i = 0; i < n->width; i++)
        dx[i] += scale * (dy[i] * n->gain[i] - x[i] * sum);
}

static void back_block(void *argument, int64_t block, int thread)
{
    const struct norm_back *b = argument;

    (void)thread;
    for (int64_t row = block * BLOCK; row < least((block + 1) * BLOCK, b->forward.rows); row++)
        back_row(b, row);
}

static void gain_shard(void *argument, int64_t shard, int thread)
{
    const struct norm_back *b = argument;
    const struct norm *n = &b->forward;
    int64_t rows = n->rows / b->shards;
    float *gain = b->d_gain + shard * b->stride;

    (void)thread;
    for (int64_t i = 0; i < n->width; i++)
        gain[i] = 0.0f;
    for (int64_t row = shard * rows; row < (shard + 1) * rows; row++)
        for (int64_t i = 0; i < n->width; i++)
            gain[i] += b->dy[row * n->width + i] * n->x[row * n->width + i] * n->scale[row];
}

void model_norm_back(struct team *team, const struct norm_back *back)
{
    struct norm_back job = *back;

    team_run(team, (back->forward.rows + BLOCK - 1) / BLOCK, back_block, &job);
    team_run(team, back->shards, gain_shard, &job);
}
