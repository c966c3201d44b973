#include "cli.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 80, MEANING_AT = 26 };

const struct cli_command *const cli_commands[] = {&cli_run,   &cli_train,  &cli_check, &cli_bench,
                                                  &cli_doctor, &cli_knobs, NULL};

/* One line of text; spaces at its beginning stay. */
static void wrap_line(FILE *out, const char *text, size_t bytes, int indent, int at)
{
    size_t lead = strspn(text, " "), used = 0;
    bool first = true;

    indent += (int)(lead < bytes ? lead : bytes);
    for (used = lead; used < bytes;) {
        size_t length = strcspn(text + used, " \n");
        if (!first && at + 1 + (int)length > WIDTH) {
            fputc('\n', out);
            at = 0;
            first = true;
        }
        at += first ? fprintf(out, "%*s", indent > at ? indent - at : 0, "") : fprintf(out, " ");
        at += fprintf(out, "%.*s", (int)length, text + used);
        first = false;
        used += length + strspn(text + used + length, " ");
    }
}

void cli_wrap(FILE *out, const char *text, int indent, int at)
{
    for (;;) {
        size_t bytes = strcspn(text, "\n");
        wrap_line(out, text, bytes, indent, at);
        fputc('\n', out);
        if (!text[bytes])
            return;
        text += bytes + 1;
        at = 0;
    }
}

static void show_list(FILE *out, const struct cli_list *list)
{
    for (int i = 0; i < list->count; i++)
        fprintf(out, "%s%" PRId64, i ? "," : "", list->value[i]);
}

static void show_bits(FILE *out, const struct cli_option *option, unsigned bits)
{
    char word[64];
    bool any = false;

    for (int i = 0; *cli_word(option->choices, i, word, sizeof word); i++)
        if (bits >> i & 1) {
            fprintf(out, "%s%s", any ? "," : "", word);
            any = true;
        }
}

/* The value that holds when the option is not given; false when that is "nothing". */
static bool show_default(FILE *out, const struct cli_option *option, const void *settings)
{
    const void *member = (const char *)settings + option->offset;
    int64_t number = option->kind == CLI_NUMBER ? *(const int64_t *)member : 0;
    const char *text = option->kind == CLI_TEXT ? *(const char *const *)member : NULL;
    char word[64];

    if (option->kind == CLI_NUMBER && number >= option->least && (number != 0 || !option->absent))
        fprintf(out, "%" PRId64, number);
    else if (option->kind == CLI_CHOICE && *(const int *)member >= 0)
        fprintf(out, "%s", cli_word(option->choices, *(const int *)member, word, sizeof word));
    else if (option->kind == CLI_CHOICES && *(const unsigned *)member)
        show_bits(out, option, *(const unsigned *)member);
    else if (option->kind == CLI_NUMBERS && ((const struct cli_list *)member)->count)
        show_list(out, member);
    else if (text)
        fprintf(out, "%s", text);
    else if (option->absent)
        fprintf(out, "%s", option->absent);
    else
        return false;
    return true;
}

static void show_value(FILE *out, const struct cli_option *option)
{
    char word[64];

    if (option->kind == CLI_FLAG)
        return;
    fputc(' ', out);
    if (option->value) {
        fprintf(out, "%s", option->value);
    } else if (option->kind == CLI_NUMBER) {
        fprintf(out, "N");
    } else if (option->kind == CLI_NUMBERS) {
        fprintf(out, "N,N,...");
    } else if (option->kind == CLI_TEXT) {
        fprintf(out, "TEXT");
    } else {
        for (int i = 0; *cli_word(option->choices, i, word, sizeof word); i++)
            fprintf(out, "%s%s", i ? (option->kind == CLI_CHOICE ? "|" : ",") : "", word);
    }
}

/* Meaning, allowed values, default: one paragraph. */
static void show_meaning(FILE *out, const struct cli_option *option, const void *settings)
{
    char range[64] = "";

    fprintf(out, "%s", option->meaning);
    if (option->kind == CLI_FLAG)
        return;
    if (option->kind == CLI_NUMBER || option->kind == CLI_NUMBERS)
        snprintf(range, sizeof range, "%" PRId64 " to %" PRId64, option->least, option->most);
    if (*range && option->most < INT64_MAX)
        fprintf(out, ", %s", range);
    fprintf(out, " [");
    if (!show_default(out, option, settings))
        fprintf(out, "none");
    fprintf(out, "]");
}

static void show_option(FILE *out, const struct cli_option *option, const void *settings)
{
    char *left = NULL, *right = NULL;
    size_t left_size, right_size;
    FILE *line = open_memstream(&left, &left_size);
    int at;

    fprintf(line, "  --%s", option->name);
    show_value(line, option);
    fclose(line);
    line = open_memstream(&right, &right_size);
    show_meaning(line, option, settings);
    fclose(line);
    at = fprintf(out, "%s", left);
    if (at > MEANING_AT - 2) {
        fputc('\n', out);
        at = 0;
    }
    cli_wrap(out, right, MEANING_AT, at);
    free(left);
    free(right);
}

void cli_help(FILE *out, const struct cli_command *command, const void *settings)
{
    fprintf(out, "Usage: hmoe %s [OPTION]...%s%s\n\n", command->name, *command->operands ? " " : "",
            command->operands);
    cli_wrap(out, command->summary, 0, 0);
    fprintf(out, "\nOptions, with their [defaults]:\n");
    for (const struct cli_option *option = command->options; option->name; option++)
        show_option(out, option, settings);
    fprintf(out, "  --help                  this text\n");
    if (*command->about) {
        fputc('\n', out);
        cli_wrap(out, command->about, 0, 0);
    }
}

void cli_help_all(FILE *out)
{
    fprintf(out, "hmoe %s: one Mixture-of-Experts layer, fused, over the ranks of a group.\n\n", hmoe_version());
    fprintf(out, "Usage: hmoe COMMAND [OPTION]...\n\nCommands:\n");
    for (int i = 0; cli_commands[i]; i++) {
        int at = fprintf(out, "  %s", cli_commands[i]->name);
        cli_wrap(out, cli_commands[i]->summary, 12, at);
    }
    fprintf(out, "\n'hmoe COMMAND --help' explains a command; 'hmoe --version' prints the version.\n");
    fprintf(out, "\nTo begin with:\n"
                 "  hmoe run                        a small layer on this project's own texts, two\n"
                 "                                  ranks, the answer checked against the oracle\n"
                 "  hmoe run --model OLMoE book.txt the layer shape of a published model\n"
                 "  hmoe check --seconds 60         every engine against the oracle, random shapes\n"
                 "  hmoe bench                      how near this machine's limits the layer runs\n"
                 "\nExit status: 0 fine, 1 something failed or a result was wrong, 2 wrong usage.\n");
}
