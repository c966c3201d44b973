/* The tile layer: eight tiles of 16 rows by 64 bytes. TDPBF16PS (amx_tile_dp) adds to each f32 of c one block of 32
 * terms of the pair chain, in a's rows as they stand and in b's as 16 pairs of rows: [pair][column][2].
 *
 * The compilers' load intrinsics do not tell the optimiser that they read memory: what was stored with vectors is
 * loaded safely only after amx_tile_fence(). */
#ifndef KERN_AMX_TILES_H
#define KERN_AMX_TILES_H

#include "base/fpenv.h"
#include "base/num.h"
#include "kern/intrinsics.h"

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define AMX_TILE_BYTES 1024

static inline void amx_tile_fence(void)
{
    __asm__ volatile("" ::: "memory");
}

#ifdef AMX_EMULATED

union amx_emulated_tile {
    char bytes[AMX_TILE_BYTES];
    float c[16][16];
    uint16_t words[16][32];
};

/* A thread's tile registers. */
static _Thread_local struct {
    bool configured;
    union amx_emulated_tile tile[8];
} amx_emulated;

static inline void amx_tile_config(void)
{
    memset(&amx_emulated, 0, sizeof amx_emulated);
    amx_emulated.configured = true;
}

static inline void amx_tile_release(void)
{
    amx_emulated.configured = false;
}

static inline void amx_tile_zero(int tile)
{
    assert(amx_emulated.configured);
    memset(&amx_emulated.tile[tile], 0, AMX_TILE_BYTES);
}

static inline void amx_tile_load(int tile, const void *base, int64_t stride)
{
    assert(amx_emulated.configured);
    for (int row = 0; row < 16; row++)
        memcpy(amx_emulated.tile[tile].bytes + row * 64, (const char *)base + row * stride, 64);
}

static inline void amx_tile_store(int tile, void *base, int64_t stride)
{
    assert(amx_emulated.configured);
    for (int row = 0; row < 16; row++)
        memcpy((char *)base + row * stride, amx_emulated.tile[tile].bytes + row * 64, 64);
}

#ifdef AMX_SIMDE
#define EMULATED_TARGET
#else
#define EMULATED_TARGET __attribute__((target("avx512f")))
#endif

/* 16 chains side by side. Not inlined, so that no operation leaves the control word that its caller sets; with
 * intrinsics, so that unoptimised builds are fast enough for tests. */
EMULATED_TARGET __attribute__((noinline)) static void amx_emulated_chains(float c[16], const uint16_t a[32],
                                                                          const union amx_emulated_tile *b)
{
    __m512 even = _mm512_setzero_ps(), odd = even;

    for (int pair = 0; pair < 16; pair++) {
        __m512i words = _mm512_loadu_si512(b->words[pair]);
        __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
        even = _mm512_fmadd_ps(_mm512_set1_ps(num_from_bf16(a[2 * pair])), b0, even);
        odd = _mm512_fmadd_ps(_mm512_set1_ps(num_from_bf16(a[2 * pair + 1])), b1, odd);
    }
    _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), _mm512_add_ps(even, odd)));
}

/* The instruction flushes denormals whatever the control word says. */
static inline void amx_tile_dp(int c, int a, int b)
{
    uint64_t before = base_fp_enter();

    assert(amx_emulated.configured);
    for (int row = 0; row < 16; row++)
        amx_emulated_chains(amx_emulated.tile[c].c[row], amx_emulated.tile[a].words[row], &amx_emulated.tile[b]);
    base_fp_leave(before);
}

#else

/* palette 1: each of the eight tiles has 16 rows of 64 bytes */
static inline void amx_tile_config(void)
{
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    _tile_loadconfig(&config);
}

static inline void amx_tile_release(void)
{
    _tile_release();
}

/* Macros, because a tile's number is part of the instruction. */
#define amx_tile_zero(tile) _tile_zero(tile)
#define amx_tile_load(tile, base, stride) _tile_loadd(tile, base, stride)
#define amx_tile_store(tile, base, stride) _tile_stored(tile, base, stride)
#define amx_tile_dp(c, a, b) _tile_dpbf16ps(c, a, b)

#endif
#endif
