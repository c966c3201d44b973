/* amx.c with its tiles in C, for tests on CPUs that have none. */
#define AMX_EMULATED
#include "kern/amx.c"
