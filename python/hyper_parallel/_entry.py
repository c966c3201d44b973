"""hyper_mega_moe: which framework's tensors are these?"""

import sys

from ._shapes import Extras, PLAIN


def hyper_mega_moe(x, topk_ids, topk_weights, up_proj_weight, down_proj_weight, *, shared_up_proj_weight=None,
                   shared_down_proj_weight=None):
    """One Mixture-of-Experts layer: dispatch, two grouped GEMMs with SwiGLU, combine, in one call.

    y[t] = sum over k of topk_weights[t,k] * expert(topk_ids[t,k])(x[t]), and then the shared experts of x[t];
    expert(x) = (silu(x @ Wg) * (x @ Wu)) @ Wd with up_proj_weight = [Wg | Wu], down_proj_weight = Wd.

    T tokens, H hidden, I inner, K experts a token, L experts on this rank (all E of them without a group).

    Args:
        x: [T,H], float32, bfloat16 or float16. T may be 0.
        topk_ids: [T,K], int32 or int64: expert numbers of the whole group, 0..E-1. -1 masks a slot: it contributes
            nothing and its gradient is 0.
        topk_weights: [T,K], any of the three float dtypes. They need not sum to one.
        up_proj_weight: [L,H,2I] of x's dtype, contiguous or the transpose(1, 2) of a contiguous [L,2I,H].
        down_proj_weight: [L,I,H], likewise.
        shared_up_proj_weight, shared_down_proj_weight: [S,H,2I'] and [S,I',H], likewise: S experts that every token
            goes through, with weight 1.

    Returns:
        y, [T,H] of x's dtype. Its bits do not depend on the engine, the number of threads or ranks, or on which other
        tokens are in the call (docs/numerics.md).

    Gradients: of x, topk_weights and all weights; None for topk_ids.

    Raises:
        TypeError: an argument is no tensor. ValueError: a shape, dtype, device or layout is not allowed; the text names
        the argument, what it is and what is allowed. hyper_parallel.Error: an expert number out of range, or the group
        failed. Nothing has changed then.
    """
    extras = PLAIN
    if shared_up_proj_weight is not None or shared_down_proj_weight is not None:
        extras = Extras(shared_up=shared_up_proj_weight, shared_down=shared_down_proj_weight)
    return run(x, topk_ids, topk_weights, up_proj_weight, down_proj_weight, extras)


def run(x, topk_ids, topk_weights, up, down, extras):
    if "mindspore" in sys.modules and type(x).__module__.startswith("mindspore"):
        from . import _mindspore as front
    else:
        from . import _torch as front
    return front.entry(x, topk_ids, topk_weights, up, down, extras)


hyper_mega_moe.__jit_forbidden__ = True  # MindSpore's compiler says so, instead of stumbling over our source
