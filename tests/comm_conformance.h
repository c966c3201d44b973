/* What every transport must do. A test file of a transport launches ranks and runs each case of conformance_cases. A
 * case runs in every rank, on an open group, and returns 0 or the line of the check that failed. */
#ifndef COMM_CONFORMANCE_H
#define COMM_CONFORMANCE_H

#include "base/clock.h"
#include "base/memory.h"
#include "comm/comm.h"
#include "comm/launch.h"
#include "comm_check.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CONFORMANCE_PATIENCE_NS 60000000000

/* Waits as workers do. False when the group failed or patience ended. */
static bool conformance_await(struct comm_window *window, size_t offset, uint64_t goal)
{
    struct comm *comm = window->comm;
    int64_t end_ns = base_now_ns() + CONFORMANCE_PATIENCE_NS;
    struct base_error error;

    for (;;) {
        uint32_t seen = comm_bell(comm);
        if (comm_counter(window, offset) >= goal)
            return true;
        if (comm_failed(comm, &error) != HMOE_OK || base_now_ns() > end_ns)
            return false;
        if (!comm_sleep(comm, seen, COMM_SLEEP_MOST_NS))
            comm->transport->watch(comm);
    }
}

/* All ranks meet, through the counter at `offset` of every window, for the count-th time (from 1). */
static bool conformance_meet(struct comm_window *window, size_t offset, uint64_t count)
{
    struct comm *comm = window->comm;

    for (int r = 0; r < comm->boot.ranks; r++)
        comm->transport->signal(window, r, offset, 1);
    return conformance_await(window, offset, count * (uint64_t)comm->boot.ranks);
}

static enum hmoe_status conformance_window(struct comm *comm, size_t bytes, struct comm_window *window)
{
    struct base_error error = {.status = HMOE_OK};

    if (comm->transport->window_create(comm, bytes, window, &error) != HMOE_OK)
        fprintf(stderr, "rank %d: %s\n", comm->boot.rank, error.text);
    return error.status;
}

/* ------------------------------------------------------------------ windows */

static int conformance_one_size(struct comm *comm, size_t bytes)
{
    struct comm_window window;
    int me = comm->boot.rank, ranks = comm->boot.ranks;
    size_t meet = (bytes - 8) & ~(size_t)7; /* the last whole counter */

    CHECK(conformance_window(comm, bytes, &window) == HMOE_OK);
    CHECK(window.comm == comm && window.bytes == bytes);
    for (size_t i = 0; i < bytes; i++)
        if (i < meet || i >= meet + 8)
            CHECK(window.base[me][i] == 0);
    CHECK(base_resident(window.base[me], bytes) >= bytes);
    CHECK(conformance_meet(&window, meet, 1)); /* nobody writes before all have looked */
    for (int r = 0; r < ranks; r++)
        comm->transport->put(&window, r, (size_t)me * 3, "abc", 3);
    CHECK(conformance_meet(&window, meet, 2));
    for (int r = 0; r < ranks; r++)
        for (int source = 0; source < ranks; source++)
            CHECK(memcmp(comm_peer(&window, r) + source * 3, "abc", 3) == 0);
    CHECK(conformance_meet(&window, meet, 3));
    comm->transport->window_destroy(&window);
    return 0;
}

static int conformance_windows(struct comm *comm)
{
    static const size_t sizes[] = {64, 4096, 4104, ((size_t)2 << 20) - 8, (size_t)2 << 20, ((size_t)5 << 20) + 104};
    int line = 0;

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && line == 0; i++)
        line = conformance_one_size(comm, sizes[i]);
    return line;
}

static int conformance_absurd(struct comm *comm)
{
    static const size_t absurd[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 50, (size_t)1 << 62};
    struct base_error error;
    struct comm_window window;

    for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
        CHECK(comm->transport->window_create(comm, absurd[i], &window, &error) == HMOE_ERR_MEMORY);
        CHECK(error.status == HMOE_ERR_MEMORY && strstr(error.text, "do not fit"));
    }
    CHECK(comm->transport->window_create(comm, 0, &window, &error) == HMOE_ERR_ARGUMENT);
    return conformance_one_size(comm, 1000);
}

