/* What `hmoe bench` prints, in 100 columns, and its JSON lines. */
#include "bench.h"

#include "base/topology.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

static const char *const dtypes[] = {"f32", "bf16", "f16"}, *const layouts[] = {"kn", "nk"};

static double gflops_of(const struct bench_result *result)
{
    return result->flops / result->median_ms[0] / 1e6;
}

static double gbs_of(const struct bench_result *result)
{
    return result->touched_bytes / result->median_ms[0] / 1e6;
}

static double share(int64_t part, int64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 0.0;
}

static double lane_share(const struct bench_result *result, int lane)
{
    return share(result->trace.lane_busy_ns[lane], result->trace.span_ns * result->what.workers);
}

/* ------------------------------------------------------------------------- screen */

void bench_show_limits(const struct limits *limits)
{
    printf("Limits of %d thread%s: read %.1f GB/s (%s), store %.1f GB/s\n", limits->threads,
           limits->threads == 1 ? "" : "s", limits->read_gbs, limits_read_name(limits->read_method), limits->store_gbs);
    printf("  GFLOP/s:");
    for (int i = 0; kern_engines[i] && i < LIMITS_ENGINES; i++) {
        printf("%s %s ", i ? "," : "", kern_engines[i]->name);
        printf(limits->engine_gflops[i] > 0.0 ? "%.0f" : "not here", limits->engine_gflops[i]);
    }
    printf("\n");
    fflush(stdout);
}

/* The two lines and show_row have the same widths. */
void bench_show_head(const struct bench_case *what)
{
    static const char *const line[2][16] = {
        {"", "", "", "", "rout", "ranks", "first", "fused", "% of ", "bulk", "bulk/", "GFLOP", "", "no", "busy",
         "over"},
        {"T", "type", "", "engine", "ing", "x w", "ms", "ms", "floor ", "ms", "fused", "/s", "GB/s", "mm%", "%",
         "lap%"},
    };

    if (what->backward)
        printf("\nBackward, fused against bulk; weights' gradients in %s, %s\n", dtypes[what->dw_type],
               what->dw_mode == HMOE_OVERWRITE ? "overwritten" : "accumulated");
    else
        printf("\nFused against bulk\n");
    for (int i = 0; i < 2; i++) {
        const char *const *w = line[i];
        printf("%5s %-4s %-2s %-6s %-4s %5s %7s %9s %6s ", w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8]);
        printf("%8s %6s %6s %5s %4s %4s %4s\n", w[9], w[10], w[11], w[12], w[13], w[14], w[15]);
    }
}

void bench_show_knob_head(void)
{
    printf("\nEach extension switched off: the gain of having it, and its memory\n"
           "%5s %-4s %-2s %-6s %-5s %-19s %9s %9s %6s %9s %9s\n",
           "T", "type", "", "engine", "  RxW", "switched off", "on ms", "off ms", "off/on", "memory on", "off");
}

static bool is_busy(const struct bench_result *result)
{
    return result->other_cpus > BENCH_BUSY * base_cpus();
}

/* '!': impossible; '~': disturbed */
static char mark_of(const struct bench_result *result)
{
    return result->exceeds ? '!' : is_busy(result) ? '~' : ' ';
}

static void show_row(const struct bench_result *result)
{
    const struct bench_case *what = &result->what;
    const struct hmoe_trace_summary *trace = &result->trace;

    printf("%5" PRId64 " %-4s %s %-6s %-4.4s %2dx%-2d ", what->tokens, dtypes[what->dtype], layouts[what->layout],
           result->engine, bench_routing_names[what->routing], what->ranks, what->workers);
    printf("%7.1f %9.3f %5.1f%c %8.3f %6.3f %6.0f %5.1f ", result->first_ms[0], result->median_ms[0],
           100.0 * result->floor_ms / result->median_ms[0], mark_of(result), result->median_ms[1],
           result->ratio, gflops_of(result), gbs_of(result));
    printf("%4.0f %4.0f %4.0f\n", 100.0 * share(trace->exposed_comm_ns, trace->span_ns), 100.0 * lane_share(result, 0),
           100.0 * share(trace->overlap_ns, trace->span_ns));
    fflush(stdout);
}

void bench_show(const struct bench_result *result)
{
    cli_progress_end();
    show_row(result);
}

