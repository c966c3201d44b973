/* The layer: plans and forward calls, driven by events. The files' numbers are the data's way; forward.c is the
 * recipe. What a call means: include/hmoe.h and DESIGN 4. */
#ifndef MOE_H
#define MOE_H

#include "base/knobs.h"
#include "rt/rt.h"

struct moe_plan;

/* Where a plan lives: this rank's transport and workers. They outlive the plan. */
struct moe_host {
    struct comm *comm;
    struct rt_pool *pool;
    struct trace *trace;
};

/* options: checked and agreed on by all ranks, knobs already read from its text. Collective; on failure every rank
 * gets the same error. */
enum hmoe_status moe_plan_create(struct moe_plan **plan, const struct moe_host *host,
                                 const struct hmoe_plan_options *options, const struct base_knobs *knobs,
                                 struct base_error *error);
void moe_plan_destroy(struct moe_plan *plan); /* collective, no call in flight */

/* The bytes of a plan on one of `ranks` ranks; same_memory: ranks are threads. */
enum hmoe_status moe_plan_measure(const struct hmoe_plan_options *options, const struct base_knobs *knobs, int ranks,
                                  int workers, struct hmoe_workspace *workspace, struct base_error *error);
void moe_plan_workspace(const struct moe_plan *plan, struct hmoe_workspace *workspace);

/* hmoe_saved_*. */
struct moe_saved;
enum hmoe_status moe_saved_create(struct moe_saved **saved, struct moe_plan *plan,
                                  const struct hmoe_saved_options *options, struct base_error *error);
enum hmoe_status moe_saved_measure(const struct hmoe_plan_options *options, const struct base_knobs *knobs, int ranks,
                                   const struct hmoe_saved_options *saved, size_t *bytes, struct base_error *error);
enum hmoe_status moe_saved_clear(struct moe_saved *saved, struct base_error *error);
enum hmoe_status moe_saved_destroy(struct moe_saved *saved, struct base_error *error);
void moe_saved_read(const struct moe_saved *saved, struct hmoe_saved_usage *usage);

/* hmoe_backward_start, hmoe_backward_input_start, hmoe_backward_weight_start; saved: call->saved's, or NULL. */
enum hmoe_status moe_backward_start(struct moe_plan *plan, struct hmoe_call *call, struct moe_saved *saved,
                                    struct base_error *error);
enum hmoe_status moe_backward_input_start(struct moe_plan *plan, struct hmoe_call *call, struct moe_saved *saved,
                                          struct base_error *error);
enum hmoe_status moe_backward_weight_start(struct moe_plan *plan, struct hmoe_call *call, struct moe_saved *saved,
                                           struct base_error *error);

/* hmoe_forward_start, hmoe_call_done, hmoe_call_wait; the plan of the call is plan's owner, set by the caller. */
enum hmoe_status moe_forward_start(struct moe_plan *plan, struct hmoe_call *call, struct moe_saved *saved,
                                   struct base_error *error);
int moe_call_done(const struct hmoe_call *call);
enum hmoe_status moe_call_wait(const struct moe_plan *plan, struct hmoe_call *call);
int moe_plan_idle(const struct moe_plan *plan);
enum hmoe_status moe_plan_settle(const struct moe_plan *plan, struct base_error *error);

/* Every stage's values of the latest call, for `hmoe check --stages`: plain rows in the order of the rows this rank
 * received (by local expert, source rank, token, slot). Any pointer may be NULL. Set between calls. */
struct moe_tap {
    void *rows;      /* [N,H] */
    void *gate_up;   /* [N,2I] */
    void *a;         /* [N,I] */
    int64_t rows_max; /* N that fits */
};
void moe_plan_tap(struct moe_plan *plan, const struct moe_tap *tap);
/* Rows received in the latest call, and for each its source rank and slot (token * K + k there). */
int64_t moe_tap_rows(const struct moe_plan *plan, int32_t *source, int64_t *slot, int64_t rows_max);
/* The slot outputs of this rank's own tokens in the latest call, [T*K,H]; masked slots hold nothing of use. */
const void *moe_tap_slots(const struct moe_plan *plan);

#endif
