/* `hmoe check --stages`: every stage's values against the oracle's. */
#include "check.h"

#include "api/objects.h"
#include "base/num.h"

#include <stdlib.h>

static int64_t slots_of(const struct case_data *data)
{
    return data->first[data->ranks] * data->shape.topk;
}

static size_t element(const struct case_data *data)
{
    return num_bytes(data->shape.dtype);
}

static char *rows_for(const struct case_data *data, int64_t columns)
{
    return calloc((size_t)(slots_of(data) * columns) + 1, element(data));
}

bool check_wanted_make(struct check_wanted *wanted, const struct case_data *data)
{
    *wanted = (struct check_wanted){rows_for(data, 2 * data->shape.inner), rows_for(data, data->shape.inner),
                                    rows_for(data, data->shape.hidden)};
    if (!wanted->gate_up || !wanted->a || !wanted->slots)
        return false;
    return case_solve(data, wanted->gate_up, wanted->a, wanted->slots);
}

void check_wanted_free(struct check_wanted *wanted)
{
    free(wanted->gate_up);
    free(wanted->a);
    free(wanted->slots);
    *wanted = (struct check_wanted){0};
}

struct check_tap {
    struct moe_tap tap;
    int32_t *source; /* [rows] */
    int64_t *slot;   /* [rows] of the source rank's slots */
};

static void free_tap(struct check_tap *tap)
{
    free(tap->tap.rows);
    free(tap->tap.gate_up);
    free(tap->tap.a);
    free(tap->source);
    free(tap->slot);
    free(tap);
}

struct check_tap *check_tap_begin(const struct case_data *data, struct hmoe_plan *plan)
{
    struct check_tap *tap = calloc(1, sizeof *tap);
    size_t slots = (size_t)slots_of(data) + 1;

    if (!tap)
        return NULL;
    tap->tap = (struct moe_tap){rows_for(data, data->shape.hidden), rows_for(data, 2 * data->shape.inner),
                                rows_for(data, data->shape.inner), slots_of(data)};
    tap->source = calloc(slots, sizeof *tap->source);
    tap->slot = calloc(slots, sizeof *tap->slot);
    if (!tap->tap.rows || !tap->tap.gate_up || !tap->tap.a || !tap->source || !tap->slot) {
        free_tap(tap);
        return NULL;
    }
    moe_plan_tap(plan->moe, &tap->tap);
    return tap;
}

/* One stage's row of a slot of the global batch. */
static void compare(struct check_play *play, struct check_finding finding, const void *got, const void *wanted,
                    int64_t columns)
{
    cli_compare_row(play->data->shape.dtype, got, wanted, columns, &finding.difference);
    check_report(play, &finding);
}

/* Row `row` of those received: slot finding.slot of the global batch. */
static void compare_received(struct check_play *play, const struct check_tap *tap, int64_t row,
                             struct check_finding finding)
{
    const struct case_data *data = play->data;
    int64_t hidden = data->shape.hidden, inner = data->shape.inner, token = finding.slot / data->shape.topk;
    size_t bytes = element(data), h = (size_t)hidden * bytes, i = (size_t)inner * bytes;
    size_t r = (size_t)row, s = (size_t)finding.slot;

    finding.slot %= data->shape.topk;
    finding.difference.token = token;
    finding.stage = CHECK_ROWS;
    compare(play, finding, (char *)tap->tap.rows + r * h, (char *)data->x + (size_t)token * h, hidden);
    finding.stage = CHECK_GATE_UP;
    compare(play, finding, (char *)tap->tap.gate_up + r * 2 * i, play->wanted->gate_up + s * 2 * i, 2 * inner);
    finding.stage = CHECK_A;
    compare(play, finding, (char *)tap->tap.a + r * i, play->wanted->a + s * i, inner);
}

static int64_t id_at(const struct case_data *data, int64_t slot)
{
    return data->ids_type == HMOE_I32 ? ((const int32_t *)data->ids)[slot] : ((const int64_t *)data->ids)[slot];
}

/* The outputs that came home. */
static void compare_slots(struct check_play *play, const char *got, struct check_finding finding, int64_t tokens)
{
    const struct case_data *data = play->data;
    int topk = data->shape.topk;
    int64_t first = data->first[finding.rank] * topk;
    size_t row = (size_t)data->shape.hidden * element(data);

    finding.stage = CHECK_SLOTS;
    for (int64_t s = 0; s < tokens * topk; s++) {
        finding.slot = s % topk;
        finding.difference.token = (first + s) / topk;
        if (id_at(data, first + s) >= 0)
            compare(play, finding, got + (size_t)s * row, play->wanted->slots + (size_t)(first + s) * row,
                    data->shape.hidden);
    }
}

void check_tap_compare(const struct check_tap *tap, struct check_play *play, struct hmoe_plan *plan,
                       struct check_finding where, int64_t tokens)
{
    const struct case_data *data = play->data;
    int64_t rows = moe_tap_rows(plan->moe, tap->source, tap->slot, tap->tap.rows_max);

    compare_slots(play, moe_tap_slots(plan->moe), where, tokens);
    for (int64_t row = 0; row < rows && row < tap->tap.rows_max; row++) {
        where.slot = data->first[tap->source[row]] * data->shape.topk + tap->slot[row];
        compare_received(play, tap, row, where);
    }
}

void check_tap_end(struct check_tap *tap, struct hmoe_plan *plan)
{
    moe_plan_tap(plan->moe, &(struct moe_tap){0});
    free_tap(tap);
}
