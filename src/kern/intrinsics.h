/* Intel's intrinsics: the compiler's, or, for the emulated tile engine on CPUs without AVX-512, SIMDe's in their place
 * (https://github.com/simd-everywhere/simde), made of AVX2. What the packaged SIMDe lacks is added here. */
#ifndef KERN_INTRINSICS_H
#define KERN_INTRINSICS_H

#ifdef AMX_SIMDE
#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wextra"
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>
#pragma GCC diagnostic pop

static inline void intrinsics_store_words(void *to, uint32_t mask, simde__m512i words)
{
    simde__m512i_private lanes = simde__m512i_to_private(words);

    for (int i = 0; i < 32; i++)
        if (mask >> i & 1)
            ((uint16_t *)to)[i] = lanes.u16[i];
}

static inline simde__m512i intrinsics_load_words(uint32_t mask, const void *from)
{
    simde__m512i_private lanes = {0};

    for (int i = 0; i < 32; i++)
        if (mask >> i & 1)
            lanes.u16[i] = ((const uint16_t *)from)[i];
    return simde__m512i_from_private(lanes);
}

static inline void intrinsics_store_half(void *to, uint16_t mask, simde__m256i words)
{
    simde__m256i_private lanes = simde__m256i_to_private(words);

    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            ((uint16_t *)to)[i] = lanes.u16[i];
}

static inline simde__m256i intrinsics_low_words(simde__m512i dwords)
{
    simde__m512i_private lanes = simde__m512i_to_private(dwords);
    simde__m256i_private words;

    for (int i = 0; i < 16; i++)
        words.u16[i] = (uint16_t)lanes.u32[i];
    return simde__m256i_from_private(words);
}

static inline void intrinsics_stream(void *to, simde__m512i words)
{
    simde_mm512_storeu_si512(to, words);
}

#undef _mm512_mask_storeu_epi16
#define _mm512_mask_storeu_epi16 intrinsics_store_words
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 intrinsics_load_words
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 intrinsics_store_half
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 intrinsics_low_words
#undef _mm512_stream_si512
#define _mm512_stream_si512 intrinsics_stream
#else
#include <immintrin.h>
#endif

#endif
