/* Memory, written once: the same functions measure and bind. */
#include "moe/plan.h"

#include "base/num.h"

#define SLOTS_LIMIT ((int64_t)UINT32_MAX)

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* a * b, or -1 when above limit; all are >= 0 */
static int64_t multiply(int64_t a, int64_t b, int64_t limit)
{
    return a && b > limit / a ? -1 : a * b;
}

static enum hmoe_status make_rows(struct moe_shape *shape, struct base_error *error)
{
    shape->slots_max = multiply(shape->tokens_max, shape->topk, SLOTS_LIMIT);
    shape->rows_max = shape->slots_max < 0 ? -1 : multiply(shape->slots_max, shape->ranks, SLOTS_LIMIT);
    if (shape->rows_max < 0)
        return base_fail(error, HMOE_ERR_ARGUMENT,
                         "tokens_max %lld x topk %d x ranks %d: at most %lld slots are allowed",
                         (long long)shape->tokens_max, shape->topk, shape->ranks, (long long)SLOTS_LIMIT);
    if (shape->receive_max > 0)
        shape->rows_max = least(shape->rows_max, shape->receive_max);
    return HMOE_OK;
}

enum hmoe_status moe_shape_make(struct moe_shape *shape, const struct hmoe_plan_options *options,
                                const struct base_knobs *knobs, int ranks, int workers, struct base_error *error)
{
    bool bulk = knobs->value[KNOB_PATH] == 1;

    *shape = (struct moe_shape){
        .hidden = options->hidden, .inner = options->inner, .tokens_max = options->tokens_max,
        .receive_max = options->receive_max, .experts = options->experts, .topk = options->topk, .ranks = ranks,
        .local = options->experts / ranks, .workers = workers,
        .calls_max = options->calls_max ? options->calls_max : 1, .same_memory = true,
        .materialise = bulk || !knobs->value[KNOB_PERMUTE_FUSION],
        .keep_a = bulk || !knobs->value[KNOB_EXPERT_BLOCK],
        .row_bytes = kern_row_bytes(options->dtype, options->hidden)};
    if (make_rows(shape, error) != HMOE_OK)
        return error->status;
    shape->run_tokens = knobs->value[KNOB_RUN_TOKENS];
    shape->runs_max = least(shape->tokens_max, MOE_RUNS_MAX) + 1;
    return HMOE_OK;
}

static size_t piece(struct base_carve *carve, size_t bytes)
{
    size_t offset = carve->used;

    base_carve(carve, bytes);
    return offset;
}

void moe_window_make(struct moe_window *at, const struct moe_shape *shape)
{
    struct base_carve carve = {NULL, 0}, call = {NULL, 0};
    size_t ranks = (size_t)shape->ranks, slots = (size_t)shape->slots_max;

    at->counts_bytes = (sizeof(struct moe_counts) + ((size_t)shape->experts + 1) * 4 + 63) & ~(size_t)63;
    at->retired = piece(&call, ranks * 8);
    at->counts_in = piece(&call, 8);
    at->barrier = piece(&call, 8);
    at->chunks = piece(&call, ranks * MOE_CHUNKS_MAX * 8);
    at->returned = piece(&call, (size_t)shape->runs_max * 8);
    at->inbox = piece(&call, ranks * at->counts_bytes);
    at->order = piece(&call, slots * 4);
    at->x = piece(&call, shape->same_memory ? 0 : (size_t)shape->tokens_max * shape->row_bytes);
    at->slots = piece(&call, slots * shape->row_bytes);
    at->stride = call.used;

    at->quiet = piece(&carve, 8);
    at->call = piece(&carve, at->stride * (size_t)shape->calls_max);
    at->bytes = carve.used;
}

static uint64_t power_of_two(uint64_t least_value)
{
    uint64_t power = 2;

    while (power < least_value)
        power *= 2;
    return power;
}

/* The most tasks of each lane that this plan's calls can have ready at once. */
void moe_queue_capacity(const struct moe_plan *plan, uint64_t capacity[RT_LANES])
{
    const struct moe_shape *shape = &plan->shape;
    uint64_t calls = (uint64_t)shape->calls_max, blocks = (uint64_t)shape->blocks_max;
    uint64_t strips = plan->knobs.value[KNOB_STRIPS] > 1 ? (uint64_t)plan->knobs.value[KNOB_STRIPS] : 1;

    capacity[RT_COMM] = power_of_two(calls * (uint64_t)shape->ranks * MOE_CHUNKS_MAX);
    capacity[RT_VECTOR] = power_of_two(calls * ((uint64_t)shape->runs_max + MOE_CHUNKS_MAX + blocks + 4));
    capacity[RT_MATRIX] = power_of_two(calls * (blocks * strips + 64 * 8 * (uint64_t)shape->workers));
}

