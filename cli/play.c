/* One case of `hmoe check` through one engine, ranks as threads. */
#include "check.h"

#include <string.h>

const char *check_stage_name(enum check_stage stage)
{
    static const char *const names[] = {"rows", "gate/up", "a", "slot outputs", "y", "dx", "d_topk_weights",
                                        "d_up_proj", "d_down_proj", "d_up_bias", "d_down_bias", "d_shared_up_proj",
                                        "d_shared_down_proj"};
    return names[stage];
}

/* Does a come before b on the data's way? */
static bool earlier(const struct check_finding *a, const struct check_finding *b)
{
    if (a->again != b->again)
        return b->again;
    return a->stage != b->stage ? a->stage < b->stage : a->difference.token < b->difference.token;
}

void check_report(struct check_play *play, const struct check_finding *finding)
{
    struct check_finding *kept = &play->finding;

    if (!finding->difference.differing)
        return;
    pthread_mutex_lock(&play->lock);
    if (!kept->difference.differing || earlier(finding, kept))
        *kept = *finding;
    pthread_mutex_unlock(&play->lock);
}

/* This rank's first `tokens` rows of y. */
static void compare_rows(struct check_play *play, int rank, int64_t tokens, bool again)
{
    const struct case_data *data = play->data;
    size_t row = kern_row_bytes(data->shape.dtype, data->shape.hidden);

    for (int64_t t = data->first[rank]; t < data->first[rank] + tokens; t++) {
        struct check_finding finding = {.again = again, .stage = CHECK_Y, .rank = rank, .slot = -1,
                                        .difference.token = t};
        cli_compare_row(data->shape.dtype, (char *)data->y + (size_t)t * row, (char *)data->wanted + (size_t)t * row,
                        data->shape.hidden, &finding.difference);
        check_report(play, &finding);
    }
}

static bool one_call(struct check_play *play, struct cli_player *player, struct hmoe_plan *plan, bool again)
{
    const struct case_data *data = play->data;
    int rank = player->boot->rank;
    int64_t tokens = again ? data->tokens[rank] / 2 : data->tokens[rank];
    struct hmoe_call call = case_call(data, rank, tokens);
    struct check_tap *tap = play->wanted ? check_tap_begin(data, plan) : NULL;
    bool fine;

    if (play->wanted && !tap)
        snprintf(cli_seat_of(player)->error, HMOE_ERROR_BYTES, "out of memory for the stages");
    if (tokens)
        memset(call.y, 0xa5, (size_t)tokens * kern_row_bytes(data->shape.dtype, data->shape.hidden));
    fine = cli_note(player, hmoe_forward(plan, &call));
    if (fine)
        compare_rows(play, rank, tokens, again);
    if (fine && tap)
        check_tap_compare(tap, play, plan, (struct check_finding){.again = again, .rank = rank}, tokens);
    if (tap)
        check_tap_end(tap, plan);
    /* with taps a rank's next call would overwrite what others still look at */
    return fine && (!play->wanted || (tap && cli_barrier(player)));
}

int64_t check_most_tokens(const struct case_data *data)
{
    int64_t most = 1;

    for (int r = 0; r < data->ranks; r++)
        most = data->tokens[r] > most ? data->tokens[r] : most;
    return most;
}

static int play_rank(const struct hmoe_boot *boot, void *argument)
{
    struct check_play *play = argument;
    struct cli_player player = {.boot = boot, .seats = play->seats};
    struct hmoe_plan_options options = cli_plan_options(&play->data->shape, check_most_tokens(play->data), NULL);
    struct hmoe_plan *plan = NULL;
    bool fine;

    if (!cli_enter(&player, play->data->workers, play->knobs))
        return 1;
    fine = cli_note(&player, hmoe_plan_create(player.group, &options, &plan));
    fine = fine && one_call(play, &player, plan, false) && one_call(play, &player, plan, true);
    if (plan)
        fine = cli_note(&player, hmoe_plan_destroy(plan)) && fine;
    return cli_leave(&player, fine) ? 0 : 1;
}

bool check_launch(struct check_play *play, hmoe_rank_fn rank, void *argument)
{
    enum hmoe_status status;
    int failed;

    memset(play->seats, 0, sizeof play->seats);
    play->finding = (struct check_finding){0};
    pthread_mutex_init(&play->lock, NULL);
    status = hmoe_launch(HMOE_VIA_THREADS, play->data->ranks, rank, argument);
    pthread_mutex_destroy(&play->lock);
    failed = cli_first_error(play->seats, play->data->ranks);
    if (status != HMOE_OK && failed < 0)
        snprintf(play->seats[0].error, HMOE_ERROR_BYTES, "%s", hmoe_last_error());
    return status == HMOE_OK && failed < 0 && !play->finding.difference.differing;
}

bool check_run(struct check_play *play)
{
    return check_launch(play, play_rank, play);
}
