/* hmoe run: real text through the fused layer, the answer proved, the time shown. */
#include "run.h"

#include "base/clock.h"
#include "base/topology.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MEMBER(name) offsetof(struct run_settings, name)

static const struct cli_option run_options[] = {
    {"ranks", CLI_NUMBER, MEMBER(ranks), 1, 64, NULL, "R", "ranks of the expert-parallel group", NULL},
    {"via", CLI_CHOICE, MEMBER(via), 0, 0, "threads|processes", NULL, "what a rank is", NULL},
    {"workers", CLI_NUMBER, MEMBER(workers), 0, 256, NULL, "N", "computing threads of each rank",
     "the CPUs, shared out"},
    {"model", CLI_CHOICE, MEMBER(model), 0, 0, CLI_MODELS, "NAME",
     "the layer of a published model: Qwen3-30B-A3B, OLMoE, Mixtral-8x7B, DeepSeek-V3 or gpt-oss-20b; the four options "
     "below change it",
     "a small layer"},
    {"hidden", CLI_NUMBER, MEMBER(hidden), 1, 1 << 20, NULL, "H", "width of a token's row", "1024"},
    {"inner", CLI_NUMBER, MEMBER(inner), 1, 1 << 20, NULL, "I", "inner width of an expert", "512"},
    {"experts", CLI_NUMBER, MEMBER(experts), 1, 65536, NULL, "E", "experts in all; a multiple of R", "64"},
    {"topk", CLI_NUMBER, MEMBER(topk), 1, 1024, NULL, "K", "experts of each token", "8"},
    {"tokens", CLI_NUMBER, MEMBER(tokens), 1, 1 << 24, NULL, "T", "tokens over all ranks, cut from the text", NULL},
    {"dtype", CLI_CHOICE, MEMBER(dtype), 0, 0, CLI_DTYPES, NULL, "of rows and weights", NULL},
    {"layout", CLI_CHOICE, MEMBER(layout), 0, 0, CLI_LAYOUTS, NULL,
     "of weights: kn [E,H,2I] and [E,I,H], nk [E,2I,H] and [E,H,I]", NULL},
    {"engine", CLI_CHOICE, MEMBER(engine), 0, 0, "@engine", "NAME",
     "the kernels: auto, amx, avx512, avx2, neon or scalar", "auto"},
    {"knobs", CLI_TEXT, MEMBER(knobs), 0, 0, NULL, "A=B,...", "any other knobs; 'hmoe knobs' lists them", NULL},
    {"seed", CLI_NUMBER, MEMBER(seed), 0, INT64_MAX, NULL, "S", "of the weights, the embedding and the router", NULL},
    {"trace", CLI_TEXT, MEMBER(trace), 0, 0, NULL, "FILE", "write a timeline of one call, for ui.perfetto.dev", NULL},
    {NULL, CLI_FLAG, 0, 0, 0, NULL, NULL, NULL, NULL},
};

/* The most tokens that a rank gets. */
static int64_t largest_share(const struct run *run)
{
    return (run->settings.tokens + run->settings.ranks - 1) / run->settings.ranks;
}

/* ------------------------------------------------------------ before the work */

static struct cli_shape shape_of(const struct run_settings *s)
{
    struct cli_shape shape = {.hidden = 1024, .inner = 512, .experts = 64, .topk = 8, .renormalised = true};

    if (s->model >= 0)
        shape = *cli_model(s->model);
    shape.hidden = s->hidden ? s->hidden : shape.hidden;
    shape.inner = s->inner ? s->inner : shape.inner;
    shape.experts = s->experts ? (int)s->experts : shape.experts;
    shape.topk = s->topk ? (int)s->topk : shape.topk;
    shape.dtype = (enum hmoe_dtype)s->dtype;
    shape.layout = (enum hmoe_layout)s->layout;
    return shape;
}