/* One rank asks for something else: all are told the same. */
static int conformance_unequal_sizes(struct comm *comm)
{
    int last = comm->boot.ranks - 1;
    size_t bytes = comm->boot.rank == last ? (size_t)1 << 50 : 4096;
    struct base_error error = {.status = HMOE_OK};
    struct comm_window window;
    char expected[100];

    if (last == 0)
        return 0;
    CHECK(comm->transport->window_create(comm, bytes, &window, &error) == HMOE_ERR_MISMATCH);
    snprintf(expected, sizeof expected, "rank 0 wants a window of 4096 bytes, rank %d of %zu", last, (size_t)1 << 50);
    CHECK(strcmp(error.text, expected) == 0);
    return conformance_one_size(comm, 1000);
}

/* -------------------------------------------------------------- put, signal */

enum { STREAM_WORDS = 512, STREAM_SLOTS = 3 };

static uint64_t conformance_pattern(int rank, uint64_t message, size_t word)
{
    return (message + 1) * 0x9e3779b97f4a7c15u ^ (uint64_t)rank << 32 ^ word;
}

static size_t conformance_length(uint64_t message)
{
    return 1 + (size_t)(message * 37 % STREAM_WORDS);
}

/* Counters: 0 arrived, 64 credit (slots that my reader has freed). Then the slots. */
static void conformance_write(struct comm_window *window, int to, uint64_t message)
{
    const struct comm_transport *transport = window->comm->transport;
    uint64_t words[STREAM_WORDS];
    size_t count = conformance_length(message);

    for (size_t i = 0; i < count; i++)
        words[i] = conformance_pattern(window->comm->boot.rank, message, i);
    transport->put(window, to, 128 + (size_t)(message % STREAM_SLOTS) * sizeof words, words, count * 8);
    transport->signal(window, to, 0, 1);
}

static bool conformance_right(struct comm_window *window, int from, uint64_t message)
{
    const char *slot = comm_peer(window, window->comm->boot.rank) + 128 + message % STREAM_SLOTS * STREAM_WORDS * 8;
    uint64_t word;

    for (size_t i = 0; i < conformance_length(message); i++) {
        memcpy(&word, slot + i * 8, 8);
        if (word != conformance_pattern(from, message, i))
            return false;
    }
    return true;
}

/* Each rank writes to the next and reads from the one before. Even messages are read the moment the counter shows
 * them, without a sleep in between. */
static int conformance_stream(struct comm *comm)
{
    int me = comm->boot.rank, ranks = comm->boot.ranks, next = (me + 1) % ranks, before = (me + ranks - 1) % ranks;
    struct comm_window window;
    uint64_t messages = 20000 / COMM_SHARE;

    CHECK(conformance_window(comm, 128 + STREAM_SLOTS * STREAM_WORDS * 8, &window) == HMOE_OK);
    for (uint64_t m = 0; m < messages; m++) {
        if (m >= STREAM_SLOTS)
            CHECK(conformance_await(&window, 64, m - STREAM_SLOTS + 1));
        conformance_write(&window, next, m);
        for (int spins = 0; m % 2 == 0 && spins < 2000 && comm_counter(&window, 0) <= m; spins++)
            ;
        CHECK(comm_counter(&window, 0) > m || conformance_await(&window, 0, m + 1));
        CHECK(conformance_right(&window, before, m));
        comm->transport->signal(&window, before, 64, 1);
    }
    CHECK(conformance_await(&window, 64, messages));
    comm->transport->window_destroy(&window);
    return 0;
}

enum { ADDERS = 2, ADDS = 20000 };

