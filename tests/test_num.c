/* base/num.h and base/fpenv.h: the storage dtypes against exact arithmetic, exp and the gate against double, and the
 * control word really in force. */
#include "base/fpenv.h"
#include "base/num.h"
#include "base/prng.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <fenv.h>
#include <stdbool.h>
#include <stdlib.h>

#define LEAST_NORMAL 0x1p-126f

/* Between base_fp_enter and base_fp_leave numbers come from memory and go to memory: the compiler knows no control
 * word, it would compute a constant by its own rules, and a result that is used later, later. */
static float product(float a, float b)
{
    volatile float x = a, y = b, z = x * y;
    return z;
}

static float fused(float a, float b, float c)
{
    volatile float x = a, y = b, w = c, z = fmaf(x, y, w);
    return z;
}

static float sum(float a, float b)
{
    volatile float x = a, y = b, z = x + y;
    return z;
}

static float flushed(float (*function)(float), float a)
{
    uint64_t before = base_fp_enter();
    volatile float x = a, y = function(x);
    base_fp_leave(before);
    return y;
}

/* The value of a finite f16, exactly. */
static double f16_value(uint16_t h)
{
    int exponent = (h >> 10) & 0x1f, fraction = h & 0x3ff;
    double size = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -size : size;
}

static void bf16_round_trips(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 65536; b++) {
        float f = num_from_bf16((uint16_t)b);
        assert_int_equal(num_bits(f), b << 16);
        assert_int_equal(num_to_bf16(f), (b & 0x7fff) > 0x7f80 ? 0x7fc0 : b);
    }
}

static void f16_round_trips(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = num_from_f16((uint16_t)h);
        bool nan = (h & 0x7fff) > 0x7c00, inf = (h & 0x7fff) == 0x7c00;
        assert_int_equal(num_to_f16(f), nan ? 0x7e00 : h);
        if (nan)
            assert_true(f != f);
        else
            assert_true(inf ? f == (h & 0x8000 ? -INFINITY : INFINITY) : (double)f == f16_value((uint16_t)h));
        assert_int_equal(num_bits(f) >> 31, h >> 15);
    }
}

/* Between each value and its neighbour away from zero: the middle goes to the even one, a little less and a little
 * more to the nearer; the largest's neighbour is Inf. */
static void bf16_ties(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 0x7f80; b++)
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t low = b | sign << 15, middle = low << 16 | 0x8000;
            assert_int_equal(num_to_bf16(num_float(middle)), low + (b & 1));
            assert_int_equal(num_to_bf16(num_float(middle - 1)), low);
            assert_int_equal(num_to_bf16(num_float(middle + 1)), low + 1);
        }
}

static void f16_ties(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7c00; h++)
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t low = h | sign << 15;
            double above = h == 0x7bff ? 65536.0 : f16_value((uint16_t)(h + 1));
            uint32_t middle = num_bits((float)((f16_value((uint16_t)h) + above) / 2)) | sign << 31;
            assert_int_equal(num_to_f16(num_float(middle)), low + (h & 1));
            assert_int_equal(num_to_f16(num_float(middle - 1)), low);
            assert_int_equal(num_to_f16(num_float(middle + 1)), low + 1);
        }
}

/* to nearest even by the double's own rint */
static double rounded(double value, int fraction_bits, int least_exponent, double most)
{
    int exponent;

    frexp(value, &exponent);
    exponent = exponent - 1 < least_exponent ? least_exponent : exponent - 1;
    double unit = ldexp(1, exponent - fraction_bits), result = rint(value / unit) * unit;
    return fabs(result) > most ? copysign(INFINITY, value) : result;
}

static void random_floats_round_to_nearest(void **state)
{
    struct base_prng prng = {5};
    (void)state;
    for (int i = 0; i < 2000000; i++) {
        uint32_t bits = (uint32_t)base_random(&prng);
        if (i & 1) /* the exponents of f16 */
            bits = (bits & 0x807fffff) | (uint32_t)(95 + base_random_below(&prng, 50)) << 23;
        float f = num_float(bits);
        if (!isfinite(f))
            continue;
        assert_true((double)num_round(HMOE_BF16, f) == rounded(f, 7, -126, 0x1.fep127));
        assert_true((double)num_round(HMOE_F16, f) == rounded(f, 10, -14, 65504.0));
        assert_int_equal(num_bits(num_round(HMOE_F32, f)), bits);
    }
}

