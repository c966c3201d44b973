/* hmoe train: a small MoE transformer learns the user's text; every expert layer is the fused one, both ways. */
#include "train.h"

#include "base/clock.h"
#include "base/topology.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MEMBER(name) offsetof(struct train_settings, name)

static const struct cli_option train_options[] = {
    {"steps", CLI_NUMBER, MEMBER(steps), 0, 100000000, NULL, "N", "steps in all, those of --resume included", "600"},
    {"minutes", CLI_NUMBER, MEMBER(minutes), 0, 100000, NULL, "M",
     "as many steps as fit into so many minutes; then the number depends on the machine", "as --steps says"},
    {"layers", CLI_NUMBER, MEMBER(layers), 0, MODEL_LAYERS_MOST, NULL, "N", "layers", "4"},
    {"width", CLI_NUMBER, MEMBER(width), 0, 8192, NULL, "D", "width of a byte's row; a multiple of twice the heads",
     "128"},
    {"heads", CLI_NUMBER, MEMBER(heads), 0, 256, NULL, "N", "attention heads", "4"},
    {"experts", CLI_NUMBER, MEMBER(experts), 0, 4096, NULL, "E", "experts of a layer; a multiple of the ranks", "8"},
    {"topk", CLI_NUMBER, MEMBER(topk), 0, 64, NULL, "K", "experts of each byte", "2"},
    {"inner", CLI_NUMBER, MEMBER(inner), 0, 65536, NULL, "I", "inner width of an expert", "256"},
    {"context", CLI_NUMBER, MEMBER(context), 0, MODEL_CONTEXT_MOST, NULL, "C", "bytes of a sequence", "128"},
    {"batch", CLI_NUMBER, MEMBER(batch), 0, 65536, NULL, "B",
     "sequences of a step, over all ranks; a multiple of 4: the shards that gradients are summed over", "16"},
    {"rate", CLI_TEXT, MEMBER(rate), 0, 0, NULL, "X", "highest learning rate, after 50 steps of warm-up", "0.003"},
    {"ranks", CLI_NUMBER, MEMBER(ranks), 1, MODEL_SHARDS, NULL, "R",
     "1, 2 or 4: experts are shared out, all else is copied; the losses have the same bits", NULL},
    {"via", CLI_CHOICE, MEMBER(via), 0, 0, "threads|processes", NULL, "what a rank is", NULL},
    {"workers", CLI_NUMBER, MEMBER(workers), 0, 256, NULL, "N", "computing threads of each rank",
     "the CPUs, shared out"},
    {"seed", CLI_NUMBER, MEMBER(seed), 0, INT64_MAX, NULL, "S", "of the first parameters and the batches", NULL},
    {"save", CLI_TEXT, MEMBER(save), 0, 0, NULL, "FILE", "write checkpoints there, in safetensors", NULL},
    {"resume", CLI_TEXT, MEMBER(resume), 0, 0, NULL, "FILE",
     "go on from a checkpoint, with its shape and seed: the same bits as without the break", NULL},
    {"sample", CLI_NUMBER, MEMBER(sample), 0, 100000, NULL, "N", "bytes to write at the end", NULL},
    {"json", CLI_TEXT, MEMBER(json), 0, 0, NULL, "FILE", "also write one JSON object for each line of progress", NULL},
    {"trace", CLI_TEXT, MEMBER(trace), 0, 0, NULL, "FILE", "write a timeline of the last step, for ui.perfetto.dev",
     NULL},
    {NULL, CLI_FLAG, 0, 0, 0, NULL, NULL, NULL, NULL},
};

/* ------------------------------------------------------------- what is trained */

static const struct model_config standard = {.layers = 4, .width = 128, .heads = 4, .experts = 8, .topk = 2,
                                             .inner = 256, .context = 128, .batch = 16};

/* An option that was given and a checkpoint's number must be equal. */
static int choose(const struct train *train, const char *name, int64_t given, int standing, int *number)
{
    if (train->settings.resume && given && given != standing)
        return cli_usage_error(train->self, "--%s %lld, but %s was made with %d; leave the option out", name,
                               (long long)given, train->settings.resume, standing);
    *number = given ? (int)given : standing;
    return CLI_OK;
}

