/* `hmoe check`: one case through one engine. */
#ifndef CLI_CHECK_H
#define CLI_CHECK_H

#include "case.h"
#include "cli.h"
#include "crew.h"
#include "engine.h"

#include <pthread.h>

struct check_play {
    struct case_data *data;
    const struct kern_engine *engine;
    char knobs[CASE_KNOBS_BYTES + 32];
    struct cli_seat seats[CASE_RANKS_MOST];
    bool stages; /* compare stage by stage */
    pthread_mutex_t lock;
    struct cli_difference difference; /* token: of the global batch */
    int rank;                         /* where it was seen */
    const char *where;                /* the stage or call it was seen in */
};

/* The fused call over all ranks, twice: all tokens, then the first half of each rank's. true when it ran and every
 * bit is right; else play->difference or a seat's error says what is wrong. */
bool check_run(struct check_play *play);
/* Called by each rank after a call when play->stages: compares what the call left behind, stage by stage. */
bool check_stages(struct check_play *play, struct hmoe_plan *plan, int rank);
/* Keeps the difference of the lowest token. */
void check_report(struct check_play *play, int rank, const char *where, const struct cli_difference *difference);

#endif
