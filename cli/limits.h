/* This machine's own limits, measured: what no kernel can exceed. */
#ifndef CLI_LIMITS_H
#define CLI_LIMITS_H

#include "kern/kern.h"

enum { LIMITS_ENGINES = 8 };

struct limits {
    int threads;
    double read_gbs, store_gbs;
    int read_method;
    double engine_gflops[LIMITS_ENGINES]; /* in the order of kern_engines; 0: not here */
};

/* Every method, the best of each; over more than 1 GB. false when out of memory. Takes a few seconds. */
bool limits_measure(struct limits *limits, int threads);
/* The best reading method again, over this memory, for about a tenth of a second: GB/s. */
double limits_read_again(const struct limits *limits, const void *base, size_t bytes);
/* One engine's arithmetic on all threads at once, for about `ns`: GFLOP/s. */
double limits_engine(const struct kern_engine *engine, int threads, int64_t ns);
const char *limits_read_name(int method);
int limits_engine_index(const struct kern_engine *engine);

#endif
