#include "case.h"

#include "base/memory.h"
#include "base/num.h"
#include "base/prng.h"
#include "kern/kern.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const case_routing_names[CASE_ROUTINGS] = {"uniform", "log-normal", "one hot",    "two hot",
                                                       "alike",   "masked",     "duplicates", "nothing"};

/* The oracle's time: fused multiply-adds of a case. */
#define COST_MOST 1.5e6

/* -------------------------------------------------------------------- choosing */

static int64_t pick(struct base_prng *prng, const int64_t *values, int count)
{
    return values[base_random_below(prng, count)];
}

/* Sizes where kernels turn a corner, and any others. */
static int64_t pick_size(struct base_prng *prng)
{
    static const int64_t corners[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 160};

    return base_random_below(prng, 2) ? pick(prng, corners, 17) : 1 + base_random_below(prng, 200);
}

static void pick_shape(struct base_prng *prng, struct case_data *data)
{
    static const int64_t large[] = {768, 1536, 2048, 2880};
    struct cli_shape *shape = &data->shape;

    shape->hidden = pick_size(prng);
    shape->inner = pick_size(prng);
    if (base_random_below(prng, 16) == 0)
        shape->hidden = pick(prng, large, 4);
    else if (base_random_below(prng, 16) == 0)
        shape->inner = pick(prng, large, 4);
    data->ranks = 1 + (int)base_random_below(prng, CASE_RANKS_MOST);
    data->workers = 1 + (int)base_random_below(prng, 3);
    shape->experts = data->ranks * (1 + (int)base_random_below(prng, 8));
    shape->topk = 1 + (int)base_random_below(prng, base_random_below(prng, 4) ? 4 : shape->experts);
    if (base_random_below(prng, 24) == 0) {
        shape->hidden = shape->inner = 1 + base_random_below(prng, 8);
        shape->experts = 512 / data->ranks * data->ranks;
    }
    shape->dtype = (enum hmoe_dtype)base_random_below(prng, 3);
    shape->layout = (enum hmoe_layout)base_random_below(prng, 2);
    shape->gating = (enum hmoe_gating)base_random_below(prng, 2);
    shape->biased = base_random_below(prng, 3) == 0;
    if (base_random_below(prng, 3) == 0)
        shape->activation = (struct hmoe_activation){1.702f, 0.75f, 1.0f};
}

/* Some ranks have none; no more than the oracle can do quickly. */
static void pick_tokens(struct base_prng *prng, struct case_data *data)
{
    double each = (double)data->shape.topk * 3.0 * (double)data->shape.hidden * (double)data->shape.inner;
    int64_t most = (int64_t)(COST_MOST / each / data->ranks) + 1;
    int kind = (int)base_random_below(prng, 8);

    most = most > 130 ? 130 : most;
    for (int r = 0; r < data->ranks; r++) {
        int64_t tokens = base_random_below(prng, most + 1);
        if (kind == 0 && r > 0)
            tokens = 0;
        if (kind == 1 && r == 0)
            tokens = 0;
        if (kind >= 5)
            tokens = most;
        data->tokens[r] = tokens;
        data->first[r + 1] = data->first[r] + tokens;
    }
}

static void add_knob(struct base_prng *prng, char *knobs, const char *name, const int64_t *values, int count)
{
    size_t used = strlen(knobs);

    if (base_random_below(prng, 3) == 0)
        snprintf(knobs + used, CASE_KNOBS_BYTES - used, ",%s=%" PRId64, name, pick(prng, values, count));
}

static void pick_knobs(struct base_prng *prng, struct case_data *data)
{
    static const int64_t off_on[] = {0, 1}, rows[] = {1, 3, 16, 40}, strips[] = {1, 2, 5}, tokens[] = {1, 7, 64},
                         spins[] = {0, 4000};
    char *knobs = data->knobs;

    snprintf(knobs, CASE_KNOBS_BYTES, "wait_limit_ms=60000%s", base_random_below(prng, 5) ? "" : ",path=bulk");
    add_knob(prng, knobs, "permute_fusion", off_on, 2);
    add_knob(prng, knobs, "expert_block", off_on, 2);
    add_knob(prng, knobs, "wave", off_on, 2);
    add_knob(prng, knobs, "block_rows", rows, 4);
    add_knob(prng, knobs, "strips", strips, 3);
    add_knob(prng, knobs, "chunk_tokens", tokens, 3);
    add_knob(prng, knobs, "run_tokens", tokens, 3);
    add_knob(prng, knobs, "spin_ns", spins, 2);
    if (data->workers > 1)
        add_knob(prng, knobs, "vector_workers", off_on, 2);
}

