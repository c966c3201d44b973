#include "model/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_MOST = 64 << 20 };

/* Each tensor three times. */
static const char *const prefixes[] = {"", "first.", "second."};

static const float *vector_of(const struct model_state *state, int which)
{
    return which == 0 ? state->value : which == 1 ? state->first : state->second;
}

/* ---- the configuration as metadata */

static const struct {
    const char *name;
    size_t offset;
} numbers[] = {
    {"layers", offsetof(struct model_config, layers)},   {"width", offsetof(struct model_config, width)},
    {"heads", offsetof(struct model_config, heads)},     {"experts", offsetof(struct model_config, experts)},
    {"topk", offsetof(struct model_config, topk)},       {"inner", offsetof(struct model_config, inner)},
    {"context", offsetof(struct model_config, context)}, {"batch", offsetof(struct model_config, batch)},
};

static int *number_at(struct model_config *config, size_t i)
{
    return (int *)(void *)((char *)config + numbers[i].offset);
}

static void set_number(json_t *metadata, const char *name, uint64_t value)
{
    char text[32];

    snprintf(text, sizeof text, "%" PRIu64, value); /* the format allows strings only */
    json_object_set_new(metadata, name, json_string(text));
}

static json_t *metadata_of(const struct model_config *config, const struct model_state *state)
{
    struct model_config copy = *config;
    json_t *metadata = json_object();

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        set_number(metadata, numbers[i].name, (uint64_t)*number_at(&copy, i));
    set_number(metadata, "step", (uint64_t)state->step);
    set_number(metadata, "seed", state->seed);
    json_object_set_new(metadata, "format", json_string("hmoe"));
    return metadata;
}

/* ---- writing */

static json_t *entry_of(const struct model_tensor *t, int64_t at)
{
    json_t *shape = json_array();

    for (int d = 0; d < t->dims; d++)
        json_array_append_new(shape, json_integer(t->shape[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape, "data_offsets", (json_int_t)at,
                     (json_int_t)(at + t->count * 4));
}

static json_t *header_of(const struct model_config *config, const struct model_state *state)
{
    json_t *header = json_pack("{s:o}", "__metadata__", metadata_of(config, state));
    struct model_tensor tensors[MODEL_TENSORS_MOST];
    int count = model_tensors(config, tensors);
    int64_t size = model_size(config);

    for (int which = 0; which < 3; which++)
        for (int i = 0; i < count; i++) {
            char name[64];
            snprintf(name, sizeof name, "%s%.47s", prefixes[which], tensors[i].name);
            json_object_set_new(header, name, entry_of(&tensors[i], (which * size + tensors[i].offset) * 4));
        }
    return header;
}

/* The header, padded with blanks so that the data are aligned; then the three vectors. */
static int write_all(FILE *file, const char *header, const struct model_state *state, size_t count)
{
    size_t length = strlen(header), padded = (length + 7) / 8 * 8;
    uint64_t size = padded;
    unsigned char little[8];

    for (int i = 0; i < 8; i++)
        little[i] = (unsigned char)(size >> 8 * i);
    fwrite(little, 1, 8, file);
    fprintf(file, "%-*s", (int)padded, header);
    for (int which = 0; which < 3; which++)
        fwrite(vector_of(state, which), sizeof(float), count, file);
    return ferror(file) || fflush(file) != 0 || fsync(fileno(file)) != 0;
}

static enum hmoe_status refuse(struct base_error *error, const char *path, const char *what)
{
    return base_fail(error, HMOE_ERR_SYSTEM, "%s: %s: %s", path, what, strerror(errno));
}

enum hmoe_status checkpoint_write(const char *path, const struct model_config *config,
                                  const struct model_state *state, struct base_error *error)
{
    json_t *header = header_of(config, state);
    char *text = json_dumps(header, JSON_COMPACT), beside[4096];
    FILE *file;
    int failed;

    json_decref(header);
    if (!text)
        return base_fail(error, HMOE_ERR_MEMORY, "no memory to write %s", path);
    snprintf(beside, sizeof beside, "%s.tmp", path);
    file = fopen(beside, "we");
    failed = !file || write_all(file, text, state, (size_t)model_size(config));
    free(text);
    if (file && (fclose(file) != 0 || failed)) {
        refuse(error, beside, "cannot be written");
        unlink(beside);
        return error->status;
    }
    if (failed || rename(beside, path) != 0)
        return refuse(error, path, "cannot be written");
    return HMOE_OK;
}

/* ---- reading: the file may be anything */

struct reader {
    const char *path;
    int file;
    int64_t data, bytes; /* where the data begin, how many there are */
    json_t *header;
    struct base_error *error;
};

static bool wrong(struct reader *r, const char *format, const char *name)
{
    char text[160];

    snprintf(text, sizeof text, format, name);
    base_fail(r->error, HMOE_ERR_ARGUMENT, "%s: %s", r->path, text);
    return false;
}

static bool read_header(struct reader *r, int64_t file_bytes)
{
    unsigned char little[8];
    uint64_t length = 0;
    char *text;

    if (file_bytes < 8 || pread(r->file, little, 8, 0) != 8)
        return wrong(r, "%s", "shorter than the 8 bytes of a safetensors header's length");
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)little[i] << 8 * i;
    if (length > (uint64_t)file_bytes - 8 || length > HEADER_MOST)
        return wrong(r, "%s", "its header is longer than the file: not a safetensors file, or cut off");
    text = malloc(length + 1);
    if (!text || pread(r->file, text, length, 8) != (ssize_t)length) {
        free(text);
        return wrong(r, "%s", "its header cannot be read");
    }
    r->header = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    free(text);
    r->data = 8 + (int64_t)length;
    r->bytes = file_bytes - r->data;
    if (!json_is_object(r->header))
        return wrong(r, "%s", "its header is not a JSON object with every name once");
    return true;
}

static bool open_reader(struct reader *r, const char *path, struct base_error *error)
{
    struct stat status;

    *r = (struct reader){.path = path, .error = error};
    r->file = open(path, O_RDONLY | O_CLOEXEC);
    if (r->file < 0 || fstat(r->file, &status) != 0) {
        refuse(error, path, "cannot be opened");
        return false;
    }
    return read_header(r, status.st_size);
}

static void close_reader(struct reader *r)
{
    json_decref(r->header);
    if (r->file >= 0)
        close(r->file);
}

static bool read_number(struct reader *r, const char *name, uint64_t most, uint64_t *value)
{
    const char *text = json_string_value(json_object_get(json_object_get(r->header, "__metadata__"), name));
    char *end;

    if (!text || *text < '0' || *text > '9')
        return wrong(r, "its metadata lack the number %s: not a checkpoint of hmoe train", name);
    errno = 0;
    *value = strtoull(text, &end, 10);
    if (*end || errno || *value > most)
        return wrong(r, "%s of its metadata is out of range", name);
    return true;
}

static bool read_config(struct reader *r, struct model_config *config)
{
    uint64_t value;

    *config = (struct model_config){0};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (!read_number(r, numbers[i].name, 1 << 20, &value))
            return false;
        if (value == 0)
            return wrong(r, "%s of its metadata is 0", numbers[i].name);
        *number_at(config, i) = (int)value;
    }
    if (config->layers > MODEL_LAYERS_MOST)
        return wrong(r, "%s", "its metadata say more layers than hmoe train has");
    return true;
}

