"""What may be passed: checked here for every front end, before any work. Errors name the argument."""

from typing import NamedTuple, Tuple

from . import _library as lib


class Shape(NamedTuple):
    """What a plan depends on."""

    hidden: int
    inner: int
    local: int  # experts on this rank
    topk: int
    dtype: int
    layout: int
    interleaved: bool
    activation: Tuple[float, float, float]  # alpha, limit, offset; see include/hmoe.h
    shared_experts: int
    shared_inner: int
    training: bool


def wrong(name, given, allowed):
    return ValueError(f"{name} is {given}: {allowed}")


def check_shape(name, tensor, letters, sizes):
    """letters: one a dimension; those in `sizes` are known, others are learnt."""
    shape = tuple(tensor.shape)
    known = ",".join(str(sizes.get(letter, letter)) for letter in letters)
    if len(shape) != len(letters):
        raise wrong(f"the shape of {name}", list(shape), f"[{','.join(letters)}] = [{known}] is expected")
    for letter, size in zip(letters, shape):
        if sizes.setdefault(letter, size) != size:
            raise wrong(f"the shape of {name}", list(shape), f"[{','.join(letters)}] = [{known}] is expected")


def _dense(shape, stride, order):
    """Is memory dense with the dimensions in this order, outermost first?"""
    step = 1
    for d in reversed(order):
        if shape[d] != 1 and stride[d] != step:
            return False
        step *= shape[d]
    return True


def weights_layout(weights):
    """The layout that all of [(name, tensor)] have in common; a weight is never copied.

    KN: as the shape says. NK: the transposed view of a contiguous tensor, w.transpose(1, 2).
    """
    common = {lib.KN, lib.NK}
    for name, w in weights:
        shape, stride = tuple(w.shape), w.stride()
        found = set()
        if _dense(shape, stride, (0, 1, 2)):
            found.add(lib.KN)
        if _dense(shape, stride, (0, 2, 1)):
            found.add(lib.NK)
        if not found:
            raise wrong(f"the strides of {name}", list(stride), f"shape {list(shape)} must be contiguous, or the"
                        " transpose(1, 2) of a contiguous tensor; weights are not copied silently")
        if not common & found:
            raise wrong(f"the layout of {name}", "transposed" if lib.NK in found else "contiguous",
                        f"all weights must have the layout of {weights[0][0]}")
        common &= found
    return min(common)


def check_kinds(check, floats, indices, x, topk_ids, topk_weights, up, down, extras):
    """check(name, tensor, dtypes) of every tensor that is there; weights have x's dtype."""
    check("x", x, floats)
    check("topk_ids", topk_ids, indices)
    check("topk_weights", topk_weights, floats)
    check("up_proj_weight", up, (x.dtype,))
    check("down_proj_weight", down, (x.dtype,))
    for name, tensor in (("up_bias", extras.up_bias), ("down_bias", extras.down_bias),
                         ("shared_up_proj_weight", extras.shared_up),
                         ("shared_down_proj_weight", extras.shared_down)):
        if tensor is not None:
            check(name, tensor, (x.dtype,))


def shape_of(x, topk_ids, topk_weights, up, down, extras, dtype):
    """A Shape with training False. `extras` is Extras; `dtype` the library's number of x's."""
    sizes = {}
    check_shape("x", x, "TH", sizes)
    check_shape("topk_ids", topk_ids, "TK", sizes)
    check_shape("topk_weights", topk_weights, "TK", sizes)
    check_shape("up_proj_weight", up, "LHC", sizes)
    if sizes["C"] % 2:
        raise wrong("the last size of up_proj_weight", sizes["C"], "it is 2I, gates and ups, and must be even")
    sizes["I"] = sizes["C"] // 2
    check_shape("down_proj_weight", down, "LIH", sizes)
    for letter, name in (("H", "x"), ("K", "topk_ids"), ("I", "up_proj_weight"), ("L", "up_proj_weight")):
        if sizes[letter] < 1:
            raise wrong(f"size {letter} of {name}", sizes[letter], "at least 1 is needed")
    weights = [("up_proj_weight", up), ("down_proj_weight", down)]
    if extras.up_bias is not None:
        check_shape("up_bias", extras.up_bias, "LC", sizes)
    if extras.down_bias is not None:
        check_shape("down_bias", extras.down_bias, "LH", sizes)
    if (extras.shared_up is None) != (extras.shared_down is None):
        missing, other = ("shared_up_proj_weight", "shared_down_proj_weight")[::1 if extras.shared_up is None else -1]
        raise wrong(missing, None, f"it is needed with {other}")
    if extras.shared_up is not None:
        check_shape("shared_up_proj_weight", extras.shared_up, "SHD", sizes)
        if sizes["D"] % 2 or sizes["D"] < 2 or sizes["S"] < 1:
            raise wrong("the shape of shared_up_proj_weight", list(extras.shared_up.shape),
                        "[S,H,2I'] with S and I' at least 1 is expected")
        sizes["J"] = sizes["D"] // 2
        check_shape("shared_down_proj_weight", extras.shared_down, "SJH", sizes)
        weights += [("shared_up_proj_weight", extras.shared_up), ("shared_down_proj_weight", extras.shared_down)]
    return Shape(sizes["H"], sizes["I"], sizes["L"], sizes["K"], dtype, weights_layout(weights), extras.interleaved,
                 extras.activation, sizes.get("S", 0), sizes.get("J", 0), False)


class Extras(NamedTuple):
    """What not every layer has: four tensors in the library's order, then settings."""

    up_bias: object = None
    down_bias: object = None
    shared_up: object = None
    shared_down: object = None
    interleaved: bool = False
    activation: Tuple[float, float, float] = (1.0, 0.0, 0.0)


PLAIN = Extras()
