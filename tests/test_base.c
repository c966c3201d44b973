/* The base room: knobs and where their values come from, memory, what the machine has. */
#include "base/knobs.h"
#include "base/memory.h"
#include "base/prng.h"
#include "base/topology.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void knobs_rise_in_order(void **state)
{
    struct base_error error = {.status = HMOE_OK};
    struct base_knobs knobs;
    char word[16];

    (void)state;
    setenv("HMOE_BLOCK_ROWS", "48", 1);
    setenv("HMOE_ENGINE", "avx2", 1);
    assert_int_equal(base_knobs_init(&knobs, &error), HMOE_OK);
    assert_int_equal(knobs.value[KNOB_BLOCK_ROWS], 48);
    assert_string_equal(base_knob_choice(&knobs, KNOB_ENGINE, word, sizeof word), "avx2");
    assert_int_equal(knobs.value[KNOB_WAVE], 1);
    assert_int_equal(base_knobs_set(&knobs, "block_rows=7,,wave=off,strips=3,", &error), HMOE_OK);
    assert_int_equal(knobs.value[KNOB_BLOCK_ROWS], 7);
    assert_int_equal(knobs.value[KNOB_WAVE], 0);
    assert_int_equal(knobs.value[KNOB_STRIPS], 3);
    assert_int_equal(base_knobs_set(&knobs, "wave=1", &error), HMOE_OK);
    assert_int_equal(knobs.value[KNOB_WAVE], 1);
    unsetenv("HMOE_BLOCK_ROWS");
    setenv("HMOE_ENGINE", "fast", 1);
    assert_int_equal(base_knobs_init(&knobs, &error), HMOE_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "\"fast\" is not one of auto|amx|avx512"));
    unsetenv("HMOE_ENGINE");
}

static void bad_knobs_change_nothing(void **state)
{
    static const char *const bad[] = {"wave", "wave=", "=on", "wave=2", "strips=1x", "strips=-1", "strips=65",
        "strips=99999999999999999999", "nosuch=1", "block_rows=5,nosuch=1", "engine=avx", "engine=|", "spin_ns= ",
        "an_item_that_goes_on_and_on_and_on_and_on_and_on_and_on_and_on_and_on_and_on_and_on_and_on_and_on=1"};
    struct base_error error = {.status = HMOE_OK};
    struct base_knobs knobs, before;

    (void)state;
    assert_int_equal(base_knobs_init(&knobs, &error), HMOE_OK);
    before = knobs;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        error.text[0] = 0;
        assert_int_equal(base_knobs_set(&knobs, bad[i], &error), HMOE_ERR_ARGUMENT);
        assert_true(strlen(error.text) > 10);
        assert_memory_equal(&knobs, &before, sizeof knobs);
    }
}

static void the_list_of_knobs_is_sound(void **state)
{
    (void)state;
    assert_int_equal(hmoe_knob_count(), KNOB_COUNT);
    assert_null(hmoe_knob(-1));
    assert_null(hmoe_knob(KNOB_COUNT));
    for (int i = 0; i < KNOB_COUNT; i++) {
        const struct hmoe_knob *knob = hmoe_knob(i);
        int64_t choices = *knob->choices != 0;
        for (const char *c = knob->choices; *c; c++)
            choices += *c == '|';
        assert_true(knob->standard >= knob->least && knob->standard <= knob->most);
        assert_true(strlen(knob->meaning) > 10);
        if (choices)
            assert_true(knob->least == 0 && knob->most == choices - 1);
        for (int j = 0; j < i; j++)
            assert_string_not_equal(knob->name, hmoe_knob(j)->name);
    }
}

static void memory_is_aligned_zero_and_counted(void **state)
{
    (void)state;
    for (int huge = 0; huge < 2; huge++) {
        size_t bytes = ((size_t)5 << 20) + 4097;
        unsigned char *map = base_map(bytes, huge);
        assert_non_null(map);
        assert_int_equal((uintptr_t)map % (huge ? (size_t)2 << 20 : 4096), 0);
        assert_int_equal(base_resident(map, bytes), 0);
        assert_int_equal(map[bytes - 1], 0);
        map[0] = 1;
        assert_true(base_resident(map, bytes) > 0 && base_resident(map, bytes) < ((size_t)7 << 20));
        base_unmap(map, bytes, huge);
    }
    assert_null(base_map(SIZE_MAX - 100, 1));
    base_unmap(NULL, 1, 0);
}

/* The same function measures and binds. */
static size_t lay(struct base_carve *carve, char **a, char **b)
{
    *a = base_carve(carve, 10);
    *b = base_carve(carve, 100);
    return carve->used;
}

static void carve_measures_what_it_binds(void **state)
{
    _Alignas(64) char room[256];
    char *a, *b;

    (void)state;
    assert_int_equal(lay(&(struct base_carve){NULL, 0}, &a, &b), 64 + 128);
    assert_null(a);
    assert_null(b);
    assert_int_equal(lay(&(struct base_carve){room, 0}, &a, &b), 64 + 128);
    assert_ptr_equal(a, room);
    assert_ptr_equal(b, room + 64);
}

static void the_machine_has_something(void **state)
{
    char name[64];

    (void)state;
    assert_true(base_cpus() >= 1);
    assert_int_equal(base_cache_bytes(0), 0);
    assert_int_equal(base_cache_bytes(4), 0);
    assert_true(base_memory_total() >= base_memory_available() && base_memory_available() > 0);
    assert_true(strlen(base_cpu_name(name, sizeof name)) > 0);
}

static void random_numbers_stay_in_range(void **state)
{
    struct base_prng prng = {1}, again = {1};
    double sum = 0, squares = 0;

    (void)state;
    for (int i = 0; i < 100000; i++) {
        double normal = base_random_normal(&prng);
        assert_true(base_random_normal(&again) == normal);
        sum += normal;
        squares += normal * normal;
        assert_in_range(base_random_below(&prng, 7), 0, 6);
        assert_true(base_random_unit(&prng) < 1.0f);
        assert_true(fabsf(base_random_sym(&prng, 3.0f)) <= 3.0f);
        again = prng;
    }
    assert_true(fabs(sum / 100000) < 0.02 && fabs(squares / 100000 - 1) < 0.03);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knobs_rise_in_order), cmocka_unit_test(bad_knobs_change_nothing),
        cmocka_unit_test(the_list_of_knobs_is_sound), cmocka_unit_test(memory_is_aligned_zero_and_counted),
        cmocka_unit_test(carve_measures_what_it_binds), cmocka_unit_test(the_machine_has_something),
        cmocka_unit_test(random_numbers_stay_in_range),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
