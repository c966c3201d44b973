"""MindSpore (2.10, CPU, PyNative): the same function on raw addresses."""

import mindspore as ms
from mindspore import Tensor, mint

from . import _core, _library as lib
from ._ambient import ambient
from ._shapes import Extras, check_kinds, shape_of, wrong

_FLOATS = {ms.float32: lib.F32, ms.bfloat16: lib.BF16, ms.float16: lib.F16}
_INDICES = {ms.int32: lib.I32, ms.int64: lib.I64}


def _check_kind(name, tensor, allowed):
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: a mindspore.Tensor is expected")
    if tensor.dtype not in allowed:
        raise wrong(f"the dtype of {name}", tensor.dtype, " or ".join(str(t) for t in allowed) + " is expected")


def _check(x, topk_ids, topk_weights, up, down, extras):
    """The Shape of a call, or an error that names the argument."""
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise RuntimeError("hyper_mega_moe needs PyNative mode: mindspore.set_context(mode=mindspore.PYNATIVE_MODE)")
    if ms.get_context("device_target") != "CPU":
        raise wrong("mindspore's device_target", ms.get_context("device_target"), "CPU is expected")
    check_kinds(_check_kind, _FLOATS, _INDICES, x, topk_ids, topk_weights, up, down, extras)
    return shape_of(x, topk_ids, topk_weights, up, down, extras, _FLOATS[x.dtype])


def _call(x, topk_ids, topk_weights, up, down, shared_up, shared_down):
    extras = Extras(shared_up=shared_up, shared_down=shared_down)
    return _core.call_of(_FLOATS, _INDICES, x, topk_ids, topk_weights, up, down, extras)


def _forward(group, shape, tensors):
    y = mint.empty_like(tensors[0])
    call = _call(*tensors)
    call.y = y.data_ptr()
    return y, group.forward(shape, call)


def _gradient(tensor, wanted, layout):
    """Memory for it and itself: the transposed view of the memory where the weight is one."""
    if tensor is None or not wanted:
        return None, None
    if layout == lib.NK:
        memory = mint.empty((tensor.shape[0], tensor.shape[2], tensor.shape[1]), dtype=tensor.dtype)
        return memory, mint.transpose(memory, 1, 2)
    memory = mint.empty(tuple(tensor.shape), dtype=tensor.dtype)
    return memory, memory


class _HyperMegaMoE(ms._Function):
    """y of one MoE layer, and its gradients with respect to all float tensors."""

    @staticmethod
    def forward(ctx, group, shape, *tensors):
        x, topk_ids, topk_weights, *weights = tensors
        tensors = (x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous(), *weights)
        shape = shape._replace(training=any(ctx.needs_input_grad))
        y, ctx.hmoe_saved = _forward(group, shape, tensors)
        ctx.group, ctx.shape = group, shape
        ctx.absent = [t is None for t in tensors]
        ctx.save_for_backward(*(t for t in tensors if t is not None))
        return y

    @staticmethod
    def backward(ctx, dy):
        present = iter(ctx.saved_tensors)
        tensors = [None if absent else next(present) for absent in ctx.absent]
        saved, ctx.hmoe_saved = ctx.hmoe_saved, None
        if saved is None:  # used up by an earlier backward
            saved = _forward(ctx.group, ctx.shape, tensors)[1]
        wanted = ctx.needs_input_grad[2:]
        made = [_gradient(t, w, lib.KN if i < 3 else ctx.shape.layout) if i != 1 else (None, None)
                for i, (t, w) in enumerate(zip(tensors, wanted))]
        dy = dy.contiguous()
        call = _call(*tensors)
        dx, _, d_weights, up, down, shared_up, shared_down = (_core.address(memory) for memory, _ in made)
        call.saved = saved.handle
        call.grad = lib.Gradients(dy.data_ptr(), dx, d_weights, up, down, None, None, shared_up, shared_down,
                                  dw_type=ctx.shape.dtype)
        saved.plan.run(lib.library.hmoe_backward, call)
        return (None, None, *(gradient for _, gradient in made))


def group_of(name):
    """The Group over a MindSpore communication group."""
    from mindspore.mint import distributed
    ranks = distributed.get_world_size(name)

    def every(mine):
        gathered = [None] * ranks
        distributed.all_gather_object(gathered, mine, name)
        return gathered

    return _core.group_over(name, distributed.get_rank(name), ranks, every)


def entry(x, topk_ids, topk_weights, up, down, extras):
    group = ambient() or _core.local_group()
    try:
        shape = _check(x, topk_ids, topk_weights, up, down, extras)
    except (TypeError, ValueError, RuntimeError) as error:
        group.fail(f"rank {group.rank}: {error}")
        raise
    return _HyperMegaMoE.apply(group, shape, x, topk_ids, topk_weights, up, down, extras.shared_up, extras.shared_down)
