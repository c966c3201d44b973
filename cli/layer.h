/* A layer to run: its shape, its weights, a batch for it, and the oracle's word on single tokens. */
#ifndef CLI_LAYER_H
#define CLI_LAYER_H

#include "hmoe.h"

#include "ref/moe_ref.h"

#include <stdbool.h>

struct cli_shape {
    const char *name; /* the model's, or NULL */
    int64_t hidden, inner;
    int experts, topk;
    enum hmoe_dtype dtype;
    enum hmoe_layout layout;
    enum hmoe_gating gating;
    struct hmoe_activation activation;
    bool biased;
    bool renormalised; /* do the top-k weights of a token sum to one? */
};

/* Published layers; index -1 or past the end gives NULL. Names: CLI_MODELS, in the same order. */
#define CLI_MODELS "Qwen3-30B-A3B|OLMoE|Mixtral-8x7B|DeepSeek-V3|gpt-oss-20b"
#define CLI_DTYPES "f32|bf16|f16" /* enum hmoe_dtype */
#define CLI_LAYOUTS "kn|nk"       /* enum hmoe_layout */
const struct cli_shape *cli_model(int index);

double cli_expert_bytes(const struct cli_shape *shape);  /* both projections of one expert */
double cli_weight_bytes(const struct cli_shape *shape);  /* all experts, with biases */
double cli_flops(const struct cli_shape *shape, int64_t rows);
struct hmoe_plan_options cli_plan_options(const struct cli_shape *shape, int64_t tokens_max, const char *knobs);

/* All experts' weights, random: uniform with a deviation of 1/sqrt(terms), so that outputs keep their size. */
struct cli_weights {
    struct cli_shape shape;
    char *up, *down, *up_bias, *down_bias;
    void *map;
    size_t map_bytes;
};
/* false when there is no memory. The bits depend on shape and seed only. */
bool cli_weights_make(struct cli_weights *weights, const struct cli_shape *shape, uint64_t seed, int threads);
void cli_weights_free(struct cli_weights *weights);
/* The part of one rank. */
struct hmoe_layer cli_weights_of(const struct cli_weights *weights, int rank, int ranks);

/* The global batch; split contiguously in rank order. */
struct cli_batch {
    int64_t tokens;
    char *x;        /* [T,H] */
    int32_t *ids;   /* [T,K] */
    float *weights; /* [T,K] */
    char *y;        /* [T,H], shared with forked ranks */
};
bool cli_batch_make(struct cli_batch *batch, const struct cli_shape *shape, int64_t tokens);
void cli_batch_free(struct cli_batch *batch, const struct cli_shape *shape);
double cli_batch_bytes(const struct cli_shape *shape, int64_t tokens);
/* Tokens [first, first + count) of a rank. */
int64_t cli_first_token(int64_t tokens, int rank, int ranks);
struct hmoe_call cli_call(const struct cli_weights *weights, const struct cli_batch *batch, int rank, int ranks);

/* One token against the oracle. */
struct cli_difference {
    int64_t token, column, differing; /* differing 0: equal bit for bit */
    uint32_t got, wanted;             /* bits */
};
/* "token 3: 5 of 96 columns differ, the first is 2: 3f81, not 3f80"; returns buffer. */
const char *cli_difference_text(char *buffer, size_t size, const struct cli_shape *shape,
                                const struct cli_difference *difference);
struct ref_layer cli_ref_layer(const struct cli_weights *weights);
/* false when out of memory. */
bool cli_verify_token(const struct cli_weights *weights, const struct cli_batch *batch, int64_t token,
                      struct cli_difference *difference);
/* Compares two rows of `columns` elements. */
void cli_compare_row(enum hmoe_dtype dtype, const void *got, const void *wanted, int64_t columns,
                     struct cli_difference *difference);

/* Zeroed memory that forked children share with us; NULL when there is none. */
void *cli_shared(size_t bytes);
void cli_shared_free(void *base, size_t bytes);

#endif
