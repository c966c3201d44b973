/* The two pieces of mutable global state that the interface forces: groups by name, and a thread's recent error. */
#include "aclnn/aclnn.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char recent[ACLNN_TEXT_BYTES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct aclnn_group *groups;

aclnnStatus aclnn_fail(aclnnStatus status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(recent, sizeof recent, format, arguments);
    va_end(arguments);
    return status;
}

void aclnn_fail_again(const char *text)
{
    snprintf(recent, sizeof recent, "%s", text);
}

const char *aclGetRecentErrMsg(void)
{
    return recent;
}

/* Where the group is linked in; NULL at the end of the list. */
static struct aclnn_group **find(const char *name, int64_t rank)
{
    struct aclnn_group **at = &groups;

    while (*at && (strcmp((*at)->name, name) != 0 || (*at)->rank != rank))
        at = &(*at)->next;
    return at;
}

struct aclnn_group *aclnn_group_find(const char *name, int64_t rank)
{
    struct aclnn_group *found;

    pthread_mutex_lock(&lock);
    found = *find(name, rank);
    pthread_mutex_unlock(&lock);
    return found;
}

bool aclnn_group_add(struct aclnn_group *group)
{
    struct aclnn_group **at;
    bool taken;

    pthread_mutex_lock(&lock);
    at = find(group->name, group->rank);
    taken = *at != NULL;
    if (!taken)
        *at = group;
    pthread_mutex_unlock(&lock);
    return !taken;
}

struct aclnn_group *aclnn_group_remove(const char *name, int64_t rank)
{
    struct aclnn_group **at, *found;

    pthread_mutex_lock(&lock);
    at = find(name, rank);
    found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

bool aclnn_group_any(void)
{
    bool any;

    pthread_mutex_lock(&lock);
    any = groups != NULL;
    pthread_mutex_unlock(&lock);
    return any;
}
