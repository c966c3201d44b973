/* dact and outer of every engine that runs here, against plain loops: the same bits for every shape, dtype, layout,
 * gating, mode and strip, and the same as those committed below, on any machine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "kern_backward.h"

static const int dims[] = {1, 2, 15, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 130};

static int hash_differs(const char *what, uint64_t seed, uint64_t own, const uint64_t *hash)
{
    if (hash == NULL || *hash == own)
        return 0;
    printf("another checksum of %s by the plain loops, seed %llu: 0x%016llx\n", what, (unsigned long long)seed,
           (unsigned long long)own);
    return 1;
}

static bool runs(const struct kern_engine *engine, enum hmoe_dtype dtype)
{
    return (engine->dtypes >> dtype & 1) != 0 && engine->present();
}

/* The case on every engine present that takes it: the number of failures. The plain loops' checksum must be *hash,
 * unless that is NULL. */
static int dact_on_engines(const struct kern_case *c, const uint64_t *hash)
{
    uint64_t before = base_fp_enter();
    struct dact_want want;
    int differ;

    dact_want_init(&want, c);
    differ = hash_differs("dact", c->seed, dact_result_hash(0xcbf29ce484222325u, &want.result), hash);
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        if (runs(*e, c->dtype) && c->rows <= (*e)->rows_most)
            differ += dact_differs(&want, *e);
    dact_want_fini(&want);
    base_fp_leave(before);
    return differ;
}

static int outer_on_engines(const struct outer_case *c, const uint64_t *hash)
{
    uint64_t before = base_fp_enter();
    struct outer_want want;
    int differ;

    outer_want_init(&want, c);
    differ = hash_differs("outer", c->seed, hash_bytes(0xcbf29ce484222325u, want.out.data, want.out.bytes), hash);
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        if (runs(*e, c->dtype))
            differ += outer_differs(&want, *e);
    outer_want_fini(&want);
    base_fp_leave(before);
    return differ;
}

/* ------------------------------------------------- dact */

static struct kern_case random_dact(struct base_prng *prng, int special)
{
    struct kern_case c = {.special = special, .seed = base_random(prng)};

    c.hidden = dims[base_random_below(prng, 14)];
    c.inner = dims[base_random_below(prng, 14)];
    c.rows = 1 + (int)base_random_below(prng, 40);
    c.dtype = (enum hmoe_dtype)base_random_below(prng, 3);
    c.layout = (enum hmoe_layout)base_random_below(prng, 2);
    c.gating = (enum hmoe_gating)base_random_below(prng, 2);
    c.clamped = (int)base_random_below(prng, 2);
    c.strip = (int)base_random_below(prng, 3) * KERN_STRIP;
    return c;
}

static void test_dact_random(void **state)
{
    struct base_prng prng = {20270101};
    int differ = 0;

    (void)state;
    for (int i = 0; i < 400; i++) {
        struct kern_case c = random_dact(&prng, i % 2);
        differ += dact_on_engines(&c, NULL);
    }
    assert_int_equal(differ, 0);
}

/* every number of register groups, full and not, up to the tallest block */
static void test_dact_heights(void **state)
{
    int differ = 0;

    (void)state;
    for (int rows = 1; rows <= 128; rows += rows < 40 ? 1 : 11)
        for (int layout = 0; layout < 2; layout++) {
            struct kern_case c = {.hidden = 65, .inner = 33, .rows = rows, .dtype = HMOE_BF16, .seed = (uint64_t)rows};
            c.layout = (enum hmoe_layout)layout;
            c.gating = (enum hmoe_gating)(rows % 3 == 0);
            differ += dact_on_engines(&c, NULL);
        }
    assert_int_equal(differ, 0);
}