static int check_shape(const struct cli_command *self, struct run *run)
{
    const struct run_settings *s = &run->settings;
    int ranks = (int)s->ranks, experts = run->shape.experts;
    char why[256];

    if (experts % ranks != 0)
        return cli_usage_error(self, "--experts %d is not a multiple of --ranks %d; the nearest are %d and %d", experts,
                               ranks, experts < ranks ? ranks : experts / ranks * ranks,
                               (experts < ranks ? 2 : experts / ranks + 1) * ranks);
    if (run->shape.topk > experts)
        return cli_usage_error(self, "--topk %d: a router can choose at most --experts %d", run->shape.topk, experts);
    if (cli_knob_check(cli_knob_text(run->knobs, sizeof run->knobs, s->engine, s->knobs), why, sizeof why))
        return cli_usage_error(self, "%s", why);
    if (cli_engine_choose(&run->choice, &run->shape, run->knobs, why, sizeof why))
        return cli_usage_error(self, "%s; 'hmoe doctor' lists what this machine has", why);
    return CLI_OK;
}

/* Bytes that the run will touch, weights left out. All ranks together receive each slot once, so the worst case that
 * every rank reserves comes true on one of them at most. */
static int bytes_beside_weights(const struct cli_command *self, const struct run *run, double *bytes)
{
    struct hmoe_plan_options plan = cli_plan_options(&run->shape, largest_share(run), run->knobs);
    struct hmoe_workspace space = {.size = sizeof space};
    int ranks = (int)run->settings.ranks, workers = cli_workers(run->settings.workers, ranks);
    enum hmoe_status status = hmoe_workspace_query(&plan, ranks, workers, &space);

    if (status != HMOE_OK)
        return cli_usage_error(self, "%s", hmoe_last_error());
    *bytes = cli_batch_bytes(&run->shape, run->settings.tokens) +
             (double)space.shared_bytes * (double)run->settings.ranks +
             (double)(space.reserved_bytes - space.shared_bytes) +
             4.0 * (double)run->shape.hidden * (double)run->shape.experts;
    return CLI_OK;
}

static int refuse_memory(const struct cli_command *self, const struct run *run, double beside, double available)
{
    double each = cli_weight_bytes(&run->shape) / run->shape.experts;
    int64_t ranks = run->settings.ranks, fit = available > beside ? (int64_t)((available - beside) / each) : 0;
    char all[CLI_TEXT_BYTES], some[CLI_TEXT_BYTES], rest[CLI_TEXT_BYTES], have[CLI_TEXT_BYTES];
    double weights = cli_weight_bytes(&run->shape);

    fit = fit / ranks * ranks;
    cli_failure(self, "this needs %s (weights %s, all else %s), but %s are available", cli_bytes(all, beside + weights),
                cli_bytes(some, weights), cli_bytes(rest, beside), cli_bytes(have, available));
    if (fit >= run->shape.topk)
        fprintf(stderr, "Try --experts %lld, or a machine with more memory.\n", (long long)fit);
    else
        fprintf(stderr, "Try smaller --hidden, --inner or --tokens, or fewer --experts with a smaller --topk.\n");
    return CLI_FAILED;
}

static int check_memory(const struct cli_command *self, const struct run *run)
{
    double beside = 0.0, available = 0.95 * (double)base_memory_available();
    int code = bytes_beside_weights(self, run, &beside);

    if (code != CLI_OK)
        return code;
    if (beside + cli_weight_bytes(&run->shape) > available)
        return refuse_memory(self, run, beside, available);
    return CLI_OK;
}

static int read_text(const struct cli_command *self, struct run *run, char **paths, int count)
{
    char why[512];

    if (cli_text_read(&run->text, paths, count, why, sizeof why))
        return cli_usage_error(self, "%s", why);
    return CLI_OK;
}

static int check_trace(const struct cli_command *self, const struct run *run)
{
    const char *path = run->settings.trace;
    int failed = path ? strlen(path) > 4000 ? ENAMETOOLONG : cli_writable(path) : 0;

    return failed ? cli_usage_error(self, "--trace %s: cannot be written: %s", path, strerror(failed)) : CLI_OK;
}

/* ------------------------------------------------------------------- the work */

static int no_memory(const struct cli_command *self, const char *what)
{
    return cli_failure(self, "out of memory for %s; try fewer --tokens or --experts", what);
}

/* A text shorter than the batch is read again from its start; positions go on, so no two rows are alike. */
static bool make_tokens(struct run *run, int32_t **tokens)
{
    int64_t most = run->settings.tokens;

    *tokens = malloc((size_t)most * sizeof **tokens);
    if (!*tokens)
        return false;
    run->text_tokens = cli_tokenize(&run->text, *tokens, most);
    for (int64_t t = run->text_tokens; t < most; t++)
        (*tokens)[t] = (*tokens)[t - run->text_tokens];
    return true;
}

