/* A call's life outside its stages: start, tasks, end, failure, and the caller's wait. */
#include "moe/plan.h"

#include "base/atomics.h"

#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* hmoe_call.phase, also a futex: never started, in flight, ended, in flight with somebody asleep on it */
enum { PHASE_NEW = 0, PHASE_FLYING = 1, PHASE_ENDED = 2, PHASE_AWAITED = 3 };

/* ---- tasks and spans */

void moe_push(struct moe_call *call, enum rt_lane lane, moe_task_fn run, uint64_t argument)
{
    atomic_fetch_add_explicit(&call->pending, 1, memory_order_relaxed); /* the push orders it */
    rt_push(&call->plan->queue, lane, (struct rt_task){.run = run, .context = call, .argument = argument});
}

void moe_task_end(struct moe_call *call)
{
    struct comm *comm = call->plan->host.comm;

    atomic_store_explicit(&call->progress_ns, base_now_ns(), memory_order_relaxed); /* a hint for moe_watch */
    /* release pairs with moe_end_failed's acquire: when it sees 0, what tasks read and wrote is over */
    if (atomic_fetch_sub_explicit(&call->pending, 1, memory_order_release) == 1 && moe_failed(call->plan))
        comm_ring(comm, comm->boot.rank);
}

bool moe_failed(const struct moe_plan *plan)
{
    /* relaxed: a task may miss a failure by an instant */
    return atomic_load_explicit(&plan->host.comm->failure->state, memory_order_relaxed) != 0;
}

int64_t moe_span_begin(const struct rt_worker *worker)
{
    return trace_on(worker->trace) ? base_now_ns() : 0;
}

void moe_span_end(const struct rt_worker *worker, const struct moe_call *call, int64_t start_ns, struct moe_span span)
{
    if (start_ns && trace_on(worker->trace))
        trace_emit(worker->trace, worker->index,
                   &(struct trace_event){.start_ns = start_ns, .end_ns = base_now_ns(), .call = call->number,
                                         .expert = span.expert, .block = span.block, .source = span.source,
                                         .rows = span.rows, .layer = call->in.layer_number,
                                         .kind = (uint8_t)span.kind});
}

/* The expert's number among those of all ranks; shared ones stand behind them. */
int32_t moe_expert_number(const struct moe_plan *plan, int32_t expert)
{
    const struct moe_shape *shape = &plan->shape;

    return expert < shape->local ? plan->rank * shape->local + expert : shape->experts + expert - shape->local;
}

struct moe_span moe_block_span(const struct moe_call *call, const struct moe_block *block, enum trace_kind kind)
{
    return (struct moe_span){.kind = kind, .expert = moe_expert_number(call->plan, block->expert),
                             .block = (int32_t)(block - call->block), .source = -1, .rows = (int32_t)block->rows};
}

/* Rotated, so that no rank is everybody's first target. */
void moe_signal_all(struct moe_plan *plan, size_t counter)
{
    for (int r = 0; r < plan->shape.ranks; r++)
        plan->host.comm->transport->signal(&plan->window, (plan->rank + r) % plan->shape.ranks, counter, 1);
}

/* ---- start */

/* Hands the call over to the poll. */
static void launch(struct moe_call *call, struct hmoe_call *user)
{
    struct comm *comm = call->plan->host.comm;
    bool local = call->kind == MOE_BACKWARD_WEIGHT;

    call->user = user;
    call->start_ns = base_now_ns();
    atomic_store_explicit(&call->progress_ns, call->start_ns, memory_order_relaxed);
    user->status = HMOE_OK;
    user->error[0] = 0;
    __atomic_store_n(&user->phase, PHASE_FLYING, __ATOMIC_RELAXED); /* the state's release orders it */
    /* release pairs with the poll's acquire */
    atomic_store_explicit(&call->state, local ? MOE_RUNNING : MOE_STARTED, memory_order_release);
    if (local)
        moe_push(call, RT_VECTOR, moe_weight_begin, 0);
    comm_ring(comm, comm->boot.rank);
}

/* The slot of the next call of the plan; NULL with an error when it is still in use. */
static struct moe_call *next_call(struct moe_plan *plan, enum moe_kind kind, struct base_error *error)
{
    struct moe_call *call = &plan->call[plan->started % (uint64_t)plan->shape.calls_max];

    if (comm_failed(plan->host.comm, error) != HMOE_OK)
        return NULL;
    if (atomic_load_explicit(&call->state, memory_order_acquire) != MOE_IDLE) {
        base_fail(error, HMOE_ERR_BUSY, "%d calls of this plan are in flight: calls_max allows no more; wait for one",
                  plan->shape.calls_max);
        return NULL;
    }
    call->kind = kind;
    call->number = plan->started++;
    call->saved = NULL;
    call->began = false;
    call->error = (struct base_error){.status = HMOE_OK};
    return call;
}

