/* `hmoe bench`: cases, how one is measured, how it is shown. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli.h"
#include "crew.h"
#include "engine.h"
#include "layer.h"
#include "limits.h"

#include "base/prng.h"

#include <stdatomic.h>

enum bench_routing { BENCH_UNIFORM, BENCH_LOGNORMAL, BENCH_HOT };
extern const char *const bench_routing_names[]; /* as in the JSON lines */

enum { BENCH_PAIRS_MOST = 200, BENCH_LAYERS_MOST = 64, BENCH_RANKS_MOST = 16, BENCH_CASES_MOST = 512 };

/* Two plans, called in turn: fused, and what it is compared with. */
struct bench_case {
    enum hmoe_dtype dtype;
    enum hmoe_layout layout;
    enum bench_routing routing;
    int ranks, workers; /* of each rank */
    int64_t tokens;     /* over all ranks */
    bool backward;            /* the backward of a forward that is not timed */
    enum hmoe_dtype dw_type;  /* of its weights' gradients */
    enum hmoe_dw_mode dw_mode;
    char engine[16];    /* the knob: a name or "auto" */
    char against[32];   /* knobs of the second plan: "path=bulk", or an extension switched off */
};

/* The layers that take turns, together more than 1 GB. */
struct bench_layers {
    int count;
    struct cli_weights layer[BENCH_LAYERS_MOST];
};

struct bench_result {
    struct bench_case what;
    char engine[16]; /* that computes tall blocks */
    int pairs, checked;
    double first_ms[2], median_ms[2], least_ms, p90_ms;
    double ratio; /* median over pairs of against / fused */
    double floor_ms, touched_bytes, flops; /* of one call, on average */
    double dw_bytes;                       /* weights' gradients written, likewise */
    double read_gbs, gflops_limit;         /* measured beside this case */
    struct hmoe_trace_summary trace;       /* of the fused plan, over all ranks */
    double high_water_bytes[2];            /* over all ranks */
    double other_cpus;                     /* used by other programs meanwhile */
    bool exceeds;                          /* faster than its limits allow: something is wrong */
};

/* Experts handed out so that one comes again only after half of the others. */
struct bench_deck {
    int experts, at;
    int32_t *order; /* [E], with E more for scratch */
};

/* Of the whole batch and all experts. */
struct bench_grads {
    char *dy, *dx, *d_up, *d_down;
    float *d_weights;
    void *map;
    size_t bytes;
};

/* A case being measured; rank 0 conducts. */
struct bench_run {
    const struct bench_case *what;
    struct bench_layers *layers;
    const struct limits *limits;
    struct kern_choice choice;
    struct cli_shape shape;
    struct cli_batch batch;
    struct bench_grads grads;
    struct bench_deck deck;
    struct base_prng prng;
    struct cli_seat seats[BENCH_RANKS_MOST];
    struct hmoe_workspace workspace[2][BENCH_RANKS_MOST];
    char knobs[2][64];
    int calls;          /* made so far: the layer and the turn follow from it */
    int pairs_wanted;   /* 0: as many as fit into budget_ns */
    int64_t budget_ns, begun_ns, checked_ns;
    int64_t token;      /* whose experts' weights were changed before this call */
    int stop;           /* rank 0 writes it between two barriers */
    double ms[2][BENCH_PAIRS_MOST];
    double floor_ms, touched_bytes, dw_bytes;
    int checked;
    bool out_of_memory;
    struct cli_difference difference;
    struct bench_result *result;
};

struct bench_settings {
    int64_t workers, reps, experts, seed;
    int all, model, backward;
    unsigned layouts, engines, routings;
    struct cli_list tokens, ranks;
    const char *json;
};

/* One `hmoe bench`. */
struct bench {
    const struct cli_command *self;
    struct bench_settings settings;
    struct cli_shape shape;
    FILE *json;
    struct limits limits[2]; /* of one thread, and of all the workers of a case */
    struct bench_layers layers;
    struct bench_case *cases;     /* [BENCH_CASES_MOST] */
    struct bench_result *results; /* [BENCH_CASES_MOST] */
    int count, done;
    bool titled; /* the table has its head, and no limits were printed since */
};

/* Fills bench->cases; an exit code. */
int bench_plan(struct bench *bench);

/* Rates for the floor, measured again beside the case. */
void bench_rates(struct bench_run *run, double *read_gbs, double *gflops);
/* false when it failed: the reason is in `why`. */
bool bench_measure(struct bench_run *run, char *why, size_t why_size);

/* bench_back.c */
bool bench_grads_make(struct bench_run *run); /* false: no memory */
void bench_grads_free(struct bench_run *run);
struct hmoe_gradients bench_gradients(const struct bench_run *run, int rank);
double bench_dw_bytes(const struct bench_run *run, double touched);
double bench_back_floor(const struct bench_run *run, double touched);
/* The token's dx, and once an expert's d_down_proj, against the oracle: run->difference. false: no memory. */
bool bench_check_back(struct bench_run *run, const struct cli_weights *weights);

bool bench_deck_make(struct bench_deck *deck, int experts);
void bench_deck_free(struct bench_deck *deck);
/* New ids and weights for the whole batch. Returns how many different experts are in them. */
int bench_route(struct bench_run *run);

void bench_show_limits(const struct limits *limits);
void bench_show_head(const struct bench_case *what);
void bench_show_knob_head(void);
/* A machine is called busy when others use more than this part of its CPUs. */
#define BENCH_BUSY 0.05
void bench_show(const struct bench_result *result);
void bench_show_knob(const struct bench_result *result);
void bench_show_scaling(const struct bench_result *results, int count, const struct limits *one,
                        const struct limits *two);
void bench_show_end(const struct bench_result *results, int count);
/* One object a line; file NULL writes nothing. */
void bench_json_limits(FILE *file, const struct limits *limits);
void bench_json(FILE *file, const struct cli_shape *shape, const struct bench_result *result);

#endif
