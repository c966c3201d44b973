/* `hmoe check`: one case through one engine. */
#ifndef CLI_CHECK_H
#define CLI_CHECK_H

#include "case.h"
#include "cli.h"
#include "crew.h"
#include "engine.h"

#include <pthread.h>

/* In the data's order: the first that differs is the one to look at. From CHECK_DX on, the gradients. */
enum check_stage {
    CHECK_ROWS, CHECK_GATE_UP, CHECK_A, CHECK_SLOTS, CHECK_Y,
    CHECK_DX, CHECK_D_WEIGHTS, CHECK_D_UP, CHECK_D_DOWN, CHECK_D_UP_BIAS, CHECK_D_DOWN_BIAS, CHECK_D_SHARED_UP,
    CHECK_D_SHARED_DOWN
};
enum { CHECK_OUTPUTS = CHECK_D_SHARED_DOWN - CHECK_DX + 1 };

/* What differs where. */
struct check_finding {
    bool again; /* in the second call */
    enum check_stage stage;
    int rank;
    int64_t slot; /* k within the token, -1: all of them together */
    struct cli_difference difference;
};

/* The oracle's values of every stage, [T*K] rows each. */
struct check_wanted {
    char *gate_up, *a, *slots;
};

struct check_play {
    struct case_data *data;
    const struct kern_engine *engine;
    char knobs[CASE_KNOBS_BYTES + 32];
    struct cli_seat seats[CASE_RANKS_MOST];
    const struct check_wanted *wanted; /* NULL: y only */
    pthread_mutex_t lock;
    struct check_finding finding;
};

/* The fused call over all ranks, twice: all tokens, then the first half of each rank's. true when it ran and every
 * bit is right; else play->finding or a seat's error says what is wrong. */
bool check_run(struct check_play *play);
/* A forward and its backward: saved options, modes of the weights' gradients, shared experts are of the case, too. */
bool check_back_run(struct check_play *play);
/* Runs the ranks; true when all of them did and nothing differed. */
bool check_launch(struct check_play *play, hmoe_rank_fn rank, void *argument);
int64_t check_most_tokens(const struct case_data *data);
/* The same through the engine's functions alone, one block after the other. */
bool check_kernels(struct check_play *play);
/* Keeps the finding of the first call, there of the earliest stage, and there of the lowest token. */
void check_report(struct check_play *play, const struct check_finding *finding);
const char *check_stage_name(enum check_stage stage);

/* Stage by stage: the oracle's values; what a rank's call leaves behind; and the two compared for the rank's first
 * `tokens` tokens and the rows it received. */
bool check_wanted_make(struct check_wanted *wanted, const struct case_data *data);
void check_wanted_free(struct check_wanted *wanted);
struct check_tap;
struct check_tap *check_tap_begin(const struct case_data *data, struct hmoe_plan *plan); /* NULL: out of memory */
void check_tap_compare(const struct check_tap *tap, struct check_play *play, struct hmoe_plan *plan,
                       struct check_finding where, int64_t tokens);
void check_tap_end(struct check_tap *tap, struct hmoe_plan *plan);

#endif
