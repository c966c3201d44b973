/* What the tile engine needs of bf16 beyond portable_vec.h. "Words" are 32 bf16 in one vector; a rounded vector holds
 * 16 in the upper halves of its lanes, so that it also reads as f32. */
#ifndef KERN_AMX_VEC_H
#define KERN_AMX_VEC_H

#define VEC_BYTES 64
#include "kern/portable_transpose.h"

#include <stdbool.h>

/* The first n of 32 words. */
static inline __mmask32 bf16_mask(int64_t n)
{
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
}

/* num_round */
static inline __m512i bf16_round(__m512 f)
{
    __m512i u = _mm512_castps_si512(f);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __m512i kept = _mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000));
    __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(kept, nan, _mm512_set1_epi32(0x7fc00000));
}

/* Two rounded vectors as pairs: each lane is (low, high). */
static inline __m512i bf16_pairs(__m512i low, __m512i high)
{
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
}

/* In each run of eight words the first four, and the last four, widened: the order of unpacklo and unpackhi. */
static inline __m512 bf16_low(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), words));
}

static inline __m512 bf16_high(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), words));
}

/* Back to words; rounds. */
static inline __m512i bf16_words(__m512 low, __m512 high)
{
    return _mm512_packus_epi32(_mm512_srli_epi32(bf16_round(low), 16), _mm512_srli_epi32(bf16_round(high), 16));
}

/* num_gated, not yet rounded */
static inline __m512 bf16_gated(const struct hmoe_activation *act, __m512 gate, __m512 up)
{
    return (__m512)vec_gated(act, (vec)gate, (vec)up);
}

/* bf16_gated of words, rounded to words */
static inline __m512i bf16_gated_words(const struct hmoe_activation *act, __m512i gate, __m512i up)
{
    return bf16_words(bf16_gated(act, bf16_low(gate), bf16_low(up)), bf16_gated(act, bf16_high(gate), bf16_high(up)));
}

/* The even, or the odd, of 64 words. */
static inline __m512i bf16_every_other(__m512i first, __m512i second, int odd)
{
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i low = _mm512_or_si512(_mm512_slli_epi32(lane, 2), _mm512_set1_epi32(odd));
    __m512i index = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(2)), 16));
    return _mm512_permutex2var_epi16(first, index, second);
}

/* The first `count` of 32 words to memory; stream goes around the caches where a whole line is written. */
static inline void bf16_store(void *to, __m512i words, int64_t count, bool stream)
{
    if (count < 32)
        _mm512_mask_storeu_epi16(to, bf16_mask(count), words);
    else if (stream && ((uintptr_t)to & 63) == 0)
        _mm512_stream_si512(to, words);
    else
        _mm512_storeu_si512(to, words);
}

#endif
