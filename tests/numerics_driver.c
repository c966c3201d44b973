/* Prints what the library computes, in hex, for test_numerics_page.py to compute again from docs/numerics.md alone. One
 * line is one case: a word, the inputs, the outputs. Inputs are seeded, and thick with the numbers that go wrong. */
#include "base/fpenv.h"
#include "base/num.h"
#include "base/prng.h"
#include "ref/moe_ref.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const dtype_names[] = {"f32", "bf16", "f16"};

static const uint32_t awkward[] = {
    0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x80800001, 0x3f800000, 0xbf800000, 0x7f7fffff,
    0x7f800000, 0xff800000, 0x7fc00000, 0xff800001, 0x33000000, 0x33000001, 0x387fffff, 0x477fefff, 0x477ff000,
    0x42b00000, 0x42b00001, 0xc2ae0000, 0xc2ae0001, 0xc2aeac50, 0x40e00000, 0x40e00001, 0xc0e00000, 0x3fd9db23,
};
enum { AWKWARD = sizeof awkward / sizeof awkward[0] };

/* Any float: of any exponent, or near 1, or awkward. */
static float draw(struct base_prng *prng)
{
    uint32_t bits = (uint32_t)base_random(prng);

    switch (base_random_below(prng, 8)) {
    case 0:
        return num_float(awkward[base_random_below(prng, AWKWARD)]);
    case 1:
        return num_float(bits);
    case 2:
        return base_random_sym(prng, 0x1p-61f);
    case 3:
        return base_random_sym(prng, 100.0f);
    default:
        return base_random_sym(prng, 2.0f);
    }
}

/* Finite, and so that sums neither overflow nor vanish. */
static float draw_tame(struct base_prng *prng)
{
    return base_random_sym(prng, base_random_below(prng, 9) == 0 ? 64.0f : 1.0f);
}

static float draw_tiny(struct base_prng *prng)
{
    return base_random_sym(prng, 0x1p-62f);
}

/* Through memory, so that it happens under the control word. */
static uint32_t flushed(float (*function)(float), float x)
{
    uint64_t before = base_fp_enter();
    volatile float in = x, out = function(in);
    base_fp_leave(before);
    return num_bits(num_quiet(out));
}

/* A last bit of a small coefficient shows in so few results that it is compared by itself. */
static void print_constants(void)
{
    static const struct {
        const char *name;
        float value;
    } constants[] = {
        {"LEAST", NUM_EXP_LEAST}, {"MOST", NUM_EXP_MOST}, {"LOG2E", NUM_LOG2E}, {"SHIFT", NUM_ROUND},
        {"HI", -NUM_LN2_HI},      {"LO", NUM_LN2_LO},     {"C5", NUM_EXP_C5},   {"C4", NUM_EXP_C4},
        {"C3", NUM_EXP_C3},       {"C2", NUM_EXP_C2},     {"C1", NUM_EXP_C1},   {"C0", NUM_EXP_C0},
    };

    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        printf("constant %s %08x\n", constants[i].name, num_bits(constants[i].value));
}

static void print_rounding(float x)
{
    printf("round %08x %04x %04x %08x\n", num_bits(x), num_to_bf16(x), num_to_f16(x), num_bits(num_quiet(x)));
}

static void print_functions(float x)
{
    printf("exp %08x %08x\n", num_bits(x), flushed(num_exp, x));
    printf("sigmoid %08x %08x\n", num_bits(x), flushed(num_sigmoid, x));
}

static void print_gated(struct hmoe_activation act, float gate, float up)
{
    struct hmoe_activation full = num_activation(act);

    uint64_t before = base_fp_enter();
    volatile float g = gate, u = up, a = num_gated(&full, g, u);
    base_fp_leave(before);
    printf("gated %08x %08x %08x %08x %08x %08x\n", num_bits(full.alpha), num_bits(full.limit), num_bits(full.offset),
           num_bits(gate), num_bits(up), num_bits(num_quiet(a)));
}

static void print_tensor(enum hmoe_dtype dtype, const void *values, int64_t count)
{
    putchar(' ');
    for (int64_t i = 0; i < count; i++) {
        if (dtype == HMOE_F32)
            printf("%s%08x", i == 0 ? "" : ",", num_bits(((const float *)values)[i]));
        else
            printf("%s%04x", i == 0 ? "" : ",", ((const uint16_t *)values)[i]);
    }
}

static void *drawn(enum hmoe_dtype dtype, int64_t count, struct base_prng *prng, float (*next)(struct base_prng *))
{
    void *values = calloc((size_t)count, sizeof(float));

    if (values == NULL)
        abort();
    for (int64_t i = 0; i < count; i++)
        num_store(dtype, values, i, next(prng));
    return values;
}

