/* The transformer that `hmoe train` trains: bytes in, bytes out, f32 throughout.
 *
 *     h = embedding[byte];  per layer: h += attention(norm(h));  h += moe(norm(h));  logits = norm(h) * embedding^T
 *
 * Causal multi-head attention with rotary positions; a softmax router, its K largest renormalised; the experts are the
 * fused layer's. The rows of a step lie in MODEL_SHARDS shards. Each rank computes its consecutive shards; what every
 * rank holds a copy of (all but the experts) gets its gradient per shard, summed over shards in a fixed tree. So losses
 * and parameters have the same bits for every number of ranks, workers and threads.
 *
 * Everything here is one rank's; the functions marked all are called by every rank. They block.
 */
#ifndef MODEL_H
#define MODEL_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MODEL_SHARDS = 4, MODEL_BYTES = 256, MODEL_LAYERS_MOST = 64, MODEL_CONTEXT_MOST = 1024 };
enum { MODEL_TENSORS_MOST = 7 * MODEL_LAYERS_MOST + 2 };

struct model_config {
    int layers, width, heads, experts, topk, inner; /* width a multiple of 2 * heads */
    int context;                                    /* bytes of a sequence */
    int batch;                                      /* sequences of a step over all ranks, a multiple of MODEL_SHARDS */
};

struct model_optimizer {
    float rate, least_rate; /* after warm-up, and at the end of the cosine */
    int64_t warmup, steps;
    float beta1, beta2, epsilon, decay, clip, balance; /* balance: weight of the load-balancing loss */
};
extern const struct model_optimizer model_optimizer_standard;

/* One tensor of the whole model. */
struct model_tensor {
    char name[48];
    int dims;
    int64_t shape[3];
    int64_t offset, count; /* floats, in the whole model's vector */
    bool expert;           /* [E, ...]: each rank holds its part */
    bool decays;
};

/* The whole model's tensors, in order; count may be asked first with NULL. The last one's end is the vector's size. */
int model_tensors(const struct model_config *config, struct model_tensor *tensors);
int64_t model_size(const struct model_config *config);
/* NULL, or which number is wrong and what is allowed, in `why`. */
const char *model_config_check(const struct model_config *config, int ranks, char *why, size_t size);

/* All that a checkpoint holds. value, first, second: [model_size]; the last two are AdamW's moments. */
struct model_state {
    float *value, *first, *second;
    int64_t step;
    uint64_t seed;
};
void model_state_init(const struct model_config *config, uint64_t seed, struct model_state *state);

struct model_boot {
    int rank, ranks;
    hmoe_allgather_fn allgather;
    void *context;
    int workers; /* of the layer's group, and threads for all else */
    const char *knobs;
};

struct model;

/* All. The state's values are copied. */
enum hmoe_status model_create(struct model **model, const struct model_config *config, const struct model_boot *boot,
                              const struct model_state *state, struct base_error *error);
void model_destroy(struct model *model); /* all */

struct model_report {
    double loss, balance_loss; /* of the global batch; nats per byte */
    double norm;               /* of the gradient, before clipping */
    double balance;            /* most loaded expert's rows over the mean, the worst layer */
    double rate;
};
/* All. inputs, targets: the whole batch [batch, context], the same on every rank. One step of AdamW. */
enum hmoe_status model_step(struct model *model, const struct model_optimizer *optimizer, const uint8_t *inputs,
                            const uint8_t *targets, struct model_report *report, struct base_error *error);
/* All. The mean loss of these sequences, a whole batch, without learning. */
enum hmoe_status model_loss(struct model *model, const uint8_t *inputs, const uint8_t *targets, double *loss,
                            struct base_error *error);
/* All, with the same arguments. logits[MODEL_BYTES] of the byte after text, whose last `context` are looked at. */
enum hmoe_status model_next(struct model *model, const uint8_t *text, int64_t length, float *logits,
                            struct base_error *error);
/* This rank's part of the state: rank 0 has all that is no expert's. Others' parts are left alone. */
void model_export(const struct model *model, struct model_state *state);
/* For tests: the gradient that the latest step used, before clipping, this rank's part as in model_export. */
void model_export_gradient(const struct model *model, float *gradient);

struct hmoe_group *model_group(struct model *model); /* for traces */
/* Rows that each expert of a layer got in the latest step, all ranks together: [experts]. */
const int64_t *model_load(const struct model *model, int layer);

#endif
