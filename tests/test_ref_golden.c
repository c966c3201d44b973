/* The golden checks of docs/numerics.md: the oracle's bits, the same on every CPU and from every compiler. */
#include "ref_world.h"

struct golden {
    const char *name;
    uint64_t seed;
    enum hmoe_dtype dtype;
    int variant; /* as in ref_world.h */
    float x_scale, up_scale;
    uint64_t checksum, backward;
};

static const struct golden cases[] = {
    {"f32", 1, HMOE_F32, 0, 1, 1, 0xcadee692a9935044,
     0x10291f2b6e11247c},
    {"bf16", 2, HMOE_BF16, 0, 1, 1, 0x5bc5c3038b4369f9,
     0x0b013cd747175f9d},
    {"f16", 3, HMOE_F16, 0, 1, 1, 0xd00c8296bf2afd4e,
     0x438ae30c3eee461c},
    {"f32-oss", 4, HMOE_F32, BIASED | INTERLEAVED | NK | CLAMPED, 1, 4, 0xbe1bcea77432140e,
     0xdabd79ec66f2c559},
    {"bf16-oss", 5, HMOE_BF16, BIASED | INTERLEAVED | NK | CLAMPED, 1, 4, 0x0a9e3162eeba3ed0,
     0xb81237d4c953d760},
    {"f16-oss", 6, HMOE_F16, BIASED | INTERLEAVED | NK | CLAMPED, 1, 4, 0x8e5dfd0cbc87bb33,
     0x1cbbd2eafaf9fb61},
    {"f32-tiny", 7, HMOE_F32, 0, 0x1p-62f, 0x1p-62f, 0x9f4b2ed14b8dc17d,
     0x53e37426ddc288c5},
    {"bf16-tiny", 8, HMOE_BF16, BIASED, 0x1p-62f, 0x1p-62f, 0x2ba8f45e1240e112,
     0x6e61b0a5338f0ec0},
    {"f16-tiny", 9, HMOE_F16, 0, 0x1p-6f, 0x1p-10f, 0x98067963136b4d3a,
     0x51c99ceabe694f3c},
    {"bf16-huge", 10, HMOE_BF16, NK, 0x1p62f, 0x1p63f, 0x87f85b36fabc5916,
     0x810a865ed505b448},
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

static uint64_t backward_checksum(const struct world *w, const struct golden *g)
{
    const int64_t count[] = {4 * 70, 4 * 3, 3 * 70 * 2 * 37, 3 * 37 * 70, 3 * 2 * 37, 3 * 70};
    size_t bytes = num_bytes(g->dtype), size[6];
    uint64_t hash = 0xcbf29ce484222325u;
    void *out[6];
    struct ref_backward b = {.forward = &w->call, .dy = w->dy, .dw_type = g->dtype};

    for (int i = 0; i < 6; i++) {
        size[i] = (size_t)count[i] * (i == 1 ? 4 : bytes);
        out[i] = malloc(size[i]);
        assert_non_null(out[i]);
        memset(out[i], 0xa5, size[i]);
    }
    b.dx = out[0], b.d_topk_weights = out[1], b.d_up_proj = out[2], b.d_down_proj = out[3];
    if (g->variant & BIASED)
        b.d_up_bias = out[4], b.d_down_bias = out[5];
    assert_int_equal(ref_moe_backward(&b), 0);
    for (int i = 0; i < 6; i++) {
        if (i < 4 || g->variant & BIASED)
            hash = fnv(hash, out[i], size[i]);
        free(out[i]);
    }
    return hash;
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
    w->dy = tensor(&prng, g->dtype, s.tokens * s.hidden, 1);
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
        uint64_t got = checksum(w), back = backward_checksum(w, &cases[i]);
        if (got != cases[i].checksum || back != cases[i].backward)
            print_message("%s: %016llx, %016llx, not %016llx, %016llx\n", cases[i].name, (unsigned long long)got,
                          (unsigned long long)back, (unsigned long long)cases[i].checksum,
                          (unsigned long long)cases[i].backward);
        wrong += got != cases[i].checksum || back != cases[i].backward;
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
