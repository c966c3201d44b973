/* What our tests use of cmocka, for builds where it cannot be installed (another CPU than this machine's). The first
 * assertion that fails ends the program. */
#ifndef CROSS_CMOCKA_H
#define CROSS_CMOCKA_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};
#define cmocka_unit_test(function) {#function, function}

static inline void cross_check(int holds, const char *what, const char *file, int line)
{
    if (holds)
        return;
    printf("[  FAILED  ] %s:%d: %s\n", file, line, what);
    exit(1);
}
#define cross_that(condition, what) cross_check(!!(condition), what, __FILE__, __LINE__)

#define assert_true(c) cross_that(c, #c)
#define assert_false(c) cross_that(!(c), "not " #c)
#define assert_null(p) cross_that((p) == NULL, #p " is NULL")
#define assert_non_null(p) cross_that((p) != NULL, #p " is not NULL")
#define assert_int_equal(a, b) cross_that((uintmax_t)(a) == (uintmax_t)(b), #a " == " #b)
#define assert_int_not_equal(a, b) cross_that((uintmax_t)(a) != (uintmax_t)(b), #a " != " #b)
#define assert_in_range(a, least, most) cross_that((a) >= (least) && (a) <= (most), #a " in its range")
#define assert_ptr_equal(a, b) cross_that((const void *)(a) == (const void *)(b), #a " == " #b)
#define assert_string_equal(a, b) cross_that(strcmp(a, b) == 0, #a " == " #b)
#define assert_memory_equal(a, b, bytes) cross_that(memcmp(a, b, bytes) == 0, #a " == " #b)
#define assert_memory_not_equal(a, b, bytes) cross_that(memcmp(a, b, bytes) != 0, #a " != " #b)
#define print_message(...) printf(__VA_ARGS__)
#define fail() cross_that(0, "fail()")
#define fail_msg(...) (printf(__VA_ARGS__), cross_that(0, "fail_msg()"))
#define skip() return

#define cmocka_run_group_tests(tests, setup, teardown) \
    cross_run_group(tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)

static inline int cross_run_group(const struct CMUnitTest *tests, size_t count, int (*setup)(void **),
                                  int (*teardown)(void **))
{
    void *state = NULL;

    cross_check(setup == NULL || setup(&state) == 0, "setup", __FILE__, __LINE__);
    for (size_t i = 0; i < count; i++) {
        tests[i].run(&state);
        printf("[       OK ] %s\n", tests[i].name);
    }
    cross_check(teardown == NULL || teardown(&state) == 0, "teardown", __FILE__, __LINE__);
    printf("[  PASSED  ] %zu test(s).\n", count);
    return 0;
}

#endif
