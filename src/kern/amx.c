/* The engine's table and what its two layouts share. amx_emulated.c compiles this file once more. */
#include "kern/amx.h"
#include "kern/amx_kn.h"
#include "kern/amx_nk.h"

#include "base/prng.h"

#ifndef AMX_EMULATED
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool kern_has_avx512(void);
bool kern_has_avx2(void);
extern const struct kern_engine kern_avx512, kern_avx2;

#ifdef AMX_SIMDE
#define VECTORS kern_avx2 /* the engine for what tiles do not do */
#else
#define VECTORS kern_avx512
#endif

#ifdef AMX_EMULATED

static bool present(void)
{
#ifdef AMX_SIMDE
    return kern_has_avx2();
#else
    return kern_has_avx512();
#endif
}

#else

/* Linux gives the 8 KB of tile state to processes that ask for it. */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static bool present(void)
{
    const unsigned wanted = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
    unsigned a, b, c, d;

    if (!kern_has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted)
        return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#endif

static size_t packed_bytes(const struct kern_layer *layer, int64_t terms, int rows)
{
    (void)layer;
    return pack_bytes(terms, rows);
}

static size_t scratch_bytes(const struct kern_layer *layer)
{
    return layer->layout == HMOE_NK ? nk_scratch_bytes() : kn_scratch_bytes();
}

static void thread_begin(void)
{
    amx_tile_config();
}

static void thread_end(void)
{
    amx_tile_release();
}

/* Compilers leave this out of unoptimised code, and without it the caller's SSE code is tens of times slower. */
static void vectors_end(void)
{
    _mm256_zeroupper();
}

static void pack(const struct kern_pack *p)
{
    pack_x(p);
    vectors_end();
}

static void gmm1(const struct kern_gmm1 *g)
{
    if (g->first == g->last)
        return;
    if (g->layer->layout == HMOE_NK)
        nk_gmm1(g);
    else
        kn_gmm1(g);
    vectors_end();
}

static void gmm2(const struct kern_gmm2 *g)
{
    if (g->first == g->last)
        return;
    if (g->layer->layout == HMOE_NK)
        nk_gmm2(g);
    else
        kn_gmm2(g);
    vectors_end();
}

/* No tiles yet: dY is packed by the same engine, kern_choice.back. */
static void dact(const struct kern_dact *d)
{
    VECTORS.dact(d);
}

static void outer(const struct kern_outer *o)
{
    VECTORS.outer(o);
}

static void combine(const struct kern_combine *c)
{
    VECTORS.combine(c);
}

/* Random bf16 in [-1, 1): zeros would flatter, they take less power. */
static void limit_fill(char *tiles, int64_t bytes)
{
    struct base_prng prng = {1};

    for (int64_t i = 0; i < bytes; i += 2) {
        uint16_t word = num_to_bf16(base_random_sym(&prng, 1.0f));
        memcpy(tiles + i, &word, 2);
    }
}

/* Two by two tiles, 8 steps of them in L1, without a store of C: kn_two_by_two at its best. */
static double limit(int64_t ns)
{
    enum { STEPS = 8, ROUNDS = 64, DPS = 4 };
    _Alignas(64) char tiles[4 * STEPS * AMX_TILE_BYTES];
    _Alignas(64) char c[4 * AMX_TILE_BYTES];
    int64_t start, now, rounds = 0;

    limit_fill(tiles, sizeof tiles);
    start = now = base_now_ns();
    for (; now - start < ns || rounds == 0; now = base_now_ns(), rounds += ROUNDS) {
        amx_tile_fence();
        kn_load_c(c, c, false);
        for (int step = 0; step < ROUNDS * STEPS; step++) {
            const char *tile = tiles + step % STEPS * AMX_TILE_BYTES;
            amx_tile_load(6, tile, 64);
            amx_tile_load(4, tile + STEPS * AMX_TILE_BYTES, 64);
            amx_tile_dp(0, 4, 6);
            amx_tile_load(7, tile + 2 * STEPS * AMX_TILE_BYTES, 64);
            amx_tile_dp(1, 4, 7);
            amx_tile_load(5, tile + 3 * STEPS * AMX_TILE_BYTES, 64);
            amx_tile_dp(2, 5, 6);
            amx_tile_dp(3, 5, 7);
        }
        kn_store_c(c, c + 2 * AMX_TILE_BYTES);
    }
    return (double)rounds * STEPS * DPS * (2.0 * 16 * 16 * 32) * 1e9 / (double)(now - start);
}

#ifdef AMX_EMULATED
const struct kern_engine kern_amx_emulated = {
    .name = "amx_emulated",
#else
const struct kern_engine kern_amx = {
    .name = "amx",
#endif
    .dtypes = 1u << HMOE_BF16,
    .rows_most = AMX_ROWS_MOST,
    .present = present,
    .packed_bytes = packed_bytes,
    .scratch_bytes = scratch_bytes,
    .thread_begin = thread_begin,
    .thread_end = thread_end,
    .pack = pack,
    .gmm1 = gmm1,
    .gmm2 = gmm2,
    .dact = dact,
    .outer = outer,
    .combine = combine,
    .limit = limit,
};
