/* The oracle: cases whose answer is known by hand, and what must not change the bits. */
#include "base/fpenv.h"
#include "ref_world.h"

#include <fenv.h>

static size_t y_bytes(const struct world *w)
{
    return (size_t)(w->call.tokens * w->layer.hidden) * num_bytes(w->layer.dtype);
}

static size_t row_bytes(const struct world *w)
{
    return (size_t)w->layer.hidden * num_bytes(w->layer.dtype);
}

static char *y_row(const struct world *w, int64_t token)
{
    return (char *)w->y + (size_t)token * row_bytes(w);
}

/* ---- known answers, H = I = E = K = 1. sigmoid(64) is 1 exactly. */

struct tiny {
    float x, gate, up, down, weight;
    float gate_bias, up_bias, down_bias;
};

static void *stored(enum hmoe_dtype dtype, float first, float second)
{
    void *values = malloc(8);
    assert_non_null(values);
    num_store(dtype, values, 0, first);
    num_store(dtype, values, 1, second);
    return values;
}

static float tiny_y(enum hmoe_dtype dtype, const struct tiny *t, struct hmoe_activation act, bool biased)
{
    void *x = stored(dtype, t->x, 0), *up = stored(dtype, t->gate, t->up), *down = stored(dtype, t->down, 0);
    void *up_bias = stored(dtype, t->gate_bias, t->up_bias), *down_bias = stored(dtype, t->down_bias, 0);
    void *y = stored(dtype, 0, 0), *all[] = {x, up, down, up_bias, down_bias, y};
    const int32_t id = 0;
    struct ref_layer layer = {.hidden = 1, .inner = 1, .experts = 1, .topk = 1, .dtype = dtype, .activation = act};
    struct ref_forward call = {.layer = &layer, .tokens = 1, .x = x, .y = y};

    layer.up_proj = up, layer.down_proj = down;
    layer.up_bias = biased ? up_bias : NULL, layer.down_bias = biased ? down_bias : NULL;
    call.topk_ids = &id, call.topk_weights = &t->weight;
    assert_int_equal(ref_moe_forward(&call), 0);
    float result = num_load(dtype, y, 0);
    for (int i = 0; i < 6; i++)
        free(all[i]);
    return result;
}

static void known_answers(void **state)
{
    const struct hmoe_activation silu = {0}, clamped = {100.0f, 7.0f, 1.0f};
    const struct tiny t = {1, 64, 3, 0.5f, 0.25f, 64, -1, 2}, negative = {-1, 64, 3, 1, 1, 128, 0, 0};
    (void)state;

    for (int d = 0; d < 3; d++) {
        assert_true(tiny_y(dtypes[d], &t, silu, false) == 64 * 3 * 0.5f * 0.25f);
        assert_true(tiny_y(dtypes[d], &t, silu, true) == (128 * 2 * 0.5f + 2) * 0.25f);
        assert_true(tiny_y(dtypes[d], &t, clamped, false) == 7 * (3 + 1) * 0.5f * 0.25f);
        assert_true(tiny_y(dtypes[d], &negative, silu, true) == 64 * -3);
    }
}

/* y of one token whose K <= 4 slots all give `output` */
static float combined(const float *weights, int topk, float output)
{
    const float x = 1, up[] = {64, 0x1p-6f};
    const int32_t ids[4] = {0};
    float y;
    struct ref_layer layer = {.hidden = 1, .inner = 1, .experts = 1, .topk = topk, .up_proj = up, .down_proj = &output};
    struct ref_forward call = {.layer = &layer, .tokens = 1, .x = &x, .y = &y};
    call.topk_ids = ids;
    call.topk_weights = weights;
    assert_int_equal(ref_moe_forward(&call), 0);
    return y;
}

static void combine_in_its_order(void **state)
{
    const float fused[] = {-1, 1 + 0x1p-12f}, order[] = {0x1p24f, 1, -0x1p24f};
    (void)state;

    assert_true(combined(fused, 2, 1 + 0x1p-12f) == 0x1p-12f + 0x1p-24f);
    assert_true(combined(order, 3, 1) == 0);
}

