/* Real text as a layer's input: files, tokens, embedded rows, a router. */
#ifndef CLI_TEXT_H
#define CLI_TEXT_H

#include "layer.h"

#include <stddef.h>

struct cli_text {
    char *bytes;
    size_t size;
    int files;
    char source[96]; /* what it was read from, for the report */
};

/* Reads the named files, or with count 0 the project's own texts below the current directory, or where those are
 * not, this program's help. NULL on success, else the sentence to show (in `why`). */
const char *cli_text_read(struct cli_text *text, char **paths, int count, char *why, size_t why_size);
void cli_text_free(struct cli_text *text);

enum { CLI_VOCABULARY = 32768 };

/* Tokens: a word (letters, digits, "_" and bytes above 127, at most 16 of them) is a hashed number from 256 on, runs of
 * one kind of blank are one token, every other byte is its own number. Returns how many the text has; writes at most
 * `most`. */
int64_t cli_tokenize(const struct cli_text *text, int32_t *tokens, int64_t most);

/* x[t] = embedding of token t (random per number) plus a signal of its position, scaled to mean square 1.
 * false when out of memory. */
bool cli_embed(const struct cli_shape *shape, const int32_t *tokens, struct cli_batch *batch, uint64_t seed,
               int threads);

/* ids and weights: softmax over E logits (a random linear map of the row), the K largest in falling order,
 * renormalised to sum one where the shape says so. false when out of memory. */
bool cli_route(const struct cli_shape *shape, struct cli_batch *batch, uint64_t seed, int threads);

#endif
