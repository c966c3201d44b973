/* The ranks of `hmoe train`: steps, lines of progress, checkpoints, a sample of text. */
#include "train.h"

#include "base/clock.h"
#include "base/prng.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LINE_NS 3000000000       /* between lines of progress */
#define VALIDATION_NS 20000000000 /* between looks at the held-back text */
enum { TIMED_FROM = 3, TIMED_TO = 11 }; /* steps that tell how many fit into --minutes */

struct learner {
    struct train *train;
    struct cli_player player;
    struct model *model;
    uint8_t *inputs, *targets; /* a batch */
    struct base_error error;
    struct model_report report;
    int64_t line_ns, validation_ns, timed_ns, line_step;
    bool traced;
};

static bool leads(const struct learner *l)
{
    return l->player.boot->rank == 0;
}

static bool note(struct learner *l, enum hmoe_status status)
{
    struct cli_seat *seat = cli_seat_of(&l->player);

    if (status != HMOE_OK && !*seat->error)
        snprintf(seat->error, sizeof seat->error, "%s", l->error.text);
    return status == HMOE_OK;
}

/* What rank 0 knows, told to all; so that all do the same. */
static bool agree(struct learner *l, int64_t *value)
{
    const struct hmoe_boot *boot = l->player.boot;
    int64_t all[MODEL_SHARDS];

    if (boot->ranks == 1)
        return true;
    if (boot->allgather(boot->allgather_context, value, all, sizeof *value) != 0) {
        snprintf(cli_seat_of(&l->player)->error, HMOE_ERROR_BYTES, "the other ranks are gone");
        return false;
    }
    *value = all[0];
    return true;
}

/* --------------------------------------------------------------------- batches */

static void take(struct learner *l, int sequence, int64_t from)
{
    int64_t context = l->train->config.context;

    memcpy(l->inputs + sequence * context, l->train->text.bytes + from, (size_t)context);
    memcpy(l->targets + sequence * context, l->train->text.bytes + from + 1, (size_t)context);
}

/* Random places of the text that is learned from; they follow from the seed and the step alone. */
static void learning_batch(struct learner *l, int64_t step)
{
    const struct train *t = l->train;
    struct base_prng prng = {t->state.seed * 0x9e3779b97f4a7c15u + (uint64_t)step * 0xd1b54a32d192ed03u};

    for (int s = 0; s < t->config.batch; s++)
        take(l, s, base_random_below(&prng, t->learned - t->config.context));
}

/* Places spread over the held-back text. */
static void validation_batch(struct learner *l, int index)
{
    const struct train *t = l->train;
    int64_t room = (int64_t)t->text.size - t->learned - t->config.context - 1;
    int64_t places = (int64_t)t->validations * t->config.batch;

    for (int s = 0; s < t->config.batch; s++)
        take(l, s, t->learned + room * (index * (int64_t)t->config.batch + s) / places);
}

static bool validate(struct learner *l)
{
    double sum = 0.0, loss;

    for (int i = 0; i < l->train->validations; i++) {
        validation_batch(l, i);
        if (!note(l, model_loss(l->model, l->inputs, l->targets, &loss, &l->error)))
            return false;
        sum += loss;
    }
    if (leads(l))
        l->train->board->validation = sum / l->train->validations;
    l->validation_ns = base_now_ns();
    return true;
}

/* -------------------------------------------------------------------- progress */

static void write_json(const struct learner *l, int64_t step, double speed)
{
    const struct train *t = l->train;
    json_t *line;

    if (!t->json)
        return;
    line = json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "step", (json_int_t)step, "loss",
                     l->report.loss, "validation_loss", t->board->validation, "tokens_per_s", speed, "balance",
                     l->report.balance, "balance_loss", l->report.balance_loss, "gradient_norm", l->report.norm,
                     "exposed", t->board->exposed, "seconds", (double)(base_now_ns() - t->begun_ns) / 1e9);
    json_dumpf(line, t->json, JSON_COMPACT | JSON_REAL_PRECISION(17));
    fputc('\n', t->json);
    fflush(t->json);
    json_decref(line);
}

static void show_line(struct learner *l, int64_t step)
{
    const struct train *t = l->train;
    int64_t now = base_now_ns(), bytes = (int64_t)t->config.batch * t->config.context;
    double speed = (double)((step - l->line_step) * bytes) * 1e9 / (double)(now - l->line_ns);

    printf("step %" PRId64 "/%" PRId64 "  loss %.3f, held back %.3f  %.0f byte/s  load %.1fx  exposed %.1f %%\n", step,
           t->board->steps, l->report.loss, t->board->validation, speed, l->report.balance,
           100.0 * t->board->exposed);
    fflush(stdout);
    write_json(l, step, speed);
}

static bool trace_on(struct learner *l)
{
    l->traced = true;
    return cli_note(&l->player, hmoe_trace_start(model_group(l->model)));
}