enum hmoe_status moe_forward_start(struct moe_plan *plan, struct hmoe_call *user, struct moe_saved *saved,
                                   struct base_error *error)
{
    struct moe_call *call = next_call(plan, MOE_FORWARD, error);

    if (!call)
        return error->status;
    call->in = *user;
    call->in.grad = (struct hmoe_gradients){0};
    moe_check_forward(call);
    if (saved && call->error.status == HMOE_OK && moe_saved_take(call, saved)) {
        saved->in = call->in;
        saved->number = call->number;
    }
    launch(call, user);
    return HMOE_OK;
}

static const void *now_at(const void *before, const void *now)
{
    return now ? now : before;
}

/* What the forward read may lie elsewhere by now. */
static void follow(struct hmoe_call *in, const struct hmoe_call *user)
{
    const struct hmoe_layer *layer = &user->layer;

    in->x = now_at(in->x, user->x);
    in->topk_ids = now_at(in->topk_ids, user->topk_ids);
    in->topk_weights = now_at(in->topk_weights, user->topk_weights);
    in->layer.up_proj = now_at(in->layer.up_proj, layer->up_proj);
    in->layer.down_proj = now_at(in->layer.down_proj, layer->down_proj);
    in->layer.up_bias = now_at(in->layer.up_bias, layer->up_bias);
    in->layer.down_bias = now_at(in->layer.down_bias, layer->down_bias);
    in->layer.shared_up_proj = now_at(in->layer.shared_up_proj, layer->shared_up_proj);
    in->layer.shared_down_proj = now_at(in->layer.shared_down_proj, layer->shared_down_proj);
}

/* A backward reads what its forward read. Without that it has no tokens, only its error. */
static void recall(struct moe_call *call, const struct hmoe_call *user, struct moe_saved *saved)
{
    call->in = (struct hmoe_call){.layer_number = user->layer_number, .tag = user->tag};
    if (!moe_saved_take(call, saved))
        return;
    call->in = saved->in;
    follow(&call->in, user);
    call->in.grad = user->grad;
    call->in.layer_number = user->layer_number;
    call->in.tag = user->tag;
    moe_check_backward(call);
}

static enum hmoe_status start_back(struct moe_plan *plan, struct hmoe_call *user, struct moe_saved *saved,
                                   enum moe_kind kind, struct base_error *error)
{
    struct moe_call *call = next_call(plan, kind, error);

    if (!call)
        return error->status;
    recall(call, user, saved);
    launch(call, user);
    return HMOE_OK;
}

enum hmoe_status moe_backward_start(struct moe_plan *plan, struct hmoe_call *user, struct moe_saved *saved,
                                    struct base_error *error)
{
    return start_back(plan, user, saved, MOE_BACKWARD, error);
}

enum hmoe_status moe_backward_input_start(struct moe_plan *plan, struct hmoe_call *user, struct moe_saved *saved,
                                          struct base_error *error)
{
    return start_back(plan, user, saved, MOE_BACKWARD_INPUT, error);
}

/* A slot that no window knows; several threads may look for one. */
static struct moe_call *take_local(struct moe_plan *plan)
{
    for (int i = plan->shape.calls_max; i < plan->shape.calls; i++) {
        uint32_t idle = MOE_IDLE;
        /* acquire pairs with release() */
        if (atomic_compare_exchange_strong_explicit(&plan->call[i].state, &idle, MOE_LAYING, memory_order_acq_rel,
                                                    memory_order_relaxed))
            return &plan->call[i];
    }
    return NULL;
}

/* It matches no other rank's call, so what is wrong with it is known at once. */
enum hmoe_status moe_backward_weight_start(struct moe_plan *plan, struct hmoe_call *user, struct moe_saved *saved,
                                           struct base_error *error)
{
    struct moe_call *call;

    if (comm_failed(plan->host.comm, error) != HMOE_OK)
        return error->status;
    call = take_local(plan);
    if (!call)
        return base_fail(error, HMOE_ERR_BUSY, "%d weight gradients of this plan are in flight: calls_max allows no"
                         " more; wait for one", plan->shape.calls - plan->shape.calls_max);
    call->kind = MOE_BACKWARD_WEIGHT;
    call->saved = NULL;
    call->began = false;
    call->error = (struct base_error){.status = HMOE_OK};
    recall(call, user, saved);
    if (call->error.status != HMOE_OK) {
        *error = call->error;
        moe_saved_release(call);
        atomic_store_explicit(&call->state, MOE_IDLE, memory_order_release); /* pairs with take_local */
        return error->status;
    }
    call->number = saved->number;
    call->began = true;
    launch(call, user);
    return HMOE_OK;
}