/* 2^-20 is a denormal f16 and counts; 2^-130 is a denormal f32 and bf16 and reads as zero. */
static void denormal_inputs(void **state)
{
    const struct tiny half = {0x1p-20f, 0, 1024, 1, 1, 64, 0, 0}, wide = {0x1p-130f, 0, 0x1p127f, 1, 1, 64, 0, 0};
    const struct hmoe_activation silu = {0};
    (void)state;

    assert_true(tiny_y(HMOE_F16, &half, silu, true) == 64 * 0x1p-10f);
    assert_int_equal(num_bits(tiny_y(HMOE_BF16, &wide, silu, true)), 0);
    assert_int_equal(num_bits(tiny_y(HMOE_F32, &wide, silu, true)), 0);
}

/* The gate is -17.5107421875, in bf16 -17.5: one percent more of exp. */
static void gate_is_rounded_before_silu(void **state)
{
    const struct tiny t = {-16.125f, 1.0859375f, 64, 1, 1, 0, 0, 0};
    const struct hmoe_activation silu = num_activation((struct hmoe_activation){0});
    (void)state;

    float gate = -16.125f * 1.0859375f, up = -16.125f * 64;
    float a = num_round(HMOE_BF16, num_gated(&silu, num_round(HMOE_BF16, gate), up));
    float unrounded = num_round(HMOE_BF16, num_gated(&silu, gate, up));
    assert_true(num_round(HMOE_BF16, up) == up);
    assert_int_equal(num_bits(tiny_y(HMOE_BF16, &t, silu, false)), num_bits(a));
    assert_int_not_equal(num_bits(a), num_bits(unrounded));
}

/* ---- the chain */

static float chain(const float *a, const float *b, int64_t n)
{
    uint64_t before = base_fp_enter();
    volatile float sum = ref_chain((struct ref_terms){HMOE_F32, a, 1}, (struct ref_terms){HMOE_F32, b, 1}, n);
    base_fp_leave(before);
    return sum;
}

static void chain_in_its_order(void **state)
{
    float a[66], ones[66];
    (void)state;

    for (int i = 0; i < 66; i++) {
        a[i] = 0;
        ones[i] = 1;
    }
    a[0] = 0x1p24f, a[1] = -0x1p24f, a[2] = 1, a[3] = 1;
    assert_true(chain(a, ones, 4) == 1); /* evens give 2^24, odds 1 - 2^24; one after the other would give 2 */
    a[1] = 0, a[2] = 0, a[3] = 0;
    a[32] = 1, a[64] = 1;
    assert_true(chain(a, ones, 66) == 0x1p24f); /* each block's 1 is lost; the last two together would not be */
    const float square[] = {-1, 0, 1 + 0x1p-12f, 0}, same[] = {1, 0, 1 + 0x1p-12f, 0};
    assert_true(chain(square, same, 3) == 0x1p-11f + 0x1p-24f); /* fused: the product is not rounded */
}

/* acc is -0 after two blocks (a tiny negative sum, flushed), and so are both halves of the last block. The absent
 * terms, executed as (+0)*(+0), make it +0. */
static void absent_terms_matter(void **state)
{
    float a[96], b[96];
    (void)state;

    memset(a, 0, sizeof a);
    memset(b, 0, sizeof b);
    a[0] = 0x1.8p-63f, b[0] = 0x1p-63f;
    a[32] = -0x1.cp-63f, b[32] = 0x1p-63f; /* -0.25 * 2^-126 */
    a[64] = -0x1p-64f, b[64] = 0x1p-64f;   /* -2^-128 */
    a[65] = a[64], b[65] = b[64];
    assert_int_equal(num_bits(chain(a, b, 66)), 0);
    uint64_t before = base_fp_enter();
    volatile float half = 0, acc = -0.0f;
    half = fmaf(a[64], b[64], half);
    acc = acc + (half + half); /* the last block without its absent terms */
    base_fp_leave(before);
    assert_int_equal(num_bits(acc), 0x80000000);
    /* and the two blocks alone: */
    assert_int_equal(num_bits(chain(a, b, 64)), 0x80000000);
}

