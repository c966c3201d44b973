/* hmoe knobs: the one list, as a page. */
#include "cli.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>

static const struct cli_option no_options[] = {{NULL, CLI_FLAG, 0, 0, 0, NULL, NULL, NULL, NULL}};

static void show_default(const struct hmoe_knob *knob)
{
    char word[64];

    if (*knob->choices)
        printf("  [%s] of %s\n", cli_word(knob->choices, knob->standard, word, sizeof word), knob->choices);
    else if (knob->least == INT64_MIN)
        printf("  [%" PRId64 "%s%s] any\n", knob->standard, *knob->unit ? " " : "", knob->unit);
    else
        printf("  [%" PRId64 "%s%s] %" PRId64 " to %" PRId64 "\n", knob->standard, *knob->unit ? " " : "", knob->unit,
               knob->least, knob->most);
}

static int knobs_main(const struct cli_command *self, int argc, char **argv)
{
    int unused = 0;
    struct cli_line line = {.argc = argc, .argv = argv, .settings = &unused};

    if (!cli_parse(self, &line))
        return line.exit_code;
    cli_wrap(stdout, "Knobs, with their [defaults]. Set them by --knobs \"wave=off,strips=4\", by HMOE_WAVE=off in the "
                     "environment, or in a program by the texts in hmoe_group_options and hmoe_plan_options; a text "
                     "outweighs the environment.\n", 0, 0);
    for (int i = 0; i < hmoe_knob_count(); i++) {
        printf("%s", hmoe_knob(i)->name);
        show_default(hmoe_knob(i));
        cli_wrap(stdout, hmoe_knob(i)->meaning, 4, 0);
    }
    return CLI_OK;
}

const struct cli_command cli_knobs = {
    .name = "knobs",
    .operands = "",
    .summary = "Lists every knob: its default, unit, range and meaning.",
    .about = "",
    .options = no_options,
    .main = knobs_main,
};
