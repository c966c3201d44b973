/* Forward at its edges: what broke other systems. Each test says which input it is about. */
#include "moe_case.h"

#include <pthread.h>
#include <unistd.h>

static const struct moe_case plain = {.hidden = 48, .inner = 40, .experts = 8, .topk = 4, .ranks = 1,
                                      .dtype = HMOE_BF16, .tokens = {17, 17, 17, 17}, .seed = 11, .workers = 1,
                                      .calls_max = 1};

/* Ranks that receive nothing, ten thousand times: nobody runs ahead into a dead end. */
static int starved_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    for (int turn = 0; turn < 10000; turn++) {
        struct hmoe_call call = case_call(c, boot->rank);
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
        if (turn % 1000 == 0)
            CHECK(!case_differs(c, boot->rank));
    }
    return case_close(&bed);
}

static void starved_ranks(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct moe_case c = plain;
        c.ranks = 2;
        c.hidden = c.inner = 8;
        c.tokens[0] = 1;
        c.tokens[1] = 2;
        c.routing = ROUTE_FIRST_RANK;
        case_make(&c);
        assert_int_equal(hmoe_launch((enum hmoe_via)via, 2, starved_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

/* The same input twenty times, on more threads than CPUs: one answer. */
static void twenty_times(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.calls = 20;
    c.ranks = 4;
    c.workers = 3;
    c.routing = ROUTE_LOGNORMAL;
    c.tokens[1] = 90;
    case_check(&c);
}

/* Ids just outside, far outside and in 64 bits: named, on every rank. */
static int id_rank(const struct hmoe_boot *boot, void *argument)
{
    static const int64_t bad[] = {8, 15, -2, INT32_MIN, INT32_MAX, (int64_t)1 << 40, INT64_MIN};
    struct moe_case *c = argument;
    struct case_bed bed;

    CHECK(!case_open(c, boot, &bed));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct hmoe_call call = case_call(c, boot->rank);
        int64_t ids[17 * 4];
        char text[64];
        memcpy(ids, call.topk_ids, sizeof ids);
        if (boot->rank == 1)
            ids[16 * 4 + 3] = bad[i];
        call.topk_ids = ids;
        CHECK(hmoe_forward(bed.plan, &call) == HMOE_ERR_ID);
        snprintf(text, sizeof text, "rank 1, token 16, slot 3 is %lld:", (long long)bad[i]);
        CHECK(strstr(hmoe_last_error(), text));
    }
    return case_close(&bed);
}

static void ids_outside(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.ranks = 2;
    c.ids_type = HMOE_I64;
    case_make(&c);
    assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, id_rank, &c), HMOE_OK);
    case_free(&c);
}

/* Every unmasked slot of every rank is received exactly once, by its expert's owner, in the order of the contract. */
static int bijection_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;
    int32_t source[1000];
    int64_t slot[1000], rows, expected = 0, last = -1;
    int local = c->experts / c->ranks;

    CHECK(!case_open(c, boot, &bed));
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    rows = moe_tap_rows(bed.plan->moe, source, slot, 1000);
    for (int64_t i = 0; i < c->all * c->topk; i++)
        expected += case_id(c, i) >= 0 && case_id(c, i) / local == boot->rank;
    CHECK(rows == expected && rows > 0);
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = c->first[source[i]] * c->topk + slot[i], id = case_id(c, at);
        CHECK(id / local == boot->rank);
        CHECK(id * 1000000 + at > last); /* by expert, then source rank, token, slot */
        last = id * 1000000 + at;
    }
    return case_close(&bed);
}

