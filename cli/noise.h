/* What other programs take of this machine while something is measured. */
#ifndef CLI_NOISE_H
#define CLI_NOISE_H

#include <stdint.h>

struct noise {
    int64_t begun_ns;
    double all_s, ours_s; /* CPU seconds so far: of the whole machine, of this process */
};

void noise_begin(struct noise *noise);
/* CPUs that others used on average since begin; 0 where it cannot be known. */
double noise_end(const struct noise *noise);

#endif
