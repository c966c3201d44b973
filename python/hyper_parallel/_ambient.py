"""The expert-parallel group that calls on plain tensors use."""

import contextlib
import contextvars

_current = contextvars.ContextVar("expert_parallel_group", default=None)


def ambient():
    """The Group set by expert_parallel_group, or None. Made anew, by all ranks, if it has failed."""
    remake = _current.get()
    return remake() if remake is not None else None


@contextlib.contextmanager
def expert_parallel_group(process_group):
    """Inside the `with`, hyper_mega_moe on plain tensors runs over this process group: a torch.distributed one (gloo),
    or the name of a MindSpore one.

    Each rank holds E/R experts, rank r those numbered r*E/R and on, and passes its own tokens. Every rank calls the
    same layers in the same order, forward and backward; a backward may come after the `with`. Entering and leaving
    costs nothing; the first call of a shape is collective over process_group.
    """
    if isinstance(process_group, str):
        from ._mindspore import group_of
    else:
        from ._torch import group_of
    token = _current.set(lambda: group_of(process_group))
    try:
        yield
    finally:
        _current.reset(token)
