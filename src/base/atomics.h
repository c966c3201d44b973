/* What C11 atomics lack. Each non-relaxed atomic in this project names its partner where it is used. */
#ifndef BASE_ATOMICS_H
#define BASE_ATOMICS_H

/* A pause inside a spin loop. */
static inline void base_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
