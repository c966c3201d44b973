/* Knobs: one list (knobs.def), values by id. A set of values is copied from group to plan and never changes. */
#ifndef BASE_KNOBS_H
#define BASE_KNOBS_H

#include "base/status.h"

enum base_knob_id {
#define X(id, name, unit, choices, standard, least, most, meaning) id,
#include "base/knobs.def"
#undef X
    KNOB_COUNT
};

struct base_knobs {
    int64_t value[KNOB_COUNT];
};

extern const struct hmoe_knob base_knob_list[KNOB_COUNT];

/* Defaults, then the environment's HMOE_<NAME>. On error what was not read yet keeps its default. */
enum hmoe_status base_knobs_init(struct base_knobs *knobs, struct base_error *error);
/* Then a text "name=value,name=value" (NULL or "" changes nothing). On error *knobs is unchanged. */
enum hmoe_status base_knobs_set(struct base_knobs *knobs, const char *text, struct base_error *error);
/* The chosen word of a closed set, as text in `buffer`. */
const char *base_knob_choice(const struct base_knobs *knobs, enum base_knob_id id, char *buffer, size_t size);

#endif
