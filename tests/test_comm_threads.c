#include "comm_conformance.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static void conforms(void **state)
{
    (void)state;
    assert_int_equal(conformance_all(HMOE_VIA_THREADS, "threads"), 0);
}

/* shm between ranks that happen to be threads, where the thread sanitizer sees both sides. */
static void shm_inside_a_process(void **state)
{
    (void)state;
    assert_int_equal(conformance_launch(HMOE_VIA_THREADS, 3, "shm", conformance_stream), 0);
    assert_int_equal(conformance_launch(HMOE_VIA_THREADS, 3, "shm", conformance_fail), 0);
    assert_int_equal(conformance_launch(HMOE_VIA_THREADS, 4, "shm", conformance_close), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(conforms), cmocka_unit_test(shm_inside_a_process)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