/* ---- end */

/* Tells the user. After this the user's struct may be gone. */
static void finish(struct hmoe_call *user, const struct base_error *error)
{
    user->status = error->status;
    memcpy(user->error, error->text, sizeof user->error);
    /* release pairs with the acquire of wait and done */
    if (__atomic_exchange_n(&user->phase, PHASE_ENDED, __ATOMIC_ACQ_REL) == PHASE_AWAITED)
        syscall(SYS_futex, &user->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* The slot is free for the next start before the user can know. */
static void release(struct moe_call *call)
{
    struct hmoe_call *user = call->user;
    struct base_error error = call->error;

    moe_saved_release(call);
    atomic_store_explicit(&call->state, MOE_IDLE, memory_order_release); /* pairs with start's acquire */
    finish(user, &error);
}

void moe_call_end(struct moe_call *call, struct rt_worker *worker)
{
    struct moe_plan *plan = call->plan;
    size_t mine = moe_offset(call, plan->at.retired) + (size_t)plan->rank * 8; /* where a window knows the call */

    moe_span_end(worker, call, call->start_ns, (struct moe_span){.kind = TRACE_CALL, .expert = -1, .block = -1,
                                               .source = -1, .rows = (int32_t)call->in.tokens});
    if (call->slot < plan->shape.calls_max)
        moe_signal_all(plan, mine);
    release(call);
}

void moe_duty_done(struct moe_call *call, struct rt_worker *worker)
{
    if (rt_event_raise(&call->duties, 1))
        moe_call_end(call, worker);
}

/* ---- the others' ends */

static bool settled(const struct moe_plan *plan)
{
    for (int i = 0; i < plan->shape.calls_max; i++)
        for (int r = 0; r < plan->shape.ranks; r++) {
            const struct moe_call *call = &plan->call[i];
            size_t at = moe_offset(call, plan->at.retired) + (size_t)r * 8;
            if (!rt_reached(comm_counter(&plan->window, at), call->retired_goal))
                return false;
        }
    return true;
}

/* No rank waits for this one, whatever it does: so a look now and then will do. */
enum hmoe_status moe_plan_settle(const struct moe_plan *plan, struct base_error *error)
{
    const struct timespec pause = {0, 50000};
    int64_t limit_ms = plan->knobs.value[KNOB_WAIT_LIMIT_MS], end_ns = base_now_ns() + limit_ms * 1000000;

    while (!settled(plan) && comm_failed(plan->host.comm, error) == HMOE_OK) {
        if (base_now_ns() >= end_ns)
            return base_fail(error, HMOE_ERR_TIMEOUT, "rank %d waited %" PRId64 " ms for the end of the others' calls"
                             " (knob wait_limit_ms)", plan->rank, limit_ms);
        nanosleep(&pause, NULL);
    }
    return error->status;
}

/* ---- failure */

static bool tasks_running(const struct moe_plan *plan)
{
    for (int i = 0; i < plan->shape.calls; i++)
        if (atomic_load_explicit(&plan->call[i].pending, memory_order_acquire)) /* pairs with moe_task_end */
            return true;
    return false;
}

/* Ranks that share memory read each other's tensors: nobody's call ends before nobody reads. A rank that does not come
 * to this within its wait limit is stuck in the caller's own memory; then the error is returned all the same. */
static bool others_quiet(struct moe_plan *plan)
{
    int64_t limit = plan->knobs.value[KNOB_WAIT_LIMIT_MS] * 1000000;
    uint64_t goal = (uint64_t)plan->knobs.value[KNOB_COUNTER_START] + (uint64_t)plan->shape.ranks;

    if (!plan->shape.same_memory || rt_reached(comm_counter(&plan->window, plan->at.quiet), goal))
        return true;
    return base_now_ns() - plan->failed_ns > limit;
}

/* The group has failed: ends every call of this rank once its tasks are over. */
void moe_end_failed(struct moe_plan *plan)
{
    if (tasks_running(plan))
        return;
    if (!plan->failed_ns) {
        moe_signal_all(plan, plan->at.quiet);
        plan->failed_ns = base_now_ns();
    }
    if (!others_quiet(plan))
        return;
    for (int i = 0; i < plan->shape.calls; i++) {
        struct moe_call *call = &plan->call[i];
        if (atomic_load_explicit(&call->state, memory_order_acquire) == MOE_IDLE)
            continue;
        comm_failed(plan->host.comm, &call->error);
        release(call);
    }
}

static bool lacks_chunk(const struct moe_call *call, int source)
{
    const uint8_t *started = call->chunk_started + (size_t)source * MOE_CHUNKS_MAX;

    for (int c = 0; c < MOE_CHUNKS_MAX; c++)
        if (!started[c])
            return true;
    return false;
}

/* The first rank of which something is known to be missing; -1 when that cannot be told: outputs come from anywhere. */
static int missing(const struct moe_call *call, uint32_t state)
{
    const struct moe_plan *plan = call->plan;

    for (int r = 0; r < plan->shape.ranks; r++) {
        size_t at = moe_offset(call, plan->at.retired) + (size_t)r * 8;
        if (state == MOE_STARTED && !rt_reached(comm_counter(&plan->window, at), call->retired_goal))
            return r;
        /* may be read while it is being written: it only chooses whom to name */
        if (state == MOE_COUNTING && moe_counts_of(call, r)->number != call->number + 1)
            return r;
        if (state == MOE_RUNNING && r != plan->rank && lacks_chunk(call, r))
            return r;
    }
    return -1;
}

static const char *awaited(uint32_t state, int rank)
{
    if (state == MOE_STARTED)
        return "the end of an earlier call";
    if (state == MOE_COUNTING)
        return "the counts";
    return rank < 0 ? "expert outputs" : "the rows";
}

static void time_out(const struct moe_call *call, uint32_t state)
{
    struct moe_plan *plan = call->plan;
    int rank = missing(call, state);
    struct base_error error;
    char whose[32] = "other ranks";

    if (rank >= 0)
        snprintf(whose, sizeof whose, "rank %d", rank);
    base_fail(&error, HMOE_ERR_TIMEOUT, "rank %d waited %" PRId64 " ms in call %" PRIu64 " for %s of %s (knob"
              " wait_limit_ms)", plan->rank, plan->knobs.value[KNOB_WAIT_LIMIT_MS], call->number,
              awaited(state, rank), whose);
    comm_fail(plan->host.comm, rank < 0 ? plan->rank : rank, HMOE_ERR_TIMEOUT, error.text);
}

/* Ranks that closed their group without this call will never come to it. Nothing is said before all the others are in
 * it: they may have to end the call before. */
static void look_for_leavers(const struct moe_call *call)
{
    const struct moe_plan *plan = call->plan;
    uint64_t lacking = call->counts_goal - comm_counter(&plan->window, moe_offset(call, plan->at.counts_in));
    struct base_error error;
    int left = -1;

    for (int r = plan->shape.ranks; r-- > 0;)
        if (comm_departed(plan->host.comm, r) && moe_counts_of(call, r)->number != call->number + 1) {
            left = r;
            lacking--;
        }
    if (left < 0 || lacking)
        return;
    base_fail(&error, HMOE_ERR_PEER, "rank %d left the group before call %" PRIu64, left, call->number);
    comm_fail(plan->host.comm, left, error.status, error.text);
}

/* Ends the group when a call has made no progress for the wait limit, or cannot make any. */
void moe_watch(struct moe_call *call)
{
    int64_t limit_ns = call->plan->knobs.value[KNOB_WAIT_LIMIT_MS] * 1000000;
    /* acquire pairs with the end of routing, which sets the goal of the counts */
    uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);

    if (state == MOE_COUNTING)
        look_for_leavers(call);
    if (state != MOE_IDLE && !atomic_load_explicit(&call->pending, memory_order_relaxed) &&
        base_now_ns() - atomic_load_explicit(&call->progress_ns, memory_order_relaxed) >= limit_ns)
        time_out(call, state);
}

/* ---- the caller's side */

int moe_call_done(const struct hmoe_call *call)
{
    return __atomic_load_n(&call->phase, __ATOMIC_ACQUIRE) == PHASE_ENDED; /* pairs with finish */
}

static bool spin(const struct hmoe_call *call, int64_t limit_ns)
{
    int64_t until = limit_ns ? base_now_ns() + limit_ns : 0;

    do {
        if (moe_call_done(call))
            return true;
        base_cpu_relax();
    } while (until && base_now_ns() < until);
    return false;
}

enum hmoe_status moe_call_wait(const struct moe_plan *plan, struct hmoe_call *call)
{
    if (spin(call, plan->host.comm->spin_ns))
        return call->status;
    while (!moe_call_done(call)) {
        uint32_t flying = PHASE_FLYING;
        /* a failed exchange means somebody else waits too, or the call has just ended */
        __atomic_compare_exchange_n(&call->phase, &flying, PHASE_AWAITED, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        if (flying != PHASE_ENDED)
            syscall(SYS_futex, &call->phase, FUTEX_WAIT_PRIVATE, PHASE_AWAITED, NULL, NULL, 0);
    }
    return call->status;
}
