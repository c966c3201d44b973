/* A model's state in one safetensors file (https://huggingface.co/docs/safetensors): the tensors by their names, the
 * moments of AdamW as "first.NAME" and "second.NAME", the configuration, step and seed as metadata. */
#ifndef MODEL_CHECKPOINT_H
#define MODEL_CHECKPOINT_H

#include "model/model.h"

/* Written beside it and renamed: a file of that name is whole at any time. */
enum hmoe_status checkpoint_write(const char *path, const struct model_config *config,
                                  const struct model_state *state, struct base_error *error);
/* What the file was made with. */
enum hmoe_status checkpoint_config(const char *path, struct model_config *config, struct base_error *error);
/* The state of a model of this configuration; on failure it may be half read. */
enum hmoe_status checkpoint_read(const char *path, const struct model_config *config, struct model_state *state,
                                 struct base_error *error);

#endif
