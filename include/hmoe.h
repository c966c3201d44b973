/* HyperMegaMoE: one Mixture-of-Experts layer over an expert-parallel group, in one call.
 *
 *     y[t] = sum over k of topk_weights[t,k] * expert(topk_ids[t,k])(x[t])
 *     expert(x) = (silu(x*Wg) * (x*Wu)) * Wd,      up_proj = [Wg | Wu], down_proj = Wd
 *
 * and its gradients. Shared experts, when a plan has some, see every token and are added last, with weight 1.
 *
 * Letters: T tokens on this rank, H hidden, I inner width, E experts in all, K experts per token,
 * R ranks, L = E/R experts on this rank (rank r holds experts r*L .. r*L+L-1). Row-major everywhere.
 * Every engine, rank count and block size gives the same bits: docs/numerics.md.
 *
 * Each block of comments ends with fixed lines:
 *   Owns     who frees what          Threads  who may call it, when
 *   Blocks   whether it waits        Ranks    one: alone; all: every rank of the group calls it
 */
#ifndef HMOE_H
#define HMOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(HMOE_BUILDING)
#define HMOE_API __attribute__((visibility("default")))
#else
#define HMOE_API
#endif

#define HMOE_VERSION "0.1.0"

/* ---------------------------------------------------------------- statuses */

/* One table makes the enum and the names. */
#define HMOE_STATUS_LIST(X)                                                       \
    X(HMOE_OK, 0, "ok")                                                           \
    X(HMOE_ERR_ARGUMENT, 1, "an argument is not allowed")                         \
    X(HMOE_ERR_ID, 2, "an expert id lies outside [0,E) and is not -1")            \
    X(HMOE_ERR_LIMIT, 3, "more tokens or rows than the plan allows")              \
    X(HMOE_ERR_MISMATCH, 4, "the ranks do not agree")                             \
    X(HMOE_ERR_STATE, 5, "not allowed in this state")                             \
    X(HMOE_ERR_BUSY, 6, "calls_max calls are in flight")                          \
    X(HMOE_ERR_MEMORY, 7, "out of memory")                                        \
    X(HMOE_ERR_SYSTEM, 8, "the operating system refused")                         \
    X(HMOE_ERR_UNSUPPORTED, 9, "this machine or build cannot do it")              \
    X(HMOE_ERR_TIMEOUT, 10, "a wait ran into its limit")                          \
    X(HMOE_ERR_PEER, 11, "another rank died")                                     \
    X(HMOE_ERR_ABORTED, 12, "the group was aborted")                              \
    X(HMOE_ERR_FORKED, 13, "a forked child may not use its parent's group")

enum hmoe_status {
#define X(name, value, text) name = value,
    HMOE_STATUS_LIST(X)
#undef X
};

/* The status's name ("HMOE_ERR_ID") and its meaning. Unknown values give "unknown status".
 * Owns: static text. Threads: any. Blocks: no. Ranks: one. */
HMOE_API const char *hmoe_status_name(enum hmoe_status status);
HMOE_API const char *hmoe_status_text(enum hmoe_status status);

/* What went wrong in this thread's latest failed call, in one sentence: the argument, the value, what is
 * allowed. "" when nothing failed yet. Also in hmoe_call.error for what a call ran into.
 * Owns: the thread's; valid until its next failed call. Threads: any. Blocks: no. Ranks: one. */
HMOE_API const char *hmoe_last_error(void);

/* The library's version, HMOE_VERSION of the header it was built with. */
HMOE_API const char *hmoe_version(void);

/* ------------------------------------------------------------------- knobs */

/* One list (src/base/knobs.def; `hmoe knobs` prints it). A knob's value comes from, in rising order: its
 * default, the environment variable HMOE_<NAME>, hmoe_group_options.knobs, hmoe_plan_options.knobs; the last
 * two are texts like "engine=avx2,wave=0". An unknown name or a value out of range is an error. */
struct hmoe_knob {
    const char *name;
    const char *unit;
    const char *choices; /* "auto|amx|..." for a closed set, "" for a number */
    int64_t standard;    /* the default: a number, or a position in choices */
    int64_t least, most;
    const char *meaning;
};
/* Threads: any. Blocks: no. Ranks: one. hmoe_knob(i) is NULL outside [0, hmoe_knob_count()). */
HMOE_API int hmoe_knob_count(void);
HMOE_API const struct hmoe_knob *hmoe_knob(int index);