/* --------------------------------------------------------------------- routing */

static int64_t lognormal_expert(struct base_prng *prng, const double *load, int experts)
{
    double at = (double)base_random_unit(prng) * load[experts - 1];
    int e = 0;

    while (e < experts - 1 && load[e] <= at)
        e++;
    return e;
}

/* The running sum of log-normal loads, sigma 1. */
static double *make_load(struct base_prng *prng, int experts)
{
    double *load = malloc((size_t)experts * sizeof *load), sum = 0.0;

    for (int e = 0; load && e < experts; e++)
        load[e] = sum += exp(base_random_normal(prng));
    return load;
}

static int64_t pick_id(struct base_prng *prng, const struct case_data *data, const double *load, const int64_t hot[2])
{
    int experts = data->shape.experts;

    switch (data->routing) {
    case CASE_LOGNORMAL:
        return lognormal_expert(prng, load, experts);
    case CASE_ONE_HOT:
        return hot[0];
    case CASE_TWO_HOT:
        return hot[base_random_below(prng, 2)];
    case CASE_MASKED:
        return base_random_below(prng, 3) ? base_random_below(prng, experts) : -1;
    case CASE_NOTHING:
        return -1;
    default:
        return base_random_below(prng, experts);
    }
}

/* ids [T,K] as the case asks, all 64 bits wide. */
static bool make_ids(struct base_prng *prng, const struct case_data *data, int64_t *ids)
{
    int topk = data->shape.topk, experts = data->shape.experts;
    int64_t slots = data->first[data->ranks] * topk, hot[2];
    double *load = make_load(prng, experts);

    hot[0] = base_random_below(prng, experts);
    hot[1] = (hot[0] + 1 + base_random_below(prng, experts > 1 ? experts - 1 : 1)) % experts;
    for (int64_t i = 0; load && i < slots; i++) {
        ids[i] = pick_id(prng, data, load, hot);
        if (data->routing == CASE_ALIKE && i >= topk)
            ids[i] = ids[i - topk];
        if (data->routing == CASE_DUPLICATES && i % topk == 1)
            ids[i] = ids[i - 1];
    }
    free(load);
    return load != NULL;
}

static int count_distinct(const struct case_data *data, const int64_t *ids, int64_t slots)
{
    char seen[1024] = {0};
    int distinct = 0;

    for (int64_t i = 0; i < slots && data->shape.experts <= 1024; i++)
        if (ids[i] >= 0 && !seen[ids[i]]) {
            seen[ids[i]] = 1;
            distinct++;
        }
    return distinct;
}

static int64_t count_masked(const int64_t *ids, int64_t slots)
{
    int64_t masked = 0;

    for (int64_t i = 0; i < slots; i++)
        masked += ids[i] < 0;
    return masked;
}

/* Is what the case is named after really there? */
static bool occurs(const struct case_data *data, const int64_t *ids)
{
    int64_t tokens = data->first[data->ranks], slots = tokens * data->shape.topk, masked = count_masked(ids, slots);
    int distinct = count_distinct(data, ids, slots);

    switch (data->routing) {
    case CASE_ONE_HOT:
        return distinct == 1 && slots > 1;
    case CASE_TWO_HOT:
        return distinct == 2;
    case CASE_ALIKE:
        return tokens > 1;
    case CASE_MASKED:
        return masked > 0 && masked < slots;
    case CASE_DUPLICATES:
        return tokens > 0 && data->shape.topk > 1;
    case CASE_NOTHING:
        return masked == slots && slots > 0;
    default:
        return distinct > 1;
    }
}

/* ------------------------------------------------------------------------ data */

static void fill(struct base_prng *prng, enum hmoe_dtype dtype, void *base, int64_t count, float scale)
{
    for (int64_t i = 0; i < count; i++)
        num_store(dtype, base, i, base_random_sym(prng, scale));
}

