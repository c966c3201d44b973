#include "api/report.h"

#include "base/knobs.h"
#include "trace/trace.h"

#include <string.h>

static _Thread_local char last_error[HMOE_ERROR_BYTES];

enum hmoe_status api_report(const struct base_error *error)
{
    if (error->status != HMOE_OK)
        memcpy(last_error, error->text, sizeof last_error);
    return error->status;
}

enum hmoe_status api_check_size(size_t given, size_t expected, const char *what, struct base_error *error)
{
    if (given == expected)
        return HMOE_OK;
    return base_fail(error, HMOE_ERR_ARGUMENT, "size of struct %s is %zu: this library's is %zu; set it to"
                     " sizeof(struct %s) and build against this version's header", what, given, expected, what);
}

const char *hmoe_last_error(void)
{
    return last_error;
}

const char *hmoe_version(void)
{
    return HMOE_VERSION;
}

const char *hmoe_status_name(enum hmoe_status status)
{
    switch (status) {
#define X(name, value, text) case name: return #name;
        HMOE_STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

const char *hmoe_status_text(enum hmoe_status status)
{
    switch (status) {
#define X(name, value, text) case name: return text;
        HMOE_STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

int hmoe_knob_count(void)
{
    return KNOB_COUNT;
}

const struct hmoe_knob *hmoe_knob(int index)
{
    return index >= 0 && index < KNOB_COUNT ? &base_knob_list[index] : NULL;
}

const char *hmoe_stage_name(int stage)
{
    return stage >= 0 && stage < HMOE_STAGES ? trace_stage_name(stage) : "";
}
