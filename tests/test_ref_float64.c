/* The oracle against float64, stage by stage, with proven bounds. Each stage starts from the oracle's own rounded
 * result of the stage before, so that each bound is the bound of that stage alone. */
#include "ref_world.h"

/* One rounding to storage. */
static double storage_error(enum hmoe_dtype dtype, double value)
{
    if (dtype == HMOE_F32)
        return 0;
    return dtype == HMOE_BF16 ? fabs(value) * 0x1p-8 : fabs(value) * 0x1p-11 + 0x1p-25;
}

static void assert_near(double got, double wanted, double bound, enum hmoe_dtype dtype)
{
    double most = bound + storage_error(dtype, fabs(wanted) + bound);
    if (!(fabs(got - wanted) <= most))
        fail_msg("%.9g is not within %.3g of %.9g", got, most, wanted);
}

/* A weight's place in both layouts: [terms,columns] or [columns,terms] of expert e. */
static double weight_at(const struct world *w, const void *base, int64_t place[3], int64_t terms, int64_t columns)
{
    int64_t e = place[0], i = place[1], c = place[2];
    int64_t at = w->layer.layout == HMOE_KN ? (e * terms + i) * columns + c : (e * columns + c) * terms + i;
    return num_load(w->layer.dtype, base, at);
}

struct matrix {
    const void *in, *weight, *bias, *out; /* in and out: this slot's rows are first_in.., first_out.. */
    int64_t terms, columns;
};

/* n terms take 16 fused steps in a block, one addition of its halves, one for each block and one for the bias: each is
 * wrong by at most 2^-24 of a partial sum, which is at most the sum of sizes (and 1 %
 * for the growth of that sum). */
static void check_matrix(const struct world *w, const struct matrix *m, int64_t slot, int64_t row)
{
    int64_t expert = id_at(w, slot), steps = 16 + 1 + (m->terms + 31) / 32 + 1;
    enum hmoe_dtype dtype = w->layer.dtype;

    for (int64_t c = 0; c < m->columns; c++) {
        double sum = m->bias == NULL ? 0 : (double)num_load(dtype, m->bias, expert * m->columns + c), size = fabs(sum);
        for (int64_t i = 0; i < m->terms; i++) {
            double product = (double)num_load(dtype, m->in, row * m->terms + i) *
                             weight_at(w, m->weight, (int64_t[]){expert, i, c}, m->terms, m->columns);
            sum += product;
            size += fabs(product);
        }
        double bound = (double)steps * 0x1p-24 * 1.01 * size + 0x1p-120;
        assert_near(num_load(dtype, m->out, slot * m->columns + c), sum, bound, dtype);
    }
}

static double gated_in_double(const struct hmoe_activation *act, double gate, double up)
{
    gate = fmin(gate, (double)act->limit);
    up = fmax(fmin(up, (double)act->limit), -(double)act->limit) + (double)act->offset;
    return gate / (1 + exp(-(double)act->alpha * gate)) * up;
}

/* exp within 1 ulp, and where alpha * gate is rounded first within half an ulp of an exponent below 2^6 more: together
 * under 2^-18; without alpha under 2^-21. */
static void check_gated(const struct world *w, int64_t slot)
{
    const struct ref_layer *l = &w->layer;
    struct hmoe_activation act = num_activation(l->activation);

    for (int64_t i = 0; i < l->inner; i++) {
        bool halves = l->gating == HMOE_HALVES;
        float gate = num_load(l->dtype, w->gate_up, slot * 2 * l->inner + (halves ? i : 2 * i));
        float up = num_load(l->dtype, w->gate_up, slot * 2 * l->inner + (halves ? l->inner + i : 2 * i + 1));
        double wanted = gated_in_double(&act, (double)gate, (double)up);
        double bound = fabs(wanted) * (act.alpha == 1.0f ? 0x1p-21 : 0x1p-18);
        if (act.offset != 0.0f) /* up + offset may cancel */
            bound += fabs((double)gate) * 0x1p-24 * (fabs((double)up) + 1);
        assert_near(num_load(l->dtype, w->a, slot * l->inner + i), wanted, bound + 0x1p-120, l->dtype);
    }
}

static void check_token(const struct world *w, int64_t token)
{
    const struct ref_layer *l = &w->layer;

    for (int64_t h = 0; h < l->hidden; h++) {
        double sum = 0, size = 0;
        for (int64_t slot = token * l->topk; slot < (token + 1) * l->topk; slot++) {
            if (id_at(w, slot) < 0)
                continue;
            double term = (double)num_load(w->call.weights_type, w->weights, slot) *
                          (double)num_load(l->dtype, w->slots, slot * l->hidden + h);
            sum += term;
            size += fabs(term);
        }
        double bound = l->topk * 0x1p-24 * 1.01 * size + 0x1p-120;
        assert_near(num_load(l->dtype, w->y, token * l->hidden + h), sum, bound, l->dtype);
    }
}

static void check_world(const struct world *w)
{
    const struct ref_layer *l = &w->layer;
    const struct matrix up = {w->x, w->up, w->up_bias, w->gate_up, l->hidden, 2 * l->inner};
    const struct matrix down = {w->a, w->down, w->down_bias, w->slots, l->inner, l->hidden};

    for (int64_t slot = 0; slot < w->call.tokens * l->topk; slot++) {
        if (id_at(w, slot) < 0)
            continue;
        check_matrix(w, &up, slot, slot / l->topk);
        check_gated(w, slot);
        check_matrix(w, &down, slot, slot);
    }
    for (int64_t token = 0; token < w->call.tokens; token++)
        check_token(w, token);
}

static void against_double(void **state)
{
    const struct shape *shapes[] = {&odd_shape, &two_block_shape, &crowded};
    uint64_t seed = 1;
    (void)state;

    for (int d = 0; d < 3; d++)
        for (int variant = 0; variant < VARIANTS; variant++)
            for (int s = 0; s < 3; s++) {
                struct world *w = world(seed++, dtypes[d], shapes[s], variant);
                forward(w);
                check_world(w);
                drop(w);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_double),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
