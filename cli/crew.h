/* The ranks of a run: what each of them reports, and timed calls that all of them make together. */
#ifndef CLI_CREW_H
#define CLI_CREW_H

#include "hmoe.h"

#include <stdbool.h>

/* One rank's place in memory that all ranks share. */
struct cli_seat {
    _Alignas(64) int64_t start_ns, end_ns; /* the latest call */
    struct hmoe_workspace workspace;
    struct hmoe_trace_summary summary;
    uint64_t hash;     /* of y after the first call */
    int64_t unstable;  /* later calls whose y had another hash */
    int64_t peak_bytes; /* the process's memory high water */
    char error[HMOE_ERROR_BYTES];
};

struct cli_player {
    const struct hmoe_boot *boot;
    struct cli_seat *seats; /* [ranks] */
    struct hmoe_group *group;
};

/* Workers of each rank: as asked, or with 0 its share of the CPUs. */
int cli_workers(int64_t asked, int64_t ranks);

/* Each returns false with the reason in the rank's seat. */
bool cli_enter(struct cli_player *player, int workers, const char *knobs);
bool cli_leave(struct cli_player *player, bool fine);
bool cli_note(struct cli_player *player, enum hmoe_status status);
bool cli_barrier(struct cli_player *player);
/* hmoe_forward or hmoe_backward */
typedef enum hmoe_status cli_call_fn(struct hmoe_plan *plan, struct hmoe_call *call);
/* A call that all ranks begin together; afterwards cli_span is valid on every rank. */
bool cli_timed_call(struct cli_player *player, cli_call_fn *run, struct hmoe_plan *plan, struct hmoe_call *call);
/* The same, recorded; the seat's summary is its evidence. path NULL: the trace is not written. */
bool cli_traced_call(struct cli_player *player, cli_call_fn *run, struct hmoe_plan *plan, struct hmoe_call *call,
                     const char *path);

static inline struct cli_seat *cli_seat_of(struct cli_player *player)
{
    return &player->seats[player->boot->rank];
}

/* First start to last end of the latest call. */
int64_t cli_span(const struct cli_seat *seats, int ranks);
/* The lowest rank that has an error, or -1. */
int cli_first_error(const struct cli_seat *seats, int ranks);

/* What all ranks' summaries say together: times added up, percentiles of the slowest rank. */
void cli_sum_summaries(const struct cli_seat *seats, int ranks, struct hmoe_trace_summary *sum);

/* Joins path.rank0, path.rank1, ... into one trace at path and removes them. 0 or errno. */
int cli_trace_merge(const char *path, int ranks);

double cli_median(double *values, int count); /* sorts */
double cli_percentile(const double *sorted, int count, double percent);

#endif
