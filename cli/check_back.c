/* One case of `hmoe check --backward` through one engine: a forward that saves, then its backward, ranks as threads. */
#include "check.h"

#include "base/memory.h"
#include "base/num.h"
#include "base/prng.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One gradient of the whole batch: `lines` lines of `columns`, of which each rank has an equal part, or its tokens. */
struct output {
    enum hmoe_dtype dtype;
    bool by_token;
    int64_t lines, columns;
    char *got, *wanted;
};

struct check_back {
    struct check_play *play;
    enum hmoe_dtype dw_type;
    enum hmoe_dw_mode dw_mode;
    struct hmoe_saved_options options;
    int split; /* backward_input and backward_weight */
    int shared;
    int64_t shared_inner;
    char *dy, *shared_up, *shared_down;
    struct output out[CHECK_OUTPUTS];
    void *memory;
};

/* ---------------------------------------------------------------- the case */

static void pick_modes(struct check_back *back, struct base_prng *prng)
{
    const struct cli_shape *shape = &back->play->data->shape;

    back->dw_type = base_random_below(prng, 2) ? HMOE_F32 : shape->dtype;
    back->dw_mode = (enum hmoe_dw_mode)base_random_below(prng, 2);
    back->options = (struct hmoe_saved_options){.size = sizeof back->options,
                                                .keep_rows = (int)base_random_below(prng, 2),
                                                .recompute = (int)base_random_below(prng, 2)};
    back->split = (int)base_random_below(prng, 2);
    back->shared = base_random_below(prng, 3) ? 0 : 1 + (int)base_random_below(prng, 2);
    back->shared_inner = back->shared ? 1 + base_random_below(prng, 80) : 0;
}

static void list_outputs(struct check_back *back)
{
    const struct case_data *data = back->play->data;
    const struct cli_shape *s = &data->shape;
    int64_t tokens = data->first[data->ranks], up = 2 * s->hidden * s->inner, down = s->hidden * s->inner;
    int64_t shared = data->ranks * back->shared, wide = s->hidden * back->shared_inner;
    const struct output list[CHECK_OUTPUTS] = {
        {s->dtype, true, tokens, s->hidden, NULL, NULL},
        {data->weights_type, true, tokens, s->topk, NULL, NULL},
        {back->dw_type, false, s->experts, up, NULL, NULL},
        {back->dw_type, false, s->experts, down, NULL, NULL},
        {back->dw_type, false, s->biased ? s->experts : 0, 2 * s->inner, NULL, NULL},
        {back->dw_type, false, s->biased ? s->experts : 0, s->hidden, NULL, NULL},
        {back->dw_type, false, shared, 2 * wide, NULL, NULL},
        {back->dw_type, false, shared, wide, NULL, NULL},
    };

    memcpy(back->out, list, sizeof list);
}

static size_t place(struct check_back *back)
{
    const struct case_data *data = back->play->data;
    const struct cli_shape *s = &data->shape;
    struct base_carve carve = {back->memory, 0};
    int64_t wide = back->shared * s->hidden * back->shared_inner;

    back->dy = base_carve(&carve, kern_row_bytes(s->dtype, data->first[data->ranks] * s->hidden));
    back->shared_up = base_carve(&carve, kern_row_bytes(s->dtype, 2 * wide));
    back->shared_down = base_carve(&carve, kern_row_bytes(s->dtype, wide));
    for (int i = 0; i < CHECK_OUTPUTS; i++) {
        struct output *out = &back->out[i];
        out->got = base_carve(&carve, kern_row_bytes(out->dtype, out->lines * out->columns));
        out->wanted = base_carve(&carve, kern_row_bytes(out->dtype, out->lines * out->columns));
    }
    return carve.used;
}

static void fill(struct base_prng *prng, enum hmoe_dtype dtype, char *base, int64_t count, float scale)
{
    for (int64_t i = 0; i < count; i++)
        num_store(dtype, base, i, base_random_sym(prng, scale));
}