/* ------------------------------------------------------------------ groups */

/* Gathers `bytes` bytes of every rank into `all`, [R][bytes] in rank order. 0 on success.
 * It is the only thing a group needs from outside; it is called at group and plan creation and destruction. */
typedef int (*hmoe_allgather_fn)(void *context, const void *mine, void *all, size_t bytes);

/* Zero is a good value for every member; size = sizeof(struct hmoe_group_options). */
struct hmoe_group_options {
    size_t size;
    int rank, ranks;             /* ranks 0 means 1 */
    int workers;                 /* threads that compute for this rank; 0: the CPUs, shared by the host's ranks */
    hmoe_allgather_fn allgather; /* needed when ranks > 1 */
    void *allgather_context;
    const char *knobs; /* NULL or "name=value,..." */
};
struct hmoe_group;

/* Makes this rank's part of an expert-parallel group and starts its workers. Ranks of one process share
 * memory; ranks of one host share windows.
 * Owns: the caller, who destroys it after its plans. Threads: create and destroy from one thread.
 * Blocks: for the other ranks. Ranks: all. */
HMOE_API enum hmoe_status hmoe_group_create(const struct hmoe_group_options *options, struct hmoe_group **group);
HMOE_API enum hmoe_status hmoe_group_destroy(struct hmoe_group *group);

/* Ends the group for every rank: calls in flight and later ones return HMOE_ERR_ABORTED with the reason.
 * Threads: any. Blocks: no. Ranks: one. */
HMOE_API enum hmoe_status hmoe_group_abort(struct hmoe_group *group, const char *reason);

/* The group's first failure, or HMOE_OK; its text through hmoe_last_error().
 * Threads: any. Blocks: no. Ranks: one. */
HMOE_API enum hmoe_status hmoe_group_poll(struct hmoe_group *group);

/* ------------------------------------------------------- ready-made launch */

enum hmoe_via { HMOE_VIA_THREADS = 0, HMOE_VIA_PROCESSES = 1 };

/* What a launched rank is given; the last three go into hmoe_group_options. */
struct hmoe_boot {
    int rank, ranks;
    hmoe_allgather_fn allgather;
    void *allgather_context;
};
typedef int (*hmoe_rank_fn)(const struct hmoe_boot *boot, void *argument);

/* Runs fn once per rank, as threads of this process or as forked children, and waits for all of them.
 * HMOE_OK when every rank returned 0; otherwise hmoe_last_error() names the first rank that failed and how.
 * Threads: any; fork before you start threads of your own. Blocks: until all ended. Ranks: the launcher. */
HMOE_API enum hmoe_status hmoe_launch(enum hmoe_via via, int ranks, hmoe_rank_fn fn, void *argument);

/* ------------------------------------------------------------------- plans */

enum hmoe_dtype { HMOE_F32 = 0, HMOE_BF16 = 1, HMOE_F16 = 2 };
enum hmoe_index { HMOE_I32 = 0, HMOE_I64 = 1 };
/* KN: up_proj [L,H,2I], down_proj [L,I,H]. NK: up_proj [L,2I,H], down_proj [L,H,I]. */
enum hmoe_layout { HMOE_KN = 0, HMOE_NK = 1 };
/* How the 2I columns of up_proj stand: all gates then all ups, or gate 0, up 0, gate 1, up 1, ... */
enum hmoe_gating { HMOE_HALVES = 0, HMOE_INTERLEAVED = 1 };

/* gate = min(gate, limit), up = clamp(up, -limit, limit), a = (gate * sigmoid(alpha * gate)) * (up + offset).
 * All zero means silu: alpha 1, no limit, offset 0. gpt-oss: 1.702, 7, 1. */
struct hmoe_activation {
    float alpha;  /* 0: 1 */
    float limit;  /* 0: none */
    float offset; /* 0: nothing is added */
};