/* One token's row gets a value that must not reach any other token; others get denormals. */
static void add_specials(struct base_prng *prng, struct case_data *data)
{
    static const float values[] = {NAN, INFINITY, -INFINITY, 0x1p-130f, -0x1p-24f, 0x1p-126f, 3e38f, -0.0f};
    int64_t elements = data->first[data->ranks] * data->shape.hidden;

    for (int i = 0; i < 8 && elements > 0; i++)
        num_store(data->shape.dtype, data->x, base_random_below(prng, elements), values[i]);
}

static void store_ids(const struct case_data *data, const int64_t *ids, int64_t slots)
{
    for (int64_t i = 0; i < slots; i++)
        if (data->ids_type == HMOE_I32)
            ((int32_t *)data->ids)[i] = (int32_t)ids[i];
        else
            ((int64_t *)data->ids)[i] = ids[i];
}

/* A masked slot's weight is never read: NaN would show it. */
static void store_weights(struct base_prng *prng, const struct case_data *data, const int64_t *ids, int64_t slots)
{
    for (int64_t i = 0; i < slots; i++)
        num_store(data->weights_type, data->weights, i, ids[i] < 0 ? NAN : base_random_sym(prng, 1.0f));
}

/* The next tensor; each starts one element past an aligned address, because callers promise no alignment. */
static void *take(struct base_carve *carve, int64_t count, size_t element)
{
    char *piece = base_carve(carve, ((size_t)count + 1) * element);
    return piece ? piece + element : NULL;
}

/* With memory NULL it only measures: the result is the size. */
static size_t place(struct case_data *data)
{
    const struct cli_shape *shape = &data->shape;
    size_t element = num_bytes(shape->dtype);
    int64_t tokens = data->first[data->ranks], slots = tokens * shape->topk, experts = shape->experts;
    struct base_carve carve = {data->memory, 0};
    struct ref_layer *layer = &data->layer;

    data->x = take(&carve, tokens * shape->hidden, element);
    data->y = take(&carve, tokens * shape->hidden, element);
    data->wanted = take(&carve, tokens * shape->hidden, element);
    data->ids = take(&carve, slots, data->ids_type == HMOE_I32 ? 4 : 8);
    data->weights = take(&carve, slots, num_bytes(data->weights_type));
    layer->up_proj = take(&carve, experts * shape->hidden * 2 * shape->inner, element);
    layer->down_proj = take(&carve, experts * shape->hidden * shape->inner, element);
    layer->up_bias = shape->biased ? take(&carve, experts * 2 * shape->inner, element) : NULL;
    layer->down_bias = shape->biased ? take(&carve, experts * shape->hidden, element) : NULL;
    return carve.used;
}

static void fill_all(struct base_prng *prng, struct case_data *data)
{
    const struct cli_shape *s = &data->shape;
    struct ref_layer *layer = &data->layer;
    float up = sqrtf(3.0f / (float)s->hidden), down = sqrtf(3.0f / (float)s->inner);

    *layer = (struct ref_layer){.hidden = s->hidden, .inner = s->inner, .experts = s->experts, .topk = s->topk,
                                .dtype = s->dtype, .layout = s->layout, .gating = s->gating,
                                .activation = s->activation, .up_proj = layer->up_proj,
                                .down_proj = layer->down_proj, .up_bias = layer->up_bias,
                                .down_bias = layer->down_bias};
    fill(prng, s->dtype, data->x, data->first[data->ranks] * s->hidden, 1.7f);
    fill(prng, s->dtype, (void *)(uintptr_t)layer->up_proj, s->experts * s->hidden * 2 * s->inner, up);
    fill(prng, s->dtype, (void *)(uintptr_t)layer->down_proj, s->experts * s->hidden * s->inner, down);
    if (s->biased) {
        fill(prng, s->dtype, (void *)(uintptr_t)layer->up_bias, s->experts * 2 * s->inner, 0.5f);
        fill(prng, s->dtype, (void *)(uintptr_t)layer->down_bias, s->experts * s->hidden, 0.5f);
    }
    if (data->special)
        add_specials(prng, data);
}

