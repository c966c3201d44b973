/* Plans: the kernels chosen, the memory laid out, the window opened, the queue attached. */
#include "moe/plan.h"

#include "base/num.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void set_layer(struct moe_plan *plan, const struct hmoe_plan_options *options)
{
    plan->layer[0] = (struct kern_layer){.hidden = options->hidden, .inner = options->inner, .dtype = options->dtype,
                                         .layout = options->layout, .gating = options->gating,
                                         .act = num_activation(options->activation)};
    plan->layer[1] = plan->layer[0];
    plan->layer[1].inner = options->shared_experts ? options->shared_inner : 1;
    for (int width = 0; width < 2; width++) {
        plan->back[width] = kern_flip(plan->layer[width]);
        plan->back[width].inner = 2 * plan->layer[width].inner;
    }
}

static enum hmoe_status choose_kernels(struct moe_plan *plan, struct base_error *error)
{
    char name[16];
    const char *why;

    base_knob_choice(&plan->knobs, KNOB_ENGINE, name, sizeof name);
    why = kern_choose(&plan->choice, name, &plan->layer[0]);
    if (why)
        return base_fail(error, HMOE_ERR_UNSUPPORTED, "knob engine=%s: %s", name, why);
    return HMOE_OK;
}

/* Block heights follow from the kernels. */
static void set_blocks(struct moe_plan *plan)
{
    struct moe_shape *shape = &plan->shape;
    int64_t knob = plan->knobs.value[KNOB_BLOCK_ROWS];

    shape->block_rows = plan->choice.many->rows_most;
    if (shape->training && plan->choice.back->rows_most < shape->block_rows)
        shape->block_rows = plan->choice.back->rows_most;
    if (knob > 0 && knob < shape->block_rows)
        shape->block_rows = knob;
    shape->blocks_max = shape->rows_max / shape->block_rows + shape->local + 1;
    shape->blocks_max += shape->shared * (shape->tokens_max / shape->block_rows + 1);
}

/* Everything about a plan that needs neither peers nor memory. */
static enum hmoe_status describe(struct moe_plan *plan, const struct hmoe_plan_options *options, int ranks,
                                 int workers, struct base_error *error)
{
    set_layer(plan, options);
    plan->bulk = plan->knobs.value[KNOB_PATH] == 1;
    plan->wave = plan->knobs.value[KNOB_WAVE] != 0;
    plan->fill = !plan->bulk && plan->knobs.value[KNOB_SHARED_FUSION] != 0;
    plan->buffers = workers + 1;
    if (choose_kernels(plan, error) != HMOE_OK)
        return error->status;
    if (moe_shape_make(&plan->shape, options, &plan->knobs, ranks, workers, error) != HMOE_OK)
        return error->status;
    set_blocks(plan);
    return HMOE_OK;
}

static void init_calls(struct moe_plan *plan)
{
    uint64_t start = (uint64_t)plan->knobs.value[KNOB_COUNTER_START];
    const struct moe_shape *shape = &plan->shape;

    for (int i = 0; i < shape->calls; i++) {
        struct moe_call *call = &plan->call[i];
        call->plan = plan;
        call->slot = i;
        call->retired_goal = call->counts_goal = call->barrier_goal = call->looked_goal = start;
        for (int64_t r = 0; r < shape->runs_max; r++)
            call->run_goal[r] = start;
        for (int64_t c = 0; c < shape->ranks * (int64_t)MOE_CHUNKS_MAX; c++)
            call->chunk_goal[c] = start;
        for (int64_t c = 0; c < shape->blocks_max; c++) {
            rt_event_init(&call->chain[c].arrived, start);
            rt_event_init(&call->chain[c].gmm1, start);
            rt_event_init(&call->chain[c].gmm2, start);
            rt_event_init(&call->chain[c].end, start);
        }
        rt_event_init(&call->shared, start);
        rt_event_init(&call->looking, start);
        rt_event_init(&call->duties, start);
        rt_event_init(&call->stage, start);
    }
}

