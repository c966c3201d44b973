/* Inside the moe room: what a plan and a call in flight are made of. */
#ifndef MOE_PLAN_H
#define MOE_PLAN_H

#include "base/clock.h"
#include "base/memory.h"
#include "kern/kern.h"
#include "moe/moe.h"
#include "rt/event.h"

/* A rank's tokens travel in at most so many chunks and are combined in at most so many runs: their counters live in
 * the window. */
enum { MOE_CHUNKS_MAX = 64, MOE_RUNS_MAX = 1024 };

/* The sizes everything else follows from. */
struct moe_shape {
    int64_t hidden, inner, tokens_max, receive_max;
    int experts, topk, ranks, local; /* local: experts per rank, L */
    int workers, calls_max;
    bool same_memory;   /* ranks read each other's tensors */
    bool materialise;   /* permuted copies of rows and outputs exist (permute_fusion off, or bulk) */
    bool keep_a;        /* every block keeps its own `a` (expert_block off, or bulk) */
    int64_t slots_max;  /* tokens_max * K */
    int64_t rows_max;   /* the most rows this rank may receive */
    int64_t block_rows; /* the tallest block */
    int64_t blocks_max;
    int64_t runs_max;
    int64_t run_tokens; /* as the knob says; 0: as shares out well */
    size_t row_bytes;   /* of H elements */
};

/* What a rank tells every other one about its call: "counts row". offset[e] .. offset[e+1] is expert e's part of
 * the source's order list. */
struct moe_counts {
    uint32_t status; /* enum hmoe_status; when not ok only tokens and text count */
    int64_t tokens;
    uint64_t number; /* the call's, counted from 1: a missing row can be told from an old one */
    int64_t chunk_tokens;
    int64_t run_slots; /* slots of a run of tokens: what the source counts together */
    const void *x;     /* when ranks share memory */
    char text[HMOE_ERROR_BYTES];
    uint32_t offset[]; /* [E+1] */
};

/* Offsets into a window; the second half repeats for every call slot, `stride` bytes apart. */
struct moe_window {
    size_t quiet; /* u64: ranks that have nothing running any more, after a failure */
    size_t call, stride;
    size_t retired;   /* u64 [R], raised by each source when it retired the slot's call: the credit to reuse it */
    size_t counts_in; /* u64: counts rows that arrived */
    size_t barrier;   /* u64: bulk path's stage barriers */
    size_t chunks;    /* u64 [R, MOE_CHUNKS_MAX]: chunks that arrived */
    size_t returned;  /* u64 [runs]: slot outputs that arrived, by run of tokens */
    size_t inbox;     /* [R] struct moe_counts, counts_bytes each */
    size_t order;     /* u32 [T*K]: my slots, by (expert, token, k), for the experts' owners to read */
    size_t x;         /* [T,H] copy of my rows for other processes; absent when ranks share memory */
    size_t slots;     /* [T*K,H] expert outputs of my slots, written by the experts' owners */
    size_t counts_bytes;
    size_t bytes;
};

struct moe_block {
    int32_t expert; /* local */
    int32_t chain;
    uint32_t first, rows; /* rows [first, first + rows) of the expert */
    int64_t row;          /* its first row among all rows received */
    void *a;              /* where its `a` is */
    const struct kern_engine *engine;
};

/* The blocks that go through gmm1 and gmm2 together: one, or all of an expert (expert_block off). */
struct moe_chain {
    int32_t first_block, blocks;
    int32_t buffer;
    struct rt_event arrived, gmm1, gmm2;
    int64_t ready_ns;
};

struct moe_expert {
    uint32_t rows;
    int64_t row; /* its first row among all rows received */
    int32_t first_chain, chains;
};

/* Where a chain's packed rows and `a` are while it is worked on; as many as keep the workers busy. */
struct moe_buffer {
    void *x, *a;
};

/* A worker's own memory. */
struct moe_bench {
    void *kern;        /* the engines' scratch */
    void *x;           /* packed rows of a block that no other worker shares */
    const void **in;   /* [block_rows] */
    void **out;        /* [block_rows] */
    const void **term; /* [K] */
    float *weight;     /* [K] */
};

