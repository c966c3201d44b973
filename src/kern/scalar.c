/* The portable engine for any CPU: 16-byte vectors, and fmaf lane by lane. */
#define VEC_BYTES 16
#define MICRO_ROWS 2 /* 8 of 16 registers hold chains */
#include "kern/portable_outer.h"

const struct kern_engine kern_scalar = {
    .name = "scalar",
    .dtypes = 1u << HMOE_F32 | 1u << HMOE_BF16 | 1u << HMOE_F16,
    .rows_most = ROWS_MOST,
    .present = kern_has_baseline,
    .packed_bytes = portable_packed_bytes,
    .scratch_bytes = portable_scratch,
    .thread_begin = portable_thread_begin,
    .thread_end = portable_thread_end,
    .pack = portable_pack,
    .gmm1 = portable_gmm1,
    .gmm2 = portable_gmm2,
    .dact = portable_dact,
    .outer = portable_outer,
    .combine = portable_combine,
    .limit = portable_limit,
};
