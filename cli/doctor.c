/* hmoe doctor: what this machine has, what the library will make of it, and what to do about anything bad. */
#include "cli.h"
#include "crew.h"
#include "engine.h"

#include "base/knobs.h"
#include "base/memory.h"
#include "base/topology.h"

#include <inttypes.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const struct cli_option no_options[] = {{NULL, CLI_FLAG, 0, 0, 0, NULL, NULL, NULL, NULL}};

/* What is bad, and how many of it there is. */
struct doctor {
    int bad;
};

static void advise(struct doctor *doctor, const char *text)
{
    doctor->bad++;
    printf("  !");
    cli_wrap(stdout, text, 4, 3);
}

/* ------------------------------------------------------------------------- the CPU */

#if defined(__x86_64__)
static void show_list(const char *name, const char *words)
{
    int at = printf("  %-8s", name);
    cli_wrap(stdout, *words ? words + 1 : "none of those that matter here", 11, at);
}

static void show_features(void)
{
    static const char *const wanted[] = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl",
                                         "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"};
    char line[8192] = "", found[512] = "", missing[512] = "";
    FILE *file = fopen("/proc/cpuinfo", "re");

    while (file && fgets(line, sizeof line, file) && strncmp(line, "flags", 5) != 0)
        ;
    if (file)
        fclose(file);
    line[strcspn(line, "\n")] = 0;
    strncat(line, " ", sizeof line - strlen(line) - 1);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        char word[32];
        char *list;
        snprintf(word, sizeof word, " %s ", wanted[i]);
        list = strstr(line, word) ? found : missing;
        snprintf(list + strlen(list), sizeof found - strlen(list), " %s", wanted[i]);
    }
    show_list("has", found);
    show_list("has not", missing);
}
#else
static void show_features(void)
{
}
#endif

/* Caches are named in powers of two. */
static void show_caches(void)
{
    printf("  caches  ");
    for (int level = 1; level <= 3; level++) {
        size_t kib = base_cache_bytes(level) >> 10;
        if (kib == 0)
            printf(" L%d unknown", level);
        else
            printf(" L%d %zu %s", level, kib < 1024 ? kib : kib >> 10, kib < 1024 ? "KiB" : "MiB");
        printf(level < 3 ? "," : "\n");
    }
}

static void show_cpu(struct doctor *doctor)
{
    char name[128];
    long online = sysconf(_SC_NPROCESSORS_ONLN);

    printf("CPU\n  name     %s\n", base_cpu_name(name, sizeof name));
    printf("  CPUs     %d usable by this process, of %ld\n", base_cpus(), online);
    show_caches();
    show_features();
    if (base_cpus() < online)
        advise(doctor, "Fewer CPUs than there are: taskset, a container or the job's settings hold the others back.");
}

/* --------------------------------------------------------------------- the engines */

static void show_present(void)
{
    printf("\nEngines, best first\n");
    for (int i = 0; kern_engines[i]; i++) {
        unsigned dtypes = kern_engines[i]->dtypes;
        printf("  %-8s %-9s f32 %-3s bf16 %-3s f16 %s\n", kern_engines[i]->name,
               kern_engines[i]->present() ? "present" : "not here", dtypes & 1 << HMOE_F32 ? "yes" : "no",
               dtypes & 1 << HMOE_BF16 ? "yes" : "no", dtypes & 1 << HMOE_F16 ? "yes" : "no");
    }
}

/* Why not a better one? */
static void show_reason(const struct kern_choice *choice, enum hmoe_dtype dtype)
{
    for (int i = 0; kern_engines[i] && kern_engines[i] != choice->many; i++)
        if (kern_engines[i]->present())
            printf(" (%s does not take %s)", kern_engines[i]->name,
                   dtype == HMOE_F32 ? "f32" : dtype == HMOE_BF16 ? "bf16" : "f16");
}

static void show_choices(struct doctor *doctor)
{
    static const char *const dtypes[] = {"f32", "bf16", "f16"}, *const layouts[] = {"kn", "nk"};
    struct cli_shape shape = *cli_model(0);
    struct kern_choice choice;
    char text[96], why[256];

    printf("\nChosen by default, for each dtype and layout of weights\n");
    for (int dtype = 0; dtype < 3; dtype++)
        for (int layout = 0; layout < 2; layout++) {
            shape.dtype = (enum hmoe_dtype)dtype;
            shape.layout = (enum hmoe_layout)layout;
            printf("  %-4s %s  ", dtypes[dtype], layouts[layout]);
            if (cli_engine_choose(&choice, &shape, "", why, sizeof why)) {
                printf("none: %s\n", why);
                continue;
            }
            printf("%s", cli_engine_text(text, sizeof text, &choice));
            show_reason(&choice, shape.dtype);
            printf("\n");
            if (layout == 0 && dtype == HMOE_BF16 && strcmp(choice.many->name, "scalar") == 0)
                advise(doctor, "Only the scalar engine runs here: correct, but slow. A CPU with AVX2 and FMA is many "
                               "times faster.");
        }
}