/* Exposed communication of the step that was traced. */
static bool trace_off(struct learner *l, int64_t took_ns)
{
    struct hmoe_trace_summary summary = {.size = sizeof summary};

    l->traced = false;
    if (!cli_note(&l->player, hmoe_trace_stop(model_group(l->model))) ||
        !cli_note(&l->player, hmoe_trace_read(model_group(l->model), &summary)))
        return false;
    if (leads(l)) {
        l->train->board->exposed = (double)summary.exposed_comm_ns / (double)took_ns;
        memcpy(l->train->board->stage_ns, summary.stage_ns, sizeof summary.stage_ns);
    }
    return true;
}

static bool write_trace(struct learner *l)
{
    const char *path = l->train->settings.trace;
    char own[4096];

    if (!path)
        return true;
    snprintf(own, sizeof own, l->player.boot->ranks == 1 ? "%s" : "%s.rank%d", path, l->player.boot->rank);
    return cli_note(&l->player, hmoe_trace_write(model_group(l->model), own));
}

/* ----------------------------------------------------------------- checkpoints */

static bool save(struct learner *l)
{
    const struct train *t = l->train;

    if (!t->settings.save)
        return true;
    model_export(l->model, &l->train->state);
    if (!cli_barrier(&l->player)) /* all parts are there */
        return false;
    if (leads(l) && !note(l, checkpoint_write(t->settings.save, &t->config, &t->state, &l->error)))
        return false;
    return cli_barrier(&l->player); /* and may change again */
}

/* ----------------------------------------------------------------------- steps */

/* With --minutes: once a few steps are timed, how many there will be. */
static bool plan_steps(struct learner *l, int64_t done, int64_t step)
{
    struct train *t = l->train;
    int64_t now = base_now_ns(), budget = t->settings.minutes * 60000000000, left = budget - (now - t->begun_ns);
    double each = (double)(now - l->timed_ns) / (TIMED_TO - TIMED_FROM) * 1.06; /* lines and held-back losses */

    if (done == TIMED_FROM)
        l->timed_ns = now;
    if (!t->settings.minutes || done != TIMED_TO)
        return true;
    if (leads(l))
        t->board->steps = step + 1 + (left > 0 ? (int64_t)((double)left / each) : 0);
    return cli_barrier(&l->player);
}

/* Rank 0's clock says whether a line, or a held-back loss, is due after this step. */
static bool due(struct learner *l, bool last, int64_t *what)
{
    int64_t now = base_now_ns();

    *what = (now - l->line_ns >= LINE_NS || last ? 1 : 0) | (now - l->validation_ns >= VALIDATION_NS || last ? 2 : 0);
    return agree(l, what);
}

static bool after_step(struct learner *l, int64_t step, bool last)
{
    int64_t what;

    if (!due(l, last, &what) || ((what & 2) && (!validate(l) || !save(l))))
        return false;
    if (!what)
        return true;
    if (leads(l))
        show_line(l, step);
    l->line_ns = base_now_ns();
    l->line_step = step;
    return last || trace_on(l); /* the next step tells what is exposed */
}

static bool one_step(struct learner *l, int64_t step)
{
    struct model_optimizer optimizer = l->train->optimizer;
    int64_t start = base_now_ns();

    optimizer.steps = l->train->board->steps;
    learning_batch(l, step);
    if (!note(l, model_step(l->model, &optimizer, l->inputs, l->targets, &l->report, &l->error)))
        return false;
    return !l->traced || trace_off(l, base_now_ns() - start);
}

static bool learn(struct learner *l)
{
    struct train *t = l->train;
    int64_t first = t->state.step;

    l->line_ns = base_now_ns();
    l->line_step = first;
    if (!validate(l))
        return false;
    for (int64_t step = first; step < t->board->steps; step++) {
        bool last;
        if (step + 1 == t->board->steps && !l->traced && !trace_on(l))
            return false;
        if (!one_step(l, step) || !plan_steps(l, step - first + 1, step + 1))
            return false;
        last = step + 1 == t->board->steps;
        if (!after_step(l, step + 1, last))
            return false;
    }
    return write_trace(l);
}

static void note_load(struct learner *l)
{
    const struct model_config *c = &l->train->config;

    for (int layer = 0; layer < c->layers && leads(l); layer++)
        for (int e = 0; e < c->experts && e < 256; e++)
            l->train->board->load[e] += model_load(l->model, layer)[e];
}

/* ---------------------------------------------------------------------- sample */

/* A byte by its chance at temperature 0.8. */
static uint8_t draw(struct base_prng *prng, const float *logits)
{
    double chance[MODEL_BYTES], sum = 0.0, at;
    float most = logits[0];

    for (int i = 1; i < MODEL_BYTES; i++)
        most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < MODEL_BYTES; i++)
        sum += chance[i] = exp((double)(logits[i] - most) / 0.8);
    at = sum * (double)base_random_unit(prng);
    for (int i = 0; i < MODEL_BYTES - 1; i++)
        if ((at -= chance[i]) < 0.0)
            return (uint8_t)i;
    return MODEL_BYTES - 1;
}

static void show_byte(uint8_t byte)
{
    putchar(byte == '\n' || (byte >= 32 && byte < 127) ? byte : '.');
}

