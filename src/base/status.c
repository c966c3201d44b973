#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

enum hmoe_status base_fail(struct base_error *error, enum hmoe_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    error->status = status;
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return status;
}
