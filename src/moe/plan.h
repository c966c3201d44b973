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

/* An expert's weight gradients are made in at most so many pieces: strips of each, and one for the biases. */
enum { MOE_DWEIGHT_STRIPS_MAX = 16, MOE_DWEIGHT_PIECES_MAX = 2 * MOE_DWEIGHT_STRIPS_MAX + 1 };

enum moe_kind { MOE_FORWARD = 0, MOE_BACKWARD, MOE_BACKWARD_INPUT, MOE_BACKWARD_WEIGHT };

/* What is fetched from the tokens' home ranks, a row for each token. */
enum moe_feed { MOE_X = 0, MOE_DY = 1, MOE_FEEDS = 2 };

/* The sizes everything else follows from. A rank's experts are its L routed ones and, numbered from L on, the S shared
 * ones, whose rows are the rank's own tokens. */
struct moe_shape {
    int64_t hidden, inner, tokens_max, receive_max;
    int experts, topk, ranks, local; /* local: experts per rank, L */
    int shared;                      /* S */
    int64_t shared_inner;
    bool training;
    int workers, calls_max;
    int calls;          /* calls_max, and as many for weight gradients alone when training */
    bool same_memory;   /* ranks read each other's tensors */
    bool materialise;   /* permuted copies of rows and outputs exist (permute_fusion off, or bulk) */
    bool keep_a;        /* every block keeps its own `a` (expert_block off, or bulk) */
    int64_t slots_max;  /* tokens_max * K */
    int64_t rows_max;   /* the most rows this rank may receive */
    int64_t block_rows; /* the tallest block */
    int64_t blocks_max; /* shared experts' included */
    int64_t runs_max;
    int64_t run_tokens; /* as the knob says; 0: as shares out well */
    size_t row_bytes;   /* of H elements */
};

/* What a rank tells every other one about its call: "counts row". offset[e] .. offset[e+1] is expert e's part of
 * the source's order list. */
struct moe_counts {
    uint32_t status; /* enum hmoe_status; when not ok only tokens and text count */
    uint32_t kind;   /* enum moe_kind */
    uint32_t saves;  /* 0: no saved state; else 1, plus 2 for keep_rows, plus 4 for recompute */
    uint32_t wants_dx;
    uint64_t of;     /* backward: the number of its forward */
    int64_t tokens;
    uint64_t number; /* the call's, counted from 1: a missing row can be told from an old one */
    int64_t chunk_tokens;
    int64_t run_slots; /* slots of a run of tokens: what the source counts together */
    const void *feed[MOE_FEEDS]; /* x, and for a backward dy, when ranks share memory */
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
    size_t looked;    /* u64: ranks that read nobody's tensors any more, in a backward of ranks that share memory */
    size_t chunks;    /* u64 [R, MOE_CHUNKS_MAX]: chunks that arrived */
    size_t returned;  /* u64 [runs]: slot outputs that arrived, by run of tokens */
    size_t inbox;     /* [R] struct moe_counts, counts_bytes each */
    size_t order;     /* u32 [T*K]: my slots, by (expert, token, k), for the experts' owners to read */
    size_t feed[MOE_FEEDS]; /* [T,H] copies of my rows for other processes; absent when ranks share memory */
    size_t weight;    /* f32 [T*K], training: my slots' weights, for a backward */
    size_t d_weight;  /* f32 [T*K], training: their gradients, written by the experts' owners */
    size_t slots;     /* [T*K,H] expert outputs of my slots, or their dx, written by the experts' owners */
    size_t counts_bytes;
    size_t bytes;
};

struct moe_block {
    int32_t expert; /* 0 .. L+S-1 */
    int32_t chain;
    uint32_t first, rows; /* rows [first, first + rows) of the expert */
    int64_t row;          /* its first row: expert->row + first */
    void *a;              /* where its `a` is */
    const struct kern_engine *engine;
};

/* The blocks that go through gmm1 and gmm2 together: one, or all of an expert (backward; expert_block off). */
struct moe_chain {
    int32_t first_block, blocks;
    int32_t buffer;
    int strips; /* column strips that each block is shared out in */
    struct rt_event arrived, gmm1, gmm2;
    struct rt_event end; /* backward: pieces of weight gradients done, and one for all dx */
    int64_t ready_ns;
};

struct moe_expert {
    uint32_t rows;
    int64_t row; /* its first row among all rows received; a shared expert's: rows_max + s * tokens_max */
    int32_t first_chain, chains;
};

