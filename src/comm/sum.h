/* A sum over shards whose bits do not depend on how many ranks there are.
 *
 * `shards`, a power of two, are summed in a binary tree in order, ((0+1)+(2+3))+..., in f32, whatever R is: R is a
 * power of two that divides shards; rank r brings shards [r * shards/R, (r+1) * shards/R). All ranks get the same sum.
 * Each rank sums its own subtree, then a slice of all ranks' subtrees, then copies the others' slices.
 */
#ifndef COMM_SUM_H
#define COMM_SUM_H

#include "comm/comm.h"

struct comm_sum;

/* For vectors of up to count_max floats. Collective. limit_ns: how long a sum may wait for another rank. */
enum hmoe_status comm_sum_create(struct comm_sum **sum, struct comm *comm, int shards, int64_t count_max,
                                 int64_t limit_ns, struct base_error *error);
void comm_sum_destroy(struct comm_sum *sum); /* collective, with no sum under way */

/* mine: [shards/R] vectors of `count` floats, the first of which is overwritten; out may be the first one.
 * Collective, one thread per rank; blocks. After a failure of the group it returns that failure. */
enum hmoe_status comm_sum(struct comm_sum *sum, float *const *mine, float *out, int64_t count,
                          struct base_error *error);

#endif
