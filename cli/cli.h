/* The command's frame: commands, options, exit codes and what every command prints with.
 * One option table per command drives parsing, --help and the ranges in error texts. */
#ifndef CLI_H
#define CLI_H

#include "hmoe.h"

#include <stdbool.h>
#include <stdio.h>

enum cli_exit { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

/* ---------------------------------------------------------------- options */

enum cli_kind {
    CLI_NUMBER,  /* int64_t in [least, most] */
    CLI_CHOICE,  /* int: position in choices, -1: not given */
    CLI_CHOICES, /* unsigned: a bit for each choice named, "a,b" */
    CLI_NUMBERS, /* struct cli_list: "1,16,128" */
    CLI_TEXT,    /* const char * */
    CLI_FLAG,    /* int: 1 when given */
};

enum { CLI_LIST_MOST = 32 };

struct cli_list {
    int count;
    int64_t value[CLI_LIST_MOST];
};

/* A table of these ends with a NULL name. The default is what the settings hold before parsing. */
struct cli_option {
    const char *name;
    enum cli_kind kind;
    size_t offset;        /* of the member in the command's settings */
    int64_t least, most;  /* numbers */
    const char *choices;  /* "a|b|c", or "@knob" for the choices of that knob */
    const char *value;    /* the value's name in --help; NULL: N, the choices or TEXT */
    const char *meaning;
    const char *absent;   /* shown as the default where the settings hold 0 or NULL; NULL: nothing is shown */
};

struct cli_command {
    const char *name;
    const char *operands; /* "[FILE...]" or "" when none are taken */
    const char *summary;  /* one line */
    const char *about;    /* paragraphs after the options */
    const struct cli_option *options;
    int (*main)(const struct cli_command *self, int argc, char **argv);
};

/* A command line being read: settings hold the defaults; operands are argv[first .. argc-1] afterwards. */
struct cli_line {
    int argc;
    char **argv;
    void *settings;
    int first;
    int exit_code; /* when cli_parse said that there is nothing more to do */
};

/* true: go on. false: leave with line->exit_code (--help was shown, or an error told). */
bool cli_parse(const struct cli_command *command, struct cli_line *line);
/* "hmoe run: ..." on stderr; returns CLI_USAGE or CLI_FAILED. */
__attribute__((format(printf, 2, 3)))
int cli_usage_error(const struct cli_command *command, const char *format, ...);
__attribute__((format(printf, 2, 3)))
int cli_failure(const struct cli_command *command, const char *format, ...);

/* One word of "a|b|c" (or "@knob"), as text in buffer; "" outside. */
const char *cli_word(const char *choices, int64_t index, char *buffer, size_t size);

/* ------------------------------------------------------------------- help */

void cli_help(FILE *out, const struct cli_command *command, const void *settings);
void cli_help_all(FILE *out);
/* Text in columns [indent, 80), the first line starting at column `at`. */
void cli_wrap(FILE *out, const char *text, int indent, int at);

extern const struct cli_command cli_run, cli_train, cli_check, cli_bench, cli_doctor, cli_knobs;
extern const struct cli_command *const cli_commands[]; /* ends with NULL */

/* --------------------------------------------------------------- printing */

enum { CLI_TEXT_BYTES = 32 };
/* "1.21 GB", "8.05 ms", "12,345": written into buffer[CLI_TEXT_BYTES] and returned. */
const char *cli_bytes(char *buffer, double bytes);
const char *cli_time(char *buffer, double ns);
const char *cli_count(char *buffer, int64_t count);
/* A bar of `value` of `most`, `width` columns wide at most, without padding. */
const char *cli_bar(char *buffer, size_t size, double value, double most, int width);

/* Progress on stderr, only once two seconds have passed since cli_progress_begin: a line that rewrites itself on a
 * terminal, elsewhere a line every five seconds. */
void cli_progress_begin(void);
__attribute__((format(printf, 1, 2)))
void cli_progress(const char *format, ...);
/* For a step that will take long: shown at once. */
__attribute__((format(printf, 1, 2)))
void cli_progress_now(const char *format, ...);
void cli_progress_end(void); /* clears the terminal's line */

/* --------------------------------------------------------------- parallel */

/* body(argument, index) for every index below count, on up to `threads` threads; all are joined on return. */
void cli_parallel(int threads, int64_t count, void (*body)(void *argument, int64_t index), void *argument);

/* 0 when path can be written later, else errno. Leaves an existing file as it is. */
int cli_writable(const char *path);

#endif
