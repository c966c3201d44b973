/* The rings as one JSON file in the Trace Event Format, one event a line. Every text in it is from our own table, so
 * nothing needs escaping. */
#include "trace/table.h"

#include "base/status.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const lane_names[] = {"matrix", "vector", "comm"};

static const char *category(const struct trace_row *row)
{
    return row->lane < 0 ? row->text : lane_names[row->lane];
}

/* The format counts in microseconds. */
static void put_us(FILE *file, const char *key, int64_t ns)
{
    fprintf(file, ",\"%s\":%" PRId64 ".%03d", key, ns / 1000, (int)(ns % 1000));
}

static void put_name(FILE *file, const char *what, int rank, int worker)
{
    fprintf(file, "{\"name\":\"%s_name\",\"ph\":\"M\",\"pid\":%d", what, rank);
    if (worker < 0)
        fprintf(file, ",\"args\":{\"name\":\"rank %d\"}}", rank);
    else
        fprintf(file, ",\"tid\":%d,\"args\":{\"name\":\"worker %d\"}}", worker, worker);
}

static void put_names(FILE *file, const struct trace *trace)
{
    put_name(file, "process", trace->rank, -1);
    for (int i = 0; i < trace->rings; i++) {
        fputs(",\n", file);
        put_name(file, "thread", trace->rank, i);
    }
}

static void put_args(FILE *file, const struct trace_event *event)
{
    fprintf(file, ",\"args\":{\"call\":%" PRIu64 ",\"layer\":%" PRId32 ",\"expert\":%" PRId32 ",\"block\":%" PRId32,
            event->call, event->layer, event->expert, event->block);
    fprintf(file, ",\"source\":%" PRId32 ",\"rows\":%" PRId32 "}", event->source, event->rows);
}

static void put_head(FILE *file, const struct trace_event *event, char phase)
{
    const struct trace_row *row = &trace_table[event->kind];

    fprintf(file, ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"%c\"", row->text, category(row), phase);
}

static void put_span(FILE *file, int rank, int worker, const struct trace_event *event)
{
    put_head(file, event, 'X');
    fprintf(file, ",\"pid\":%d,\"tid\":%d", rank, worker);
    put_us(file, "ts", event->start_ns);
    put_us(file, "dur", event->end_ns - event->start_ns);
    put_args(file, event);
    fputc('}', file);
}

/* Calls and blocks overlap each other, which spans of a thread must not: they are pairs with an id of their own. */
static void put_pair(FILE *file, int rank, int worker, const struct trace_event *event, uint64_t id)
{
    for (int end = 0; end <= 1; end++) {
        put_head(file, event, end ? 'e' : 'b');
        fprintf(file, ",\"id2\":{\"local\":\"%" PRIu64 "\"},\"pid\":%d,\"tid\":%d", id, rank, worker);
        put_us(file, "ts", end ? event->end_ns : event->start_ns);
        put_args(file, event);
        fputc('}', file);
    }
}

/* By start; of two that start together the longer first, because the other lies inside it. */
static int outer_first(const void *left, const void *right)
{
    const struct trace_event *a = left, *b = right;

    if (a->start_ns != b->start_ns)
        return a->start_ns < b->start_ns ? -1 : 1;
    return (a->end_ns < b->end_ns) - (a->end_ns > b->end_ns);
}

/* `scratch` holds the largest ring. Returns the next free id. */
static uint64_t put_ring(FILE *file, const struct trace *trace, int worker, struct trace_event *scratch, uint64_t id)
{
    const struct trace_ring *ring = &trace->ring[worker];
    uint64_t kept = trace_kept(ring);

    trace_copy(ring, kept, scratch);
    qsort(scratch, kept, sizeof *scratch, outer_first);
    for (uint64_t i = 0; i < kept; i++) {
        if (scratch[i].kind == TRACE_CALL || scratch[i].kind == TRACE_BLOCK)
            put_pair(file, trace->rank, worker, &scratch[i], id++);
        else
            put_span(file, trace->rank, worker, &scratch[i]);
    }
    return id;
}

static void put_all(FILE *file, const struct trace *trace, struct trace_event *scratch)
{
    uint64_t id = 0;

    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n", file);
    put_names(file, trace);
    for (int i = 0; i < trace->rings; i++)
        id = put_ring(file, trace, i, scratch, id);
    fputs("\n]}\n", file);
}

enum hmoe_status trace_write(const struct trace *trace, const char *path, struct base_error *error)
{
    struct trace_event *scratch = malloc(trace->ring[0].capacity * sizeof *scratch);
    FILE *file = scratch == NULL ? NULL : fopen(path, "we");

    if (file == NULL) {
        int why = errno;
        free(scratch);
        return scratch == NULL ? base_fail(error, HMOE_ERR_MEMORY, "no memory to sort a trace")
                               : base_fail(error, HMOE_ERR_SYSTEM, "cannot open %s: %s", path, strerror(why));
    }
    put_all(file, trace, scratch);
    free(scratch);

    int failed = ferror(file);
    if (fclose(file) != 0 || failed)
        return base_fail(error, HMOE_ERR_SYSTEM, "cannot write %s: %s", path, strerror(errno));
    return HMOE_OK;
}