struct hmoe_plan_options {
    size_t size;
    int64_t hidden, inner; /* H, I >= 1 */
    int experts;           /* E, a multiple of R */
    int topk;              /* K >= 1 */
    int64_t tokens_max;    /* the largest T of any rank */
    int64_t receive_max;   /* the most rows a rank may receive in a call; 0: no limit */
    enum hmoe_dtype dtype; /* of x, weights, biases, y */
    enum hmoe_layout layout;
    enum hmoe_gating gating;
    struct hmoe_activation activation;
    int calls_max; /* calls in flight; 0: 1 */
    const char *knobs;
    int training;         /* 1: forwards may save and be followed by backwards */
    int shared_experts;   /* S experts that every token goes through; each rank holds them all */
    int64_t shared_inner; /* their inner width; >= 1 when S > 0 */
};
struct hmoe_plan;

/* Makes the memory and the tables for calls of this shape. A plan never changes.
 * Owns: the caller, who destroys it before its group. Threads: create and destroy from the group's thread.
 * Blocks: for the other ranks. Ranks: all, with the same options. */
HMOE_API enum hmoe_status hmoe_plan_create(struct hmoe_group *group, const struct hmoe_plan_options *options,
                                           struct hmoe_plan **plan);
HMOE_API enum hmoe_status hmoe_plan_destroy(struct hmoe_plan *plan);

/* Waits until every rank has ended the calls that have ended here. A rank that gives up, because it cannot make its
 * next call, settles its plans and then aborts the group: the others fail in the call that it did not make, not in one
 * before. HMOE_ERR_STATE when a call is in flight here.
 * Threads: the one that starts calls. Blocks: for the other ranks. Ranks: one. */
HMOE_API enum hmoe_status hmoe_plan_settle(struct hmoe_plan *plan);

/* Bytes above the caller's tensors, of one rank. */
struct hmoe_workspace {
    size_t size;
    size_t reserved_bytes;   /* address space set aside for the worst case */
    size_t shared_bytes;     /* of it, the window that other ranks reach: allocated in full */
    size_t high_water_bytes; /* the most that was ever in use; 0 from a query */
};
/* query: what a plan of these options would reserve on each of `ranks` ranks with `workers` workers, without
 * making it. Threads: any. Blocks: no. Ranks: one. */
HMOE_API enum hmoe_status hmoe_workspace_query(const struct hmoe_plan_options *options, int ranks, int workers,
                                               struct hmoe_workspace *workspace);
HMOE_API enum hmoe_status hmoe_plan_workspace(struct hmoe_plan *plan, struct hmoe_workspace *workspace);

/* ------------------------------------------------------------------- calls */

/* The weights of one layer: this rank's L experts. Biases may be NULL. */
struct hmoe_layer {
    const void *up_proj;   /* [L,H,2I] or [L,2I,H] */
    const void *down_proj; /* [L,I,H] or [L,H,I] */
    const void *up_bias;   /* [L,2I], columns as in up_proj */
    const void *down_bias; /* [L,H] */
    const void *shared_up_proj;   /* [S,H,2I'] or [S,2I',H], I' = shared_inner; NULL when S is 0 */
    const void *shared_down_proj; /* [S,I',H] or [S,H,I'] */
};

struct hmoe_saved;

enum hmoe_dw_mode { HMOE_OVERWRITE = 0, HMOE_ACCUMULATE = 1 };

/* What a backward reads and writes; shapes are those of what each is the gradient of, NULL means not wanted. The
 * weights' gradients are of dw_type. OVERWRITE writes zeros for experts without rows, ACCUMULATE does not touch them.
 * Shared experts are replicated: theirs are of this rank's tokens alone. Calls in flight must not write the same. */
struct hmoe_gradients {
    const void *dy;       /* [T,H] of y */
    void *dx;             /* [T,H] */
    void *d_topk_weights; /* [T,K], in weights_type; 0 for masked slots */
    void *d_up_proj, *d_down_proj, *d_up_bias, *d_down_bias;
    void *d_shared_up_proj, *d_shared_down_proj;
    enum hmoe_dtype dw_type; /* HMOE_F32 or the plan's dtype */
    enum hmoe_dw_mode dw_mode;
};

#define HMOE_ERROR_BYTES 240

/* One call: what it reads and writes, and how it ended. Fill the first part, leave the second to the library,
 * and keep the struct where it is until wait returned. Tensors are borrowed from start to the end of wait; what a
 * forward reads and `saved` refers to, until its backward has ended. A backward looks at `saved`, `grad`,
 * `layer_number` and `tag`, and for what its forward read and lies elsewhere now: x, topk_ids, topk_weights, members of
 * `layer` that are not NULL replace the forward's. */
