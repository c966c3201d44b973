/* amx.c with its tiles in C, for tests on CPUs that have none; its vectors are SIMDe's where the build has that
 * (AMX_SIMDE), so that AVX2 is enough. */
#define AMX_EMULATED
#include "kern/amx.c"
