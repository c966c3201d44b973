#include "engine.h"

#include "cli.h"

#include "base/knobs.h"
#include "base/num.h"

#include <string.h>

const char *cli_knob_text(char *buffer, size_t size, int engine, const char *knobs)
{
    char word[32];

    *buffer = 0;
    if (engine >= 0)
        snprintf(buffer, size, "engine=%s", cli_word("@engine", engine, word, sizeof word));
    if (knobs)
        snprintf(buffer + strlen(buffer), size - strlen(buffer), "%s%s", *buffer ? "," : "", knobs);
    return buffer;
}

static enum hmoe_status resolve(struct base_knobs *values, const char *knobs, struct base_error *error)
{
    struct base_error environment;

    if (base_knobs_init(values, &environment) != HMOE_OK)
        return base_fail(error, environment.status, "HMOE_ variable in the environment: %.150s", environment.text);
    return base_knobs_set(values, knobs, error);
}

int cli_environment_check(const struct cli_command *self)
{
    char why[256];

    return cli_knob_check("", why, sizeof why) ? cli_usage_error(self, "%s", why) : CLI_OK;
}

const char *cli_knob_check(const char *knobs, char *why, size_t why_size)
{
    struct base_knobs values;
    struct base_error error;

    if (strlen(knobs) >= CLI_KNOBS_BYTES - 1) {
        snprintf(why, why_size, "knobs: more than %d characters", CLI_KNOBS_BYTES - 2);
        return why;
    }
    if (resolve(&values, knobs, &error) == HMOE_OK)
        return NULL;
    snprintf(why, why_size, "%s", error.text);
    return why;
}

struct kern_layer cli_kern_layer(const struct cli_shape *shape)
{
    return (struct kern_layer){
        .hidden = shape->hidden,
        .inner = shape->inner,
        .dtype = shape->dtype,
        .layout = shape->layout,
        .gating = shape->gating,
        .act = num_activation(shape->activation),
    };
}

const char *cli_engine_choose(struct kern_choice *choice, const struct cli_shape *shape, const char *knobs, char *why,
                              size_t why_size)
{
    struct kern_layer layer = cli_kern_layer(shape);
    struct base_knobs values;
    struct base_error error;
    const char *refused;
    char name[32];

    if (resolve(&values, knobs, &error) != HMOE_OK) {
        snprintf(why, why_size, "%s", error.text);
        return why;
    }
    base_knob_choice(&values, KNOB_ENGINE, name, sizeof name);
    refused = kern_choose(choice, name, &layer);
    if (!refused)
        return NULL;
    snprintf(why, why_size, "engine %s: %s", name, refused);
    return why;
}

const char *cli_engine_text(char *buffer, size_t size, const struct kern_choice *choice)
{
    if (choice->few == choice->many || choice->few_rows < 1)
        snprintf(buffer, size, "%s", choice->many->name);
    else
        snprintf(buffer, size, "%s; %s for blocks of up to %d rows", choice->many->name, choice->few->name,
                 choice->few_rows);
    return buffer;
}

const struct kern_engine *cli_engine_named(const char *name)
{
    for (int i = 0; kern_engines[i]; i++)
        if (strcmp(kern_engines[i]->name, name) == 0)
            return kern_engines[i];
    return NULL;
}