struct hmoe_call {
    size_t size;                      /* sizeof(struct hmoe_call) */
    int64_t tokens;                   /* T; with 0 every pointer below may be NULL (not the weights) */
    const void *x;                    /* [T,H] */
    const void *topk_ids;             /* [T,K] global expert numbers; -1 masks a slot */
    const void *topk_weights;         /* [T,K] */
    enum hmoe_index ids_type;         /* of topk_ids */
    enum hmoe_dtype weights_type;     /* of topk_weights */
    struct hmoe_layer layer;
    void *y;            /* [T,H], must not overlap x */
    struct hmoe_saved *saved;   /* forward: filled for a backward; NULL: nothing is saved. backward: of its forward */
    struct hmoe_gradients grad; /* backward */
    int layer_number;   /* shown in traces */
    uint64_t tag;       /* the caller's own */

    enum hmoe_status status;          /* valid after wait, or once hmoe_call_done said 1 */
    char error[HMOE_ERROR_BYTES];     /* "" or what went wrong */
    struct hmoe_plan *plan;           /* set by start */
    uint32_t phase;                   /* 0 never started, 1 in flight, 2 ended */
};

/* start: begins the forward call and returns at once. Wrong tensors are found out by every rank alike, in wait;
 * start itself fails only when nothing was begun (no plan, a wrong size, calls_max in flight, a dead group).
 * done: 1 when the call has ended, else 0. wait: until my outputs are written and nobody reads my tensors any
 * more; idempotent. forward: start and wait.
 * Threads: start from one thread at a time per plan; done and wait from any. Blocks: wait and forward.
 * Ranks: all, in the same order per plan; done and wait: one. */
