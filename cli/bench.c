/* hmoe bench: how near this machine's own limits the layer runs, and what fusing gains. */
#include "bench.h"

#include "base/topology.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MEMBER(name) offsetof(struct bench_settings, name)

static const struct cli_option bench_options[] = {
    {"all", CLI_FLAG, MEMBER(all), 0, 0, NULL, NULL,
     "also log-normal and hot routing, 2 and 4 ranks, f32 and f16, each extension switched off, the scalar engine, one "
     "worker (takes about half an hour)",
     NULL},
    {"backward", CLI_FLAG, MEMBER(backward), 0, 0, NULL, NULL,
     "the backward instead: bf16 gradients overwritten, then f32 ones accumulated; --tokens starts at 16, the engine "
     "is auto, where not asked otherwise",
     NULL},
    {"json", CLI_TEXT, MEMBER(json), 0, 0, NULL, "FILE", "also write one JSON object a line", NULL},
    {"tokens", CLI_NUMBERS, MEMBER(tokens), 1, 1 << 20, NULL, "T,T,...", "tokens of a call, over all ranks", NULL},
    {"layout", CLI_CHOICES, MEMBER(layouts), 0, 0, CLI_LAYOUTS, "kn,nk", "of weights", NULL},
    {"engine", CLI_CHOICES, MEMBER(engines), 0, 0, "@engine", "NAME,...",
     "auto, amx, avx512, avx2, neon, scalar; auto is the best, as a plan chooses it", "all but scalar that run here"},
    {"routing", CLI_CHOICES, MEMBER(routings), 0, 0, "uniform|lognormal|hot", "NAME,...",
     "how tokens choose experts: all alike likely, by log-normal popularity (sigma 1), all the same one", NULL},
    {"ranks", CLI_NUMBERS, MEMBER(ranks), 1, BENCH_RANKS_MOST, NULL, "R,R,...", "ranks, as threads", NULL},
    {"workers", CLI_NUMBER, MEMBER(workers), 0, 256, NULL, "N", "computing threads of each rank",
     "2, or fewer where the ranks share the CPUs"},
    {"reps", CLI_NUMBER, MEMBER(reps), 0, BENCH_PAIRS_MOST, NULL, "N", "timed calls of each plan",
     "as many as fit into 5 s, at least 3"},
    {"model", CLI_CHOICE, MEMBER(model), 0, 0, CLI_MODELS, "NAME",
     "the layer: Qwen3-30B-A3B, OLMoE, Mixtral-8x7B, DeepSeek-V3 or gpt-oss-20b", NULL},
    {"experts", CLI_NUMBER, MEMBER(experts), 1, 65536, NULL, "E", "fewer experts, where memory is short",
     "the model's"},
    {"seed", CLI_NUMBER, MEMBER(seed), 0, INT64_MAX, NULL, "S", "of weights, rows and routing", NULL},
    {NULL, CLI_FLAG, 0, 0, 0, NULL, NULL, NULL, NULL},
};

/* ------------------------------------------------------------------- before the work */

static int check_shape(struct bench *bench)
{
    const struct bench_settings *s = &bench->settings;

    bench->shape = *cli_model(s->model);
    bench->shape.dtype = HMOE_BF16;
    bench->shape.experts = s->experts ? (int)s->experts : bench->shape.experts;
    if (bench->shape.experts < bench->shape.topk)
        return cli_usage_error(bench->self, "--experts %d: the model chooses %d for each token", bench->shape.experts,
                               bench->shape.topk);
    for (int i = 0; i < s->ranks.count; i++)
        if (bench->shape.experts % s->ranks.value[i] != 0)
            return cli_usage_error(bench->self, "--ranks %lld: the layer's %d experts are not a multiple of it",
                                   (long long)s->ranks.value[i], bench->shape.experts);
    return CLI_OK;
}

/* Layers in rotation, so that no cache holds the weights of the next call. */
static int layers_of(const struct cli_shape *shape)
{
    int count = (int)(1.0e9 / cli_weight_bytes(shape)) + 1;
    return count > BENCH_LAYERS_MOST ? BENCH_LAYERS_MOST : count;
}