static void strides(void **state)
{
    struct base_prng prng = {3};
    (void)state;

    for (int d = 0; d < 3; d++) {
        void *a = tensor(&prng, dtypes[d], 70, 1), *spread = tensor(&prng, dtypes[d], 70 * 3, 1);
        for (int i = 0; i < 70; i++)
            num_store(dtypes[d], spread, i * 3, num_load(dtypes[d], a, i));
        struct ref_terms near = {dtypes[d], a, 1}, apart = {dtypes[d], spread, 3};
        float dense = ref_chain(near, near, 70), spaced = ref_chain(near, apart, 70);
        assert_int_equal(num_bits(dense), num_bits(spaced));
        free(a);
        free(spread);
    }
}

/* ---- what must not change the bits, and what must not leak */

static void transposed_into(void *to, const void *from, enum hmoe_dtype dtype, const int64_t counts[3])
{
    int64_t E = counts[0], terms = counts[1], columns = counts[2];
    for (int64_t e = 0; e < E; e++)
        for (int64_t i = 0; i < terms; i++)
            for (int64_t c = 0; c < columns; c++)
                num_store(dtype, to, (e * columns + c) * terms + i,
                          num_load(dtype, from, (e * terms + i) * columns + c));
}

static void layouts_agree(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++) {
        const struct shape *s = &two_block_shape;
        struct world *kn = world(11, dtypes[d], s, BIASED), *nk = world(11, dtypes[d], s, BIASED);
        nk->layer.layout = HMOE_NK;
        transposed_into(nk->up, kn->up, dtypes[d], (int64_t[]){s->experts, s->hidden, 2 * s->inner});
        transposed_into(nk->down, kn->down, dtypes[d], (int64_t[]){s->experts, s->inner, s->hidden});
        assert_memory_not_equal(nk->up, kn->up, 64);
        forward(kn);
        forward(nk);
        assert_memory_equal(kn->y, nk->y, y_bytes(kn));
        drop(kn);
        drop(nk);
    }
}

/* Columns of halves moved to where interleaving has them; rows of length 2I. */
static void interleaved_into(void *to, const void *from, enum hmoe_dtype dtype, int64_t rows, int64_t inner)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < 2 * inner; c++)
            num_store(dtype, to, r * 2 * inner + (c < inner ? 2 * c : 2 * (c - inner) + 1),
                      num_load(dtype, from, r * 2 * inner + c));
}

static void gatings_agree(void **state)
{
    const struct shape *s = &odd_shape;
    (void)state;

    for (int d = 0; d < 3; d++) {
        struct world *halves = world(12, dtypes[d], s, BIASED | CLAMPED);
        struct world *woven = world(12, dtypes[d], s, BIASED | CLAMPED);
        woven->layer.gating = HMOE_INTERLEAVED;
        interleaved_into(woven->up, halves->up, dtypes[d], s->experts * s->hidden, s->inner);
        interleaved_into(woven->up_bias, halves->up_bias, dtypes[d], s->experts, s->inner);
        forward(halves);
        forward(woven);
        assert_memory_equal(halves->y, woven->y, y_bytes(halves));
        assert_memory_equal(halves->a, woven->a, (size_t)(s->tokens * s->topk * s->inner) * num_bytes(dtypes[d]));
        drop(halves);
        drop(woven);
    }
}

static void fill_nan(enum hmoe_dtype dtype, void *base, int64_t first, int64_t count)
{
    for (int64_t i = first; i < first + count; i++)
        num_store(dtype, base, i, NAN);
}

