#include "layer.h"

#include "kern/kern.h"

static const struct cli_shape models[] = {
    {.name = "Qwen3-30B-A3B", .hidden = 2048, .inner = 768, .experts = 128, .topk = 8, .renormalised = true},
    {.name = "OLMoE", .hidden = 2048, .inner = 1024, .experts = 64, .topk = 8, .renormalised = false},
    {.name = "Mixtral-8x7B", .hidden = 4096, .inner = 14336, .experts = 8, .topk = 2, .renormalised = true},
    {.name = "DeepSeek-V3", .hidden = 7168, .inner = 2048, .experts = 256, .topk = 8, .renormalised = true},
    {.name = "gpt-oss-20b",
     .hidden = 2880,
     .inner = 2880,
     .experts = 32,
     .topk = 4,
     .gating = HMOE_INTERLEAVED,
     .activation = {1.702f, 7.0f, 1.0f},
     .biased = true,
     .renormalised = true},
};

const struct cli_shape *cli_model(int index)
{
    return index >= 0 && index < (int)(sizeof models / sizeof *models) ? &models[index] : NULL;
}

double cli_expert_bytes(const struct cli_shape *shape)
{
    return 3.0 * (double)shape->hidden * (double)kern_row_bytes(shape->dtype, shape->inner);
}

double cli_weight_bytes(const struct cli_shape *shape)
{
    double bias = shape->biased ? (double)kern_row_bytes(shape->dtype, 2 * shape->inner + shape->hidden) : 0.0;

    return (double)shape->experts * (cli_expert_bytes(shape) + bias);
}

double cli_flops(const struct cli_shape *shape, int64_t rows)
{
    return 6.0 * (double)shape->hidden * (double)shape->inner * (double)rows;
}

struct hmoe_plan_options cli_plan_options(const struct cli_shape *shape, int64_t tokens_max, const char *knobs)
{
    return (struct hmoe_plan_options){
        .size = sizeof(struct hmoe_plan_options),
        .hidden = shape->hidden,
        .inner = shape->inner,
        .experts = shape->experts,
        .topk = shape->topk,
        .tokens_max = tokens_max,
        .dtype = shape->dtype,
        .layout = shape->layout,
        .gating = shape->gating,
        .activation = shape->activation,
        .knobs = knobs,
    };
}