static int check_memory(const struct bench *bench)
{
    struct cli_shape shape = bench->shape;
    double needed, available = 0.9 * (double)base_memory_available();
    char text[CLI_TEXT_BYTES], have[CLI_TEXT_BYTES];

    shape.dtype = bench->settings.all ? HMOE_F32 : shape.dtype;
    needed = layers_of(&shape) * cli_weight_bytes(&shape) + 1.5e9;
    needed += bench->settings.backward ? 2.0 * cli_weight_bytes(&bench->shape) + 1.5e9 : 0.0;
    if (needed <= available)
        return CLI_OK;
    cli_failure(bench->self, "this needs %s, but %s are available", cli_bytes(text, needed),
                cli_bytes(have, available));
    shape.experts = (int)((available - 2.0e9) / (cli_weight_bytes(&shape) / shape.experts)) / 16 * 16;
    if (shape.experts >= shape.topk && shape.experts > 0)
        fprintf(stderr, "Try --experts %d.\n", shape.experts);
    else
        fprintf(stderr, "Try a smaller --model, or leave out --all.\n");
    return CLI_FAILED;
}

static int open_json(struct bench *bench)
{
    const char *path = bench->settings.json;

    if (path && !(bench->json = fopen(path, "we")))
        return cli_usage_error(bench->self, "--json %s: cannot be written: %s", path, strerror(errno));
    return CLI_OK;
}

/* ------------------------------------------------------------------------- the work */

static void free_layers(struct bench *bench)
{
    for (int i = 0; i < bench->layers.count; i++)
        cli_weights_free(&bench->layers.layer[i]);
    bench->layers.count = 0;
}

/* Weights of this dtype; both layouts read the same bytes, each in its own order. */
static bool have_layers(struct bench *bench, enum hmoe_dtype dtype)
{
    struct cli_shape shape = bench->shape;

    if (bench->layers.count && bench->layers.layer[0].shape.dtype == dtype)
        return true;
    free_layers(bench);
    shape.dtype = dtype;
    for (int i = 0; i < layers_of(&shape); i++) {
        uint64_t seed = (uint64_t)bench->settings.seed + (uint64_t)i;
        if (!cli_weights_make(&bench->layers.layer[i], &shape, seed, base_cpus()))
            return false;
        bench->layers.count++;
    }
    return true;
}

/* The limits of as many threads as the case uses at once; measured when first asked for. */
static const struct limits *limits_for(struct bench *bench, const struct bench_case *what)
{
    int threads = what->ranks * what->workers < base_cpus() ? what->ranks * what->workers : base_cpus();
    struct limits *limits = &bench->limits[threads > 1];

    if (limits->threads == threads)
        return limits;
    cli_progress_now("measuring this machine's limits with %d threads", threads);
    if (!limits_measure(limits, threads))
        return NULL;
    cli_progress_end();
    if (bench->done)
        printf("\n");
    bench_show_limits(limits);
    bench_json_limits(bench->json, limits);
    bench->titled = false;
    return limits;
}

static int no_memory(const struct bench *bench)
{
    return cli_failure(bench->self, "out of memory; try fewer --experts or a smaller --model");
}

static bool prepare_run(struct bench *bench, struct bench_run *run, const struct bench_case *what)
{
    char why[256];

    *run = (struct bench_run){.what = what, .layers = &bench->layers, .pairs_wanted = (int)bench->settings.reps,
                              .budget_ns = 5000000000, .result = &bench->results[bench->done]};
    run->limits = limits_for(bench, what);
    if (!run->limits || !have_layers(bench, what->dtype))
        return false;
    for (int i = 0; i < bench->layers.count; i++)
        bench->layers.layer[i].shape.layout = what->layout;
    run->shape = bench->layers.layer[0].shape;
    run->prng.state = (uint64_t)bench->settings.seed * 1000003 + (uint64_t)bench->done;
    snprintf(run->knobs[0], sizeof run->knobs[0], "engine=%s", what->engine);
    snprintf(run->knobs[1], sizeof run->knobs[1], "engine=%s,%s", what->engine, what->against);
    return cli_engine_choose(&run->choice, &run->shape, run->knobs[0], why, sizeof why) == NULL;
}

/* Not a switched-off extension. */
static bool is_forward(const struct bench_case *what)
{
    return strcmp(what->against, "path=bulk") == 0;
}

