/* The tensors of a model: what there is, how it starts, where a rank has its part. */
#include "model/inner.h"

#include "base/num.h"
#include "base/prng.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const struct model_optimizer model_optimizer_standard = {
    .rate = 3e-3f, .least_rate = 3e-4f, .warmup = 50, .steps = 600, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f,
    .decay = 0.1f, .clip = 1.0f, .balance = 0.01f};

struct list {
    struct model_tensor *tensors; /* or NULL: only counted */
    int count;
    int64_t end;
};

__attribute__((format(printf, 3, 4)))
static void add(struct list *list, struct model_tensor tensor, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(tensor.name, sizeof tensor.name, format, arguments);
    va_end(arguments);
    tensor.count = 1;
    for (tensor.dims = 0; tensor.dims < 3 && tensor.shape[tensor.dims]; tensor.dims++)
        tensor.count *= tensor.shape[tensor.dims];
    tensor.offset = list->end;
    tensor.decays = tensor.dims > 1;
    if (list->tensors)
        list->tensors[list->count] = tensor;
    list->count++;
    list->end += tensor.count;
}

/* Dense ones first, then all experts. */
static struct list list_tensors(const struct model_config *c, struct model_tensor *tensors)
{
    struct list list = {tensors, 0, 0};
    int64_t D = c->width;

    add(&list, (struct model_tensor){.shape = {MODEL_BYTES, D}}, "embedding.weight");
    for (int i = 0; i < c->layers; i++) {
        add(&list, (struct model_tensor){.shape = {D}}, "layers.%d.attention_norm.weight", i);
        add(&list, (struct model_tensor){.shape = {D, 3 * D}}, "layers.%d.attention.qkv.weight", i);
        add(&list, (struct model_tensor){.shape = {D, D}}, "layers.%d.attention.out.weight", i);
        add(&list, (struct model_tensor){.shape = {D}}, "layers.%d.moe_norm.weight", i);
        add(&list, (struct model_tensor){.shape = {D, c->experts}}, "layers.%d.moe.router.weight", i);
    }
    add(&list, (struct model_tensor){.shape = {D}}, "norm.weight");
    for (int i = 0; i < c->layers; i++) {
        add(&list, (struct model_tensor){.shape = {c->experts, D, 2 * c->inner}, .expert = true},
            "layers.%d.moe.up_proj.weight", i);
        add(&list, (struct model_tensor){.shape = {c->experts, c->inner, D}, .expert = true},
            "layers.%d.moe.down_proj.weight", i);
    }
    return list;
}

int model_tensors(const struct model_config *config, struct model_tensor *tensors)
{
    return list_tensors(config, tensors).count;
}

int64_t model_size(const struct model_config *config)
{
    return list_tensors(config, NULL).end;
}

const char *model_config_check(const struct model_config *c, int ranks, char *why, size_t size)
{
    *why = 0;
    if (c->width % (2 * c->heads))
        snprintf(why, size, "width %d with %d heads: a multiple of %d is allowed", c->width, c->heads, 2 * c->heads);
    else if (c->topk > c->experts)
        snprintf(why, size, "topk %d with %d experts: at most %d are allowed", c->topk, c->experts, c->experts);
    else if (MODEL_SHARDS % ranks)
        snprintf(why, size, "ranks %d: 1, 2 or 4 are allowed", ranks);
    else if (c->experts % ranks)
        snprintf(why, size, "experts %d on %d ranks: a multiple of the ranks is allowed", c->experts, ranks);
    else if (c->batch % MODEL_SHARDS)
        snprintf(why, size, "batch %d: a multiple of %d is allowed", c->batch, MODEL_SHARDS);
    return *why ? why : NULL;
}

/* Gains one; matrices uniform with a deviation of 1/sqrt(terms), those that write into the stream smaller. */
static void init_tensor(const struct model_config *config, const struct model_tensor *t, uint64_t seed, float *to)
{
    struct base_prng prng = {seed * 0x9e3779b97f4a7c15u + (uint64_t)t->offset};
    bool writes = strstr(t->name, "out.weight") || strstr(t->name, "down_proj");
    float terms = (float)t->shape[t->dims - 2 >= 0 ? t->dims - 2 : 0], scale = sqrtf(3.0f / terms);

    if (strcmp(t->name, "embedding.weight") == 0)
        scale = 0.04f;
    if (writes)
        scale /= sqrtf(2.0f * (float)config->layers);
    for (int64_t i = 0; i < t->count; i++)
        to[i] = t->dims == 1 ? 1.0f : base_random_sym(&prng, scale);
}

void model_state_init(const struct model_config *config, uint64_t seed, struct model_state *state)
{
    struct model_tensor tensors[MODEL_TENSORS_MOST];
    int count = model_tensors(config, tensors);

    state->step = 0;
    state->seed = seed;
    for (int i = 0; i < count; i++)
        init_tensor(config, &tensors[i], seed, state->value + tensors[i].offset);
    memset(state->first, 0, (size_t)model_size(config) * sizeof(float));
    memset(state->second, 0, (size_t)model_size(config) * sizeof(float));
}

/* ---- a rank's part: dense tensors whole, of each expert tensor the rank's experts */

struct part {
    int vector;     /* 0 dense, 1 experts */
    int64_t from;   /* in the whole */
    int64_t to;     /* in the vector */
    int64_t count;
};

static struct part part_of(const struct model *m, const struct model_tensor *t, int64_t *experts_at)
{
    int64_t count = t->count / m->boot.ranks, at = *experts_at;

    if (!t->expert)
        return (struct part){0, t->offset, t->offset, t->count};
    *experts_at += count;
    return (struct part){1, t->offset + count * m->boot.rank, at, count};
}

static void copy_in(struct model *m, float *const vector[2], const float *whole)
{
    int64_t at = 0;

    for (int i = 0; i < m->tensors; i++) {
        struct part part = part_of(m, &m->tensor[i], &at);
        memcpy(vector[part.vector] + part.to, whole + part.from, (size_t)part.count * sizeof *whole);
    }
}

static void copy_out(const struct model *m, float *const vector[2], float *whole)
{
    int64_t at = 0;

    for (int i = 0; i < m->tensors; i++) {
        struct part part = part_of(m, &m->tensor[i], &at);
        if (part.vector == 1 || m->boot.rank == 0)
            memcpy(whole + part.from, vector[part.vector] + part.to, (size_t)part.count * sizeof *whole);
    }
}

void model_import(struct model *m, const struct model_state *state)
{
    m->step = state->step;
    m->seed = state->seed;
    copy_in(m, m->value, state->value);
    copy_in(m, m->first, state->first);
    copy_in(m, m->second, state->second);
}

void model_export(const struct model *m, struct model_state *state)
{
    if (m->boot.rank == 0) {
        state->step = m->step;
        state->seed = m->seed;
    }
    copy_out(m, m->value, state->value);
    copy_out(m, m->first, state->first);
    copy_out(m, m->second, state->second);
}

void model_export_gradient(const struct model *m, float *gradient)
{
    copy_out(m, m->grad, gradient);
}
