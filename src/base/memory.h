/* Memory: address space reserved for the worst case, committed by touching. */
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* Zero-filled pages, aligned to 2 MB when huge; NULL when there is no address space. Costs no memory until touched. */
void *base_map(size_t bytes, int huge);
void base_unmap(void *base, size_t bytes, int huge); /* as mapped; NULL is nothing */
/* Bytes of [base, base + bytes) that are in memory now. */
size_t base_resident(const void *base, size_t bytes);

/* Layout written once: with base NULL carve only measures, else it hands out pieces of base. */
struct base_carve {
    char *base;
    size_t used;
};

/* The next piece, aligned to 64 bytes; NULL while measuring. */
static inline void *base_carve(struct base_carve *carve, size_t bytes)
{
    char *piece = carve->base ? carve->base + carve->used : NULL;
    carve->used += (bytes + 63) & ~(size_t)63;
    return piece;
}

#endif