/* ---------------------------------------------------------------------- the memory */

/* The chosen word of a "/sys" setting such as "always [madvise] never". */
static void read_setting(const char *path, char *word, size_t size)
{
    char line[256] = "", *open;
    FILE *file = fopen(path, "re");

    snprintf(word, size, "unknown");
    if (file && fgets(line, sizeof line, file) && (open = strchr(line, '[')))
        snprintf(word, size, "%.*s", (int)strcspn(open + 1, "]"), open + 1);
    if (file)
        fclose(file);
}

static void show_memory(struct doctor *doctor)
{
    char total[CLI_TEXT_BYTES], available[CLI_TEXT_BYTES], huge[32];

    read_setting("/sys/kernel/mm/transparent_hugepage/enabled", huge, sizeof huge);
    printf("\nMemory\n  total    %s, available %s\n", cli_bytes(total, (double)base_memory_total()),
           cli_bytes(available, (double)base_memory_available()));
    printf("  2 MB pages: %s\n", huge);
    if (strcmp(huge, "never") == 0)
        advise(doctor, "Small pages cost about a quarter of the reading rate. As root: echo madvise > "
                       "/sys/kernel/mm/transparent_hugepage/enabled");
    if (base_memory_available() < (size_t)2 << 30)
        advise(doctor, "Less than 2 GB are available: the demo's layer fits, a published model's does not.");
}

static void show_shm(struct doctor *doctor)
{
    struct statvfs status;
    char text[CLI_TEXT_BYTES];
    double bytes;

    if (statvfs("/dev/shm", &status) != 0) {
        printf("  /dev/shm is not there\n");
        return;
    }
    bytes = (double)status.f_bavail * (double)status.f_frsize;
    printf("  /dev/shm %s free\n", cli_bytes(text, bytes));
    if (bytes < 256e6)
        advise(doctor, "A small /dev/shm may stop ranks that are processes. In a container: --shm-size=8g.");
}

/* ------------------------------------------------------------------ the transports */

enum { TRIAL_H = 64, TRIAL_E = 4 };

struct trial {
    uint16_t up[TRIAL_E * TRIAL_H * 2 * TRIAL_H], down[TRIAL_E * TRIAL_H * TRIAL_H];
    struct cli_seat *seats;
};

/* A group of two, a plan and a call. */
static int trial_rank(const struct hmoe_boot *boot, void *argument)
{
    struct trial *trial = argument;
    struct cli_player player = {.boot = boot, .seats = trial->seats};
    struct cli_shape shape = {.hidden = TRIAL_H, .inner = TRIAL_H, .experts = TRIAL_E, .topk = 1, .dtype = HMOE_BF16};
    struct hmoe_plan_options options = cli_plan_options(&shape, 2, "wait_limit_ms=10000");
    uint16_t x[2 * TRIAL_H] = {0}, y[2 * TRIAL_H], zeros[2 * TRIAL_H] = {0};
    int32_t ids[2] = {0, TRIAL_E - 1};
    float weights[2] = {1.0f, 1.0f};
    int first = boot->rank * (TRIAL_E / 2);
    struct hmoe_call call = {.size = sizeof call, .tokens = 2, .x = x, .topk_ids = ids, .topk_weights = weights, .y = y,
                             .ids_type = HMOE_I32, .weights_type = HMOE_F32,
                             .layer = {.up_proj = trial->up + first * TRIAL_H * 2 * TRIAL_H,
                                       .down_proj = trial->down + first * TRIAL_H * TRIAL_H}};
    struct hmoe_plan *plan = NULL;
    bool fine;

    memset(y, 0xff, sizeof y);
    if (!cli_enter(&player, 1, "wait_limit_ms=10000"))
        return 1;
    fine = cli_note(&player, hmoe_plan_create(player.group, &options, &plan)) &&
           cli_note(&player, hmoe_forward(plan, &call));
    if (fine && memcmp(y, zeros, sizeof y) != 0)
        snprintf(cli_seat_of(&player)->error, HMOE_ERROR_BYTES, "the call ended, but its result is wrong");
    if (plan)
        fine = cli_note(&player, hmoe_plan_destroy(plan)) && fine;
    return cli_leave(&player, fine) && !*cli_seat_of(&player)->error ? 0 : 1;
}

