/* Vectors of f32 as the compilers' vector extensions, and base/num.h repeated on them: the same operations in the same
 * order, so the same bits. Include it with VEC_BYTES set to 16, 32 or 64, in a file compiled for a CPU that has such
 * vectors; nothing here has external linkage. Everything runs under base_fp_enter().
 *
 * A duo is 2 * VEC_LANES neighbouring elements of storage, widened. The 2-byte types come apart by shift and mask
 * alone, without a shuffle: lo holds the even elements, hi the odd ones. For f32 lo is the first half, hi the second.
 */
#ifndef KERN_PORTABLE_VEC_H
#define KERN_PORTABLE_VEC_H

#include "base/num.h"

#if !defined(VEC_BYTES)
#error "set VEC_BYTES"
#endif
#if VEC_BYTES >= 32
#include "kern/intrinsics.h"
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VEC_LANES (VEC_BYTES / 4)
#define VEC_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define VEC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define VEC_UNROLL _Pragma("GCC unroll 32")
#endif

typedef float vec __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vec_u32 __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vec_i32 __attribute__((vector_size(VEC_BYTES)));

/* Index lists for __builtin_shufflevector(a, b, ...). */
#if VEC_LANES == 16
#define VEC_EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define VEC_ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define VEC_ZIP_LO 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define VEC_ZIP_HI 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VEC_LANES == 8
#define VEC_EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define VEC_ODDS 1, 3, 5, 7, 9, 11, 13, 15
#define VEC_ZIP_LO 0, 8, 1, 9, 2, 10, 3, 11
#define VEC_ZIP_HI 4, 12, 5, 13, 6, 14, 7, 15
#else
#define VEC_EVENS 0, 2, 4, 6
#define VEC_ODDS 1, 3, 5, 7
#define VEC_ZIP_LO 0, 4, 1, 5
#define VEC_ZIP_HI 2, 6, 3, 7
#endif

struct duo {
    vec lo, hi;
};

/* ------------------------------------------------- what vector extensions lack */

#if VEC_BYTES == 64
VEC_INLINE vec vec_set(float f)
{
    return (vec)_mm512_set1_ps(f);
}
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
VEC_INLINE void vec_stream(void *p, vec_u32 v)
{
    _mm512_stream_si512((__m512i *)p, (__m512i)v);
}
#elif VEC_BYTES == 32
VEC_INLINE vec vec_set(float f)
{
    return (vec)_mm256_set1_ps(f);
}
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
VEC_INLINE void vec_stream(void *p, vec_u32 v)
{
    _mm256_stream_si256((__m256i *)p, (__m256i)v);
}
#else
VEC_INLINE vec vec_set(float f)
{
    return (vec){f, f, f, f};
}
#if defined(__aarch64__)
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
}
#endif
VEC_INLINE void vec_stream(void *p, vec_u32 v)
{
    memcpy(p, &v, sizeof v);
}
#endif

/* Streamed lines must be seen before whatever the caller publishes next. */
VEC_INLINE void vec_stream_end(void)
{
#if VEC_BYTES >= 32
    _mm_sfence();
#endif
}

