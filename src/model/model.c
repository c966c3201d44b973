/* A rank's model: made, stepped, asked. */
#include "model/inner.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

static const int64_t limit_ns = 300000000000; /* of a wait for another rank */

/* ---- memory */

/* A pass is a part of a batch, or one sequence. */
static int64_t rows_most(const struct model *m)
{
    return m->rows > m->config.context ? m->rows : m->config.context;
}

static void bind_layer(struct model *m, struct layer_rows *r, struct base_carve *at)
{
    const struct model_config *c = &m->config;
    size_t f = sizeof(float), rows = (size_t)rows_most(m), D = (size_t)c->width;
    size_t context = (size_t)c->context, experts = (size_t)c->experts;

    r->x = base_carve(at, rows * D * f);
    r->h1 = base_carve(at, rows * D * f);
    r->qkv = base_carve(at, rows * 3 * D * f);
    r->share = base_carve(at, rows / context * (size_t)c->heads * context * context * f);
    r->mixed = base_carve(at, rows * D * f);
    r->middle = base_carve(at, rows * D * f);
    r->h2 = base_carve(at, rows * D * f);
    r->scale1 = base_carve(at, rows * f);
    r->scale2 = base_carve(at, rows * f);
    r->chance = base_carve(at, rows * experts * f);
    r->ids = base_carve(at, rows * (size_t)c->topk * sizeof *r->ids);
    r->weights = base_carve(at, rows * (size_t)c->topk * f);
    r->load = base_carve(at, (size_t)(m->shards + 1) * experts * sizeof *r->load);
}

static void bind_rows(struct model *m, struct base_carve *at)
{
    const struct model_config *c = &m->config;
    size_t f = sizeof(float), rows = (size_t)rows_most(m), D = (size_t)c->width;

    m->last = base_carve(at, rows * D * f);
    m->last_norm = base_carve(at, rows * D * f);
    m->last_scale = base_carve(at, rows * f);
    m->logits = base_carve(at, rows * MODEL_BYTES * f);
    m->row_loss = base_carve(at, rows * f);
    m->moe_out = base_carve(at, rows * D * f);
    for (int i = 0; i < 4; i++)
        m->d[i] = base_carve(at, rows * 3 * D * f);
    m->d_weights = base_carve(at, rows * (size_t)c->topk * f);
    m->d_chance = base_carve(at, rows * (size_t)c->experts * f);
    m->shard_balance = base_carve(at, MODEL_SHARDS * sizeof *m->shard_balance);
    m->cosine = base_carve(at, (size_t)c->context * D * f);
    m->sine = base_carve(at, (size_t)c->context * D * f);
}

static size_t bind(struct model *m, void *memory)
{
    struct base_carve at = {memory, 0};
    int64_t floats[2] = {m->dense, m->own};

    for (int v = 0; v < 2; v++) {
        size_t bytes = (size_t)floats[v] * sizeof(float);
        m->value[v] = base_carve(&at, bytes);
        m->grad[v] = base_carve(&at, bytes);
        m->first[v] = base_carve(&at, bytes);
        m->second[v] = base_carve(&at, bytes);
    }
    m->shard_grad = base_carve(&at, (size_t)(m->shards * m->dense) * sizeof(float));
    bind_rows(m, &at);
    for (int l = 0; l < m->config.layers; l++) {
        struct layer_rows throw_away;
        bind_layer(m, memory ? &m->layer[l] : &throw_away, &at);
    }
    return at.used;
}

/* ---- where things are */

static void locate(struct model *m)
{
    const struct model_config *c = &m->config;
    int64_t matrix = (int64_t)m->experts * c->width * c->inner, own = 0;
    const struct model_tensor *t = m->tensor;

    m->embedding = t++->offset;
    for (int l = 0; l < c->layers; l++, t += 5, own += 3 * matrix)
        m->at[l] = (struct layer_at){t[0].offset, t[1].offset, t[2].offset, t[3].offset, t[4].offset, own,
                                     own + 2 * matrix};
    m->final_norm = t->offset;
    m->dense = t->offset + t->count;
    m->own = own;
}

static enum hmoe_status make_tables(struct model *m, struct base_error *error)
{
    size_t layers = (size_t)m->config.layers;

    m->tensors = model_tensors(&m->config, NULL);
    m->tensor = calloc((size_t)m->tensors, sizeof *m->tensor);
    m->at = calloc(layers, sizeof *m->at);
    m->layer = calloc(layers, sizeof *m->layer);
    if (!m->tensor || !m->at || !m->layer)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a model's tables");
    model_tensors(&m->config, m->tensor);
    m->shards = MODEL_SHARDS / m->boot.ranks;
    m->experts = m->config.experts / m->boot.ranks;
    m->rows = (int64_t)m->config.batch / m->boot.ranks * m->config.context;
    locate(m);
    m->memory_bytes = bind(m, NULL);
    m->memory = base_map(m->memory_bytes, 1);
    if (!m->memory)
        return base_fail(error, HMOE_ERR_MEMORY, "the model needs %zu bytes", m->memory_bytes);
    bind(m, m->memory);
    return HMOE_OK;
}

/* ---- made */

static int64_t widest(const struct model_config *c)
{
    int64_t most = 3 * (int64_t)c->width;

    most = most > MODEL_BYTES ? most : MODEL_BYTES;
    return most > c->experts ? most : c->experts;
}