static void try_transport(struct doctor *doctor, struct trial *trial, enum hmoe_via via, const char *name)
{
    enum hmoe_status status;
    int failed;

    memset(trial->seats, 0, 2 * sizeof *trial->seats);
    fflush(stdout);
    status = hmoe_launch(via, 2, trial_rank, trial);
    failed = cli_first_error(trial->seats, 2);
    if (status == HMOE_OK) {
        printf("  %-8s works: two ranks as %s made a group and a call\n", name,
               via == HMOE_VIA_THREADS ? "threads" : "processes");
        return;
    }
    printf("  %-8s FAILS: %s\n", name, failed >= 0 ? trial->seats[failed].error : hmoe_last_error());
    advise(doctor, via == HMOE_VIA_THREADS ? "Ranks as threads should work on every machine: please report this."
                                           : "Use --via threads, or see the reason above.");
}

static void show_transports(struct doctor *doctor)
{
    static struct trial trial; /* zeroed, and large for a stack */

    printf("\nTransports, tried now\n");
    trial.seats = cli_shared(2 * sizeof *trial.seats);
    if (!trial.seats) {
        advise(doctor, "No shared memory could be mapped.");
        return;
    }
    try_transport(doctor, &trial, HMOE_VIA_PROCESSES, "shm");
    try_transport(doctor, &trial, HMOE_VIA_THREADS, "threads");
    cli_shared_free(trial.seats, 2 * sizeof *trial.seats);
    show_shm(doctor);
}

/* ---------------------------------------------------------------------- the limits */

static void show_limit(const char *name, enum __rlimit_resource resource, bool bytes)
{
    struct rlimit limit;
    char text[CLI_TEXT_BYTES];

    if (getrlimit(resource, &limit) != 0)
        return;
    if (limit.rlim_cur == RLIM_INFINITY)
        printf("  %-18s none\n", name);
    else if (bytes)
        printf("  %-18s %s\n", name, cli_bytes(text, (double)limit.rlim_cur));
    else
        printf("  %-18s %" PRIu64 "\n", name, (uint64_t)limit.rlim_cur);
}

static void show_limits(struct doctor *doctor)
{
    struct base_knobs knobs;
    struct base_error error;
    struct rlimit space;

    printf("\nLimits in force\n");
    show_limit("address space", RLIMIT_AS, true);
    show_limit("locked memory", RLIMIT_MEMLOCK, true);
    show_limit("open files", RLIMIT_NOFILE, false);
    show_limit("threads", RLIMIT_NPROC, false);
    if (base_knobs_init(&knobs, &error) != HMOE_OK) {
        printf("  environment        %s\n", error.text);
        advise(doctor, "Groups cannot be made until this HMOE_ variable is mended or unset.");
    } else {
        printf("  wait limit         %" PRId64 " ms (knob wait_limit_ms)\n", knobs.value[KNOB_WAIT_LIMIT_MS]);
    }
    printf("  tokens of a call   tokens_max of its plan; rows received: receive_max, or none\n");
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
        advise(doctor, "Plans reserve address space for the worst case: lift the limit with ulimit -v unlimited.");
}

/* Knobs that the environment changes, so that nobody wonders. */
static void show_environment(void)
{
    struct base_knobs knobs;
    struct base_error error;
    bool any = false;

    if (base_knobs_init(&knobs, &error) != HMOE_OK)
        return;
    for (int i = 0; i < KNOB_COUNT; i++)
        if (knobs.value[i] != base_knob_list[i].standard) {
            char word[64];
            printf(any ? ", " : "  environment sets   ");
            if (*base_knob_list[i].choices)
                printf("%s=%s", base_knob_list[i].name,
                       base_knob_choice(&knobs, (enum base_knob_id)i, word, sizeof word));
            else
                printf("%s=%" PRId64, base_knob_list[i].name, knobs.value[i]);
            any = true;
        }
    if (any)
        printf("\n");
}

static int doctor_main(const struct cli_command *self, int argc, char **argv)
{
    struct doctor doctor = {0};
    struct cli_line line = {.argc = argc, .argv = argv, .settings = &doctor};

    if (!cli_parse(self, &line))
        return line.exit_code;
    printf("hmoe %s\n\n", hmoe_version());
    show_cpu(&doctor);
    show_present();
    show_choices(&doctor);
    show_memory(&doctor);
    show_transports(&doctor);
    show_limits(&doctor);
    show_environment();
    if (doctor.bad == 0)
        printf("\nNothing to complain about.\n");
    else
        printf("\n%d thing%s to look at, marked !.\n", doctor.bad, doctor.bad == 1 ? "" : "s");
    return CLI_OK;
}

const struct cli_command cli_doctor = {
    .name = "doctor",
    .operands = "",
    .summary = "Shows what this machine has, what the library makes of it, and what to do about anything bad.",
    .about = "Engines are found by asking the CPU and the kernel, transports by making a group of two ranks and a "
             "call.",
    .options = no_options,
    .main = doctor_main,
};
