/* What a rank's model is made of. */
#ifndef MODEL_INNER_H
#define MODEL_INNER_H

#include "comm/sum.h"
#include "model/linear.h"
#include "model/model.h"

/* Where a layer's tensors begin: dense ones in the dense vector, experts in this rank's experts' vector. */
struct layer_at {
    int64_t norm1, qkv, out, norm2, router; /* dense */
    int64_t up, down;                       /* experts: [L,D,2I], [L,I,D] */
};

/* What a layer's forward leaves for its backward, of this rank's rows. */
struct layer_rows {
    float *x;            /* [rows,D] what came in */
    float *h1;           /* [rows,D] its norm */
    float *qkv;          /* [rows,3D] rotated */
    float *share;        /* [sequences,heads,C,C] attention's weights */
    float *mixed;        /* [rows,D] of all heads */
    float *middle;       /* [rows,D] after attention */
    float *h2;           /* [rows,D] */
    float *scale1, *scale2; /* [rows] of the norms */
    float *chance;       /* [rows,E] the router's softmax */
    int32_t *ids;        /* [rows,K] */
    float *weights;      /* [rows,K] */
    struct hmoe_saved *saved;
    int64_t *load;       /* [E] rows of each expert over all ranks, [shard][E] of mine behind it */
};

struct model {
    struct model_config config;
    struct model_boot boot;
    struct model_tensor *tensor;
    int tensors;
    int64_t step;
    uint64_t seed;

    int shards, experts; /* of this rank */
    int64_t rows;        /* of this rank's part of a batch */
    int64_t dense, own;  /* floats: of the dense vector, of this rank's experts */
    struct layer_at *at;
    int64_t embedding, final_norm; /* in the dense vector */
    float *value[2], *grad[2], *first[2], *second[2]; /* [0] dense, [1] own experts */
    float *shard_grad; /* [shards][dense] */

    struct layer_rows *layer;
    float *last, *last_norm, *last_scale; /* [rows,D] [rows,D] [rows] */
    float *logits;                        /* [rows,256] */
    float *row_loss;                      /* [rows] */
    float *moe_out;                       /* [rows,D] */
    float *d[4];                          /* [rows,3D] scratch for gradients */
    float *d_weights, *d_chance;          /* [rows,K] [rows,E] */
    double *shard_balance;                /* [shards] load-balancing loss */
    float *cosine, *sine;                 /* [C, D/heads/2] */

    struct team *team;
    struct linear linear;
    struct comm comm;
    struct comm_sum *sum;
    struct hmoe_group *group;
    struct hmoe_plan *plan;
    void *memory;
    size_t memory_bytes;
};

/* Rows of a pass: a batch's part, or one sequence. */
struct pass {
    struct model *model;
    int64_t rows, sequences, length; /* rows = sequences * length */
    bool learns;
    const uint8_t *inputs, *targets; /* [rows] */
    float balance;
    struct base_error *error;
};

static inline float *dense_at(const struct model *m, int64_t offset)
{
    return m->value[0] + offset;
}

void model_import(struct model *model, const struct model_state *state); /* params.c */

/* norm.c: y = x * scale * gain, scale = 1/sqrt(mean of squares + 1e-5) of a row */
struct norm {
    const float *x, *gain;
    float *scale, *y;
    int64_t rows, width;
};
void model_norm(struct team *team, const struct norm *norm);
/* dx += its gradient; d_gain: of each shard, stride apart. */
struct norm_back {
    struct norm forward;
    const float *dy;
    float *dx, *d_gain;
    int shards;
    int64_t stride;
};
void model_norm_back(struct team *team, const struct norm_back *back);

/* attention.c: qkv [rows,3D] in place rotated; mixed [rows,D] */
void model_attention(const struct pass *pass, struct layer_rows *rows);
void model_attention_back(const struct pass *pass, const struct layer_rows *rows, const float *d_mixed, float *d_qkv);
void model_rotations(struct model *model);

/* router.c: logits in rows->chance become its softmax; ids, weights; loads. */
void model_route(const struct pass *pass, struct layer_rows *rows);
void model_route_back(const struct pass *pass, const struct layer_rows *rows, const float *d_weights, float *d_chance);
/* Adds up loads over the ranks. */
enum hmoe_status model_gather_load(const struct pass *pass);

/* transformer.c: logits of all rows; the loss's gradient goes back through it. */
enum hmoe_status model_forward(const struct pass *pass);
enum hmoe_status model_backward(const struct pass *pass);
/* loss.c: row losses, and for learning the logits become their gradient. */
void model_losses(const struct pass *pass);
enum hmoe_status model_mean_loss(const struct pass *pass, double *loss, double *balance);

/* adamw.c: gradients summed over ranks, clipped, and one step. */
enum hmoe_status model_learn(struct model *model, const struct model_optimizer *optimizer, struct model_report *report,
                             struct base_error *error);

#endif
