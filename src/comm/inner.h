/* Inside the comm room: what comm.c and the transports share. */
#ifndef COMM_INNER_H
#define COMM_INNER_H

#include "comm/comm.h"

/* What a rank shares besides its windows. */
struct comm_block {
    struct comm_control control;
    struct comm_failure failure; /* rank 0's is the group's */
};

/* For comm_open: sets comm->transport, on every rank alike. Collective. */
enum hmoe_status comm_choose(struct comm *comm, const char *wanted, struct base_error *error);

/* For a transport's open: rank's block is mapped here. */
void comm_bind(struct comm *comm, int rank, char *block);

/* For window_create: do all ranks ask for the same size, and does it fit in this host's memory? Collective. */
enum hmoe_status comm_window_check(struct comm *comm, size_t bytes, struct base_error *error);

/* put and signal where every rank's window is mapped. */
void comm_mapped_put(struct comm_window *window, int rank, size_t offset, const void *data, size_t bytes);
void comm_mapped_signal(struct comm_window *window, int rank, size_t counter_offset, uint64_t add);

#endif