/* What a backward knows of some rows, one after the other. A room for many rows is moved on by moe_back_at. */
struct moe_back {
    char *gate_up;          /* [rows,2I] gate and up as the forward rounded them, then dH in their place */
    char *a;                /* [rows,I] */
    float *sums;            /* [rows][ceil(I/32)], of kern_dact */
    float *weight;          /* [rows] the slots' topk_weights */
    const void **at[MOE_FEEDS]; /* [rows] where the rows of x and dY are */
    const void **dh_at, **a_at; /* [rows] into gate_up and a */
    const void **one_at;    /* [rows] a one, for bias gradients */
};

/* Where a chain's packed rows and `a` are while it is worked on; as many as keep the workers busy. */
struct moe_buffer {
    void *x; /* packed rows; in a backward of each block, x_bytes apart */
    void *a;
    struct moe_back back; /* training: room for all rows of one expert */
};

/* The rows of hmoe_saved: what a forward left for its backward, and that for the weight gradients. */
struct moe_saved {
    struct moe_plan *plan;
    bool keep_rows, recompute;
    bool lent;              /* in the caller's memory: for hmoe_backward alone */
    _Atomic uint32_t state; /* enum moe_saved_state; release by the end of a call, acquire by the next start */
    uint64_t number;        /* of the forward */
    struct hmoe_call in;    /* what the forward read */
    int64_t rows;
    uint32_t *base; /* [L, R+1], as of the forward's call */
    uint32_t *slot; /* [rows] the slot of each row at its source */
    char *x;        /* [rows,H], when kept */
    char *dy;       /* [rows_max + S*T, H], between input and weight gradients */
    struct moe_back back[2]; /* of the routed and of the shared experts' rows */
    void *arena;
    size_t arena_bytes;
};

enum moe_saved_state {
    MOE_SAVED_EMPTY = 0,
    MOE_SAVED_FULL,    /* a forward has filled it */
    MOE_SAVED_PENDING, /* weight gradients are to come */
    MOE_SAVED_IN_USE   /* by a call in flight */
};

/* A worker's own memory. */
struct moe_bench {
    void *kern;        /* the engines' scratch */
    void *x;           /* packed rows of a block that no other worker shares */
    void *a;           /* training: `a` of a block computed again */
    const void **in;   /* [block_rows] */
    void **out;        /* [block_rows] */
    const void **term; /* [K+S] */
    float *weight;     /* [K+S] */
};

enum moe_state {
    MOE_IDLE = 0,  /* free for the next start */
    MOE_STARTED,   /* waits until every rank has retired the slot's last call */
    MOE_ROUTING,
    MOE_COUNTING,  /* waits for every rank's counts row */
    MOE_LAYING,
    MOE_RUNNING,
    MOE_POLLED,    /* what other ranks owe has all come */
};

struct moe_call {
    struct moe_plan *plan;
    int slot;        /* number % calls_max; from calls_max on: weight gradients alone, which no window knows */
    enum moe_kind kind;
    uint64_t number; /* of the plan's calls, from 0 */
    _Atomic uint32_t state; /* enum moe_state; release by whoever moves it on, acquire by the poll */
    _Atomic int64_t pending; /* tasks pushed and not yet done */
    _Atomic int64_t progress_ns;
    struct hmoe_call *user;
    struct hmoe_call in; /* a copy of what the user gave; backward: to the forward, but for grad and names */
    struct moe_saved *saved; /* or NULL */
    uint32_t saved_from;     /* its state before */
    bool began;              /* every rank agreed, so there was work */
    struct base_error error;
    int64_t start_ns;

    /* route */
    struct moe_counts *counts; /* my counts row */
    uint32_t *cursor;          /* [E] */
    int64_t run_tokens, runs;
    uint64_t retired_goal, counts_goal, barrier_goal, looked_goal;
    uint64_t *run_goal;   /* [runs_max]: what `returned` comes to */
    uint64_t *run_slots;  /* [runs_max]: unmasked slots of this call */
    uint8_t *run_started; /* [runs_max] */

    /* layout */
    uint32_t *base; /* [L, R+1]: the first row of each source in each local expert; own_base, or saved's */
    uint32_t *own_base;
    struct moe_expert *expert; /* [L+S] */
    int32_t *by_rows;          /* [L]: local experts with rows, most rows first */
    int32_t active;
    bool dx_wanted;            /* by any rank */
    struct moe_block *block;
    struct moe_chain *chain;
    int32_t blocks, chains;
    int32_t shared_chains; /* of them, the first ones: those that started before the counts were in */
    int64_t rows; /* received */
    uint64_t *chunk_goal;   /* [R, MOE_CHUNKS_MAX] */
    uint8_t *chunk_started; /* [R, MOE_CHUNKS_MAX] */
    char *copy_in, *copy_out; /* [rows_max + S*T, H] permuted copies, when materialised */
    char *kept_a;           /* `a` of every block, when kept */
    struct moe_back bulk_back[2]; /* training: the bulk path's room, of routed and shared experts' rows */
    char *shared_out;       /* [S,T,H] outputs, or dx, of the shared experts */
    bool looks; /* weight gradients read rows where they are, after their dx went home: others' duty to us */
    struct rt_event looking; /* chains that may read other ranks' tensors */
    struct rt_event shared; /* their chains, and one for laying out: then they are no duty any more */
    struct rt_event duties; /* chains, runs, chunks, laying out, the poll: then the call has ended */
    struct rt_event stage;  /* bulk: tasks of this stage */
    int stage_at;
};

