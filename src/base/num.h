/* Scalar numbers: storage dtypes, exp, sigmoid, the gated activation. This file defines the answer; every vector
 * engine repeats these operations in this order (docs/numerics.md). Call it under base_fp_enter(). */
#ifndef BASE_NUM_H
#define BASE_NUM_H

#include "hmoe.h"

#include <math.h>
#include <string.h>

/* exp: clamp, n = rint(x * LOG2E) by adding and subtracting 1.5 * 2^23, r = x - n * (LN2_HI - LN2_LO), a polynomial
 * of degree 5 in r (Cephes expf), scaled by 2^n through the exponent bits. */
#define NUM_EXP_LEAST (-87.0f)
#define NUM_EXP_MOST 88.0f
#define NUM_LOG2E 0x1.715476p+0f
#define NUM_ROUND 0x1.8p+23f
#define NUM_LN2_HI 0x1.63p-1f
#define NUM_LN2_LO 0x1.bd0106p-13f
#define NUM_EXP_C5 0x1.a0d2cep-13f
#define NUM_EXP_C4 0x1.6e879cp-10f
#define NUM_EXP_C3 0x1.11121p-7f
#define NUM_EXP_C2 0x1.555382p-5f
#define NUM_EXP_C1 0x1.555554p-3f
#define NUM_EXP_C0 0x1p-1f

static inline uint32_t num_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float num_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline size_t num_bytes(enum hmoe_dtype dtype)
{
    return dtype == HMOE_F32 ? 4 : 2;
}

static inline float num_from_bf16(uint16_t b)
{
    return num_float((uint32_t)b << 16);
}

/* to nearest even; overflow gives Inf; NaN becomes 7fc0 */
static inline uint16_t num_to_bf16(float f)
{
    uint32_t u = num_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline float num_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00)
        return num_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400)
        return num_float(sign | ((rest << 13) + (112u << 23)));
    return num_float(sign | num_bits((float)rest * 0x1p-24f)); /* a denormal f16 is a normal f32 */
}

/* to nearest even; overflow gives Inf; denormals are kept; NaN becomes 7e00 */
static inline uint16_t num_to_f16(float f)
{
    uint32_t u = num_bits(f), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000)
        return 0x7e00;
    if (rest >= 0x477ff000) /* 65520 and above */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* below 2^-14: adding 0.5 leaves units of 2^-24 in the last bits */
        return (uint16_t)(sign | (num_bits(num_float(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13));
}

static inline float num_quiet(float f)
{
    return f != f ? num_float(0x7fc00000) : f;
}

static inline float num_load(enum hmoe_dtype dtype, const void *base, int64_t index)
{
    if (dtype == HMOE_F32)
        return ((const float *)base)[index];
    if (dtype == HMOE_BF16)
        return num_from_bf16(((const uint16_t *)base)[index]);
    return num_from_f16(((const uint16_t *)base)[index]);
}

static inline void num_store(enum hmoe_dtype dtype, void *base, int64_t index, float f)
{
    if (dtype == HMOE_F32)
        ((float *)base)[index] = num_quiet(f);
    else if (dtype == HMOE_BF16)
        ((uint16_t *)base)[index] = num_to_bf16(f);
    else
        ((uint16_t *)base)[index] = num_to_f16(f);
}

/* f rounded to the storage dtype and widened again */
static inline float num_round(enum hmoe_dtype dtype, float f)
{
    if (dtype == HMOE_F32)
        return num_quiet(f);
    return dtype == HMOE_BF16 ? num_from_bf16(num_to_bf16(f)) : num_from_f16(num_to_f16(f));
}

static inline float num_exp(float x)
{
    float scaled, n, r, p;

    if (x != x)
        return x;
    x = x < NUM_EXP_LEAST ? NUM_EXP_LEAST : x;
    x = x > NUM_EXP_MOST ? NUM_EXP_MOST : x;
    scaled = x * NUM_LOG2E;
    scaled = scaled + NUM_ROUND;
    n = scaled - NUM_ROUND;
    r = fmaf(n, -NUM_LN2_HI, x);
    r = fmaf(n, NUM_LN2_LO, r);
    p = fmaf(NUM_EXP_C5, r, NUM_EXP_C4);
    p = fmaf(p, r, NUM_EXP_C3);
    p = fmaf(p, r, NUM_EXP_C2);
    p = fmaf(p, r, NUM_EXP_C1);
    p = fmaf(p, r, NUM_EXP_C0);
    p = fmaf(p, r * r, r);
    p = p + 1.0f;
    return num_float(num_bits(p) + ((num_bits(scaled) - num_bits(NUM_ROUND)) << 23));
}

/* 1 / (1 + exp(-x)) */
static inline float num_sigmoid(float x)
{
    return 1.0f / (1.0f + num_exp(-x));
}

/* A full activation: no zero stands for something else. */
static inline struct hmoe_activation num_activation(struct hmoe_activation given)
{
    given.alpha = given.alpha == 0.0f ? 1.0f : given.alpha;
    given.limit = given.limit == 0.0f ? INFINITY : given.limit;
    return given;
}

/* a of one gate and up, both already rounded to storage; the result is not yet rounded. NaN passes each clamp. */
static inline float num_gated(const struct hmoe_activation *act, float gate, float up)
{
    gate = gate > act->limit ? act->limit : gate;
    up = up > act->limit ? act->limit : up;
    up = up < -act->limit ? -act->limit : up;
    if (act->offset != 0.0f)
        up = up + act->offset;
    return (gate * num_sigmoid(act->alpha == 1.0f ? gate : act->alpha * gate)) * up;
}

/* The gradients of one gate and up, from da, that of their `a`; not yet rounded. A gradient passes a clamp at equality;
 * what a clamp cut gets +0. NaN is not cut. */
struct num_gate_grad {
    float gate, up;
};

static inline struct num_gate_grad num_gated_grad(const struct hmoe_activation *act, float gate, float up, float da)
{
    float g = gate > act->limit ? act->limit : gate, u = up, scaled, s, slope;
    struct num_gate_grad grad;

    u = u > act->limit ? act->limit : u;
    u = u < -act->limit ? -act->limit : u;
    if (act->offset != 0.0f)
        u = u + act->offset;
    scaled = act->alpha == 1.0f ? g : act->alpha * g;
    s = num_sigmoid(scaled);
    slope = s * (1.0f + scaled * (1.0f - s));
    grad.gate = gate > act->limit ? 0.0f : (da * u) * slope;
    grad.up = up > act->limit || up < -act->limit ? 0.0f : da * (g * s);
    return grad;
}

#endif
