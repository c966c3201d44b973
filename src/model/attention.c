/* Causal attention of one sequence and head at a time, with rotary positions (Su et al. 2021). Inner loops run over
 * positions or over a head's columns, so that they vectorise without changing the order of a sum. */
#include "model/inner.h"

#include "base/num.h"

#include <math.h>
#include <string.h>

void model_rotations(struct model *m)
{
    int64_t half = m->config.width / m->config.heads / 2;

    for (int64_t p = 0; p < m->config.context; p++)
        for (int64_t d = 0; d < half; d++) {
            double angle = (double)p * pow(10000.0, -(double)d / (double)half);
            m->cosine[p * half + d] = (float)cos(angle);
            m->sine[p * half + d] = (float)sin(angle);
        }
}

/* Turns column d against column d + half; direction -1 turns back. */
static void rotate(const struct model *m, float *head, int64_t position, float direction)
{
    int64_t half = m->config.width / m->config.heads / 2;
    const float *cosine = m->cosine + position * half, *sine = m->sine + position * half;

    for (int64_t d = 0; d < half; d++) {
        float a = head[d], b = head[d + half], s = direction * sine[d];
        head[d] = a * cosine[d] - b * s;
        head[d + half] = a * s + b * cosine[d];
    }
}

/* One sequence and head. */
struct head {
    const struct pass *pass;
    struct layer_rows *rows;
    int64_t size, width, length, first; /* of a head, of a row, of the sequence; its first row */
    float *qkv;                         /* of the head: q; k and v lie width further each */
    float *share;                       /* [length,length] */
    float *mixed;
    const float *d_mixed;
    float *d_qkv;
};

struct heads {
    const struct pass *pass;
    struct layer_rows *rows;
    const float *d_mixed;
    float *d_qkv;
};

static struct head head_at(const struct heads *all, int64_t index)
{
    const struct pass *pass = all->pass;
    const struct model_config *c = &pass->model->config;
    int64_t sequence = index / c->heads, h = index % c->heads, size = c->width / c->heads;
    int64_t first = sequence * pass->length;
    struct head head = {.pass = pass, .rows = all->rows, .size = size, .width = c->width, .length = pass->length,
                        .first = first};

    head.qkv = all->rows->qkv + first * 3 * c->width + h * size;
    head.share = all->rows->share + index * pass->length * pass->length;
    head.mixed = all->rows->mixed + first * c->width + h * size;
    if (all->d_mixed) {
        head.d_mixed = all->d_mixed + first * c->width + h * size;
        head.d_qkv = all->d_qkv + first * 3 * c->width + h * size;
    }
    return head;
}

/* columns[d * length + j] = row j's column d of q (0), k (1) or v (2) */
static void turn(const struct head *head, int which, float *columns)
{
    for (int64_t j = 0; j < head->length; j++)
        for (int64_t d = 0; d < head->size; d++)
            columns[d * head->length + j] = head->qkv[j * 3 * head->width + which * head->width + d];
}

static void softmax(float *s, int64_t count)
{
    float most = s[0], sum = 0.0f;

    for (int64_t j = 1; j < count; j++)
        most = s[j] > most ? s[j] : most;
    for (int64_t j = 0; j < count; j++)
        s[j] = num_exp(s[j] - most);
    for (int64_t j = 0; j < count; j++)
        sum += s[j];
    for (int64_t j = 0; j < count; j++)
        s[j] /= sum;
}

/* to[j] = sum over d of row[d] * columns[d][j], for j below count */
static void against_columns(const struct head *head, const float *row, const float *columns, int64_t count, float *to)
{
    memset(to, 0, (size_t)count * sizeof *to);
    for (int64_t d = 0; d < head->size; d++)
        for (int64_t j = 0; j < count; j++)
            to[j] += row[d] * columns[d * head->length + j];
}

static void head_forward(void *argument, int64_t index, int thread)
{
    struct head head = head_at(argument, index);
    int64_t step = 3 * head.width;
    float columns[head.size * head.length], scale = 1.0f / sqrtf((float)head.size);

    (void)thread;
    for (int64_t i = 0; i < head.length; i++) {
        rotate(head.pass->model, head.qkv + i * step, i, 1.0f);
        rotate(head.pass->model, head.qkv + i * step + head.width, i, 1.0f);
    }
    turn(&head, 1, columns);
    for (int64_t i = 0; i < head.length; i++) {
        float *share = head.share + i * head.length, *mixed = head.mixed + i * head.width;
        against_columns(&head, head.qkv + i * step, columns, i + 1, share);
        for (int64_t j = 0; j <= i; j++)
            share[j] *= scale;
        softmax(share, i + 1);
        memset(mixed, 0, (size_t)head.size * sizeof *mixed);
        for (int64_t j = 0; j <= i; j++)
            for (int64_t d = 0; d < head.size; d++)
                mixed[d] += share[j] * head.qkv[j * step + 2 * head.width + d];
    }
}

void model_attention(const struct pass *pass, struct layer_rows *rows)
{
    struct heads all = {pass, rows, NULL, NULL};

    team_run(pass->model->team, pass->sequences * pass->model->config.heads, head_forward, &all);
}

/* ds[j] = share * (dp[j] - sum over j of share * dp) * scale, in place of dp */
static void softmax_back(const float *share, float *dp, int64_t count, float scale)
{
    float sum = 0.0f;

    for (int64_t j = 0; j < count; j++)
        sum += share[j] * dp[j];
    for (int64_t j = 0; j < count; j++)
        dp[j] = share[j] * (dp[j] - sum) * scale;
}

static void row_backward(const struct head *head, const float *columns, int64_t i)
{
    int64_t step = 3 * head->width, width = head->width;
    const float *share = head->share + i * head->length, *dm = head->d_mixed + i * width, *q = head->qkv + i * step;
    float ds[MODEL_CONTEXT_MOST], *dq = head->d_qkv + i * step;

    against_columns(head, dm, columns, i + 1, ds);
    softmax_back(share, ds, i + 1, 1.0f / sqrtf((float)head->size));
    for (int64_t j = 0; j <= i; j++) {
        const float *k = head->qkv + j * step + width;
        float *dk = head->d_qkv + j * step + width, *dv = dk + width;
        for (int64_t d = 0; d < head->size; d++) {
            dq[d] += ds[j] * k[d];
            dk[d] += ds[j] * q[d];
            dv[d] += share[j] * dm[d];
        }
    }
}

static void head_backward(void *argument, int64_t index, int thread)
{
    struct head head = head_at(argument, index);
    int64_t step = 3 * head.width;
    float columns[head.size * head.length];

    (void)thread;
    turn(&head, 2, columns);
    for (int64_t i = 0; i < head.length; i++)
        for (int which = 0; which < 3; which++)
            memset(head.d_qkv + i * step + which * head.width, 0, (size_t)head.size * sizeof(float));
    for (int64_t i = 0; i < head.length; i++)
        row_backward(&head, columns, i);
    for (int64_t i = 0; i < head.length; i++) {
        rotate(head.pass->model, head.d_qkv + i * step, i, -1.0f);
        rotate(head.pass->model, head.d_qkv + i * step + head.width, i, -1.0f);
    }
}

void model_attention_back(const struct pass *pass, const struct layer_rows *rows, const float *d_mixed, float *d_qkv)
{
    struct layer_rows copy = *rows;
    struct heads all = {pass, &copy, d_mixed, d_qkv};

    team_run(pass->model->team, pass->sequences * pass->model->config.heads, head_backward, &all);
}