/* long sums and wide strips, as of a real layer */
static void test_dact_widths(void **state)
{
    static const struct kern_case cases[] = {
        {.hidden = 1024, .inner = 288, .rows = 1, .dtype = HMOE_BF16, .layout = HMOE_KN},
        {.hidden = 768, .inner = 100, .rows = 3, .dtype = HMOE_F16, .layout = HMOE_KN, .gating = HMOE_INTERLEAVED},
        {.hidden = 320, .inner = 768, .rows = 2, .dtype = HMOE_F32, .layout = HMOE_NK, .clamped = 1},
        {.hidden = 520, .inner = 1200, .rows = 128, .dtype = HMOE_BF16, .layout = HMOE_NK},
        {.hidden = 258, .inner = 640, .rows = 37, .dtype = HMOE_F16, .layout = HMOE_KN, .gating = HMOE_INTERLEAVED},
    };
    int differ = 0;

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        differ += dact_on_engines(&cases[i], NULL);
    assert_int_equal(differ, 0);
}

/* a part's bytes are as before: columns [from, to) of each row */
static void assert_columns(const struct kern_case *c, const struct guarded *now, const struct guarded *before,
                           int64_t columns, int64_t from, int64_t to)
{
    size_t bytes = num_bytes(c->dtype);

    for (int64_t row = 0; row < c->rows; row++) {
        size_t start = (size_t)(row * columns + from) * bytes;
        assert_memory_equal(now->data + start, before->data + start, (size_t)(to - from) * bytes);
    }
}

/* a strip writes its own columns only, and its own blocks of the sums */
static void dact_alone(const struct kern_engine *engine, const struct kern_case *c)
{
    struct dact_data d;
    struct dact_result r, before;
    void *dy, *scratch;

    dact_data_init(&d, c);
    r = dact_result_create(c, &d);
    before = dact_result_create(c, &d);
    engine->thread_begin();
    dy = dact_pack(engine, c, &d);
    scratch = aligned(engine->scratch_bytes(&d.layer));
    engine->dact(&(struct kern_dact){&d.layer, d.down.data, dy, c->rows, 64, 128, (float *)(void *)d.weight.data,
                                     r.gate_up.data, r.a.data, (float *)(void *)r.sums.data, scratch});
    engine->thread_end();
    assert_columns(c, &r.a, &before.a, 192, 0, 64);
    assert_columns(c, &r.a, &before.a, 192, 128, 192);
    assert_columns(c, &r.gate_up, &before.gate_up, 384, 0, c->gating == HMOE_HALVES ? 64 : 128);
    assert_columns(c, &r.gate_up, &before.gate_up, 384, c->gating == HMOE_HALVES ? 320 : 256, 384);
    if (c->gating == HMOE_HALVES)
        assert_columns(c, &r.gate_up, &before.gate_up, 384, 128, 256);
    for (int64_t i = 0; i < c->rows * 6; i++)
        assert_true((memcmp(r.sums.data + 4 * i, before.sums.data + 4 * i, 4) == 0) == (i % 6 / 2 != 1));
    dact_data_fini(&d);
    dact_result_destroy(&r);
    dact_result_destroy(&before);
    free(dy);
    free(scratch);
}

static void test_dact_strips_alone(void **state)
{
    uint64_t fp = base_fp_enter();

    (void)state;
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        for (int kind = 0; kind < 12; kind++) {
            struct kern_case c = {.hidden = 100, .inner = 192, .rows = kind % 2 ? 33 : 3, .seed = 3};
            c.dtype = (enum hmoe_dtype)(kind / 4);
            c.layout = (enum hmoe_layout)(kind / 2 % 2);
            c.gating = (enum hmoe_gating)(kind % 2);
            if (runs(*e, c.dtype))
                dact_alone(*e, &c);
        }
    base_fp_leave(fp);
}