VEC_INLINE vec vec_load(const void *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

VEC_INLINE vec_u32 vec_load_u32(const void *p)
{
    vec_u32 v;
    memcpy(&v, p, sizeof v);
    return v;
}

VEC_INLINE void vec_store(void *p, vec v)
{
    memcpy(p, &v, sizeof v);
}

VEC_INLINE void vec_store_u32(void *p, vec_u32 v)
{
    memcpy(p, &v, sizeof v);
}

VEC_INLINE vec vec_select(vec_i32 mask, vec yes, vec no)
{
    return (vec)(((vec_i32)yes & mask) | ((vec_i32)no & ~mask));
}

VEC_INLINE vec_u32 vec_select_u32(vec_i32 mask, vec_u32 yes, vec_u32 no)
{
    return (yes & (vec_u32)mask) | (no & ~(vec_u32)mask);
}

/* ------------------------------------------------- storage types; halves in the low 16 bits of each lane */

VEC_INLINE vec vec_from_f16(vec_u32 half)
{
    vec_u32 sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13, exponent = rest & 0x0f800000;
    vec_i32 special = (vec_i32)(exponent == 0x0f800000), tiny = (vec_i32)(exponent == 0);
    vec_u32 normal = rest + (112u << 23);
    vec_u32 small = (vec_u32)((vec)(rest + (113u << 23)) - 0x1p-14f);

    normal = vec_select_u32(special, rest + (224u << 23), normal);
    return (vec)(sign | vec_select_u32(tiny, small, normal));
}

VEC_INLINE vec_u32 vec_to_f16(vec f)
{
    vec_u32 u = (vec_u32)f, sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    vec_u32 small = (vec_u32)((vec)rest + 0.5f) - 0x3f000000;
    vec_u32 normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;

    normal = vec_select_u32((vec_i32)rest < 0x38800000, small, normal);
    normal = sign | vec_select_u32((vec_i32)rest >= 0x477ff000, (vec_u32){0} + 0x7c00, normal);
    return vec_select_u32((vec_i32)rest > 0x7f800000, (vec_u32){0} + 0x7e00, normal);
}

VEC_INLINE vec_u32 vec_to_bf16(vec f)
{
    vec_u32 u = (vec_u32)f, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return vec_select_u32((vec_i32)(u & 0x7fffffff) > 0x7f800000, (vec_u32){0} + 0x7fc0, rounded);
}

VEC_INLINE vec vec_quiet(vec f)
{
    return vec_select((vec_i32)(f != f), (vec)((vec_u32){0} + 0x7fc00000), f);
}

VEC_INLINE vec vec_round(enum hmoe_dtype dtype, vec f)
{
    if (dtype == HMOE_F32)
        return vec_quiet(f);
    return dtype == HMOE_BF16 ? (vec)(vec_to_bf16(f) << 16) : vec_from_f16(vec_to_f16(f));
}

/* ------------------------------------------------- duos */

/* the two halves of each dword of 2-byte storage */
VEC_INLINE struct duo vec_widen(enum hmoe_dtype dtype, vec_u32 dwords)
{
    if (dtype == HMOE_BF16)
        return (struct duo){(vec)(dwords << 16), (vec)(dwords & 0xffff0000)};
    return (struct duo){vec_from_f16(dwords & 0xffff), vec_from_f16(dwords >> 16)};
}

VEC_INLINE struct duo vec_load_duo(enum hmoe_dtype dtype, const void *p)
{
    if (dtype == HMOE_F32)
        return (struct duo){vec_load(p), vec_load((const char *)p + VEC_BYTES)};
    return vec_widen(dtype, vec_load_u32(p));
}

VEC_INLINE vec_u32 vec_narrow(enum hmoe_dtype dtype, struct duo d)
{
    if (dtype == HMOE_BF16)
        return vec_to_bf16(d.lo) | vec_to_bf16(d.hi) << 16;
    return vec_to_f16(d.lo) | vec_to_f16(d.hi) << 16;
}

VEC_INLINE void vec_store_duo(enum hmoe_dtype dtype, void *p, struct duo d)
{
    if (dtype == HMOE_F32) {
        vec_store(p, vec_quiet(d.lo));
        vec_store((char *)p + VEC_BYTES, vec_quiet(d.hi));
    } else {
        vec_store_u32(p, vec_narrow(dtype, d));
    }
}

/* past the caches; p is aligned to VEC_BYTES */
VEC_INLINE void vec_stream_duo(enum hmoe_dtype dtype, void *p, struct duo d)
{
    if (dtype == HMOE_F32) {
        vec_stream(p, (vec_u32)vec_quiet(d.lo));
        vec_stream((char *)p + VEC_BYTES, (vec_u32)vec_quiet(d.hi));
    } else {
        vec_stream(p, vec_narrow(dtype, d));
    }
}

/* the first `count` elements, the rest +0; touches nothing else */
VEC_INLINE struct duo vec_load_duo_part(enum hmoe_dtype dtype, const void *p, int64_t count)
{
    char whole[2 * VEC_BYTES] = {0};

    if (count >= 2 * VEC_LANES)
        return vec_load_duo(dtype, p);
    if (count > 0)
        memcpy(whole, p, (size_t)count * num_bytes(dtype));
    return vec_load_duo(dtype, whole);
}

VEC_INLINE void vec_store_duo_part(enum hmoe_dtype dtype, void *p, int64_t count, struct duo d)
{
    char whole[2 * VEC_BYTES];

    if (count >= 2 * VEC_LANES) {
        vec_store_duo(dtype, p, d);
    } else if (count > 0) {
        vec_store_duo(dtype, whole, d);
        memcpy(p, whole, (size_t)count * num_bytes(dtype));
    }
}

VEC_INLINE struct duo vec_round_duo(enum hmoe_dtype dtype, struct duo d)
{
    return (struct duo){vec_round(dtype, d.lo), vec_round(dtype, d.hi)};
}

/* a duo in the order of its elements: first half, second half */
VEC_INLINE struct duo vec_in_order(enum hmoe_dtype dtype, struct duo d)
{
    if (dtype == HMOE_F32)
        return d;
    return (struct duo){__builtin_shufflevector(d.lo, d.hi, VEC_ZIP_LO),
                        __builtin_shufflevector(d.lo, d.hi, VEC_ZIP_HI)};
}

/* even elements, odd elements */
VEC_INLINE struct duo vec_evens_odds(enum hmoe_dtype dtype, struct duo d)
{
    if (dtype != HMOE_F32)
        return d;
    return (struct duo){__builtin_shufflevector(d.lo, d.hi, VEC_EVENS),
                        __builtin_shufflevector(d.lo, d.hi, VEC_ODDS)};
}

/* ------------------------------------------------- the activation */

VEC_INLINE vec vec_exp(vec given)
{
    vec x = given, scaled, n, r, p;

    x = vec_select((vec_i32)(x < NUM_EXP_LEAST), vec_set(NUM_EXP_LEAST), x);
    x = vec_select((vec_i32)(x > NUM_EXP_MOST), vec_set(NUM_EXP_MOST), x);
    scaled = x * NUM_LOG2E;
    scaled = scaled + NUM_ROUND;
    n = scaled - NUM_ROUND;
    r = vec_fma(n, vec_set(-NUM_LN2_HI), x);
    r = vec_fma(n, vec_set(NUM_LN2_LO), r);
    p = vec_fma(vec_set(NUM_EXP_C5), r, vec_set(NUM_EXP_C4));
    p = vec_fma(p, r, vec_set(NUM_EXP_C3));
    p = vec_fma(p, r, vec_set(NUM_EXP_C2));
    p = vec_fma(p, r, vec_set(NUM_EXP_C1));
    p = vec_fma(p, r, vec_set(NUM_EXP_C0));
    p = vec_fma(p, r * r, r);
    p = p + 1.0f;
    p = (vec)((vec_u32)p + (((vec_u32)scaled - (vec_u32)vec_set(NUM_ROUND)) << 23));
    return vec_select((vec_i32)(given != given), given, p);
}

VEC_INLINE vec vec_sigmoid(vec x)
{
    return 1.0f / (1.0f + vec_exp(-x));
}

/* num_gated: gate and up are already rounded to storage */
VEC_INLINE vec vec_gated(const struct hmoe_activation *act, vec gate, vec up)
{
    vec limit = vec_set(act->limit);

    gate = vec_select((vec_i32)(gate > limit), limit, gate);
    up = vec_select((vec_i32)(up > limit), limit, up);
    up = vec_select((vec_i32)(up < -limit), -limit, up);
    if (act->offset != 0.0f)
        up = up + act->offset;
    return (gate * vec_sigmoid(act->alpha == 1.0f ? gate : act->alpha * gate)) * up;
}

struct vec_gate_grad {
    vec gate, up, a;
};

/* num_gated_grad, and num_gated beside it */
VEC_INLINE struct vec_gate_grad vec_gated_grad(const struct hmoe_activation *act, vec gate, vec up, vec da)
{
    vec limit = vec_set(act->limit), zero = {0}, g, u, scaled, s, slope;
    vec_i32 gate_cut = (vec_i32)(gate > limit), up_cut = (vec_i32)(up > limit) | (vec_i32)(up < -limit);
    struct vec_gate_grad grad;

    g = vec_select(gate_cut, limit, gate);
    u = vec_select((vec_i32)(up > limit), limit, up);
    u = vec_select((vec_i32)(up < -limit), -limit, u);
    if (act->offset != 0.0f)
        u = u + act->offset;
    scaled = act->alpha == 1.0f ? g : act->alpha * g;
    s = vec_sigmoid(scaled);
    slope = s * (1.0f + scaled * (1.0f - s));
    grad.a = (g * s) * u;
    grad.gate = vec_select(gate_cut, zero, (da * u) * slope);
    grad.up = vec_select(up_cut, zero, da * (g * s));
    return grad;
}

#endif
