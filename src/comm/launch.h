/* The ready-made bootstrap: one function as R threads of this process, or as R forked children. */
#ifndef COMM_LAUNCH_H
#define COMM_LAUNCH_H

#include "base/status.h"

/* What hmoe_launch does. HMOE_ERR_PEER: a rank was killed or exited; HMOE_ERR_ABORTED: a rank returned non-zero. Of
 * several failures the first is told, deaths before returned values, because those are often their consequence.
 * The ranks' allgather fails with HMOE_ERR_MISMATCH when their sizes differ, and with HMOE_ERR_PEER when a rank has
 * ended and so will never come. */
enum hmoe_status comm_launch(enum hmoe_via via, int ranks, hmoe_rank_fn fn, void *argument, struct base_error *error);

#endif
