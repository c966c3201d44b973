/* hmoe: the command line of HyperMegaMoE. Each command is one row of cli_commands (help.c). */
#include "cli.h"

#include <string.h>

static const struct cli_command *find(const char *name)
{
    for (int i = 0; cli_commands[i]; i++)
        if (strcmp(cli_commands[i]->name, name) == 0)
            return cli_commands[i];
    return NULL;
}

static int unknown(const char *word)
{
    fprintf(stderr, "hmoe: \"%s\" is not a command; there are", word);
    for (int i = 0; cli_commands[i]; i++)
        fprintf(stderr, "%s %s", i ? "," : "", cli_commands[i]->name);
    fprintf(stderr, "\n'hmoe --help' explains them.\n");
    return CLI_USAGE;
}

/* A full disk or a closed pipe must not look like success. */
static int finish(int exit_code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "hmoe: standard output could not be written\n");
        return exit_code ? exit_code : CLI_FAILED;
    }
    return exit_code;
}

int main(int argc, char **argv)
{
    const struct cli_command *command;

    if (argc < 2) {
        cli_help_all(stderr);
        return CLI_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        cli_help_all(stdout);
        return finish(CLI_OK);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("hmoe %s\n", hmoe_version());
        return finish(CLI_OK);
    }
    command = find(argv[1]);
    if (!command)
        return unknown(argv[1]);
    cli_progress_begin();
    return finish(command->main(command, argc - 1, argv + 1));
}