void bench_show_knob(const struct bench_result *result)
{
    const struct bench_case *what = &result->what;
    char on[CLI_TEXT_BYTES], off[CLI_TEXT_BYTES];

    cli_progress_end();
    printf("%5" PRId64 " %-4s %s %-6s %2dx%-2d %-19s %9.3f %9.3f %6.3f %9s %9s\n", what->tokens, dtypes[what->dtype],
           layouts[what->layout], result->engine, what->ranks, what->workers, what->against, result->median_ms[0],
           result->median_ms[1], result->ratio, cli_bytes(on, result->high_water_bytes[0]),
           cli_bytes(off, result->high_water_bytes[1]));
    fflush(stdout);
}

/* Could two results differ in the workers only? */
static bool same_work(const struct bench_case *a, const struct bench_case *b)
{
    return a->dtype == b->dtype && a->layout == b->layout && a->routing == b->routing && a->tokens == b->tokens &&
           a->ranks == 1 && b->ranks == 1 && strcmp(a->engine, b->engine) == 0 && strcmp(a->against, b->against) == 0;
}

/* What two workers could gain: the ratio of the limits that bind the call. */
static double limit_ratio(const struct bench_result *result, const struct limits *one, const struct limits *two)
{
    const struct kern_engine *engine = cli_engine_named(result->engine);
    int index = limits_engine_index(engine);
    bool reads = result->touched_bytes / two->read_gbs > result->flops / two->engine_gflops[index];

    return reads ? two->read_gbs / one->read_gbs : two->engine_gflops[index] / one->engine_gflops[index];
}

void bench_show_scaling(const struct bench_result *results, int count, const struct limits *one,
                        const struct limits *two)
{
    printf("\n%d workers against one, beside the ratio of the limits\n", two->threads);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) {
            const struct bench_case *a = &results[i].what, *b = &results[j].what;
            double ratio, limit;
            if (a->workers != 1 || b->workers != two->threads || !same_work(a, b))
                continue;
            ratio = results[i].median_ms[0] / results[j].median_ms[0];
            limit = limit_ratio(&results[j], one, two);
            printf("%5" PRId64 " %-4s %s %-6s %-9s %5.2f x of %5.2f x: %3.0f %%\n", b->tokens, dtypes[b->dtype],
                   layouts[b->layout], results[j].engine, bench_routing_names[b->routing], ratio, limit,
                   100.0 * ratio / limit);
        }
}

void bench_show_end(const struct bench_result *results, int count)
{
    int checked = 0, calls = 0, exceeding = 0, busy = 0;

    for (int i = 0; i < count; i++) {
        checked += results[i].checked;
        calls += 2 * results[i].pairs + 2;
        exceeding += results[i].exceeds;
        busy += is_busy(&results[i]);
    }
    cli_progress_end();
    printf("\n%d calls, each with its own routing and changed weights; of %d of them one token was\n"
           "compared with the oracle: equal, bit for bit.\n"
           "Floor: max(%s, operations / engine's rate), measured beside the\n"
           "case. From one traced call: no mm, time without any worker in a GEMM (exposed communication);\n"
           "busy, the share of the workers' time in GEMMs; overlap, two lanes busy at once.\n",
           calls, checked, count && results[0].what.backward ? "weights and accumulated gradients read / read rate +\n"
           "gradients written / store rate" : "touched weights / read rate");
    if (busy)
        printf("~ (%d): other programs used the CPUs at the same time, so the times are too long.\n", busy);
    if (exceeding)
        printf("FAILED: ! (%d): faster than the limits allow, so a limit or a kernel is wrong.\n", exceeding);
}

/* --------------------------------------------------------------------------- JSON */

static void write_line(FILE *file, json_t *line)
{
    if (file) {
        json_dumpf(line, file, JSON_COMPACT | JSON_REAL_PRECISION(7));
        fputc('\n', file);
        fflush(file);
    }
    json_decref(line);
}

static json_t *rate(double gflops)
{
    return gflops > 0.0 ? json_real(gflops) : json_null();
}

void bench_json_limits(FILE *file, const struct limits *limits)
{
    json_t *engines = json_object(), *line;
    double amx = 0.0, fma = 0.0;
    char cpu[128];

    for (int i = 0; kern_engines[i] && i < LIMITS_ENGINES; i++) {
        double gflops = limits->engine_gflops[i];
        json_object_set_new(engines, kern_engines[i]->name, rate(gflops));
        if (strcmp(kern_engines[i]->name, "amx") == 0)
            amx = gflops;
        else if (gflops > fma)
            fma = gflops;
    }
    line = json_pack("{s:s, s:o, s:o, s:f, s:f, s:i, s:s, s:o, s:s, s:i}", "bench", "limits", "amx_gflops", rate(amx),
                     "fma_gflops", rate(fma), "read_gbs", limits->read_gbs, "store_gbs", limits->store_gbs, "workers",
                     limits->threads, "read_method", limits_read_name(limits->read_method), "engine_gflops", engines,
                     "cpu", base_cpu_name(cpu, sizeof cpu), "cpus", base_cpus());
    write_line(file, line);
}

