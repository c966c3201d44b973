#include "cli.h"
#include "layer.h"

#include "base/memory.h"
#include "base/num.h"
#include "base/prng.h"
#include "kern/kern.h"

/* One stretch of weights, filled by many threads: unit u always gets the same numbers. */
struct fill {
    char *base;
    int64_t count; /* elements */
    enum hmoe_dtype dtype;
    float scale;
    uint64_t seed;
};

enum { UNIT = 1 << 20 }; /* elements */

/* Four values of 16 random bits each, from [-1, 1). */
static void fill_unit(void *argument, int64_t unit)
{
    const struct fill fill = *(const struct fill *)argument;
    int64_t first = unit * UNIT, last = first + UNIT < fill.count ? first + UNIT : fill.count;
    struct base_prng prng = {fill.seed + (uint64_t)unit * 0x9e3779b97f4a7c15u};
    float step = fill.scale / 32768.0f;

    cli_progress("making random weights: %.1f of %.1f GB", (double)first * (double)num_bytes(fill.dtype) / 1e9,
                 (double)fill.count * (double)num_bytes(fill.dtype) / 1e9);
    base_random(&prng);
    for (int64_t i = first; i < last; i += 4) {
        uint64_t bits = base_random(&prng);
        for (int64_t j = i; j < last && j < i + 4; j++, bits >>= 16)
            num_store(fill.dtype, fill.base, j, (float)(int16_t)(bits & 0xffff) * step);
    }
}

static void fill_random(struct fill fill, int threads)
{
    int64_t units = (fill.count + UNIT - 1) / UNIT;

    cli_parallel(threads, units, fill_unit, &fill);
}

static float scale_of(int64_t terms)
{
    return sqrtf(3.0f / (float)terms);
}

/* The layout of the mapping; with map NULL it only measures. */
static void place(struct cli_weights *weights)
{
    const struct cli_shape *shape = &weights->shape;
    struct base_carve carve = {weights->map, 0};
    size_t experts = (size_t)shape->experts, inner = kern_row_bytes(shape->dtype, shape->inner);

    weights->up = base_carve(&carve, experts * (size_t)shape->hidden * 2 * inner);
    weights->down = base_carve(&carve, experts * (size_t)shape->hidden * inner);
    if (shape->biased) {
        weights->up_bias = base_carve(&carve, experts * 2 * inner);
        weights->down_bias = base_carve(&carve, experts * kern_row_bytes(shape->dtype, shape->hidden));
    }
    weights->map_bytes = carve.used;
}

static void fill_all(struct cli_weights *weights, uint64_t seed, int threads)
{
    const struct cli_shape *shape = &weights->shape;
    int64_t experts = shape->experts, hidden = shape->hidden, inner = shape->inner;
    enum hmoe_dtype dtype = shape->dtype;

    fill_random((struct fill){weights->up, experts * hidden * 2 * inner, dtype, scale_of(hidden), seed ^ 1u << 20},
                threads);
    fill_random((struct fill){weights->down, experts * hidden * inner, dtype, scale_of(inner), seed ^ 2u << 20},
                threads);
    if (!shape->biased)
        return;
    fill_random((struct fill){weights->up_bias, experts * 2 * inner, dtype, 0.1f, seed ^ 3u << 20}, threads);
    fill_random((struct fill){weights->down_bias, experts * hidden, dtype, 0.1f, seed ^ 4u << 20}, threads);
}

bool cli_weights_make(struct cli_weights *weights, const struct cli_shape *shape, uint64_t seed, int threads)
{
    *weights = (struct cli_weights){.shape = *shape};
    place(weights);
    weights->map = base_map(weights->map_bytes, 1);
    if (!weights->map)
        return false;
    place(weights);
    fill_all(weights, seed, threads);
    return true;
}

void cli_weights_free(struct cli_weights *weights)
{
    base_unmap(weights->map, weights->map_bytes, 1);
    *weights = (struct cli_weights){0};
}

struct hmoe_layer cli_weights_of(const struct cli_weights *weights, int rank, int ranks)
{
    const struct cli_shape *shape = &weights->shape;
    size_t first = (size_t)(shape->experts / ranks) * (size_t)rank;
    size_t inner = kern_row_bytes(shape->dtype, shape->inner), hidden = (size_t)shape->hidden;

    return (struct hmoe_layer){
        .up_proj = weights->up + first * hidden * 2 * inner,
        .down_proj = weights->down + first * hidden * inner,
        .up_bias = shape->biased ? weights->up_bias + first * 2 * inner : NULL,
        .down_bias = shape->biased ? weights->down_bias + first * kern_row_bytes(shape->dtype, shape->hidden) : NULL,
    };
}
