/* What this machine has. */
#ifndef BASE_TOPOLOGY_H
#define BASE_TOPOLOGY_H

#include <stddef.h>

int base_cpus(void);                      /* CPUs this process may run on, at least 1 */
size_t base_cache_bytes(int level);       /* data cache of level 1, 2 or 3; 0 if unknown */
size_t base_memory_total(void);
size_t base_memory_available(void);       /* without swapping; the whole memory if unknown */
const char *base_cpu_name(char *buffer, size_t size); /* "unknown CPU" if unknown */

#endif