HMOE_API enum hmoe_status hmoe_forward_start(struct hmoe_plan *plan, struct hmoe_call *call);
HMOE_API int hmoe_call_done(const struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_call_wait(struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_forward(struct hmoe_plan *plan, struct hmoe_call *call);

/* --------------------------------------------------------------- gradients */

/* Zero is a good value for every member. The same on all ranks. */
struct hmoe_saved_options {
    size_t size;
    int keep_rows; /* 0: backward fetches rows again from every rank's x; 1: the N rows received are kept, [N,H] */
    int recompute; /* 0: gate and up are kept, [N,2I]; 1: backward multiplies again */
    void *memory;  /* NULL: the library's own. Else the caller's, on 64 bytes, for as long as the handle lives; then */
    size_t memory_bytes; /* hmoe_backward alone is allowed, and at least so many as hmoe_saved_query says are needed */
};

/* What the forward of one microbatch leaves for its backward, beside references to the tensors it read. A handle goes
 * empty -> forward -> backward -> empty, or forward -> backward_input -> backward_weight -> empty, again and again;
 * anything else is HMOE_ERR_STATE and changes nothing. Many may be full at once, and be used in any order.
 * Made from a plan of training 1. query: the bytes that the caller's memory needs, without a plan. clear drops what the
 * handle holds, destroy the handle, too; not while a call uses it.
 * Owns: the caller, who destroys it before its plan. Threads: one at a time. Blocks: no. Ranks: one. */
HMOE_API enum hmoe_status hmoe_saved_create(struct hmoe_plan *plan, const struct hmoe_saved_options *options,
                                            struct hmoe_saved **saved);
HMOE_API enum hmoe_status hmoe_saved_query(const struct hmoe_plan_options *options, int ranks,
                                           const struct hmoe_saved_options *saved, size_t *memory_bytes);
HMOE_API enum hmoe_status hmoe_saved_clear(struct hmoe_saved *saved);
HMOE_API enum hmoe_status hmoe_saved_destroy(struct hmoe_saved *saved);

/* Bytes in use now, for N received rows: routing 4*N + 4*L*(R+1); rows N*H and gate_up N*2I elements, or 0 as the
 * options say; pending: what backward_input leaves for backward_weight (dY, a; dH and rows if not kept). */
struct hmoe_saved_usage {
    size_t size;
    int64_t rows; /* N */
    size_t routing_bytes, rows_bytes, gate_up_bytes, pending_bytes;
    size_t reserved_bytes; /* address space */
};
HMOE_API enum hmoe_status hmoe_saved_read(struct hmoe_saved *saved, struct hmoe_saved_usage *usage);

/* backward: dx, d_topk_weights and the weights' gradients, of the forward that filled call->saved.
 * backward_input: dx and d_topk_weights; backward_weight, later: the weights' gradients. It needs no other rank.
 * Whatever is wrong with one rank's call every rank finds out alike, in wait; then saved is as it was.
 * Threads: start from one thread at a time per plan, backward_weight_start from any; done and wait as for forward.
 * Blocks: those without start.
 * Ranks: all, in the order of all calls of the plan; backward_weight: one, in any order. */
HMOE_API enum hmoe_status hmoe_backward_start(struct hmoe_plan *plan, struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_backward(struct hmoe_plan *plan, struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_backward_input_start(struct hmoe_plan *plan, struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_backward_input(struct hmoe_plan *plan, struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_backward_weight_start(struct hmoe_plan *plan, struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_backward_weight(struct hmoe_plan *plan, struct hmoe_call *call);

/* Weight gradients that wait for a gap: calls for hmoe_backward_weight. Those of one d_up_proj (or what else is wanted
 * first) run in the order of their pushes, so the bits do not depend on when they are flushed. The queue never holds
 * saved states of more than bytes_max: a push that would, first runs the oldest.
 * push: the call and its saved state stay where they are until it ran. flush: runs up to `most`, oldest first, until
 * the call `until` has ended (NULL: none), or all; returns the first failure of any of them, which is also in its call.
 * destroy: HMOE_ERR_STATE when some are left.
 * Owns: the caller. Threads: any. Blocks: push, when it is full, and flush. Ranks: one. */
struct hmoe_w_queue;
HMOE_API enum hmoe_status hmoe_w_queue_create(size_t bytes_max, struct hmoe_w_queue **queue);
HMOE_API enum hmoe_status hmoe_w_queue_push(struct hmoe_w_queue *queue, struct hmoe_plan *plan,
                                            struct hmoe_call *call);
HMOE_API enum hmoe_status hmoe_w_queue_flush(struct hmoe_w_queue *queue, int64_t most,
                                             const struct hmoe_call *until);
HMOE_API int64_t hmoe_w_queue_length(struct hmoe_w_queue *queue);
HMOE_API enum hmoe_status hmoe_w_queue_destroy(struct hmoe_w_queue *queue);

/* ------------------------------------------------------------------- trace */

/* Recording is off until start; it keeps the latest knob `trace_events` events of each worker.
 * write: one JSON file in the Trace Event Format (Perfetto, chrome://tracing), of this rank.
 * Threads: any, with no call in flight for write and summary. Blocks: write, on the file. Ranks: one. */
HMOE_API enum hmoe_status hmoe_trace_start(struct hmoe_group *group);
HMOE_API enum hmoe_status hmoe_trace_stop(struct hmoe_group *group);
HMOE_API enum hmoe_status hmoe_trace_write(struct hmoe_group *group, const char *path);

enum { HMOE_STAGES = 10 }; /* route permute dispatch gmm1 swiglu gmm2 combine; backward's: dact dgmm dweight */
struct hmoe_trace_summary {
    size_t size;
    int64_t events, events_lost;
    int64_t span_ns;                      /* first start to last end */
    int64_t stage_ns[HMOE_STAGES];        /* summed over workers; swiglu is inside gmm1, not added to it */
    int64_t stage_count[HMOE_STAGES];
    int64_t lane_busy_ns[3];              /* matrix, vector, comm, summed over workers */
    int64_t any_busy_ns;                  /* time in which at least one worker was busy */
    int64_t overlap_ns;                   /* time in which at least two lanes were busy at once */
    int64_t exposed_comm_ns;              /* time in which a call was in flight and no worker was in the matrix lane */
    int64_t block_p50_ns, block_p99_ns;   /* a block's first row ready to its last output returned */
    int64_t blocks;
};
HMOE_API const char *hmoe_stage_name(int stage);
HMOE_API enum hmoe_status hmoe_trace_read(struct hmoe_group *group, struct hmoe_trace_summary *summary);

#ifdef __cplusplus
}
#endif
#endif
