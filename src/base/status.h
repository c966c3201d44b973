/* Errors as values: a status for the program and one sentence for the person. The first to know writes the
 * sentence, everyone above passes the struct on. No globals: the API edge copies it where the user looks. */
#ifndef BASE_STATUS_H
#define BASE_STATUS_H

#include "hmoe.h"

struct base_error {
    enum hmoe_status status;
    char text[HMOE_ERROR_BYTES];
};

/* Writes status and text into *error (never NULL) and returns status. */
__attribute__((format(printf, 3, 4)))
enum hmoe_status base_fail(struct base_error *error, enum hmoe_status status, const char *format, ...);

#endif
