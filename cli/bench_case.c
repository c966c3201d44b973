/* Measuring one case: two plans called in turn, new routing and changed weights before every call, a sample of the
 * results checked. Ranks are threads; rank 0 conducts between barriers. */
#include "bench.h"
#include "noise.h"

#include "base/clock.h"
#include "base/num.h"

#include <stdlib.h>
#include <string.h>

enum { FUSED = 0, AGAINST = 1, CHANGED = 32, RATE_NS = 60000000 };

static struct cli_weights *current_layer(const struct bench_run *run)
{
    return &run->layers->layer[run->calls % run->layers->count];
}

/* ------------------------------------------------------------------- before a call */

static void flip_sign(enum hmoe_dtype dtype, char *base, int64_t index)
{
    num_store(dtype, base, index, -num_load(dtype, base, index));
}

/* Changes some weights of one token's first expert, in place: a result computed from a copy kept by an earlier call
 * would differ from the oracle's. */
static void change_weights(struct bench_run *run)
{
    struct cli_weights *weights = current_layer(run);
    int64_t up = 2 * run->shape.hidden * run->shape.inner, down = run->shape.hidden * run->shape.inner, expert;

    run->token = base_random_below(&run->prng, run->batch.tokens);
    expert = run->batch.ids[run->token * run->shape.topk];
    for (int i = 0; i < CHANGED; i++) {
        flip_sign(run->shape.dtype, weights->up, expert * up + base_random_below(&run->prng, up));
        flip_sign(run->shape.dtype, weights->down, expert * down + base_random_below(&run->prng, down));
    }
}

static double floor_of(const struct bench_run *run, double touched)
{
    const struct bench_result *result = run->result;
    double read_ms = touched / result->read_gbs / 1e6, flop_ms = result->flops / result->gflops_limit / 1e6;

    return read_ms > flop_ms ? read_ms : flop_ms;
}

/* Returns the bytes of weights that the call will touch. */
static double prepare(struct bench_run *run)
{
    size_t row = kern_row_bytes(run->shape.dtype, run->shape.hidden);
    int distinct = bench_route(run);

    change_weights(run);
    memset(run->batch.y + (size_t)run->token * row, 0xa5, row);
    return distinct * cli_expert_bytes(&run->shape);
}

/* -------------------------------------------------------------------- after a call */

/* At most a fifth of the time goes to the oracle, but the first calls of both plans are always checked. */
static bool worth_checking(const struct bench_run *run)
{
    return run->checked < 4 || run->checked_ns * 5 < base_now_ns() - run->begun_ns;
}

static void check_call(struct bench_run *run)
{
    struct cli_difference difference = {0};
    int64_t start = base_now_ns();
    bool fine;

    if (!worth_checking(run))
        return;
    if (run->what->backward)
        fine = bench_check_back(run, current_layer(run));
    else
        fine = cli_verify_token(current_layer(run), &run->batch, run->token, &difference);
    run->out_of_memory |= !fine;
    if (difference.differing)
        run->difference = difference;
    run->checked++;
    run->checked_ns += base_now_ns() - start;
}

static bool must_stop(const struct bench_run *run, int pairs)
{
    if (run->difference.differing || run->out_of_memory || pairs == BENCH_PAIRS_MOST)
        return true;
    if (run->pairs_wanted)
        return pairs >= run->pairs_wanted;
    return pairs >= (run->what->backward ? 2 : 3) && base_now_ns() - run->begun_ns > run->budget_ns;
}

/* ------------------------------------------------------------------------ the ranks */

struct member {
    struct bench_run *run;
    struct cli_player player;
    struct hmoe_plan *plan[2];
    struct hmoe_saved *saved[2]; /* for backwards */
};

/* The call to be timed, and for a backward its forward before, untimed. false: it failed. */
static bool make_call(struct member *member, int side, struct hmoe_call *call)
{
    struct bench_run *run = member->run;
    int rank = member->player.boot->rank;

    *call = cli_call(current_layer(run), &run->batch, rank, run->what->ranks);
    if (!run->what->backward)
        return true;
    call->saved = member->saved[side];
    if (!cli_note(&member->player, hmoe_forward(member->plan[side], call)))
        return false;
    *call = (struct hmoe_call){.size = sizeof *call, .saved = member->saved[side],
                               .grad = bench_gradients(run, rank)};
    return cli_barrier(&member->player);
}

static cli_call_fn *timed(const struct bench_run *run)
{
    return run->what->backward ? hmoe_backward : hmoe_forward;
}

/* One call of all ranks. Only rank 0 touches the run between the barriers; the seats' times hold until the first of
 * the next call. Returns the milliseconds, or -1. */
