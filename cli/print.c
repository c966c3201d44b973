#include "cli.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

const char *cli_bytes(char *buffer, double bytes)
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    int unit = 0;

    while (bytes >= 999.5 && unit < 6) {
        bytes /= 1000.0;
        unit++;
    }
    snprintf(buffer, CLI_TEXT_BYTES, unit && bytes < 99.95 ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return buffer;
}

const char *cli_time(char *buffer, double ns)
{
    if (ns < 999.5e3)
        snprintf(buffer, CLI_TEXT_BYTES, "%.1f us", ns / 1e3);
    else if (ns < 999.5e6)
        snprintf(buffer, CLI_TEXT_BYTES, "%.2f ms", ns / 1e6);
    else
        snprintf(buffer, CLI_TEXT_BYTES, "%.2f s", ns / 1e9);
    return buffer;
}

const char *cli_count(char *buffer, int64_t count)
{
    char plain[CLI_TEXT_BYTES];
    int length = snprintf(plain, sizeof plain, "%" PRId64, count), out = 0;

    for (int i = 0; i < length && out < CLI_TEXT_BYTES - 2; i++) {
        if (i > 0 && (length - i) % 3 == 0 && plain[i - 1] != '-')
            buffer[out++] = ',';
        buffer[out++] = plain[i];
    }
    buffer[out] = 0;
    return buffer;
}

const char *cli_bar(char *buffer, size_t size, double value, double most, int width)
{
    int length = most > 0.0 ? (int)(value / most * width + 0.5) : 0;

    length = length < 0 ? 0 : length > width ? width : length;
    length = (size_t)length >= size ? (int)size - 1 : length;
    memset(buffer, '#', (size_t)length);
    buffer[length] = 0;
    return buffer;
}

/* The one line of progress: the terminal is one, too. Any thread may have news. */
static struct {
    pthread_mutex_t lock;
    int64_t begun_ns, shown_ns;
    bool on_terminal, line_open;
} progress = {.lock = PTHREAD_MUTEX_INITIALIZER};

void cli_progress_begin(void)
{
    progress.begun_ns = base_now_ns();
    progress.shown_ns = progress.begun_ns;
    progress.on_terminal = isatty(STDERR_FILENO) != 0;
}

/* Under the lock. */
static void show(const char *format, va_list arguments)
{
    progress.shown_ns = base_now_ns();
    fprintf(stderr, progress.on_terminal ? "\r\033[K" : "");
    fprintf(stderr, "[%3.0f s] ", (double)(progress.shown_ns - progress.begun_ns) / 1e9);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, progress.on_terminal ? "" : "\n");
    fflush(stderr);
    progress.line_open = progress.on_terminal;
}

static bool is_time(void)
{
    int64_t now = base_now_ns(), pause = progress.on_terminal ? 200000000 : 5000000000;
    bool shown = progress.shown_ns > progress.begun_ns;

    return now - progress.begun_ns >= 2000000000 && (!shown || now - progress.shown_ns >= pause);
}

void cli_progress(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    pthread_mutex_lock(&progress.lock);
    if (is_time())
        show(format, arguments);
    pthread_mutex_unlock(&progress.lock);
    va_end(arguments);
}

void cli_progress_now(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    pthread_mutex_lock(&progress.lock);
    show(format, arguments);
    pthread_mutex_unlock(&progress.lock);
    va_end(arguments);
}

void cli_progress_end(void)
{
    pthread_mutex_lock(&progress.lock);
    if (progress.line_open)
        fprintf(stderr, "\r\033[K");
    progress.line_open = false;
    pthread_mutex_unlock(&progress.lock);
}

struct parallel {
    atomic_long next;
    int64_t count;
    void (*body)(void *argument, int64_t index);
    void *argument;
};

static void *parallel_thread(void *argument)
{
    struct parallel *job = argument;
    int64_t index;

    /* relaxed: only the number matters; the join publishes the results */
    while ((index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->count)
        job->body(job->argument, index);
    return NULL;
}

void cli_parallel(int threads, int64_t count, void (*body)(void *argument, int64_t index), void *argument)
{
    struct parallel job = {.count = count, .body = body, .argument = argument};
    pthread_t thread[64];
    int started = 0;

    threads = threads > 64 ? 64 : threads;
    while (started < threads - 1 && started < count - 1 &&
           pthread_create(&thread[started], NULL, parallel_thread, &job) == 0)
        started++;
    parallel_thread(&job);
    while (started > 0)
        pthread_join(thread[--started], NULL);
}

int cli_writable(const char *path)
{
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);

    if (file < 0)
        return errno;
    close(file);
    return 0;
}