static int choose_config(struct train *train)
{
    const struct train_settings *s = &train->settings;
    struct model_config *c = &train->config, from = standard;
    struct base_error error = {.status = HMOE_OK};
    char why[160];
    int code;

    if (s->resume && checkpoint_config(s->resume, &from, &error) != HMOE_OK)
        return cli_usage_error(train->self, "--resume %s", error.text);
    code = choose(train, "layers", s->layers, from.layers, &c->layers) ||
           choose(train, "width", s->width, from.width, &c->width) ||
           choose(train, "heads", s->heads, from.heads, &c->heads) ||
           choose(train, "experts", s->experts, from.experts, &c->experts) ||
           choose(train, "topk", s->topk, from.topk, &c->topk) ||
           choose(train, "inner", s->inner, from.inner, &c->inner) ||
           choose(train, "context", s->context, from.context, &c->context) ||
           choose(train, "batch", s->batch, from.batch, &c->batch);
    if (code)
        return CLI_USAGE;
    if (model_config_check(c, (int)s->ranks, why, sizeof why))
        return cli_usage_error(train->self, "%s", why);
    if (c->context > MODEL_CONTEXT_MOST)
        return cli_usage_error(train->self, "context %d: at most %d are allowed", c->context, MODEL_CONTEXT_MOST);
    return CLI_OK;
}

static int choose_optimizer(struct train *train)
{
    const struct train_settings *s = &train->settings;
    struct model_optimizer *o = &train->optimizer;
    char *end;

    *o = model_optimizer_standard;
    if (s->steps && s->minutes)
        return cli_usage_error(train->self, "--steps and --minutes: one of them at a time");
    o->steps = s->steps ? s->steps : o->steps;
    if (s->rate) {
        o->rate = strtof(s->rate, &end);
        if (end == s->rate || *end || !(o->rate > 0.0f) || o->rate > 1.0f)
            return cli_usage_error(train->self, "--rate %s: a number above 0 and up to 1 is allowed", s->rate);
    }
    o->least_rate = 0.1f * o->rate;
    return CLI_OK;
}

static int read_text(struct train *train, char **paths, int count)
{
    char why[512];
    int64_t least = 20 * ((int64_t)train->config.context + 1);

    if (cli_text_read(&train->text, paths, count, why, sizeof why))
        return cli_usage_error(train->self, "%s", why);
    if ((int64_t)train->text.size < least)
        return cli_usage_error(train->self, "%s has %zu bytes: at least %lld are needed with --context %d",
                               train->text.source, train->text.size, (long long)least, train->config.context);
    train->learned = (int64_t)train->text.size / 10 * 9;
    train->validations = 4;
    return CLI_OK;
}

/* -------------------------------------------------------------------- memory */

static int make_state(struct train *train)
{
    size_t bytes = (size_t)model_size(&train->config) * sizeof(float);
    struct base_error error = {.status = HMOE_OK};
    struct model_state *state = &train->state;

    train->board_bytes = sizeof *train->board + (size_t)train->settings.ranks * sizeof(struct cli_seat);
    train->board = cli_shared(train->board_bytes);
    state->value = cli_shared(bytes);
    state->first = cli_shared(bytes);
    state->second = cli_shared(bytes);
    if (!train->board || !state->value || !state->first || !state->second)
        return cli_failure(train->self, "out of memory; try a smaller --width, --inner or --experts");
    if (!train->settings.resume)
        model_state_init(&train->config, (uint64_t)train->settings.seed, state);
    else if (checkpoint_read(train->settings.resume, &train->config, state, &error) != HMOE_OK)
        return cli_usage_error(train->self, "--resume %s", error.text);
    train->board->steps = train->optimizer.steps;
    if (!train->settings.minutes && state->step >= train->optimizer.steps)
        return cli_usage_error(train->self, "--steps %lld: the checkpoint has done %lld already",
                               (long long)train->optimizer.steps, (long long)state->step);
    return CLI_OK;
}

