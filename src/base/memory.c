#include "base/memory.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

void *base_map(size_t bytes, int huge)
{
    size_t unit = huge ? HUGE_PAGE : (size_t)getpagesize();
    size_t length = round_up(bytes, unit), slack = huge ? HUGE_PAGE : 0;
    char *raw, *base;

    if (length + slack < bytes)
        return NULL;
    raw = mmap(NULL, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    base = (char *)round_up((size_t)(uintptr_t)raw, unit);
    if (base > raw)
        munmap(raw, (size_t)(base - raw));
    if (raw + slack > base)
        munmap(base + length, (size_t)(raw + slack - base));
    if (huge)
        madvise(base, length, MADV_HUGEPAGE); /* only a wish */
    return base;
}

void base_unmap(void *base, size_t bytes, int huge)
{
    if (base)
        munmap(base, round_up(bytes, huge ? HUGE_PAGE : (size_t)getpagesize()));
}

size_t base_resident(const void *base, size_t bytes)
{
    size_t page = (size_t)getpagesize(), pages = round_up(bytes, page) / page, count = 0;
    unsigned char *map = malloc(pages);

    if (map && mincore((void *)(uintptr_t)base, bytes, map) == 0)
        for (size_t i = 0; i < pages; i++)
            count += map[i] & 1u;
    free(map);
    return count * page;
}
