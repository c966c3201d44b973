/* What the public handles hold. */
#ifndef API_OBJECTS_H
#define API_OBJECTS_H

#include "base/knobs.h"
#include "moe/moe.h"

#include <stdbool.h>

struct hmoe_group {
    struct comm comm;
    struct rt_pool *pool;
    struct trace trace;
    struct base_knobs knobs;
    int plans;                 /* alive */
    volatile uint32_t *parent; /* a page that a forked child sees zeroed */
};

struct hmoe_plan {
    struct hmoe_group *group;
    struct moe_plan *moe;
    int saved; /* handles alive */
};

struct hmoe_saved {
    struct hmoe_plan *plan;
    struct moe_saved *moe;
};

/* HMOE_ERR_ARGUMENT for NULL, HMOE_ERR_FORKED in a child of the process that made the group. */
enum hmoe_status api_check_group(const struct hmoe_group *group, struct base_error *error);
enum hmoe_status api_check_plan(const struct hmoe_plan *plan, struct base_error *error);

#endif
