/* The trace room: rings, the summary's definitions on intervals worked by hand, and the JSON read back. */
#include "base/prng.h"
#include "base/status.h"
#include "trace/trace.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One test asks for more than there is. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}
const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static void begin(struct trace *trace, int rings, int64_t events)
{
    struct base_error error;
    assert_int_equal(trace_init(trace, 3, rings, events, &error), HMOE_OK);
    assert_int_equal(trace_start(trace, &error), HMOE_OK);
}

static void emit(struct trace *trace, int ring, enum trace_kind kind, int64_t start_ns, int64_t end_ns)
{
    struct trace_event event = {start_ns, end_ns, 7, 5, 2, -1, 16, 1, (uint8_t)kind};
    trace_emit(trace, ring, &event);
}

static struct hmoe_trace_summary summary_of(const struct trace *trace)
{
    struct hmoe_trace_summary summary;
    memset(&summary, 0x55, sizeof summary);
    summary.size = sizeof summary;
    trace_summarise(trace, &summary);
    assert_int_equal(summary.size, sizeof summary);
    return summary;
}

/* An open file without a name, holding what trace_write wrote. */
static FILE *written(const struct trace *trace)
{
    char path[] = "/tmp/hmoe_test_trace_XXXXXX";
    struct base_error error;
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(trace_write(trace, path, &error), HMOE_OK);
    unlink(path);
    return fdopen(fd, "r");
}

/* The file's events; the caller drops them. */
static json_t *written_events(const struct trace *trace)
{
    json_error_t why;
    FILE *file = written(trace);
    json_t *root = json_loadf(file, 0, &why);

    fclose(file);
    if (root == NULL)
        fail_msg("not JSON: %s at line %d", why.text, why.line);
    assert_string_equal(json_string_value(json_object_get(root, "displayTimeUnit")), "ns");
    json_t *events = json_incref(json_object_get(root, "traceEvents"));
    json_decref(root);
    assert_true(json_is_array(events));
    return events;
}

static const char *text(const json_t *event, const char *key)
{
    const char *value = json_string_value(json_object_get(event, key));
    return value == NULL ? "" : value;
}

