/* hmoe check: random cases, every engine that runs here, against the oracle, bit for bit. */
#include "check.h"

#include "base/clock.h"
#if defined(__x86_64__)
#include "kern/amx.h"
#endif

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ENGINES_MOST = 8 };

struct check_settings {
    int64_t seconds, seed;
    int engine, stages, backward;
};

/* Where the checking process is; its parent reads it when it died. */
struct watch {
    uint64_t seed;
    const char *engine; /* static text, at the same address in both */
    int exit_code, ended;
};

struct check {
    const struct cli_command *self;
    struct check_settings settings;
    const struct kern_engine *engine[ENGINES_MOST];
    int engines;
    struct watch *watch;
    int64_t cases, calls[ENGINES_MOST];
    int64_t routing[CASE_ROUTINGS], ranks[CASE_RANKS_MOST + 1], dtype[3], layout[2];
};

#define MEMBER(name) offsetof(struct check_settings, name)

static const struct cli_option check_options[] = {
    {"seconds", CLI_NUMBER, MEMBER(seconds), 0, 1000000, NULL, "N", "how long; 0: one case", NULL},
    {"seed", CLI_NUMBER, MEMBER(seed), 0, INT64_MAX / 2, NULL, "S",
     "of the first case; the next ones have S+1, S+2, ...", "from the clock"},
    {"engine", CLI_CHOICE, MEMBER(engine), 0, 0, "@engine", "NAME", "only this engine", "every engine that runs here"},
    {"stages", CLI_FLAG, MEMBER(stages), 0, 0, NULL, NULL,
     "compare each stage (rows, gate/up, a, slot outputs, y) and name the first that differs", NULL},
    {"backward", CLI_FLAG, MEMBER(backward), 0, 0, NULL, NULL,
     "forward and backward: every gradient, with shared experts, all ways to save state, input and weight gradients "
     "at once or apart", NULL},
    {NULL, CLI_FLAG, 0, 0, 0, NULL, NULL, NULL, NULL},
};

/* The emulated matrix unit: no plan uses it, its kernels are called one by one. NULL where it does not run. */
static const struct kern_engine *emulated(void)
{
#if defined(__x86_64__)
    return kern_amx_emulated.present() ? &kern_amx_emulated : NULL;
#else
    return NULL;
#endif
}

/* The engines to try: all present ones, or the one asked for. */
static int find_engines(struct check *check)
{
    char wanted[32];

    cli_word("@engine", check->settings.engine, wanted, sizeof wanted);
    for (int i = 0; kern_engines[i] && check->engines < ENGINES_MOST - 1; i++) {
        bool asked = check->settings.engine <= 0 || strcmp(wanted, kern_engines[i]->name) == 0;
        if (asked && kern_engines[i]->present())
            check->engine[check->engines++] = kern_engines[i];
    }
    if (check->settings.engine <= 0 && emulated() && !check->settings.backward)
        check->engine[check->engines++] = emulated();
    if (check->engines == 0)
        return cli_usage_error(check->self,
                               "--engine %s: this CPU or build does not run it; 'hmoe doctor' lists what does", wanted);
    return CLI_OK;
}

static void show_finding(const struct case_data *data, const struct check_finding *finding)
{
    const struct cli_difference *d = &finding->difference;
    int digits = data->shape.dtype == HMOE_F32 ? 8 : 4;

    printf("  wrong    %s of %s %" PRId64 " (on rank %d", check_stage_name(finding->stage),
           finding->stage < CHECK_D_UP ? "token" : "expert", d->token, finding->rank);
    if (finding->slot >= 0)
        printf(", slot %" PRId64, finding->slot);
    printf(finding->again ? "), in a second call with half the tokens\n" : ")\n");
    printf("           %" PRId64 " columns differ, the first is %" PRId64 ": %0*x, not %0*x\n", d->differing,
           d->column, digits, d->got, digits, d->wanted);
}

static void show_failure(const struct check *check, const struct check_play *play)
{
    const struct case_data *data = play->data;
    const struct check_finding *finding = &play->finding;
    int failed = cli_first_error(play->seats, data->ranks);

    cli_progress_end();
    printf("\nFAILED with seed %" PRIu64 ", engine %s\n", data->seed, play->engine->name);
    case_print(data);
    if (failed >= 0)
        printf("  error    rank %d: %s\n", failed, play->seats[failed].error);
    if (finding->difference.differing)
        show_finding(data, finding);
    printf("  again    hmoe check --seconds 0 --seed %" PRIu64 "%s", data->seed,
           check->settings.backward ? " --backward" : "");
    if (play->engine != emulated())
        printf(" --engine %s", play->engine->name);
    printf("\n");
    if (!check->settings.stages && !check->settings.backward)
        printf("  where    the same with --stages names the first stage that differs\n");
}

static bool takes(const struct kern_engine *engine, const struct case_data *data)
{
    return (engine->dtypes >> data->shape.dtype & 1) != 0;
}

static bool check_engine(struct check *check, struct case_data *data, const struct check_wanted *wanted, int index)
{
    struct check_play play = {.data = data, .engine = check->engine[index], .wanted = wanted};
    bool alone = play.engine == emulated();

    snprintf(play.knobs, sizeof play.knobs, "engine=%s,%s", play.engine->name, data->knobs);
    check->watch->seed = data->seed;
    check->watch->engine = play.engine->name;
    if (!(alone ? check_kernels(&play) : check->settings.backward ? check_back_run(&play) : check_run(&play))) {
        show_failure(check, &play);
        return false;
    }
    check->calls[index] += alone ? 1 : 2;
    return true;
}