struct moe_plan {
    struct rt_queue queue;
    struct rt_ring_mpmc ready;        /* chains whose rows are there, in order, waiting for a buffer */
    struct rt_ring_mpmc spare;        /* shared experts' chains, which get the buffers that those leave */
    struct rt_ring_mpmc free_buffers;
    struct moe_shape shape;
    struct kern_layer layer[2]; /* of routed and shared experts */
    struct kern_layer back[2];  /* the product dH x up_proj: kern_flip, inner = 2I */
    struct kern_choice choice;
    struct base_knobs knobs;
    struct moe_host host;
    int rank;
    bool bulk, wave, fill; /* fill: shared experts run in gaps */
    struct comm_window window;
    struct moe_window at;
    struct moe_buffer *buffer;
    int buffers;
    struct moe_bench *bench; /* [workers] */
    struct moe_call *call;   /* [calls] */
    uint64_t started;        /* calls so far */
    size_t a_bytes;          /* of one block */
    size_t x_bytes;          /* packed rows of one block */
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
size_t moe_saved_bytes(struct moe_plan *plan, const struct hmoe_saved_options *options); /* of the caller's memory */
size_t moe_saved_bind(struct moe_saved *saved, void *base); /* likewise */
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

/* Shared experts stand behind the routed ones. */
static inline int moe_width(const struct moe_plan *plan, int32_t expert)
{
    return expert >= plan->shape.local;
}

/* One expert's matrices, and their gradients where wanted (else NULL). */
struct moe_weights {
    const char *up, *down, *up_bias, *down_bias;
    char *d_up, *d_down, *d_up_bias, *d_down_bias;
};
struct moe_weights moe_weights_of(const struct moe_call *call, int32_t expert);

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
int32_t moe_expert_number(const struct moe_plan *plan, int32_t expert);
struct moe_span moe_block_span(const struct moe_call *call, const struct moe_block *block, enum trace_kind kind);
int64_t moe_span_begin(const struct rt_worker *worker);
void moe_span_end(const struct rt_worker *worker, const struct moe_call *call, int64_t start_ns, struct moe_span span);

/* The stages, in the data's order. */
void moe_route(void *call, uint64_t unused, struct rt_worker *worker);
void moe_route_back(void *call, uint64_t unused, struct rt_worker *worker);
void moe_send_chunk(void *call, uint64_t chunk, struct rt_worker *worker);
void moe_pack_block(struct moe_call *call, const struct moe_block *block, void *x, struct rt_worker *worker);
void moe_note_rows(struct moe_call *call, const struct moe_block *block, struct moe_back back);
void moe_pack_dy(struct moe_call *call, const struct moe_block *block, struct moe_back back, void *dy,
                 struct rt_worker *worker);
void moe_pack_x(struct moe_call *call, const struct moe_block *block, struct moe_back back, void *x);
void moe_pack_dh(struct moe_call *call, const struct moe_block *block, struct moe_back back, void *dh,
                 struct rt_worker *worker);
void moe_copy_in(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker);
void moe_arrive(struct moe_call *call, int source, int64_t first_token, int64_t last_token);
void moe_arrive_chunk(void *call, uint64_t source_chunk, struct rt_worker *worker);
void moe_pump(struct moe_plan *plan);
void moe_gmm1(struct moe_call *call, const struct moe_block *block, const void *x, int strip,
              struct rt_worker *worker);
void moe_swiglu_span(const struct rt_worker *worker, const struct moe_call *call, int64_t end_ns, int64_t swiglu_ns,
                     struct moe_span span);
void moe_gmm2(struct moe_call *call, const struct moe_block *block, int strip, struct rt_worker *worker);
void moe_gmm1_again(struct moe_call *call, const struct moe_block *block, struct moe_back back,
                    struct rt_worker *worker);
void moe_dact(struct moe_call *call, const struct moe_block *block, struct moe_back back, const void *dy, int strip,
              struct rt_worker *worker);
void moe_dgmm(struct moe_call *call, const struct moe_block *block, const void *dh, int strip,
              struct rt_worker *worker);
/* An expert's weight gradients: in how many pieces (0: nothing to do), and one of them. back: of the expert's rows. */
int moe_dweight_pieces(const struct moe_call *call, int32_t expert);
void moe_dweight(struct moe_call *call, int32_t expert, struct moe_back back, int piece, struct rt_worker *worker);
void moe_find_outputs(struct moe_call *call, const struct moe_block *block, void **out);
void moe_return_weights(struct moe_call *call, const struct moe_block *block, struct moe_back back);
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
/* The slots, in order, of a source's rows of a routed expert. */
const uint32_t *moe_source_slots(const struct moe_call *call, int source, int32_t expert);
void moe_rows_begin(struct moe_row_walk *walk, const struct moe_call *call, const struct moe_block *block);
bool moe_rows_next(struct moe_row_walk *walk, struct moe_row *row);
const char *moe_row_in(const struct moe_call *call, struct moe_row row, enum moe_feed feed);
char *moe_row_out(const struct moe_call *call, struct moe_row row, int32_t expert);

/* saved.c: a call takes its handle, or says why not, and lets go of it. */
bool moe_saved_take(struct moe_call *call, struct moe_saved *saved);
void moe_saved_release(struct moe_call *call);
void moe_saved_fill(struct moe_call *call);
/* Rows further on; and where an expert's rows, from `row` on, stand in a room [2] for all experts' rows. */
struct moe_back moe_back_skip(const struct moe_call *call, struct moe_back back, int32_t expert, int64_t rows);
struct moe_back moe_back_at(const struct moe_call *call, const struct moe_back *room, int32_t expert, int64_t row);

/* blocks.c: what a rank receives, cut into blocks and chains. */
void moe_lay_blocks(struct moe_call *call);
void moe_place_rows(struct moe_call *call);
void moe_add_expert(struct moe_call *call, int32_t expert);
void moe_choose_strips(struct moe_call *call, int32_t first_chain, int32_t first_block);
bool moe_ranks_agree(struct moe_call *call); /* agree.c */

/* shared.c: chains of the shared experts. */
void moe_shared_lay(struct moe_call *call);
void moe_shared_place(struct moe_call *call);
void moe_shared_add(struct moe_call *call);
int64_t moe_shared_slots(const struct moe_call *call, int64_t run);
void moe_shared_start(struct moe_call *call, int32_t chains);
void moe_shared_done(struct moe_call *call, struct rt_worker *worker);

/* backward.c */
struct moe_back moe_chain_back(const struct moe_call *call, const struct moe_chain *chain);
void moe_back_chain_start(void *call, uint64_t chain, struct rt_worker *worker);
void moe_back_prepare(struct moe_call *call, const struct moe_block *block, void *dy, struct rt_worker *worker);
struct moe_back moe_block_back(const struct moe_call *call, const struct moe_block *block);
void moe_dweight_of(struct moe_call *call, int32_t expert, int piece, struct rt_worker *worker);
uint64_t moe_chainless_pieces(const struct moe_call *call);
void moe_push_chainless(struct moe_call *call);
void moe_looking_begin(struct moe_call *call);
void moe_looked(struct moe_call *call);
bool moe_looked_by_all(const struct moe_call *call);
void moe_weight_begin(void *call, uint64_t unused, struct rt_worker *worker);

/* forward.c, chain.c, bulk.c, call.c, check.c */
void moe_check_forward(struct moe_call *call); /* what is wrong with the tensors goes into call->error */
void moe_check_backward(struct moe_call *call);
void moe_ready(struct moe_call *call, int32_t chain);
enum rt_lane moe_lane(const struct moe_call *call, const struct moe_chain *chain);
void moe_block_done(struct moe_call *call, const struct moe_block *block, struct rt_worker *worker);
/* Runs the first piece of the chain here, after offering the others to everybody. */
void moe_share(struct moe_call *call, const struct moe_chain *chain, moe_task_fn task);
uint64_t moe_piece(const struct moe_call *call, const struct moe_block *block, int strip);
void moe_chain_done(struct moe_call *call, const struct moe_chain *chain, struct rt_worker *worker);
void moe_poll(void *plan, struct rt_worker *worker);
void moe_lay_out(void *call, uint64_t unused, struct rt_worker *worker);
void moe_chain_start(void *call, uint64_t chain, struct rt_worker *worker);
void moe_bulk_begin(struct moe_call *call, uint64_t chunks);
void moe_bulk_chunk(struct moe_call *call);
bool moe_bulk_poll(struct moe_call *call);
/* Strip `strip` of `strips` over `columns`, in whole units of KERN_STRIP. */
struct moe_range {
    int64_t first, last;
};
struct moe_range moe_strip(int64_t columns, int strips, int strip);

#endif