static void set_counter(const struct moe_plan *plan, size_t offset, uint64_t count)
{
    uint64_t start = (uint64_t)plan->knobs.value[KNOB_COUNTER_START];
    _Atomic uint64_t *counter = (void *)(comm_peer(&plan->window, plan->rank) + offset);

    for (uint64_t i = 0; i < count; i++)
        atomic_store_explicit(&counter[i], start, memory_order_relaxed); /* nobody else looks yet */
}

static void init_window(const struct moe_plan *plan)
{
    const struct moe_window *at = &plan->at;
    uint64_t ranks = (uint64_t)plan->shape.ranks;

    set_counter(plan, at->quiet, 1);
    for (int i = 0; i < plan->shape.calls_max; i++) {
        size_t call = at->call + (size_t)i * at->stride;
        set_counter(plan, call + at->retired, ranks);
        set_counter(plan, call + at->counts_in, 1);
        set_counter(plan, call + at->barrier, 1);
        set_counter(plan, call + at->looked, 1);
        set_counter(plan, call + at->chunks, ranks * MOE_CHUNKS_MAX);
        set_counter(plan, call + at->returned, (uint64_t)plan->shape.runs_max);
    }
}

static void init_buffers(struct moe_plan *plan)
{
    for (int i = 0; i < plan->buffers; i++)
        rt_ring_push(&plan->free_buffers, &(struct rt_task){.argument = (uint64_t)i});
}

/* This rank's memory. The window comes later, as all ranks must take part in it or none. */
static enum hmoe_status take_arena(struct moe_plan *plan, struct base_error *error)
{
    plan->arena_bytes = moe_arena_bind(plan, NULL);
    plan->arena = base_map(plan->arena_bytes, plan->knobs.value[KNOB_HUGE_PAGES] != 0);
    if (!plan->arena)
        return base_fail(error, HMOE_ERR_MEMORY, "the plan needs %zu bytes of address space (tokens_max, experts and"
                         " block_rows decide)", plan->arena_bytes);
    moe_arena_bind(plan, plan->arena);
    return HMOE_OK;
}

static enum hmoe_status make_local(struct moe_plan *plan, const struct hmoe_plan_options *options,
                                   struct base_error *error)
{
    struct comm *comm = plan->host.comm;

    if (describe(plan, options, comm->boot.ranks, plan->host.pool->workers, error) != HMOE_OK)
        return error->status;
    plan->shape.same_memory = comm->transport->same_memory;
    moe_window_make(&plan->at, &plan->shape);
    return take_arena(plan, error);
}

static void drop(struct moe_plan *plan)
{
    base_unmap(plan->arena, plan->arena_bytes, plan->knobs.value[KNOB_HUGE_PAGES] != 0);
    free(plan);
}

/* Counters are ready before any rank may raise them: comm_agree is the barrier after which calls can start. */
static enum hmoe_status join(struct moe_plan *plan, struct base_error *error)
{
    struct comm *comm = plan->host.comm;

    if (comm->transport->window_create(comm, plan->at.bytes, &plan->window, error) != HMOE_OK)
        return error->status;
    init_calls(plan);
    init_window(plan);
    init_buffers(plan);
    rt_attach(plan->host.pool, &plan->queue, error);
    if (comm_agree(comm, error) == HMOE_OK)
        return HMOE_OK;
    rt_detach(&plan->queue);
    comm->transport->window_destroy(&plan->window);
    return error->status;
}

enum hmoe_status moe_plan_create(struct moe_plan **made, const struct moe_host *host,
                                 const struct hmoe_plan_options *options, const struct base_knobs *knobs,
                                 struct base_error *error)
{
    struct moe_plan *plan = aligned_alloc(RT_LINE, (sizeof *plan + RT_LINE - 1) / RT_LINE * RT_LINE);

