#include "noise.h"

#include "base/clock.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* user, nice, system, idle, iowait, irq, softirq, steal: all but idle and iowait are CPU time that somebody had. */
static double machine_seconds(void)
{
    FILE *file = fopen("/proc/stat", "re");
    unsigned long long t[8] = {0};
    int got = 0;

    if (file) {
        got = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5],
                     &t[6], &t[7]);
        fclose(file);
    }
    return got == 8 ? (double)(t[0] + t[1] + t[2] + t[5] + t[6] + t[7]) / (double)sysconf(_SC_CLK_TCK) : 0.0;
}

static double own_seconds(void)
{
    struct timespec t = {0, 0};

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void noise_begin(struct noise *noise)
{
    *noise = (struct noise){base_now_ns(), machine_seconds(), own_seconds()};
}

double noise_end(const struct noise *noise)
{
    double wall = (double)(base_now_ns() - noise->begun_ns) / 1e9, all = machine_seconds() - noise->all_s;
    double others = all - (own_seconds() - noise->ours_s);

    /* the kernel counts in hundredths of a second */
    return wall > 0.2 && others > 0.0 ? others / wall : 0.0;
}