static void *conformance_adder(void *argument)
{
    struct comm_window *window = argument;
    int ranks = window->comm->boot.ranks;

    for (int i = 0; i < ADDS; i++)
        window->comm->transport->signal(window, i % ranks, 8 * (size_t)(i % 3), (uint64_t)1 << (16 * (i % 3)));
    return NULL;
}

/* From every rank and thread at once; nothing is lost, and nothing spills into the neighbour. */
static int conformance_sums(struct comm *comm)
{
    uint64_t expected[3] = {0}, ranks = (uint64_t)comm->boot.ranks;
    struct comm_window window;
    pthread_t thread[ADDERS];

    CHECK(conformance_window(comm, 256, &window) == HMOE_OK);
    for (int i = 0; i < ADDERS; i++)
        CHECK(pthread_create(&thread[i], NULL, conformance_adder, &window) == 0);
    for (int i = 0; i < ADDERS; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < ADDS; i++)
        if (i % comm->boot.ranks == comm->boot.rank)
            expected[i % 3] += ((uint64_t)1 << (16 * (i % 3))) * ADDERS * ranks;
    CHECK(conformance_meet(&window, 128, 1));
    for (size_t i = 0; i < 3; i++)
        CHECK(comm_counter(&window, 8 * i) == expected[i]);
    CHECK(conformance_meet(&window, 128, 2));
    comm->transport->window_destroy(&window);
    return 0;
}

/* ----------------------------------------------------------------- doorbell */

enum { PLAYERS = 2 };

struct conformance_player {
    struct comm_window *window;
    int partner;              /* its rank */
    size_t mine, partners;    /* counters */
    bool serves;
    uint64_t rounds;
    int lost, late;
};

/* Does the bell that was `seen` ring within a second? */
static bool conformance_rings(struct comm *comm, uint32_t seen)
{
    int64_t end_ns = base_now_ns() + 1000000000;

    while (atomic_load(&comm->control[comm->boot.rank]->bell) == seen)
        if (base_now_ns() > end_ns)
            return false;
    return true;
}

/* A sleep ran its 50 ms. That is right only if nobody rang: lost is news without a ring (beyond a second, so the ringer
 * was not just between signal and ring), late is a ring that did not wake. */
static void conformance_suspect(struct conformance_player *player, uint32_t seen, uint64_t goal)
{
    struct comm *comm = player->window->comm;
    _Atomic uint32_t *bell = &comm->control[comm->boot.rank]->bell;

    if (atomic_load(bell) != seen)
        player->late++;
    else if (comm_counter(player->window, player->mine) >= goal)
        player->lost += !conformance_rings(comm, seen);
    if (player->lost > 0 || player->late > 20)
        comm_fail(comm, comm->boot.rank, HMOE_ERR_ABORTED, "wake-ups are lost");
}

static bool conformance_receive(struct conformance_player *player, uint64_t goal)
{
    struct comm *comm = player->window->comm;
    struct base_error error;

    for (;;) {
        uint32_t seen = comm_bell(comm);
        if (comm_counter(player->window, player->mine) >= goal)
            return true;
        if (comm_failed(comm, &error) != HMOE_OK)
            return false;
        if (!comm_sleep(comm, seen, COMM_SLEEP_MOST_NS))
            conformance_suspect(player, seen, goal);
    }
}

static void *conformance_play(void *argument)
{
    struct conformance_player *player = argument;
    const struct comm_transport *transport = player->window->comm->transport;

    for (uint64_t i = 1; i <= player->rounds; i++) {
        if (player->serves)
            transport->signal(player->window, player->partner, player->partners, 1);
        if (!conformance_receive(player, i))
            break;
        if (!player->serves)
            transport->signal(player->window, player->partner, player->partners, 1);
    }
    return NULL;
}

/* Ranks play in pairs, thread by thread; a rank without a partner plays against itself. All threads of a rank share
 * its bell. */