static void shape_name(char *name, size_t size, const struct cli_shape *shape)
{
    if (shape->name)
        snprintf(name, size, "%s", shape->name);
    else
        snprintf(name, size, "%" PRId64 "/%" PRId64 "/%d/%d", shape->hidden, shape->inner, shape->experts, shape->topk);
}

static json_t *json_case(const struct cli_shape *shape, const struct bench_result *result)
{
    const struct bench_case *what = &result->what;
    char name[96];

    shape_name(name, sizeof name, shape);
    return json_pack("{s:s, s:I, s:I, s:i, s:i, s:I, s:s, s:s, s:s, s:i, s:i, s:s}", "shape", name, "hidden",
                     (json_int_t)shape->hidden, "inner", (json_int_t)shape->inner, "experts", shape->experts, "topk",
                     shape->topk, "tokens", (json_int_t)what->tokens, "dtype", dtypes[what->dtype], "layout",
                     layouts[what->layout], "routing", bench_routing_names[what->routing], "ranks", what->ranks,
                     "workers", what->workers, "engine", result->engine);
}

static json_t *json_forward(const struct bench_result *result)
{
    const struct hmoe_trace_summary *trace = &result->trace;

    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "ms_first", result->first_ms[0], "ms_median",
                     result->median_ms[0], "ms_least", result->least_ms, "ms_p90", result->p90_ms, "ms_bulk",
                     result->median_ms[1], "ms_bulk_first", result->first_ms[1], "bulk_over_fused", result->ratio,
                     "ms_floor", result->floor_ms, "floor_fraction", result->floor_ms / result->median_ms[0],
                     "exposed_comm_ms", (double)trace->exposed_comm_ns / 1e6 / result->what.ranks);
}

static json_t *json_evidence(const struct bench_result *result)
{
    const struct hmoe_trace_summary *trace = &result->trace;

    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:i, s:i, s:f, s:b}", "gflops",
                     gflops_of(result), "gbs", gbs_of(result), "limit_gflops", result->gflops_limit, "limit_read_gbs",
                     result->read_gbs,
                     "matrix_busy", lane_share(result, 0), "vector_busy", lane_share(result, 1), "comm_busy",
                     lane_share(result, 2), "overlap", share(trace->overlap_ns, trace->span_ns), "block_p50_ms",
                     (double)trace->block_p50_ns / 1e6, "block_p99_ms", (double)trace->block_p99_ns / 1e6,
                     "high_water_bytes", result->high_water_bytes[0], "pairs", result->pairs, "checked",
                     result->checked, "other_cpus", result->other_cpus, "exceeds_limit", result->exceeds);
}

static json_t *json_knob(const struct bench_result *result)
{
    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:i, s:i}", "off", result->what.against, "ms_on",
                     result->median_ms[0], "ms_off", result->median_ms[1], "off_over_on", result->ratio,
                     "high_water_on_bytes", result->high_water_bytes[0], "high_water_off_bytes",
                     result->high_water_bytes[1], "pairs", result->pairs, "checked", result->checked);
}

static void add_backward(json_t *line, const struct bench_result *result)
{
    const struct bench_case *what = &result->what;

    json_object_set_new(line, "dw_dtype", json_string(dtypes[what->dw_type]));
    json_object_set_new(line, "dw_mode", json_string(what->dw_mode == HMOE_OVERWRITE ? "overwrite" : "accumulate"));
    json_object_set_new(line, "dw_bytes", json_real(result->dw_bytes));
}

void bench_json(FILE *file, const struct cli_shape *shape, const struct bench_result *result)
{
    bool forward = strcmp(result->what.against, "path=bulk") == 0;
    json_t *line = json_pack("{s:s}", "bench", !forward ? "knob" : result->what.backward ? "backward" : "forward");
    json_t *part[] = {json_case(shape, result), forward ? json_forward(result) : json_knob(result),
                      forward ? json_evidence(result) : NULL};

    for (int i = 0; i < 3; i++) {
        json_object_update(line, part[i]);
        json_decref(part[i]);
    }
    if (result->what.backward)
        add_backward(line, result);
    write_line(file, line);
}
