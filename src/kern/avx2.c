/* The portable engine with 32-byte vectors; compiled with -mavx2 -mfma (CMakeLists.txt). */
#define VEC_BYTES 32
#define MICRO_ROWS 3 /* 12 of 16 registers hold chains */
#include "kern/portable_outer.h"

const struct kern_engine kern_avx2 = {
    .name = "avx2",
    .dtypes = 1u << HMOE_F32 | 1u << HMOE_BF16 | 1u << HMOE_F16,
    .rows_most = ROWS_MOST,
    .present = kern_has_avx2,
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