/* A block of the sums that underflows to -0 stays so when it is whole; the last one's missing terms make it +0. */
static void test_dact_missing_terms(void **state)
{
    uint64_t before = base_fp_enter();
    float down[64], gate_up[128], a[64], dy = 0x1p-100f, weight = 1.0f, sums[2];

    (void)state;
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        for (int inner = 1; inner <= 64 && runs(*e, HMOE_F32); inner++) {
            struct kern_case c = {.hidden = 1, .inner = inner, .rows = 1, .dtype = HMOE_F32};
            struct dact_data d = {.layer = case_layer(&c), .dy.data = (char *)&dy};
            void *packed = dact_pack(*e, &c, &d), *scratch = aligned((*e)->scratch_bytes(&d.layer));
            for (int i = 0; i < inner; i++) {
                down[i] = gate_up[i] = 1.0f;
                gate_up[inner + i] = -0x1p-100f;
            }
            (*e)->dact(&(struct kern_dact){&d.layer, down, packed, 1, 0, inner, &weight, gate_up, a, sums, scratch});
            assert_int_equal(num_bits(sums[0]), inner >= 32 ? 0x80000000 : 0);
            if (inner > 32)
                assert_int_equal(num_bits(sums[1]), inner == 64 ? 0x80000000 : 0);
            free(packed);
            free(scratch);
        }
    base_fp_leave(before);
}

/* ------------------------------------------------- outer */

static struct outer_case random_outer(struct base_prng *prng, int special)
{
    static const int counts[] = {0, 1, 31, 32, 33, 62, 63, 64, 65, 96, 97, 128, 129, 200};
    struct outer_case c = {.special = special, .seed = base_random(prng)};
    int pick = (int)base_random_below(prng, 54);

    c.count = pick < 40 ? pick + 1 : counts[pick - 40];
    c.left = dims[base_random_below(prng, 14)];
    c.right = dims[base_random_below(prng, 14)];
    c.dtype = (enum hmoe_dtype)base_random_below(prng, 3);
    c.out_f32 = (int)base_random_below(prng, 2);
    c.accumulate = (int)base_random_below(prng, 2);
    c.scaled = (int)base_random_below(prng, 4);
    c.strip = (int)base_random_below(prng, 3) * KERN_STRIP;
    c.skipped = (int)base_random_below(prng, 3);
    return c;
}

static void test_outer_random(void **state)
{
    struct base_prng prng = {20270102};
    int differ = 0, zeros = 0, skipped = 0, aligned_rows = 0;

    (void)state;
    for (int i = 0; i < 600; i++) {
        struct outer_case c = random_outer(&prng, i % 2);
        differ += outer_on_engines(&c, NULL);
        zeros += c.count == 0 && !c.accumulate;
        skipped += c.strip != 0 && c.skipped != 0 && c.left > c.strip;
        aligned_rows += c.count > 0 && c.right % 32 == 0 && !c.accumulate && (c.seed & 1) != 0;
    }
    assert_int_equal(differ, 0);
    assert_true(zeros > 0 && skipped > 20 && aligned_rows > 20);
}

/* every small height, and those around a run's and a block's end, where the missing terms are */
static void test_outer_heights(void **state)
{
    int differ = 0;

    (void)state;
    for (int count = 1; count <= 300; count += count < 40 ? 1 : 13)
        for (int kind = 0; kind < 3; kind++) {
            struct outer_case c = {.count = count, .left = 33, .right = 65, .dtype = (enum hmoe_dtype)kind,
                                   .scaled = kind, .out_f32 = count % 2, .seed = (uint64_t)count};
            differ += outer_on_engines(&c, NULL);
        }
    assert_int_equal(differ, 0);
}

/* Where missing terms show: three blocks whose first two leave -0 and whose third underflows to -0 in both chains. One
 * missing term makes it +0; without any -0 stays. */