static void edges_of_rounding(void **state)
{
    const uint32_t nans[] = {0x7f800001, 0xff800001, 0x7fffffff, 0xffc00000, 0x7fa00000, 0x7fc00001};
    (void)state;
    for (size_t i = 0; i < sizeof nans / sizeof nans[0]; i++) {
        assert_int_equal(num_to_bf16(num_float(nans[i])), 0x7fc0);
        assert_int_equal(num_to_f16(num_float(nans[i])), 0x7e00);
        assert_int_equal(num_bits(num_quiet(num_float(nans[i]))), 0x7fc00000);
    }
    assert_int_equal(num_to_f16(65519.996f), 0x7bff);
    assert_int_equal(num_to_f16(65520.0f), 0x7c00);
    assert_int_equal(num_to_f16(-65520.0f), 0xfc00);
    assert_int_equal(num_to_f16(INFINITY), 0x7c00);
    assert_int_equal(num_to_bf16(-INFINITY), 0xff80);
    assert_int_equal(num_to_bf16(num_float(0x7f7fffff)), 0x7f80);
    assert_int_equal(num_to_f16(0x1p-24f), 1);
    assert_int_equal(num_to_f16(0x1p-25f), 0);
    assert_int_equal(num_to_f16(0x1.000002p-25f), 1);
    assert_int_equal(num_to_f16(-0x1p-25f), 0x8000);
    assert_int_equal(num_to_f16(-0.0f), 0x8000);
}

static void loads_and_stores(void **state)
{
    const enum hmoe_dtype dtypes[] = {HMOE_F32, HMOE_BF16, HMOE_F16};
    (void)state;
    for (int d = 0; d < 3; d++) {
        unsigned char *memory = malloc(16);
        assert_non_null(memory);
        memset(memory, 0xee, 16);
        for (int i = 0; i < 3; i++)
            num_store(dtypes[d], memory, i, 1.5f + (float)i);
        for (int i = 0; i < 3; i++)
            assert_true(num_load(dtypes[d], memory, i) == 1.5f + (float)i);
        assert_int_equal(memory[3 * num_bytes(dtypes[d])], 0xee);
        num_store(dtypes[d], memory, 1, num_float(0xffc00001));
        assert_int_equal(num_bits(num_load(dtypes[d], memory, 1)), 0x7fc00000);
        free(memory);
    }
}

/* The error of an f32 in units of its last place. */
static double ulps(float got, double wanted)
{
    int exponent;
    frexp(wanted, &exponent);
    return fabs((double)got - wanted) / ldexp(1, exponent - 24);
}

/* Every 101st float of one sign up to `most`, or a little above it. */
static double worst_exp(uint32_t sign, float most)
{
    double worst = 0;

    for (uint32_t u = 0x30000000; u <= num_bits(most); u += 101) {
        float x = num_float(u | sign);
        double error = ulps(flushed(num_exp, x), exp(x));
        worst = error > worst ? error : worst;
    }
    return worst;
}

static void exp_is_close(void **state)
{
    double above = worst_exp(0, 88.0f), below = worst_exp(0x80000000, 87.0f);
    (void)state;
    print_message("exp: at most %.4f ulp above zero, %.4f below\n", above, below);
    assert_true(above < 1.0 && below < 1.0);
    assert_true(above > 0.5 && below > 0.5); /* a grid that sees no error at all is not one */
}

static void exp_at_its_edges(void **state)
{
    (void)state;
    assert_true(num_exp(0.0f) == 1.0f && num_exp(-0.0f) == 1.0f);
    assert_int_equal(num_bits(num_exp(88.5f)), num_bits(num_exp(88.0f)));
    assert_int_equal(num_bits(num_exp(INFINITY)), num_bits(num_exp(88.0f)));
    assert_int_equal(num_bits(num_exp(-88.0f)), num_bits(num_exp(-87.0f)));
    assert_int_equal(num_bits(num_exp(-INFINITY)), num_bits(num_exp(-87.0f)));
    assert_true(num_exp(88.0f) > num_exp(87.99999f) && num_exp(-87.0f) < num_exp(-86.99999f));
    assert_true(num_exp(NAN) != num_exp(NAN));
}

