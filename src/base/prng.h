/* Seeded random numbers for tests, benches and examples (SplitMix64, Steele, Lea and Flood 2014). */
#ifndef BASE_PRNG_H
#define BASE_PRNG_H

#include <math.h>
#include <stdint.h>

struct base_prng {
    uint64_t state;
};

static inline uint64_t base_random(struct base_prng *prng)
{
    uint64_t z = (prng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* in [0, bound), bound >= 1; the bias below 2^-32 of a bound below 2^32 does not matter here */
static inline int64_t base_random_below(struct base_prng *prng, int64_t bound)
{
    return (int64_t)(base_random(prng) % (uint64_t)bound);
}

/* in [0, 1) */
static inline float base_random_unit(struct base_prng *prng)
{
    return (float)(base_random(prng) >> 40) * 0x1p-24f;
}

/* in [-scale, scale) */
static inline float base_random_sym(struct base_prng *prng, float scale)
{
    return (base_random_unit(prng) * 2.0f - 1.0f) * scale;
}

/* standard normal (Box and Muller) */
static inline double base_random_normal(struct base_prng *prng)
{
    double u = ((double)(base_random(prng) >> 11) + 1.0) * 0x1p-53, v = (double)(base_random(prng) >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