static void test_outer_missing_terms(void **state)
{
    uint64_t before = base_fp_enter();
    float left[96], right[96];

    (void)state;
    for (int r = 0; r < 96; r++) {
        left[r] = r >= 64 ? 0x1p-100f : r % 32 == 0 ? 1.0f : 0.0f;
        right[r] = r >= 64 ? -0x1p-100f : r == 0 ? 0x1.8p-126f : r == 32 ? -0x1.cp-126f : 0.0f;
    }
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        for (int count = 65; count <= 96 && runs(*e, HMOE_F32); count++) {
            const void *rows[2][96];
            struct kern_layer any = {1, 1, HMOE_F32, HMOE_KN, HMOE_HALVES, {1.0f, INFINITY, 0.0f}};
            void *scratch = aligned((*e)->scratch_bytes(&any));
            float got = 1.0f, want = plain_chain(left, right, 1, count);
            assert_int_equal(num_bits(want), count == 96 ? 0x80000000 : 0);
            for (int r = 0; r < count; r++) {
                rows[0][r] = &left[r];
                rows[1][r] = &right[r];
            }
            (*e)->outer(&(struct kern_outer){HMOE_F32, {rows[0], NULL, 1}, {rows[1], NULL, 1}, count, 0, 1, HMOE_F32,
                                             false, &got, scratch});
            assert_memory_equal(&got, &want, sizeof got);
            free(scratch);
        }
    base_fp_leave(before);
}

/* several tiles, kept accumulators, wide strips, long streams */
static void test_outer_large(void **state)
{
    static const struct outer_case cases[] = {
        {.count = 5, .left = 1100, .right = 96, .dtype = HMOE_BF16, .seed = 1},
        {.count = 1, .left = 70, .right = 2100, .dtype = HMOE_BF16, .seed = 1},
        {.count = 2, .left = 70, .right = 1056, .dtype = HMOE_F32, .accumulate = 1, .seed = 1},
        {.count = 64, .left = 300, .right = 224, .dtype = HMOE_BF16, .scaled = 2, .seed = 1},
        {.count = 130, .left = 192, .right = 1120, .dtype = HMOE_BF16, .strip = 128, .seed = 1},
        {.count = 161, .left = 140, .right = 1100, .dtype = HMOE_F16, .scaled = 2, .accumulate = 1, .seed = 2},
        {.count = 100, .left = 257, .right = 1060, .dtype = HMOE_BF16, .out_f32 = 1, .accumulate = 1, .seed = 3},
        {.count = 1000, .left = 130, .right = 64, .dtype = HMOE_BF16, .out_f32 = 1, .seed = 4},
        {.count = 0, .left = 300, .right = 1001, .dtype = HMOE_BF16, .strip = 64, .skipped = 2, .seed = 4},
    };
    int differ = 0;

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        differ += outer_on_engines(&cases[i], NULL);
    assert_int_equal(differ, 0);
}

/* ------------------------------------------------- committed checksums */

/* Made by the plain loops; equal on every engine and CPU (test_kern.c names what is left out). */
static const struct {
    struct kern_case c;
    uint64_t hash;
} dact_sums[] = {
#include "kern_dact_sums.inc"
};

static const struct {
    struct outer_case c;
    uint64_t hash;
} outer_sums[] = {
#include "kern_outer_sums.inc"
};

static void test_committed_sums(void **state)
{
    int differ = 0;

    (void)state;
    for (size_t i = 0; i < sizeof dact_sums / sizeof dact_sums[0]; i++)
        differ += dact_on_engines(&dact_sums[i].c, &dact_sums[i].hash);
    for (size_t i = 0; i < sizeof outer_sums / sizeof outer_sums[0]; i++)
        differ += outer_on_engines(&outer_sums[i].c, &outer_sums[i].hash);
    assert_int_equal(differ, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dact_random),   cmocka_unit_test(test_dact_heights),
        cmocka_unit_test(test_dact_widths),   cmocka_unit_test(test_dact_strips_alone),
        cmocka_unit_test(test_dact_missing_terms),
        cmocka_unit_test(test_outer_random),  cmocka_unit_test(test_outer_heights),
        cmocka_unit_test(test_outer_large),   cmocka_unit_test(test_outer_missing_terms),
        cmocka_unit_test(test_committed_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
