/* The packed form of a block's rows, activations x and a alike: tiles of 16 rows by one step of 32 elements, 1 KB
 * each, tile (t, s) at t * steps + s. Elements beyond the row, and rows beyond x's block, are zero. KN: rows as they
 * are, [16 rows][32]. NK: turned in pairs, [16 pairs][16 rows][2], the B operand. */
#ifndef KERN_AMX_PACK_H
#define KERN_AMX_PACK_H

#include "base/clock.h"
#include "kern/amx_tiles.h"
#include "kern/amx_vec.h"
#include "kern/kern.h"

#define AMX_ROWS_MOST 256

static inline int pack_tiles(int rows)
{
    return (rows + 15) / 16;
}

static inline int64_t pack_steps(int64_t elements)
{
    return (elements + 31) / 32;
}

static inline size_t pack_bytes(int64_t elements, int rows)
{
    return (size_t)pack_tiles(rows) * (size_t)pack_steps(elements) * AMX_TILE_BYTES;
}

/* One step of 16 rows, of which `count` exist. */
static inline void pack_load(const void *const *rows, int count, int64_t first, __mmask32 mask, vec_u32 v[16])
{
    for (int i = 0; i < 16; i++)
        v[i] = i < count ? (vec_u32)_mm512_maskz_loadu_epi16(mask, (const uint16_t *)rows[i] + first) : (vec_u32){0};
}

static void pack_x(const struct kern_pack *p)
{
    int64_t steps = pack_steps(p->terms);
    char *to = p->x;
    vec_u32 v[16];

    for (int tile = 0; tile < pack_tiles(p->count); tile++)
        for (int64_t step = 0; step < steps; step++, to += AMX_TILE_BYTES) {
            pack_load(p->rows + tile * 16, p->count - tile * 16, step * 32, bf16_mask(p->terms - step * 32), v);
            if (p->layer->layout == HMOE_NK)
                transpose(v);
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(to + i * 64, (__m512i)v[i]);
        }
}

#endif
