/* One `hmoe train`: what train.c prepares, learn.c does, and both print. */
#ifndef CLI_TRAIN_H
#define CLI_TRAIN_H

#include "cli.h"
#include "crew.h"
#include "engine.h"
#include "text.h"

#include "model/checkpoint.h"

#include <stdatomic.h>

struct train_settings {
    int64_t layers, width, heads, experts, topk, inner, context, batch;
    int64_t steps, minutes, ranks, workers, seed, sample;
    int via;
    const char *rate, *save, *resume, *json, *trace;
};

/* What the ranks share. */
struct train_board {
    int64_t steps;     /* in all; rank 0 sets it before the first, and once more when the minutes are known */
    double validation; /* the latest */
    int64_t load[256]; /* rows of each expert in the last step, all layers together; experts above are left out */
    double exposed;    /* of the last traced step */
    int64_t stage_ns[HMOE_STAGES]; /* of that step, of rank 0's workers */
    struct cli_seat seats[]; /* [ranks] */
};

struct train {
    const struct cli_command *self;
    struct train_settings settings;
    struct cli_text text;
    int64_t learned; /* bytes of the text that are learned from; the rest is held back */
    struct model_config config;
    struct model_optimizer optimizer;
    struct model_state state; /* shared memory; the ranks export to it */
    struct train_board *board;
    size_t board_bytes;
    FILE *json;
    int64_t begun_ns;
    int validations; /* batches of held-back text */
};

/* What each rank runs. */
int train_rank(const struct hmoe_boot *boot, void *train);

void train_show_begin(const struct train *train);
void train_show_end(const struct train *train);

#endif
