/* base/num.h in AVX-512, for bf16: the same operations in the same order, 16 at a time. "Words" are 32 bf16 in one
 * vector. Run it under base_fp_enter(). */
#ifndef KERN_AMX_VEC_H
#define KERN_AMX_VEC_H

#include "base/num.h"

#include <immintrin.h>

/* The first n of 32 words. */
static inline __mmask32 vec_mask(int64_t n)
{
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
}

static inline __m512i vec_load(const void *p)
{
    return _mm512_loadu_si512(p);
}

static inline __m512 vec_load_ps(const void *p)
{
    return _mm512_loadu_ps(p);
}

/* num_round: bf16 in the upper half of each lane, so that it also reads as f32 */
static inline __m512i vec_round(__m512 f)
{
    __m512i u = _mm512_castps_si512(f);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __m512i kept = _mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000));
    __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(kept, nan, _mm512_set1_epi32(0x7fc00000));
}

/* Two rounded vectors as pairs: each lane is (low, high). */
static inline __m512i vec_pairs(__m512i low, __m512i high)
{
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
}

/* Words, from the two vectors that vec_low and vec_high make of words; rounds. */
static inline __m512i vec_words(__m512 low, __m512 high)
{
    return _mm512_packus_epi32(_mm512_srli_epi32(vec_round(low), 16), _mm512_srli_epi32(vec_round(high), 16));
}

/* In each run of eight words the first four, and the last four, widened: the order of unpacklo and unpackhi. */
static inline __m512 vec_low(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), words));
}

static inline __m512 vec_high(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), words));
}

/* num_exp; the last addition is left out where x is NaN */
static inline __m512 vec_exp(__m512 x)
{
    __m512 round = _mm512_set1_ps(NUM_ROUND), scaled, n, r, p;
    __m512i shift;
    __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);

    x = _mm512_max_ps(_mm512_set1_ps(NUM_EXP_LEAST), x);
    x = _mm512_min_ps(_mm512_set1_ps(NUM_EXP_MOST), x);
    scaled = _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(NUM_LOG2E)), round);
    n = _mm512_sub_ps(scaled, round);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-NUM_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(NUM_LN2_LO), r);
    p = _mm512_fmadd_ps(_mm512_set1_ps(NUM_EXP_C5), r, _mm512_set1_ps(NUM_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(NUM_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(NUM_EXP_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(NUM_EXP_C1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(NUM_EXP_C0));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
    p = _mm512_add_ps(p, _mm512_set1_ps(1.0f));
    shift = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_castps_si512(scaled), _mm512_castps_si512(round)), 23);
    return _mm512_castsi512_ps(
        _mm512_mask_add_epi32(_mm512_castps_si512(p), number, _mm512_castps_si512(p), shift));
}

/* num_sigmoid */
static inline __m512 vec_sigmoid(__m512 x)
{
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 minus = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN)));
    return _mm512_div_ps(one, _mm512_add_ps(one, vec_exp(minus)));
}

/* The activation's numbers. What silu leaves out is done with numbers that change no bit of the result: times 1,
 * at most Inf, plus -0. */
struct vec_act {
    float alpha, limit, offset;
};

static inline struct vec_act vec_act(const struct hmoe_activation *act)
{
    struct vec_act v = {act->alpha, act->limit, act->offset == 0.0f ? -0.0f : act->offset};
    return v;
}

/* num_gated: min and max give their second operand when there is a NaN */
static inline __m512 vec_gated(const struct vec_act *act, __m512 gate, __m512 up)
{
    __m512 limit = _mm512_set1_ps(act->limit);

    gate = _mm512_min_ps(limit, gate);
    up = _mm512_min_ps(limit, up);
    up = _mm512_max_ps(_mm512_set1_ps(-act->limit), up);
    up = _mm512_add_ps(up, _mm512_set1_ps(act->offset));
    return _mm512_mul_ps(_mm512_mul_ps(gate, vec_sigmoid(_mm512_mul_ps(_mm512_set1_ps(act->alpha), gate))), up);
}

/* vec_gated of words, rounded to words */
static inline __m512i vec_gated_words(const struct vec_act *act, __m512i gate, __m512i up)
{
    return vec_words(vec_gated(act, vec_low(gate), vec_low(up)), vec_gated(act, vec_high(gate), vec_high(up)));
}

/* 16 x 16 lanes: v[i] lane j becomes v[j] lane i */
static inline __attribute__((always_inline)) void vec_transpose(__m512i v[16])
{
    __m512i t[16];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* v[4i + c] quarter q holds column 4q + c of rows 4i .. 4i+3 */
        v[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        v[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* quarters 0 2 | 1 3 of rows 0-7, then of rows 8-15 */
        t[c] = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
        t[8 + c] = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        v[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
        v[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
        v[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
        v[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
    }
}

/* The first `count` of 32 words to memory; stream goes around the caches where a whole line is written. */
static inline void vec_store(void *to, __m512i words, int64_t count, bool stream)
{
    if (count < 32)
        _mm512_mask_storeu_epi16(to, vec_mask(count), words);
    else if (stream && ((uintptr_t)to & 63) == 0)
        _mm512_stream_si512(to, words);
    else
        _mm512_storeu_si512(to, words);
}

#endif