    if (plan) {
        *plan = (struct moe_plan){.host = *host, .rank = host->comm->boot.rank, .knobs = *knobs};
        plan->queue.poll = moe_poll;
        plan->queue.context = plan;
        make_local(plan, options, error);
    } else {
        base_fail(error, HMOE_ERR_MEMORY, "no memory for a plan");
    }
    if (comm_agree(host->comm, error) == HMOE_OK && join(plan, error) == HMOE_OK) {
        *made = plan;
        return HMOE_OK;
    }
    if (plan)
        drop(plan);
    return error->status;
}

/* Every rank's calls have ended here and nobody reads my window before it goes: the barrier is comm_agree. */
void moe_plan_destroy(struct moe_plan *plan)
{
    struct base_error ignored = {.status = HMOE_OK};

    assert(moe_plan_idle(plan));
    comm_agree(plan->host.comm, &ignored);
    rt_detach(&plan->queue);
    if (moe_failed(plan)) /* the others may be waiting, or wait later, to hear that nothing runs here */
        moe_end_failed(plan);
    else
        moe_signal_all(plan, plan->at.quiet);
    plan->host.comm->transport->window_destroy(&plan->window);
    drop(plan);
}

/* Both mappings in whole pages. */
static size_t reserved_bytes(const struct moe_plan *plan, size_t arena_bytes)
{
    size_t page = (size_t)getpagesize();

    return (plan->at.bytes + page - 1) / page * page + (arena_bytes + page - 1) / page * page + sizeof *plan;
}

/* A plan with a shape and no memory; NULL and an error when there can be none. */
static struct moe_plan *imagine(const struct hmoe_plan_options *options, const struct base_knobs *knobs, int ranks,
                                int workers, struct base_error *error)
{
    struct moe_plan *plan = aligned_alloc(RT_LINE, (sizeof *plan + RT_LINE - 1) / RT_LINE * RT_LINE);

    if (!plan) {
        base_fail(error, HMOE_ERR_MEMORY, "no memory to measure a plan");
        return NULL;
    }
    *plan = (struct moe_plan){.knobs = *knobs};
    if (describe(plan, options, ranks, workers, error) == HMOE_OK)
        return plan;
    free(plan);
    return NULL;
}

enum hmoe_status moe_plan_measure(const struct hmoe_plan_options *options, const struct base_knobs *knobs, int ranks,
                                  int workers, struct hmoe_workspace *workspace, struct base_error *error)
{
    struct moe_plan *plan = imagine(options, knobs, ranks, workers, error);

    if (!plan)
        return error->status;
    plan->shape.same_memory = ranks == 1 || knobs->value[KNOB_TRANSPORT] == 1;
    moe_window_make(&plan->at, &plan->shape);
    workspace->shared_bytes = plan->at.bytes;
    workspace->reserved_bytes = reserved_bytes(plan, moe_arena_bind(plan, NULL));
    workspace->high_water_bytes = 0;
    free(plan);
    return HMOE_OK;
}

enum hmoe_status moe_saved_measure(const struct hmoe_plan_options *options, const struct base_knobs *knobs, int ranks,
                                   const struct hmoe_saved_options *saved, size_t *bytes, struct base_error *error)
{
    struct moe_plan *plan = imagine(options, knobs, ranks, 1, error);

    if (plan)
        *bytes = moe_saved_bytes(plan, saved);
    free(plan);
    return error->status;
}

/* What was ever touched stays in memory, so what is in memory now is the high water. */
void moe_plan_workspace(const struct moe_plan *plan, struct hmoe_workspace *workspace)
{
    workspace->shared_bytes = plan->at.bytes;
    workspace->reserved_bytes = reserved_bytes(plan, plan->arena_bytes);
    workspace->high_water_bytes = base_resident(plan->arena, plan->arena_bytes) +
                                  base_resident(comm_peer(&plan->window, plan->rank), plan->at.bytes);
}

int moe_plan_idle(const struct moe_plan *plan)
{
    for (int i = 0; i < plan->shape.calls; i++)
        if (atomic_load_explicit(&plan->call[i].state, memory_order_acquire) != MOE_IDLE)
            return 0;
    return 1;
}

void moe_plan_tap(struct moe_plan *plan, const struct moe_tap *tap)
{
    plan->tap = *tap;
}