static struct conformance_player conformance_player(struct comm_window *window, int thread, uint64_t rounds)
{
    int me = window->comm->boot.rank, partner = me ^ 1, against = thread;

    if (partner >= window->comm->boot.ranks) {
        partner = me;
        against = thread ^ 1;
    }
    return (struct conformance_player){.window = window, .partner = partner, .mine = 64 * (size_t)thread,
                                       .partners = 64 * (size_t)against, .rounds = rounds,
                                       .serves = partner == me ? thread == 0 : me < partner};
}

/* Of so many waits a few may be late, when the ringer lost its CPU between the add and the wake of the bell. */
static int conformance_doorbell_round(struct comm *comm, int64_t spin_ns, uint64_t rounds)
{
    struct conformance_player player[PLAYERS];
    struct comm_window window;
    pthread_t thread[PLAYERS];

    comm->spin_ns = spin_ns;
    CHECK(conformance_window(comm, 64 * (PLAYERS + 1), &window) == HMOE_OK);
    for (int i = 0; i < PLAYERS; i++) {
        player[i] = conformance_player(&window, i, rounds);
        CHECK(pthread_create(&thread[i], NULL, conformance_play, &player[i]) == 0);
    }
    for (int i = 0; i < PLAYERS; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < PLAYERS; i++) {
        CHECK(player[i].lost == 0 && player[i].late <= 2);
        CHECK(comm_counter(&window, player[i].mine) == rounds);
    }
    CHECK(conformance_meet(&window, 64 * PLAYERS, 1));
    comm->transport->window_destroy(&window);
    return 0;
}

/* With four ranks 3 x 100000 ping-pongs (over two pairs of ranks and two threads each) by eight threads. */
static int conformance_doorbell(struct comm *comm)
{
    static const int64_t spins_ns[] = {0, 4000, 0};
    uint64_t rounds = (comm->boot.ranks == 4 ? 25000u : 2500u) / COMM_SHARE;
    int line = 0;

    for (int i = 0; i < 3 && line == 0; i++)
        line = conformance_doorbell_round(comm, spins_ns[i], rounds);
    return line;
}

static int conformance_sleep_ends_here(struct comm *comm)
{
    int64_t start_ns = base_now_ns();
    uint32_t seen = comm_bell(comm);

    CHECK(!comm_sleep(comm, seen, 2000000) && base_now_ns() - start_ns >= 2000000);
    CHECK(!comm_sleep(comm, seen, 0) && !comm_sleep(comm, seen, -5));
    start_ns = base_now_ns();
    CHECK(!comm_sleep(comm, seen, INT64_MAX) && base_now_ns() - start_ns >= COMM_SLEEP_MOST_NS);
    comm_ring(comm, comm->boot.rank);
    CHECK(comm_sleep(comm, seen, 0)); /* a ring from before the sleep counts */
    CHECK(comm_bell(comm) != seen);
    return 0;
}

/* One rank after the other, so that nobody rings the sleeper. */
static int conformance_sleep_ends(struct comm *comm)
{
    int me = comm->boot.rank, line;
    struct comm_window window;

    CHECK(conformance_window(comm, 64, &window) == HMOE_OK);
    CHECK(conformance_await(&window, 0, me > 0));
    line = conformance_sleep_ends_here(comm);
    if (me + 1 < comm->boot.ranks)
        comm->transport->signal(&window, me + 1, 0, 1);
    CHECK(line == 0);
    if (me + 1 == comm->boot.ranks)
        for (int r = 0; r <= me; r++)
            comm->transport->signal(&window, r, 8, 1);
    CHECK(conformance_await(&window, 8, 1)); /* closing rings too */
    comm->transport->window_destroy(&window);
    return 0;
}

/* ----------------------------------------------------------- agree and fail */

