#include "base/topology.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int base_cpus(void)
{
    cpu_set_t set;
    int count;

    CPU_ZERO(&set);
    count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return count < 1 ? 1 : count;
}

size_t base_cache_bytes(int level)
{
    static const int names[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
    long bytes = level >= 1 && level <= 3 ? sysconf(names[level - 1]) : 0;

    return bytes > 0 ? (size_t)bytes : 0;
}

size_t base_memory_total(void)
{
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

/* The text after "key" and its colon in a /proc file of "key : value" lines; NULL if it is not there. */
static char *find_line(const char *path, const char *key, char *line, size_t size)
{
    FILE *file = fopen(path, "re");
    char *found = NULL;

    while (file && !found && fgets(line, (int)size, file)) {
        char *colon = strchr(line, ':');
        if (colon && strncmp(line, key, strlen(key)) == 0)
            found = colon + 1 + strspn(colon + 1, " \t");
    }
    if (file)
        fclose(file);
    if (found)
        found[strcspn(found, "\n")] = 0;
    return found;
}

size_t base_memory_available(void)
{
    char line[256], *text = find_line("/proc/meminfo", "MemAvailable", line, sizeof line);
    size_t kib;

    return text && sscanf(text, "%zu", &kib) == 1 ? kib * 1024 : base_memory_total();
}

const char *base_cpu_name(char *buffer, size_t size)
{
    char line[256], *text = find_line("/proc/cpuinfo", "model name", line, sizeof line);

    snprintf(buffer, size, "%s", text ? text : "unknown CPU");
    return buffer;
}
