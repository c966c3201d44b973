/* Threads that share out a loop: each index once, to whoever is free. They sleep between loops. */
#ifndef MODEL_TEAM_H
#define MODEL_TEAM_H

#include "base/status.h"

struct team;

/* thread: 0 .. threads-1; the caller is 0. Every thread runs under base_fp_enter(). */
typedef void team_body(void *argument, int64_t index, int thread);

enum hmoe_status team_create(struct team **team, int threads, struct base_error *error);
void team_destroy(struct team *team);
void team_run(struct team *team, int64_t count, team_body *body, void *argument);

#endif