static int conformance_agree(struct comm *comm)
{
    int me = comm->boot.rank, ranks = comm->boot.ranks;
    struct base_error error = {.status = HMOE_OK};
    char expected[50];

    CHECK(comm_agree(comm, &error) == HMOE_OK && error.status == HMOE_OK);
    for (int lowest = 0; lowest < ranks; lowest++) {
        error.status = HMOE_OK;
        if (me >= lowest)
            base_fail(&error, me == lowest ? HMOE_ERR_LIMIT : HMOE_ERR_ID, "rank %d is unhappy", me);
        CHECK(comm_agree(comm, &error) == HMOE_ERR_LIMIT && error.status == HMOE_ERR_LIMIT);
        snprintf(expected, sizeof expected, "rank %d is unhappy", lowest);
        CHECK(strcmp(error.text, expected) == 0);
    }
    error.status = HMOE_OK;
    CHECK(comm_agree(comm, &error) == HMOE_OK);
    return 0;
}

static int conformance_gather(struct comm *comm)
{
    int mine[3] = {comm->boot.rank, 7, -comm->boot.rank}, all[4][3];
    struct base_error error;

    CHECK(comm_allgather(comm, mine, all, sizeof mine, &error) == HMOE_OK);
    for (int r = 0; r < comm->boot.ranks; r++)
        CHECK(all[r][0] == r && all[r][1] == 7 && all[r][2] == -r);
    return 0;
}

/* The highest rank fails while the others sleep. */
static int conformance_fail(struct comm *comm)
{
    int me = comm->boot.rank, last = comm->boot.ranks - 1;
    int64_t end_ns = base_now_ns() + CONFORMANCE_PATIENCE_NS;
    struct base_error error = {.status = HMOE_OK};
    uint32_t seen = comm_bell(comm);
    char byte = 0, bytes[4];

    CHECK(comm_failed(comm, &error) == HMOE_OK);
    if (me == last) {
        usleep(20000);
        comm_fail(comm, last, HMOE_ERR_ABORTED, "enough");
        comm_fail(comm, 0, HMOE_ERR_TIMEOUT, "too late to be the first");
    }
    while (comm_failed(comm, &error) == HMOE_OK) {
        comm_sleep(comm, seen, COMM_SLEEP_MOST_NS);
        CHECK(base_now_ns() < end_ns);
    }
    CHECK(conformance_rings(comm, seen)); /* sleepers are woken, not left to their limit */
    CHECK(error.status == HMOE_ERR_ABORTED && strcmp(error.text, "enough") == 0);
    CHECK(comm->failure->rank == last);
    CHECK(comm_allgather(comm, &byte, bytes, 1, &error) == HMOE_ERR_ABORTED);
    CHECK(comm_agree(comm, &error) == HMOE_ERR_ABORTED && strcmp(error.text, "enough") == 0);
    return 0;
}

/* Ranks come to close at different times, and let go of their windows in different orders. */
static int conformance_close(struct comm *comm)
{
    int me = comm->boot.rank;
    struct comm_window a, b;

    CHECK(conformance_window(comm, 100000, &a) == HMOE_OK);
    CHECK(conformance_window(comm, (size_t)3 << 20, &b) == HMOE_OK);
    CHECK(conformance_meet(&a, 0, 1));
    comm->transport->window_destroy(me % 2 ? &a : &b);
    comm->transport->window_destroy(me % 2 ? &b : &a);
    usleep((unsigned)((comm->boot.ranks - me) * 3000));
    return 0;
}

/* After a failure a rank may let go of its window and close while others still write to it. */
static int conformance_leave_early(struct comm *comm)
{
    struct comm_window window;
    int me = comm->boot.rank, ranks = comm->boot.ranks;
    char byte = 1;

    CHECK(conformance_window(comm, (size_t)1 << 20, &window) == HMOE_OK);
    if (me == 0)
        comm_fail(comm, 0, HMOE_ERR_ABORTED, "rank 0 leaves");
    else
        usleep(20000);
    for (int r = 0; r < ranks; r++) {
        comm->transport->put(&window, r, 4096 * (size_t)(1 + me), &byte, 1);
        comm->transport->signal(&window, r, 0, 1);
    }
    CHECK(comm_counter(&window, 0) >= 1);
    comm->transport->window_destroy(&window);
    return 0;
}