static int make_input(const struct cli_command *self, struct run *run)
{
    uint64_t seed = (uint64_t)run->settings.seed;
    int threads = base_cpus();
    int32_t *tokens = NULL;
    bool fine;

    if (!cli_weights_make(&run->weights, &run->shape, seed, threads))
        return no_memory(self, "the weights");
    if (!cli_batch_make(&run->batch, &run->shape, run->settings.tokens))
        return no_memory(self, "the batch");
    fine = make_tokens(run, &tokens) && cli_embed(&run->shape, tokens, &run->batch, seed, threads) &&
           cli_route(&run->shape, &run->batch, seed, threads);
    free(tokens);
    run->board_bytes = sizeof *run->board + (size_t)run->settings.ranks * sizeof(struct cli_seat);
    run->board = cli_shared(run->board_bytes);
    return fine && run->board ? CLI_OK : no_memory(self, "the input");
}

/* FNV-1a over pairs of bytes */
uint64_t run_hash(const void *rows, size_t bytes)
{
    uint64_t hash = 0xcbf29ce484222325u, word = 0;

    for (size_t i = 0; i + 2 <= bytes; i += 2) {
        memcpy(&word, (const char *)rows + i, 2);
        hash = (hash ^ word) * 0x100000001b3u;
    }
    return hash;
}

static void poison(const struct hmoe_call *call, size_t row_bytes)
{
    if (call->tokens)
        memset(call->y, 0xa5, (size_t)call->tokens * row_bytes);
}

/* One timed call into poisoned rows; its bits must be those of the first. */
static bool steady_call(struct cli_player *player, struct hmoe_plan *plan, struct hmoe_call *call, size_t row_bytes)
{
    struct cli_seat *seat = cli_seat_of(player);
    size_t bytes = (size_t)call->tokens * row_bytes;

    poison(call, row_bytes);
    if (!cli_timed_call(player, hmoe_forward, plan, call))
        return false;
    if (!seat->hash)
        seat->hash = run_hash(call->y, bytes);
    else if (seat->hash != run_hash(call->y, bytes))
        seat->unstable++;
    return true;
}

/* As many as fit into a second, judged by the first: every rank sees the same figure. */
static int calls_for(int64_t first_ns)
{
    int64_t calls = 1000000000 / (first_ns + 1);
    return calls < 3 ? 3 : calls > RUN_CALLS_MOST ? RUN_CALLS_MOST : (int)calls;
}

static bool play(struct run *run, struct cli_player *player, struct hmoe_plan *plan)
{
    struct run_board *board = run->board;
    int ranks = player->boot->ranks, rank = player->boot->rank, calls;
    struct hmoe_call call = cli_call(&run->weights, &run->batch, rank, ranks);
    size_t row = kern_row_bytes(run->shape.dtype, run->shape.hidden);

    if (!steady_call(player, plan, &call, row))
        return false;
    if (rank == 0)
        board->first_ns = cli_span(board->seats, ranks);
    calls = calls_for(cli_span(board->seats, ranks));
    for (int i = 0; i < calls; i++) {
        if (!cli_barrier(player) || !steady_call(player, plan, &call, row))
            return false;
        if (rank == 0) {
            board->steady_ns[i] = cli_span(board->seats, ranks);
            board->calls = i + 1;
            cli_progress("call %d of %d", i + 1, calls);
        }
    }
    poison(&call, row);
    if (!cli_barrier(player) || !cli_traced_call(player, hmoe_forward, plan, &call, run->settings.trace))
        return false;
    if (rank == 0)
        board->traced_ns = cli_span(board->seats, ranks);
    return cli_barrier(player);
}

static int run_rank(const struct hmoe_boot *boot, void *argument)
{
    struct run *run = argument;
    struct cli_player player = {.boot = boot, .seats = run->board->seats};
    struct hmoe_plan_options options = cli_plan_options(&run->shape, largest_share(run), NULL);
    struct hmoe_plan *plan = NULL;
    bool fine;

    if (!cli_enter(&player, cli_workers(run->settings.workers, run->settings.ranks), run->knobs))
        return 1;
    fine = cli_note(&player, hmoe_plan_create(player.group, &options, &plan)) && play(run, &player, plan);
    cli_seat_of(&player)->workspace.size = sizeof(struct hmoe_workspace);
    if (fine)
        fine = cli_note(&player, hmoe_plan_workspace(plan, &cli_seat_of(&player)->workspace));
    if (plan)
        fine = cli_note(&player, hmoe_plan_destroy(plan)) && fine;
    return cli_leave(&player, fine) ? 0 : 1;
}

