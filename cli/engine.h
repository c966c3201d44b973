/* Which engine a plan will use, and the knob texts that say so. */
#ifndef CLI_ENGINE_H
#define CLI_ENGINE_H

#include "cli.h"
#include "layer.h"

#include "kern/kern.h"

enum { CLI_KNOBS_BYTES = 512 };

/* "engine=avx2,wave=off" of --engine (a position in the knob's choices, -1: not given) and --knobs (or NULL). */
const char *cli_knob_text(char *buffer, size_t size, int engine, const char *knobs);
/* CLI_OK, or what is wrong with the knobs of the environment, told. */
int cli_environment_check(const struct cli_command *self);
/* NULL, or why these knobs cannot be used here (in `why`). */
const char *cli_knob_check(const char *knobs, char *why, size_t why_size);
/* The engines that these knobs choose for this shape; NULL, or why there are none (in `why`). */
const char *cli_engine_choose(struct kern_choice *choice, const struct cli_shape *shape, const char *knobs, char *why,
                              size_t why_size);
struct kern_layer cli_kern_layer(const struct cli_shape *shape);
/* "avx512", or "amx; avx512 for blocks up to 5 rows" */
const char *cli_engine_text(char *buffer, size_t size, const struct kern_choice *choice);
/* The engine of this name, or NULL. */
const struct kern_engine *cli_engine_named(const char *name);

#endif