static void free_all(struct train *train)
{
    size_t bytes = (size_t)model_size(&train->config) * sizeof(float);

    cli_text_free(&train->text);
    cli_shared_free(train->state.value, bytes);
    cli_shared_free(train->state.first, bytes);
    cli_shared_free(train->state.second, bytes);
    cli_shared_free(train->board, train->board_bytes);
}

static int open_files(struct train *train)
{
    const struct train_settings *s = &train->settings;
    int failed = s->save ? cli_writable(s->save) : 0;

    if (failed)
        return cli_usage_error(train->self, "--save %s: cannot be written: %s", s->save, strerror(failed));
    failed = s->trace ? cli_writable(s->trace) : 0;
    if (failed)
        return cli_usage_error(train->self, "--trace %s: cannot be written: %s", s->trace, strerror(failed));
    if (s->json && !(train->json = fopen(s->json, "we")))
        return cli_usage_error(train->self, "--json %s: cannot be written: %s", s->json, strerror(errno));
    return CLI_OK;
}

static int run_ranks(struct train *train)
{
    const struct train_settings *s = &train->settings;
    enum hmoe_status status;
    int rank, failed;

    train->begun_ns = base_now_ns();
    fflush(stdout);
    status = hmoe_launch((enum hmoe_via)s->via, (int)s->ranks, train_rank, train);
    rank = cli_first_error(train->board->seats, (int)s->ranks);
    if (rank >= 0)
        return cli_failure(train->self, "rank %d: %s", rank, train->board->seats[rank].error);
    if (status != HMOE_OK)
        return cli_failure(train->self, "%s", hmoe_last_error());
    failed = s->trace && s->ranks > 1 ? cli_trace_merge(s->trace, (int)s->ranks) : 0;
    if (failed)
        return cli_failure(train->self, "--trace %s: %s", s->trace, strerror(failed));
    return CLI_OK;
}

static int train_main(const struct cli_command *self, int argc, char **argv)
{
    struct train train = {.self = self, .settings = {.ranks = 1, .seed = 1, .sample = 300}};
    struct cli_line line = {.argc = argc, .argv = argv, .settings = &train.settings};
    int code;

    if (!cli_parse(self, &line))
        return line.exit_code;
    code = cli_environment_check(self);
    if (code == CLI_OK)
        code = choose_config(&train);
    if (code == CLI_OK)
        code = choose_optimizer(&train);
    if (code == CLI_OK)
        code = read_text(&train, argv + line.first, argc - line.first);
    if (code == CLI_OK)
        code = make_state(&train);
    if (code == CLI_OK)
        code = open_files(&train);
    if (code == CLI_OK) {
        train_show_begin(&train);
        code = run_ranks(&train);
    }
    if (code == CLI_OK)
        train_show_end(&train);
    if (train.json && fclose(train.json) != 0 && code == CLI_OK)
        code = cli_failure(self, "--json %s: not everything could be written", train.settings.json);
    free_all(&train);
    return code;
}

const struct cli_command cli_train = {
    .name = "train",
    .operands = "[FILE...]",
    .summary = "Trains a byte-level MoE transformer on your own text, every expert layer fused forward and backward.",
    .about = "The text is the files', or with none the project's own. A tenth of it is held back, and its loss in nats "
             "per byte is what counts: 5.545 (ln 256) knows nothing, English prose and C are near 2 after some "
             "minutes. Attention, norms and the router are each rank's own, the experts are shared out over the ranks; "
             "gradients are summed over 4 shards of the batch in a fixed tree, so that losses and checkpoints have the "
             "same bits for 1, 2 and 4 ranks, as threads or processes, with any number of workers.\n"
             "\n"
             "A line of progress: the loss of the latest batch, the held-back loss, bytes per second over all ranks, "
             "the most loaded expert's rows over the mean, and the share of a step in which a layer's call was in "
             "flight while no worker multiplied.\n"
             "\n"
             "Exit status: 0 fine, 1 it failed on the way, 2 wrong options.",
    .options = train_options,
    .main = train_main,
};
