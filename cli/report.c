/* What `hmoe run` prints, in 80 columns. */
#include "run.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { BAR = 36, EXPERT_BARS = 14, RANK_LINES = 8 };

/* ------------------------------------------------------------------ the input */

static void show_layer(const struct run *run)
{
    static const char *const dtypes[] = {"f32", "bf16", "f16"}, *const layouts[] = {"kn", "nk"};
    const struct cli_shape *shape = &run->shape;
    char bytes[CLI_TEXT_BYTES];

    printf("layer    %s%sH %" PRId64 ", I %" PRId64 ", E %d, K %d, %s, weights %s %s, %s\n",
           shape->name ? shape->name : "", shape->name ? ": " : "", shape->hidden, shape->inner, shape->experts,
           shape->topk, dtypes[shape->dtype], layouts[shape->layout], cli_bytes(bytes, cli_weight_bytes(shape)),
           shape->biased ? "clamped, biased" : "silu");
}

static void show_text(const struct run *run)
{
    char used[CLI_TEXT_BYTES], all[CLI_TEXT_BYTES];

    printf("text     %s: ", run->text.source);
    if (run->text_tokens >= run->batch.tokens)
        printf("%s of its %s tokens\n", cli_count(used, run->batch.tokens), cli_count(all, run->text_tokens));
    else
        printf("its %s tokens, again and again, %s in all\n", cli_count(all, run->text_tokens),
               cli_count(used, run->batch.tokens));
}

void run_show_input(const struct run *run)
{
    int64_t ranks = run->settings.ranks;
    int workers = cli_workers(run->settings.workers, run->settings.ranks);
    const char *what = run->settings.via == HMOE_VIA_PROCESSES ? "process" : "thread";
    const char *plural = run->settings.via == HMOE_VIA_PROCESSES ? "es" : "s";
    char engine[96];

    show_text(run);
    show_layer(run);
    printf("router   softmax over %d experts, top %d, weights %s\n", run->shape.experts, run->shape.topk,
           run->shape.renormalised ? "renormalised to sum 1" : "as the softmax gave them");
    printf("ranks    %" PRId64 " %s%s with %d worker%s each, engine %s\n", ranks, what, ranks == 1 ? "" : plural,
           workers, workers == 1 ? "" : "s", cli_engine_text(engine, sizeof engine, &run->choice));
}

/* ----------------------------------------------------------------- expert load */

struct load {
    int expert;
    int64_t rows;
};

static int busiest_first(const void *left, const void *right)
{
    const struct load *a = left, *b = right;

    if (a->rows != b->rows)
        return a->rows < b->rows ? 1 : -1;
    return (a->expert > b->expert) - (a->expert < b->expert);
}

static struct load *count_load(const struct run *run)
{
    struct load *load = calloc((size_t)run->shape.experts, sizeof *load);
    int64_t slots = run->batch.tokens * run->shape.topk;

    for (int e = 0; load && e < run->shape.experts; e++)
        load[e].expert = e;
    for (int64_t i = 0; load && i < slots; i++)
        load[run->batch.ids[i]].rows++;
    return load;
}

/* The experts below the bars, in one line. */
static void show_rest(const struct load *load, int shown, int experts)
{
    int64_t rows = 0;
    int idle = 0;

    if (shown >= experts)
        return;
    for (int i = shown; i < experts; i++) {
        rows += load[i].rows;
        idle += load[i].rows == 0;
    }
    printf("  the other %-6d %7.0f  each on average; least %" PRId64, experts - shown,
           (double)rows / (experts - shown), load[experts - 1].rows);
    if (idle)
        printf(", %d without any", idle);
    printf("\n");
}

static void show_load(const struct run *run)
{
    struct load *load = count_load(run);
    int experts = run->shape.experts, shown = experts <= EXPERT_BARS + 2 ? experts : EXPERT_BARS;
    int64_t slots = run->batch.tokens * run->shape.topk;
    double mean = (double)slots / experts;
    char bar[BAR + 1], count[CLI_TEXT_BYTES];

    if (!load)
        return;
    qsort(load, (size_t)experts, sizeof *load, busiest_first);
    printf("\nExpert load: %s rows, mean %.1f, busiest %.1f x the mean\n", cli_count(count, slots), mean,
           (double)load[0].rows / mean);
    for (int i = 0; i < shown; i++)
        printf("  expert %-9d %7" PRId64 "  %s\n", load[i].expert, load[i].rows,
               cli_bar(bar, sizeof bar, (double)load[i].rows, (double)load[0].rows, BAR));
    show_rest(load, shown, experts);
    free(load);
}

/* ------------------------------------------------------------------------ time */

static double steady_median(const struct run *run)
{
    double ns[RUN_CALLS_MOST];

    for (int i = 0; i < run->board->calls; i++)
        ns[i] = (double)run->board->steady_ns[i];
    return cli_median(ns, run->board->calls);
}

static void show_time(const struct run *run)
{
    double median = steady_median(run), flops = cli_flops(&run->shape, run->batch.tokens * run->shape.topk);
    char first[CLI_TEXT_BYTES], steady[CLI_TEXT_BYTES];

    printf("\nTime\n  first call       %10s\n", cli_time(first, (double)run->board->first_ns));
    printf("  steady state     %10s  median of %d calls, %.0f GFLOP/s, %.0f tokens/s\n", cli_time(steady, median),
           run->board->calls, flops / median, (double)run->batch.tokens * 1e9 / median);
}