static void sigmoid_limits(void **state)
{
    double worst = 0;
    (void)state;

    assert_int_equal(num_bits(flushed(num_sigmoid, 100.0f)), num_bits(1.0f));
    assert_int_equal(num_bits(flushed(num_sigmoid, -100.0f)), 0); /* 1 / exp(88) is tiny */
    assert_true(flushed(num_sigmoid, 0.0f) == 0.5f);
    assert_true(isnan(flushed(num_sigmoid, NAN)));
    for (float x = -86.0f; x <= 20.0f; x += 0x1p-10f) {
        double error = ulps(flushed(num_sigmoid, x), 1 / (1 + exp(-(double)x)));
        worst = error > worst ? error : worst;
    }
    print_message("sigmoid: at most %.4f ulp\n", worst);
    assert_true(worst < 2.3 && worst > 0.5);
}

static void silu_in_its_order(void **state)
{
    const struct hmoe_activation silu = num_activation((struct hmoe_activation){0});
    struct base_prng prng = {9};
    int other_order_differs = 0;
    (void)state;

    assert_true(silu.alpha == 1.0f && silu.limit == INFINITY && silu.offset == 0.0f);
    for (int i = 0; i < 10000; i++) {
        float g = base_random_sym(&prng, 8.0f), u = base_random_sym(&prng, 8.0f), s = 1.0f / (1.0f + num_exp(-g));
        float wanted = (g * s) * u, other = g * (s * u);
        assert_int_equal(num_bits(num_gated(&silu, g, u)), num_bits(wanted));
        other_order_differs += num_bits(other) != num_bits(wanted);
    }
    assert_true(other_order_differs > 1000);
    assert_int_equal(num_bits(num_gated(&silu, -0.0f, 1.0f)), 0x80000000);
    assert_true(isnan(num_gated(&silu, NAN, 1.0f)) && isnan(num_gated(&silu, 1.0f, NAN)));
    assert_true(num_gated(&silu, INFINITY, 2.0f) == INFINITY);
}

static void clamps(void **state)
{
    const struct hmoe_activation oss = num_activation((struct hmoe_activation){1.702f, 7.0f, 1.0f});
    const float most = num_gated(&oss, 7.0f, 7.0f);
    float last_gate = -INFINITY, last_up = -INFINITY;
    (void)state;

    for (float v = 0.0f; v < 12.0f; v += 0.0625f) { /* gate * sigmoid rises from 0 on; up rises everywhere */
        float gate = num_gated(&oss, v, 1.0f), up = num_gated(&oss, 1.0f, v - 8.0f);
        assert_true(gate >= last_gate && up >= last_up);
        last_gate = gate;
        last_up = up;
    }
    assert_true(num_gated(&oss, 7.000001f, 7.0f) == most && num_gated(&oss, INFINITY, INFINITY) == most);
    assert_true(num_gated(&oss, 6.99f, 7.0f) < most && num_gated(&oss, 7.0f, 6.99f) < most);
    assert_true(num_gated(&oss, 1.0f, -7.0f) == num_gated(&oss, 1.0f, -INFINITY));
    assert_true(num_gated(&oss, 1.0f, -7.0f) < num_gated(&oss, 1.0f, -6.99f));
    assert_true(num_gated(&oss, -20.0f, 0.0f) != num_gated(&oss, -7.0f, 0.0f)); /* the gate has no lower clamp */
    assert_int_equal(num_bits(num_gated(&oss, 2.0f, 3.0f)),
                     num_bits((2.0f * (1.0f / (1.0f + num_exp(-(1.702f * 2.0f))))) * (3.0f + 1.0f)));
    assert_true(isnan(num_gated(&oss, NAN, 1.0f)) && isnan(num_gated(&oss, 1.0f, NAN)));
}

