/* Backward against the oracle, bit for bit: routings, ranks, transports, engines, modes, lives of a saved state. */
#include "back_case.h"

static struct back_case small(void)
{
    return (struct back_case){.c = {.hidden = 48, .inner = 40, .experts = 8, .topk = 3, .ranks = 1, .dtype = HMOE_BF16,
                                    .workers = 2, .tokens = {37, 12, 0, 23}, .seed = 1}};
}

static void test_dtypes_layouts(void **state)
{
    (void)state;
    for (int i = 0; i < 24; i++) {
        struct back_case b = small();
        b.c.dtype = (enum hmoe_dtype)(i % 3);
        b.c.layout = (enum hmoe_layout)(i / 3 % 2);
        b.c.gating = (enum hmoe_gating)(i / 6 % 2);
        b.dw_type = i / 12 ? HMOE_F32 : b.c.dtype;
        b.dw_mode = (enum hmoe_dw_mode)(i / 3 % 2);
        b.c.biased = i % 4 == 1;
        b.c.weights_type = (enum hmoe_dtype)(i % 3);
        b.c.masked = 0.2;
        b.c.seed = (uint64_t)i + 1;
        back_check(&b);
    }
}

static void test_ranks(void **state)
{
    static const int ranks[] = {1, 2, 4};

    (void)state;
    for (int i = 0; i < 12; i++) {
        struct back_case b = small();
        b.c.ranks = ranks[i % 3];
        b.c.via = i / 3 % 2 ? HMOE_VIA_PROCESSES : HMOE_VIA_THREADS;
        b.c.workers = 1 + i / 6;
        b.split = i / 6;
        b.keep_rows = i % 2;
        b.c.masked = 0.1;
        b.c.calls = 2;
        b.c.biased = i % 2;
        b.c.seed = 100 + (uint64_t)i;
        back_check(&b);
    }
}

static void test_routings(void **state)
{
    (void)state;
    for (int r = ROUTE_UNIFORM; r <= ROUTE_NONE; r++)
        for (int ranks = 1; ranks <= 4; ranks += 3) {
            struct back_case b = small();
            b.c.ranks = ranks;
            b.c.routing = (enum case_routing)r;
            b.c.seed = 200 + (uint64_t)r;
            b.c.tokens[0] = 300;
            b.c.layout = (enum hmoe_layout)(r % 2);
            back_check(&b);
        }
}

static void test_saved_options(void **state)
{
    (void)state;
    for (int i = 0; i < 16; i++) {
        struct back_case b = small();
        b.keep_rows = i & 1;
        b.recompute = i >> 1 & 1;
        b.split = i >> 2 & 1;
        b.c.ranks = i >> 3 ? 2 : 1;
        b.c.via = i & 1 ? HMOE_VIA_PROCESSES : HMOE_VIA_THREADS;
        b.outstanding = 3;
        b.c.calls = 2;
        b.c.activation = (struct hmoe_activation){1.702f, 0.5f, 1.0f};
        b.c.seed = 300 + (uint64_t)i;
        back_check(&b);
    }
}

static void test_knobs(void **state)
{
    static const char *const knobs[] = {"path=bulk", "permute_fusion=off", "expert_block=off", "wave=off",
                                        "block_rows=5", "strips=3", "block_rows=16,strips=2,counter_start=-3",
                                        "vector_workers=1", "engine=scalar", "shared_fusion=off"};

    (void)state;
    for (size_t i = 0; i < 2 * sizeof knobs / sizeof knobs[0]; i++) {
        struct back_case b = small();
        b.c.knobs = knobs[i / 2];
        b.c.ranks = 1 + (int)(i % 2);
        b.recompute = (int)(i / 2 % 2);
        b.split = (int)(i / 4 % 2);
        b.c.shared = 1;
        b.c.shared_inner = 33;
        b.c.tokens[0] = 150;
        b.c.seed = 400 + (uint64_t)i;
        back_check(&b);
    }
}

static void test_shared(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        struct back_case b = small();
        b.c.shared = 1 + i % 3;
        b.c.shared_inner = i % 2 ? 70 : 16;
        b.c.ranks = i < 6 ? 1 : 4;
        b.c.via = i % 2 ? HMOE_VIA_PROCESSES : HMOE_VIA_THREADS;
        b.split = i / 3 % 2;
        b.dw_mode = (enum hmoe_dw_mode)(i % 2);
        b.c.layout = (enum hmoe_layout)(i / 2 % 2);
        b.c.calls = 2;
        b.c.masked = 0.3;
        b.c.seed = 500 + (uint64_t)i;
        back_check(&b);
    }
}

static void test_unwanted(void **state)
{
    (void)state;
    for (int i = 0; i < 9; i++) {
        struct back_case b = small();
        b.unwanted = i == 8 ? 0xff : 1 << i;
        b.c.biased = 1;
        b.c.shared = 1;
        b.c.shared_inner = 20;
        b.c.ranks = 2;
        b.c.seed = 600 + (uint64_t)i;
        back_check(&b);
    }
}

static void test_every_few_tokens(void **state)
{
    (void)state;
    for (int64_t t = 1; t <= 40; t++) {
        struct back_case b = small();
        b.c.tokens[0] = t;
        b.c.seed = 700 + (uint64_t)t;
        back_check(&b);
    }
}

static void test_special_dy(void **state)
{
    struct back_case b = small();

    (void)state;
    b.special_dy = 1;
    b.c.special = 1;
    back_check(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes_layouts), cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_routings),       cmocka_unit_test(test_saved_options),
        cmocka_unit_test(test_knobs),          cmocka_unit_test(test_shared),
        cmocka_unit_test(test_unwanted),       cmocka_unit_test(test_every_few_tokens),
        cmocka_unit_test(test_special_dy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
