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
        .local = options->experts / ranks, .shared = options->shared_experts,
        .shared_inner = options->shared_experts ? options->shared_inner : 1, .training = options->training != 0,
        .workers = workers, .calls_max = options->calls_max ? options->calls_max : 1, .same_memory = true,
        .materialise = bulk || !knobs->value[KNOB_PERMUTE_FUSION],
        .keep_a = bulk || !knobs->value[KNOB_EXPERT_BLOCK],
        .row_bytes = kern_row_bytes(options->dtype, options->hidden)};
    if (make_rows(shape, error) != HMOE_OK)
        return error->status;
    shape->calls = shape->training ? 2 * shape->calls_max : shape->calls_max;
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
    size_t copies = shape->same_memory ? 0 : (size_t)shape->tokens_max * shape->row_bytes;

    at->counts_bytes = (sizeof(struct moe_counts) + ((size_t)shape->experts + 1) * 4 + 63) & ~(size_t)63;
    at->retired = piece(&call, ranks * 8);
    at->counts_in = piece(&call, 8);
    at->barrier = piece(&call, 8);
    at->looked = piece(&call, 8);
    at->chunks = piece(&call, ranks * MOE_CHUNKS_MAX * 8);
    at->returned = piece(&call, (size_t)shape->runs_max * 8);
    at->inbox = piece(&call, ranks * at->counts_bytes);
    at->order = piece(&call, slots * 4);
    at->feed[MOE_X] = piece(&call, copies);
    at->feed[MOE_DY] = piece(&call, shape->training ? copies : 0);
    at->weight = piece(&call, shape->training ? slots * 4 : 0);
    at->d_weight = piece(&call, shape->training ? slots * 4 : 0);
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
    uint64_t calls = (uint64_t)shape->calls, blocks = (uint64_t)shape->blocks_max;
    uint64_t experts = (uint64_t)(shape->local + shape->shared);
    uint64_t strips = plan->knobs.value[KNOB_STRIPS] > 1 ? (uint64_t)plan->knobs.value[KNOB_STRIPS] : 1;

    capacity[RT_COMM] = power_of_two(calls * (uint64_t)shape->ranks * MOE_CHUNKS_MAX);
    capacity[RT_VECTOR] = power_of_two(calls * ((uint64_t)shape->runs_max + MOE_CHUNKS_MAX + blocks + 4));
    capacity[RT_MATRIX] = power_of_two(calls * (blocks * strips + 64 * 8 * (uint64_t)shape->workers));
    capacity[RT_FILL] = power_of_two(calls * (experts * MOE_DWEIGHT_PIECES_MAX + blocks * strips));
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Room for the backward of `rows` rows of experts of this inner width; `kept` of them for gate and up. */
static void bind_back(struct moe_back *back, const struct kern_layer *layer, size_t kept, size_t rows,
                      struct base_carve *carve)
{
    size_t inner = kern_row_bytes(layer->dtype, layer->inner), blocks = (size_t)(layer->inner + 31) / 32;

    back->gate_up = base_carve(carve, kept * 2 * inner);
    back->a = base_carve(carve, rows * inner);
    back->sums = base_carve(carve, rows * blocks * sizeof(float));
    back->weight = base_carve(carve, rows * sizeof(float));
    for (int feed = 0; feed < MOE_FEEDS; feed++)
        back->at[feed] = base_carve(carve, rows * sizeof(void *));
    back->dh_at = base_carve(carve, rows * sizeof(void *));
    back->a_at = base_carve(carve, rows * sizeof(void *));
    back->one_at = base_carve(carve, rows * sizeof(void *));
}

static void bind_copies(struct moe_call *call, const struct moe_plan *plan, struct base_carve *carve)
{
    const struct moe_shape *shape = &plan->shape;
    size_t shared_rows = (size_t)shape->shared * (size_t)shape->tokens_max;
    size_t copies = shape->materialise ? ((size_t)shape->rows_max + shared_rows) * shape->row_bytes : 0;

    call->shared_out = base_carve(carve, shared_rows * shape->row_bytes);
    call->copy_in = base_carve(carve, copies);
    call->copy_out = base_carve(carve, copies);
    call->kept_a = base_carve(carve, shape->keep_a ? (size_t)shape->blocks_max * plan->a_bytes : 0);
    if (!plan->bulk || !shape->training)
        return;
    bind_back(&call->bulk_back[0], &plan->layer[0], (size_t)shape->rows_max, (size_t)shape->rows_max, carve);
    bind_back(&call->bulk_back[1], &plan->layer[1], shared_rows, shared_rows, carve);
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
    call->own_base = base_carve(carve, local * (ranks + 1) * 4);
    call->expert = base_carve(carve, (local + (size_t)shape->shared) * sizeof *call->expert);
    call->by_rows = base_carve(carve, local * 4);
    call->block = base_carve(carve, blocks * sizeof *call->block);
    call->chain = base_carve(carve, blocks * sizeof *call->chain);
    call->chunk_goal = base_carve(carve, ranks * MOE_CHUNKS_MAX * 8);
    call->chunk_started = base_carve(carve, ranks * MOE_CHUNKS_MAX);
    bind_copies(call, plan, carve);
}

static size_t scratch_bytes(const struct moe_plan *plan)
{
    const struct kern_engine *engine[3] = {plan->choice.few, plan->choice.many, plan->choice.back};
    size_t most = 0;

    for (int e = 0; e < 3; e++)
        for (int width = 0; width < 2; width++) {
            most = larger(most, engine[e]->scratch_bytes(&plan->layer[width]));
            most = larger(most, engine[e]->scratch_bytes(&plan->back[width]));
        }
    return most;
}

