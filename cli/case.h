/* A random case for `hmoe check`: a shape, a routing and data, all from one seed. */
#ifndef CLI_CASE_H
#define CLI_CASE_H

#include "layer.h"

enum case_routing {
    CASE_UNIFORM,
    CASE_LOGNORMAL,
    CASE_ONE_HOT,
    CASE_TWO_HOT,
    CASE_ALIKE,      /* every token has the same ids */
    CASE_MASKED,     /* some slots are -1, with NaN weights */
    CASE_DUPLICATES, /* ids repeat within a token */
    CASE_NOTHING,    /* every slot is masked */
    CASE_ROUTINGS
};
extern const char *const case_routing_names[CASE_ROUTINGS];

enum { CASE_RANKS_MOST = 4, CASE_KNOBS_BYTES = 256 };

struct case_data {
    uint64_t seed;
    struct cli_shape shape;
    int ranks, workers;
    int64_t tokens[CASE_RANKS_MOST]; /* of each rank */
    int64_t first[CASE_RANKS_MOST + 1];
    enum case_routing routing;
    bool occurred; /* the routing it is named after is really there (a batch may be too small for it) */
    bool special;  /* x holds NaN, infinities and denormals */
    enum hmoe_index ids_type;
    enum hmoe_dtype weights_type;
    char knobs[CASE_KNOBS_BYTES];
    struct ref_layer layer;
    void *x, *ids, *weights; /* global batch */
    void *y;                 /* what the ranks write */
    void *wanted;            /* the oracle's y */
    void *memory;            /* what all of the above lie in */
};

/* The same case for the same seed, anywhere. false when out of memory. Fills everything but y. */
bool case_make(struct case_data *data, uint64_t seed);
/* The oracle: fills data->wanted, and each stage's rows by slot where not NULL. false when out of memory. */
bool case_solve(const struct case_data *data, void *gate_up, void *a, void *slots);
void case_free(struct case_data *data);
/* What a rank passes; its first `tokens` tokens. */
struct hmoe_call case_call(const struct case_data *data, int rank, int64_t tokens);
void case_print(const struct case_data *data);

#endif