static void the_permutation_is_a_bijection(void **state)
{
    (void)state;
    for (int routing = ROUTE_UNIFORM; routing < ROUTE_ONE_HOT; routing++) {
        struct moe_case c = plain;
        c.ranks = 2;
        c.routing = (enum case_routing)routing;
        c.masked = 0.2;
        c.knobs = "block_rows=3";
        case_make(&c);
        assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 2, bijection_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

/* Nobody writes to y once wait has returned, nor reads x or the weights. */
static void y_is_published_once(void **state)
{
    struct moe_case c = plain;
    struct case_bed bed;
    size_t bytes;

    (void)state;
    c.workers = 2;
    case_make(&c);
    bytes = case_size(&c, c.all * c.hidden);
    assert_false(case_open(&c, &case_boot_alone, &bed));
    for (int turn = 0; turn < 50; turn++) {
        struct hmoe_call call = case_call(&c, 0), next = call;
        call.y = malloc(bytes);
        call.x = memcpy(malloc(bytes), c.x, bytes);
        assert_int_equal(hmoe_forward(bed.plan, &call), HMOE_OK);
        assert_memory_equal(call.y, c.wanted, bytes);
        memset(call.y, 0x11, bytes);
        memset((char *)(uintptr_t)call.x, 0xff, bytes);
        assert_int_equal(hmoe_forward(bed.plan, &next), HMOE_OK);
        for (size_t i = 0; i < bytes; i++)
            assert_int_equal(((char *)call.y)[i], 0x11);
        free(call.y);
        free((char *)(uintptr_t)call.x);
    }
    assert_false(case_close(&bed));
    case_free(&c);
}

/* Every tensor one element off any alignment. */
static void off_by_one_element(void **state)
{

    (void)state;
    for (int dtype = HMOE_F32; dtype <= HMOE_F16; dtype++)
        for (int layout = HMOE_KN; layout <= HMOE_NK; layout++) {
            struct moe_case c = plain;
            struct case_bed bed;
            struct hmoe_call call;
            c.dtype = (enum hmoe_dtype)dtype;
            c.layout = (enum hmoe_layout)layout;
            c.biased = 1;
            case_make(&c);
            /* case_take leaves room behind every tensor */
#define SHIFT(member, bytes) (c.member = memmove(c.member + case_size(&c, 1), c.member, bytes))
            SHIFT(x, case_size(&c, c.all * c.hidden));
            SHIFT(up, case_size(&c, (int64_t)c.experts * c.hidden * 2 * c.inner));
            SHIFT(down, case_size(&c, (int64_t)c.experts * c.hidden * c.inner));
            SHIFT(up_bias, case_size(&c, (int64_t)c.experts * 2 * c.inner));
            SHIFT(down_bias, case_size(&c, (int64_t)c.experts * c.hidden));
            c.y += case_size(&c, 1);
#undef SHIFT
            call = case_call(&c, 0);
            assert_false(case_open(&c, &case_boot_alone, &bed));
            assert_int_equal(hmoe_forward(bed.plan, &call), HMOE_OK);
            assert_false(case_differs(&c, 0));
            assert_false(case_close(&bed));
            case_free(&c);
        }
}

/* Experts that lie past 2^31 elements and past 4 GB, in memory that is almost all holes. */
static void far_offsets(void **state)
{
    enum { H = 2048, I = 1024, E = 700 };
    const size_t up = (size_t)H * 2 * I, down = (size_t)H * I;
    struct hmoe_group_options group_options = {.size = sizeof group_options};
    struct base_prng prng = {5};

    (void)state;
    for (int layout = HMOE_KN; layout <= HMOE_NK; layout++) {
        struct hmoe_plan_options options = {.size = sizeof options, .hidden = H, .inner = I, .experts = E, .topk = 1,
                                            .tokens_max = 1, .dtype = HMOE_BF16, .layout = (enum hmoe_layout)layout};
        uint16_t *ups = base_map(up * E * 2, 0), *downs = base_map(down * E * 2, 0), x[H], y[H], near_y[H];
        int32_t id = E - 1;
        float weight = 1;
        struct hmoe_call call = {.size = sizeof call, .tokens = 1, .x = x, .topk_ids = &id, .topk_weights = &weight,
                                 .layer = {.up_proj = ups, .down_proj = downs}, .y = y};
        struct hmoe_group *group;
        struct hmoe_plan *plan;
        assert_true(up * E > (size_t)1 << 31);
        for (size_t i = 0; i < up; i++)
            ups[up * (E - 1) + i] = num_to_bf16(base_random_sym(&prng, 0.1f));
        for (size_t i = 0; i < down; i++)
            downs[down * (E - 1) + i] = num_to_bf16(base_random_sym(&prng, 0.1f));
        for (int i = 0; i < H; i++)
            x[i] = num_to_bf16(base_random_sym(&prng, 1));
        assert_int_equal(hmoe_group_create(&group_options, &group), HMOE_OK);
        assert_int_equal(hmoe_plan_create(group, &options, &plan), HMOE_OK);
        assert_int_equal(hmoe_forward(plan, &call), HMOE_OK);
        call.layer = (struct hmoe_layer){.up_proj = ups + up * (E - 1), .down_proj = downs + down * (E - 1)};
        id = 0; /* the same expert, now the first of its array */
        call.y = near_y;
        assert_int_equal(hmoe_forward(plan, &call), HMOE_OK);
        assert_memory_equal(y, near_y, sizeof y);
        for (int i = 0, zeros = 0; i < H; i++)
            assert_true((zeros += (y[i] & 0x7fff) == 0) < H / 2);
        assert_int_equal(hmoe_plan_destroy(plan), HMOE_OK);
        assert_int_equal(hmoe_group_destroy(group), HMOE_OK);
        base_unmap(ups, up * E * 2, 0);
        base_unmap(downs, down * E * 2, 0);
    }
}

static void large_sizes(void **state)
{
    (void)state;
    for (int turn = 0; turn < 4; turn++) {
        struct moe_case c = plain;
        c.hidden = turn % 2 ? 8192 : 33;
        c.inner = turn % 2 ? 33 : 8192;
        c.layout = (enum hmoe_layout)(turn / 2);
        c.experts = 2;
        c.topk = 1;
        c.tokens[0] = 2;
        c.workers = 2;
        case_check(&c);
    }
}

/* ---- a transport that delivers signals late and out of order */

enum { LATE_MAX = 4096 };

struct late_signal {
    struct comm_window *window;
    int rank;
    size_t offset;
    uint64_t add;
};

static struct {
    pthread_mutex_t lock;
    struct late_signal signals[LATE_MAX];
    int count, stop;
    int64_t delivered, overtaken;
} late = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void late_signal(struct comm_window *window, int rank, size_t offset, uint64_t add)
{
    pthread_mutex_lock(&late.lock);
    if (late.count < LATE_MAX)
        late.signals[late.count++] = (struct late_signal){window, rank, offset, add};
    else
        abort();
    pthread_mutex_unlock(&late.lock);
}

/* Delivers a random one of what has been signalled. */
static bool deliver(struct base_prng *prng)
{
    struct late_signal one = {.window = NULL};

    pthread_mutex_lock(&late.lock);
    if (late.count) {
        int at = (int)base_random_below(prng, late.count);
        late.overtaken += at > 0;
        late.delivered++;
        one = late.signals[at];
        memmove(&late.signals[at], &late.signals[at + 1], (size_t)(--late.count - at) * sizeof one);
    }
    pthread_mutex_unlock(&late.lock);
    if (one.window)
        comm_threads.signal(one.window, one.rank, one.offset, one.add);
    return one.window != NULL;
}

static void *postman(void *unused)
{
    struct base_prng prng = {99};
    int stop = 0;

    (void)unused;
    while (!stop) {
        usleep(200);
        while (deliver(&prng) && base_random_below(&prng, 3))
            ;
        pthread_mutex_lock(&late.lock);
        stop = late.stop && !late.count;
        pthread_mutex_unlock(&late.lock);
    }
    return NULL;
}

static int late_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct comm_transport adversary = comm_threads;
    struct case_bed bed;
    char all[CASE_RANKS_MAX];

    adversary.signal = late_signal;
    CHECK(!case_open(c, boot, &bed));
    bed.group->comm.transport = &adversary;
    for (int turn = 0; turn < 40; turn++) {
        struct hmoe_call calls[2];
        for (int i = 0; i < 2; i++) {
            calls[i] = case_call(c, boot->rank);
            CHECK(hmoe_forward_start(bed.plan, &calls[i]) == HMOE_OK);
        }
        CHECK(hmoe_call_wait(&calls[0]) == HMOE_OK && hmoe_call_wait(&calls[1]) == HMOE_OK);
        CHECK(!case_differs(c, boot->rank));
    }
    for (;;) { /* every signal is out before windows go */
        int left;
        boot->allgather(boot->allgather_context, "", all, 1);
        pthread_mutex_lock(&late.lock);
        left = late.count;
        pthread_mutex_unlock(&late.lock);
        all[0] = (char)left;
        boot->allgather(boot->allgather_context, &(char){left != 0}, all, 1);
        left = 0;
        for (int r = 0; r < boot->ranks; r++)
            left += all[r];
        if (!left)
            break;
        usleep(1000);
    }
    bed.group->comm.transport = &comm_threads;
    return case_close(&bed);
}

static void late_signals(void **state)
{
    static const char *const knobs[] = {NULL, "path=bulk"};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct moe_case c = plain;
        pthread_t thread;
        c.ranks = 3;
        c.experts = 9;
        c.calls_max = 2;
        c.knobs = knobs[i];
        case_make(&c);
        late.stop = 0;
        late.delivered = late.overtaken = 0;
        pthread_create(&thread, NULL, postman, NULL);
        assert_int_equal(hmoe_launch(HMOE_VIA_THREADS, 3, late_rank, &c), HMOE_OK);
        pthread_mutex_lock(&late.lock);
        late.stop = 1;
        pthread_mutex_unlock(&late.lock);
        pthread_join(thread, NULL);
        assert_true(late.overtaken > 10); /* the case occurred */
        case_free(&c);
    }
}