enum moe_state {
    MOE_IDLE = 0,  /* free for the next start */
    MOE_STARTED,   /* waits until every rank has retired the slot's last call */
    MOE_ROUTING,
    MOE_COUNTING,  /* waits for every rank's counts row */
    MOE_LAYING,
    MOE_RUNNING,
};

struct moe_call {
    struct moe_plan *plan;
    int slot;        /* number % calls_max */
    uint64_t number; /* of the plan's calls, from 0 */
    _Atomic uint32_t state; /* enum moe_state; release by whoever moves it on, acquire by the poll */
    _Atomic int64_t pending; /* tasks pushed and not yet done */
    _Atomic int64_t progress_ns;
    struct hmoe_call *user;
    struct hmoe_call in; /* a copy of what the user gave */
    struct base_error error;
    int64_t start_ns;

    /* route */
    struct moe_counts *counts; /* my counts row */
    uint32_t *cursor;          /* [E] */
    int64_t run_tokens, runs;
    uint64_t retired_goal, counts_goal, barrier_goal;
    uint64_t *run_goal;   /* [runs_max]: what `returned` comes to */
    uint64_t *run_slots;  /* [runs_max]: unmasked slots of this call */
    uint8_t *run_started; /* [runs_max] */

    /* layout */
    uint32_t *base; /* [L, R+1]: the first row of each source in each local expert */
    struct moe_expert *expert; /* [L] */
    int32_t *by_rows;          /* [L]: local experts with rows, most rows first */
    int32_t active;
    struct moe_block *block;
    struct moe_chain *chain;
    int32_t blocks, chains, strips;
    int64_t rows; /* received */
    uint64_t *chunk_goal;   /* [R, MOE_CHUNKS_MAX] */
    uint8_t *chunk_started; /* [R, MOE_CHUNKS_MAX] */
    struct rt_event duties; /* chains done, runs combined, chunks sent: then the call has ended */
    struct rt_event stage;  /* bulk: tasks of this stage */
    int stage_at;
};

struct moe_plan {
    struct rt_queue queue;
    struct rt_ring_mpmc ready;        /* chains whose rows are there, in order, waiting for a buffer */
    struct rt_ring_mpmc free_buffers;
    struct moe_shape shape;
    struct kern_layer layer;
    struct kern_choice choice;
    struct base_knobs knobs;
    struct moe_host host;
    int rank;
    bool bulk, wave;
    struct comm_window window;
    struct moe_window at;
    struct moe_buffer *buffer;
    int buffers;
    struct moe_bench *bench; /* [workers] */
    struct moe_call *call;   /* [calls_max] */
    uint64_t started;        /* calls so far */
    char *rows, *outs;       /* [rows_max, H] permuted copies, when materialised */
    char *kept_a;            /* `a` of every block, when kept */
    size_t a_bytes;          /* of one block */
    void *arena;
    size_t arena_bytes;
    struct moe_tap tap;
    int64_t failed_ns; /* when this rank saw the group's failure; 0 none */
};

/* layout.c: memory, written once. */
enum hmoe_status moe_shape_make(struct moe_shape *shape, const struct hmoe_plan_options *options,
                                const struct base_knobs *knobs, int ranks, int workers, struct base_error *error);
void moe_window_make(struct moe_window *at, const struct moe_shape *shape);
size_t moe_arena_bind(struct moe_plan *plan, void *base); /* base NULL only measures */
void moe_queue_capacity(const struct moe_plan *plan, uint64_t capacity[RT_LANES]);

/* Window pieces of a rank, and of a call there. */
static inline char *moe_at(const struct moe_call *call, int rank, size_t piece)
{
    const struct moe_plan *plan = call->plan;
    return comm_peer(&plan->window, rank) + plan->at.call + (size_t)call->slot * plan->at.stride + piece;
}

static inline size_t moe_offset(const struct moe_call *call, size_t piece)
{
    return call->plan->at.call + (size_t)call->slot * call->plan->at.stride + piece;
}

static inline const struct moe_counts *moe_counts_of(const struct moe_call *call, int source)
{
    const struct moe_plan *plan = call->plan;
    return (const void *)(moe_at(call, plan->rank, plan->at.inbox) + (size_t)source * plan->at.counts_bytes);
}

