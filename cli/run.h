/* One `hmoe run`: what run.c measures and report.c prints. */
#ifndef CLI_RUN_H
#define CLI_RUN_H

#include "cli.h"
#include "crew.h"
#include "engine.h"
#include "layer.h"
#include "text.h"

enum { RUN_CALLS_MOST = 50 };

struct run_settings {
    int64_t ranks, tokens, hidden, inner, experts, topk, workers, seed;
    int via, dtype, layout, model, engine;
    const char *knobs, *trace;
};

/* What the ranks write for all; shared memory. */
struct run_board {
    int calls; /* steady calls made */
    int64_t first_ns, traced_ns;
    int64_t steady_ns[RUN_CALLS_MOST];
    struct cli_seat seats[]; /* [ranks] */
};

struct run {
    struct run_settings settings;
    char knobs[CLI_KNOBS_BYTES];
    struct kern_choice choice;
    struct cli_text text;
    int64_t text_tokens;
    struct cli_shape shape;
    struct cli_weights weights;
    struct cli_batch batch;
    struct run_board *board;
    size_t board_bytes;
    int64_t checked; /* tokens compared with the oracle */
    struct cli_difference difference;
};

int64_t run_unstable(const struct run *run); /* later calls with other bits than the first, over all ranks */

/* The sample against the oracle: run->checked and run->difference. false when out of memory. */
bool run_verify(struct run *run);

uint64_t run_hash(const void *rows, size_t bytes);

void run_show_input(const struct run *run);
void run_show_result(const struct run *run);

#endif
