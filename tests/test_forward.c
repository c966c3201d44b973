/* The fused forward against the oracle, bit for bit: shapes, routings, ranks, engines, both paths, every knob. */
#include "moe_case.h"

static const struct moe_case plain = {.hidden = 64, .inner = 48, .experts = 8, .topk = 3, .ranks = 1,
                                      .dtype = HMOE_BF16, .tokens = {20, 20, 20, 20}, .seed = 1, .workers = 2,
                                      .calls = 2};

static void one_rank(void **state)
{
    struct moe_case c = plain;
    (void)state;
    case_check(&c);
}

static void dtypes_layouts_gatings(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        struct moe_case c = plain;
        c.dtype = (enum hmoe_dtype)(i % 3);
        c.layout = (enum hmoe_layout)(i / 3 % 2);
        c.gating = (enum hmoe_gating)(i / 6);
        c.biased = i % 2;
        c.ids_type = (enum hmoe_index)(i % 2);
        c.weights_type = (enum hmoe_dtype)(i / 2 % 3);
        c.activation = i % 4 == 3 ? (struct hmoe_activation){1.702f, 0.5f, 1.0f} : (struct hmoe_activation){0};
        c.special = 1;
        c.seed = (uint64_t)(100 + i);
        case_check(&c);
    }
}

static void ranks_as_threads(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int routing = ROUTE_UNIFORM; routing <= ROUTE_NONE; routing++) {
            struct moe_case c = plain;
            c.experts = 12;
            c.ranks = ranks;
            c.workers = 1 + routing % 2;
            c.routing = (enum case_routing)routing;
            c.masked = routing % 3 == 0 ? 0.3 : 0;
            c.seed = (uint64_t)(ranks * 100 + routing);
            c.tokens[routing % ranks] = 61;
            case_check(&c);
        }
}

static void ranks_as_processes(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int routing = ROUTE_UNIFORM; routing <= ROUTE_NONE; routing += 2) {
            struct moe_case c = plain;
            c.experts = 12;
            c.ranks = ranks;
            c.workers = 1;
            c.via = HMOE_VIA_PROCESSES;
            c.routing = (enum case_routing)routing;
            c.knobs = routing % 4 ? "chunk_tokens=5" : NULL;
            c.masked = 0.1;
            c.seed = (uint64_t)(ranks * 1000 + routing);
            c.tokens[ranks - 1] = 130;
            case_check(&c);
        }
}

/* Every knob that may change the order of work, on threads and on processes. */
static void knobs(void **state)
{
    static const char *const texts[] = {"path=bulk", "wave=off", "expert_block=off", "permute_fusion=off",
        "wave=off,expert_block=off,permute_fusion=off", "block_rows=1", "block_rows=7", "strips=3", "run_tokens=1",
        "run_tokens=100", "vector_workers=1", "spin_ns=0", "huge_pages=off", "strips=2,permute_fusion=off",
        "chunk_tokens=1", "path=bulk,block_rows=3", "counter_start=-5", "counter_start=4294967290",
        "engine=scalar", "block_rows=5,wave=off", "block_rows=5,expert_block=off"};

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int kind = 0; kind < 3; kind++) {
            struct moe_case c = plain;
            c.ranks = kind ? 2 : 1;
            c.via = kind == 2 ? HMOE_VIA_PROCESSES : HMOE_VIA_THREADS;
            c.knobs = texts[i];
            c.routing = ROUTE_LOGNORMAL;
            c.tokens[0] = 50;
            c.calls = 3;
            c.seed = i * 10 + (uint64_t)kind;
            case_check(&c);
        }
}

static void engines(void **state)
{
    (void)state;
    for (int i = 0; kern_engines[i]; i++) {
        char text[64];
        struct moe_case c = plain;
        if (!kern_engines[i]->present())
            continue;
        snprintf(text, sizeof text, "engine=%s", kern_engines[i]->name);
        c.knobs = text;
        c.hidden = 100;
        c.inner = 33;
        c.layout = (enum hmoe_layout)(i % 2);
        c.tokens[0] = 140;
        c.routing = ROUTE_TWO_HOT;
        case_check(&c);
    }
}

