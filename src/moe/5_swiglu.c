/* Stage 5, SwiGLU: gate and up -> a [rows, I], on the tile while it is hot. The arithmetic is the kernels' (it runs
 * inside their gmm1, in the order of base/num.h's num_gated); what is left here is to show its share of the time. */
#include "moe/plan.h"

/* One span as long as all of the SwiGLU inside the gmm1 task that ends at end_ns. */
void moe_swiglu_span(const struct rt_worker *worker, const struct moe_call *call, int64_t end_ns, int64_t swiglu_ns,
                     struct moe_span span)
{
    struct trace_event event = {.start_ns = end_ns - swiglu_ns, .end_ns = end_ns, .call = call->number,
                                .expert = span.expert, .block = span.block, .source = span.source, .rows = span.rows,
                                .layer = call->in.layer_number, .kind = TRACE_SWIGLU};

    trace_emit(worker->trace, worker->index, &event);
}