static double call_once(struct member *member, int side)
{
    struct bench_run *run = member->run;
    int rank = member->player.boot->rank, ranks = run->what->ranks;
    struct hmoe_call call;
    double touched = rank == 0 ? prepare(run) : 0.0;

    if (!cli_barrier(&member->player))
        return -1.0;
    if (!make_call(member, side, &call) || !cli_timed_call(&member->player, timed(run), member->plan[side], &call))
        return -1.0;
    if (rank == 0) {
        check_call(run);
        if (side == FUSED && run->calls >= 2) {
            run->floor_ms += run->what->backward ? bench_back_floor(run, touched) : floor_of(run, touched);
            run->touched_bytes += touched;
            run->dw_bytes += run->what->backward ? bench_dw_bytes(run, touched) : 0.0;
        }
        run->calls++;
    }
    if (!cli_barrier(&member->player))
        return -1.0;
    return (double)cli_span(run->seats, ranks) / 1e6;
}

static bool first_calls(struct member *member)
{
    for (int side = FUSED; side <= AGAINST; side++) {
        double ms = call_once(member, side);
        if (ms < 0.0)
            return false;
        if (member->player.boot->rank == 0)
            member->run->result->first_ms[side] = ms;
    }
    return true;
}

/* The plans take turns, and turns at being first. */
static bool steady_calls(struct member *member)
{
    struct bench_run *run = member->run;
    bool leader = member->player.boot->rank == 0;

    for (int pair = 0; !run->stop; pair++) {
        for (int i = 0; i < 2; i++) {
            int side = (i + pair) % 2;
            double ms = call_once(member, side);
            if (ms < 0.0)
                return false;
            if (leader)
                run->ms[side][pair] = ms;
        }
        if (leader) {
            run->result->pairs = pair + 1;
            run->stop = must_stop(run, pair + 1);
        }
        if (!cli_barrier(&member->player))
            return false;
    }
    return true;
}

static bool traced_call(struct member *member)
{
    struct bench_run *run = member->run;
    int rank = member->player.boot->rank;
    struct hmoe_call call;

    if (rank == 0)
        prepare(run);
    if (!cli_barrier(&member->player))
        return false;
    return make_call(member, FUSED, &call) &&
           cli_traced_call(&member->player, timed(run), member->plan[FUSED], &call, NULL);
}

static bool note_workspaces(struct member *member)
{
    int rank = member->player.boot->rank;

    for (int side = FUSED; side <= AGAINST; side++) {
        struct hmoe_workspace *workspace = &member->run->workspace[side][rank];
        workspace->size = sizeof *workspace;
        if (!cli_note(&member->player, hmoe_plan_workspace(member->plan[side], workspace)))
            return false;
    }
    return true;
}

static bool make_plans(struct member *member)
{
    const struct bench_run *run = member->run;
    int64_t share = (run->batch.tokens + run->what->ranks - 1) / run->what->ranks;

    for (int side = FUSED; side <= AGAINST; side++) {
        struct hmoe_plan_options options = cli_plan_options(&run->shape, share, run->knobs[side]);
        options.training = run->what->backward;
        if (!cli_note(&member->player, hmoe_plan_create(member->player.group, &options, &member->plan[side])))
            return false;
        if (run->what->backward &&
            !cli_note(&member->player, hmoe_saved_create(member->plan[side], NULL, &member->saved[side])))
            return false;
    }
    return true;
}

static int bench_rank(const struct hmoe_boot *boot, void *argument)
{
    struct bench_run *run = argument;
    struct member member = {.run = run, .player = {.boot = boot, .seats = run->seats}};
    bool fine;

    if (!cli_enter(&member.player, run->what->workers, NULL))
        return 1;
    fine = make_plans(&member) && first_calls(&member) && steady_calls(&member) && traced_call(&member) &&
           note_workspaces(&member);
    for (int side = AGAINST; side >= FUSED; side--) {
        if (member.saved[side])
            fine = cli_note(&member.player, hmoe_saved_destroy(member.saved[side])) && fine;
        if (member.plan[side])
            fine = cli_note(&member.player, hmoe_plan_destroy(member.plan[side])) && fine;
    }
    return cli_leave(&member.player, fine) ? 0 : 1;
}

/* ----------------------------------------------------------------------- the figures */

void bench_rates(struct bench_run *run, double *read_gbs, double *gflops)
{
    const struct cli_weights *weights = &run->layers->layer[0];
    int threads = run->limits->threads;
    double few = limits_engine(run->choice.few, threads, RATE_NS);
    double many = run->choice.many == run->choice.few ? few : limits_engine(run->choice.many, threads, RATE_NS);
    double read = limits_read_again(run->limits, weights->map, weights->map_bytes);

    *gflops = few > many ? few : many;
    if (read > *read_gbs)
        *read_gbs = read;
}

