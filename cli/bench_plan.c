/* Which cases a bench has. */
#include "bench.h"

#include "base/topology.h"

#include <string.h>

static int workers_of(const struct bench *bench, int64_t ranks)
{
    int share = base_cpus() / (int)ranks, most = share < 2 ? share : 2;

    return bench->settings.workers ? (int)bench->settings.workers : most < 1 ? 1 : most;
}

static void add(struct bench *bench, struct bench_case what)
{
    if (bench->count < BENCH_CASES_MOST)
        bench->cases[bench->count++] = what;
}

/* Both layouts that were asked for. */
static void add_layouts(struct bench *bench, struct bench_case what)
{
    for (int layout = 0; layout < 2; layout++)
        if (bench->settings.layouts >> layout & 1) {
            what.layout = (enum hmoe_layout)layout;
            add(bench, what);
        }
}

static bool usable(const struct bench *bench, const char *engine, enum hmoe_dtype dtype)
{
    struct cli_shape shape = bench->shape;
    struct kern_choice choice;
    char knobs[64], why[256];

    shape.dtype = dtype;
    snprintf(knobs, sizeof knobs, "engine=%s", engine);
    return cli_engine_choose(&choice, &shape, knobs, why, sizeof why) == NULL;
}

/* The engines of the main table: what was asked for; else auto for the best and every other vector engine by name. */
static int main_engines(struct bench *bench, char names[][16])
{
    unsigned asked = bench->settings.engines;
    int count = 0;
    char word[16];

    if (!asked)
        snprintf(names[count++], 16, "auto");
    for (int i = 0; *cli_word("@engine", i, word, sizeof word); i++) {
        bool take = asked ? asked >> i & 1 : i > 0 && strcmp(word, "scalar") != 0 && usable(bench, word, HMOE_BF16);
        if (asked && take && !usable(bench, word, HMOE_BF16))
            return cli_usage_error(bench->self, "--engine %s: not on this machine; 'hmoe doctor' lists what is", word),
                   -1;
        if (take)
            snprintf(names[count++], 16, "%s", word);
    }
    return count;
}

/* Is this name the engine that auto has already taken? AMX is: by name it would only lose its help for few rows. */
static bool is_auto(const struct bench *bench, const char *name)
{
    struct kern_choice choice;
    char why[256];

    return cli_engine_choose(&choice, &bench->shape, "engine=auto", why, sizeof why) == NULL &&
           strcmp(choice.many->name, name) == 0;
}

/* Every routing, number of ranks and number of tokens that was asked for. */
static void add_shapes(struct bench *bench, struct bench_case what)
{
    const struct bench_settings *s = &bench->settings;

    what.dtype = HMOE_BF16;
    snprintf(what.against, sizeof what.against, "path=bulk");
    for (int routing = 0; routing < 3; routing++)
        for (int r = 0; r < s->ranks.count && s->routings >> routing & 1; r++)
            for (int t = 0; t < s->tokens.count; t++) {
                what.routing = (enum bench_routing)routing;
                what.ranks = (int)s->ranks.value[r];
                what.workers = workers_of(bench, s->ranks.value[r]);
                what.tokens = s->tokens.value[t];
                add_layouts(bench, what);
            }
}

/* modes: dw_type and dw_mode for a backward */
static int plan_main(struct bench *bench, struct bench_case modes)
{
    const struct bench_settings *s = &bench->settings;
    char names[8][16];
    int engines = main_engines(bench, names);

    if (modes.backward && !s->engines)
        engines = 1; /* auto */
    for (int e = 0; e < engines; e++) {
        if (!s->engines && e > 0 && is_auto(bench, names[e]))
            continue;
        snprintf(modes.engine, sizeof modes.engine, "%.15s", names[e]);
        add_shapes(bench, modes);
    }
    return engines < 0 ? CLI_USAGE : CLI_OK;
}

/* --all: what is measured beside the main table. */
struct extra {
    enum bench_routing routing;
    enum hmoe_dtype dtype;
    int ranks, workers; /* workers 0: as usual */
    const char *engine, *against;
    int tokens[4]; /* ends with 0 */
};

static const struct extra extras[] = {
    {BENCH_LOGNORMAL, HMOE_BF16, 1, 0, "auto", "path=bulk", {128, 1024, 4096}},
    {BENCH_HOT, HMOE_BF16, 1, 0, "auto", "path=bulk", {128, 1024, 4096}},
    {BENCH_UNIFORM, HMOE_BF16, 2, 0, "auto", "path=bulk", {16, 128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 4, 0, "auto", "path=bulk", {16, 128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 1, 0, "scalar", "path=bulk", {1, 16}},
    {BENCH_UNIFORM, HMOE_BF16, 1, 1, "auto", "path=bulk", {1, 16, 128, 1024}},
    {BENCH_HOT, HMOE_BF16, 1, 1, "auto", "path=bulk", {1024}},
    {BENCH_UNIFORM, HMOE_BF16, 1, 0, "auto", "permute_fusion=off", {128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 1, 0, "auto", "expert_block=off", {128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 1, 0, "auto", "wave=off", {128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 2, 0, "auto", "permute_fusion=off", {128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 2, 0, "auto", "expert_block=off", {128, 1024}},
    {BENCH_UNIFORM, HMOE_BF16, 2, 0, "auto", "wave=off", {128, 1024}},
    {BENCH_UNIFORM, HMOE_F16, 1, 0, "auto", "path=bulk", {16, 128, 1024}},
    {BENCH_UNIFORM, HMOE_F32, 1, 0, "auto", "path=bulk", {16, 128, 1024}},
};

static void add_extra(struct bench *bench, const struct extra *extra)
{
    struct bench_case what = {.dtype = extra->dtype, .routing = extra->routing, .ranks = extra->ranks,
                              .workers = extra->workers ? extra->workers : workers_of(bench, extra->ranks)};

    snprintf(what.engine, sizeof what.engine, "%s", extra->engine);
    snprintf(what.against, sizeof what.against, "%s", extra->against);
    for (int i = 0; i < 4 && extra->tokens[i]; i++) {
        what.tokens = extra->tokens[i];
        add_layouts(bench, what);
    }
}

static int plan_backward(struct bench *bench)
{
    int code = plan_main(bench, (struct bench_case){.backward = true, .dw_type = HMOE_BF16});

    if (code == CLI_OK)
        code = plan_main(bench, (struct bench_case){.backward = true, .dw_type = HMOE_F32, .dw_mode = HMOE_ACCUMULATE});
    return code;
}

int bench_plan(struct bench *bench)
{
    int code = bench->settings.backward ? plan_backward(bench) : plan_main(bench, (struct bench_case){0});

    for (size_t i = 0; i < sizeof extras / sizeof *extras && code == CLI_OK && bench->settings.all; i++)
        if (bench->shape.experts % extras[i].ranks == 0)
            add_extra(bench, &extras[i]);
    return code;
}
