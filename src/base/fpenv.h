/* The floating-point control word of DESIGN 5: round to nearest even, f32 denormals read as zero, tiny results
 * flushed to zero, no traps. Set around every computation, then put back. The compiler may move arithmetic that stays
 * in registers past either call: let results go through memory, or a function it cannot see into, in between. */
#ifndef BASE_FPENV_H
#define BASE_FPENV_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline uint64_t base_fp_enter(void)
{
    uint32_t before = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* FTZ | all exceptions masked | DAZ, round to nearest */
    return before;
}

static inline void base_fp_leave(uint64_t before)
{
    _mm_setcsr((uint32_t)before);
}

#elif defined(__aarch64__)

static inline uint64_t base_fp_enter(void)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)1 << 24) : "memory"); /* FZ, round to nearest */
    return before;
}

static inline void base_fp_leave(uint64_t before)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(before) : "memory");
}

#else
#error "say here how this CPU flushes denormals"
#endif
#endif