static enum hmoe_status make_layer(struct model *m, struct base_error *error)
{
    const struct model_config *c = &m->config;
    struct hmoe_group_options group = {.size = sizeof group, .rank = m->boot.rank, .ranks = m->boot.ranks,
                                       .workers = m->boot.workers, .allgather = m->boot.allgather,
                                       .allgather_context = m->boot.context, .knobs = m->boot.knobs};
    struct hmoe_plan_options plan = {.size = sizeof plan, .hidden = c->width, .inner = c->inner, .experts = c->experts,
                                     .topk = c->topk, .tokens_max = rows_most(m),
                                     .dtype = HMOE_F32, .training = 1};
    enum hmoe_status status = hmoe_group_create(&group, &m->group);

    if (status == HMOE_OK)
        status = hmoe_plan_create(m->group, &plan, &m->plan);
    for (int l = 0; l < c->layers && status == HMOE_OK; l++)
        status = hmoe_saved_create(m->plan, NULL, &m->layer[l].saved);
    return status == HMOE_OK ? status : base_fail(error, status, "%s", hmoe_last_error());
}

static int copy_alone(void *context, const void *mine, void *all, size_t bytes)
{
    (void)context;
    memcpy(all, mine, bytes);
    return 0;
}

static enum hmoe_status make_parts(struct model *m, struct base_error *error)
{
    struct comm_boot boot = {m->boot.rank, m->boot.ranks, m->boot.allgather ? m->boot.allgather : copy_alone,
                             m->boot.context};

    if (make_tables(m, error) != HMOE_OK || team_create(&m->team, m->boot.workers, error) != HMOE_OK ||
        linear_create(&m->linear, m->team, m->boot.workers, rows_most(m), widest(&m->config), error) != HMOE_OK ||
        comm_open(&m->comm, &boot, "auto", error) != HMOE_OK ||
        comm_sum_create(&m->sum, &m->comm, MODEL_SHARDS, m->dense, limit_ns, error) != HMOE_OK)
        return error->status;
    return make_layer(m, error);
}

enum hmoe_status model_create(struct model **made, const struct model_config *config, const struct model_boot *boot,
                              const struct model_state *state, struct base_error *error)
{
    struct model *m = calloc(1, sizeof *m);

    if (!m)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory for a model");
    m->config = *config;
    m->boot = *boot;
    if (make_parts(m, error) != HMOE_OK) {
        model_destroy(m);
        return error->status;
    }
    model_rotations(m);
    model_import(m, state);
    *made = m;
    return HMOE_OK;
}

void model_destroy(struct model *m)
{
    for (int l = 0; m->layer && l < m->config.layers; l++)
        if (m->layer[l].saved)
            hmoe_saved_destroy(m->layer[l].saved);
    if (m->plan)
        hmoe_plan_destroy(m->plan);
    if (m->group)
        hmoe_group_destroy(m->group);
    if (m->sum)
        comm_sum_destroy(m->sum);
    if (m->comm.transport)
        comm_close(&m->comm);
    linear_destroy(&m->linear);
    if (m->team)
        team_destroy(m->team);
    base_unmap(m->memory, m->memory_bytes, 1);
    free(m->layer);
    free(m->at);
    free(m->tensor);
    free(m);
}

/* ---- asked */

static struct pass batch_pass(struct model *m, const uint8_t *inputs, const uint8_t *targets,
                              struct base_error *error)
{
    int64_t first = m->rows * m->boot.rank;

    memset(m->shard_balance, 0, MODEL_SHARDS * sizeof *m->shard_balance);
    return (struct pass){.model = m, .rows = m->rows, .sequences = m->rows / m->config.context,
                         .length = m->config.context, .inputs = inputs + first, .targets = targets + first,
                         .error = error};
}

static double worst_balance(const struct model *m)
{
    double worst = 0.0, slots = (double)m->config.batch * m->config.context * m->config.topk;

    for (int l = 0; l < m->config.layers; l++)
        for (int e = 0; e < m->config.experts; e++) {
            double share = (double)m->layer[l].load[e] / slots * m->config.experts;
            worst = share > worst ? share : worst;
        }
    return worst;
}

enum hmoe_status model_step(struct model *m, const struct model_optimizer *optimizer, const uint8_t *inputs,
                            const uint8_t *targets, struct model_report *report, struct base_error *error)
{
    struct pass pass = batch_pass(m, inputs, targets, error);

    pass.learns = true;
    pass.balance = optimizer->balance;
    if (model_forward(&pass) != HMOE_OK)
        return error->status;
    model_losses(&pass);
    if (model_mean_loss(&pass, &report->loss, &report->balance_loss) != HMOE_OK ||
        model_gather_load(&pass) != HMOE_OK || model_backward(&pass) != HMOE_OK)
        return error->status;
    report->balance = worst_balance(m);
    return model_learn(m, optimizer, report, error);
}

enum hmoe_status model_loss(struct model *m, const uint8_t *inputs, const uint8_t *targets, double *loss,
                            struct base_error *error)
{
    struct pass pass = batch_pass(m, inputs, targets, error);
    double ignored;

    if (model_forward(&pass) != HMOE_OK)
        return error->status;
    model_losses(&pass);
    return model_mean_loss(&pass, loss, &ignored);
}

enum hmoe_status model_next(struct model *m, const uint8_t *text, int64_t length, float *logits,
                            struct base_error *error)
{
    int64_t rows = length < m->config.context ? length : m->config.context;
    struct pass pass = {.model = m, .rows = rows, .sequences = 1, .length = rows, .inputs = text + length - rows,
                        .error = error};

    if (model_forward(&pass) == HMOE_OK)
        memcpy(logits, m->logits + (rows - 1) * MODEL_BYTES, MODEL_BYTES * sizeof *logits);
    return error->status;
}

struct hmoe_group *model_group(struct model *m)
{
    return m->group;
}

const int64_t *model_load(const struct model *m, int layer)
{
    return m->layer[layer].load;
}
