/* Dense products, by the kernels of the layer: a product of rows with a matrix is kern.h's pack and gmm2, a matrix's
 * gradient is its outer. */
#ifndef MODEL_LINEAR_H
#define MODEL_LINEAR_H

#include "kern/kern.h"
#include "model/team.h"

struct linear {
    struct team *team;
    int threads;
    const struct kern_engine *engine;
    char **scratch, **packed; /* [threads] */
    const void **row[2];      /* [rows_max] */
    void ***out;              /* [threads][LINEAR_ROWS] */
    int64_t rows_max;
    void *memory;
};

/* widest: the most terms or columns of any product. */
enum hmoe_status linear_create(struct linear *linear, struct team *team, int threads, int64_t rows_max, int64_t widest,
                               struct base_error *error);
void linear_destroy(struct linear *linear);

/* y [rows,columns] = x [rows,terms] * w, w [terms,columns] (HMOE_KN) or [columns,terms] (HMOE_NK). */
struct linear_product {
    const float *x, *w;
    int64_t rows, terms, columns;
    enum hmoe_layout layout;
    float *y;
};
void linear_multiply(struct linear *linear, const struct linear_product *product);

/* For each shard s of `shards`, of rows/shards rows: out[s] [left_columns,right_columns] = left^T * right. */
struct linear_outer {
    const float *left, *right;
    int64_t rows, left_columns, right_columns;
    int shards;
    float *out;
    int64_t out_stride; /* floats from shard to shard */
};
void linear_outer(struct linear *linear, const struct linear_outer *outer);

#endif