/* Numbers to add to, or what must be overwritten. */
static void fill_outputs(struct check_back *back, struct base_prng *prng)
{
    for (int i = 0; i < CHECK_OUTPUTS; i++) {
        struct output *out = &back->out[i];
        int64_t count = out->lines * out->columns;
        if (out->by_token || back->dw_mode == HMOE_OVERWRITE)
            memset(out->wanted, 0xa5, kern_row_bytes(out->dtype, count));
        else
            fill(prng, out->dtype, out->wanted, count, 1.0f);
        memcpy(out->got, out->wanted, kern_row_bytes(out->dtype, count));
    }
}

static struct ref_forward ref_forward_of(const struct check_back *back, int64_t first, int64_t tokens)
{
    const struct case_data *data = back->play->data;
    int64_t slot = first * data->shape.topk;

    return (struct ref_forward){
        .layer = &data->layer, .tokens = tokens, .ids_type = data->ids_type, .weights_type = data->weights_type,
        .x = (char *)data->x + kern_row_bytes(data->shape.dtype, first * data->shape.hidden),
        .topk_ids = (char *)data->ids + slot * (data->ids_type == HMOE_I32 ? 4 : 8),
        .topk_weights = (char *)data->weights + kern_row_bytes(data->weights_type, slot), .y = data->wanted};
}

static char *line(const struct output *out, char *base, int64_t index)
{
    return base + kern_row_bytes(out->dtype, index * out->columns);
}

/* The shared experts' gradients are of one rank's tokens. */
static bool solve_shared(struct check_back *back, int rank)
{
    const struct case_data *data = back->play->data;
    struct output *up = &back->out[CHECK_D_SHARED_UP - CHECK_DX], *down = up + 1;
    struct ref_forward forward = ref_forward_of(back, data->first[rank], data->tokens[rank]);
    struct ref_backward backward = {
        .forward = &forward, .dw_type = back->dw_type, .dw_mode = back->dw_mode,
        .dy = back->dy + kern_row_bytes(data->shape.dtype, data->first[rank] * data->shape.hidden),
        .d_shared_up = line(up, up->wanted, rank * back->shared),
        .d_shared_down = line(down, down->wanted, rank * back->shared)};

    return ref_moe_backward(&backward) == 0;
}

static bool solve(struct check_back *back)
{
    const struct case_data *data = back->play->data;
    struct ref_forward forward = ref_forward_of(back, 0, data->first[data->ranks]);
    struct output *out = back->out;
    struct ref_backward backward = {
        .forward = &forward, .dy = back->dy, .dw_type = back->dw_type, .dw_mode = back->dw_mode,
        .dx = out[0].wanted, .d_topk_weights = out[1].wanted, .d_up_proj = out[2].wanted,
        .d_down_proj = out[3].wanted, .d_up_bias = out[4].lines ? out[4].wanted : NULL,
        .d_down_bias = out[5].lines ? out[5].wanted : NULL};
    bool fine = ref_moe_forward(&forward) == 0 && ref_moe_backward(&backward) == 0;

    for (int r = 0; r < data->ranks && back->shared && fine; r++)
        fine = solve_shared(back, r);
    return fine;
}

static bool make(struct check_back *back)
{
    struct case_data *data = back->play->data;
    struct base_prng prng = {data->seed * 31 + 17};
    int64_t wide;

    pick_modes(back, &prng);
    list_outputs(back);
    back->memory = aligned_alloc(64, place(back) + 64);
    if (!back->memory)
        return false;
    place(back);
    wide = back->shared * data->shape.hidden * back->shared_inner;
    fill(&prng, data->shape.dtype, back->dy, data->first[data->ranks] * data->shape.hidden, 1.0f);
    fill(&prng, data->shape.dtype, back->shared_up, 2 * wide, 0.3f);
    fill(&prng, data->shape.dtype, back->shared_down, wide, 0.3f);
    data->layer.shared = back->shared;
    data->layer.shared_inner = back->shared_inner;
    data->layer.shared_up = back->shared_up;
    data->layer.shared_down = back->shared_down;
    fill_outputs(back, &prng);
    return solve(back);
}

/* --------------------------------------------------------------- the ranks */

/* Lines [first, first + count) of an output are the rank's. */
struct lines {
    int64_t first, count;
};

static struct lines lines_of(const struct check_back *back, int i, int rank)
{
    const struct case_data *data = back->play->data;
    int64_t share = back->out[i].lines / data->ranks;

    if (back->out[i].by_token)
        return (struct lines){data->first[rank], data->tokens[rank]};
    return (struct lines){share * rank, share};
}

