/* The matrix-tile engine, emulated everywhere with AVX-512 and real where the CPU has tiles, against the plain loops:
 * each way through it (layouts, gatings, heights, widths, ragged ends), and the one instruction it is built on. */
#define AMX_EMULATED
#include "kern/amx_tiles.h"

#include "kern/amx.h"
#include "kern_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <pthread.h>

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* With all outputs against the plain loops, then without the optional ones against that, as inference calls it: SwiGLU
 * then runs between the products of tall blocks. */
static int differs(const struct kern_engine *engine, const struct kern_case *c)
{
    uint64_t before = base_fp_enter();
    struct kern_result full = result_create(c);
    struct kern_result bare = {.out = aligned(full.out_bytes)};
    struct kern_data d;
    int wrong = case_differs(engine, c, NULL);

    data_init(&d, c);
    run_engine(engine, c, &d, &full);
    run_engine(engine, c, &d, &bare);
    if (memcmp(full.out, bare.out, full.out_bytes) != 0) {
        case_print("differs without optional outputs", engine, c);
        wrong++;
    }
    data_fini(&d);
    result_destroy(&full);
    free(bare.out);
    base_fp_leave(before);
    return wrong;
}

/* The engines that run here. */
static int engines(const struct kern_engine *list[2])
{
    int count = 0;
    if (kern_amx_emulated.present())
        list[count++] = &kern_amx_emulated;
    if (kern_amx.present())
        list[count++] = &kern_amx;
    return count;
}

/* Every engine, layout and gating for one case; skips where no engine runs. */
static int wrong_anywhere(struct kern_case c)
{
    const struct kern_engine *list[2];
    int count = engines(list), wrong = 0;

    if (count == 0)
        skip();
    c.dtype = HMOE_BF16;
    for (int i = 0; i < count; i++)
        for (int which = 0; which < 4; which++) {
            c.layout = which & 1 ? HMOE_NK : HMOE_KN;
            c.gating = which & 2 ? HMOE_INTERLEAVED : HMOE_HALVES;
            wrong += differs(list[i], &c);
        }
    return wrong;
}

/* ------------------------------------------------- the tests */

static void test_every_small_height(void **state)
{
    int wrong = 0;
    (void)state;
    for (int rows = 1; rows <= 40; rows++)
        wrong += wrong_anywhere((struct kern_case){.hidden = 36, .inner = 40, .rows = rows, .seed = (uint64_t)rows});
    assert_int_equal(wrong, 0);
}

/* Each side of every edge between two ways of computing. */
static void test_tall_blocks(void **state)
{
    static const int heights[] = {47, 64, 65, 127, 128, 129, 145, 256};
    int wrong = 0;
    (void)state;
    for (size_t i = 0; i < COUNT(heights); i++)
        wrong += wrong_anywhere((struct kern_case){.hidden = 64 + 32 * (int64_t)(i % 2), .inner = 48,
                                                   .rows = heights[i], .biased = (int)i & 1, .seed = i});
    assert_int_equal(wrong, 0);
}

static void test_odd_sizes(void **state)
{
    static const int64_t sizes[] = {1, 2, 15, 33, 64, 100};
    static const int heights[] = {3, 20, 130};
    uint64_t seed = 0;
    int wrong = 0;
    (void)state;
    for (size_t h = 0; h < COUNT(sizes); h++)
        for (size_t i = 0; i < COUNT(sizes); i++, seed++)
            wrong += wrong_anywhere((struct kern_case){.hidden = sizes[h], .inner = sizes[i],
                                                       .rows = heights[seed % COUNT(heights)],
                                                       .biased = (int)seed & 1, .clamped = (int)(seed / 2) & 1,
                                                       .seed = seed});
    assert_int_equal(wrong, 0);
}

