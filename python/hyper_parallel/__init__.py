"""HyperMegaMoE: one Mixture-of-Experts layer in one fused call, forward and backward, on CPUs.

    from hyper_parallel.custom_ops.experimental import hyper_mega_moe
    y = hyper_mega_moe(x, topk_ids, topk_weights, up_proj_weight, down_proj_weight)

Works on PyTorch tensors, DTensors and MindSpore tensors. docs/api/hyper_mega_moe.md has everything.
"""

from ._ambient import expert_parallel_group
from ._library import Error
from ._memory import trim

__version__ = "0.1.0"
__all__ = ["Error", "expert_parallel_group", "trim"]
