#include "cli.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { OPTIONS_MOST = 40, FIRST_CODE = 1000 };

static void tell(const struct cli_command *command, const char *format, va_list arguments)
{
    cli_progress_end();
    fflush(stdout); /* what was printed before comes before */
    fprintf(stderr, "hmoe %s: ", command->name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
}

int cli_usage_error(const struct cli_command *command, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    tell(command, format, arguments);
    va_end(arguments);
    fprintf(stderr, "'hmoe %s --help' lists every option.\n", command->name);
    return CLI_USAGE;
}

int cli_failure(const struct cli_command *command, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    tell(command, format, arguments);
    va_end(arguments);
    return CLI_FAILED;
}

static const char *choices_of(const char *choices)
{
    for (int i = 0; *choices == '@' && i < hmoe_knob_count(); i++)
        if (strcmp(hmoe_knob(i)->name, choices + 1) == 0)
            return hmoe_knob(i)->choices;
    return choices;
}

const char *cli_word(const char *choices, int64_t index, char *buffer, size_t size)
{
    const char *word = choices_of(choices);

    for (; index > 0 && *word; index--) {
        word += strcspn(word, "|");
        word += *word == '|';
    }
    snprintf(buffer, size, "%.*s", (int)strcspn(word, "|"), word);
    return buffer;
}

/* The position of a word of the given length in the choices, or -1. */
static int find_word(const char *choices, const char *word, size_t length)
{
    char candidate[64];

    for (int i = 0; *cli_word(choices, i, candidate, sizeof candidate); i++)
        if (strlen(candidate) == length && memcmp(candidate, word, length) == 0)
            return i;
    return -1;
}

enum number_error { NUMBER_FINE, NUMBER_NOT, NUMBER_RANGE };

/* A whole decimal number that ends where `end` says. */
static enum number_error read_number(const char *text, size_t length, const struct cli_option *option, int64_t *value)
{
    char copy[32], *end;

    if (length == 0 || length >= sizeof copy)
        return NUMBER_NOT;
    memcpy(copy, text, length);
    copy[length] = 0;
    if (copy[strspn(copy, "+-0123456789")])
        return NUMBER_NOT;
    errno = 0;
    *value = strtoll(copy, &end, 10);
    if (end == copy || *end)
        return NUMBER_NOT;
    return errno || *value < option->least || *value > option->most ? NUMBER_RANGE : NUMBER_FINE;
}

static int number_error(const struct cli_command *command, const struct cli_option *option, enum number_error why,
                        const char *text)
{
    return cli_usage_error(command, "--%s %s: %s; allowed: %s%lld to %lld", option->name, text,
                           why == NUMBER_NOT ? "not a whole number" : "out of range",
                           option->kind == CLI_NUMBERS ? "numbers with commas between them, each " : "",
                           (long long)option->least, (long long)option->most);
}

static int set_numbers(const struct cli_command *command, const struct cli_option *option, const char *text,
                       struct cli_list *list)
{
    list->count = 0;
    for (const char *item = text;; item++) {
        size_t length = strcspn(item, ",");
        int64_t value = 0;
        enum number_error why = read_number(item, length, option, &value);
        if (why != NUMBER_FINE)
            return number_error(command, option, why, text);
        if (list->count == CLI_LIST_MOST)
            return cli_usage_error(command, "--%s: more than %d numbers", option->name, CLI_LIST_MOST);
        list->value[list->count++] = value;
        item += length;
        if (!*item)
            return CLI_OK;
    }
}

static int set_choices(const struct cli_command *command, const struct cli_option *option, const char *text,
                       unsigned *bits)
{
    *bits = 0;
    for (const char *item = text;; item++) {
        size_t length = strcspn(item, ",");
        int index = find_word(option->choices, item, length);
        if (index < 0)
            return cli_usage_error(command, "--%s %s: allowed are %s, with commas between them", option->name, text,
                                   choices_of(option->choices));
        *bits |= 1u << index;
        item += length;
        if (!*item)
            return CLI_OK;
    }
}

static int set_option(const struct cli_command *command, const struct cli_option *option, const char *text,
                      void *settings)
{
    void *member = (char *)settings + option->offset;
    enum number_error why;
    int64_t number = 0;
    int index;

    switch (option->kind) {
    case CLI_NUMBER:
        why = read_number(text, strlen(text), option, &number);
        if (why != NUMBER_FINE)
            return number_error(command, option, why, text);
        *(int64_t *)member = number;
        return CLI_OK;
    case CLI_CHOICE:
        index = find_word(option->choices, text, strlen(text));
        if (index < 0)
            return cli_usage_error(command, "--%s %s: allowed are %s", option->name, text,
                                   choices_of(option->choices));
        *(int *)member = index;
        return CLI_OK;
    case CLI_CHOICES:
        return set_choices(command, option, text, member);
    case CLI_NUMBERS:
        return set_numbers(command, option, text, member);
    case CLI_TEXT:
        *(const char **)member = text;
        return *text ? CLI_OK : cli_usage_error(command, "--%s: the value is empty", option->name);
    case CLI_FLAG:
        *(int *)member = 1;
        return CLI_OK;
    }
    return CLI_USAGE;
}

/* Returns how many options the table has. */
static int make_long(const struct cli_command *command, struct option *options)
{
    int count = 0;

    for (const struct cli_option *o = command->options; o->name && count < OPTIONS_MOST - 2; o++, count++)
        options[count] = (struct option){o->name, o->kind == CLI_FLAG ? no_argument : required_argument, NULL,
                                         FIRST_CODE + count};
    options[count] = (struct option){"help", no_argument, NULL, 'h'};
    options[count + 1] = (struct option){NULL, 0, NULL, 0};
    return count;
}

static int refused(const struct cli_command *command, int code, const char *word)
{
    if (code == ':')
        return cli_usage_error(command, "%s needs a value", word);
    return cli_usage_error(command, "%s: there is no such option, or it takes no value", word);
}

static bool leave(struct cli_line *line, int exit_code)
{
    line->exit_code = exit_code;
    return false;
}

bool cli_parse(const struct cli_command *command, struct cli_line *line)
{
    struct option options[OPTIONS_MOST];
    int count = make_long(command, options), code;

    opterr = 0;
    optind = 0;
    for (;;) {
        int at = optind > 0 ? optind : 1;
        code = getopt_long(line->argc, line->argv, ":h", options, NULL);
        if (code < 0)
            break;
        if (code == 'h') {
            cli_help(stdout, command, line->settings);
            return leave(line, CLI_OK);
        }
        if (code < FIRST_CODE || code >= FIRST_CODE + count)
            return leave(line, refused(command, code, line->argv[optind > at ? optind - 1 : at]));
        int result = set_option(command, &command->options[code - FIRST_CODE], optarg, line->settings);
        if (result != CLI_OK)
            return leave(line, result);
    }
    line->first = optind;
    if (!*command->operands && optind < line->argc)
        return leave(line, cli_usage_error(command, "%s: no such operand is taken", line->argv[optind]));
    return true;
}
