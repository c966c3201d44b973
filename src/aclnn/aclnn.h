/* What the files of this room share. */
#ifndef ACLNN_ACLNN_H
#define ACLNN_ACLNN_H

#include "aclnn_hyper_mega_moe.h"

#include <pthread.h>

enum { ACLNN_DIMS_MAX = 8, ACLNN_NAME_MAX = 127, ACLNN_TEXT_BYTES = 320 };

/* ---- errors (globals.c) */

/* Keeps the sentence for aclGetRecentErrMsg; returns the status. */
aclnnStatus aclnn_fail(aclnnStatus status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void aclnn_fail_again(const char *text); /* what another thread ran into */

/* ---- tensors (tensor.c) */

struct aclTensor {
    int dims, storage_dims;
    int64_t shape[ACLNN_DIMS_MAX], stride[ACLNN_DIMS_MAX], storage[ACLNN_DIMS_MAX];
    int64_t offset;
    aclDataType type;
    aclFormat format;
    char *data; /* of the storage: the view begins at offset */
};

size_t aclnn_type_bytes(aclDataType type); /* 0: not one that holds elements here */
int64_t aclnn_elements(const struct aclTensor *tensor);
/* Is memory dense with the dimensions in this order, outermost first? */
bool aclnn_dense(const struct aclTensor *tensor, const int *order);
bool aclnn_contiguous(const struct aclTensor *tensor);
void *aclnn_address(const struct aclTensor *tensor);
enum hmoe_dtype aclnn_dtype(aclDataType type); /* of a float type */
/* What its copy takes in the workspace, in whole lines; 0 for what needs none: contiguous, a weight, a saved state. */
size_t aclnn_staged_bytes(const struct aclTensor *tensor);
/* Between a view of two dimensions and contiguous memory. */
void aclnn_gather(const struct aclTensor *from, void *to);
void aclnn_scatter(const void *from, const struct aclTensor *to);

/* ---- groups (globals.c, group.c) */

struct aclnn_plan {
    struct hmoe_plan_options options;
    struct hmoe_plan *plan;
    struct aclnn_plan *next;
};

/* A saved state lies behind this, in the caller's tensor, on a line. */
enum { ACLNN_LINE = 64 };
struct aclnn_header {
    uint64_t magic;
    const void *self, *group;
    struct hmoe_saved *saved;
};

struct aclnn_kept {
    struct aclnn_header *header;
    struct hmoe_saved *saved;
    struct aclnn_kept *next;
};

struct aclnn_group {
    char name[ACLNN_NAME_MAX + 1];
    int rank, ranks;
    struct hmoe_group *group;
    pthread_mutex_t lock; /* of all below, and held while a phase two runs */
    struct aclnn_plan *plans;
    struct aclnn_kept *kept; /* saved states whose gradient is due */
    struct aclOpExecutor *executors;
    struct aclnn_group *next;
};

struct aclnn_group *aclnn_group_find(const char *name, int64_t rank); /* NULL: none */
bool aclnn_group_add(struct aclnn_group *group);                     /* false: the name is taken */
struct aclnn_group *aclnn_group_remove(const char *name, int64_t rank);
bool aclnn_group_any(void);
aclnnStatus aclnn_check_name(const char *name);

/* ---- executors (executor.c) */

enum aclnn_slot { X, IDS, WEIGHTS, UP, DOWN, DY, SAVED, Y, DX, D_WEIGHTS, D_UP, D_DOWN, SLOTS };
enum aclnn_kind { FORWARD, GRAD };

/* All that phase two needs: a copy of what phase one was given and found. */
struct aclnn_work {
    enum aclnn_kind kind;
    struct aclnn_group *group;
    struct aclTensor tensor[SLOTS]; /* dims -1: none */
    struct hmoe_plan_options options;
    int64_t tokens;
    size_t saved_bytes;     /* that the tensor needs; 0: nothing is saved */
    size_t workspace_bytes; /* for copies of what is not contiguous */
    char *workspace;
};

static inline bool aclnn_has(const struct aclnn_work *work, enum aclnn_slot slot)
{
    return work->tensor[slot].dims >= 0;
}

struct aclOpExecutor {
    struct aclnn_work work;
    bool used_up, repeatable;
    struct aclOpExecutor *next;
};


/* ---- checks (check.c), the work itself (run.c), streams (stream.c) */

struct aclnn_attributes {
    const char *group;
    int64_t ranks, rank, experts, tokens_max, rows_max;
};

/* Tensors of the work are in place, absent ones with dims -1. Fills the rest. */
aclnnStatus aclnn_check(struct aclnn_work *work, const struct aclnn_attributes *attributes);
aclnnStatus aclnn_run(struct aclnn_work *work);
aclnnStatus aclnn_enqueue(aclrtStream stream, const struct aclnn_work *work);

#endif