static void bind_bench(struct moe_bench *bench, const struct moe_plan *plan, struct base_carve *carve)
{
    size_t rows = (size_t)plan->shape.block_rows, terms = (size_t)(plan->shape.topk + plan->shape.shared);

    bench->kern = base_carve(carve, scratch_bytes(plan));
    bench->x = base_carve(carve, plan->x_bytes);
    bench->a = base_carve(carve, plan->shape.training ? plan->a_bytes : 0);
    bench->in = base_carve(carve, rows * sizeof *bench->in);
    bench->out = base_carve(carve, rows * sizeof *bench->out);
    bench->term = base_carve(carve, terms * sizeof *bench->term);
    bench->weight = base_carve(carve, terms * sizeof *bench->weight);
}

static void bind_buffer(struct moe_buffer *buffer, const struct moe_plan *plan, struct base_carve *carve)
{
    const struct moe_shape *shape = &plan->shape;
    const struct kern_layer *wide = &plan->layer[plan->layer[1].inner > plan->layer[0].inner];
    size_t blocks = shape->training ? (size_t)shape->blocks_max : 1;
    size_t most = larger((size_t)shape->rows_max, (size_t)shape->tokens_max);

    buffer->x = base_carve(carve, blocks * plan->x_bytes);
    buffer->a = base_carve(carve, plan->a_bytes);
    if (shape->training)
        bind_back(&buffer->back, wide, most, most, carve);
}

/* The most that any block needs: a low block may be packed more loosely than a tall one. */
static size_t packed_bytes(const struct moe_plan *plan, const struct kern_layer *layer, int64_t terms)
{
    size_t most = 0;

    for (int r = 1; r <= plan->shape.block_rows; r++) {
        most = larger(most, kern_pick(&plan->choice, r)->packed_bytes(layer, terms, r));
        most = larger(most, plan->choice.back->packed_bytes(layer, terms, r));
    }
    return (most + 63) & ~(size_t)63;
}

static void set_packed_bytes(struct moe_plan *plan)
{
    plan->x_bytes = packed_bytes(plan, &plan->layer[0], plan->shape.hidden);
    plan->a_bytes = 0;
    for (int width = 0; width < 2; width++) {
        const struct kern_layer *back = &plan->back[width];
        plan->a_bytes = larger(plan->a_bytes, packed_bytes(plan, &plan->layer[width], plan->layer[width].inner));
        if (!plan->shape.training)
            continue;
        plan->x_bytes = larger(plan->x_bytes, packed_bytes(plan, back, back->hidden));
        plan->x_bytes = larger(plan->x_bytes, packed_bytes(plan, back, back->inner));
    }
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
static void bind_parts(struct moe_plan *plan, struct base_carve *carve)
{
    const struct moe_shape *shape = &plan->shape;
    bool measure = carve->base == NULL;

    plan->call = base_carve(carve, (size_t)shape->calls * sizeof *plan->call);
    for (int i = 0; i < shape->calls; i++) {
        struct moe_call throw_away;
        bind_call(measure ? &throw_away : &plan->call[i], plan, carve);
    }
    plan->bench = base_carve(carve, (size_t)shape->workers * sizeof *plan->bench);
    for (int i = 0; i < shape->workers; i++) {
        struct moe_bench throw_away;
        bind_bench(measure ? &throw_away : &plan->bench[i], plan, carve);
    }
    plan->buffer = base_carve(carve, (size_t)plan->buffers * sizeof *plan->buffer);
    for (int i = 0; i < plan->buffers; i++) {
        struct moe_buffer throw_away;
        bind_buffer(measure ? &throw_away : &plan->buffer[i], plan, carve);
    }
}

size_t moe_arena_bind(struct moe_plan *plan, void *base)
{
    const struct moe_shape *shape = &plan->shape;
    struct base_carve carve = {base, 0};
    uint64_t capacity[RT_LANES], chains = (uint64_t)(shape->blocks_max * shape->calls_max);
    void *queue;

    set_packed_bytes(plan);
    moe_queue_capacity(plan, capacity);
    queue = base_carve(&carve, rt_queue_bytes(capacity));
    if (base)
        rt_queue_init(&plan->queue, capacity, queue);
    bind_ring(&plan->ready, chains, &carve);
    bind_ring(&plan->spare, chains, &carve);
    bind_ring(&plan->free_buffers, (uint64_t)plan->buffers, &carve);
    bind_parts(plan, &carve);
    return carve.used;
}

/* Saved state: routing and what the options keep, then what backward_input leaves. Touched only where used; in the
 * caller's memory there is no room for what is not. */
size_t moe_saved_bind(struct moe_saved *saved, void *base)
{
    const struct moe_plan *plan = saved->plan;
    const struct moe_shape *shape = &plan->shape;
    size_t rows = (size_t)shape->rows_max, tokens = (size_t)shape->tokens_max, shared = (size_t)shape->shared;
    size_t extra = shared * tokens, all = saved->lent ? 0 : 1, kept = saved->lent && saved->recompute ? 0 : 1;
    struct base_carve carve = {base, 0};

    saved->base = base_carve(&carve, (size_t)shape->local * ((size_t)shape->ranks + 1) * 4);
    saved->slot = base_carve(&carve, rows * 4);
    saved->x = base_carve(&carve, (saved->keep_rows ? 1 : all) * rows * shape->row_bytes);
    saved->dy = base_carve(&carve, all * (rows + extra) * shape->row_bytes);
    bind_back(&saved->back[0], &plan->layer[0], kept * rows, all * rows, &carve);
    bind_back(&saved->back[1], &plan->layer[1], kept * extra, all * extra, &carve);
    return carve.used;
}