/* The expert that one of my tokens' slots chose; -1: masked. */
static inline int64_t moe_id_at(const struct moe_call *call, int64_t slot)
{
    if (call->in.ids_type == HMOE_I64)
        return ((const int64_t *)call->in.topk_ids)[slot];
    return ((const int32_t *)call->in.topk_ids)[slot];
}

/* Raises a counter by one at every rank. */
void moe_signal_all(struct moe_plan *plan, size_t counter);

/* Tasks of a call. Every pushed task ends with moe_task_end. */
typedef void (*moe_task_fn)(void *call, uint64_t argument, struct rt_worker *worker);
void moe_push(struct moe_call *call, enum rt_lane lane, moe_task_fn run, uint64_t argument);
void moe_task_end(struct moe_call *call);
/* Did the group fail? Then tasks end without doing anything. */
bool moe_failed(const struct moe_plan *plan);
void moe_duty_done(struct moe_call *call, struct rt_worker *worker); /* raises duties; the last ends the call */
void moe_call_end(struct moe_call *call, struct rt_worker *worker);
void moe_end_failed(struct moe_plan *plan);
void moe_watch(struct moe_call *call);

/* Spans. begin gives 0 when tracing is off, and then end writes nothing. */
struct moe_span {
    enum trace_kind kind;
    int32_t expert, block, source, rows; /* expert: the global number, or -1 */
};
struct moe_span moe_block_span(const struct moe_call *call, const struct moe_block *block, enum trace_kind kind);
int64_t moe_span_begin(const struct rt_worker *worker);
void moe_span_end(const struct rt_worker *worker, const struct moe_call *call, int64_t start_ns, struct moe_span span);

/* The stages, in the data's order. */
void moe_route(void *call, uint64_t unused, struct rt_worker *worker);
void moe_send_chunk(void *call, uint64_t chunk, struct rt_worker *worker);
void moe_pack_block(struct moe_call *call, const struct moe_block *block, void *x, struct rt_worker *worker);
void moe_copy_in(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker);
void moe_arrive(struct moe_call *call, int source, int64_t first_token, int64_t last_token);
void moe_arrive_chunk(void *call, uint64_t source_chunk, struct rt_worker *worker);
void moe_pump(struct moe_plan *plan);
void moe_gmm1(struct moe_call *call, const struct moe_block *block, const void *x, int strip,
              struct rt_worker *worker);
void moe_swiglu_span(const struct rt_worker *worker, const struct moe_call *call, int64_t end_ns, int64_t swiglu_ns,
                     struct moe_span span);
void moe_gmm2(struct moe_call *call, const struct moe_block *block, int strip, struct rt_worker *worker);
void moe_copy_out(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker);
void moe_return_block(struct moe_call *call, const struct moe_block *block);
void moe_combine_run(void *call, uint64_t run, struct rt_worker *worker);

/* rows.c: where a block's rows come from and go to. */
struct moe_row {
    int source;
    uint32_t slot;
};
struct moe_row_walk {
    const struct moe_call *call;
    int32_t expert;
    int source;
    uint32_t at, end; /* of the expert's rows */
};
void moe_rows_begin(struct moe_row_walk *walk, const struct moe_call *call, const struct moe_block *block);
bool moe_rows_next(struct moe_row_walk *walk, struct moe_row *row);
const char *moe_row_in(const struct moe_call *call, struct moe_row row);
char *moe_row_out(const struct moe_call *call, struct moe_row row);

/* forward.c, chain.c, bulk.c, call.c */
void moe_poll(void *plan, struct rt_worker *worker);
void moe_lay_out(void *call, uint64_t unused, struct rt_worker *worker);
void moe_chain_start(void *call, uint64_t chain, struct rt_worker *worker);
void moe_bulk_begin(struct moe_call *call, uint64_t chunks);
void moe_bulk_chunk(struct moe_call *call);
void moe_bulk_poll(struct moe_call *call, struct rt_worker *worker);
/* Column strip `strip` of the call's strips over `columns`. */
void moe_strip(const struct moe_call *call, int64_t columns, int strip, int64_t *first, int64_t *last);

#endif