static void masked_slots_are_not_read(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++) {
        struct world *w = world(21, dtypes[d], &odd_shape, BIASED), *poison = world(21, dtypes[d], &odd_shape, BIASED);
        int64_t K = w->layer.topk, H = w->layer.hidden, untouched = 0;
        for (int64_t slot = 0; slot < K + 1; slot++) { /* token 0 is masked altogether, token 1 in part */
            set_id(w, slot, -1);
            set_id(poison, slot, -1);
        }
        fill_nan(dtypes[d], poison->x, 0, H);
        for (int64_t slot = 0; slot < K * w->call.tokens; slot++)
            if (id_at(w, slot) < 0)
                fill_nan(w->call.weights_type, poison->weights, slot, 1);
        forward(w);
        forward(poison);
        assert_memory_equal(w->y, poison->y, y_bytes(w));
        for (size_t i = 0; i < row_bytes(w); i++)
            assert_int_equal(((unsigned char *)w->y)[i], 0);
        for (int64_t slot = 0; slot < K * w->call.tokens; slot++)
            if (id_at(w, slot) < 0) {
                untouched++;
                for (size_t i = 0; i < row_bytes(w); i++)
                    assert_int_equal(((unsigned char *)w->slots)[(size_t)slot * row_bytes(w) + i], 0xee);
            }
        assert_true(untouched > K && untouched < K * w->call.tokens);
        drop(w);
        drop(poison);
    }
}

/* The token with the bad value gives NaN in its one form; the others keep their bits. */
static void bad_values_stay_at_home(void **state)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    (void)state;

    for (int i = 0; i < 9; i++) {
        enum hmoe_dtype dtype = dtypes[i % 3];
        struct world *w = world(31, dtype, &odd_shape, 0), *ill = world(31, dtype, &odd_shape, 0);
        int64_t H = w->layer.hidden, token = 2;
        set_id(w, token * 3, 1);
        set_id(ill, token * 3, 1);
        num_store(dtype, ill->x, token * H, bad[i / 3]);
        forward(w);
        forward(ill);
        for (int64_t t = 0; t < w->call.tokens; t++)
            if (t != token)
                assert_memory_equal(y_row(w, t), y_row(ill, t), row_bytes(w));
        for (int64_t h = 0; h < H; h++) { /* some gate is -Inf, and -Inf * 0 is NaN */
            uint32_t bits = num_bits(num_load(dtype, ill->y, token * H + h));
            assert_int_equal(bits, 0x7fc00000);
        }
        drop(w);
        drop(ill);
    }
}

static void duplicates_count_each(void **state)
{
    struct world *w = world(41, HMOE_F32, &crowded, 0); /* K = 7 > E = 2 */
    int64_t K = w->layer.topk, H = w->layer.hidden;
    (void)state;

    for (int64_t slot = 0; slot < w->call.tokens * K; slot++) {
        set_id(w, slot, slot % K < 4 ? 1 : -1);
        num_store(w->call.weights_type, w->weights, slot, 0.25f);
    }
    forward(w);
    for (int64_t t = 0; t < w->call.tokens; t++) /* four quarters of one output: exact */
        for (int k = 0; k < 4; k++)
            assert_memory_equal(y_row(w, t), (char *)w->slots + (size_t)(t * K + k) * row_bytes(w), row_bytes(w));
    assert_true(((const float *)w->y)[H] != 0);
    drop(w);
}

static void twice_the_weight(void **state)
{
    struct world *once = world(51, HMOE_F32, &odd_shape, BIASED), *twice = world(51, HMOE_F32, &odd_shape, BIASED);
    int64_t slots = once->call.tokens * once->layer.topk, values = once->call.tokens * once->layer.hidden;
    enum hmoe_dtype type = once->call.weights_type;
    (void)state;

    for (int64_t slot = 0; slot < slots; slot++)
        num_store(type, twice->weights, slot, 2 * num_load(type, once->weights, slot));
    forward(once);
    forward(twice);
    for (int64_t i = 0; i < values; i++)
        assert_int_equal(num_bits(((float *)twice->y)[i]), num_bits(2 * ((float *)once->y)[i]));
    drop(once);
    drop(twice);
}