bool case_solve(const struct case_data *data, void *gate_up, void *a, void *slots)
{
    struct ref_forward forward = {
        .layer = &data->layer,
        .tokens = data->first[data->ranks],
        .x = data->x,
        .topk_ids = data->ids,
        .topk_weights = data->weights,
        .ids_type = data->ids_type,
        .weights_type = data->weights_type,
        .y = data->wanted,
        .gate_up = gate_up,
        .a = a,
        .slots = slots,
    };
    return ref_moe_forward(&forward) == 0;
}

bool case_make(struct case_data *data, uint64_t seed)
{
    struct base_prng prng = {seed * 0xa0761d6478bd642fu + 0x2545f4914f6cdd1du};
    int64_t *ids, slots;
    bool fine;

    *data = (struct case_data){.seed = seed, .routing = (enum case_routing)(seed % CASE_ROUTINGS)};
    pick_shape(&prng, data);
    pick_tokens(&prng, data);
    pick_knobs(&prng, data);
    data->special = base_random_below(&prng, 6) == 0;
    data->ids_type = (enum hmoe_index)base_random_below(&prng, 2);
    data->weights_type = (enum hmoe_dtype)base_random_below(&prng, 3);
    slots = data->first[data->ranks] * data->shape.topk;
    ids = malloc((size_t)slots * sizeof *ids + 1);
    data->memory = aligned_alloc(64, place(data));
    fine = ids && data->memory && make_ids(&prng, data, ids);
    if (fine) {
        place(data);
        fill_all(&prng, data);
        store_ids(data, ids, slots);
        store_weights(&prng, data, ids, slots);
        data->occurred = occurs(data, ids);
        fine = case_solve(data, NULL, NULL, NULL);
    }
    free(ids);
    return fine;
}

void case_free(struct case_data *data)
{
    free(data->memory);
    data->memory = NULL;
}

static const void *at(const void *base, int64_t index, size_t element)
{
    return base ? (const char *)base + (size_t)index * element : NULL;
}

struct hmoe_call case_call(const struct case_data *data, int rank, int64_t tokens)
{
    const struct cli_shape *shape = &data->shape;
    size_t element = num_bytes(shape->dtype);
    int64_t first = data->first[rank], slot = first * shape->topk, expert = shape->experts / data->ranks * rank;
    struct hmoe_call call = {
        .size = sizeof call,
        .tokens = tokens,
        .ids_type = data->ids_type,
        .weights_type = data->weights_type,
        .layer = {
            .up_proj = at(data->layer.up_proj, expert * shape->hidden * 2 * shape->inner, element),
            .down_proj = at(data->layer.down_proj, expert * shape->hidden * shape->inner, element),
            .up_bias = at(data->layer.up_bias, expert * 2 * shape->inner, element),
            .down_bias = at(data->layer.down_bias, expert * shape->hidden, element),
        },
    };
    if (tokens == 0)
        return call; /* NULL pointers are legal then */
    call.x = at(data->x, first * shape->hidden, element);
    call.y = (void *)(uintptr_t)at(data->y, first * shape->hidden, element);
    call.topk_ids = at(data->ids, slot, data->ids_type == HMOE_I32 ? 4 : 8);
    call.topk_weights = at(data->weights, slot, num_bytes(data->weights_type));
    return call;
}

void case_print(const struct case_data *data)
{
    static const char *const dtypes[] = {"f32", "bf16", "f16"}, *const layouts[] = {"kn", "nk"};
    const struct cli_shape *s = &data->shape;

    printf("  shape    H %" PRId64 ", I %" PRId64 ", E %d, K %d, %s %s, %s%s%s%s\n", s->hidden, s->inner, s->experts,
           s->topk, dtypes[s->dtype], layouts[s->layout], s->gating == HMOE_HALVES ? "halves" : "interleaved",
           s->biased ? ", biases" : "", s->activation.limit > 0 ? ", clamped" : "",
           data->special ? ", NaN and Inf" : "");
    printf("  ranks    %d with %d workers, tokens", data->ranks, data->workers);
    for (int r = 0; r < data->ranks; r++)
        printf(" %" PRId64, data->tokens[r]);
    printf("\n  routing  %s, ids %s, weights %s\n  knobs    %s\n", case_routing_names[data->routing],
           data->ids_type == HMOE_I32 ? "i32" : "i64", dtypes[data->weights_type], data->knobs);
}