static int64_t argument(const json_t *event, const char *key)
{
    const json_t *value = json_object_get(json_object_get(event, "args"), key);
    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

static void off_records_nothing(void **state)
{
    struct trace trace;
    struct base_error error;
    (void)state;

    assert_int_equal(trace_init(&trace, 0, 2, 8, &error), HMOE_OK);
    assert_false(trace_on(&trace));
    assert_null(trace.ring[0].events);
    emit(&trace, 0, TRACE_GMM1, 1, 2);
    assert_int_equal(summary_of(&trace).events, 0);
    assert_int_equal(trace_start(&trace, &error), HMOE_OK);
    assert_true(trace_on(&trace));
    emit(&trace, 0, TRACE_GMM1, 1, 2);
    trace_stop(&trace);
    assert_false(trace_on(&trace));
    emit(&trace, 0, TRACE_GMM1, 3, 4);
    assert_int_equal(summary_of(&trace).events, 1);
    trace_fini(&trace);
}

static void full_rings_keep_the_latest(void **state)
{
    struct trace trace;
    (void)state;

    begin(&trace, 2, 5); /* rounded up to 8 */
    for (int i = 0; i < 20; i++) {
        struct trace_event event = {i, i + 1, 0, -1, -1, -1, i, 0, TRACE_GMM1};
        trace_emit(&trace, 1, &event);
    }
    for (int i = 0; i < 9; i++)
        emit(&trace, 0, TRACE_GMM2, 0, 1);
    struct hmoe_trace_summary summary = summary_of(&trace);
    assert_int_equal(summary.events, 8 + 8);
    assert_int_equal(summary.events_lost, 1 + 12);

    json_t *events = written_events(&trace), *event;
    size_t at;
    int64_t next = 12;
    json_array_foreach(events, at, event) if (strcmp(text(event, "name"), "gmm1") == 0)
    {
        assert_int_equal(argument(event, "rows"), next);
        next++;
    }
    assert_int_equal(next, 20);
    json_decref(events);
    trace_fini(&trace);
}

static void start_empties_and_reuses(void **state)
{
    struct trace trace;
    struct base_error error;
    (void)state;

    begin(&trace, 1, 4);
    const struct trace_event *memory = trace.ring[0].events;
    for (int i = 0; i < 9; i++)
        emit(&trace, 0, TRACE_GMM1, i, i + 1);
    assert_int_equal(trace_start(&trace, &error), HMOE_OK);
    assert_ptr_equal(trace.ring[0].events, memory);
    assert_int_equal(summary_of(&trace).events, 0);
    assert_int_equal(summary_of(&trace).events_lost, 0);
    trace_fini(&trace);
}

/*          0    50   100  150  200  250  300  350  400  450
 * worker 0           [gmm1     ][perm]
 * worker 1      [disp..120] [gmm2...260] [comb 300-330]
 * calls         [50                          400]
 *                                        [350     450]          */
static void worked_by_hand(void **state)
{
    struct trace trace;
    (void)state;

    begin(&trace, 2, 64);
    emit(&trace, 0, TRACE_GMM1, 100, 200);
    emit(&trace, 0, TRACE_SWIGLU, 150, 160);
    emit(&trace, 0, TRACE_PERMUTE, 200, 250);
    emit(&trace, 1, TRACE_DISPATCH, 40, 120);
    emit(&trace, 1, TRACE_GMM2, 150, 260);
    emit(&trace, 1, TRACE_COMBINE, 300, 330);
    emit(&trace, 0, TRACE_CALL, 350, 450);
    emit(&trace, 1, TRACE_CALL, 50, 400);
    emit(&trace, 1, TRACE_IDLE, 0, 1000);

    struct hmoe_trace_summary s = summary_of(&trace);
    const int64_t stage_ns[HMOE_STAGES] = {0, 50, 80, 100, 10, 110, 30};
    const int64_t stage_count[HMOE_STAGES] = {0, 1, 1, 1, 1, 1, 1};
    assert_int_equal(s.events, 9);
    assert_int_equal(s.events_lost, 0);
    assert_int_equal(s.span_ns, 450 - 40);
    assert_memory_equal(s.stage_ns, stage_ns, sizeof stage_ns);
    assert_memory_equal(s.stage_count, stage_count, sizeof stage_count);
    assert_int_equal(s.lane_busy_ns[TRACE_MATRIX], 100 + 110);
    assert_int_equal(s.lane_busy_ns[TRACE_VECTOR], 50 + 30);
    assert_int_equal(s.lane_busy_ns[TRACE_COMM], 80);
    assert_int_equal(s.any_busy_ns, (260 - 40) + (330 - 300));
    assert_int_equal(s.overlap_ns, (120 - 100) + (250 - 200));
    assert_int_equal(s.exposed_comm_ns, (450 - 50) - (260 - 100));
    assert_int_equal(s.blocks, 0);
    trace_fini(&trace);
}

static void blocks_of(int count, int64_t p50, int64_t p99)
{
    struct trace trace;

    begin(&trace, 3, 256);
    for (int i = 0; i < count; i++) { /* 1 .. count ns, in no order (7 and count share no factor) */
        int ns = 1 + i * 7 % count;
        emit(&trace, i % 3, TRACE_BLOCK, 1000 - ns, 1000);
    }
    struct hmoe_trace_summary s = summary_of(&trace);
    assert_int_equal(s.blocks, count);
    assert_int_equal(s.block_p50_ns, p50);
    assert_int_equal(s.block_p99_ns, p99);
    assert_int_equal(s.any_busy_ns, 0);
    trace_fini(&trace);
}

static void percentiles(void **state)
{
    (void)state;
    blocks_of(0, 0, 0);
    blocks_of(1, 1, 1);
    blocks_of(2, 1, 2);
    blocks_of(3, 2, 3);
    blocks_of(100, 50, 99);
    blocks_of(200, 100, 198);
}

enum { AXIS = 500 };

/* The same three figures, asked of every nanosecond. */
static void figures_by_nanosecond(int covered[4][AXIS], int64_t figures[3])
{
    for (int t = 0; t < AXIS; t++) {
        int busy = (covered[TRACE_MATRIX][t] > 0) + (covered[TRACE_VECTOR][t] > 0) + (covered[TRACE_COMM][t] > 0);
        figures[0] += busy >= 1;
        figures[1] += busy >= 2;
        figures[2] += covered[3][t] > 0 && covered[TRACE_MATRIX][t] == 0;
    }
}

static void random_intervals(void **state)
{
    const enum trace_kind kinds[4] = {TRACE_GMM2, TRACE_UNPERMUTE, TRACE_DISPATCH, TRACE_CALL};
    (void)state;

    for (uint64_t seed = 1; seed <= 200; seed++) {
        struct base_prng prng = {seed};
        struct trace trace;
        int covered[4][AXIS] = {{0}};
        int64_t figures[3] = {0}, count = base_random_below(&prng, 30);
        begin(&trace, 4, 64);
        for (int64_t i = 0; i < count; i++) {
            int64_t what = base_random_below(&prng, 4), start = base_random_below(&prng, AXIS);
            int64_t end = start + base_random_below(&prng, (AXIS - start) / 3 + 1);
            emit(&trace, (int)base_random_below(&prng, 4), kinds[what], start, end);
            for (int64_t t = start; t < end; t++)
                covered[what][t]++;
        }
        figures_by_nanosecond(covered, figures);
        struct hmoe_trace_summary s = summary_of(&trace);
        assert_int_equal(s.any_busy_ns, figures[0]);
        assert_int_equal(s.overlap_ns, figures[1]);
        assert_int_equal(s.exposed_comm_ns, figures[2]);
        trace_fini(&trace);
    }
}

static const json_t *find(const json_t *events, const char *name, const char *phase)
{
    size_t at;
    json_t *event;
    json_array_foreach(events, at, event) if (strcmp(text(event, "name"), name) == 0 &&
                                              strcmp(text(event, "ph"), phase) == 0) return event;
    fail_msg("no event %s of phase %s", name, phase);
    return NULL;
}

static void assert_us(const json_t *event, const char *key, double us)
{
    const json_t *value = json_object_get(event, key);
    assert_true(json_is_real(value));
    assert_true(json_real_value(value) > us - 1e-4 && json_real_value(value) < us + 1e-4);
}

static void assert_origin(const json_t *event, const char *lane, int worker)
{
    assert_string_equal(text(event, "cat"), lane);
    assert_int_equal(json_integer_value(json_object_get(event, "pid")), 3);
    assert_int_equal(json_integer_value(json_object_get(event, "tid")), worker);
}

static void spans_read_back(void **state)
{
    struct trace trace;
    (void)state;

    begin(&trace, 2, 16);
    emit(&trace, 0, TRACE_SWIGLU, 1234567, 1234600);
    emit(&trace, 0, TRACE_GMM1, 1234567, 1240005); /* the outer span must come first */
    emit(&trace, 1, TRACE_DISPATCH, 5, 5);
    json_t *events = written_events(&trace);
    const json_t *gmm1 = find(events, "gmm1", "X"), *dispatch = find(events, "dispatch", "X");

    assert_int_equal(json_array_size(events), 1 + 2 + 3);
    assert_ptr_equal(json_array_get(events, 3), gmm1);
    assert_us(gmm1, "ts", 1234.567);
    assert_us(gmm1, "dur", 5.438);
    assert_origin(gmm1, "matrix", 0);
    assert_int_equal(argument(gmm1, "call"), 7);
    assert_int_equal(argument(gmm1, "layer"), 1);
    assert_int_equal(argument(gmm1, "expert"), 5);
    assert_int_equal(argument(gmm1, "block"), 2);
    assert_int_equal(argument(gmm1, "source"), -1);
    assert_int_equal(argument(gmm1, "rows"), 16);
    assert_us(dispatch, "ts", 0.005);
    assert_us(dispatch, "dur", 0.0);
    assert_origin(dispatch, "comm", 1);
    assert_origin(find(events, "swiglu", "X"), "swiglu", 0);
    json_decref(events);
    trace_fini(&trace);
}

/* Each pair has an id that no other has. */
static void pairs_read_back(void **state)
{
    struct trace trace;
    size_t at, pairs[4] = {0};
    json_t *event;
    (void)state;

    begin(&trace, 2, 16);
    emit(&trace, 0, TRACE_CALL, 1000, 9000);
    emit(&trace, 0, TRACE_CALL, 2000, 9500);
    emit(&trace, 1, TRACE_BLOCK, 3000, 4000);
    emit(&trace, 1, TRACE_BLOCK, 3000, 5000);
    json_t *events = written_events(&trace);
    assert_int_equal(json_array_size(events), 1 + 2 + 8);
    json_array_foreach(events, at, event)
    {
        if (at < 3)
            continue;
        int id = atoi(text(json_object_get(event, "id2"), "local"));
        assert_in_range(id, 0, 3);
        assert_string_equal(text(event, "ph"), pairs[id]++ == 0 ? "b" : "e");
        assert_origin(event, id < 2 ? "call" : "block", id / 2);
    }
    for (int id = 0; id < 4; id++)
        assert_int_equal(pairs[id], 2);
    assert_us(find(events, "call", "b"), "ts", 1.0);
    assert_us(find(events, "call", "e"), "ts", 9.0);
    json_decref(events);
    trace_fini(&trace);
}

static void nothing_recorded(void **state)
{
    struct trace trace;
    const struct hmoe_trace_summary none = {.size = sizeof none};
    (void)state;

    begin(&trace, 2, 16);
    struct hmoe_trace_summary summary = summary_of(&trace);
    assert_memory_equal(&summary, &none, sizeof none);
    json_t *events = written_events(&trace);
    assert_int_equal(json_array_size(events), 3);
    assert_string_equal(text(json_object_get(json_array_get(events, 0), "args"), "name"), "rank 3");
    assert_string_equal(text(json_array_get(events, 2), "name"), "thread_name");
    assert_string_equal(text(json_object_get(json_array_get(events, 2), "args"), "name"), "worker 1");
    json_decref(events);
    trace_fini(&trace);
}

static void one_event_a_line(void **state)
{
    struct trace trace;
    char line[512];
    int lines = 0, objects = 0;
    (void)state;

    begin(&trace, 1, 16);
    for (int i = 0; i < 5; i++)
        emit(&trace, 0, TRACE_GMM2, i, i + 1);
    FILE *file = written(&trace);
    for (; fgets(line, sizeof line, file) != NULL; lines++)
        objects += strncmp(line, "{\"name\":", 8) == 0;
    fclose(file);
    assert_int_equal(objects, 2 + 5);
    assert_int_equal(lines, 1 + 2 + 5 + 1);
    trace_fini(&trace);
}

static void refusals(void **state)
{
    struct trace trace;
    struct base_error error;
    (void)state;

    assert_int_equal(trace_init(&trace, 0, 1, 0, &error), HMOE_ERR_ARGUMENT);
    trace_fini(&trace);
    begin(&trace, 1, 4096);
    for (int i = 0; i < 4096; i++)
        emit(&trace, 0, TRACE_GMM1, i, i + 1);
    assert_int_equal(trace_write(&trace, "/no/such/folder/trace.json", &error), HMOE_ERR_SYSTEM);
    assert_non_null(strstr(error.text, "/no/such/folder/trace.json"));
    assert_int_equal(trace_write(&trace, "/dev/full", &error), HMOE_ERR_SYSTEM);
    assert_non_null(strstr(error.text, "/dev/full"));
    trace_fini(&trace);
    assert_int_equal(trace_init(&trace, 0, 1, INT64_MAX, &error), HMOE_OK);
    assert_int_equal(trace_start(&trace, &error), HMOE_ERR_MEMORY);
    assert_false(trace_on(&trace));
    trace_fini(&trace);
}

struct emitter {
    struct trace *trace;
    int ring, events;
};

static void *emit_while_on(void *context)
{
    const struct emitter *emitter = context;
    for (int i = 0; i < emitter->events;)
        if (trace_on(emitter->trace))
            emit(emitter->trace, emitter->ring, TRACE_GMM1, i, i + 1), i++;
    return NULL;
}

/* Workers run when recording starts and stops. */
static void start_and_stop_beside_workers(void **state)
{
    struct trace trace;
    struct base_error error;
    struct emitter emitters[2] = {{&trace, 0, 20000}, {&trace, 1, 20000}};
    pthread_t threads[2];
    (void)state;

    assert_int_equal(trace_init(&trace, 0, 2, 1024, &error), HMOE_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, emit_while_on, &emitters[i]), 0);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(trace_start(&trace, &error), HMOE_OK);
        usleep(20);
        trace_stop(&trace);
    }
    assert_int_equal(trace_start(&trace, &error), HMOE_OK);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    struct hmoe_trace_summary s = summary_of(&trace);
    assert_true(s.events <= 2048);
    assert_int_equal(s.stage_ns[3], s.events);
    trace_fini(&trace);
}

static void names(void **state)
{
    (void)state;
    assert_string_equal(trace_stage_name(0), "route");
    assert_string_equal(trace_stage_name(4), "swiglu");
    assert_string_equal(trace_stage_name(6), "combine");
    assert_string_equal(trace_stage_name(9), "dweight");
    assert_string_equal(trace_stage_name(10), "unknown stage");
    assert_string_equal(trace_stage_name(-1), "unknown stage");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(off_records_nothing),
        cmocka_unit_test(full_rings_keep_the_latest),
        cmocka_unit_test(start_empties_and_reuses),
        cmocka_unit_test(worked_by_hand),
        cmocka_unit_test(percentiles),
        cmocka_unit_test(random_intervals),
        cmocka_unit_test(spans_read_back),
        cmocka_unit_test(pairs_read_back),
        cmocka_unit_test(nothing_recorded),
        cmocka_unit_test(one_event_a_line),
        cmocka_unit_test(refusals),
        cmocka_unit_test(start_and_stop_beside_workers),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
