/* The edge where errors leave the library: the thread's latest error text, one of the two pieces of mutable global
 * state there are (DESIGN 3), lives in report.c. */
#ifndef API_REPORT_H
#define API_REPORT_H

#include "base/status.h"

/* Keeps the text for hmoe_last_error when this is a failure; returns error->status. */
enum hmoe_status api_report(const struct base_error *error);

/* A struct the caller filled: its size member must be this build's. */
enum hmoe_status api_check_size(size_t given, size_t expected, const char *what, struct base_error *error);

#endif
