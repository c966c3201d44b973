/* Sleeping on a 32-bit word in shared memory. Not FUTEX_PRIVATE: the word may be in another process's window. */
#ifndef COMM_FUTEX_H
#define COMM_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Sleeps while *word == value; limit_ns < 0 is no limit. False when the limit passed; may return early. */
static inline bool comm_futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t limit_ns)
{
    struct timespec limit = {.tv_sec = limit_ns / 1000000000, .tv_nsec = limit_ns % 1000000000};

    return syscall(SYS_futex, word, FUTEX_WAIT, value, limit_ns < 0 ? NULL : &limit, NULL, 0) == 0 ||
           errno != ETIMEDOUT;
}

static inline void comm_futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#endif