/* A new part of the table begins where the kind of case changes. */
static void show_title(struct bench *bench, int index)
{
    const struct bench_case *what = &bench->cases[index], *last = index ? &bench->cases[index - 1] : what;

    if (bench->titled && is_forward(what) == is_forward(last) && what->dw_mode == last->dw_mode)
        return;
    is_forward(what) ? bench_show_head(what) : bench_show_knob_head();
    bench->titled = true;
}

static int one_case(struct bench *bench, int index)
{
    const struct bench_case *what = &bench->cases[index];
    struct bench_run *run = malloc(sizeof *run);
    char why[512] = "out of memory";
    bool fine = run && prepare_run(bench, run, what);

    if (fine) {
        show_title(bench, index);
        cli_progress("case %d of %d", index + 1, bench->count);
        fine = bench_measure(run, why, sizeof why);
    }
    free(run);
    if (!fine)
        return cli_failure(bench->self, "T %lld, %s, engine %s, %s: %s", (long long)what->tokens,
                           what->layout == HMOE_KN ? "kn" : "nk", what->engine,
                           bench_routing_names[what->routing], why);
    if (is_forward(what))
        bench_show(&bench->results[bench->done]);
    else
        bench_show_knob(&bench->results[bench->done]);
    bench_json(bench->json, &bench->layers.layer[0].shape, &bench->results[bench->done]);
    bench->done++;
    return CLI_OK;
}

static int all_cases(struct bench *bench)
{
    int code = CLI_OK, exceeding = 0;

    bench->cases = calloc(BENCH_CASES_MOST, sizeof *bench->cases);
    bench->results = calloc(BENCH_CASES_MOST, sizeof *bench->results);
    if (!bench->cases || !bench->results)
        return no_memory(bench);
    code = bench_plan(bench);
    for (int i = 0; i < bench->count && code == CLI_OK; i++)
        code = one_case(bench, i);
    if (code != CLI_OK)
        return code;
    if (bench->settings.all)
        bench_show_scaling(bench->results, bench->done, &bench->limits[0], &bench->limits[1]);
    bench_show_end(bench->results, bench->done);
    for (int i = 0; i < bench->done; i++)
        exceeding += bench->results[i].exceeds;
    return exceeding ? CLI_FAILED : CLI_OK;
}

static int close_json(struct bench *bench, int code)
{
    bool lost = bench->json && ferror(bench->json);

    if (bench->json && (fclose(bench->json) != 0 || lost) && code == CLI_OK)
        return cli_failure(bench->self, "--json %s: not everything could be written", bench->settings.json);
    return code;
}

static int bench_main(const struct cli_command *self, int argc, char **argv)
{
    struct bench bench = {
        .self = self,
        .settings = {.seed = 1, .layouts = 3, .routings = 1,
                     .tokens = {5, {1, 16, 128, 1024, 4096}}, .ranks = {1, {1}}},
    };
    struct cli_line line = {.argc = argc, .argv = argv, .settings = &bench.settings};
    int code;

    if (!cli_parse(self, &line))
        return line.exit_code;
    if (bench.settings.backward && bench.settings.all)
        return cli_usage_error(self, "--all and --backward: one of them at a time");
    if (bench.settings.backward && bench.settings.tokens.count == 5 && bench.settings.tokens.value[0] == 1)
        bench.settings.tokens = (struct cli_list){4, {16, 128, 1024, 4096}};
    code = cli_environment_check(self);
    if (code == CLI_OK)
        code = check_shape(&bench);
    if (code == CLI_OK)
        code = check_memory(&bench);
    if (code == CLI_OK)
        code = open_json(&bench);
    if (code == CLI_OK)
        code = all_cases(&bench);
    free_layers(&bench);
    free(bench.cases);
    free(bench.results);
    return close_json(&bench, code);
}

const struct cli_command cli_bench = {
    .name = "bench",
    .operands = "",
    .summary = "Measures the forward, or the backward, fused against bulk in one run, beside this machine's own "
               "limits.",
    .about = "First the limits: reading (the best of several methods, 2 MB pages, more than 1 GB), non-temporal "
             "storing, and each engine's arithmetic on all workers at once. Then every case: two plans take turns, "
             "every call has new routing and some weights changed in place, more than 1 GB of weights rotates, and a "
             "sample of the results is compared with the oracle. Limits are measured again beside each case.\n"
             "\n"
             "Exit status: 0 fine, 1 a result was wrong, a call failed, or a figure exceeds its limit.",
    .options = bench_options,
    .main = bench_main,
};