static void every_t(void **state)
{
    (void)state;
    for (int64_t t = 1; t <= 257; t++) {
        struct moe_case c = plain;
        c.hidden = 33;
        c.inner = 34;
        c.tokens[0] = t;
        c.calls = 1;
        c.layout = (enum hmoe_layout)(t % 2);
        c.seed = (uint64_t)t;
        case_check(&c);
    }
}

static void sizes(void **state)
{
    static const int64_t sizes[] = {1, 33, 100, 768, 1536, 2880};

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int turn = 0; turn < 2; turn++) {
            struct moe_case c = plain;
            c.hidden = turn ? sizes[i] : 40;
            c.inner = turn ? 40 : sizes[i];
            c.experts = 3;
            c.topk = 2;
            c.tokens[0] = 3;
            c.layout = (enum hmoe_layout)(i % 2);
            case_check(&c);
        }
}

/* R=4: rank 0 has no tokens, all slots of the others go to its experts: it receives 72 rows. */
static void no_tokens_all_experts(void **state)
{
    (void)state;
    for (int via = 0; via < 2; via++) {
        struct moe_case c = plain;
        c.ranks = 4;
        c.experts = 24;
        c.topk = 6;
        c.routing = ROUTE_FIRST_RANK;
        c.via = (enum hmoe_via)via;
        c.tokens[0] = 0;
        c.tokens[1] = c.tokens[2] = c.tokens[3] = 4;
        c.workers = 1;
        case_check(&c);
    }
}

static void no_tokens(void **state)
{
    (void)state;
    for (int mask = 0; mask < 8; mask++)
        for (int via = 0; via < 2; via++) {
            struct moe_case c = plain;
            c.ranks = 3;
            c.experts = 9;
            c.via = (enum hmoe_via)via;
            c.workers = 1;
            for (int r = 0; r < 3; r++)
                c.tokens[r] = mask >> r & 1 ? 7 : 0;
            case_check(&c);
        }
}

static void many_experts(void **state)
{
    static const int experts[] = {512, 513};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct moe_case c = plain;
        c.hidden = c.inner = 16;
        c.experts = experts[i];
        c.ranks = i ? 3 : 4;
        c.workers = 1;
        c.topk = 8;
        case_check(&c);
    }
}

static void topk_extremes(void **state)
{
    static const int topk[] = {1, 8, 16};

    (void)state;
    for (int i = 0; i < 3; i++) {
        struct moe_case c = plain;
        c.topk = topk[i];
        c.routing = topk[i] > c.experts ? ROUTE_DUPLICATES : ROUTE_UNIFORM;
        case_check(&c);
    }
}

/* 16 ranks, nearly all tokens choosing the same K experts; more threads than this machine has CPUs. */
static void sixteen_ranks(void **state)
{
    struct moe_case c = plain;

    (void)state;
    c.ranks = 16;
    c.experts = 32;
    c.hidden = 24;
    c.inner = 16;
    c.workers = 1;
    c.routing = ROUTE_ALIKE;
    for (int r = 0; r < 16; r++)
        c.tokens[r] = 144;
    case_check(&c);
}

static void long_batches(void **state)
{
    static const int64_t tokens[] = {257, 1538, 4224};

    (void)state;
    for (int i = 0; i < 3; i++) {
        struct moe_case c = plain;
        c.hidden = 16;
        c.inner = 16;
        c.tokens[0] = tokens[i];
        c.routing = i == 1 ? ROUTE_ONE_HOT : ROUTE_UNIFORM;
        case_check(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank), cmocka_unit_test(dtypes_layouts_gatings), cmocka_unit_test(ranks_as_threads),
        cmocka_unit_test(ranks_as_processes), cmocka_unit_test(knobs), cmocka_unit_test(engines),
        cmocka_unit_test(every_t), cmocka_unit_test(sizes), cmocka_unit_test(no_tokens_all_experts),
        cmocka_unit_test(no_tokens), cmocka_unit_test(many_experts), cmocka_unit_test(topk_extremes),
        cmocka_unit_test(sixteen_ranks), cmocka_unit_test(long_batches),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