/* Every rank draws the same bytes: they are what the layers of all ranks see. */
static bool sample(struct learner *l)
{
    const struct train *t = l->train;
    int64_t prompt = t->config.context / 2, length = prompt;
    uint8_t *text = malloc((size_t)(prompt + t->settings.sample) + 1);
    struct base_prng prng = {t->state.seed + 99};
    float logits[MODEL_BYTES];
    bool fine = text != NULL;

    if (text)
        memcpy(text, t->text.bytes + t->learned, (size_t)prompt);
    if (leads(l) && t->settings.sample)
        printf("\nFrom the held-back text on, what it writes:\n");
    for (int64_t i = 0; i < prompt && leads(l) && fine && t->settings.sample; i++)
        show_byte(text[i]);
    if (leads(l) && t->settings.sample)
        printf("|");
    for (int64_t i = 0; i < t->settings.sample && fine; i++) {
        fine = note(l, model_next(l->model, text, length, logits, &l->error));
        text[length] = fine ? draw(&prng, logits) : 0;
        if (leads(l) && fine)
            show_byte(text[length]);
        length++;
    }
    if (leads(l) && t->settings.sample)
        printf("\n");
    free(text);
    return fine;
}

int train_rank(const struct hmoe_boot *boot, void *argument)
{
    struct train *t = argument;
    size_t bytes = (size_t)(t->config.batch * t->config.context);
    struct learner l = {.train = t, .player = {.boot = boot, .seats = t->board->seats}, .inputs = malloc(bytes),
                        .targets = malloc(bytes), .error = {.status = HMOE_OK}};
    struct model_boot own = {boot->rank, boot->ranks, boot->allgather, boot->allgather_context,
                             cli_workers(t->settings.workers, boot->ranks), NULL};
    bool fine;

    if (!l.inputs || !l.targets)
        base_fail(&l.error, HMOE_ERR_MEMORY, "out of memory");
    fine = note(&l, l.error.status) && note(&l, model_create(&l.model, &t->config, &own, &t->state, &l.error));
    if (fine) {
        fine = learn(&l) && sample(&l);
        note_load(&l);
    }
    if (l.model)
        model_destroy(l.model);
    free(l.inputs);
    free(l.targets);
    return fine ? 0 : 1;
}

/* ------------------------------------------------------------------------ frame */

void train_show_begin(const struct train *t)
{
    const struct model_config *c = &t->config;
    int workers = cli_workers(t->settings.workers, t->settings.ranks);
    char size[CLI_TEXT_BYTES], count[CLI_TEXT_BYTES];

    printf("Text      %s, %s; the last tenth is held back\n", t->text.source, cli_bytes(size, (double)t->text.size));
    printf("Model     %s parameters: %d layers of width %d, %d heads, %d experts of\n          inner width %d, %d of "
           "them for each byte; %d sequences of %d bytes a step\n",
           cli_count(count, model_size(c)), c->layers, c->width, c->heads, c->experts, c->inner, c->topk, c->batch,
           c->context);
    printf("Ranks     %" PRId64 " as %s, %d worker%s each\n", t->settings.ranks,
           t->settings.via ? "processes" : "threads", workers, workers == 1 ? "" : "s");
    if (t->settings.resume)
        printf("Resumed   %s at step %" PRId64 "\n", t->settings.resume, t->state.step);
    printf("\n");
}

static void show_load(const struct train *t)
{
    int64_t most = 1;
    int experts = t->config.experts < 64 ? t->config.experts : 64;
    char count[CLI_TEXT_BYTES], bar[48];

    for (int e = 0; e < experts; e++)
        most = t->board->load[e] > most ? t->board->load[e] : most;
    printf("\nRows of each expert in the last step, all layers\n");
    for (int e = 0; e < experts; e++)
        printf("  expert %3d %9s  %s\n", e, cli_count(count, t->board->load[e]),
               cli_bar(bar, sizeof bar, (double)t->board->load[e], (double)most, 40));
}

static void show_stages(const struct train *t)
{
    const int64_t *ns = t->board->stage_ns;
    int64_t most = 1;
    char time[CLI_TEXT_BYTES], bar[48];

    for (int s = 0; s < HMOE_STAGES; s++)
        most = ns[s] > most ? ns[s] : most;
    printf("\nThe expert layers' calls of the last step, forward and backward: workers' time\n");
    for (int s = 0; s < HMOE_STAGES; s++)
        printf("  %-10s %10s  %s%s\n", hmoe_stage_name(s), cli_time(time, (double)ns[s]),
               cli_bar(bar, sizeof bar, (double)ns[s], (double)most, 40), s == 4 ? "  inside gmm1" : "");
}

void train_show_end(const struct train *t)
{
    double knows = log(256.0);

    show_load(t);
    show_stages(t);
    printf("\nHeld-back loss %.3f nats per byte (%.2f bits), from %.3f for knowing nothing\n", t->board->validation,
           t->board->validation / log(2.0), knows);
    if (t->settings.save)
        printf("Checkpoint: %s; go on with --resume %s --steps N\n", t->settings.save, t->settings.save);
    if (t->settings.trace)
        printf("Timeline of the last step: %s, for ui.perfetto.dev\n", t->settings.trace);
}