/* ---- waves: with rows that arrive slowly, an expert's first rows are multiplied before its last are there */

static void slow_signal(struct comm_window *window, int rank, size_t offset, uint64_t add)
{
    usleep(3000);
    comm_shm.signal(window, rank, offset, add);
}

/* First gmm1 on rank 0 against its last arrival, ns. */
static int64_t head_start(const struct trace *trace)
{
    int64_t first = INT64_MAX, last = 0;

    for (int r = 0; r < trace->rings; r++)
        for (uint64_t i = 0; i < trace->ring[r].written; i++) {
            const struct trace_event *event = &trace->ring[r].events[i];
            if (event->kind == TRACE_GMM1 && event->start_ns < first)
                first = event->start_ns;
            if (event->kind == TRACE_DISPATCH && event->start_ns > last)
                last = event->start_ns;
        }
    return last - first;
}

static int wave_rank(const struct hmoe_boot *boot, void *argument)
{
    struct moe_case *c = argument;
    struct comm_transport slow = comm_shm;
    struct hmoe_call call = case_call(c, boot->rank);
    struct case_bed bed;

    slow.signal = slow_signal;
    CHECK(!case_open(c, boot, &bed));
    if (boot->rank == 1)
        bed.group->comm.transport = &slow;
    CHECK(hmoe_trace_start(bed.group) == HMOE_OK);
    CHECK(hmoe_forward(bed.plan, &call) == HMOE_OK);
    CHECK(hmoe_trace_stop(bed.group) == HMOE_OK);
    bed.group->comm.transport = &comm_shm;
    CHECK(!case_differs(c, boot->rank));
    if (boot->rank == 0 && strstr(c->knobs, "wave=on"))
        CHECK(head_start(&bed.group->trace) > 0);
    if (boot->rank == 0 && strstr(c->knobs, "wave=off"))
        CHECK(head_start(&bed.group->trace) < 0);
    return case_close(&bed);
}

static void waves_start_early(void **state)
{
    static const char *const knobs[] = {"wave=on,chunk_tokens=8,block_rows=16",
                                        "wave=off,chunk_tokens=8,block_rows=16"};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct moe_case c = plain;
        c.ranks = 2;
        c.experts = 2;
        c.topk = 1;
        c.routing = ROUTE_ZEROS; /* one long expert on rank 0; all rows of rank 1 travel */
        c.tokens[0] = 0;
        c.tokens[1] = 128;
        c.knobs = knobs[i];
        case_make(&c);
        assert_int_equal(hmoe_launch(HMOE_VIA_PROCESSES, 2, wave_rank, &c), HMOE_OK);
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starved_ranks), cmocka_unit_test(twenty_times), cmocka_unit_test(ids_outside),
        cmocka_unit_test(the_permutation_is_a_bijection), cmocka_unit_test(y_is_published_once),
        cmocka_unit_test(off_by_one_element), cmocka_unit_test(far_offsets), cmocka_unit_test(large_sizes),
        cmocka_unit_test(late_signals), cmocka_unit_test(waves_start_early),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
