/* Cross entropy of bytes, in nats. Row losses are summed within a shard in order, shards in the fixed tree. */
#include "model/inner.h"

#include "base/num.h"

#include <math.h>

enum { BLOCK = 32 };

static void loss_row(const struct pass *pass, int64_t row)
{
    const struct model *m = pass->model;
    float *logits = m->logits + row * MODEL_BYTES, most = logits[0], sum = 0.0f, scale, target;
    uint8_t wanted = pass->targets[row];

    for (int i = 1; i < MODEL_BYTES; i++)
        most = logits[i] > most ? logits[i] : most;
    target = logits[wanted] - most;
    for (int i = 0; i < MODEL_BYTES; i++) {
        logits[i] = num_exp(logits[i] - most);
        sum += logits[i];
    }
    m->row_loss[row] = logf(sum) - target;
    if (!pass->learns)
        return;
    scale = 1.0f / (float)(m->config.batch * m->config.context);
    for (int i = 0; i < MODEL_BYTES; i++)
        logits[i] = logits[i] / sum * scale;
    logits[wanted] -= scale;
}

static void loss_block(void *argument, int64_t block, int thread)
{
    const struct pass *pass = argument;
    int64_t last = (block + 1) * BLOCK < pass->rows ? (block + 1) * BLOCK : pass->rows;

    (void)thread;
    for (int64_t row = block * BLOCK; row < last; row++)
        loss_row(pass, row);
}

void model_losses(const struct pass *pass)
{
    struct pass copy = *pass;

    team_run(pass->model->team, (pass->rows + BLOCK - 1) / BLOCK, loss_block, &copy);
}

static double tree(const double *value, int count)
{
    return count == 1 ? value[0] : tree(value, count / 2) + tree(value + count / 2, count / 2);
}

enum hmoe_status model_mean_loss(const struct pass *pass, double *loss, double *balance)
{
    struct model *m = pass->model;
    int64_t rows = pass->rows / m->shards;
    double mine[2 * MODEL_SHARDS], all[2 * MODEL_SHARDS], sums[2][MODEL_SHARDS];

    for (int s = 0; s < m->shards; s++) {
        mine[2 * s] = 0.0;
        for (int64_t row = s * rows; row < (s + 1) * rows; row++)
            mine[2 * s] += (double)m->row_loss[row];
        mine[2 * s + 1] = m->shard_balance[s];
    }
    if (comm_allgather(&m->comm, mine, all, 2 * (size_t)m->shards * sizeof *mine, pass->error) != HMOE_OK)
        return pass->error->status;
    for (int s = 0; s < MODEL_SHARDS; s++) {
        sums[0][s] = all[2 * s];
        sums[1][s] = all[2 * s + 1];
    }
    *loss = tree(sums[0], MODEL_SHARDS) / (double)(m->config.batch * m->config.context);
    *balance = tree(sums[1], MODEL_SHARDS) / MODEL_SHARDS;
    return HMOE_OK;
}