static void alike_experts_alike_outputs(void **state)
{
    struct world *w = world(61, HMOE_BF16, &odd_shape, BIASED);
    size_t up = (size_t)(w->layer.hidden * 2 * w->layer.inner) * 2, down = up / 2;
    (void)state;

    for (int e = 1; e < w->layer.experts; e++) {
        memcpy((char *)w->up + (size_t)e * up, w->up, up);
        memcpy((char *)w->down + (size_t)e * down, w->down, down);
        memcpy((char *)w->up_bias + (size_t)e * up / (size_t)w->layer.hidden, w->up_bias, up / (size_t)w->layer.hidden);
        memcpy((char *)w->down_bias + (size_t)e * row_bytes(w), w->down_bias, row_bytes(w));
    }
    for (int64_t slot = 0; slot < w->call.tokens * 3; slot++)
        set_id(w, slot, (slot + 1) % 4);
    forward(w);
    for (int64_t slot = 0; slot < w->call.tokens * 3; slot++)
        assert_memory_equal((char *)w->slots + (size_t)slot * row_bytes(w),
                            (char *)w->slots + (size_t)(slot / 3 * 3) * row_bytes(w), row_bytes(w));
    drop(w);
}

/* Nothing but y asked for, other id and weight types, another rounding mode at the caller: the same bits. */
static void forms_agree(void **state)
{
    struct world *w = world(72, HMOE_BF16, &odd_shape, 0), *other = world(72, HMOE_BF16, &odd_shape, 0);
    int64_t slots = w->call.tokens * w->layer.topk;
    int64_t *ids = malloc((size_t)slots * 8);
    float *weights = malloc((size_t)slots * 4);
    (void)state;

    assert_true(ids != NULL && weights != NULL && w->call.ids_type == HMOE_I64 && w->call.weights_type == HMOE_F32);
    memcpy(ids, w->ids, (size_t)slots * 8);
    other->call.ids_type = HMOE_I32;
    other->call.weights_type = HMOE_F16;
    for (int64_t slot = 0; slot < slots; slot++) {
        set_id(other, slot, ids[slot]);
        ((float *)w->weights)[slot] = num_round(HMOE_F16, ((float *)w->weights)[slot]);
        num_store(HMOE_F16, other->weights, slot, ((float *)w->weights)[slot]);
    }
    other->call.gate_up = other->call.a = other->call.slots = NULL;
    forward(w);
    fesetround(FE_UPWARD);
    forward(other);
    volatile float one = 1.0f, more = one + 0x1p-30f;
    fesetround(FE_TONEAREST);
    assert_memory_equal(w->y, other->y, y_bytes(w));
    assert_true(more > 1.0f);
    free(ids);
    free(weights);
    drop(w);
    drop(other);
}

static void no_tokens(void **state)
{
    const struct ref_layer layer = {.hidden = 3, .inner = 2, .experts = 1, .topk = 1};
    const struct ref_forward call = {.layer = &layer};
    (void)state;
    assert_int_equal(ref_moe_forward(&call), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(combine_in_its_order),
        cmocka_unit_test(denormal_inputs),
        cmocka_unit_test(gate_is_rounded_before_silu),
        cmocka_unit_test(chain_in_its_order),
        cmocka_unit_test(absent_terms_matter),
        cmocka_unit_test(strides),
        cmocka_unit_test(layouts_agree),
        cmocka_unit_test(gatings_agree),
        cmocka_unit_test(masked_slots_are_not_read),
        cmocka_unit_test(bad_values_stay_at_home),
        cmocka_unit_test(duplicates_count_each),
        cmocka_unit_test(twice_the_weight),
        cmocka_unit_test(alike_experts_alike_outputs),
        cmocka_unit_test(forms_agree),
        cmocka_unit_test(no_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
