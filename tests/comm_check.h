/* Checks inside a launched rank, where cmocka's cannot be used: they return the line from the rank's function. */
#ifndef COMM_CHECK_H
#define COMM_CHECK_H

#include <stdio.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COMM_SHARE 10 /* sanitizers are slow: a tenth of the work */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define COMM_SHARE 10
#endif
#endif
#ifndef COMM_SHARE
#define COMM_SHARE 1
#endif

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);      \
            return __LINE__;                                                                    \
        }                                                                                       \
    } while (0)

#endif
