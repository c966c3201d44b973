"""PyTorch: plain tensors, autograd, torch.compile."""

import ctypes
import functools
import itertools
import math
import weakref
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _core, _library as lib, _memory
from ._ambient import ambient
from ._core import address
from ._shapes import Extras, PLAIN, check_kinds, shape_of, wrong

_FLOATS = {torch.float32: lib.F32, torch.bfloat16: lib.BF16, torch.float16: lib.F16}
_INDICES = {torch.int32: lib.I32, torch.int64: lib.I64}

# ---------------------------------------------------------------- checks


def _check_kind(name, tensor, allowed):
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: a torch.Tensor is expected")
    if tensor.device.type != "cpu":
        raise wrong(f"the device of {name}", tensor.device, "tensors must be on the CPU")
    if tensor.layout is not torch.strided:
        raise wrong(f"the layout of {name}", tensor.layout, "tensors must be strided")
    if tensor.dtype not in allowed:
        raise wrong(f"the dtype of {name}", tensor.dtype, " or ".join(str(t) for t in allowed) + " is expected")


_known = {}  # what was right before


def _look(tensor):
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu, tensor.layout) if tensor is not None else None


def _check(x, topk_ids, topk_weights, up, down, extras):
    """The Shape of a call, or an error that names the argument."""
    try:
        key = (_look(x), _look(topk_ids), _look(topk_weights), _look(up), _look(down))
        if extras is not PLAIN:
            key += (*map(_look, extras[:4]), *extras[4:])
        return _known[key]
    except (AttributeError, RuntimeError, KeyError):
        pass
    check_kinds(_check_kind, _FLOATS, _INDICES, x, topk_ids, topk_weights, up, down, extras)
    shape = shape_of(x, topk_ids, topk_weights, up, down, extras, _FLOATS[x.dtype])
    if len(_known) >= 4096:
        _known.clear()
    _known[key] = shape
    return shape


# ---------------------------------------------------------------- saved states, carried by a tensor

_saved = weakref.WeakValueDictionary()  # number -> _core.Saved
_numbers = itertools.count(1)


class _Number(ctypes.c_int64 * 1):
    """What lies in a token: the number of a saved state, which lives as long as the token's memory."""


def _token(saved):
    """Autograd keeps it as it keeps other saved tensors: checkpointing drops it, and with it the saved state."""
    number = _Number(next(_numbers))
    if saved is not None:
        number.saved = _saved[number[0]] = saved
    return torch.frombuffer(number, dtype=torch.int64)


# ---------------------------------------------------------------- forward, backward


_call = functools.partial(_core.call_of, _FLOATS, _INDICES)


def _contiguous(tensors):
    """Activations in any strides are copied."""
    return [t.contiguous() for t in tensors]


def _empty(like, layout):
    """Memory for a weight's gradient, in the weight's layout."""
    if layout == lib.NK and like.dim() == 3:
        return _empty_dense((like.shape[0], like.shape[2], like.shape[1]), like.dtype).transpose(1, 2)
    return _empty_dense(tuple(like.shape), like.dtype)


def _empty_dense(shape, dtype):
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _memory.SMALLEST:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_memory.buffer(size), dtype=dtype, count=count).view(shape)


def _forward(group, shape, x, topk_ids, topk_weights, up, down, extras):
    """y and what was saved for the backward, or None; activations are contiguous."""
    y = torch.empty_like(x)
    call = _call(x, topk_ids, topk_weights, up, down, extras)
    call.y = y.data_ptr()
    return y, group.forward(shape, call)


def _backward(group, shape, token, dy, x, topk_ids, topk_weights, up, down, extras, wanted):
    """Gradients of the nine tensors, None where `wanted` says so. Runs the forward again if its saved state has been
    used up (retain_graph) or was dropped (a hook copied the token)."""
    saved = _saved.pop(token.item(), None)
    if saved is None:
        saved = _forward(group, shape, x, topk_ids, topk_weights, up, down, extras)[1]
    layout = shape.layout
    made = [torch.empty_like(x) if wanted[0] else None, None, torch.empty_like(topk_weights) if wanted[2] else None]
    made += [_empty(t, layout) if w and t is not None else None
             for t, w in zip((up, down, *extras[:4]), wanted[3:])]
    grad = lib.Gradients(dy.data_ptr(), *map(address, made[:1] + made[2:]), dw_type=shape.dtype)
    call = _call(x, topk_ids, topk_weights, up, down, extras)  # FSDP, for one, moves weights in between
    call.saved, call.grad = saved.handle, grad
    saved.plan.run(lib.library.hmoe_backward, call)
    return made


# ---------------------------------------------------------------- autograd


class HyperMegaMoEDFunction(torch.autograd.Function):
    """y of one MoE layer, and its gradients with respect to all float tensors. Not differentiable twice."""

    @staticmethod
    def forward(ctx, group, shape, settings, *tensors):
        x, topk_ids, topk_weights, up, down, *rest = tensors
        extras = Extras(*rest, *settings)
        x, topk_ids, topk_weights = _contiguous((x, topk_ids, topk_weights))
        y, saved = _forward(group, shape, x, topk_ids, topk_weights, up, down, extras)
        ctx.save_for_backward(_token(saved), x, topk_ids, topk_weights, up, down, *rest)
        ctx.group, ctx.shape, ctx.settings = group, shape, settings
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        token, *tensors = ctx.saved_tensors
        if dy is None:  # y was not used; in a group the other ranks' may have been
            dy = torch.zeros_like(tensors[0])
        x, topk_ids, topk_weights, up, down, *rest = tensors
        extras = Extras(*rest, *ctx.settings)
        return (None, None, None, *_backward(ctx.group, ctx.shape, token, dy.contiguous(), x, topk_ids, topk_weights,
                                             up, down, extras, ctx.needs_input_grad[3:]))