static void print_chain(enum hmoe_dtype dtype, int64_t n, struct base_prng *prng, float (*next)(struct base_prng *))
{
    void *a = drawn(dtype, n, prng, next), *b = drawn(dtype, n, prng, next);
    uint64_t before = base_fp_enter();
    volatile float sum = ref_chain((struct ref_terms){dtype, a, 1}, (struct ref_terms){dtype, b, 1}, n);
    base_fp_leave(before);
    printf("chain %s", dtype_names[dtype]);
    print_tensor(dtype, a, n);
    print_tensor(dtype, b, n);
    printf(" %08x\n", num_bits(num_quiet(sum)));
    free(a);
    free(b);
}

enum { T = 2, H = 5, I = 3, E = 2, K = 3 };

/* x, up, down, up_bias, down_bias, y */
enum { TENSORS = 6 };
static const int64_t counts[TENSORS] = {T * H, E * H * 2 * I, E * I * H, E * 2 * I, E * H, T * H};

static void print_head(const struct ref_layer *layer)
{
    printf("layer %s %d %d %08x %08x %08x %d,%d,%d,%d,%d ", dtype_names[layer->dtype], (int)layer->layout,
           (int)layer->gating, num_bits(layer->activation.alpha), num_bits(layer->activation.limit),
           num_bits(layer->activation.offset), T, H, I, E, K);
}

/* One line a layer: dtype layout gating alpha limit offset T,H,I,E,K ids weights, the tensors. */
static void print_layer(enum hmoe_dtype dtype, int variant, struct base_prng *prng)
{
    const struct hmoe_activation oss = {1.702f, 7.0f, 1.0f}, silu = {1.0f, INFINITY, 0.0f};
    struct ref_layer layer = {.hidden = H, .inner = I, .experts = E, .topk = K, .dtype = dtype};
    struct ref_forward call = {.layer = &layer, .tokens = T};
    int32_t ids[T * K];
    void *tensor[TENSORS], *weights = drawn(HMOE_F32, T * K, prng, variant & 8 ? draw : draw_tame);

    for (int i = 0; i < TENSORS; i++)
        tensor[i] = drawn(dtype, counts[i], prng, i == 0 && variant & 8 ? draw : draw_tame);
    layer.activation = variant & 1 ? oss : silu;
    layer.layout = variant & 2 ? HMOE_NK : HMOE_KN;
    layer.gating = variant & 4 ? HMOE_INTERLEAVED : HMOE_HALVES;
    layer.up_proj = tensor[1], layer.down_proj = tensor[2], layer.up_bias = tensor[3], layer.down_bias = tensor[4];
    call.x = tensor[0], call.y = tensor[5], call.topk_ids = ids, call.topk_weights = weights;
    print_head(&layer);
    for (int slot = 0; slot < T * K; slot++) {
        ids[slot] = (int32_t)base_random_below(prng, E + 1) - 1;
        printf("%s%d", slot == 0 ? "" : ",", ids[slot]);
    }
    if (ref_moe_forward(&call) != 0)
        abort();
    print_tensor(HMOE_F32, weights, T * K);
    for (int i = 0; i < TENSORS; i++) {
        print_tensor(dtype, tensor[i], counts[i]);
        free(tensor[i]);
    }
    putchar('\n');
    free(weights);
}

static void print_scalars(struct base_prng *prng)
{
    const struct hmoe_activation acts[] = {{0, 0, 0}, {1.702f, 7.0f, 1.0f}, {0, 7.0f, 0}};

    for (int i = 0; i < AWKWARD; i++) {
        print_rounding(num_float(awkward[i]));
        print_functions(num_float(awkward[i]));
    }
    for (int i = 0; i < 3000; i++) {
        print_rounding(draw(prng));
        print_functions(draw(prng));
    }
    for (int i = 0; i < 2000; i++) {
        float gate = draw(prng), up = draw(prng);
        print_gated(acts[i % 3], gate, up);
    }
}

int main(void)
{
    struct base_prng prng = {1};

    print_constants();
    print_scalars(&prng);
    for (int64_t n = 1; n <= 128; n++)
        for (int dtype = 0; dtype < 3; dtype++) {
            print_chain((enum hmoe_dtype)dtype, n, &prng, draw_tame);
            print_chain((enum hmoe_dtype)dtype, n, &prng, n % 4 == 0 ? draw : draw_tiny);
        }
    for (int variant = 0; variant < 16; variant++)
        for (int dtype = 0; dtype < 3; dtype++)
            for (int i = 0; i < 3; i++)
                print_layer((enum hmoe_dtype)dtype, variant, &prng);
    return 0;
}
