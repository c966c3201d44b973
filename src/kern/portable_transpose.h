/* A square of VEC_LANES x VEC_LANES dwords, turned in registers: 4 x 4 inside the 128-bit lanes, then the lanes. */
#ifndef KERN_PORTABLE_TRANSPOSE_H
#define KERN_PORTABLE_TRANSPOSE_H

#include "kern/portable_vec.h"

#if VEC_LANES == 16
#define ZIP32_LO 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define ZIP32_HI 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define ZIP64_LO 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define ZIP64_HI 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LANES_EVEN 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define LANES_ODD 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#elif VEC_LANES == 8
#define ZIP32_LO 0, 8, 1, 9, 4, 12, 5, 13
#define ZIP32_HI 2, 10, 3, 11, 6, 14, 7, 15
#define ZIP64_LO 0, 1, 8, 9, 4, 5, 12, 13
#define ZIP64_HI 2, 3, 10, 11, 6, 7, 14, 15
#define LANES_EVEN 0, 1, 2, 3, 8, 9, 10, 11
#define LANES_ODD 4, 5, 6, 7, 12, 13, 14, 15
#else
#define ZIP32_LO 0, 4, 1, 5
#define ZIP32_HI 2, 6, 3, 7
#define ZIP64_LO 0, 1, 4, 5
#define ZIP64_HI 2, 3, 6, 7
#endif

/* v[4q+j], 128-bit lane b: row 4q..4q+3 of column 4b+j */
VEC_INLINE void transpose_quads(vec_u32 v[VEC_LANES])
{
    VEC_UNROLL
    for (int q = 0; q < VEC_LANES; q += 4) {
        vec_u32 a = __builtin_shufflevector(v[q], v[q + 1], ZIP32_LO);
        vec_u32 b = __builtin_shufflevector(v[q], v[q + 1], ZIP32_HI);
        vec_u32 c = __builtin_shufflevector(v[q + 2], v[q + 3], ZIP32_LO);
        vec_u32 d = __builtin_shufflevector(v[q + 2], v[q + 3], ZIP32_HI);
        v[q] = __builtin_shufflevector(a, c, ZIP64_LO);
        v[q + 1] = __builtin_shufflevector(a, c, ZIP64_HI);
        v[q + 2] = __builtin_shufflevector(b, d, ZIP64_LO);
        v[q + 3] = __builtin_shufflevector(b, d, ZIP64_HI);
    }
}

#if VEC_LANES == 16
VEC_INLINE void transpose_lanes(vec_u32 v[VEC_LANES])
{
    VEC_UNROLL
    for (int j = 0; j < 4; j++) {
        vec_u32 a = __builtin_shufflevector(v[j], v[j + 4], LANES_EVEN);      /* lanes 0 2 of quads 0 1 */
        vec_u32 b = __builtin_shufflevector(v[j], v[j + 4], LANES_ODD);       /* lanes 1 3 */
        vec_u32 c = __builtin_shufflevector(v[j + 8], v[j + 12], LANES_EVEN); /* of quads 2 3 */
        vec_u32 d = __builtin_shufflevector(v[j + 8], v[j + 12], LANES_ODD);
        v[j] = __builtin_shufflevector(a, c, LANES_EVEN);
        v[j + 8] = __builtin_shufflevector(a, c, LANES_ODD);
        v[j + 4] = __builtin_shufflevector(b, d, LANES_EVEN);
        v[j + 12] = __builtin_shufflevector(b, d, LANES_ODD);
    }
}
#elif VEC_LANES == 8
VEC_INLINE void transpose_lanes(vec_u32 v[VEC_LANES])
{
    VEC_UNROLL
    for (int j = 0; j < 4; j++) {
        vec_u32 a = __builtin_shufflevector(v[j], v[j + 4], LANES_EVEN);
        v[j + 4] = __builtin_shufflevector(v[j], v[j + 4], LANES_ODD);
        v[j] = a;
    }
}
#else
VEC_INLINE void transpose_lanes(vec_u32 v[VEC_LANES])
{
    (void)v;
}
#endif

/* v[row] lane column -> v[column] lane row */
VEC_INLINE void transpose(vec_u32 v[VEC_LANES])
{
    transpose_quads(v);
    transpose_lanes(v);
}

#endif
