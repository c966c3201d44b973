#include "kern/kern.h"

#include <string.h>

/* Best first. */
#if defined(__x86_64__)
extern const struct kern_engine kern_amx, kern_avx512, kern_avx2;
#elif defined(__aarch64__)
extern const struct kern_engine kern_neon;
#endif
extern const struct kern_engine kern_scalar;

const struct kern_engine *const kern_engines[] = {
#if defined(__x86_64__)
    &kern_amx, &kern_avx512, &kern_avx2,
#elif defined(__aarch64__)
    &kern_neon,
#endif
    &kern_scalar, NULL,
};

/* [K,N] blocks of so few rows are faster by FMA, which reads the weights where they lie */
#define FEW_ROWS_KN 5

/* ------------------------------------------------- presence, in code for any CPU */

bool kern_has_avx512(void);
bool kern_has_avx2(void);
bool kern_has_baseline(void);

#if defined(__x86_64__)
bool kern_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

bool kern_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

bool kern_has_baseline(void)
{
    return true;
}

/* ------------------------------------------------- choice */

static bool takes(const struct kern_engine *engine, const struct kern_layer *layer)
{
    return (engine->dtypes >> layer->dtype & 1) != 0;
}

/* the best engine here for this dtype among those whose name is `name`, or any for "auto" */
static const struct kern_engine *find(const char *name, const struct kern_layer *layer)
{
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        if ((strcmp(name, "auto") == 0 || strcmp(name, (*e)->name) == 0) && takes(*e, layer) && (*e)->present())
            return *e;
    return NULL;
}

static const struct kern_engine *named(const char *name)
{
    for (const struct kern_engine *const *e = kern_engines; *e != NULL; e++)
        if (strcmp(name, (*e)->name) == 0)
            return *e;
    return NULL;
}

static const char *why_not(const char *name, const struct kern_layer *layer)
{
    const struct kern_engine *engine = named(name);

    if (engine == NULL)
        return "this build has no engine of that name";
    if (!engine->present())
        return "this CPU does not run that engine";
    if (!takes(engine, layer))
        return "that engine does not take this dtype";
    return "no engine takes this dtype";
}

const char *kern_choose(struct kern_choice *choice, const char *name, const struct kern_layer *layer)
{
    bool automatic = strcmp(name, "auto") == 0;
    const struct kern_engine *many = find(name, layer), *few;

    if (many == NULL)
        return why_not(name, layer);
    few = find("avx512", layer);
    *choice = (struct kern_choice){.few = many, .many = many, .back = many, .few_rows = 0};
    if (strcmp(many->name, "amx") == 0) /* whose backward is that of the vectors beside the tiles */
        choice->back = few;
    if (automatic && strcmp(many->name, "amx") == 0 && few != NULL && layer->layout == HMOE_KN) {
        choice->few = few;
        choice->few_rows = FEW_ROWS_KN;
    }
    return NULL;
}