static void denormals_inside_and_outside(void **state)
{
    const float denormal = num_float(0x00400000); /* 2^-127 */
    (void)state;

    assert_true(product(denormal, 4.0f) == 0x1p-125f && product(LEAST_NORMAL, 0.5f) == denormal);
    uint64_t before = base_fp_enter();
    uint32_t read = num_bits(product(denormal, 4.0f)), tiny = num_bits(product(LEAST_NORMAL, -0.5f));
    uint32_t fused_read = num_bits(fused(-denormal, 4.0f, -0.0f));
    uint32_t fused_tiny = num_bits(fused(0x1p-64f, -0x1p-64f, 0.0f));
    uint32_t kept = num_bits(num_from_f16(1)), stored = num_to_f16(0x1p-24f);
    base_fp_leave(before);
    assert_int_equal(read, 0);
    assert_int_equal(tiny, 0x80000000);
    assert_int_equal(fused_read, 0x80000000);
    assert_int_equal(fused_tiny, 0x80000000);
    assert_int_equal(kept, num_bits(0x1p-24f)); /* f16 denormals are normal f32 */
    assert_int_equal(stored, 1);
    assert_true(product(denormal, 4.0f) == 0x1p-125f && product(LEAST_NORMAL, 0.5f) == denormal);
}

/* 2^-126 * (1 - 2^-26) rounds up to 2^-126: not tiny after rounding, tiny before. The one corner of arm64. */
static void the_corner(void **state)
{
    (void)state;
    uint64_t before = base_fp_enter();
    float corner = product(0x1.0008p-63f, 0x1.fffp-64f), fused_corner = fused(0x1.0008p-63f, 0x1.fffp-64f, 0.0f);
    float below = product(0x1.fffffep-64f, 0x1p-63f), on = product(0x1p-63f, 0x1p-63f);
    base_fp_leave(before);
#if defined(__aarch64__)
    assert_true(corner == 0.0f && fused_corner == 0.0f);
#else
    assert_true(corner == LEAST_NORMAL && fused_corner == LEAST_NORMAL);
#endif
    assert_true(below == 0.0f && on == LEAST_NORMAL);
}

static void rounding_mode_is_set_and_restored(void **state)
{
    (void)state;
    assert_int_equal(fesetround(FE_UPWARD), 0);
    float outside = sum(1.0f, 0x1p-30f);
    uint64_t before = base_fp_enter();
    float inside = sum(1.0f, 0x1p-30f);
    uint64_t nested = base_fp_enter();
    base_fp_leave(nested);
    float still = product(LEAST_NORMAL, 0.5f);
    base_fp_leave(before);
    float after = sum(1.0f, 0x1p-30f);
    fesetround(FE_TONEAREST);
    assert_true(outside > 1.0f && inside == 1.0f && still == 0.0f && after > 1.0f);
}

#if defined(__x86_64__)
static void the_whole_word_is_restored(void **state)
{
    (void)state;
    const uint32_t mine = _mm_getcsr(), odd = 0x1f80 | 0x6000 | 0x8000 | 0x0020; /* toward zero, FTZ, inexact seen */
    _mm_setcsr(odd);
    uint64_t before = base_fp_enter();
    uint32_t inside = _mm_getcsr();
    product(LEAST_NORMAL, 0.3f);
    base_fp_leave(before);
    uint32_t after = _mm_getcsr();
    _mm_setcsr(mine);
    assert_int_equal(inside, 0x9fc0);
    assert_int_equal(after, odd);
}
#else
static void the_whole_word_is_restored(void **state)
{
    (void)state;
    uint64_t before = base_fp_enter(), inside, outside;
    inside = base_fp_enter();
    base_fp_leave(inside);
    base_fp_leave(before);
    outside = base_fp_enter();
    base_fp_leave(outside);
    assert_int_equal(inside, 1u << 24);
    assert_int_equal(outside, before);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_round_trips),
        cmocka_unit_test(f16_round_trips),
        cmocka_unit_test(bf16_ties),
        cmocka_unit_test(f16_ties),
        cmocka_unit_test(random_floats_round_to_nearest),
        cmocka_unit_test(edges_of_rounding),
        cmocka_unit_test(loads_and_stores),
        cmocka_unit_test(exp_is_close),
        cmocka_unit_test(exp_at_its_edges),
        cmocka_unit_test(sigmoid_limits),
        cmocka_unit_test(silu_in_its_order),
        cmocka_unit_test(clamps),
        cmocka_unit_test(denormals_inside_and_outside),
        cmocka_unit_test(the_corner),
        cmocka_unit_test(rounding_mode_is_set_and_restored),
        cmocka_unit_test(the_whole_word_is_restored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
