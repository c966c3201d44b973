/* Checkpoints: what is written is read, and whatever else a file may hold is refused without harm. */
#include "model/checkpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const struct model_config tiny = {.layers = 1, .width = 8, .heads = 2, .experts = 2, .topk = 1, .inner = 4,
                                         .context = 8, .batch = 4};

struct bed {
    char path[64], other[64];
    size_t floats;
    struct model_state state, got;
    char *bytes;
    long size;
};

static struct model_state state_make(size_t floats)
{
    struct model_state state = {calloc(floats, 4), calloc(floats, 4), calloc(floats, 4), 0, 0};

    assert_true(state.value && state.first && state.second);
    return state;
}

static void state_free(struct model_state *state)
{
    free(state->value);
    free(state->first);
    free(state->second);
}

static int setup(void **context)
{
    struct bed *bed = calloc(1, sizeof *bed);
    struct base_error error = {.status = HMOE_OK};
    FILE *file;

    snprintf(bed->path, sizeof bed->path, "/tmp/hmoe_checkpoint_%d", (int)getpid());
    snprintf(bed->other, sizeof bed->other, "/tmp/hmoe_checkpoint_%d.bad", (int)getpid());
    bed->floats = (size_t)model_size(&tiny);
    bed->state = state_make(bed->floats);
    bed->got = state_make(bed->floats);
    model_state_init(&tiny, 3, &bed->state);
    bed->state.step = 41;
    for (size_t i = 0; i < bed->floats; i++) {
        bed->state.first[i] = (float)i;
        bed->state.second[i] = -(float)i;
    }
    assert_int_equal(checkpoint_write(bed->path, &tiny, &bed->state, &error), HMOE_OK);
    file = fopen(bed->path, "r");
    fseek(file, 0, SEEK_END);
    bed->size = ftell(file);
    rewind(file);
    bed->bytes = malloc((size_t)bed->size);
    assert_int_equal(fread(bed->bytes, 1, (size_t)bed->size, file), bed->size);
    fclose(file);
    *context = bed;
    return 0;
}

static int teardown(void **context)
{
    struct bed *bed = *context;

    unlink(bed->path);
    unlink(bed->other);
    state_free(&bed->state);
    state_free(&bed->got);
    free(bed->bytes);
    free(bed);
    return 0;
}

static void test_reads_what_was_written(void **context)
{
    struct bed *bed = *context;
    struct base_error error = {.status = HMOE_OK};
    struct model_config config;

    assert_int_equal(checkpoint_config(bed->path, &config, &error), HMOE_OK);
    assert_memory_equal(&config, &tiny, sizeof tiny);
    assert_int_equal(checkpoint_read(bed->path, &tiny, &bed->got, &error), HMOE_OK);
    assert_int_equal(bed->got.step, 41);
    assert_int_equal(bed->got.seed, 3);
    assert_memory_equal(bed->got.value, bed->state.value, bed->floats * 4);
    assert_memory_equal(bed->got.first, bed->state.first, bed->floats * 4);
    assert_memory_equal(bed->got.second, bed->state.second, bed->floats * 4);
    config.width = 16;
    assert_int_equal(checkpoint_read(bed->path, &config, &bed->got, &error), HMOE_ERR_ARGUMENT);
}

/* Reads these bytes as a file; the status. */
static enum hmoe_status read_bytes(struct bed *bed, const char *bytes, long size)
{
    struct base_error error = {.status = HMOE_OK};
    struct model_config config;
    FILE *file = fopen(bed->other, "w");

    fwrite(bytes, 1, (size_t)size, file);
    fclose(file);
    checkpoint_config(bed->other, &config, &error);
    error.status = HMOE_OK;
    checkpoint_read(bed->other, &tiny, &bed->got, &error);
    if (error.status != HMOE_OK)
        assert_non_null(strstr(error.text, bed->other));
    return error.status;
}

static void test_cut_off_anywhere(void **context)
{
    struct bed *bed = *context;

    for (long size = 0; size < bed->size; size += size < 64 || bed->size - size < 32 ? 1 : 37)
        assert_int_not_equal(read_bytes(bed, bed->bytes, size), HMOE_OK);
}

/* A flipped byte of the header is either found or harmless; it never crashes (under ASan this says more). */
static void test_flipped_bytes(void **context)
{
    struct bed *bed = *context;
    char *copy = malloc((size_t)bed->size);
    int refused = 0, tried = 0;
    long header = 8 + (unsigned char)bed->bytes[0] + 256 * (unsigned char)bed->bytes[1];

    for (long at = 0; at < header; at += at < 16 ? 1 : 5)
        for (int bit = 0; bit < 8; bit += 3) {
            memcpy(copy, bed->bytes, (size_t)bed->size);
            copy[at] = (char)(copy[at] ^ 1 << bit);
            refused += read_bytes(bed, copy, bed->size) != HMOE_OK;
            tried++;
        }
    assert_true(refused > tried / 2);
    free(copy);
}

/* The first occurrence of `from` becomes `to`, of the same length. */
static enum hmoe_status edited(struct bed *bed, const char *from, const char *to)
{
    char *copy = malloc((size_t)bed->size), *at;
    enum hmoe_status status;

    memcpy(copy, bed->bytes, (size_t)bed->size);
    at = memmem(copy, (size_t)bed->size, from, strlen(from));
    assert_non_null(at);
    memcpy(at, to, strlen(to));
    status = read_bytes(bed, copy, bed->size);
    free(copy);
    return status;
}

static void test_wrong_on_purpose(void **context)
{
    struct bed *bed = *context;

    assert_int_equal(edited(bed, "\"F32\"", "\"F16\""), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "[256,8]", "[8,256]"), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "[256,8]", "[-56,8]"), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "\"layers\":\"1\"", "\"layers\":\"9\""), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "\"width\":\"8\"", "\"width\":\"0\""), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "\"width\":\"8\"", "\"width\":\"x\""), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "norm.weight", "narm.weight"), HMOE_ERR_ARGUMENT);
    assert_int_equal(edited(bed, "[0,8192]", "[9,8192]"), HMOE_ERR_ARGUMENT);
}

static void test_places_that_cannot_be_written(void **context)
{
    struct bed *bed = *context;
    struct base_error error = {.status = HMOE_OK};

    assert_int_equal(checkpoint_write("/nowhere/at/all", &tiny, &bed->state, &error), HMOE_ERR_SYSTEM);
    error.status = HMOE_OK;
    assert_int_equal(checkpoint_read("/nowhere/at/all", &tiny, &bed->got, &error), HMOE_ERR_SYSTEM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_what_was_written), cmocka_unit_test(test_cut_off_anywhere),
        cmocka_unit_test(test_flipped_bytes),          cmocka_unit_test(test_wrong_on_purpose),
        cmocka_unit_test(test_places_that_cannot_be_written),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