def _recording(tensors):
    """Will a backward be wanted?"""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def local(x, topk_ids, topk_weights, up, down, extras=PLAIN, group=None):
    """One layer on plain tensors, over `group`, the ambient one, or alone."""
    group = group or ambient() or _core.local_group()
    try:
        shape = _check(x, topk_ids, topk_weights, up, down, extras)
    except (TypeError, ValueError) as error:
        group.fail(f"rank {group.rank}: {error}")
        raise
    tensors = (x, topk_ids, topk_weights, up, down, *extras[:4])
    if _recording(tensors):
        return HyperMegaMoEDFunction.apply(group, shape._replace(training=True), extras[4:], *tensors)
    return _forward(group, shape, *_contiguous(tensors[:3]), up, down, extras)[0]


# ---------------------------------------------------------------- torch.compile: the same as one operator

_OP = "hyper_parallel::mega_moe"


@torch.library.custom_op(_OP, mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _op(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: Tensor, down: Tensor, up_bias: Optional[Tensor],
        down_bias: Optional[Tensor], shared_up: Optional[Tensor], shared_down: Optional[Tensor], interleaved: bool,
        alpha: float, limit: float, offset: float, save: bool) -> Tuple[Tensor, Tensor]:
    extras = Extras(up_bias, down_bias, shared_up, shared_down, interleaved, (alpha, limit, offset))
    group = ambient() or _core.local_group()
    shape = _check(x, topk_ids, topk_weights, up, down, extras)._replace(training=save)
    y, saved = _forward(group, shape, *_contiguous((x, topk_ids, topk_weights)), up, down, extras)
    return y, _token(saved)


@_op.register_fake
def _(x, topk_ids, topk_weights, up, down, up_bias, down_bias, shared_up, shared_down, interleaved, alpha, limit,
      offset, save):
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((1,), dtype=torch.int64)


@torch.library.custom_op(_OP + "_backward", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _op_backward(token: Tensor, dy: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: Tensor,
                 down: Tensor, up_bias: Optional[Tensor], down_bias: Optional[Tensor], shared_up: Optional[Tensor],
                 shared_down: Optional[Tensor], interleaved: bool, alpha: float, limit: float, offset: float,
                 wanted: List[bool]) -> List[Tensor]:
    extras = Extras(up_bias, down_bias, shared_up, shared_down, interleaved, (alpha, limit, offset))
    shape = _check(x, topk_ids, topk_weights, up, down, extras)._replace(training=True)
    made = _backward(ambient() or _core.local_group(), shape, token, dy.contiguous(),
                     *_contiguous((x, topk_ids, topk_weights)), up, down, extras, wanted)
    return [t for t in made if t is not None]


@_op_backward.register_fake
def _(token, dy, x, topk_ids, topk_weights, up, down, up_bias, down_bias, shared_up, shared_down, interleaved, alpha,
      limit, offset, wanted):
    tensors = (x, topk_ids, topk_weights, up, down, up_bias, down_bias, shared_up, shared_down)
    return [torch.empty_like(t) for t, w in zip(tensors, wanted) if w and t is not None]


def _op_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1], *inputs[:9])
    ctx.settings = inputs[9:13]


def _op_grad(ctx, dy, _):
    token, *tensors = ctx.saved_tensors
    wanted = [need and i != 1 for i, need in enumerate(ctx.needs_input_grad[:9])]
    made = iter(torch.ops.hyper_parallel.mega_moe_backward(token, dy, *tensors, *ctx.settings, wanted))
    return (*(next(made) if need else None for need in wanted), None, None, None, None, None)


_op.register_autograd(_op_grad, setup_context=_op_setup)


def compiled(x, topk_ids, topk_weights, up, down, extras):
    """What torch.compile sees."""
    tensors = (x, topk_ids, topk_weights, up, down, *extras[:4])
    return torch.ops.hyper_parallel.mega_moe(*tensors, extras.interleaved, *extras.activation, _recording(tensors))[0]


# ---------------------------------------------------------------- process groups


def _all_gather(pg, mine):
    mine = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(pg))]
    torch.distributed.all_gather(every, mine, group=pg)
    return [one.numpy().tobytes() for one in every]


def group_of(pg):
    """The Group over a torch.distributed process group."""
    import torch.distributed as dist
    if dist.get_world_size(pg) > 1 and "gloo" not in dist.get_backend(pg):
        raise wrong("the backend of the process group", repr(dist.get_backend(pg)),
                    "'gloo' is needed: tensors are on the CPU")
    return _core.group_over(pg, dist.get_rank(pg), dist.get_world_size(pg), functools.partial(_all_gather, pg))


def entry(x, topk_ids, topk_weights, up, down, extras):
    if torch.compiler.is_compiling():
        return compiled(x, topk_ids, topk_weights, up, down, extras)
    for tensor in (x, topk_ids, topk_weights, up, down, extras.shared_up, extras.shared_down):
        if type(tensor).__name__ == "DTensor":
            from . import _dtensor
            return _dtensor.layer(x, topk_ids, topk_weights, up, down, extras)
    return local(x, topk_ids, topk_weights, up, down, extras)