static void show_stages(const struct run *run, const struct hmoe_trace_summary *sum)
{
    int64_t most = 1, all = 0;
    char time[CLI_TEXT_BYTES], bar[BAR + 1];

    for (int s = 0; s < HMOE_STAGES; s++) {
        most = sum->stage_ns[s] > most ? sum->stage_ns[s] : most;
        all += s == 4 ? 0 : sum->stage_ns[s];
    }
    cli_time(time, (double)run->board->traced_ns);
    printf("\nStages of one traced call (%s), summed over all workers\n", time);
    for (int s = 0; s < HMOE_STAGES; s++)
        printf("  %-10s %10s %5.1f %%%s%s%s\n", hmoe_stage_name(s), cli_time(time, (double)sum->stage_ns[s]),
               100.0 * (double)sum->stage_ns[s] / (double)(all ? all : 1),
               *cli_bar(bar, sizeof bar, (double)sum->stage_ns[s], (double)most, BAR) ? "  " : "", bar,
               s == 4 ? "  inside gmm1" : "");
}

static double percent(int64_t part, int64_t whole)
{
    return whole > 0 ? 100.0 * (double)part / (double)whole : 0.0;
}

static void show_overlap(const struct run *run, const struct hmoe_trace_summary *sum)
{
    int64_t worker_ns = sum->span_ns * cli_workers(run->settings.workers, run->settings.ranks);
    char p50[CLI_TEXT_BYTES], p99[CLI_TEXT_BYTES];

    printf("  lanes busy       matrix %.0f %%, vector %.0f %%, comm %.0f %% of the workers' time\n",
           percent(sum->lane_busy_ns[0], worker_ns), percent(sum->lane_busy_ns[1], worker_ns),
           percent(sum->lane_busy_ns[2], worker_ns));
    printf("  overlap          two lanes at once %.0f %% of the time, matrix lane empty %.0f %%\n",
           percent(sum->overlap_ns, sum->span_ns), percent(sum->exposed_comm_ns, sum->span_ns));
    printf("  a block takes    P50 %s, P99 %s over %" PRId64 " blocks, slowest rank\n",
           cli_time(p50, (double)sum->block_p50_ns), cli_time(p99, (double)sum->block_p99_ns), sum->blocks);
    if (sum->events_lost > 0)
        printf("  incomplete       %" PRId64 " events were lost; try --knobs trace_events=1000000\n", sum->events_lost);
}

/* ----------------------------------------------------------------------- ranks */

static int64_t rows_of_rank(const struct run *run, int rank)
{
    int64_t local = run->shape.experts / run->settings.ranks, rows = 0;

    for (int64_t i = 0; i < run->batch.tokens * run->shape.topk; i++)
        rows += run->batch.ids[i] / local == rank;
    return rows;
}

static void show_ranks(const struct run *run)
{
    int ranks = (int)run->settings.ranks;

    if (ranks == 1)
        return;
    printf("\nRanks        tokens   rows received   matrix busy   P99 block\n");
    for (int r = 0; r < ranks && r < RANK_LINES; r++) {
        const struct hmoe_trace_summary *sum = &run->board->seats[r].summary;
        int64_t first = cli_first_token(run->batch.tokens, r, ranks);
        int64_t tokens = cli_first_token(run->batch.tokens, r + 1, ranks) - first;
        char p99[CLI_TEXT_BYTES];
        printf("  rank %-4d %8" PRId64 " %15" PRId64 " %11.0f %%  %10s\n", r, tokens, rows_of_rank(run, r),
               percent(sum->lane_busy_ns[0], sum->span_ns * cli_workers(run->settings.workers, run->settings.ranks)),
               cli_time(p99, (double)sum->block_p99_ns));
    }
    if (ranks > RANK_LINES)
        printf("  and %d more ranks\n", ranks - RANK_LINES);
}

static void show_memory(const struct run *run)
{
    const struct cli_seat *seats = run->board->seats;
    double high = 0.0, rows = (double)(run->batch.tokens * run->shape.topk) *
                              (double)kern_row_bytes(run->shape.dtype, run->shape.hidden);
    int64_t peak = 0;
    char all[CLI_TEXT_BYTES], expanded[CLI_TEXT_BYTES], process[CLI_TEXT_BYTES], text[256];

    for (int r = 0; r < run->settings.ranks; r++) {
        high += (double)seats[r].workspace.high_water_bytes;
        peak = seats[r].peak_bytes > peak ? seats[r].peak_bytes : peak;
    }
    snprintf(text, sizeof text, "Memory beside your tensors: %s at most, over all ranks: %.2f x the expanded rows "
             "[T*K,H] (%s). Largest process, weights included: %s.",
             cli_bytes(all, high), high / rows, cli_bytes(expanded, rows), cli_bytes(process, (double)peak));
    putchar('\n');
    cli_wrap(stdout, text, 0, 0);
}

static void show_verdict(const struct run *run)
{
    char checked[CLI_TEXT_BYTES], all[CLI_TEXT_BYTES];

    if (run->settings.trace)
        printf("\nThe timeline is in %s: open it at https://ui.perfetto.dev\n", run->settings.trace);
    if (run->difference.differing || run_unstable(run))
        return;
    printf("\nChecked: %s of %s tokens equal the oracle, bit for bit; %d calls, the same\nbits each time. ",
           cli_count(checked, run->checked), cli_count(all, run->batch.tokens), run->board->calls + 1);
    printf("Checksum of y: %016" PRIx64 ", whatever the engine and ranks.\n",
           run_hash(run->batch.y, (size_t)run->batch.tokens * kern_row_bytes(run->shape.dtype, run->shape.hidden)));
}

void run_show_result(const struct run *run)
{
    struct hmoe_trace_summary sum;

    cli_sum_summaries(run->board->seats, (int)run->settings.ranks, &sum);
    show_load(run);
    show_time(run);
    show_stages(run, &sum);
    show_overlap(run, &sum);
    show_ranks(run);
    show_memory(run);
    show_verdict(run);
}