/* -------------------------------------------------------------------- suite */

struct conformance_case {
    const char *name;
    int (*run)(struct comm *comm);
};

static const struct conformance_case conformance_cases[] = {
    {"doorbell", conformance_doorbell}, /* first: without it all others crawl */
    {"sleep ends", conformance_sleep_ends},
    {"windows", conformance_windows},
    {"absurd window", conformance_absurd},
    {"unequal windows", conformance_unequal_sizes},
    {"stream", conformance_stream},
    {"sums", conformance_sums},
    {"agree", conformance_agree},
    {"gather", conformance_gather},
    {"fail", conformance_fail},
    {"close", conformance_close},
    {"leave early", conformance_leave_early},
};

struct conformance_job {
    const char *transport;
    int (*run)(struct comm *comm);
};

/* A rank: opens the group, runs the case, closes. A case that fails takes the whole group along. */
static int conformance_rank(const struct hmoe_boot *boot, void *argument)
{
    const struct conformance_job *job = argument;
    struct comm_boot comm_boot = {.rank = boot->rank, .ranks = boot->ranks, .allgather = boot->allgather,
                                  .context = boot->allgather_context};
    struct base_error error;
    struct comm comm;
    int line;

    if (comm_open(&comm, &comm_boot, job->transport, &error) != HMOE_OK) {
        fprintf(stderr, "rank %d: %s\n", boot->rank, error.text);
        return -1;
    }
    line = job->run(&comm);
    if (line != 0)
        comm_fail(&comm, boot->rank, HMOE_ERR_ABORTED, "a check failed");
    comm_close(&comm);
    return line;
}

/* No rank's close returns before every rank has begun its own. */
static int conformance_close_waits(const struct hmoe_boot *boot, void *transport)
{
    struct comm_boot comm_boot = {.rank = boot->rank, .ranks = boot->ranks, .allgather = boot->allgather,
                                  .context = boot->allgather_context};
    int64_t times[2], all[4][2];
    struct base_error error;
    struct comm comm;

    CHECK(comm_open(&comm, &comm_boot, transport, &error) == HMOE_OK);
    usleep((unsigned)boot->rank * 10000);
    times[0] = base_now_ns();
    comm_close(&comm);
    times[1] = base_now_ns();
    CHECK(boot->allgather(boot->allgather_context, times, all, sizeof times) == 0);
    for (int r = 0; r < boot->ranks; r++)
        CHECK(times[1] >= all[r][0]);
    return 0;
}

/* 0, or 1 after saying what went wrong. */
static int conformance_launch(enum hmoe_via via, int ranks, const char *transport, int (*run)(struct comm *comm))
{
    struct conformance_job job = {.transport = transport, .run = run};
    struct base_error error;

    if (comm_launch(via, ranks, conformance_rank, &job, &error) == HMOE_OK)
        return 0;
    fprintf(stderr, "%d ranks: %s\n", ranks, error.text);
    return 1;
}

/* Up to the first case that fails. */
static int conformance_all(enum hmoe_via via, char *transport)
{
    struct base_error error;

    if (comm_launch(via, 4, conformance_close_waits, transport, &error) != HMOE_OK)
        return 1;
    for (size_t i = 0; i < sizeof conformance_cases / sizeof *conformance_cases; i++)
        for (int ranks = 1; ranks <= 4; ranks++)
            if (conformance_launch(via, ranks, transport, conformance_cases[i].run)) {
                fprintf(stderr, "%s over %s: failed with %d ranks\n", conformance_cases[i].name, transport, ranks);
                return 1;
            }
    return 0;
}

#endif
