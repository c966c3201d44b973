/* The golden checks of docs/numerics.md: the oracle's bits, the same on every CPU and from every compiler. */
#include "ref_world.h"

struct golden {
    const char *name;
    uint64_t seed;
    enum hmoe_dtype dtype;
    int variant; /* as in ref_world.h */
    float x_scale, up_scale;
    uint64_t checksum;
};

static const struct golden cases[] = {
    {"f32", 1, HMOE_F32, 0, 1, 1, 0xcadee692a9935044},
    {"bf16", 2, HMOE_BF16, 0, 1, 1, 0x5bc5c3038b4369f9},
    {"f16", 3, HMOE_F16, 0, 1, 1, 0xd00c8296bf2afd4e},
    {"f32-oss", 4, HMOE_F32, BIASED | INTERLEAVED | NK | CLAMPED, 1, 4, 0xbe1bcea77432140e},
    {"bf16-oss", 5, HMOE_BF16, BIASED | INTERLEAVED | NK | CLAMPED, 1, 4, 0x0a9e3162eeba3ed0},
    {"f16-oss", 6, HMOE_F16, BIASED | INTERLEAVED | NK | CLAMPED, 1, 4, 0x8e5dfd0cbc87bb33},
    {"f32-tiny", 7, HMOE_F32, 0, 0x1p-62f, 0x1p-62f, 0x9f4b2ed14b8dc17d},
    {"bf16-tiny", 8, HMOE_BF16, BIASED, 0x1p-62f, 0x1p-62f, 0x2ba8f45e1240e112},
    {"f16-tiny", 9, HMOE_F16, 0, 0x1p-6f, 0x1p-10f, 0x98067963136b4d3a},
    {"bf16-huge", 10, HMOE_BF16, NK, 0x1p62f, 0x1p63f, 0x87f85b36fabc5916},
};

static uint64_t fnv(uint64_t hash, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

/* The rows of the slots that are not masked. */
static uint64_t fnv_rows(uint64_t hash, const struct world *w, const void *rows, int64_t columns)
{
    size_t bytes = (size_t)columns * num_bytes(w->layer.dtype);

    for (int64_t slot = 0; slot < w->call.tokens * w->layer.topk; slot++)
        if (id_at(w, slot) >= 0)
            hash = fnv(hash, (const char *)rows + (size_t)slot * bytes, bytes);
    return hash;
}

static uint64_t checksum(const struct world *w)
{
    uint64_t hash = 0xcbf29ce484222325u;

    hash = fnv_rows(hash, w, w->gate_up, 2 * w->layer.inner);
    hash = fnv_rows(hash, w, w->a, w->layer.inner);
    hash = fnv_rows(hash, w, w->slots, w->layer.hidden);
    return fnv(hash, w->y, (size_t)(w->call.tokens * w->layer.hidden) * num_bytes(w->layer.dtype));
}

/* The inputs are drawn here as the page says, not as ref_world.h does, which may change. */
static struct world *golden_world(const struct golden *g)
{
    const struct shape s = {4, 70, 37, 3, 3};
    struct world *w = calloc(1, sizeof *w);
    struct base_prng prng = {g->seed};
    assert_non_null(w);

    w->layer = (struct ref_layer){.hidden = 70, .inner = 37, .experts = 3, .topk = 3, .dtype = g->dtype};
    w->layer.layout = g->variant & NK ? HMOE_NK : HMOE_KN;
    w->layer.gating = g->variant & INTERLEAVED ? HMOE_INTERLEAVED : HMOE_HALVES;
    w->layer.activation = g->variant & CLAMPED ? oss : (struct hmoe_activation){0};
    w->call = (struct ref_forward){.tokens = s.tokens, .ids_type = HMOE_I32, .weights_type = HMOE_F32};
    w->x = tensor(&prng, g->dtype, s.tokens * s.hidden, g->x_scale);
    w->up = tensor(&prng, g->dtype, s.experts * s.hidden * 2 * s.inner, g->up_scale);
    w->down = tensor(&prng, g->dtype, s.experts * s.inner * s.hidden, 0.5f);
    if (g->variant & BIASED) {
        w->up_bias = tensor(&prng, g->dtype, s.experts * 2 * s.inner, 1);
        w->down_bias = tensor(&prng, g->dtype, s.experts * s.hidden, 1);
    }
    w->weights = tensor(&prng, HMOE_F32, s.tokens * s.topk, 1);
    w->ids = calloc((size_t)(s.tokens * s.topk), 8);
    assert_non_null(w->ids);
    for (int64_t slot = 0; slot < s.tokens * s.topk; slot++)
        set_id(w, slot, base_random_below(&prng, s.experts + 1) - 1);
    make_outputs(w);
    connect(w);
    return w;
}

static void golden(void **state)
{
    int wrong = 0;
    (void)state;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct world *w = golden_world(&cases[i]);
        forward(w);
        uint64_t got = checksum(w);
        if (got != cases[i].checksum)
            print_message("%s: %016llx, not %016llx\n", cases[i].name, (unsigned long long)got,
                          (unsigned long long)cases[i].checksum);
        wrong += got != cases[i].checksum;
        drop(w);
    }
    assert_int_equal(wrong, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
