#include "text.h"

#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* More text than any call has tokens for only costs memory. */
enum { TEXT_MOST = 256 << 20, PIECE = 1 << 16, WORD_MOST = 16 };

static const char *const own_texts[] = {"README.md", "docs/*.md", "[!R]*.md", "include/*.h",
                                        "src/*/*.h", "src/*/*.c", "cli/*.c", NULL};

/* Appends a file; 0 or errno. */
static int append(struct cli_text *text, FILE *file)
{
    size_t got = 1;

    while (got > 0 && text->size < TEXT_MOST) {
        char *bytes = realloc(text->bytes, text->size + PIECE);
        if (!bytes)
            return ENOMEM;
        text->bytes = bytes;
        got = fread(bytes + text->size, 1, PIECE, file);
        text->size += got;
    }
    return ferror(file) ? errno ? errno : EIO : 0;
}

static int read_file(struct cli_text *text, const char *path)
{
    struct stat status;
    FILE *file = fopen(path, "re");
    int failed;

    if (!file)
        return errno;
    failed = fstat(fileno(file), &status) == 0 && S_ISDIR(status.st_mode) ? EISDIR : append(text, file);
    fclose(file);
    text->files += failed == 0;
    return failed;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static void describe(struct cli_text *text, const char *first)
{
    if (text->files > 1)
        snprintf(text->source, sizeof text->source, "%.60s and %d more files", base_name(first), text->files - 1);
    else
        snprintf(text->source, sizeof text->source, "%.80s", base_name(first));
}

static const char *read_named(struct cli_text *text, char **paths, int count, char *why, size_t why_size)
{
    for (int i = 0; i < count; i++) {
        size_t before = text->size;
        int failed = read_file(text, paths[i]);
        if (failed)
            snprintf(why, why_size, "%s: %s", paths[i], strerror(failed));
        else if (text->size == before && text->size < TEXT_MOST)
            snprintf(why, why_size, "%s: the file is empty; give a file with some text in it", paths[i]);
        else
            continue;
        return why;
    }
    describe(text, paths[0]);
    return NULL;
}

static void read_own(struct cli_text *text)
{
    bool here = access("include/hmoe.h", R_OK) == 0;
    char first[80] = "";

    for (int i = 0; here && own_texts[i]; i++) {
        glob_t found = {0};
        if (glob(own_texts[i], 0, NULL, &found) == 0) {
            for (size_t j = 0; j < found.gl_pathc; j++)
                if (read_file(text, found.gl_pathv[j]) == 0 && !*first)
                    snprintf(first, sizeof first, "%s", found.gl_pathv[j]);
        }
        globfree(&found);
    }
    describe(text, first);
}

static void read_help(struct cli_text *text)
{
    FILE *out = open_memstream(&text->bytes, &text->size);

    if (!out)
        return;
    cli_help_all(out);
    for (int i = 0; i < hmoe_knob_count(); i++)
        fprintf(out, "%s: %s\n", hmoe_knob(i)->name, hmoe_knob(i)->meaning);
    fclose(out);
    snprintf(text->source, sizeof text->source, "this program's own help");
}

const char *cli_text_read(struct cli_text *text, char **paths, int count, char *why, size_t why_size)
{
    const char *failed = NULL;

    *text = (struct cli_text){0};
    if (count > 0)
        failed = read_named(text, paths, count, why, why_size);
    else
        read_own(text);
    if (!failed && text->size == 0) {
        free(text->bytes);
        read_help(text);
    }
    if (failed)
        cli_text_free(text);
    return failed;
}

void cli_text_free(struct cli_text *text)
{
    free(text->bytes);
    *text = (struct cli_text){0};
}

static bool in_word(unsigned char c)
{
    return isalnum(c) || c == '_' || c > 127;
}

static size_t token_length(const unsigned char *at, size_t left)
{
    size_t length = 1;

    if (in_word(*at))
        while (length < left && length < WORD_MOST && in_word(at[length]))
            length++;
    else if (*at == ' ' || *at == '\n')
        while (length < left && at[length] == *at)
            length++;
    return length;
}

/* FNV-1a, folded */
static int32_t word_number(const unsigned char *at, size_t length)
{
    uint32_t hash = 2166136261u;

    for (size_t i = 0; i < length; i++)
        hash = (hash ^ at[i]) * 16777619u;
    return 256 + (int32_t)((hash ^ hash >> 16) % (CLI_VOCABULARY - 256));
}

int64_t cli_tokenize(const struct cli_text *text, int32_t *tokens, int64_t most)
{
    const unsigned char *bytes = (const unsigned char *)text->bytes;
    int64_t count = 0;

    for (size_t at = 0; at < text->size; count++) {
        size_t length = token_length(bytes + at, text->size - at);
        if (count < most)
            tokens[count] = in_word(bytes[at]) ? word_number(bytes + at, length) : bytes[at];
        at += length;
    }
    return count;
}