/* K in several chunks, in whole steps and not; wide enough for several parts of columns. */
static void test_long_sums_and_wide_rows(void **state)
{
    static const struct kern_case cases[] = {
        {.hidden = 768, .inner = 64, .rows = 5},    {.hidden = 64, .inner = 768, .rows = 40, .seed = 1},
        {.hidden = 576, .inner = 64, .rows = 130},  {.hidden = 300, .inner = 100, .rows = 131, .seed = 1},
        {.hidden = 1110, .inner = 17, .rows = 129}, {.hidden = 36, .inner = 530, .rows = 129, .seed = 1},
        {.hidden = 2100, .inner = 17, .rows = 18},  {.hidden = 33, .inner = 1060, .rows = 17, .seed = 1},
    };
    int wrong = 0;
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        wrong += wrong_anywhere(cases[i]);
    assert_int_equal(wrong, 0);
}

static void test_ranges_of_columns(void **state)
{
    static const int heights[] = {2, 40, 130, 40}, strips[] = {1, 1, 1, 2};
    int wrong = 0;
    (void)state;
    for (size_t i = 0; i < COUNT(heights); i++)
        wrong += wrong_anywhere((struct kern_case){.hidden = 200, .inner = 140, .rows = heights[i], .biased = 1,
                                                   .strip = strips[i] * KERN_STRIP, .seed = i});
    assert_int_equal(wrong, 0);
}

/* More workers than strips may leave a range with nothing in it; then nothing is read or written. */
static void test_empty_ranges(void **state)
{
    const struct kern_engine *list[2];
    struct kern_layer layer = {.hidden = 64, .inner = 16, .dtype = HMOE_BF16};
    (void)state;
    for (int i = engines(list); i-- > 0;)
        for (int which = 0; which < 4; which++) {
            int64_t at = which & 1 ? layer.inner : 0;
            layer.layout = which & 2 ? HMOE_NK : HMOE_KN;
            struct kern_gmm1 one = {.layer = &layer, .rows = 3, .first = at, .last = at};
            struct kern_gmm2 two = {.layer = &layer, .rows = 3, .first = at * 4, .last = at * 4};
            list[i]->gmm1(&one);
            list[i]->gmm2(&two);
        }
}

static void test_special_numbers(void **state)
{
    int wrong = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 24; seed++)
        wrong += wrong_anywhere((struct kern_case){.hidden = 40 + (int64_t)seed, .inner = 40, .rows = 1 + 6 * (int)seed,
                                                   .special = 1, .biased = 1, .clamped = (int)seed & 1, .seed = seed});
    assert_int_equal(wrong, 0);
}

/* Inf in x, clamped to finite gates and ups: the NaN that it makes in columns that do not exist (Inf times the zeros of
 * the padding) must not reach those that do. */
static void test_clamped_infinities(void **state)
{
    int wrong = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++)
        wrong += wrong_anywhere((struct kern_case){.hidden = 75, .inner = 1 + (int64_t)seed, .rows = 1 + 5 * (int)seed,
                                                   .special = 1, .biased = 1, .clamped = 1, .seed = seed});
    assert_int_equal(wrong, 0);
}

static void *many_blocks(void *wrong)
{
    for (int rows = 1; rows < 60; rows += 7)
        for (int layout = HMOE_KN; layout <= HMOE_NK; layout++) {
            struct kern_case c = {.hidden = 50, .inner = 40, .rows = rows, .dtype = HMOE_BF16, .seed = (uint64_t)rows};
            c.layout = (enum hmoe_layout)layout;
            *(int *)wrong += differs(&kern_amx_emulated, &c);
        }
    return NULL;
}

static void test_threads_have_their_own_tiles(void **state)
{
    pthread_t other;
    int wrong[2] = {0, 0};
    (void)state;
    if (!kern_amx_emulated.present())
        skip();
    assert_int_equal(pthread_create(&other, NULL, many_blocks, &wrong[1]), 0);
    many_blocks(&wrong[0]);
    pthread_join(other, NULL);
    assert_int_equal(wrong[0] + wrong[1], 0);
}

/* ------------------------------------------------- the instruction */

struct tiles {
    float c[16][16];
    uint16_t a[16][32], b[16][32];
};

/* Random bits of each kind: ordinary, of very different size, denormal and tiny, products near 2^-126, anything. */
static uint16_t tile_word(uint64_t bits, int kind, bool first)
{
    uint16_t word = (uint16_t)bits;
    int most[] = {8, 40, 2, first ? 70 : 60, 256}, least[] = {123, 107, 0, first ? 0 : 40, 0};
    int exponent = least[kind] + (int)((bits >> 32) % (uint64_t)most[kind]);
    return (uint16_t)((word & 0x807f) | exponent << 7);
}