enum hmoe_status checkpoint_config(const char *path, struct model_config *config, struct base_error *error)
{
    struct reader r;

    if (open_reader(&r, path, error))
        read_config(&r, config);
    close_reader(&r);
    return error->status;
}

static bool same_shape(const json_t *shape, const struct model_tensor *t)
{
    if (!json_is_array(shape) || json_array_size(shape) != (size_t)t->dims)
        return false;
    for (int d = 0; d < t->dims; d++)
        if (json_integer_value(json_array_get(shape, (size_t)d)) != t->shape[d])
            return false;
    return true;
}

static bool read_tensor(struct reader *r, const struct model_tensor *t, const char *name, float *to)
{
    const json_t *entry = json_object_get(r->header, name), *offsets = json_object_get(entry, "data_offsets");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    int64_t first = json_integer_value(json_array_get(offsets, 0)), bytes = t->count * 4;
    int64_t last = json_integer_value(json_array_get(offsets, 1));

    if (!entry)
        return wrong(r, "it has no tensor %s", name);
    if (!dtype || strcmp(dtype, "F32") != 0 || !same_shape(json_object_get(entry, "shape"), t))
        return wrong(r, "its tensor %s has another dtype or shape than its metadata say", name);
    if (first < 0 || last < first || last > r->bytes || last - first != bytes)
        return wrong(r, "its tensor %s has data_offsets that do not fit its shape or the file", name);
    for (int64_t done = 0; done < bytes;) {
        ssize_t got = pread(r->file, (char *)to + done, (size_t)(bytes - done), r->data + first + done);
        if (got <= 0)
            return wrong(r, "its tensor %s cannot be read", name);
        done += got;
    }
    return true;
}

static bool read_vectors(struct reader *r, const struct model_config *config, struct model_state *state)
{
    struct model_tensor tensors[MODEL_TENSORS_MOST];
    int count = model_tensors(config, tensors);

    for (int which = 0; which < 3; which++)
        for (int i = 0; i < count; i++) {
            float *to = (which == 0 ? state->value : which == 1 ? state->first : state->second) + tensors[i].offset;
            char name[64];
            snprintf(name, sizeof name, "%s%.47s", prefixes[which], tensors[i].name);
            if (!read_tensor(r, &tensors[i], name, to))
                return false;
        }
    return true;
}

enum hmoe_status checkpoint_read(const char *path, const struct model_config *config, struct model_state *state,
                                 struct base_error *error)
{
    struct model_config made;
    uint64_t step = 0;
    struct reader r;

    if (open_reader(&r, path, error) && read_config(&r, &made) && read_number(&r, "step", INT64_MAX, &step) &&
        read_number(&r, "seed", UINT64_MAX, &state->seed)) {
        state->step = (int64_t)step;
        if (memcmp(&made, config, sizeof made) != 0)
            wrong(&r, "%s", "it was made with another configuration");
        else
            read_vectors(&r, config, state);
    }
    close_reader(&r);
    return error->status;
}