static void compare(struct check_back *back, int rank)
{
    for (int i = 0; i < CHECK_OUTPUTS; i++) {
        struct output *out = &back->out[i];
        struct lines lines = lines_of(back, i, rank);
        for (int64_t n = lines.first; n < lines.first + lines.count; n++) {
            struct check_finding finding = {.stage = (enum check_stage)(CHECK_DX + i), .rank = rank, .slot = -1,
                                            .difference.token = n};
            cli_compare_row(out->dtype, line(out, out->got, n), line(out, out->wanted, n), out->columns,
                            &finding.difference);
            check_report(back->play, &finding);
        }
    }
}

static struct hmoe_gradients gradients_of(const struct check_back *back, int rank)
{
    const struct case_data *data = back->play->data;
    char *part[CHECK_OUTPUTS];
    bool any = data->tokens[rank] > 0;

    for (int i = 0; i < CHECK_OUTPUTS; i++) {
        struct lines lines = lines_of(back, i, rank);
        part[i] = lines.count ? line(&back->out[i], back->out[i].got, lines.first) : NULL;
    }
    return (struct hmoe_gradients){
        .dy = any ? back->dy + kern_row_bytes(data->shape.dtype, data->first[rank] * data->shape.hidden) : NULL,
        .dx = part[0], .d_topk_weights = part[1], .d_up_proj = part[2], .d_down_proj = part[3], .d_up_bias = part[4],
        .d_down_bias = part[5], .d_shared_up_proj = part[6], .d_shared_down_proj = part[7], .dw_type = back->dw_type,
        .dw_mode = back->dw_mode};
}

static bool both_ways(struct check_back *back, struct cli_player *player, struct hmoe_plan *plan,
                      struct hmoe_saved *saved)
{
    int rank = player->boot->rank;
    struct hmoe_call forward = case_call(back->play->data, rank, back->play->data->tokens[rank]);
    struct hmoe_call call = {.size = sizeof call, .saved = saved, .grad = gradients_of(back, rank)};

    forward.saved = saved;
    forward.layer.shared_up_proj = back->shared ? back->shared_up : NULL;
    forward.layer.shared_down_proj = back->shared ? back->shared_down : NULL;
    if (!cli_note(player, hmoe_forward(plan, &forward)))
        return false;
    if (!back->split)
        return cli_note(player, hmoe_backward(plan, &call));
    return cli_note(player, hmoe_backward_input(plan, &call)) && cli_note(player, hmoe_backward_weight(plan, &call));
}

static bool with_plan(struct check_back *back, struct cli_player *player, struct hmoe_plan *plan)
{
    struct hmoe_saved *saved = NULL;
    bool fine = cli_note(player, hmoe_saved_create(plan, &back->options, &saved));

    fine = fine && both_ways(back, player, plan, saved);
    if (fine)
        compare(back, player->boot->rank);
    if (saved)
        fine = cli_note(player, hmoe_saved_destroy(saved)) && fine;
    return fine;
}

static int back_rank(const struct hmoe_boot *boot, void *argument)
{
    struct check_back *back = argument;
    const struct case_data *data = back->play->data;
    struct cli_player player = {.boot = boot, .seats = back->play->seats};
    struct hmoe_plan_options options = cli_plan_options(&data->shape, check_most_tokens(data), NULL);
    struct hmoe_plan *plan = NULL;
    bool fine;

    options.training = 1;
    options.shared_experts = back->shared;
    options.shared_inner = back->shared_inner;
    if (!cli_enter(&player, data->workers, back->play->knobs))
        return 1;
    fine = cli_note(&player, hmoe_plan_create(player.group, &options, &plan));
    fine = fine && with_plan(back, &player, plan);
    if (plan)
        fine = cli_note(&player, hmoe_plan_destroy(plan)) && fine;
    return cli_leave(&player, fine) ? 0 : 1;
}

bool check_back_run(struct check_play *play)
{
    struct check_back back = {.play = play};
    bool fine = make(&back);

    if (!fine)
        snprintf(play->seats[0].error, HMOE_ERROR_BYTES, "out of memory");
    fine = fine && check_launch(play, back_rank, &back);
    free(back.memory);
    return fine;
}