static void note_ratio(struct bench_run *run)
{
    struct bench_result *result = run->result;
    double ratio[BENCH_PAIRS_MOST];

    for (int i = 0; i < result->pairs; i++)
        ratio[i] = run->ms[AGAINST][i] / run->ms[FUSED][i];
    result->ratio = cli_median(ratio, result->pairs);
    for (int side = FUSED; side <= AGAINST; side++)
        result->median_ms[side] = cli_median(run->ms[side], result->pairs);
    result->least_ms = run->ms[FUSED][0];
    result->p90_ms = cli_percentile(run->ms[FUSED], result->pairs, 90.0);
}

/* Measurements of limits and of calls differ by a few percent from one second to the next; what lies beyond is an
 * error of the bench or a call that did not do its work. */
#define NOISE 1.07

static void note_result(struct bench_run *run)
{
    struct bench_result *result = run->result;
    double read = run->limits->read_gbs, gflops = 0.0;

    note_ratio(run);
    result->checked = run->checked;
    result->touched_bytes = run->touched_bytes / result->pairs;
    result->floor_ms = run->floor_ms / result->pairs;
    result->dw_bytes = run->dw_bytes / result->pairs;
    cli_sum_summaries(run->seats, run->what->ranks, &result->trace);
    for (int side = FUSED; side <= AGAINST; side++)
        for (int r = 0; r < run->what->ranks; r++)
            result->high_water_bytes[side] += (double)run->workspace[side][r].high_water_bytes;
    bench_rates(run, &read, &gflops);
    read = read > result->read_gbs ? read : result->read_gbs;
    gflops = gflops > result->gflops_limit ? gflops : result->gflops_limit;
    result->exceeds = result->flops / result->median_ms[FUSED] / 1e6 > gflops * NOISE;
    if (run->what->routing != BENCH_HOT) /* one expert stays in the cache within a call */
        result->exceeds |= result->touched_bytes / result->median_ms[FUSED] / 1e6 > read * NOISE;
}

static void make_rows(struct bench_run *run)
{
    for (int64_t i = 0; i < run->batch.tokens * run->shape.hidden; i++)
        num_store(run->shape.dtype, run->batch.x, i, base_random_sym(&run->prng, 1.7320508f));
}

static bool failed(struct bench_run *run, enum hmoe_status status, char *why, size_t why_size)
{
    int rank = cli_first_error(run->seats, run->what->ranks);
    char text[160];

    if (rank >= 0)
        snprintf(why, why_size, "rank %d: %s", rank, run->seats[rank].error);
    else if (status != HMOE_OK)
        snprintf(why, why_size, "%s", hmoe_last_error());
    else if (run->out_of_memory)
        snprintf(why, why_size, "out of memory");
    else if (run->difference.differing)
        snprintf(why, why_size, "WRONG: the oracle disagrees about %s",
                 cli_difference_text(text, sizeof text, &run->shape, &run->difference));
    else
        return false;
    return true;
}

static enum hmoe_status launch(struct bench_run *run)
{
    enum hmoe_status status;
    struct noise noise;

    make_rows(run);
    run->begun_ns = base_now_ns();
    noise_begin(&noise);
    status = hmoe_launch(HMOE_VIA_THREADS, run->what->ranks, bench_rank, run);
    run->result->other_cpus = noise_end(&noise);
    return status;
}

bool bench_measure(struct bench_run *run, char *why, size_t why_size)
{
    struct bench_result *result = run->result;
    enum hmoe_status status = HMOE_OK;
    bool fine;

    *result = (struct bench_result){.what = *run->what, .read_gbs = 0.0};
    snprintf(result->engine, sizeof result->engine, "%s", run->choice.many->name);
    result->flops = cli_flops(&run->shape, run->what->tokens * run->shape.topk) * (run->what->backward ? 2.0 : 1.0);
    bench_rates(run, &result->read_gbs, &result->gflops_limit);
    fine = cli_batch_make(&run->batch, &run->shape, run->what->tokens) &&
           bench_deck_make(&run->deck, run->shape.experts) && (!run->what->backward || bench_grads_make(run));
    if (fine)
        status = launch(run);
    else
        run->out_of_memory = true;
    fine = !failed(run, status, why, why_size);
    if (fine)
        note_result(run);
    cli_batch_free(&run->batch, &run->shape);
    bench_deck_free(&run->deck);
    bench_grads_free(run);
    return fine;
}
