/* The engine for matrix tiles: bf16 products by TDPBF16PS, which computes exactly the pair chain (docs/numerics.md).
 * amx.c is compiled twice: with the tile instructions, and as amx_emulated.c with the C tiles of amx_tiles.h, so
 * that its logic is tested where no CPU has them. */
#ifndef KERN_AMX_H
#define KERN_AMX_H

#include "kern/kern.h"

extern const struct kern_engine kern_amx;
/* Not in kern_engines: it is for tests. It needs no tiles, and with SIMDe no AVX-512. */
extern const struct kern_engine kern_amx_emulated;

#endif