static void bind_call(struct moe_call *call, const struct moe_plan *plan, struct base_carve *carve)
{
    const struct moe_shape *shape = &plan->shape;
    size_t ranks = (size_t)shape->ranks, local = (size_t)shape->local, blocks = (size_t)shape->blocks_max;

    call->counts = base_carve(carve, plan->at.counts_bytes);
    call->cursor = base_carve(carve, (size_t)shape->experts * 4);
    call->run_goal = base_carve(carve, (size_t)shape->runs_max * 8);
    call->run_slots = base_carve(carve, (size_t)shape->runs_max * 8);
    call->run_started = base_carve(carve, (size_t)shape->runs_max);
    call->base = base_carve(carve, local * (ranks + 1) * 4);
    call->expert = base_carve(carve, local * sizeof *call->expert);
    call->by_rows = base_carve(carve, local * 4);
    call->block = base_carve(carve, blocks * sizeof *call->block);
    call->chain = base_carve(carve, blocks * sizeof *call->chain);
    call->chunk_goal = base_carve(carve, ranks * MOE_CHUNKS_MAX * 8);
    call->chunk_started = base_carve(carve, ranks * MOE_CHUNKS_MAX);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static void bind_bench(struct moe_bench *bench, const struct moe_plan *plan, struct base_carve *carve, size_t x_bytes)
{
    const struct kern_choice *choice = &plan->choice;
    size_t rows = (size_t)plan->shape.block_rows, topk = (size_t)plan->shape.topk;

    bench->kern = base_carve(carve, larger(choice->few->scratch_bytes(&plan->layer),
                                           choice->many->scratch_bytes(&plan->layer)));
    bench->x = base_carve(carve, x_bytes);
    bench->in = base_carve(carve, rows * sizeof *bench->in);
    bench->out = base_carve(carve, rows * sizeof *bench->out);
    bench->term = base_carve(carve, topk * sizeof *bench->term);
    bench->weight = base_carve(carve, topk * sizeof *bench->weight);
}

/* The most that any block of up to `rows` rows needs: a low block may be packed more loosely than a tall one. */
static size_t most_bytes(size_t (*bytes)(const struct kern_layer *layer, int rows), const struct kern_layer *layer,
                         int rows)
{
    size_t most = 0;

    for (int r = 1; r <= rows; r++)
        most = larger(most, bytes(layer, r));
    return most;
}

static void bind_ring(struct rt_ring_mpmc *ring, uint64_t entries, struct base_carve *carve)
{
    uint64_t capacity = power_of_two(entries);
    struct rt_slot *slots = base_carve(carve, capacity * sizeof *slots);

    if (slots)
        rt_ring_init(ring, slots, capacity);
}

/* Everything that scales with the plan, behind the plan struct. While measuring, the structs that would hold the
 * pointers are not there yet: throw-away ones stand in. */
static void bind_parts(struct moe_plan *plan, struct base_carve *carve, size_t x_bytes)
{
    const struct moe_shape *shape = &plan->shape;
    bool measure = carve->base == NULL;

    plan->call = base_carve(carve, (size_t)shape->calls_max * sizeof *plan->call);
    for (int i = 0; i < shape->calls_max; i++) {
        struct moe_call throw_away;
        bind_call(measure ? &throw_away : &plan->call[i], plan, carve);
    }
    plan->bench = base_carve(carve, (size_t)shape->workers * sizeof *plan->bench);
    for (int i = 0; i < shape->workers; i++) {
        struct moe_bench throw_away;
        bind_bench(measure ? &throw_away : &plan->bench[i], plan, carve, x_bytes);
    }
    plan->buffer = base_carve(carve, (size_t)plan->buffers * sizeof *plan->buffer);
    for (int i = 0; i < plan->buffers; i++) {
        struct moe_buffer throw_away, *buffer = measure ? &throw_away : &plan->buffer[i];
        buffer->x = base_carve(carve, x_bytes);
        buffer->a = base_carve(carve, plan->a_bytes);
    }
}

size_t moe_arena_bind(struct moe_plan *plan, void *base)
{
    const struct moe_shape *shape = &plan->shape;
    const struct kern_choice *choice = &plan->choice;
    struct base_carve carve = {base, 0};
    uint64_t capacity[RT_LANES];
    int rows = (int)shape->block_rows;
    size_t x_bytes, rows_bytes = shape->materialise ? (size_t)shape->rows_max * shape->row_bytes : 0;
    void *queue;

    x_bytes = larger(most_bytes(choice->few->x_bytes, &plan->layer, rows),
                     most_bytes(choice->many->x_bytes, &plan->layer, rows));
    plan->a_bytes = larger(most_bytes(choice->few->a_bytes, &plan->layer, rows),
                           most_bytes(choice->many->a_bytes, &plan->layer, rows));
    plan->a_bytes = (plan->a_bytes + 63) & ~(size_t)63;
    moe_queue_capacity(plan, capacity);
    queue = base_carve(&carve, rt_queue_bytes(capacity));
    if (base)
        rt_queue_init(&plan->queue, capacity, queue);
    bind_ring(&plan->ready, (uint64_t)(shape->blocks_max * shape->calls_max), &carve);
    bind_ring(&plan->free_buffers, (uint64_t)plan->buffers, &carve);
    bind_parts(plan, &carve, x_bytes);
    plan->rows = base_carve(&carve, rows_bytes);
    plan->outs = base_carve(&carve, rows_bytes);
    plan->kept_a = base_carve(&carve, shape->keep_a ? (size_t)shape->blocks_max * plan->a_bytes : 0);
    return carve.used;
}
