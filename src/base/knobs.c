#include "base/knobs.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct hmoe_knob base_knob_list[KNOB_COUNT] = {
#define X(id, name, unit, choices, standard, least, most, meaning) \
    {name, unit, choices, standard, least, most, meaning},
#include "base/knobs.def"
#undef X
};

/* The position of value in "a|b|c", or -1. */
static int64_t find_choice(const char *choices, const char *value)
{
    size_t length = strlen(value);

    for (int64_t i = 0; *choices; i++) {
        size_t word = strcspn(choices, "|");
        if (word == length && memcmp(choices, value, length) == 0)
            return i;
        choices += word + (choices[word] == '|');
    }
    return -1;
}

static enum hmoe_status bad_value(struct base_error *error, const struct hmoe_knob *knob, const char *value)
{
    if (*knob->choices)
        return base_fail(error, HMOE_ERR_ARGUMENT, "knob %s: \"%s\" is not one of %s", knob->name, value,
                         knob->choices);
    return base_fail(error, HMOE_ERR_ARGUMENT, "knob %s: \"%s\" is not a number from %lld to %lld", knob->name,
                     value, (long long)knob->least, (long long)knob->most);
}

static enum hmoe_status set_one(struct base_knobs *knobs, int id, const char *value, struct base_error *error)
{
    const struct hmoe_knob *knob = &base_knob_list[id];
    int64_t number;
    char *end = NULL;

    if (*knob->choices) {
        number = find_choice(knob->choices, value);
        if (number < 0 && strcmp(knob->choices, "off|on") == 0 && (*value == '0' || *value == '1') && !value[1])
            number = *value - '0';
        if (number < 0)
            return bad_value(error, knob, value);
    } else {
        errno = 0;
        number = strtoll(value, &end, 10);
        if (end == value || *end || errno || number < knob->least || number > knob->most)
            return bad_value(error, knob, value);
    }
    knobs->value[id] = number;
    return HMOE_OK;
}

static int find_knob(const char *name)
{
    for (int i = 0; i < KNOB_COUNT; i++)
        if (strcmp(base_knob_list[i].name, name) == 0)
            return i;
    return -1;
}

enum hmoe_status base_knobs_init(struct base_knobs *knobs, struct base_error *error)
{
    char variable[64];

    for (int i = 0; i < KNOB_COUNT; i++)
        knobs->value[i] = base_knob_list[i].standard;
    for (int i = 0; i < KNOB_COUNT; i++) {
        const char *value;
        snprintf(variable, sizeof variable, "HMOE_%s", base_knob_list[i].name);
        for (char *c = variable; *c; c++)
            *c = (char)toupper((unsigned char)*c);
        value = getenv(variable);
        if (value && *value && set_one(knobs, i, value, error) != HMOE_OK)
            return error->status;
    }
    return HMOE_OK;
}

/* Sets from one "name=value" item of the given length. */
static enum hmoe_status set_item(struct base_knobs *knobs, const char *item, size_t length, struct base_error *error)
{
    char text[128], *equals;
    int id;

    if (length >= sizeof text)
        return base_fail(error, HMOE_ERR_ARGUMENT, "knobs: an item of %zu characters is too long", length);
    memcpy(text, item, length);
    text[length] = 0;
    equals = strchr(text, '=');
    if (!equals)
        return base_fail(error, HMOE_ERR_ARGUMENT, "knobs: \"%s\" is not name=value", text);
    *equals = 0;
    id = find_knob(text);
    if (id < 0)
        return base_fail(error, HMOE_ERR_ARGUMENT, "knobs: there is no knob \"%s\" (hmoe knobs lists them)", text);
    return set_one(knobs, id, equals + 1, error);
}

enum hmoe_status base_knobs_set(struct base_knobs *knobs, const char *text, struct base_error *error)
{
    struct base_knobs changed = *knobs;

    while (text && *text) {
        size_t length = strcspn(text, ",");
        if (length && set_item(&changed, text, length, error) != HMOE_OK)
            return error->status;
        text += length + (text[length] == ',');
    }
    *knobs = changed;
    return HMOE_OK;
}

const char *base_knob_choice(const struct base_knobs *knobs, enum base_knob_id id, char *buffer, size_t size)
{
    const char *word = base_knob_list[id].choices;

    for (int64_t i = 0; i < knobs->value[id]; i++)
        word += strcspn(word, "|") + 1;
    snprintf(buffer, size, "%.*s", (int)strcspn(word, "|"), word);
    return buffer;
}