static int launch(const struct cli_command *self, struct run *run)
{
    int ranks = (int)run->settings.ranks, failed, code;
    enum hmoe_status status;

    cli_progress("forward");
    fflush(stdout);
    status = hmoe_launch((enum hmoe_via)run->settings.via, ranks, run_rank, run);
    failed = cli_first_error(run->board->seats, ranks);
    if (failed >= 0)
        return cli_failure(self, "rank %d: %s", failed, run->board->seats[failed].error);
    if (status != HMOE_OK)
        return cli_failure(self, "%s", hmoe_last_error());
    code = run->settings.trace && ranks > 1 ? cli_trace_merge(run->settings.trace, ranks) : 0;
    return code ? cli_failure(self, "--trace %s: %s", run->settings.trace, strerror(code)) : CLI_OK;
}

int64_t run_unstable(const struct run *run)
{
    int64_t unstable = 0;

    for (int r = 0; r < run->settings.ranks; r++)
        unstable += run->board->seats[r].unstable;
    return unstable;
}

static int judge(const struct cli_command *self, const struct run *run)
{
    char text[160];

    if (run_unstable(run))
        return cli_failure(self, "WRONG: the same call gave other bits %lld times", (long long)run_unstable(run));
    if (run->difference.differing)
        return cli_failure(self, "WRONG: the oracle disagrees about %s\n'hmoe check' looks for a small case.",
                           cli_difference_text(text, sizeof text, &run->shape, &run->difference));
    return CLI_OK;
}

static int go(const struct cli_command *self, struct run *run)
{
    int code = make_input(self, run);

    if (code != CLI_OK)
        return code;
    cli_progress_end();
    run_show_input(run);
    code = launch(self, run);
    if (code != CLI_OK)
        return code;
    if (!run_verify(run))
        return no_memory(self, "the oracle");
    cli_progress_end();
    run_show_result(run);
    return judge(self, run);
}

static void clean(struct run *run)
{
    cli_text_free(&run->text);
    cli_weights_free(&run->weights);
    if (run->batch.x)
        cli_batch_free(&run->batch, &run->shape);
    cli_shared_free(run->board, run->board_bytes);
}

static int run_main(const struct cli_command *self, int argc, char **argv)
{
    struct run run = {
        .settings = {.ranks = 2, .tokens = 2048, .dtype = HMOE_BF16, .seed = 1, .model = -1, .engine = -1},
    };
    struct cli_line line = {.argc = argc, .argv = argv, .settings = &run.settings};
    int code;

    if (!cli_parse(self, &line))
        return line.exit_code;
    run.shape = shape_of(&run.settings);
    code = check_shape(self, &run);
    if (code == CLI_OK)
        code = read_text(self, &run, argv + line.first, argc - line.first);
    if (code == CLI_OK)
        code = check_memory(self, &run);
    if (code == CLI_OK)
        code = check_trace(self, &run);
    if (code == CLI_OK)
        code = go(self, &run);
    clean(&run);
    return code;
}

const struct cli_command cli_run = {
    .name = "run",
    .operands = "[FILE...]",
    .summary = "Runs one layer on real text: bytes and words become tokens, tokens become rows, a softmax router "
               "chooses experts, the fused forward computes, and the oracle checks the answer bit for bit.",
    .about = "Without a FILE the text is this project's own documents and sources where the current directory has "
             "them, else this program's help. A text shorter than --tokens is read again. The weights are random: the "
             "arithmetic, the routing and the traffic are those of a real layer, the language is not.\n"
             "\n"
             "Tokens are split contiguously over the ranks. Tokens are compared with the oracle for about two "
             "seconds; the report says how many. Exit status 1: a result was wrong, or the call failed.\n"
             "\n"
             "Examples:\n"
             "  hmoe run\n"
             "  hmoe run --ranks 4 --via processes --tokens 512 README.md\n"
             "  hmoe run --model Qwen3-30B-A3B --experts 32 --trace /tmp/trace.json",
    .options = run_options,
    .main = run_main,
};