static void tiles_fill(struct base_prng *prng, struct tiles *t, int kind)
{
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 32; j++) {
            t->a[i][j] = tile_word(base_random(prng), kind, true);
            t->b[i][j] = tile_word(base_random(prng), kind, false);
            t->c[i][j / 2] = num_float((uint32_t)tile_word(base_random(prng), kind, true) << 16 | (uint32_t)j << 5);
        }
}

static void tiles_emulated(struct tiles *t)
{
    amx_tile_config();
    amx_tile_load(0, t->c, 64);
    amx_tile_load(6, t->a, 64);
    amx_tile_load(7, t->b, 64);
    amx_tile_dp(0, 6, 7);
    amx_tile_store(0, t->c, 64);
    amx_tile_release();
}

__attribute__((target("amx-tile,amx-bf16"))) static void tiles_real(struct tiles *t)
{
    kern_amx.thread_begin();
    amx_tile_fence();
    _tile_loadd(0, t->c, 64);
    _tile_loadd(6, t->a, 64);
    _tile_loadd(7, t->b, 64);
    _tile_dpbf16ps(0, 6, 7);
    _tile_stored(0, t->c, 64);
    kern_amx.thread_end();
}

static void tiles_plain(struct tiles *t)
{
    uint64_t before = base_fp_enter();
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            volatile float e = 0.0f, o = 0.0f;
            for (int k = 0; k < 16; k++) {
                e = fmaf(num_from_bf16(t->a[m][2 * k]), num_from_bf16(t->b[k][2 * n]), e);
                o = fmaf(num_from_bf16(t->a[m][2 * k + 1]), num_from_bf16(t->b[k][2 * n + 1]), o);
            }
            e = e + o;
            t->c[m][n] = t->c[m][n] + e;
        }
    base_fp_leave(before);
}

/* 0 when all bits are equal, a NaN being like any other */
static int tiles_differ(const struct tiles *s, const struct tiles *t)
{
    int count = 0;
    for (int i = 0; i < 256; i++) {
        float a = num_quiet(s->c[i / 16][i % 16]), b = num_quiet(t->c[i / 16][i % 16]);
        count += num_bits(a) != num_bits(b);
    }
    return count;
}

static int instruction_differs(void (*first)(struct tiles *), void (*second)(struct tiles *), int rounds)
{
    struct base_prng prng = {7};
    int count = 0;

    for (int kind = 0; kind < 5; kind++)
        for (int i = 0; i < rounds; i++) {
            struct tiles s, t;
            tiles_fill(&prng, &s, kind);
            t = s;
            first(&s);
            second(&t);
            count += tiles_differ(&s, &t);
        }
    return count;
}

static void test_emulated_instruction(void **state)
{
    (void)state;
    if (!kern_amx_emulated.present())
        skip();
    assert_int_equal(instruction_differs(tiles_emulated, tiles_plain, 40), 0);
}

static void test_real_instruction(void **state)
{
    (void)state;
    if (!kern_amx.present())
        skip();
    assert_int_equal(instruction_differs(tiles_emulated, tiles_real, 400), 0);
}

static void test_limit_is_a_speed(void **state)
{
    const struct kern_engine *list[2];
    (void)state;
    for (int i = engines(list); i-- > 0;) {
        list[i]->thread_begin();
        assert_true(list[i]->limit(1000000) > 1e6);
        list[i]->thread_end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_emulated_instruction),
        cmocka_unit_test(test_real_instruction),
        cmocka_unit_test(test_every_small_height),
        cmocka_unit_test(test_tall_blocks),
        cmocka_unit_test(test_odd_sizes),
        cmocka_unit_test(test_long_sums_and_wide_rows),
        cmocka_unit_test(test_ranges_of_columns),
        cmocka_unit_test(test_empty_ranges),
        cmocka_unit_test(test_special_numbers),
        cmocka_unit_test(test_clamped_infinities),
        cmocka_unit_test(test_threads_have_their_own_tiles),
        cmocka_unit_test(test_limit_is_a_speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