static void count_case(struct check *check, const struct case_data *data)
{
    check->cases++;
    check->routing[data->routing] += data->occurred;
    check->ranks[data->ranks]++;
    check->dtype[data->shape.dtype]++;
    check->layout[data->shape.layout]++;
}

static int check_case(struct check *check, uint64_t seed)
{
    struct check_wanted wanted = {0};
    struct case_data data;
    bool made = case_make(&data, seed) && (!check->settings.stages || check_wanted_make(&wanted, &data)), fine = made;

    for (int i = 0; i < check->engines && fine; i++)
        if (takes(check->engine[i], &data))
            fine = check_engine(check, &data, check->settings.stages ? &wanted : NULL, i);
    if (fine)
        count_case(check, &data);
    check_wanted_free(&wanted);
    case_free(&data);
    if (!made)
        return cli_failure(check->self, "out of memory");
    return fine ? CLI_OK : CLI_FAILED;
}

static void show_summary(const struct check *check)
{
    char count[CLI_TEXT_BYTES];

    cli_progress_end();
    printf("%s case%s, all equal to the oracle bit for bit%s\n", cli_count(count, check->cases),
           check->cases == 1 ? "" : "s", check->settings.stages     ? ", stage by stage"
                                         : check->settings.backward ? ", forward and backward"
                                                                    : "");
    printf("  engines ");
    for (int i = 0; i < check->engines; i++)
        printf("%s %s %" PRId64 " calls", i ? "," : "", check->engine[i]->name, check->calls[i]);
    printf("\n  routing  ");
    for (int i = 0; i < CASE_ROUTINGS; i++)
        printf("%s%s %" PRId64, i == 5 ? ",\n           " : i ? ", " : "", case_routing_names[i], check->routing[i]);
    printf("\n  ranks    1: %" PRId64 ", 2: %" PRId64 ", 3: %" PRId64 ", 4: %" PRId64 "; f32 %" PRId64 ", bf16 %" PRId64
           ", f16 %" PRId64 "; kn %" PRId64 ", nk %" PRId64 "\n",
           check->ranks[1], check->ranks[2], check->ranks[3], check->ranks[4], check->dtype[0], check->dtype[1],
           check->dtype[2], check->layout[0], check->layout[1]);
}

static int check_all(struct check *check)
{
    int64_t end_ns = base_now_ns() + check->settings.seconds * 1000000000;
    uint64_t seed = (uint64_t)check->settings.seed;
    int code;

    do {
        code = check_case(check, seed++);
        cli_progress("%" PRId64 " cases, seed %" PRIu64, check->cases, seed);
    } while (code == CLI_OK && base_now_ns() < end_ns);
    if (code == CLI_OK)
        show_summary(check);
    return code;
}

/* The child did not come to its own end: the case it was at is the one to repeat. */
static int tell_crash(const struct check *check, int status)
{
    char how[64];

    if (WIFSIGNALED(status))
        snprintf(how, sizeof how, "killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(how, sizeof how, "exit status %d", WEXITSTATUS(status));
    return cli_failure(check->self,
                       "CRASHED with engine %s: %s\n  again    hmoe check --seconds 0 --seed %" PRIu64 "%s",
                       check->watch->engine, how, check->watch->seed,
                       check->settings.backward ? " --backward" : "");
}

/* Runs in a child, because a crash may leave nothing in its process that could still say which case it was. */
static int watched(struct check *check)
{
    pid_t parent = getpid(), child;
    int status = 0;

    check->watch = cli_shared(sizeof *check->watch);
    if (!check->watch)
        return cli_failure(check->self, "out of memory");
    child = fork();
    if (child < 0)
        return cli_failure(check->self, "cannot start a process: %s", strerror(errno));
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        check->watch->exit_code = getppid() == parent ? check_all(check) : CLI_FAILED;
        fflush(stdout);
        check->watch->ended = !ferror(stdout);
        exit(check->watch->exit_code); /* runs what a sanitizer still has to say */
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (!WIFEXITED(status) || !check->watch->ended || WEXITSTATUS(status) != check->watch->exit_code)
        return tell_crash(check, status);
    return check->watch->exit_code;
}

static int check_main(const struct cli_command *self, int argc, char **argv)
{
    struct check check = {.self = self, .settings = {.seconds = 10, .seed = -1, .engine = -1}};
    struct cli_line line = {.argc = argc, .argv = argv, .settings = &check.settings};
    int code;

    if (!cli_parse(self, &line))
        return line.exit_code;
    if (check.settings.stages && check.settings.backward)
        return cli_usage_error(self, "--stages and --backward: one of them at a time");
    code = cli_environment_check(self);
    if (code == CLI_OK)
        code = find_engines(&check);
    if (code != CLI_OK)
        return code;
    if (check.settings.seed < 0)
        check.settings.seed = base_now_ns() / 1000000 % 1000000000;
    printf("hmoe check: from seed %" PRId64 ", engines", check.settings.seed);
    for (int i = 0; i < check.engines; i++)
        printf(" %s", check.engine[i]->name);
    printf("\n");
    fflush(stdout);
    return watched(&check);
}

const struct cli_command cli_check = {
    .name = "check",
    .operands = "",
    .summary = "Runs random small layers through every engine of this machine and compares each result with the "
               "oracle, bit for bit.",
    .about = "Each case has a shape, a routing (uniform, log-normal, one hot, two hot, all alike, masked, duplicates, "
             "nothing), 1 to 4 ranks as threads, uneven token counts down to none, a dtype, a layout and knobs, all "
             "from its seed. A failure prints the case and the command that repeats it. The kernels for the matrix "
             "unit are also run with an emulation of it, amx_emulated, on any CPU with AVX-512.\n"
             "\n"
             "Exit status: 0 all equal, 1 a result differed or a call failed.",
    .options = check_options,
    .main = check_main,
};
