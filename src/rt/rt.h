/* The runtime: queues of tasks in lanes, and workers that serve them.
 *
 * A queue belongs to one plan: per lane a bounded ring whose capacity is the most that plan can ever have ready at
 * once, so a push never fails and never waits. The pool's workers serve every attached queue: comm first, then
 * vector, then matrix. When nothing is ready they call each queue's poll, then sleep on the group's bell.
 * A pushed task is seen by some worker: push rings the bell. Nothing here needs two threads to run at once.
 */
#ifndef RT_H
#define RT_H

#include "comm/comm.h"
#include "trace/trace.h"

#include <pthread.h>

enum rt_lane { RT_COMM = 0, RT_VECTOR = 1, RT_MATRIX = 2, RT_LANES = 3 };

struct rt_worker {
    int index; /* 0 .. workers-1 */
    struct trace *trace;
    struct rt_pool *pool;
};

struct rt_task {
    void (*run)(void *context, uint64_t argument, struct rt_worker *worker);
    void *context;
    uint64_t argument;
};
